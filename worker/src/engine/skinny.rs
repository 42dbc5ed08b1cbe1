//! The skinny matrix product: y = x Wᵀ for a few rows of x, at the speed at which W can be read.
//!
//! Verifying a draft tree multiplies every weight with 2 to 64 rows. General kernels pack and block for large
//! matrices and need 3 to 5 times as long for 8 rows as for one; here the weights are packed once, when they are
//! loaded, and streamed once a product, while the rows' sums stay in registers.
//!
//! Layout: outputs in *panels* of 16, and in a panel one [`Line`] of 16 weights for each input (f32) or two inputs
//! (bf16), so that a line is one register of AVX-512, two of AVX2, four of NEON. A tile of the product holds V × T
//! registers of sums for V registers of outputs and T rows; each line is loaded once and each x is broadcast.
//!
//! bf16 weights are widened to f32, which takes as many instructions as the products of a few rows. AVX512-BF16
//! multiplies pairs as they are stored: there the rows of x are rounded to bf16 once a product, and a pair is an
//! element like any other.
//!
//! Every sum runs over the inputs in ascending order, alone in its lane. A row's result therefore does not depend, to
//! the bit, on the other rows, the tile or the number of threads.
#![expect(unsafe_code, reason = "registers are addressed through pointers; `product` checks the bounds of all of them")]

use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

/// Outputs of a panel.
pub(super) const PANEL: usize = 16;

/// Panels that one pass over the rows takes: their weights (12 × 16 × 4 bytes an input) stay in the second-level cache
/// from one tile of rows to the next.
const STRIPE: usize = 12;

/// Multiplications below which a second thread costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

/// The weights of 16 outputs for one input (f32 bits), or for two (bf16, the earlier one in the low half).
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u32; PANEL]);

/// No weights.
pub(super) const ZERO: Line = Line([0; PANEL]);

/// How weights are stored. Sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    F32,
    Bf16,
}

impl Format {
    /// Lines of a panel.
    fn lines(self, inputs: usize) -> usize {
        match self {
            Self::F32 => inputs,
            Self::Bf16 => inputs.div_ceil(2),
        }
    }
}

/// Panels of weights, borrowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a> {
    pub(super) lines: &'a [Line],
    pub(super) format: Format,
    /// Summed over.
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Lines from one panel to the next.
    pub(super) stride: usize,
}

/// A weight matrix in panels.
#[derive(Debug)]
pub(super) struct PackedMatrix {
    lines: Vec<Line>,
    format: Format,
    inputs: usize,
    outputs: usize,
}

impl Panels<'_> {
    /// `y = x Wᵀ` on this thread.
    pub(super) fn multiply(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        product(self, x, y, 1);
    }
}

impl PackedMatrix {
    /// Packs matrices `[outputs, inputs]` (row-major, one below the other) of equal `inputs`. bf16 keeps the upper half
    /// of each weight: round before.
    pub(super) fn pack(parts: &[&[f32]], inputs: usize, format: Format) -> Self {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum::<usize>();
        let depth = format.lines(inputs);
        let mut lines = vec![ZERO; outputs.div_ceil(PANEL) * depth];
        let rows = parts.iter().flat_map(|part| part.chunks_exact(inputs));
        for (output, row) in rows.enumerate() {
            let panel = &mut lines[output / PANEL * depth..][..depth];
            for (input, weight) in row.iter().enumerate() {
                let bits = weight.to_bits();
                match format {
                    Format::F32 => panel[input].0[output % PANEL] = bits,
                    Format::Bf16 => {
                        let half = (bits >> 16) << (input % 2 * 16);
                        panel[input / 2].0[output % PANEL] |= half;
                    }
                }
            }
        }
        Self { lines, format, inputs, outputs }
    }

    fn panels(&self) -> Panels<'_> {
        Panels {
            lines: &self.lines,
            format: self.format,
            inputs: self.inputs,
            outputs: self.outputs,
            stride: self.lines.len() / self.outputs.div_ceil(PANEL).max(1),
        }
    }

    /// `y = x Wᵀ`, on all threads where that pays.
    pub(super) fn multiply(&self, x: &Rows, y: &mut Rows) {
        y.reshape(x.rows, self.outputs);
        // A single row costs about as much as four: its weights have to be read.
        let pays = self.inputs * self.outputs * (x.rows + 3) >= PARALLEL_WORK;
        let threads = if pays { rayon::current_num_threads() } else { 1 };
        product(&self.panels(), x, y, threads);
    }
}

