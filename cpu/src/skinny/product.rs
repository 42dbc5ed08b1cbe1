//! The product: checks of bounds, the choice of an instruction set, threads.

use rayon::prelude::*;

use super::{
    format::{BLOCK, Format, Line, PANEL},
    kernel::{Product, Task},
    layout::Layout,
    packing::{PackedMatrix, Panels},
    processor::{PANELS, bytes_product, paired_product, tiled_product, untiled_product, widened_product},
    rows::Rows,
};

/// Multiplications below which a second thread costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

/// In which order a product of panels sums its inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// One by one, in f32, whatever the panels hold. x is taken as it is.
    #[default]
    Single,
    /// By pairs, of weights in bf16 and x rounded to it.
    Pairs,
    /// By [tiles](super::format::TILE_INPUTS) of pairs, whose even and odd inputs are summed apart. Outputs are at
    /// least [`TILED_OUTPUTS`], or 32.
    Tiles,
}

impl Order {
    /// Whether the processor has a product in this order.
    pub(crate) fn is_there(self) -> bool {
        match self {
            Self::Single => true,
            Self::Pairs => untiled_product().is_some(),
            Self::Tiles => tiled_product().is_some(),
        }
    }
}

/// Outputs that a product by tiles has at least, or else 32.
pub(crate) const TILED_OUTPUTS: usize = PANELS * PANEL;

/// A product, and how rows of x lie for it where not as they are.
type Way = (Product, Option<Layout>);

impl Panels<'_> {
    /// `y = x Wᵀ` on this thread, of weights in f32 or bf16, of the latter in any order.
    ///
    /// # Panics
    /// Unless the processor [has a product](Order::is_there) in that order.
    pub(crate) fn multiply(&self, x: &Rows, y: &mut Rows, order: Order) {
        y.reshape(x.rows, self.outputs);
        let way = match order {
            Order::Single => Some((widened_product(), None)),
            Order::Pairs => untiled_product().map(|(product, layout, _)| (product, Some(layout))),
            Order::Tiles => tiled_product().map(|(product, layout)| (product, Some(layout))),
        };
        product(self, x, (y, 0), way.expect("the caller asked for the order"), 1);
    }
}

/// Goes on with the sums of a row [by pairs](Order::Pairs), over panels of `depth` lines in bf16 whose inputs lie
/// wherever `inputs` has them; x, in their order, is rounded to bf16.
///
/// # Panics
/// Unless the processor has the order, and if an input would lie outside its panel.
pub(crate) fn add_pairs(w: &[Line], depth: usize, (inputs, x): (&[usize], &[f32]), sums: &mut [f32]) {
    let (_, _, add) = untiled_product().expect("the caller asked for the order");
    // SAFETY: the instruction set was detected.
    unsafe { add(w, depth, (inputs, x), sums) }
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
