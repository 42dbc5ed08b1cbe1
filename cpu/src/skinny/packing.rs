//! Weights in panels: the layout that a product streams.

use rayon::prelude::*;

use super::{ggml, quants::write_block};

/// Outputs of a panel.
pub(crate) const PANEL: usize = 16;

/// Inputs of a block of quantised weights, which share a scale.
pub(super) const BLOCK: usize = 32;

/// Lines of the quants of a block in 8 bits, four inputs each.
pub(super) const BYTE_LINES: usize = BLOCK / 4;

/// Lines of the quants of a block in 4 bits, eight inputs each.
pub(super) const NIBBLE_LINES: usize = BLOCK / 8;

/// The weights of 16 outputs for one input (f32 bits), for two (bf16), for four (int8) or for eight (4 bits), the
/// earliest in the lowest bits; or the f32 scales of a block.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u32; PANEL]);

/// No weights.
pub(crate) const ZERO: Line = Line([0; PANEL]);

/// How weights are stored. Sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 32 bits, as they are.
    F32,
    /// The upper 16 bits of each f32.
    Bf16,
    /// Blocks of 32 inputs in 8 bits and a scale, the numbers of GGUF's Q8_0; rows of x are quantised likewise.
    Q8,
    /// GGUF's Q4_0: blocks in 4 bits from -8 to 7 and a scale.
    Q4,
    /// GGUF's Q4_K: blocks in 4 bits from 0 to 15, a scale and a minimum. Those are 6 bits times factors d and dmin of
    /// 256 inputs, which as f32 leave 13 bits empty: of two blocks, the first one's line of scales holds d, the
    /// other's dmin, and both hold their own 6 bits (of the scale lowest) below.
    Q4K,
    /// GGUF's Q5_K, widened: blocks in 8 bits from 0 to 31, and a line each of f32 scales and minima.
    Q5K,
    /// GGUF's Q6_K, widened: blocks in 8 bits from -32 to 31, and a line of f32 scales for each 16 inputs.
    Q6K,
}

impl Format {
    /// Lines of a panel.
    pub(super) fn lines(self, inputs: usize) -> usize {
        match self {
            Self::F32 => inputs,
            Self::Bf16 => inputs.div_ceil(2),
            Self::Q8 | Self::Q4 | Self::Q4K | Self::Q5K | Self::Q6K => inputs.div_ceil(BLOCK) * self.block_lines(),
        }
    }

    /// Lines of a block: its quants, and behind them its scales.
    pub(super) const fn block_lines(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 0,
            Self::Q8 => BYTE_LINES + 1,
            Self::Q4 | Self::Q4K => NIBBLE_LINES + 1,
            Self::Q5K | Self::Q6K => BYTE_LINES + 2,
        }
    }
}

/// A weight matrix `[outputs, inputs]`, row-major.
#[derive(Debug)]
pub enum Matrix {
    /// Weights to be stored in a format: [`Format::F32`], [`Format::Bf16`], which keeps the upper half of each (round
    /// before), or [`Format::Q8`], which rounds to the nearest of 255 multiples of the block's greatest weight. That
    /// gives the quants of a matrix that was quantised so before.
    Values(Vec<f32>, Format),
    /// Blocks as [GGUF](Format::ggml_block) stores them, which are read without rounding.
    Blocks(Vec<u8>, Format),
}

impl Matrix {
    /// How it is to be stored.
    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Values(_, format) | Self::Blocks(_, format) => *format,
        }
    }

    fn outputs(&self, inputs: usize) -> usize {
        match self {
            Self::Values(values, _) => values.len() / inputs,
            Self::Blocks(bytes, format) => bytes.len() / format.row_bytes(inputs),
        }
    }

    /// Gives the lines of a row and its bits in them.
    fn pack_row(&self, row: usize, inputs: usize, set: &mut dyn FnMut(usize, u32)) {
        match self {
            Self::Values(values, format) => pack_values(&values[row * inputs..][..inputs], *format, set),
            Self::Blocks(bytes, format) => {
                let size = format.row_bytes(inputs);
                ggml::pack_blocks(&bytes[row * size..][..size], *format, set);
            }
        }
    }
}

/// Panels of weights, borrowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) lines: &'a [Line],
    pub(crate) format: Format,
    /// The length of every sum.
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Lines from one panel to the next.
    pub(crate) stride: usize,
}

