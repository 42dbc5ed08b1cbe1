//! The product: checks of bounds, the choice of an instruction set, threads.

use rayon::prelude::*;

use super::{amx, avx2, avx512};
use super::{
    bf16,
    isa::{Isa, isa},
    kernel::{Product, Task},
    layout::Layout,
    packing::{BLOCK, Format, PANEL, PackedMatrix, Panels},
    portable, quants,
    rows::Rows,
};

/// Multiplications below which a second thread costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

impl Panels<'_> {
    /// `y = x Wᵀ` on this thread.
    pub(crate) fn multiply(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        product(self, x, (y, 0), 1);
    }
}

impl PackedMatrix {
    /// `y = x Wᵀ`, on all threads where that pays.
    pub(crate) fn multiply(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        self.multiply_into(x, y, 0);
    }

    /// The same into the columns of y from `first` on, and as many more as the last panel has room for.
    pub(crate) fn multiply_into(&self, x: &Rows, y: &mut Rows, first: usize) {
        // A single row costs about as much as four: its weights have to be read.
        let pays = self.inputs * self.outputs * (x.rows + 3) >= PARALLEL_WORK;
        let threads = if pays { rayon::current_num_threads() } else { 1 };
        product(&self.panels(), x, (y, first), threads);
    }
}

/// `y = x Wᵀ` on at most `threads` threads, into the columns of y from `first` on.
///
/// # Panics
/// If a line, an x or a y would lie outside its buffer.
fn product(w: &Panels<'_>, x: &Rows, (y, first): (&mut Rows, usize), threads: usize) {
    let (rows, panels) = (x.rows, w.outputs.div_ceil(PANEL));
    if rows == 0 || panels == 0 {
        return;
    }
    let depth = w.format.lines(w.inputs);
    assert!(w.format != Format::Q4K || w.inputs.is_multiple_of(2 * BLOCK), "blocks come in pairs");
    assert!(depth <= w.stride && w.lines.len() >= (panels - 1) * w.stride + depth);
    assert!(x.columns >= w.inputs && x.data.len() >= rows * x.stride);
    assert!(y.stride >= first + panels * PANEL && y.rows >= rows && y.data.len() >= rows * y.stride);
    let task = Task {
        w: w.lines.as_ptr().cast(),
        format: w.format,
        w_stride: w.stride * PANEL,
        inputs: w.inputs,
        x: x.data.as_ptr(),
        x_stride: x.stride,
        y: y.data[first..].as_mut_ptr(),
        y_stride: y.stride,
        rows,
    };
    let run = |task: &Task, product: Product| {
        let threads = threads.min(panels / amx::PANELS).max(1);
        if threads == 1 {
            // SAFETY: the assertions above bound every access of all panels, and the instruction set was detected.
            return unsafe { product(task, 0..panels) };
        }
        (0..threads).into_par_iter().for_each(|part| {
            let range = panels * part / threads..panels * (part + 1) / threads;
            // SAFETY: as above; the parts write to distinct panels.
            unsafe { product(task, range) }
        });
    };
    let (product, layout) = match w.format {
        Format::F32 => (widened_product(), None),
        Format::Bf16 => match paired_product(w.inputs, panels) {
            Some((product, layout)) => (product, Some(layout)),
            None => (widened_product(), None),
        },
        format => {
            let (product, layout) = bytes_product(format, rows);
            (product, Some(layout))
        }
    };
    match layout {
        None => run(&task, product),
        Some(layout) => layout.lay_out(x, task, |task| run(task, product)),
    }
}

/// Rows from which on tiles multiply bytes faster than AVX512-VNNI.
const TILED_ROWS: usize = 12;

/// The product of blocks for so many rows; all with 16 lanes give the same sums.
fn bytes_product(format: Format, rows: usize) -> (Product, Layout) {
    match isa() {
        Isa::Avx512 if rows >= TILED_ROWS && amx::amx() => (amx::amx_bytes, amx::BLOCK_TILES),
        Isa::Avx512 if is_x86_feature_detected!("avx512vnni") => (avx512::avx512_vnni, quants::blocks(format)),
        Isa::Avx512 | Isa::Avx2 => (avx2::avx2_bytes, quants::blocks(format)),
        Isa::Portable => (portable::portable_bytes, quants::blocks(format)),
    }
}

/// The product of f32 elements; weights in bf16 are widened.
fn widened_product() -> Product {
    match isa() {
        Isa::Avx512 => avx512::avx512,
        Isa::Avx2 => avx2::avx2,
        Isa::Portable => portable::portable,
    }
}

/// The product of pairs of bf16 for so many inputs and panels, if the processor multiplies those. It must not depend on
/// the rows: tiles round sums in another order.
pub(super) fn paired_product(inputs: usize, panels: usize) -> Option<(Product, Layout)> {
    if inputs.is_multiple_of(2 * amx::LINES) && panels >= amx::PANELS && amx::amx() {
        return Some((amx::amx_bf16, amx::PAIR_TILES));
    }
    let has = isa() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16");
    has.then_some((avx512::avx512_bf16, bf16::PAIRS))
}
