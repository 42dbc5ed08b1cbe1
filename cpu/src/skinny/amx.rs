//! AMX: tiles of 16 rows of 64 bytes, multiplied in one instruction. Panels are such tiles as they are stored.
//!
//! bf16: a tile of 16 rows of x and 32 inputs times a panel's 32 inputs takes 16 cycles, a sixteenth of what AVX512-BF16
//! takes. Bytes: likewise for a block of 32 inputs, whose sums are then scaled as in [`quants`](super::quants), to the
//! bit.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "each function needs its instruction set, its caller's pointers and the bounds of the task"
)]

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
    sync::OnceLock,
};

use super::{
    isa::{Isa, isa},
    kernel::Task,
    packing::{BLOCK, BLOCK_LINES, PANEL},
    quants::X_BLOCK,
};

/// Rows of a tile.
const TILE: usize = 16;

/// Bytes of a line of a panel, of a row of a tile, and of a tile.
const LINE: usize = PANEL * 4;

/// Lines of a panel that a tile holds.
pub(super) const LINES: usize = TILE;

/// Bytes of panels that one pass over the rows takes: they stay in the second-level cache.
const STRIPE_BYTES: usize = 1 << 19;

/// Panels that a pass of 16 rows takes at once: the sums of four products in flight hide their latency.
pub(super) const PANELS: usize = 4;

/// Blocks whose sums wait in the first-level cache to be scaled.
const CHUNK: usize = 16;

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
}

/// Panels from `range` in stripes that stay in the cache, and for each stripe all rows, `most` at a time: calls `pass`
/// with the first of `at_once` panels, the first row and the number of rows. Some panels may be computed twice.
fn passes(task: &Task, range: Range<usize>, (at_once, most): (usize, usize), pass: impl Fn(usize, usize, usize)) {
    let stripe = (STRIPE_BYTES / (task.w_stride * 4)).next_multiple_of(PANELS);
    for start in range.clone().step_by(stripe) {
        let end = range.end.min(start + stripe);
        for row in (0..task.rows).step_by(most) {
            for panel in (start..end).step_by(at_once) {
                pass(panel.min(range.end - at_once), row, most.min(task.rows - row));
            }
        }
    }
}

