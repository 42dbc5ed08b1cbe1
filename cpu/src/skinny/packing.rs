//! Weights in panels: the layout that a product streams.

/// Outputs of a panel.
pub(crate) const PANEL: usize = 16;

/// The weights of 16 outputs for one input (f32 bits), or for two (bf16, the earlier one in the low half).
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
}

impl Format {
    /// Lines of a panel.
    pub(super) fn lines(self, inputs: usize) -> usize {
        match self {
            Self::F32 => inputs,
            Self::Bf16 => inputs.div_ceil(2),
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
    /// of each weight: round before.
    pub(crate) fn pack(parts: &[&[f32]], inputs: usize, format: Format) -> Self {
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
