//! Blocks of quantised weights as GGUF stores them.
//!
//! The layouts are those of `ggml-quants.c` of llama.cpp. Every weight is an integer times a scale, less a minimum;
//! scales and minima are products of an f16 and at most 8 bits, which f32 holds.

use super::format::{BLOCK, BYTE_LINES, Format, NIBBLE_LINES};

#[cfg(test)]
mod tests;

/// Bits of a 6-bit scale and of the minimum above it in a line of [`Format::Q4K`].
pub(super) const SIX_BITS: u32 = 63;

/// The bits of such a line that are the f32 factor.
pub(super) const FACTOR: u32 = !0xfff;

/// Quants of a block of 32 inputs.
type Quants = [u8; BLOCK];

impl Format {
    /// Inputs and bytes of a block in a GGUF file; none for formats that are no blocks.
    #[must_use]
    pub fn ggml_block(self) -> Option<(usize, usize)> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Q8 => Some((32, 34)),
            Self::Q4 => Some((32, 18)),
            Self::Q4K => Some((256, 144)),
            Self::Q5K => Some((256, 176)),
            Self::Q6K => Some((256, 210)),
        }
    }

    /// Bytes of a row in a GGUF file.
    pub(super) fn row_bytes(self, inputs: usize) -> usize {
        self.ggml_block().map_or(4 * inputs, |(block, bytes)| inputs / block * bytes)
    }
}

/// Gives the lines of a row of blocks and its bits in them.
pub(super) fn pack_blocks(row: &[u8], format: Format, set: &mut dyn FnMut(usize, u32)) {
    let Some((inputs, bytes)) = format.ggml_block() else { return };
    let lines = inputs / BLOCK * format.block_lines();
    for (number, block) in row.chunks_exact(bytes).enumerate() {
        let mut set = |line: usize, bits: u32| set(number * lines + line, bits);
        match format {
            Format::F32 | Format::Bf16 => {}
            Format::Q8 => {
                set_bytes(std::array::from_fn(|input| block[2 + input]), 0, &mut set);
                set(BYTE_LINES, f16(block, 0).to_bits());
            }
            Format::Q4 => {
                let quants = std::array::from_fn(|input| block[2 + input % 16] >> (input / 16 * 4) & 15);
                set_nibbles(quants, 0, &mut set);
                set(NIBBLE_LINES, f16(block, 0).to_bits());
            }
            Format::Q4K => pack_q4k(block, &mut set),
            Format::Q5K => pack_q5k(block, &mut set),
            Format::Q6K => pack_q6k(block, &mut set),
        }
    }
}

/// d, dmin, 12 bytes of scales and minima, then quants: of each 64 inputs the first 32 in the lower halves.
fn pack_q4k(block: &[u8], set: &mut dyn FnMut(usize, u32)) {
    for part in 0..8 {
        let first = part * Format::Q4K.block_lines();
        set_nibbles(std::array::from_fn(|input| nibble(&block[16..], part, input)), first, set);
        let (scale, minimum) = six_bits(&block[4..16], part);
        let factor = f16(block, part % 2 * 2).to_bits();
        set(first + NIBBLE_LINES, factor | u32::from(scale) | u32::from(minimum) << 6);
    }
}

/// The same with a fifth bit for each quant in front of the others: bit `part` of byte `input`.
fn pack_q5k(block: &[u8], set: &mut dyn FnMut(usize, u32)) {
    for part in 0..8 {
        let first = part * Format::Q5K.block_lines();
        let fifth = |input: usize| (block[16 + input] >> part & 1) << 4;
        set_bytes(std::array::from_fn(|input| nibble(&block[48..], part, input) | fifth(input)), first, set);
        let (scale, minimum) = six_bits(&block[4..16], part);
        set(first + BYTE_LINES, (f16(block, 0) * f32::from(scale)).to_bits());
        set(first + BYTE_LINES + 1, (f16(block, 2) * f32::from(minimum)).to_bits());
    }
}

/// 128 bytes of lower and 64 of upper bits, 16 scales in 8 bits, d. Each half of the inputs has four parts of 32.
fn pack_q6k(block: &[u8], set: &mut dyn FnMut(usize, u32)) {
    for part in 0..8 {
        let (half, quarter) = (part / 4, part % 4);
        let quant = |input: usize| {
            let low = block[half * 64 + quarter % 2 * 32 + input] >> (quarter / 2 * 4) & 15;
            let high = block[128 + half * 32 + input] >> (quarter * 2) & 3;
            (low | high << 4).wrapping_sub(32)
        };
        let first = part * Format::Q6K.block_lines();
        set_bytes(std::array::from_fn(quant), first, set);
        for sixteen in 0..2 {
            let scale = f16(block, 208) * f32::from(block[192 + 2 * part + sixteen].cast_signed());
            set(first + BYTE_LINES + sixteen, scale.to_bits());
        }
    }
}

/// The lower 4 bits of an input of a part of a K block: of two parts, one has the lower halves of 32 bytes.
fn nibble(bytes: &[u8], part: usize, input: usize) -> u8 {
    bytes[part / 2 * 32 + input] >> (part % 2 * 4) & 15
}

/// Scale and minimum of a part of a K block. The last four parts' upper two bits are those of the first four's bytes.
fn six_bits(bytes: &[u8], part: usize) -> (u8, u8) {
    match part.checked_sub(4) {
        None => (bytes[part] & 63, bytes[part + 4] & 63),
        Some(early) => {
            let (low, upper) = (bytes[part + 4], |byte: u8| byte >> 6 << 4);
            (low & 15 | upper(bytes[early]), low >> 4 | upper(bytes[part]))
        }
    }
}

/// Four inputs a line.
fn set_bytes(quants: Quants, first: usize, set: &mut dyn FnMut(usize, u32)) {
    for (line, quants) in quants.as_chunks::<4>().0.iter().enumerate() {
        set(first + line, u32::from_le_bytes(*quants));
    }
}

/// Four inputs a line in the lower halves of its bytes, and in the upper ones those 16 inputs later.
fn set_nibbles(quants: Quants, first: usize, set: &mut dyn FnMut(usize, u32)) {
    let (early, late) = quants.split_at(BLOCK / 2);
    let mut bytes = [0; BLOCK / 2];
    bytes.iter_mut().zip(early.iter().zip(late)).for_each(|(byte, (early, late))| *byte = early | late << 4);
    for (line, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
        set(first + line, u32::from_le_bytes(*bytes));
    }
}

/// The f16 at a place, which an f32 holds: exponents differ by 112, and the product gives subnormals theirs.
fn f16(bytes: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    f32::from_bits((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 2f32.powi(112)
}
