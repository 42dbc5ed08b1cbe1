//! AMX: tiles of 16 rows of 64 bytes, multiplied in one instruction. Panels are such tiles as they are stored.
//!
//! 16 rows of x and 32 inputs of bf16 times a panel take 16 cycles, a twelfth of what AVX512-BF16 takes. A block of 32
//! inputs in bytes takes 8; its sums are then scaled as in [`quants`](super::quants), to the bit, which takes longer.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set, its caller's pointers and the bounds of the task"
)]

use std::{
    arch::{asm, x86_64::*},
    cell::Cell,
    ops::Range,
    sync::OnceLock,
};

use super::{
    avx512::Vnni,
    bf16::write_pairs,
    format::{BLOCK, BYTE_LINES, Format, Line, NIBBLE_LINES, PANEL, ZERO},
    isa::{Isa, isa, vectorized},
    kernel::Task,
    layout::Layout,
    quants::{Bytes, NIBBLES, q4k_scales, sum_of_x, write_block},
    rows::Rows,
};

/// Rows of a tile.
const TILE: usize = 16;

/// Bytes of a line of a panel, of a row of a tile, and of a tile.
const LINE: usize = PANEL * 4;

/// Lines of a panel that a tile holds.
const LINES: usize = TILE;

/// Bytes of panels that one pass over the rows takes: they stay in the second-level cache.
const STRIPE_BYTES: usize = 1 << 18;

/// Panels that a pass of 16 rows takes at once: the sums of four products in flight hide their latency.
pub(super) const PANELS: usize = 4;

/// Whether the processor has tiles for bf16 and bytes, and the kernel lets this process use them.
pub(super) fn amx() -> bool {
    static AMX: OnceLock<bool> = OnceLock::new();
    *AMX.get_or_init(|| {
        let has = |bit: u32| __cpuid_count(7, 0).edx >> bit & 1 == 1;
        isa() == Isa::Avx512 && has(22) && has(24) && has(25) && permitted()
    })
}

/// Asks Linux (5.16 and later) for the registers, which it gives to all threads of the process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The shapes of the eight tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Tiles 0 to 3 hold sums of these numbers of rows, 4 and 5 those of x in front of the first and the last of them,
    /// and 6 and 7 hold `lines` of weights, each of which four bytes of a row of x belong to.
    #[expect(clippy::cast_possible_truncation, reason = "a tile has at most 16 rows of 64 bytes")]
    fn new(sums: [usize; 4], lines: usize) -> Self {
        let [a, b, c, d] = sums.map(|rows| rows as u8);
        let (line, x) = (LINE as u16, lines as u16 * 4);
        let mut shapes = Self { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        shapes.rows[..8].copy_from_slice(&[a, b, c, d, a, d, lines as u8, lines as u8]);
        shapes.bytes[..8].copy_from_slice(&[line, line, line, line, x, x, line, line]);
        shapes
    }

    /// Those of products with so many rows, at most two tiles of them.
    fn of_rows(rows: usize) -> Self {
        match rows.checked_sub(TILE) {
            None | Some(0) => Self::new([rows; 4], LINES),
            Some(more) => Self::new([TILE, TILE, more, more], LINES),
        }
    }

    /// Gives the tiles these shapes, until the next ones. It takes hundreds of cycles, so not for each product.
    unsafe fn configure(&self) {
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *self, options(nostack)) };
    }
}

/// Pairs of bf16 in tiles: of 16 rows at a time 16 pairs each, of their next 16 pairs, and so on.
pub(super) const PAIR_TILES: Layout = Layout { words: |inputs| inputs / 2, tiles, write: write_pair_tile };

/// Words that a row takes for a block: its quants, and enough for scales and sums of 16 rows, however many a tile has.
const BLOCK_WORDS: usize = BYTE_LINES + 2 * TILE;

/// Quantised rows in tiles: of 16 rows at a time the quants of a block each, of the next block, and so on; behind them
/// 16 scales and 16 f32 sums of x a block.
pub(super) const BLOCK_TILES: Layout =
    Layout { words: |inputs| inputs.div_ceil(BLOCK) * BLOCK_WORDS, tiles, write: write_block_tile };

