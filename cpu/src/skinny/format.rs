//! How weights are stored: lines of 16 outputs, and what a line holds of them in each format.

/// Outputs of a panel.
pub(crate) const PANEL: usize = 16;

/// Inputs that a tile of pairs of bf16 takes at once.
pub(crate) const TILE_INPUTS: usize = 2 * PANEL;

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// 32 bits, as they are.
    #[default]
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
    pub(crate) fn lines(self, inputs: usize) -> usize {
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

/// The bits of the nearest bf16, of two the even one.
#[inline(always)]
pub(crate) fn bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    // NaN stays one: its highest bit of the mantissa is set.
    match value.is_nan() {
        true => bits >> 16 | 0x40,
        false => (bits + 0x7fff + (bits >> 16 & 1)) >> 16,
    }
}
