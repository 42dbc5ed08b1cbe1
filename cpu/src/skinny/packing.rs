//! Weights in panels: the layout that a product streams.

use super::quants::write_block;

/// Outputs of a panel.
pub(crate) const PANEL: usize = 16;

/// Inputs of a block of quantised weights, which share a scale.
pub(super) const BLOCK: usize = 32;

/// Lines of a block: four inputs each, and one of scales.
pub(super) const BLOCK_LINES: usize = BLOCK / 4 + 1;

/// The weights of 16 outputs for one input (f32 bits), for two (bf16) or for four (int8), the earliest in the lowest
/// bits; or the f32 scales of a block.
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
}

impl Format {
    /// Lines of a panel.
    pub(super) fn lines(self, inputs: usize) -> usize {
        match self {
            Self::F32 => inputs,
            Self::Bf16 => inputs.div_ceil(2),
            Self::Q8 => inputs.div_ceil(BLOCK) * BLOCK_LINES,
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
    /// Packs matrices `[outputs, inputs]` (row-major, one below the other) of equal `inputs`. bf16 keeps the upper half
    /// of each weight: round before. Q8 rounds to the nearest of 255 multiples of the block's greatest weight, which
    /// gives the quants of a matrix that was quantised so before.
    pub(crate) fn pack(parts: &[&[f32]], inputs: usize, format: Format) -> Self {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum::<usize>();
        let depth = format.lines(inputs);
        let mut lines = vec![ZERO; outputs.div_ceil(PANEL) * depth];
        let rows = parts.iter().flat_map(|part| part.chunks_exact(inputs));
        for (output, row) in rows.enumerate() {
            let panel = &mut lines[output / PANEL * depth..][..depth];
            let mut set = |line: usize, bits: u32| panel[line].0[output % PANEL] |= bits;
            match format {
                Format::F32 => row.iter().enumerate().for_each(|(input, weight)| set(input, weight.to_bits())),
                Format::Bf16 => row.iter().enumerate().for_each(|(input, weight)| {
                    set(input / 2, (weight.to_bits() >> 16) << (input % 2 * 16));
                }),
                Format::Q8 => row.chunks(BLOCK).enumerate().for_each(|(block, weights)| {
                    let (first, mut words) = (block * BLOCK_LINES, [0; BLOCK / 4]);
                    let (scale, _) = write_block(weights, &mut words);
                    words.into_iter().enumerate().for_each(|(line, quants)| set(first + line, quants));
                    set(first + BLOCK / 4, half(f32::from_bits(scale)).to_bits());
                }),
            }
        }
        Self { lines, format, inputs, outputs }
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

/// The scale of a block, and each value over it, rounded to the nearest integer from -127 to 127, ties to even.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "rounded, and at most 127")]
pub(super) fn quantise(values: &[f32; BLOCK]) -> (f32, [i8; BLOCK]) {
    let mut greatest = [0f32; 16];
    for half in values.as_chunks::<16>().0 {
        greatest.iter_mut().zip(half).for_each(|(greatest, value)| *greatest = greatest.max(value.abs()));
    }
    let scale = greatest.into_iter().fold(0f32, f32::max) / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, of two to the even one.
    const ROUND: f32 = 12_582_912.0;
    (scale, values.map(|value| ((value * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) as i8))
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
