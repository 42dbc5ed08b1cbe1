//! AVX2: 16 registers of 8 elements.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set and its caller's pointers, nothing else"
)]

use std::{arch::x86_64::*, ops::Range};

use super::{
    kernel::{STRIPE, Simd, Task, product, rows},
    packing::PANEL,
};

/// Its elements are f32.
pub(super) struct Avx2;

impl Simd for Avx2 {
    type Register = __m256;
    const LANES: usize = 8;
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
}

product!(
    // 16 registers: 12 for sums, 2 or 3 for weights, 1 for x.
    #[target_feature(enable = "avx2,fma")]
    avx2, Avx2, 6,
    1 => 8, 2 => 6, 3 => 4, 4 => 3, 5 => 2, 6 => 2
);
