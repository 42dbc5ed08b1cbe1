//! The loops of the product, over the registers of any instruction set.

use std::ops::Range;

use super::format::{Format, Line, PANEL};

/// Bytes of weights that one pass over the rows takes: they stay in the second-level cache from one tile of rows to the
/// next.
const STRIPE_BYTES: usize = 3 << 17;

/// A product over some panels, for one instruction set.
pub(super) type Product = unsafe fn(&Task, Range<usize>);

/// Goes on with the sums of a product by pairs of bf16: the weights, the lines of a panel, where the inputs are and x,
/// and the sums of all panels.
pub(super) type AddPairs = unsafe fn(&[Line], usize, (&[usize], &[f32]), &mut [f32]);

/// A product whose bounds are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub(super) w: *const u32,
    pub(super) format: Format,
    /// Weights from one panel to the next.
    pub(super) w_stride: usize,
    pub(super) inputs: usize,
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    pub(super) y: *mut f32,
    pub(super) y_stride: usize,
    pub(super) rows: usize,
}

// SAFETY: its pointers come from slices that outlive the product, and threads write to distinct panels.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

impl Task {
    /// The same product over rows of x that are rearranged: so many words a row.
    pub(super) fn over(self, x: &[u32], x_stride: usize) -> Self {
        assert!(x.len() >= self.rows * x_stride);
        Self { x: x.as_ptr().cast(), x_stride, ..self }
    }
}

