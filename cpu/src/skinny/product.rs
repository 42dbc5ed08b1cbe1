//! The product: checks of bounds, the choice of an instruction set, threads.

use rayon::prelude::*;

use super::{
    format::{BLOCK, Format, PANEL},
    kernel::{Product, Task},
    layout::Layout,
    packing::{PackedMatrix, Panels},
    processor::{PANELS, bytes_product, paired_product, tiled_product, widened_product},
    rows::Rows,
};

/// Multiplications below which a second thread costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

/// Whether the processor multiplies tiles of pairs of bf16.
pub(crate) fn has_tiles() -> bool {
    tiled_product().is_some()
}

/// Outputs that a product by tiles has at least, or else 32.
pub(crate) const TILED_OUTPUTS: usize = PANELS * PANEL;

/// A product, and how rows of x lie for it where not as they are.
type Way = (Product, Option<Layout>);

impl Panels<'_> {
    /// `y = x Wᵀ` on this thread, of weights in f32 or bf16. x is taken as it is, and inputs one by one: instructions
    /// for pairs of bf16 would sum the nodes of a tree in another order than the text that they become.
    pub(crate) fn multiply(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        product(self, x, (y, 0), (widened_product(), None), 1);
    }

    /// `y = x Wᵀ` on this thread by tiles, of weights in bf16 and x rounded to it: inputs in
    /// [blocks](super::format::TILE_INPUTS), whose even and odd ones are summed apart. Outputs are at least
    /// [`TILED_OUTPUTS`], or 32.
    ///
    /// # Panics
    /// Unless the processor [has tiles](has_tiles).
    pub(crate) fn multiply_by_tiles(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        let (tiled, layout) = tiled_product().expect("the caller asked for tiles");
        product(self, x, (y, 0), (tiled, Some(layout)), 1);
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
        product(&self.panels(), x, (y, first), self.way(x.rows), threads);
    }

    /// The fastest way for so many rows of those that give the same sums.
    fn way(&self, rows: usize) -> Way {
        let Panels { format, inputs, outputs, .. } = self.panels();
        let (product, layout) = match format {
            Format::F32 => return (widened_product(), None),
            Format::Bf16 => match paired_product(inputs, outputs.div_ceil(PANEL)) {
                Some(paired) => paired,
                None => return (widened_product(), None),
            },
            format => bytes_product(format, rows),
        };
        (product, Some(layout))
    }
}

/// `y = x Wᵀ` on at most `threads` threads, into the columns of y from `first` on.
///
/// # Panics
/// If a line, an x or a y would lie outside its buffer.
fn product(w: &Panels<'_>, x: &Rows, (y, first): (&mut Rows, usize), (product, layout): Way, threads: usize) {
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
    let run = |task: &Task| {
        let threads = threads.min(panels / PANELS).max(1);
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
    match layout {
        None => run(&task),
        Some(layout) => layout.lay_out(x, task, run),
    }
}