/// Groups of 16 rows, and what is left.
fn tiles(rows: usize) -> Vec<Range<usize>> {
    (0..rows).step_by(TILE).map(|first| first..rows.min(first + TILE)).collect()
}

vectorized! {
    fn write_pair_tile = round_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]);
    fn write_block_tile = quantise_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]);
}

#[inline(always)]
fn round_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]) {
    let (count, to) = (rows.len(), to.as_chunks_mut::<PANEL>().0);
    for (place, row) in rows.enumerate() {
        let steps = x.row(row)[..inputs].as_chunks::<{ 2 * PANEL }>().0;
        for (values, to) in steps.iter().zip(to[place..].iter_mut().step_by(count)) {
            write_pairs(values, to);
        }
    }
}

#[inline(always)]
fn quantise_tile(x: &Rows, rows: Range<usize>, inputs: usize, to: &mut [u32]) {
    let count = rows.len();
    let (quants, scales) = to.split_at_mut(inputs.div_ceil(BLOCK) * count * BYTE_LINES);
    // Rows that a tile lacks are scaled with the others: what was there before may be subnormal, which takes a hundred
    // times as long.
    if count < TILE {
        scales.fill(0);
    }
    let quants = quants.as_chunks_mut::<BYTE_LINES>().0;
    for (place, row) in rows.enumerate() {
        for (block, values) in x.row(row)[..inputs].chunks(BLOCK).enumerate() {
            let (scale, sums) = write_block(values, &mut quants[block * count + place]);
            scales[2 * block * TILE + place] = scale;
            scales[(2 * block + 1) * TILE + place] = sum_of_x(scale, sums);
        }
    }
}

/// Panels of a stripe, of which so many are multiplied at once. One of over 8,192 inputs in bf16 exceeds its bytes.
fn stripe(task: &Task, at_once: usize) -> usize {
    (STRIPE_BYTES / (task.w_stride * 4)).max(1).next_multiple_of(at_once)
}

