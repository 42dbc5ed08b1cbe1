//! Products of weights and rows of x in 8 bits.
//!
//! Blocks of 32 inputs have one scale for each output, and one for each row of x. The products of a block are summed as
//! integers, exactly; the sums of blocks are scaled and added as f32 in the order of the inputs.

use std::cell::Cell;

use super::{
    isa::vectorized,
    kernel::{Task, Tile},
    packing::{BLOCK, BLOCK_LINES, PANEL, quantise},
    rows::Rows,
};

/// Words of a block of x: 32 quants, their scale, and -128 times their sum.
pub(super) const X_BLOCK: usize = BLOCK / 4 + 2;

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

/// Calls `work` with the rows of x quantised: for each block its quants, four a word, the bits of their scale, and -128
/// times their sum. What is behind the last input is zero.
pub(super) fn with_quants(x: &Rows, inputs: usize, work: impl FnOnce(&[u32])) {
    thread_local! {
        // A product a layer and step: its memory is kept.
        static QUANTS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    }
    let mut quants = QUANTS.take();
    quants.clear();
    vectorized(|| {
        for row in 0..x.rows {
            x.row(row)[..inputs].chunks(BLOCK).for_each(|values| quants.extend(block(values)));
        }
    });
    work(&quants);
    QUANTS.set(quants);
}

#[inline(always)]
fn block(values: &[f32]) -> [u32; X_BLOCK] {
    let mut bytes = [0i8; BLOCK];
    let scale = quantise(values, |input, quant| bytes[input] = quant);
    let sum: i32 = bytes.iter().map(|quant| i32::from(*quant)).sum();
    let mut words = [0; X_BLOCK];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(bytes.map(i8::cast_unsigned));
    }
    words[X_BLOCK - 2] = scale.to_bits();
    words[X_BLOCK - 1] = (-128 * sum).cast_unsigned();
    words
}