/// The product of pairs of bf16, whose number is a multiple of [`LINES`]; `panels` are at least [`PANELS`].
pub(super) unsafe fn amx_bf16(task: &Task, panels: Range<usize>) {
    passes(task, panels, (PANELS, 2 * TILE), |panel, row, rows| unsafe {
        match rows {
            ..=TILE => four_panels(task, panel, row, rows),
            _ => (0..PANELS).step_by(2).for_each(|next| two_panels(task, panel + next, row, rows - TILE)),
        }
    });
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Up to 16 rows times four panels.
unsafe fn four_panels(task: &Task, panel: usize, row: usize, rows: usize) {
    let shapes = Shapes::new([rows; 4], LINES);
    unsafe {
        let w: [*const u32; 4] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm6, [{w2} + {line}*1]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tileloadd tmm7, [{w3} + {line}*1]",
            "tdpbf16ps tmm3, tmm4, tmm7",
            "add {x}, 64",
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
            shapes = in(reg) &raw const shapes,
            x = inout(reg) task.x.add(row * task.x_stride) => _,
            x_stride = in(reg) task.x_stride * 4,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            w2 = inout(reg) w[2] => _,
            w3 = inout(reg) w[3] => _,
            line = in(reg) LINE,
            steps = inout(reg) task.inputs / LINES => _,
            y = in(reg) task.y.add(row * task.y_stride + panel * PANEL),
            y_stride = in(reg) task.y_stride * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// 16 rows and `more`, up to 16 again, times two panels.
unsafe fn two_panels(task: &Task, panel: usize, row: usize, more: usize) {
    let shapes = Shapes::new([TILE, TILE, more, more], LINES);
    let rows = [row, row + TILE];
    unsafe {
        let w: [*const u32; 2] = std::array::from_fn(|v| task.w.add((panel + v) * task.w_stride));
        let x = rows.map(|row| task.x.add(row * task.x_stride));
        let y = rows.map(|row| task.y.add(row * task.y_stride + panel * PANEL));
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x0} + {x_stride}*1]",
            "tileloadd tmm6, [{w0} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{x1} + {x_stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {x0}, 64",
            "add {x1}, 64",
            "add {w0}, 1024",
            "add {w1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{y0} + {y_stride}*1], tmm0",
            "tilestored [{y0} + {y_stride}*1 + 64], tmm1",
            "tilestored [{y1} + {y_stride}*1], tmm2",
            "tilestored [{y1} + {y_stride}*1 + 64], tmm3",
            shapes = in(reg) &raw const shapes,
            x0 = inout(reg) x[0] => _,
            x1 = inout(reg) x[1] => _,
            x_stride = in(reg) task.x_stride * 4,
            w0 = inout(reg) w[0] => _,
            w1 = inout(reg) w[1] => _,
            line = in(reg) LINE,
            steps = inout(reg) task.inputs / LINES => _,
            y0 = in(reg) y[0],
            y1 = in(reg) y[1],
            y_stride = in(reg) task.y_stride * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The product of bytes. Its sums are those of AVX512-VNNI, to the bit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn amx_bytes(task: &Task, panels: Range<usize>) {
    passes(task, panels, (1, TILE), |panel, row, rows| unsafe { blocks(task, panel, row, rows) });
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// The sums of some blocks: `[blocks, rows of x, outputs]`.
#[repr(C, align(64))]
struct Sums([[[i32; PANEL]; TILE]; CHUNK]);

/// Up to 16 rows times a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn blocks(task: &Task, panel: usize, row: usize, rows: usize) {
    let shapes = Shapes::new([rows; 4], BLOCK / 4);
    let mut sums = Sums([[[0; PANEL]; TILE]; CHUNK]);
    unsafe {
        let w = task.w.add(panel * task.w_stride);
        // Rows behind the last one repeat it.
        let x: [*const f32; TILE] = std::array::from_fn(|t| task.x.add((row + t.min(rows - 1)) * task.x_stride));
        let mut totals = [_mm512_setzero_ps(); TILE];
        let count = task.inputs.div_ceil(BLOCK);
        for start in (0..count).step_by(CHUNK) {
            let chunk = CHUNK.min(count - start);
            sums_of_blocks(&shapes, chunk, (x[0].add(start * X_BLOCK), task.x_stride), w.add(start * BLOCK_LINES * PANEL), &mut sums);
            for (block, sums) in (start..start + chunk).zip(&sums.0) {
                let scales = _mm512_loadu_ps(w.add((block * BLOCK_LINES + BLOCK / 4) * PANEL).cast());
                for ((total, sum), x) in totals.iter_mut().zip(sums).zip(x) {
                    let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum.as_ptr().cast()));
                    let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*x.add(block * X_BLOCK + X_BLOCK - 2)));
                    *total = _mm512_fmadd_ps(sum, scale, *total);
                }
            }
        }
        for (t, total) in totals.iter().take(rows).enumerate() {
            _mm512_storeu_ps(task.y.add((row + t) * task.y_stride + panel * PANEL), *total);
        }
    }
}

/// The products of `count` blocks of x and weights.
unsafe fn sums_of_blocks(
    shapes: &Shapes,
    count: usize,
    (x, x_stride): (*const f32, usize),
    w: *const u32,
    sums: &mut Sums,
) {
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "2:",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            "tileloadd tmm6, [{w} + {line}*1]",
            "tilezero tmm0",
            "tdpbssd tmm0, tmm4, tmm6",
            "tilestored [{sums} + {line}*1], tmm0",
            "add {x}, {x_block}",
            "add {w}, {w_block}",
            "add {sums}, 1024",
            "dec {count}",
            "jnz 2b",
            shapes = in(reg) shapes,
            count = inout(reg) count => _,
            x = inout(reg) x => _,
            x_stride = in(reg) x_stride * 4,
            w = inout(reg) w => _,
            line = in(reg) LINE,
            sums = inout(reg) sums => _,
            x_block = const X_BLOCK * 4,
            w_block = const BLOCK_LINES * LINE,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}
