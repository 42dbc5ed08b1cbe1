//! The product for every processor.

use std::ops::Range;

use super::{
    format::PANEL,
    kernel::{Simd, Task, Tile, product, row_tiles, rows, stripe},
    quants::{Blocks, Bytes},
};

/// Whether a · b + c is rounded once: where there is no such instruction, `mul_add` is a call.
pub(super) const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Arrays of four, which every compiler knows to put into a register.
struct Arrays;

impl Simd for Arrays {
    type Register = [f32; 4];
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> [f32; 4] {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> [f32; 4] {
        // SAFETY: the caller's.
        unsafe { from.cast::<[u32; 4]>().read_unaligned() }.map(f32::from_bits)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u32) -> ([f32; 4], [f32; 4]) {
        // SAFETY: the caller's.
        let pairs = unsafe { from.cast::<[u32; 4]>().read_unaligned() };
        (pairs.map(|pair| f32::from_bits(pair << 16)), pairs.map(|pair| f32::from_bits(pair & 0xffff_0000)))
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller's.
        [unsafe { *from }; 4]
    }
    #[inline(always)]
    unsafe fn fused(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|lane| fused(a[lane], b[lane], c[lane]))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; 4]) {
        // SAFETY: the caller's.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(value) }
    }
}

/// Rows of a tile.
pub(super) const ROWS: usize = 4;

product!(portable, Arrays, ROWS, 1 => 4, 2 => 4, 3 => 3, 4 => 2);

impl Bytes for Arrays {
    type Register = [u32; 4];
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> [u32; 4] {
        [0; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const u32) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { from.cast::<[u32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn start(_: *const f32) -> [u32; 4] {
        [0; 4]
    }
    #[inline(always)]
    unsafe fn word(from: *const f32) -> [u32; 4] {
        // SAFETY: the caller's.
        [unsafe { *from }.to_bits(); 4]
    }
    #[inline(always)]
    unsafe fn dot(sum: [u32; 4], weights: [u32; 4], x: *const f32) -> [u32; 4] {
        let bytes = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
        // SAFETY: the caller's.
        let x = bytes(unsafe { *x }.to_bits());
        std::array::from_fn(|lane| {
            let products = bytes(weights[lane]).into_iter().zip(x).map(|(weight, x)| weight * x);
            sum[lane].wrapping_add(products.sum::<i32>().cast_unsigned())
        })
    }
    #[inline(always)]
    unsafe fn dot_unsigned(sum: [u32; 4], weights: [u32; 4], x: *const f32) -> [u32; 4] {
        // SAFETY: the caller's; up to 127 both readings of a byte are the same.
        unsafe { Self::dot(sum, weights, x) }
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32>(value: [u32; 4], mask: u32) -> [u32; 4] {
        value.map(|value| value >> SHIFT & mask)
    }
    #[inline(always)]
    unsafe fn times(integers: [u32; 4], factors: [u32; 4]) -> [u32; 4] {
        std::array::from_fn(|lane| (integers[lane].cast_signed() as f32 * f32::from_bits(factors[lane])).to_bits())
    }
    #[inline(always)]
    unsafe fn less(minima: [u32; 4], x: *const f32, total: [u32; 4]) -> [u32; 4] {
        // SAFETY: the caller's.
        let x = unsafe { *x };
        let less = |lane: usize| fused(-f32::from_bits(minima[lane]), x, f32::from_bits(total[lane]));
        std::array::from_fn(|lane| less(lane).to_bits())
    }
    #[inline(always)]
    unsafe fn scaled(sum: [u32; 4], scales: [u32; 4], x: *const f32, total: [u32; 4]) -> [u32; 4] {
        // SAFETY: the caller's.
        let x = unsafe { *x };
        let scale = |lane: usize| f32::from_bits(scales[lane]) * x;
        let scaled = |lane: usize| fused(sum[lane].cast_signed() as f32, scale(lane), f32::from_bits(total[lane]));
        std::array::from_fn(|lane| scaled(lane).to_bits())
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { to.cast::<[u32; 4]>().write_unaligned(value) }
    }
}

product!(portable_bytes, Blocks<Arrays>, ROWS, 1 => 4, 2 => 4, 3 => 3, 4 => 2);