/// Rows of f32, each at a multiple of 16 elements, so that a product may write whole panels.
#[derive(Debug, Default)]
pub(super) struct Rows {
    data: Vec<f32>,
    rows: usize,
    columns: usize,
    stride: usize,
}

impl Rows {
    /// Room for `rows` of `columns`, whose content is whatever was there. Memory is kept.
    pub(super) fn reshape(&mut self, rows: usize, columns: usize) {
        let stride = columns.next_multiple_of(PANEL);
        (self.rows, self.columns, self.stride) = (rows, columns, stride);
        self.data.resize(rows * stride, 0.0);
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.stride..][..self.columns]
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.stride..][..self.columns]
    }

    /// Calls `work` with every row's number and elements, on all threads if it is `heavy`.
    pub(super) fn each(&mut self, heavy: bool, work: impl Fn(usize, &mut [f32]) + Sync) {
        let columns = self.columns;
        let rows = self.data.chunks_exact_mut(self.stride.max(1));
        match heavy {
            false => (rows.enumerate()).for_each(|(row, data)| work(row, &mut data[..columns])),
            true => (self.data.par_chunks_exact_mut(self.stride))
                .enumerate()
                .for_each(|(row, data)| work(row, &mut data[..columns])),
        }
    }

    /// The rows `keep`, ascending, moved to the front.
    pub(super) fn retain(&mut self, keep: &[u32]) {
        for (to, from) in keep.iter().enumerate() {
            let from = *from as usize * self.stride;
            self.data.copy_within(from..from + self.stride, to * self.stride);
        }
        self.reshape(keep.len(), self.columns);
    }
}

/// `y = x Wᵀ` on at most `threads` threads.
///
/// # Panics
/// If a line, an x or a y would lie outside its buffer.
fn product(w: &Panels<'_>, x: &Rows, y: &mut Rows, threads: usize) {
    let (rows, panels) = (x.rows, w.outputs.div_ceil(PANEL));
    if rows == 0 || panels == 0 {
        return;
    }
    let depth = w.format.lines(w.inputs);
    assert!(depth <= w.stride && w.lines.len() >= (panels - 1) * w.stride + depth);
    assert!(x.columns >= w.inputs && x.data.len() >= rows * x.stride);
    assert!(y.stride >= panels * PANEL && y.rows >= rows && y.data.len() >= rows * y.stride);
    let task = Task {
        w: w.lines.as_ptr().cast(),
        format: w.format,
        w_stride: w.stride * PANEL,
        inputs: w.inputs,
        x: x.data.as_ptr(),
        x_stride: x.stride,
        y: y.data.as_mut_ptr(),
        y_stride: y.stride,
        rows,
    };
    let run = |task: &Task, product: Product| {
        let threads = threads.min(panels);
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
    match paired_product().filter(|_| w.format == Format::Bf16) {
        None => run(&task, widened_product()),
        Some(product) => with_pairs(x, w.inputs, |pairs| run(&task.of_pairs(pairs), product)),
    }
}

/// A product over some panels, for one instruction set.
type Product = unsafe fn(&Task, Range<usize>);

/// For elements of f32; weights in bf16 are widened.
fn widened_product() -> Product {
    match isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => x86::avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => x86::avx2,
        Isa::Portable => portable,
    }
}

/// For pairs of bf16, if the processor multiplies those.
fn paired_product() -> Option<Product> {
    #[cfg(target_arch = "x86_64")]
    if isa() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
        return Some(x86::avx512_bf16);
    }
    None
}

/// Calls `work` with the rows of x in pairs of bf16, rounded to the nearest, ties to even; the earlier element in the
/// low half, and zero beside the last one of an odd number of `inputs`.
fn with_pairs(x: &Rows, inputs: usize, work: impl FnOnce(&[u32])) {
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
fn bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    // NaN stays one: its highest bit of the mantissa is set.
    match value.is_nan() {
        true => bits >> 16 | 0x40,
        false => (bits + 0x7fff + (bits >> 16 & 1)) >> 16,
    }
}

/// A product whose bounds are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    w: *const u32,
    format: Format,
    /// Weights from one panel to the next.
    w_stride: usize,
    inputs: usize,
    x: *const f32,
    x_stride: usize,
    y: *mut f32,
    y_stride: usize,
    rows: usize,
}

// SAFETY: its pointers come from slices that outlive the product, and threads write to distinct panels.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

impl Task {
    /// The same product over pairs: each is one element, and a line of weights belongs to it.
    fn of_pairs(self, pairs: &[u32]) -> Self {
        let inputs = self.format.lines(self.inputs);
        assert!(pairs.len() >= self.rows * inputs);
        Self { format: Format::F32, inputs, x: pairs.as_ptr().cast(), x_stride: inputs, ..self }
    }
}

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of arrays: NEON on aarch64, where it is always there.
    Portable,
}

