//! AVX2: 16 registers of 8 elements.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set and its caller's pointers, nothing else"
)]

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

use super::{
    format::PANEL,
    kernel::{Simd, Task, Tile, product, row_tiles, rows, stripe},
    quants::{Blocks, Bytes},
};

/// Its elements are f32.
pub(super) struct Avx2;

impl Simd for Avx2 {
    type Register = __m256;
    const LANES: usize = 8;
    // What the processor fetches by itself comes too late beside a few rows already: four took 1.2 times as long.
    const FEW: usize = 1;
    #[inline(always)]
    unsafe fn zero() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> __m256 {
        unsafe { _mm256_loadu_ps(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u32) -> (__m256, __m256) {
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            let high = _mm256_and_si256(pairs, _mm256_set1_epi32(-65536));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> __m256 {
        unsafe { _mm256_set1_ps(*from) }
    }
    #[inline(always)]
    unsafe fn fused(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m256) {
        unsafe { _mm256_storeu_ps(to, value) }
    }
    #[inline(always)]
    fn fetch(from: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
    }
}

product!(
    // 16 registers: 6 to 12 for sums, 1 for x, and for weights in bf16 twice as many as there are registers of outputs.
    // Twelve sums of 2 to 4 rows left no room for those of weights: they took 1.3 to 2.1 times as long.
    #[target_feature(enable = "avx2,fma")]
    avx2, Avx2, 6,
    1 => 6, 2 => 4, 3 => 3, 4 => 2, 5 => 2, 6 => 2
);

impl Bytes for Avx2 {
    type Register = __m256i;
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn start(_: *const f32) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn word(from: *const f32) -> __m256i {
        unsafe { _mm256_set1_epi32(*from.cast()) }
    }
    /// Multiplies |w| by x with w's sign: pairs of products are at most 2 · 128 · 127, which 16 bits hold.
    #[inline(always)]
    unsafe fn dot(sum: __m256i, weights: __m256i, x: *const f32) -> __m256i {
        unsafe {
            let x = _mm256_sign_epi8(Self::word(x), weights);
            let pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(weights, weights), x);
            held(add_pairs(sum, pairs))
        }
    }
    #[inline(always)]
    unsafe fn dot_unsigned(sum: __m256i, weights: __m256i, x: *const f32) -> __m256i {
        unsafe { held(add_pairs(sum, _mm256_maddubs_epi16(weights, Self::word(x)))) }
    }
    /// In 16 bits: of both halves of a lane, which have 16 products each, the lower one starts from -8 · Σ x. Its
    /// weights are then -8 to 7, and with -8 times the other inputs it comes to at most 32 · 8 · 127, which fits.
    #[inline(always)]
    unsafe fn dot_nibbles(sum: __m256i, weights: __m256i, x: *const f32) -> __m256i {
        unsafe { held(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, Self::word(x)))) }
    }
    #[inline(always)]
    unsafe fn of_nibbles(start: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(start, _mm256_set1_epi32(0xffff)) }
    }
    #[inline(always)]
    unsafe fn sum_of_nibbles(sum: __m256i) -> __m256i {
        unsafe { add_pairs(<Self as Bytes>::zero(), sum) }
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32>(value: __m256i, mask: u32) -> __m256i {
        unsafe {
            let shifted = _mm256_srl_epi32(value, _mm_cvtsi32_si128(SHIFT.cast_signed()));
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn times(integers: __m256i, factors: __m256i) -> __m256i {
        unsafe { _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_castsi256_ps(factors))) }
    }
    #[inline(always)]
    unsafe fn less(minima: __m256i, x: *const f32, total: __m256i) -> __m256i {
        unsafe {
            let (minima, total) = (_mm256_castsi256_ps(minima), _mm256_castsi256_ps(total));
            _mm256_castps_si256(_mm256_fnmadd_ps(minima, _mm256_set1_ps(*x), total))
        }
    }
    #[inline(always)]
    unsafe fn scaled(sum: __m256i, scales: __m256i, x: *const f32, total: __m256i) -> __m256i {
        unsafe {
            let scale = _mm256_mul_ps(_mm256_castsi256_ps(scales), _mm256_set1_ps(*x));
            let total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_castsi256_ps(total));
            _mm256_castps_si256(total)
        }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m256i) {
        unsafe { _mm256_storeu_si256(to.cast(), value) }
    }
    #[inline(always)]
    fn fetch(from: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
    }
}

/// Adds two neighbouring sums of 16 bits to each lane.
#[inline(always)]
unsafe fn add_pairs(sum: __m256i, pairs: __m256i) -> __m256i {
    unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))) }
}

/// The same value, which has to be in a register here. Otherwise the compiler adds integers in another order, row by
/// row over all lines of a block, whose weights and x are in memory meanwhile: two rows took 1.5 times as long.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn held(mut value: __m256i) -> __m256i {
    // Not `pure`, so that it stays behind what is held before: three rows of 4 bits took 1.8 times as long.
    unsafe { asm!("/* {0} */", inout(ymm_reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Rows of a tile of bytes.
pub(super) const BYTES_ROWS: usize = 8;

product!(
    // 16 registers: 4 to 12 for sums of a block, 1 or 2 for weights, 3 for products; sums of all are in memory.
    #[target_feature(enable = "avx2,fma")]
    avx2_bytes, Blocks<Avx2>, BYTES_ROWS,
    1 => 4, 2 => 2, 3 => 2, 4 => 2, 5 => 2, 6 => 2, 7 => 1, 8 => 1
);
