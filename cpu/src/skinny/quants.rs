//! Products of weights and rows of x in 8 bits.
//!
//! Blocks of 32 inputs have one scale for each output, and one for each row of x. The products of a block are summed as
//! integers, exactly; the sums of blocks are scaled and added as f32 in the order of the inputs. A block's minimum is
//! multiplied with the sum of x.

use std::ops::Range;

use super::{
    format::{BLOCK, BYTE_LINES, Format, NIBBLE_LINES, PANEL, quantise},
    ggml::{FACTOR, SIX_BITS},
    kernel::{AHEAD, Task, Tile},
    layout::{Layout, tiles},
    rows::Rows,
    vectorized,
};

/// The lower halves of four bytes.
pub(super) const NIBBLES: u32 = 0x0f0f_0f0f;

/// Words of the scale of a block of x, and of what belongs to its sum, behind its quants.
const SCALE: usize = BYTE_LINES;
const SUM: usize = SCALE + 1;

/// The registers of an instruction set that multiplies bytes.
pub(super) trait Bytes {
    type Register: Copy;
    const LANES: usize;
    unsafe fn zero() -> Self::Register;
    unsafe fn load(from: *const u32) -> Self::Register;
    /// What the sum of a block starts from, given its row's -128 · Σ x: that, where weights are multiplied as unsigned.
    unsafe fn start(offset: *const f32) -> Self::Register;
    /// The word at an address in all lanes.
    unsafe fn word(from: *const f32) -> Self::Register;
    /// Adds the products of four weights of each lane and the four quants at `x`.
    unsafe fn dot(sum: Self::Register, weights: Self::Register, x: *const f32) -> Self::Register;
    /// The same of weights from 0 to 127, for sums that start from 0.
    unsafe fn dot_unsigned(sum: Self::Register, weights: Self::Register, x: *const f32) -> Self::Register;
    /// The same of weights from 0 to 15, for the sum of one block: it starts from [`of_nibbles`](Self::of_nibbles), and
    /// is what [`sum_of_nibbles`](Self::sum_of_nibbles) says.
    #[inline(always)]
    unsafe fn dot_nibbles(sum: Self::Register, weights: Self::Register, x: *const f32) -> Self::Register {
        // SAFETY: the caller's.
        unsafe { Self::dot_unsigned(sum, weights, x) }
    }
    /// What the sum of a block of nibbles is started from, for a start of 0 or -8 · Σ x.
    #[inline(always)]
    unsafe fn of_nibbles(start: Self::Register) -> Self::Register {
        start
    }
    #[inline(always)]
    unsafe fn sum_of_nibbles(sum: Self::Register) -> Self::Register {
        sum
    }
    /// The bits from `SHIFT` on that `mask` has.
    unsafe fn bits<const SHIFT: u32>(value: Self::Register, mask: u32) -> Self::Register;
    /// The f32 product of integers and f32 factors.
    unsafe fn times(integers: Self::Register, factors: Self::Register) -> Self::Register;
    /// `total` - minima · the f32 at `x`.
    unsafe fn less(minima: Self::Register, x: *const f32, total: Self::Register) -> Self::Register;
    /// `total` + the block's sum · scales · the scale at `x`.
    unsafe fn scaled(
        sum: Self::Register,
        scales: Self::Register,
        x: *const f32,
        total: Self::Register,
    ) -> Self::Register;
    unsafe fn store(to: *mut f32, value: Self::Register);
    /// Fetches a line of weights into the cache. No address is wrong.
    fn fetch(_: *const u32) {}
}

/// Tiles of blocks.
pub(super) struct Blocks<B>(std::marker::PhantomData<B>);

