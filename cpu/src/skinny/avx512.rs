//! AVX-512: 32 registers of 16 elements.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set and its caller's pointers, nothing else"
)]

use std::{arch::x86_64::*, mem::transmute, ops::Range};

use super::{
    bf16::write_pairs,
    format::{Line, PANEL},
    kernel::{Simd, Task, Tile, product, row_tiles, rows, stripe},
    quants::{Blocks, Bytes},
};

/// Its elements are f32, or pairs of bf16, which AVX512-BF16 multiplies.
pub(super) struct Avx512<const PAIRS: bool>;

impl<const PAIRS: bool> Simd for Avx512<PAIRS> {
    type Register = __m512;
    const LANES: usize = 16;
    const PAIRS: bool = PAIRS;
    #[inline(always)]
    unsafe fn zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> __m512 {
        unsafe { _mm512_loadu_ps(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u32) -> (__m512, __m512) {
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(-65536));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> __m512 {
        unsafe { _mm512_set1_ps(*from) }
    }
    #[inline(always)]
    unsafe fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
        let pairs = |register| unsafe { transmute::<__m512, __m512bh>(register) };
        match PAIRS {
            true => unsafe { _mm512_dpbf16_ps(c, pairs(a), pairs(b)) },
            false => unsafe { _mm512_fmadd_ps(a, b, c) },
        }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    fn fetch(from: *const u32) {
        if PAIRS {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
        }
    }
}

/// Rows of a tile of pairs or of bytes: weights are read from memory once for so many.
pub(super) const ROWS: usize = 16;

product!(
    // 32 registers: 24 for sums, 3 to 6 for weights.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    avx512, Avx512<false>, 8,
    1 => 6, 2 => 6, 3 => 6, 4 => 6, 5 => 4, 6 => 4, 7 => 3, 8 => 3
);

product!(
    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    avx512_bf16, Avx512<true>, ROWS,
    1 => 6, 2 => 6, 3 => 6, 4 => 6, 5 => 4, 6 => 4, 7 => 3, 8 => 3,
    9 => 2, 10 => 2, 11 => 2, 12 => 2, 13 => 2, 14 => 2, 15 => 1, 16 => 1
);

/// Goes on with the sums of a row's panels, of `depth` lines each, by pairs of inputs that lie wherever `inputs` has
/// them: as [`avx512_bf16`] would if these were the next of a panel.
///
/// # Safety
/// The processor has AVX512-BF16. Bounds are checked.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn add_pairs(w: &[Line], depth: usize, (inputs, x): (&[usize], &[f32]), sums: &mut [f32]) {
    let mut pairs = vec![0; x.len().div_ceil(2)];
    write_pairs(x, &mut pairs);
    let half = |panel: &[Line], input: usize| unsafe {
        let pairs = _mm512_loadu_si512(panel[input / 2].0.as_ptr().cast());
        if input % 2 == 1 { _mm512_srli_epi32::<16>(pairs) } else { pairs }
    };
    for (panel, sums) in w.chunks_exact(depth).zip(sums.as_chunks_mut::<PANEL>().0) {
        let mut sum = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
        for (pair, x) in inputs.chunks(2).zip(&pairs) {
            let low = _mm512_and_si512(half(panel, pair[0]), _mm512_set1_epi32(0xffff));
            let high = pair.get(1).map_or(_mm512_setzero_si512(), |&input| half(panel, input));
            let weights = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
            let x = _mm512_set1_epi32(x.cast_signed());
            sum = unsafe { Avx512::<true>::fused(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sum) };
        }
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum) };
    }
}

/// AVX512-VNNI multiplies unsigned by signed bytes: weights are shifted by 128, and sums start at what that adds.
pub(super) struct Vnni;

impl Bytes for Vnni {
    type Register = __m512i;
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn start(offset: *const f32) -> __m512i {
        unsafe { Self::word(offset) }
    }
    #[inline(always)]
    unsafe fn word(from: *const f32) -> __m512i {
        unsafe { _mm512_set1_epi32(*from.cast()) }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, weights: __m512i, x: *const f32) -> __m512i {
        unsafe {
            let unsigned = _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
            Self::dot_unsigned(sum, unsigned, x)
        }
    }
    #[inline(always)]
    unsafe fn dot_unsigned(sum: __m512i, weights: __m512i, x: *const f32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, weights, Self::word(x)) }
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32>(value: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi32::<SHIFT>(value), _mm512_set1_epi32(mask.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn times(integers: __m512i, factors: __m512i) -> __m512i {
        unsafe { _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_castsi512_ps(factors))) }
    }
    #[inline(always)]
    unsafe fn less(minima: __m512i, x: *const f32, total: __m512i) -> __m512i {
        unsafe {
            let (minima, total) = (_mm512_castsi512_ps(minima), _mm512_castsi512_ps(total));
            _mm512_castps_si512(_mm512_fnmadd_ps(minima, _mm512_set1_ps(*x), total))
        }
    }
    #[inline(always)]
    unsafe fn scaled(sum: __m512i, scales: __m512i, x: *const f32, total: __m512i) -> __m512i {
        unsafe {
            let scale = _mm512_mul_ps(_mm512_castsi512_ps(scales), _mm512_set1_ps(*x));
            let total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_castsi512_ps(total));
            _mm512_castps_si512(total)
        }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512i) {
        unsafe { _mm512_storeu_si512(to.cast(), value) }
    }
    #[inline(always)]
    fn fetch(from: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
    }
}

product!(
    // 32 registers: 6 to 16 each for sums of blocks and of all, 1 to 6 for weights.
    #[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    avx512_vnni, Blocks<Vnni>, ROWS,
    1 => 6, 2 => 4, 3 => 4, 4 => 3, 5 => 2, 6 => 2, 7 => 2, 8 => 1,
    9 => 1, 10 => 1, 11 => 1, 12 => 1, 13 => 1, 14 => 1, 15 => 1, 16 => 1
);
