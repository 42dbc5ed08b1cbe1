//! Rows of x rounded to pairs of bf16.

use super::layout::Layout;

/// Pairs of bf16, rounded to the nearest, ties to even; the earlier element in the low half, and zero beside the last
/// one of an odd number.
pub(super) const PAIRS: Layout = Layout {
    words: |inputs| inputs.div_ceil(2),
    write: |x, inputs, to| {
        let rows = to.chunks_exact_mut(inputs.div_ceil(2)).enumerate();
        rows.for_each(|(row, to)| write_pairs(&x.row(row)[..inputs], to));
    },
};

#[inline(always)]
pub(super) fn write_pairs(values: &[f32], to: &mut [u32]) {
    let (whole, rest) = values.as_chunks::<2>();
    to.iter_mut().zip(whole).for_each(|(to, &[low, high])| *to = bf16(low) | bf16(high) << 16);
    to[whole.len()..].iter_mut().zip(rest).for_each(|(to, &last)| *to = bf16(last));
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