/// The product of pairs of bf16, whose number is a multiple of [`LINES`]; `panels` are two or at least [`PANELS`].
///
/// Of each 32 inputs a tile sums the even and the odd ones apart, in their order and rounding once a product, and then
/// adds their sum to what those before came to. Numbers below 2^-126 count as zero.
pub(super) unsafe fn amx_bf16(task: &Task, panels: Range<usize>) {
    let (stripe, at_once) = (stripe(task, PANELS), panels.len().min(PANELS));
    for start in panels.clone().step_by(stripe) {
        for row in (0..task.rows).step_by(2 * TILE) {
            let rows = (task.rows - row).min(2 * TILE);
            unsafe { Shapes::of_rows(rows).configure() };
            for panel in (start..panels.end.min(start + stripe)).step_by(at_once) {
                // Of the last four some may be computed again.
                let panel = panel.min(panels.end - at_once);
                unsafe {
                    match rows {
                        ..=TILE if at_once == PANELS => four_panels(task, panel, row, rows),
                        ..=TILE => two_panels_of_few(task, panel, row, rows),
                        _ => (panel..panel + at_once).step_by(2).for_each(|panel| two_panels(task, panel, row, rows)),
                    }
                }
            }
        }
    }
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Bytes of a panel that are fetched ahead. What the processor fetches by itself ends with each page of 4 kB: 1, 16, 17
/// and 32 tokens of a 68M model took 7, 8, 17 and 15 % longer.
const FETCH: usize = 4096;

/// Fetches a tile of weights `{ahead}` bytes behind the pointer.
macro_rules! fetch {
    ($w:literal) => {
        concat!(
            ".irp o,0,64,128,192,256,320,384,448,512,576,640,704,768,832,896,960\n",
            "prefetcht0 [{",
            $w,
            "} + {ahead} + \\o]\n",
            ".endr"
        )
    };
}

/// Up to 16 rows times four panels.
unsafe fn four_panels(task: &Task, panel: usize, row: usize, rows: usize) {
    unsafe {
        let w: [*const u32; 4] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {line}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm6, [{w2} + {line}*1]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tileloadd tmm7, [{w3} + {line}*1]",
            "tdpbf16ps tmm3, tmm4, tmm7",
            fetch!("w0"),
            fetch!("w1"),
            fetch!("w2"),
            fetch!("w3"),
            "add {x}, {x_tile}",
            "add {w0}, 1024",
            "add {w1}, 1024",
            "add {w2}, 1024",
            "add {w3}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{y} + {y_stride}*1], tmm0",
            "tilestored [{y} + {y_stride}*1 + 64], tmm1",
            "tilestored [{y} + {y_stride}*1 + 128], tmm2",
            "tilestored [{y} + {y_stride}*1 + 192], tmm3",
            x = inout(reg) task.x.add(row * task.x_stride) => _,
            x_tile = in(reg) rows * LINE,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            w2 = inout(reg) w[2] => _,
            w3 = inout(reg) w[3] => _,
            line = in(reg) LINE,
            ahead = const FETCH,
            steps = inout(reg) task.inputs / (2 * LINES) => _,
            y = in(reg) task.y.add(row * task.y_stride + panel * PANEL),
            y_stride = in(reg) task.y_stride * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Up to 16 rows times two panels.
unsafe fn two_panels_of_few(task: &Task, panel: usize, row: usize, rows: usize) {
    unsafe {
        let w: [*const u32; 2] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "2:",
            "tileloadd tmm4, [{x} + {line}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            fetch!("w0"),
            fetch!("w1"),
            "add {x}, {x_tile}",
            "add {w0}, 1024",
            "add {w1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{y} + {y_stride}*1], tmm0",
            "tilestored [{y} + {y_stride}*1 + 64], tmm1",
            x = inout(reg) task.x.add(row * task.x_stride) => _,
            x_tile = in(reg) rows * LINE,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            line = in(reg) LINE,
            ahead = const FETCH,
            steps = inout(reg) task.inputs / (2 * LINES) => _,
            y = in(reg) task.y.add(row * task.y_stride + panel * PANEL),
            y_stride = in(reg) task.y_stride * 4,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// From 17 to 32 rows times two panels.
unsafe fn two_panels(task: &Task, panel: usize, row: usize, rows: usize) {
    let more = rows - TILE;
    unsafe {
        let w: [*const u32; 2] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        let x = task.x.add(row * task.x_stride);
        let second = task.x.add((row + TILE) * task.x_stride);
        let y = task.y.add(row * task.y_stride + panel * PANEL);
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x0} + {line}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{x1} + {line}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            fetch!("w0"),
            fetch!("w1"),
            "add {x0}, 1024",
            "add {x1}, {x_tile}",
            "add {w0}, 1024",
            "add {w1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{y0} + {y_stride}*1], tmm0",
            "tilestored [{y0} + {y_stride}*1 + 64], tmm1",
            "tilestored [{y1} + {y_stride}*1], tmm2",
            "tilestored [{y1} + {y_stride}*1 + 64], tmm3",
            x0 = inout(reg) x => _,
            x1 = inout(reg) second => _,
            x_tile = in(reg) more * LINE,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            line = in(reg) LINE,
            ahead = const FETCH,
            steps = inout(reg) task.inputs / (2 * LINES) => _,
            y0 = in(reg) y,
            y1 = in(reg) y.add(TILE * task.y_stride),
            y_stride = in(reg) task.y_stride * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The product of blocks. Its sums are those of AVX512-VNNI, to the bit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn amx_bytes(task: &Task, panels: Range<usize>) {
    match task.format {
        Format::Q4 | Format::Q4K => {
            for panel in panels {
                unsafe { widened(task, panel, |task| byte_panels(task, 0..1)) };
            }
        }
        _ => unsafe { byte_panels(task, panels) },
    }
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Panels of bytes that are multiplied at once, in turns. What the processor fetches by itself ends 20 lines ahead, for
/// each page that it sees read: of one panel that is less than what a block of 16 rows leaves time for. Two take 0.83
/// to 0.93 of the time of one by one, three and four no less.
const BYTE_PANELS: usize = 2;

/// The product of blocks in 8 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn byte_panels(task: &Task, panels: Range<usize>) {
    let stripe = stripe(task, BYTE_PANELS);
    // Q6K has a scale for half a block.
    let part_lines = if task.format == Format::Q6K { BYTE_LINES / 2 } else { BYTE_LINES };
    for start in panels.clone().step_by(stripe) {
        let end = panels.end.min(start + stripe);
        for row in (0..task.rows).step_by(TILE) {
            let rows = (task.rows - row).min(TILE);
            unsafe { Shapes::new([rows; 4], part_lines).configure() };
            for panel in (start..end).step_by(BYTE_PANELS) {
                unsafe {
                    match end - panel {
                        1 => tile_of_rows::<1>(task, panel, row),
                        _ => tile_of_rows::<BYTE_PANELS>(task, panel, row),
                    }
                }
            }
        }
    }
}

/// The next rows times `V` panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn tile_of_rows<const V: usize>(task: &Task, panel: usize, row: usize) {
    unsafe {
        match task.rows - row {
            ..=4 => tile_of_blocks::<4, V>(task, panel, row),
            5..=8 => tile_of_blocks::<8, V>(task, panel, row),
            9..=12 => tile_of_blocks::<12, V>(task, panel, row),
            _ => tile_of_blocks::<TILE, V>(task, panel, row),
        }
    }
}

/// The next rows, at most so many, times `V` panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn tile_of_blocks<const ROWS: usize, const V: usize>(task: &Task, panel: usize, row: usize) {
    let rows = ROWS.min(task.rows - row);
    unsafe {
        match task.format {
            Format::Q6K => blocks::<2, false, ROWS, V>(task, panel, row, rows),
            Format::Q5K => blocks::<1, true, ROWS, V>(task, panel, row, rows),
            _ => blocks::<1, false, ROWS, V>(task, panel, row, rows),
        }
    }
}

/// Calls `work` with the task of one panel in 4 bits, which is widened once for all rows: Q4 to Q8, Q4K to Q5K.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn widened(task: &Task, panel: usize, work: impl FnOnce(&Task)) {
    thread_local! {
        static LINES: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    }
    let minima = task.format == Format::Q4K;
    let format = if minima { Format::Q5K } else { Format::Q8 };
    let mut lines = LINES.take();
    lines.resize(format.lines(task.inputs).max(lines.len()), ZERO);
    let blocks = lines.chunks_exact_mut(format.block_lines()).take(task.inputs / BLOCK).enumerate();
    for (block, to) in blocks {
        unsafe {
            let w = task.w.add(panel * task.w_stride + block * task.format.block_lines() * PANEL);
            for line in 0..NIBBLE_LINES {
                let both = Vnni::load(w.add(line * PANEL));
                // Q4's quants stand for 8 less.
                let less = _mm512_set1_epi8(if minima { 0 } else { 8 });
                store(&mut to[line], _mm512_sub_epi8(Vnni::bits::<0>(both, NIBBLES), less));
                store(&mut to[NIBBLE_LINES + line], _mm512_sub_epi8(Vnni::bits::<4>(both, NIBBLES), less));
            }
            if minima {
                let ([scales], [minima]) = q4k_scales::<Vnni, 1>([w], block);
                store(&mut to[BYTE_LINES], scales);
                store(&mut to[BYTE_LINES + 1], minima);
            } else {
                store(&mut to[BYTE_LINES], Vnni::load(w.add(NIBBLE_LINES * PANEL)));
            }
        }
    }
    let y = unsafe { task.y.add(panel * PANEL) };
    work(&Task { w: lines.as_ptr().cast(), w_stride: lines.len() * PANEL, format, y, ..*task });
    LINES.set(lines);
}

#[inline(always)]
unsafe fn store(to: &mut Line, value: __m512i) {
    unsafe { _mm512_store_si512((&raw mut *to).cast(), value) };
}

/// The sums of a block: `[rows of x, outputs]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[i32; PANEL]; TILE]);

/// Blocks that are multiplied before their sums are scaled: meanwhile those of earlier ones are.
const AHEAD: usize = 3;

/// Blocks of weights that are fetched ahead, of each panel: 4 kB.
const FETCH_BLOCKS: usize = 7;

/// Up to `ROWS` rows times `V` panels, whose blocks have scales for each of so many `PARTS` and perhaps minima.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn blocks<const PARTS: usize, const MINIMA: bool, const ROWS: usize, const V: usize>(
    task: &Task,
    panel: usize,
    row: usize,
    rows: usize,
) {
    let part_lines = BYTE_LINES / PARTS;
    let mut sums = [[Sums([[0; PANEL]; TILE]); V]; AHEAD + 1];
    let count = task.inputs.div_ceil(BLOCK) * PARTS;
    let block_words = task.format.block_lines() * PANEL;
    unsafe {
        let w: [*const u32; V] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        let quants = task.x.add(row * task.x_stride);
        let of_x = quants.add(count / PARTS * rows * BYTE_LINES);
        let mut totals = [[_mm512_setzero_ps(); ROWS]; V];
        for number in 0..count + AHEAD {
            if number < count {
                let (block, part) = (number / PARTS, number % PARTS);
                let x = quants.add(block * rows * BYTE_LINES + part * part_lines);
                for (w, sums) in w.iter().zip(&mut sums[number % (AHEAD + 1)]) {
                    let w = w.add(block * block_words);
                    if part == 0 {
                        fetch_block(task.format, w.wrapping_add(FETCH_BLOCKS * block_words));
                    }
                    block_sums(x, w.add(part * part_lines * PANEL), sums);
                }
            }
            let Some(number) = number.checked_sub(AHEAD) else { continue };
            let (block, part) = (number / PARTS, number % PARTS);
            let (sums, of_x) = (&sums[number % (AHEAD + 1)], of_x.add(2 * block * TILE));
            for ((w, sums), totals) in w.iter().zip(sums).zip(&mut totals) {
                let scales = w.add(block * block_words + BYTE_LINES * PANEL);
                let weights = _mm512_load_ps(scales.add(part * PANEL).cast());
                for (t, total) in totals.iter_mut().enumerate() {
                    let scale = _mm512_mul_ps(weights, _mm512_set1_ps(*of_x.add(t)));
                    let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.0[t].as_ptr().cast()));
                    *total = _mm512_fmadd_ps(sum, scale, *total);
                }
                if MINIMA {
                    let minima = _mm512_load_ps(scales.add(PANEL).cast());
                    for (t, total) in totals.iter_mut().enumerate() {
                        *total = _mm512_fnmadd_ps(minima, _mm512_set1_ps(*of_x.add(TILE + t)), *total);
                    }
                }
            }
        }
        for (v, totals) in totals.iter().enumerate() {
            for (t, total) in totals.iter().take(rows).enumerate() {
                _mm512_storeu_ps(task.y.add((row + t) * task.y_stride + (panel + v) * PANEL), *total);
            }
        }
    }
}

/// Fetches a block of weights into the cache. No address is wrong.
#[inline(always)]
fn fetch_block(format: Format, w: *const u32) {
    for line in 0..format.block_lines() {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(line * PANEL).cast()) };
    }
}

/// The products of a block of x and of weights.
#[inline(always)]
unsafe fn block_sums(x: *const f32, w: *const u32, sums: &mut Sums) {
    unsafe {
        asm!(
            "tileloadd tmm4, [{x} + {x_line}*1]",
            "tileloadd tmm6, [{w} + {line}*1]",
            "tilezero tmm0",
            "tdpbssd tmm0, tmm4, tmm6",
            "tilestored [{sums} + {line}*1], tmm0",
            x = in(reg) x,
            x_line = in(reg) BLOCK,
            w = in(reg) w,
            line = in(reg) LINE,
            sums = in(reg) sums,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}