/// The best that this processor has.
fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
            {
                return Isa::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    })
}

/// Runs `work`, compiled for the processor's instruction set as far as it is inlined.
#[inline(always)]
pub(super) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    match isa() {
        // SAFETY: detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { x86::with_avx512(work) },
        // SAFETY: detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::with_avx2(work) },
        Isa::Portable => work(),
    }
}

/// The registers of an instruction set.
trait Simd {
    type Register: Copy;
    const LANES: usize;
    unsafe fn zero() -> Self::Register;
    unsafe fn load(from: *const u32) -> Self::Register;
    /// Of pairs of bf16, the low and the high halves.
    unsafe fn load_bf16(from: *const u32) -> (Self::Register, Self::Register);
    unsafe fn splat(from: *const f32) -> Self::Register;
    /// a · b + c; of pairs the sum of both products.
    unsafe fn fused(a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register;
    unsafe fn store(to: *mut f32, value: Self::Register);
}

/// The sums of `V` registers of outputs from register `first` on, for `T` rows of x.
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
        let x: [*const f32; T] = std::array::from_fn(|t| x.add(t * task.x_stride));
        match task.format {
            Format::F32 => {
                for input in 0..task.inputs {
                    let weights: [_; V] = std::array::from_fn(|v| S::load(w[v].add(input * PANEL)));
                    accumulate::<S, V, T>(&mut sums, &weights, &x, input);
                }
            }
            Format::Bf16 => {
                for pair in 0..task.inputs / 2 {
                    let weights: [_; V] = std::array::from_fn(|v| S::load_bf16(w[v].add(pair * PANEL)));
                    accumulate::<S, V, T>(&mut sums, &weights.map(|w| w.0), &x, 2 * pair);
                    accumulate::<S, V, T>(&mut sums, &weights.map(|w| w.1), &x, 2 * pair + 1);
                }
                if task.inputs % 2 == 1 {
                    let last = task.inputs / 2;
                    let weights: [_; V] = std::array::from_fn(|v| S::load_bf16(w[v].add(last * PANEL)).0);
                    accumulate::<S, V, T>(&mut sums, &weights, &x, 2 * last);
                }
            }
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
unsafe fn rows<S: Simd, const V: usize, const T: usize>(task: &Task, range: Range<usize>, xy: (*const f32, *mut f32)) {
    let mut first = range.start;
    // SAFETY: the caller's.
    unsafe {
        while first + V <= range.end {
            tile::<S, V, T>(task, first, xy);
            first += V;
        }
        while first < range.end {
            tile::<S, 1, T>(task, first, xy);
            first += 1;
        }
    }
}

/// A product over `panels` for one instruction set: stripes of panels, and for each stripe tiles of nearly equal
/// numbers of rows. `T => V` are the shapes whose sums, weights and x fit the registers.
macro_rules! product {
    ($(#[$attribute:meta])* $name:ident, $simd:ty, $most:literal, $($t:literal => $v:literal),*) => {
        $(#[$attribute])*
        pub(super) unsafe fn $name(task: &Task, panels: Range<usize>) {
            let registers = PANEL / <$simd>::LANES;
            let tiles = task.rows.div_ceil($most);
            for start in panels.clone().step_by(STRIPE) {
                let range = start * registers..panels.end.min(start + STRIPE) * registers;
                let mut row = 0;
                for tile in 0..tiles {
                    let count = (task.rows - row).div_ceil(tiles - tile);
                    // SAFETY: `row + count` is at most the task's rows.
                    unsafe {
                        let xy = (task.x.add(row * task.x_stride), task.y.add(row * task.y_stride));
                        match count {
                            $($t => rows::<$simd, $v, $t>(task, range.clone(), xy),)*
                            _ => unreachable!("tiles have at most {} rows", $most),
                        }
                    }
                    row += count;
                }
            }
        }
    };
}

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
        let fused = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
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

#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set and its caller's pointers, nothing else"
)]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::*;

    /// Its elements are f32, or pairs of bf16, which AVX512-BF16 multiplies.
    pub(super) struct Avx512<const PAIRS: bool>;

    impl<const PAIRS: bool> Simd for Avx512<PAIRS> {
        type Register = __m512;
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> __m512 {
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const u32) -> __m512 {
            unsafe { _mm512_loadu_ps(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u32) -> (__m512, __m512) {
            unsafe {
                let pairs = _mm512_loadu_si512(from.cast());
                let high = _mm512_and_si512(pairs, _mm512_set1_epi32(-65536));
                (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(high))
            }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> __m512 {
            unsafe { _mm512_set1_ps(*from) }
        }
        #[inline(always)]
        unsafe fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
            let pairs = |register| unsafe { transmute::<__m512, __m512bh>(register) };
            match PAIRS {
                true => unsafe { _mm512_dpbf16_ps(c, pairs(a), pairs(b)) },
                false => unsafe { _mm512_fmadd_ps(a, b, c) },
            }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m512) {
            unsafe { _mm512_storeu_ps(to, value) }
        }
    }

    pub(super) struct Avx2;

    impl Simd for Avx2 {
        type Register = __m256;
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const u32) -> __m256 {
            unsafe { _mm256_loadu_ps(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u32) -> (__m256, __m256) {
            unsafe {
                let pairs = _mm256_loadu_si256(from.cast());
                let high = _mm256_and_si256(pairs, _mm256_set1_epi32(-65536));
                (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high))
            }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> __m256 {
            unsafe { _mm256_set1_ps(*from) }
        }
        #[inline(always)]
        unsafe fn fused(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m256) {
            unsafe { _mm256_storeu_ps(to, value) }
        }
    }

    product!(
        // 32 registers: 24 for sums, 3 to 6 for weights.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
        avx512, Avx512<false>, 8,
        1 => 6, 2 => 6, 3 => 6, 4 => 6, 5 => 4, 6 => 4, 7 => 3, 8 => 3
    );

    product!(
        #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
        avx512_bf16, Avx512<true>, 8,
        1 => 6, 2 => 6, 3 => 6, 4 => 6, 5 => 4, 6 => 4, 7 => 3, 8 => 3
    );

    product!(
        // 16 registers: 12 for sums, 2 or 3 for weights, 1 for x.
        #[target_feature(enable = "avx2,fma")]
        avx2, Avx2, 6,
        1 => 8, 2 => 6, 3 => 4, 4 => 3, 5 => 2, 6 => 2
    );

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    pub(super) unsafe fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;
    use std::io::Write;
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    /// The products of elements that this processor can run.
    fn products() -> Vec<(&'static str, Product)> {
        let mut products: Vec<(&'static str, Product)> = vec![("portable", portable)];
        #[cfg(target_arch = "x86_64")]
        {
            if isa() != Isa::Portable {
                products.push(("avx2", x86::avx2));
            }
            if isa() == Isa::Avx512 {
                products.push(("avx512", x86::avx512));
            }
        }
        for name in ["avx2", "avx512"] {
            if !products.iter().any(|(product, _)| *product == name) {
                skipped(name);
            }
        }
        products
    }

    /// Says once that this processor cannot run a product: past the test harness, which shows only what failing tests
    /// print. tests/run.sh ends with these lines.
    fn skipped(product: &'static str) {
        static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
        let mut said = SAID.lock().unwrap();
        if !said.contains(&product) {
            let line = format!("skipped: the {product} product, which this processor cannot run\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            said.push(product);
        }
    }

    fn values(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn rows_of(data: &[f32], columns: usize) -> Rows {
        let mut rows = Rows::default();
        rows.reshape(data.len() / columns, columns);
        for (row, data) in data.chunks(columns).enumerate() {
            rows.row_mut(row).copy_from_slice(data);
        }
        rows
    }

    fn run(product: Product, w: &PackedMatrix, x: &Rows) -> Rows {
        let mut y = Rows::default();
        y.reshape(x.rows, w.outputs);
        y.data.fill(f32::NAN);
        let panels = w.outputs.div_ceil(PANEL);
        let task = Task {
            w: w.lines.as_ptr().cast(),
            format: w.format,
            w_stride: w.panels().stride * PANEL,
            inputs: w.inputs,
            x: x.data.as_ptr(),
            x_stride: x.stride,
            y: y.data.as_mut_ptr(),
            y_stride: y.stride,
            rows: x.rows,
        };
        // SAFETY: the buffers have the shapes that the task says, and the processor was asked.
        unsafe { product(&task, 0..panels) };
        y
    }

    fn truncated(weight: f32) -> f32 {
        f32::from_bits(weight.to_bits() & 0xffff_0000)
    }

    /// x Wᵀ in f64 for weights and x as they are.
    fn expected(weights: &[f32], x: &[f32], inputs: usize) -> Vec<f64> {
        let dot = |x: &[f32], w: &[f32]| (x.iter().zip(w)).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        let rows = x.chunks_exact(inputs);
        rows.flat_map(|x| weights.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
    }

    #[track_caller]
    fn check(y: &Rows, expected: &[f64], what: &str) {
        for (row, expected) in expected.chunks_exact(y.columns).enumerate() {
            for (output, (got, expected)) in y.row(row).iter().zip(expected).enumerate() {
                assert!(
                    (f64::from(*got) - expected).abs() < 1e-4,
                    "{what}, row {row}, output {output}: {got}, not {expected}"
                );
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn every_product_is_the_sum_of_its_terms(
            rows in 1..40_usize,
            outputs in 1..300_usize,
            inputs in 1..120_usize,
            format in prop_oneof![Just(Format::F32), Just(Format::Bf16)],
            seed in any::<u64>(),
        ) {
            let mut weights = values(seed, outputs * inputs);
            let x = values(seed ^ 1, rows * inputs);
            let packed = PackedMatrix::pack(&[&weights], inputs, format);
            if format == Format::Bf16 {
                weights.iter_mut().for_each(|weight| *weight = truncated(*weight));
            }
            for (name, product) in products() {
                let y = run(product, &packed, &rows_of(&x, inputs));
                check(&y, &expected(&weights, &x, inputs), name);
            }
        }

        #[test]
        fn pairs_are_multiplied_after_rounding(
            rows in 1..40_usize,
            outputs in 1..300_usize,
            inputs in 1..120_usize,
            seed in any::<u64>(),
        ) {
            if paired_product().is_none() {
                skipped("avx512bf16");
                return Ok(());
            }
            let weights = values(seed, outputs * inputs).into_iter().map(truncated);
            let weights: Vec<f32> = weights.collect();
            let mut x = values(seed ^ 1, rows * inputs);
            let packed = PackedMatrix::pack(&[&weights], inputs, Format::Bf16);
            let mut y = Rows::default();
            packed.multiply(&rows_of(&x, inputs), &mut y);
            x.iter_mut().for_each(|x| *x = f32::from_bits(bf16(*x) << 16));
            check(&y, &expected(&weights, &x, inputs), "pairs");
        }

        #[test]
        fn bf16_is_the_nearest_and_of_two_the_even_one(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            let got = f32::from_bits(bf16(value) << 16);
            if !value.is_finite() {
                prop_assert!(got == value || (got.is_nan() && value.is_nan()), "{value} to {got}");
                return Ok(());
            }
            let below = bits & 0xffff_0000;
            let distance = |bits: u32| (f64::from(f32::from_bits(bits)) - f64::from(value)).abs();
            let above = below + 0x1_0000;
            // Beyond the largest there is infinity, which is as far as a next number would be.
            prop_assume!(f32::from_bits(above).is_finite());
            let even = if below >> 16 & 1 == 0 { below } else { above };
            let expected = match distance(below).total_cmp(&distance(above)) {
                Ordering::Less => below,
                Ordering::Greater => above,
                Ordering::Equal => even,
            };
            prop_assert_eq!(got.to_bits(), expected);
        }

        #[test]
        fn a_row_does_not_depend_on_the_others_to_the_bit(
            rows in 2..40_usize,
            outputs in 1..600_usize,
            inputs in 1..300_usize,
            format in prop_oneof![Just(Format::F32), Just(Format::Bf16)],
            seed in any::<u64>(),
        ) {
            let weights = values(seed, outputs * inputs);
            let x = values(seed ^ 1, rows * inputs);
            let packed = PackedMatrix::pack(&[&weights], inputs, format);
            let (mut together, mut alone) = (Rows::default(), Rows::default());
            packed.multiply(&rows_of(&x, inputs), &mut together);
            for row in 0..rows {
                packed.multiply(&rows_of(&x[row * inputs..][..inputs], inputs), &mut alone);
                prop_assert_eq!(together.row(row), alone.row(0));
            }
        }
    }

    #[test]
    fn matrices_that_are_packed_together_give_the_rows_of_both() {
        let (first, second) = (values(1, 5 * 8), values(2, 30 * 8));
        let x = rows_of(&values(3, 2 * 8), 8);
        let mut both = Rows::default();
        PackedMatrix::pack(&[&first, &second], 8, Format::F32).multiply(&x, &mut both);
        for (part, from) in [(&first, 0), (&second, 5)] {
            let mut one = Rows::default();
            PackedMatrix::pack(&[part], 8, Format::F32).multiply(&x, &mut one);
            for row in 0..2 {
                assert_eq!(both.row(row)[from..][..one.columns], *one.row(row));
            }
        }
    }
}
