//! Weights in panels: the layout that a product streams.

use rayon::prelude::*;

use super::{
    format::{BLOCK, BYTE_LINES, Format, Line, PANEL, ZERO},
    ggml,
    quants::write_block,
};

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

    /// The matrix of these rows, of `inputs` weights each.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn with_rows(&self, rows: &[u32], inputs: usize) -> Self {
        fn selected<T: Copy>(all: &[T], rows: &[u32], length: usize) -> Vec<T> {
            rows.iter().flat_map(|&row| &all[row as usize * length..][..length]).copied().collect()
        }
        match self {
            Self::Values(values, format) => Self::Values(selected(values, rows, inputs), *format),
            Self::Blocks(bytes, format) => Self::Blocks(selected(bytes, rows, format.row_bytes(inputs)), *format),
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
    /// Packs matrices of equal `inputs` and format, one below the other. All threads of the pool take part: it is
    /// faster, and on a machine of several sockets the system puts a page beside the core that first writes to it, so
    /// weights lie in the memory of all sockets whose cores multiply, and are read from all of them.
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

    /// How it is stored.
    pub(crate) fn format(&self) -> Format {
        self.format
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

/// The nearest number of 16 bits, as GGUF's Q8_0 stores scales; of two the even one. Up to 65,504.
pub(super) fn half(value: f32) -> f32 {
    let least_normal = 2f32.powi(-14);
    if value < least_normal {
        return (value * 2f32.powi(24)).round_ties_even() * 2f32.powi(-24);
    }
    let bits = value.to_bits();
    f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff)
}
