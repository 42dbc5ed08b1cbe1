//! The products of x86-64 processors.

use super::{
    amx, avx2, avx512, bf16,
    format::{Format, TILE_INPUTS},
    isa::{Isa, isa},
    kernel::{AddPairs, Product},
    layout::Layout,
    portable, quants,
};

pub(super) use super::amx::PANELS;
pub(crate) use super::isa::vectorized;

/// Rows from which on tiles multiply bytes faster than AVX512-VNNI, and 4 bits, which they have to widen first.
const TILED_ROWS: usize = 6;
const TILED_ROWS_OF_NIBBLES: usize = 96;

/// The product of blocks for so many rows; all but the portable one give the same sums.
pub(super) fn bytes_product(format: Format, rows: usize) -> (Product, Layout) {
    let tiled = if matches!(format, Format::Q4 | Format::Q4K) { TILED_ROWS_OF_NIBBLES } else { TILED_ROWS };
    match isa() {
        Isa::Avx512 if rows >= tiled && amx::amx() => (amx::amx_bytes, amx::BLOCK_TILES),
        Isa::Avx512 if is_x86_feature_detected!("avx512vnni") => {
            (avx512::avx512_vnni, quants::blocks::<{ avx512::ROWS }>(format))
        }
        Isa::Avx512 | Isa::Avx2 => (avx2::avx2_bytes, quants::blocks::<{ avx2::BYTES_ROWS }>(format)),
        Isa::Portable => (portable::portable_bytes, quants::blocks::<{ portable::ROWS }>(format)),
    }
}

/// The product of f32 elements; weights in bf16 are widened.
pub(super) fn widened_product() -> Product {
    match isa() {
        Isa::Avx512 => avx512::avx512,
        Isa::Avx2 => avx2::avx2,
        Isa::Portable => portable::portable,
    }
}

/// The product of pairs of bf16 by tiles, over a multiple of [`TILE_INPUTS`] into two panels or at least [`PANELS`].
pub(super) fn tiled_product() -> Option<(Product, Layout)> {
    amx::amx().then_some((amx::amx_bf16, amx::PAIR_TILES))
}

/// The product of pairs of bf16 for so many inputs and panels, if the processor multiplies those. It must not depend on
/// the rows: tiles round sums in another order.
pub(super) fn paired_product(inputs: usize, panels: usize) -> Option<(Product, Layout)> {
    if let Some(tiled) = tiled_product().filter(|_| inputs.is_multiple_of(TILE_INPUTS) && panels >= PANELS) {
        return Some(tiled);
    }
    untiled_product().map(|(product, layout, _)| (product, layout))
}

/// The product of pairs of bf16 in the order of the inputs, if the processor has one, and what goes on with its sums.
pub(super) fn untiled_product() -> Option<(Product, Layout, AddPairs)> {
    let has = isa() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16");
    has.then_some((avx512::avx512_bf16, bf16::pairs::<{ avx512::ROWS }>(), avx512::add_pairs))
}

#[cfg(test)]
pub(super) mod tests;
