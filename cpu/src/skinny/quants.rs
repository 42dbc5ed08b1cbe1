//! Products of weights and rows of x in 8 bits.
//!
//! Blocks of 32 inputs have one scale for each output, and one for each row of x. The products of a block are summed as
//! integers, exactly; the sums of blocks are scaled and added as f32 in the order of the inputs.

use super::{
    kernel::{Task, Tile},
    layout::Layout,
    packing::{BLOCK, BLOCK_LINES, PANEL, quantise},
};

/// Words of a block of x: 32 quants, their scale, and -128 times their sum.
pub(super) const X_BLOCK: usize = BLOCK / 4 + 2;

/// Blocks of weights that are fetched ahead: what the processor fetches by itself comes too late beside eight rows.
const AHEAD: usize = 4;

/// The registers of an instruction set that multiplies bytes.
pub(super) trait Bytes {
    type Register: Copy;
    const LANES: usize;
    unsafe fn zero() -> Self::Register;
    unsafe fn load(from: *const u32) -> Self::Register;
    /// What the sum of a block starts from, given its row's -128 · Σ x: that, where weights are multiplied as unsigned.
    unsafe fn start(offset: *const f32) -> Self::Register;
    /// Adds the products of four weights of each lane and the four quants at `x`.
    unsafe fn dot(sum: Self::Register, weights: Self::Register, x: *const f32) -> Self::Register;
    /// `total` + the block's sum · scales · the scale at `x`.
    unsafe fn scaled(
        sum: Self::Register,
        scales: Self::Register,
        x: *const f32,
        total: Self::Register,
    ) -> Self::Register;
    unsafe fn store(to: *mut f32, value: Self::Register);
    /// Fetches the registers of a block into the cache. No address is wrong.
    fn fetch(_: *const u32) {}
}

/// Tiles of blocks.
pub(super) struct Blocks<B>(std::marker::PhantomData<B>);

impl<B: Bytes> Tile for Blocks<B> {
    const LANES: usize = B::LANES;
    #[inline(always)]
    unsafe fn tile<const V: usize, const T: usize>(task: &Task, first: usize, (x, y): (*const f32, *mut f32)) {
        let registers = PANEL / B::LANES;
        // SAFETY: the bounds of the task; `first + V` registers of outputs exist.
        unsafe {
            let mut totals = [[B::zero(); V]; T];
            let w: [*const u32; V] = std::array::from_fn(|v| {
                let (panel, part) = ((first + v) / registers, (first + v) % registers);
                task.w.add(panel * task.w_stride + part * B::LANES)
            });
            let x: [*const f32; T] = std::array::from_fn(|t| x.add(t * task.x_stride));
            for block in 0..task.inputs.div_ceil(BLOCK) {
                let w = w.map(|w| w.add(block * BLOCK_LINES * PANEL));
                let x = x.map(|x| x.add(block * X_BLOCK));
                let mut sums = x.map(|x| [B::start(x.add(X_BLOCK - 1)); V]);
                for line in 0..BLOCK / 4 {
                    let weights = w.map(|w| B::load(w.add(line * PANEL)));
                    for (sums, x) in sums.iter_mut().zip(x) {
                        for (sum, weights) in sums.iter_mut().zip(weights) {
                            *sum = B::dot(*sum, weights, x.add(line));
                        }
                    }
                }
                let scales = w.map(|w| B::load(w.add(BLOCK / 4 * PANEL)));
                w.iter().for_each(|w| B::fetch(w.wrapping_add(AHEAD * BLOCK_LINES * PANEL)));
                for ((totals, sums), x) in totals.iter_mut().zip(sums).zip(x) {
                    for ((total, sum), scales) in totals.iter_mut().zip(sums).zip(scales) {
                        *total = B::scaled(sum, scales, x.add(X_BLOCK - 2), *total);
                    }
                }
            }
            for (t, totals) in totals.iter().enumerate() {
                for (v, total) in totals.iter().enumerate() {
                    B::store(y.add(t * task.y_stride + (first + v) * B::LANES), *total);
                }
            }
        }
    }
}

/// Rows of x quantised: for each block its quants, four a word, the bits of their scale, and -128 times their sum. What
/// is behind the last input is zero.
pub(super) const BLOCKS: Layout = Layout {
    words: |inputs| inputs.div_ceil(BLOCK) * X_BLOCK,
    write: |x, inputs, to| {
        let rows = to.chunks_exact_mut(inputs.div_ceil(BLOCK) * X_BLOCK).enumerate();
        for (row, to) in rows {
            let blocks = to.as_chunks_mut::<X_BLOCK>().0.iter_mut();
            for (values, [words @ .., scale, offset]) in x.row(row)[..inputs].chunks(BLOCK).zip(blocks) {
                let sum: i32;
                (*scale, sum) = write_block(values, words);
                *offset = (-128 * sum).cast_unsigned();
            }
        }
    },
};

/// Writes the quants of a block, four a word, and returns the bits of their scale and their sum.
#[inline(always)]
pub(super) fn write_block(values: &[f32], to: &mut [u32; BLOCK / 4]) -> (u32, i32) {
    let mut padded = [0.0; BLOCK];
    let padded = match values.as_array() {
        Some(whole) => whole,
        None => {
            padded[..values.len()].copy_from_slice(values);
            &padded
        }
    };
    let (scale, quants) = quantise(padded);
    for (word, quants) in to.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(quants.map(i8::cast_unsigned));
    }
    (scale.to_bits(), quants.iter().map(|quant| i32::from(*quant)).sum())
}
