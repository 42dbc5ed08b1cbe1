//! NEON: 32 registers of 4 elements.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set and its caller's pointers, nothing else"
)]

use std::{
    arch::{aarch64::*, asm},
    ops::Range,
};

use super::{
    format::PANEL,
    kernel::{Simd, Task, Tile, product, row_tiles, rows, stripe},
    quants::{Blocks, Bytes},
};

/// Bytes are multiplied four at a time with `DOT`, the extension of ARMv8.2; their sums are the same without.
pub(super) struct Neon<const DOT: bool>;

impl<const DOT: bool> Simd for Neon<DOT> {
    type Register = float32x4_t;
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> float32x4_t {
        unsafe { vld1q_f32(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u32) -> (float32x4_t, float32x4_t) {
        unsafe {
            let pairs = vld1q_u32(from);
            let high = vandq_u32(pairs, vdupq_n_u32(0xffff_0000));
            (vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)), vreinterpretq_f32_u32(high))
        }
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> float32x4_t {
        unsafe { vld1q_dup_f32(from) }
    }
    #[inline(always)]
    unsafe fn fused(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: float32x4_t) {
        unsafe { vst1q_f32(to, value) }
    }
}

product!(
    // 32 registers: 8 to 24 for sums, 4 or 8 for weights, 1 for x. A panel is four registers wide, so these widths read
    // whole lines of the cache. A third row beside 8 would take 33, a seventh beside 4 too.
    #[target_feature(enable = "neon")]
    neon, Neon<false>, 6,
    1 => 8, 2 => 8, 3 => 4, 4 => 4, 5 => 4, 6 => 4
);

impl<const DOT: bool> Bytes for Neon<DOT> {
    type Register = uint32x4_t;
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> uint32x4_t {
        unsafe { vdupq_n_u32(0) }
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> uint32x4_t {
        unsafe { vld1q_u32(from) }
    }
    #[inline(always)]
    unsafe fn start(_: *const f32) -> uint32x4_t {
        unsafe { vdupq_n_u32(0) }
    }
    #[inline(always)]
    unsafe fn word(from: *const f32) -> uint32x4_t {
        unsafe { vld1q_dup_u32(from.cast()) }
    }
    #[inline(always)]
    unsafe fn dot(sum: uint32x4_t, weights: uint32x4_t, x: *const f32) -> uint32x4_t {
        unsafe {
            let (weights, x) = (vreinterpretq_s8_u32(weights), vreinterpretq_s8_u32(Self::word(x)));
            let sum = vreinterpretq_s32_u32(sum);
            vreinterpretq_u32_s32(if DOT { dot(sum, weights, x) } else { add_products(sum, weights, x) })
        }
    }
    #[inline(always)]
    unsafe fn dot_unsigned(sum: uint32x4_t, weights: uint32x4_t, x: *const f32) -> uint32x4_t {
        // Up to 127 both readings of a byte are the same.
        unsafe { Self::dot(sum, weights, x) }
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32>(value: uint32x4_t, mask: u32) -> uint32x4_t {
        unsafe { vandq_u32(vshlq_u32(value, vdupq_n_s32(-SHIFT.cast_signed())), vdupq_n_u32(mask)) }
    }
    #[inline(always)]
    unsafe fn times(integers: uint32x4_t, factors: uint32x4_t) -> uint32x4_t {
        unsafe { vreinterpretq_u32_f32(vmulq_f32(from_integers(integers), vreinterpretq_f32_u32(factors))) }
    }
    #[inline(always)]
    unsafe fn less(minima: uint32x4_t, x: *const f32, total: uint32x4_t) -> uint32x4_t {
        unsafe {
            let (minima, total) = (vreinterpretq_f32_u32(minima), vreinterpretq_f32_u32(total));
            vreinterpretq_u32_f32(vfmsq_f32(total, minima, vld1q_dup_f32(x)))
        }
    }
    #[inline(always)]
    unsafe fn scaled(sum: uint32x4_t, scales: uint32x4_t, x: *const f32, total: uint32x4_t) -> uint32x4_t {
        unsafe {
            let scale = vmulq_f32(vreinterpretq_f32_u32(scales), vld1q_dup_f32(x));
            vreinterpretq_u32_f32(vfmaq_f32(vreinterpretq_f32_u32(total), from_integers(sum), scale))
        }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: uint32x4_t) {
        unsafe { vst1q_u32(to.cast(), value) }
    }
}

#[inline(always)]
unsafe fn from_integers(integers: uint32x4_t) -> float32x4_t {
    unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(integers)) }
}

/// Adds the products of four bytes to each lane. Its intrinsic is not stable yet.
#[inline(always)]
unsafe fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    unsafe {
        asm!(
            // Without optimisation there is a copy of this function outside of the product that may use `sdot`.
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// The same: pairs of products are at most 2 · 128 · 127, which 16 bits hold.
#[inline(always)]
unsafe fn add_products(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    unsafe {
        let (low, high) = (vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
        vpadalq_s16(sum, vpaddq_s16(low, high))
    }
}

/// Rows of a tile of bytes.
pub(super) const BYTES_ROWS: usize = 4;

product!(
    // 32 registers: twice 8 or 12 for sums of blocks and of all, 2 to 8 for weights, 1 for x.
    #[target_feature(enable = "neon,dotprod")]
    neon_dot, Blocks<Neon<true>>, BYTES_ROWS,
    1 => 8, 2 => 4, 3 => 4, 4 => 2
);

product!(
    // The same, and 2 for products.
    #[target_feature(enable = "neon")]
    neon_bytes, Blocks<Neon<false>>, BYTES_ROWS,
    1 => 8, 2 => 4, 3 => 4, 4 => 2
);