impl<B: Bytes> Tile for Blocks<B> {
    const LANES: usize = B::LANES;
    #[inline(always)]
    unsafe fn tile<const V: usize, const T: usize>(task: &Task, first: usize, xy: (*const f32, *mut f32)) {
        // SAFETY: the caller's.
        unsafe {
            match task.format {
                Format::Q8 => tile::<B, Q8, V, T>(task, first, xy),
                Format::Q4 => tile::<B, Q4, V, T>(task, first, xy),
                Format::Q4K => tile::<B, Q4K, V, T>(task, first, xy),
                Format::Q5K => tile::<B, Q5K, V, T>(task, first, xy),
                Format::Q6K => tile::<B, Q6K, V, T>(task, first, xy),
                Format::F32 | Format::Bf16 => unreachable!("elements are multiplied by tiles of their own"),
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<B: Bytes, K: Block, const V: usize, const T: usize>(
    task: &Task,
    first: usize,
    (x, y): (*const f32, *mut f32),
) {
    let registers = PANEL / B::LANES;
    let lines = K::FORMAT.block_lines();
    // SAFETY: the bounds of the task; `first + V` registers of outputs exist.
    unsafe {
        let mut totals = [[B::zero(); V]; T];
        let w: [*const u32; V] = std::array::from_fn(|v| {
            let (panel, part) = ((first + v) / registers, (first + v) % registers);
            task.w.add(panel * task.w_stride + part * B::LANES)
        });
        let x: [*const f32; T] = std::array::from_fn(|t| x.add(t));
        for block in 0..task.inputs.div_ceil(BLOCK) {
            let (w, x) = (moved(w, block * lines * PANEL), moved(x, block * K::X_BLOCK * T));
            K::add::<B, V, T>(w, x, block, &mut totals);
        }
        for (t, totals) in totals.iter().enumerate() {
            for (v, total) in totals.iter().enumerate() {
                B::store(y.add(t * task.y_stride + (first + v) * B::LANES), *total);
            }
        }
    }
}

/// Registers of sums: of `V` of outputs for `T` rows.
type Sums<B, const V: usize, const T: usize> = [[<B as Bytes>::Register; V]; T];

/// How blocks of a format are multiplied. The pointers `x` are those of the rows of a tile, which lie side by side: the
/// next word of a row is `T` words on.
trait Block {
    const FORMAT: Format;
    /// Words of a block of x.
    const X_BLOCK: usize = SUM + 1;
    /// What belongs to the sums of both halves of a block of x: the sum times what quants are multiplied as beyond what
    /// they stand for (of Q6K for each half), or the f32 sum of x. The first one, if the format has one of both.
    fn of_sums(scale: u32, sums: [i32; 2]) -> [u32; 2];
    /// Adds the scaled products of a block, the one of that number of its rows.
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        number: usize,
        totals: &mut Sums<B, V, T>,
    );
}

// In what follows loops fill arrays: `map` over six or seven pointers was called, not inlined, and tiles of as many
// rows took 1.6 times as long as one of eight.

/// Pointers that lie so many words on.
#[inline(always)]
fn moved<P, const N: usize>(mut pointers: [*const P; N], words: usize) -> [*const P; N] {
    pointers.iter_mut().for_each(|pointer| *pointer = pointer.wrapping_add(words));
    pointers
}

/// Sums of a block that start from what belongs to each row, the word of the block at `word`.
#[inline(always)]
unsafe fn started<B: Bytes, const V: usize, const T: usize>(
    x: [*const f32; T],
    word: usize,
    start: unsafe fn(*const f32) -> B::Register,
) -> Sums<B, V, T> {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[B::zero(); V]; T];
        for (sums, x) in sums.iter_mut().zip(x) {
            *sums = [start(x.add(word * T)); V];
        }
        sums
    }
}

/// The same [line](line_of) of each panel.
#[inline(always)]
unsafe fn lines_of<B: Bytes, const V: usize>(w: [*const u32; V], line: usize) -> [B::Register; V] {
    // SAFETY: the caller's.
    unsafe {
        let mut lines = [B::zero(); V];
        for (to, w) in lines.iter_mut().zip(w) {
            *to = line_of::<B>(w, line);
        }
        lines
    }
}

/// A line of a block. Meanwhile one that lies behind it is fetched: what the processor fetches by itself comes too late
/// beside eight rows.
#[inline(always)]
unsafe fn line_of<B: Bytes>(w: *const u32, line: usize) -> B::Register {
    B::fetch(w.wrapping_add(line * PANEL + AHEAD));
    // SAFETY: the caller's.
    unsafe { B::load(w.add(line * PANEL)) }
}

struct Q8;

impl Block for Q8 {
    const FORMAT: Format = Format::Q8;
    #[inline(always)]
    fn of_sums(_: u32, [a, b]: [i32; 2]) -> [u32; 2] {
        [(-128 * (a + b)).cast_unsigned(); 2]
    }
    #[inline(always)]
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        _: usize,
        totals: &mut Sums<B, V, T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = started::<B, V, T>(x, SUM, B::start);
            for line in 0..BYTE_LINES {
                let weights = lines_of::<B, V>(w, line);
                dots(&mut sums, weights, moved(x, line * T), |sum, w, x| B::dot(sum, w, x));
            }
            scale::<B, V, T>(sums, lines_of::<B, V>(w, BYTE_LINES), x, totals);
        }
    }
}

struct Q4;

impl Block for Q4 {
    const FORMAT: Format = Format::Q4;
    #[inline(always)]
    fn of_sums(_: u32, [a, b]: [i32; 2]) -> [u32; 2] {
        [(-8 * (a + b)).cast_unsigned(); 2]
    }
    #[inline(always)]
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        _: usize,
        totals: &mut Sums<B, V, T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            // Quants are multiplied from 0 to 15, 8 more than they stand for.
            let sums = nibble_dots::<B, V, T>(w, x, started::<B, V, T>(x, SUM, B::word));
            scale::<B, V, T>(sums, lines_of::<B, V>(w, NIBBLE_LINES), x, totals);
        }
    }
}

