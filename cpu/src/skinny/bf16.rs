//! Rows of x rounded to pairs of bf16.

use std::ops::Range;

use super::{
    format::{PANEL, bf16},
    layout::{Layout, tiles},
    rows::Rows,
    vectorized,
};

/// Pairs of bf16 in tiles of at most `MOST` rows, rounded to the nearest, ties to even; the earlier element in the low
/// half, and zero beside the last one of an odd number.
pub(super) const fn pairs<const MOST: usize>() -> Layout {
    Layout { words: |inputs| inputs.div_ceil(2), tiles: tiles::<MOST>, write: write_tile }
}

vectorized! {
    fn write_tile = round_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]);
}

#[inline(always)]
fn round_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]) {
    let count = rows.len();
    // As many inputs of all rows before the next: their words are written to the same lines of the cache.
    for (part, to) in to.chunks_mut(PANEL * count).enumerate() {
        for (place, row) in rows.clone().enumerate() {
            let values = &x.row(row)[..inputs][part * 2 * PANEL..];
            let mut pairs = [0; PANEL];
            match values.first_chunk::<{ 2 * PANEL }>() {
                Some(whole) => write_pairs(whole, &mut pairs),
                None => write_pairs(values, &mut pairs),
            }
            to[place..].iter_mut().step_by(count).zip(pairs).for_each(|(to, pair)| *to = pair);
        }
    }
}

#[inline(always)]
pub(super) fn write_pairs(values: &[f32], to: &mut [u32]) {
    let (whole, rest) = values.as_chunks::<2>();
    to.iter_mut().zip(whole).for_each(|(to, &[low, high])| *to = bf16(low) | bf16(high) << 16);
    to[whole.len()..].iter_mut().zip(rest).for_each(|(to, &last)| *to = bf16(last));
}
