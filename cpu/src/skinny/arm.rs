//! The products of aarch64 processors.

use std::arch::is_aarch64_feature_detected;

use super::{
    format::Format,
    kernel::{AddPairs, Product},
    layout::Layout,
    neon, quants,
};

/// Panels that a thread takes at least.
pub(super) const PANELS: usize = 4;

/// Defines functions that call their bodies, which are compiled for NEON like all code.
macro_rules! vectorized {
    ($($(#[$attribute:meta])* $visibility:vis fn $name:ident $([$($generics:tt)*][$($names:tt)*])? =
        $body:ident($($argument:ident: $kind:ty),*) $(-> $output:ty)?;)*) => { $(
        $(#[$attribute])*
        $visibility fn $name $(<$($generics)*>)? ($($argument: $kind),*) $(-> $output)? {
            $body $(::<$($names)*>)? ($($argument),*)
        }
    )* };
}
pub(crate) use vectorized;

/// Whether the processor multiplies bytes four at a time.
fn has_dot() -> bool {
    is_aarch64_feature_detected!("dotprod")
}

/// The product of blocks, the same for any number of rows.
pub(super) fn bytes_product(format: Format, _rows: usize) -> (Product, Layout) {
    let product = if has_dot() { neon::neon_dot } else { neon::neon_bytes };
    (product, quants::blocks::<{ neon::BYTES_ROWS }>(format))
}

/// The product of f32 elements; weights in bf16 are widened.
pub(super) fn widened_product() -> Product {
    neon::neon
}

/// None: there are no tiles.
pub(super) fn tiled_product() -> Option<(Product, Layout)> {
    None
}

/// None: pairs of bf16 are widened.
pub(super) fn paired_product(_inputs: usize, _panels: usize) -> Option<(Product, Layout)> {
    None
}

/// None, as above.
pub(super) fn untiled_product() -> Option<(Product, Layout, AddPairs)> {
    None
}

#[cfg(test)]
pub(super) mod tests;