struct Q4K;

impl Block for Q4K {
    const FORMAT: Format = Format::Q4K;
    #[inline(always)]
    fn of_sums(scale: u32, sums: [i32; 2]) -> [u32; 2] {
        [sum_of_x(scale, sums); 2]
    }
    #[inline(always)]
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        number: usize,
        totals: &mut Sums<B, V, T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let sums = nibble_dots::<B, V, T>(w, x, [[B::zero(); V]; T]);
            let (scales, minima) = q4k_scales::<B, V>(w, number);
            scale::<B, V, T>(sums, scales, x, totals);
            subtract::<B, V, T>(minima, x, totals);
        }
    }
}

struct Q5K;

impl Block for Q5K {
    const FORMAT: Format = Format::Q5K;
    #[inline(always)]
    fn of_sums(scale: u32, sums: [i32; 2]) -> [u32; 2] {
        [sum_of_x(scale, sums); 2]
    }
    #[inline(always)]
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        _: usize,
        totals: &mut Sums<B, V, T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[B::zero(); V]; T];
            for line in 0..BYTE_LINES {
                let weights = lines_of::<B, V>(w, line);
                dots(&mut sums, weights, moved(x, line * T), |sum, w, x| B::dot_unsigned(sum, w, x));
            }
            scale::<B, V, T>(sums, lines_of::<B, V>(w, BYTE_LINES), x, totals);
            subtract::<B, V, T>(lines_of::<B, V>(w, BYTE_LINES + 1), x, totals);
        }
    }
}

struct Q6K;

impl Block for Q6K {
    const FORMAT: Format = Format::Q6K;
    const X_BLOCK: usize = SUM + 2;
    #[inline(always)]
    fn of_sums(_: u32, sums: [i32; 2]) -> [u32; 2] {
        sums.map(|sum| (-128 * sum).cast_unsigned())
    }
    #[inline(always)]
    unsafe fn add<B: Bytes, const V: usize, const T: usize>(
        w: [*const u32; V],
        x: [*const f32; T],
        _: usize,
        totals: &mut Sums<B, V, T>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            for half in 0..2 {
                let mut sums = started::<B, V, T>(x, SUM + half, B::start);
                for line in half * BYTE_LINES / 2..(half + 1) * BYTE_LINES / 2 {
                    let weights = lines_of::<B, V>(w, line);
                    dots(&mut sums, weights, moved(x, line * T), |sum, w, x| B::dot(sum, w, x));
                }
                scale::<B, V, T>(sums, lines_of::<B, V>(w, BYTE_LINES + half), x, totals);
            }
        }
    }
}

/// The scales and the minima of a block of [`Format::Q4K`].
#[inline(always)]
pub(super) unsafe fn q4k_scales<B: Bytes, const V: usize>(
    w: [*const u32; V],
    number: usize,
) -> ([B::Register; V], [B::Register; V]) {
    let lines = Format::Q4K.block_lines() * PANEL;
    // SAFETY: the caller's; blocks come in pairs.
    unsafe {
        let own = w.map(|w| w.add(NIBBLE_LINES * PANEL));
        let of_pair = |place: usize| own.map(|line| B::load(line.sub(number % 2 * lines).add(place * lines)));
        let (d, dmin) = (of_pair(0), of_pair(1));
        let own = own.map(|line| B::load(line));
        let product = |six, factor| B::times(six, B::bits::<0>(factor, FACTOR));
        (
            std::array::from_fn(|v| product(B::bits::<0>(own[v], SIX_BITS), d[v])),
            std::array::from_fn(|v| product(B::bits::<6>(own[v], SIX_BITS), dmin[v])),
        )
    }
}

/// `sums` and the products of a block's quants from 0 to 15.
///
/// Loops rather than `map`: a closure over six registers was called, not inlined, and one row took eight times as long
/// as two. A loop over `flatten` leaves the sums in memory: two rows and more took twice as long.
#[inline(always)]
unsafe fn nibble_dots<B: Bytes, const V: usize, const T: usize>(
    w: [*const u32; V],
    x: [*const f32; T],
    mut sums: Sums<B, V, T>,
) -> Sums<B, V, T> {
    // SAFETY: the caller's.
    unsafe {
        for sum in &mut sums {
            for sum in sum {
                *sum = B::of_nibbles(*sum);
            }
        }
        for line in 0..NIBBLE_LINES {
            for (v, w) in w.iter().enumerate() {
                let both = line_of::<B>(*w, line);
                let (early, late) = (B::bits::<0>(both, NIBBLES), B::bits::<4>(both, NIBBLES));
                for (sums, x) in sums.iter_mut().zip(x) {
                    let sum = B::dot_nibbles(sums[v], early, x.add(line * T));
                    sums[v] = B::dot_nibbles(sum, late, x.add((NIBBLE_LINES + line) * T));
                }
            }
        }
        for sum in &mut sums {
            for sum in sum {
                *sum = B::sum_of_nibbles(*sum);
            }
        }
    }
    sums
}

