//! Rows of x rounded to pairs of bf16.

use std::cell::Cell;

use super::{isa::vectorized, rows::Rows};

/// Calls `work` with the rows of x in pairs of bf16, rounded to the nearest, ties to even; the earlier element in the
/// low half, and zero beside the last one of an odd number of `inputs`.
pub(super) fn with_pairs(x: &Rows, inputs: usize, work: impl FnOnce(&[u32])) {
    thread_local! {
        // A product a layer and step: its memory is kept.
        static PAIRS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    }
    let mut pairs = PAIRS.take();
    pairs.clear();
    vectorized(|| {
        for row in 0..x.rows {
            let (whole, rest) = x.row(row)[..inputs].as_chunks::<2>();
            pairs.extend(whole.iter().map(|&[low, high]| bf16(low) | bf16(high) << 16));
            pairs.extend(rest.iter().map(|&last| bf16(last)));
        }
    });
    work(&pairs);
    PAIRS.set(pairs);
}

/// The bits of the nearest bf16, of two the even one.
#[inline(always)]
pub(super) fn bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    // NaN stays one: its highest bit of the mantissa is set.
    match value.is_nan() {
        true => bits >> 16 | 0x40,
        false => (bits + 0x7fff + (bits >> 16 & 1)) >> 16,
    }
}