/// The registers of an instruction set.
pub(super) trait Simd {
    type Register: Copy;
    const LANES: usize;
    /// Whether an element of x is a pair of bf16, as a word of the weights is. Then rows of x lie in tiles.
    const PAIRS: bool = false;
    /// Rows of a tile up to which the processor fetches weights by itself, and as well.
    const FEW: usize = 8;
    unsafe fn zero() -> Self::Register;
    unsafe fn load(from: *const u32) -> Self::Register;
    /// The low and the high halves of pairs of bf16.
    unsafe fn load_bf16(from: *const u32) -> (Self::Register, Self::Register);
    unsafe fn splat(from: *const f32) -> Self::Register;
    /// a · b + c; of pairs the sum of both products.
    unsafe fn fused(a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register;
    unsafe fn store(to: *mut f32, value: Self::Register);
    /// Fetches a line of weights into the cache. No address is wrong.
    fn fetch(_: *const u32) {}
}

/// Words of weights that are fetched ahead: 4 kB.
pub(super) const AHEAD: usize = 1024;

/// How a tile of the product is computed.
pub(super) trait Tile {
    const LANES: usize;
    /// The sums of `V` registers of outputs from register `first` on, for `T` rows of x.
    unsafe fn tile<const V: usize, const T: usize>(task: &Task, first: usize, xy: (*const f32, *mut f32));
}

impl<S: Simd> Tile for S {
    const LANES: usize = S::LANES;
    #[inline(always)]
    unsafe fn tile<const V: usize, const T: usize>(task: &Task, first: usize, xy: (*const f32, *mut f32)) {
        // SAFETY: the caller's.
        unsafe { tile::<S, V, T>(task, first, xy) }
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const V: usize, const T: usize>(task: &Task, first: usize, (x, y): (*const f32, *mut f32)) {
    let registers = PANEL / S::LANES;
    // SAFETY: the bounds of the task; `first + V` registers of outputs exist.
    unsafe {
        let mut sums = [[S::zero(); V]; T];
        let w: [*const u32; V] = std::array::from_fn(|v| {
            let (panel, part) = ((first + v) / registers, (first + v) % registers);
            task.w.add(panel * task.w_stride + part * S::LANES)
        });
        // Rows in tiles have one address. Those of a dozen rows would not fit the registers.
        let (next_row, next_input) = if S::PAIRS { (1, T) } else { (task.x_stride, 1) };
        let x: [*const f32; T] = std::array::from_fn(|t| x.add(t * next_row));
        match (task.format, S::PAIRS) {
            (Format::F32, _) | (Format::Bf16, true) => {
                for input in 0..task.format.lines(task.inputs) {
                    let weights: [_; V] = std::array::from_fn(|v| S::load(w[v].add(input * PANEL)));
                    if T > S::FEW {
                        w.iter().for_each(|w| S::fetch(w.wrapping_add(input * PANEL + AHEAD)));
                    }
                    accumulate::<S, V, T>(&mut sums, &weights, &x, input * next_input);
                }
            }
            (Format::Bf16, false) => {
                for pair in 0..task.inputs / 2 {
                    let weights: [_; V] = std::array::from_fn(|v| S::load_bf16(w[v].add(pair * PANEL)));
                    if T > S::FEW {
                        w.iter().for_each(|w| S::fetch(w.wrapping_add(pair * PANEL + AHEAD)));
                    }
                    accumulate::<S, V, T>(&mut sums, &weights.map(|w| w.0), &x, 2 * pair);
                    accumulate::<S, V, T>(&mut sums, &weights.map(|w| w.1), &x, 2 * pair + 1);
                }
                if task.inputs % 2 == 1 {
                    let last = task.inputs / 2;
                    let weights: [_; V] = std::array::from_fn(|v| S::load_bf16(w[v].add(last * PANEL)).0);
                    accumulate::<S, V, T>(&mut sums, &weights, &x, 2 * last);
                }
            }
            _ => unreachable!("blocks are multiplied by tiles of their own"),
        }
        for (t, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                S::store(y.add(t * task.y_stride + (first + v) * S::LANES), *sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn accumulate<S: Simd, const V: usize, const T: usize>(
    sums: &mut [[S::Register; V]; T],
    weights: &[S::Register; V],
    x: &[*const f32; T],
    input: usize,
) {
    for (sums, x) in sums.iter_mut().zip(x) {
        // SAFETY: `input` is below the task's inputs.
        unsafe {
            let x = S::splat(x.add(input));
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum = S::fused(*weight, x, *sum);
            }
        }
    }
}

/// All registers of outputs in `range` for `T` rows.
#[inline(always)]
pub(super) unsafe fn rows<S: Tile, const V: usize, const T: usize>(
    task: &Task,
    range: Range<usize>,
    xy: (*const f32, *mut f32),
) {
    let mut first = range.start;
    // SAFETY: the caller's.
    unsafe {
        while first + V <= range.end {
            S::tile::<V, T>(task, first, xy);
            first += V;
        }
        // Values of heads of 32 are two panels: one by one 8 and 16 rows took 1.35 times as long.
        while V > 2 && first + 2 <= range.end {
            S::tile::<2, T>(task, first, xy);
            first += 2;
        }
        while first < range.end {
            S::tile::<1, T>(task, first, xy);
            first += 1;
        }
    }
}

/// Tiles of nearly equal numbers of rows, at most `most`.
pub(super) fn row_tiles(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let tiles = rows.div_ceil(most);
    (0..tiles).map(move |tile| rows * tile / tiles..rows * (tile + 1) / tiles)
}

/// Panels of a stripe: whole tiles of two, three and six registers of outputs where so many fit; all of them if there
/// is a single tile of rows, at most `most`.
pub(super) fn stripe(task: &Task, most: usize) -> usize {
    if task.rows <= most {
        return usize::MAX;
    }
    let panels = STRIPE_BYTES / (task.w_stride * size_of::<u32>()).max(1);
    if panels < 6 { panels.max(2) } else { panels - panels % 6 }
}

/// A product over `panels` for one instruction set: stripes of panels, and for each stripe [tiles](row_tiles) of rows.
/// `T => V` are the shapes whose sums, weights and x fit the registers.
macro_rules! product {
    ($(#[$attribute:meta])* $name:ident, $simd:ty, $most:expr, $($t:literal => $v:literal),*) => {
        $(#[$attribute])*
        pub(super) unsafe fn $name(task: &Task, panels: Range<usize>) {
            // Not inlined: with all shapes in one function the crate took ten times as long to compile (143 s, not 14).
            $(#[$attribute])*
            #[inline(never)]
            unsafe fn shape<const V: usize, const T: usize>(
                task: &Task,
                range: Range<usize>,
                xy: (*const f32, *mut f32),
            ) {
                // SAFETY: the caller's.
                unsafe { rows::<$simd, V, T>(task, range, xy) }
            }
            let registers = PANEL / <$simd as Tile>::LANES;
            let stripe = stripe(task, $most);
            for start in panels.clone().step_by(stripe) {
                let range = start * registers..panels.end.min(start.saturating_add(stripe)) * registers;
                for tile in row_tiles(task.rows, $most) {
                    // SAFETY: the tile is of the task's rows.
                    unsafe {
                        let xy = (task.x.add(tile.start * task.x_stride), task.y.add(tile.start * task.y_stride));
                        match tile.len() {
                            $($t => shape::<$v, $t>(task, range.clone(), xy),)*
                            _ => unreachable!("tiles have at most {} rows", $most),
                        }
                    }
                }
            }
        }
    };
}
pub(super) use product;