#[inline(always)]
fn dots<R: Copy, const V: usize, const T: usize>(
    sums: &mut [[R; V]; T],
    weights: [R; V],
    x: [*const f32; T],
    dot: impl Fn(R, R, *const f32) -> R,
) {
    for (sums, x) in sums.iter_mut().zip(x) {
        sums.iter_mut().zip(weights).for_each(|(sum, weights)| *sum = dot(*sum, weights, x));
    }
}

/// Adds the sums of a block times both scales.
#[inline(always)]
unsafe fn scale<B: Bytes, const V: usize, const T: usize>(
    sums: Sums<B, V, T>,
    scales: [B::Register; V],
    x: [*const f32; T],
    totals: &mut Sums<B, V, T>,
) {
    for ((totals, sums), x) in totals.iter_mut().zip(sums).zip(x) {
        for ((total, sum), scales) in totals.iter_mut().zip(sums).zip(scales) {
            // SAFETY: the caller's.
            *total = unsafe { B::scaled(sum, scales, x.add(SCALE * T), *total) };
        }
    }
}

/// Subtracts the minima of a block times its sums of x.
#[inline(always)]
unsafe fn subtract<B: Bytes, const V: usize, const T: usize>(
    minima: [B::Register; V],
    x: [*const f32; T],
    totals: &mut Sums<B, V, T>,
) {
    for (totals, x) in totals.iter_mut().zip(x) {
        for (total, minima) in totals.iter_mut().zip(minima) {
            // SAFETY: the caller's.
            *total = unsafe { B::less(minima, x.add(SUM * T), *total) };
        }
    }
}

/// Rows of x quantised for weights of a format, in tiles of at most `MOST` rows: for each block its quants, four a
/// word, the bits of their scale, and what belongs to their sum. Each word is that of all rows of the tile, one behind
/// the other. What is behind the last input is zero.
pub(super) fn blocks<const MOST: usize>(format: Format) -> Layout {
    match format {
        Format::Q4 => layout::<Q4, MOST>(),
        Format::Q4K => layout::<Q4K, MOST>(),
        Format::Q5K => layout::<Q5K, MOST>(),
        Format::Q6K => layout::<Q6K, MOST>(),
        Format::F32 | Format::Bf16 | Format::Q8 => layout::<Q8, MOST>(),
    }
}

fn layout<K: Block, const MOST: usize>() -> Layout {
    Layout { words: |inputs| inputs.div_ceil(BLOCK) * K::X_BLOCK, tiles: tiles::<MOST>, write: write_tile::<K> }
}

/// The sum of a block of x, as the bits of an f32.
#[inline(always)]
pub(super) fn sum_of_x(scale: u32, [first, second]: [i32; 2]) -> u32 {
    (f32::from_bits(scale) * (first + second) as f32).to_bits()
}

vectorized! {
    fn write_tile[K: Block][K] = quantise_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]);
}

#[inline(always)]
fn quantise_tile<K: Block>(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]) {
    let count = rows.len();
    // All rows of a block before the next block: its words are written to the same lines of the cache.
    for (block, to) in to.chunks_exact_mut(K::X_BLOCK * count).enumerate() {
        for (place, row) in rows.clone().enumerate() {
            let values = &x.row(row)[..inputs][block * BLOCK..];
            let mut words = [0; SUM + 2];
            let Some((quants, rest)) = words.split_first_chunk_mut() else { return };
            let (scale, sums) = match values.first_chunk::<BLOCK>() {
                Some(whole) => write_block(whole, quants),
                None => write_block(values, quants),
            };
            let [first, second] = K::of_sums(scale, sums);
            rest.copy_from_slice(&[scale, first, second]);
            to[place..].iter_mut().step_by(count).zip(words).for_each(|(to, word)| *to = word);
        }
    }
}

/// Writes the quants of a block, four a word, and returns the bits of their scale and the sums of both halves.
#[inline(always)]
pub(super) fn write_block(values: &[f32], to: &mut [u32; BLOCK / 4]) -> (u32, [i32; 2]) {
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
    let sum = |half: &[i8]| half.iter().map(|quant| i32::from(*quant)).sum();
    let (first, second) = quants.split_at(BLOCK / 2);
    (scale.to_bits(), [sum(first), sum(second)])
}