/// A weight matrix in panels.
#[derive(Debug)]
pub(crate) struct PackedMatrix {
    lines: Vec<Line>,
    format: Format,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl PackedMatrix {
    /// Packs matrices of equal `inputs` and format, one below the other. All threads take part: it is faster, and on a
    /// machine of several sockets the system puts a page beside the core that first writes to it, so weights lie in the
    /// memory of all sockets and are read from all of them.
    pub(crate) fn pack(parts: &[Matrix], inputs: usize) -> Self {
        let format = parts.first().map_or(Format::F32, Matrix::format);
        let block = format.ggml_block().map_or(1, |(inputs, _)| inputs);
        assert!(format == Format::Q8 || inputs.is_multiple_of(block), "{inputs} inputs are no blocks of {block}");
        let rows: Vec<(&Matrix, usize)> =
            parts.iter().flat_map(|part| (0..part.outputs(inputs)).map(move |row| (part, row))).collect();
        let (outputs, depth) = (rows.len(), format.lines(inputs));
        let mut lines: Vec<Line> =
            (0..outputs.div_ceil(PANEL) * depth).into_par_iter().with_min_len(depth).map(|_| ZERO).collect();
        lines.par_chunks_mut(depth.max(1)).zip(rows.par_chunks(PANEL)).for_each(|(panel, rows)| {
            for (output, (part, row)) in rows.iter().enumerate() {
                part.pack_row(*row, inputs, &mut |line, bits| panel[line].0[output] |= bits);
            }
        });
        Self { lines, format, inputs, outputs }
    }

    /// Rows of the matrix.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// All of its panels.
    pub(super) fn panels(&self) -> Panels<'_> {
        Panels {
            lines: &self.lines,
            format: self.format,
            inputs: self.inputs,
            outputs: self.outputs,
            stride: self.lines.len() / self.outputs.div_ceil(PANEL).max(1),
        }
    }
}

/// Gives the lines of a row of weights and its bits in them.
fn pack_values(row: &[f32], format: Format, set: &mut dyn FnMut(usize, u32)) {
    match format {
        Format::F32 => row.iter().enumerate().for_each(|(input, weight)| set(input, weight.to_bits())),
        Format::Bf16 => row.iter().enumerate().for_each(|(input, weight)| {
            set(input / 2, (weight.to_bits() >> 16) << (input % 2 * 16));
        }),
        Format::Q8 => row.chunks(BLOCK).enumerate().for_each(|(block, weights)| {
            let (first, mut words) = (block * format.block_lines(), [0; BYTE_LINES]);
            let (scale, _) = write_block(weights, &mut words);
            words.into_iter().enumerate().for_each(|(line, quants)| set(first + line, quants));
            set(first + BYTE_LINES, half(f32::from_bits(scale)).to_bits());
        }),
        Format::Q4 | Format::Q4K | Format::Q5K | Format::Q6K => unreachable!("these come in blocks"),
    }
}

/// The scale of a block, and each value over it, rounded to the nearest integer from -127 to 127, ties to even.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "rounded, and at most 127")]
pub(super) fn quantise(values: &[f32; BLOCK]) -> (f32, [i8; BLOCK]) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut greatest = [0f32; 16];
    for half in values.as_chunks::<16>().0 {
        greatest.iter_mut().zip(half).for_each(|(greatest, value)| *greatest = larger(*greatest, value.abs()));
    }
    for width in [8, 4, 2, 1] {
        let (low, high) = greatest.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low = larger(*low, *high));
    }
    let scale = greatest[0] / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, of two to the even one.
    const ROUND: f32 = 12_582_912.0;
    let mut quants = [0; BLOCK];
    // No `map`: of an array of this length it is called, one by one.
    for (quant, value) in quants.iter_mut().zip(values) {
        *quant = ((value * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) as i8;
    }
    (scale, quants)
}

/// The nearest number of 16 bits, as GGUF's Q8_0 stores scales; of two the even one. Up to 65,504.
pub(super) fn half(value: f32) -> f32 {
    let least_normal = 2f32.powi(-14);
    if value < least_normal {
        return (value * 2f32.powi(24)).round_ties_even() * 2f32.powi(-24);
    }
    let bits = value.to_bits();
    f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff)
}
