//! The product for every processor.

use std::ops::Range;

use super::{
    kernel::{STRIPE, Simd, Task, product, rows},
    packing::PANEL,
};

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
        // Where there is no such instruction, `mul_add` is a call.
        let fused = cfg!(target_feature = "fma");
        std::array::from_fn(|lane| match fused {
            true => a[lane].mul_add(b[lane], c[lane]),
            false => a[lane] * b[lane] + c[lane],
        })
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; 4]) {
        // SAFETY: the caller's.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(value) }
    }
}

product!(portable, Arrays, 4, 1 => 4, 2 => 4, 3 => 3, 4 => 2);
