//! The products that an aarch64 processor can run.

use super::has_dot;
use crate::skinny::{
    format::Format,
    kernel::Product,
    layout::Layout,
    neon,
    portable::{self, portable, portable_bytes},
    quants::blocks,
    tests::skipped,
};

/// The products of elements that this processor can run.
pub(in crate::skinny) fn products() -> Vec<(&'static str, Product)> {
    vec![("portable", portable), ("neon", neon::neon)]
}

/// The products of bytes that this processor can run.
pub(in crate::skinny) fn bytes_products(format: Format) -> Vec<(&'static str, Product, Layout)> {
    let layout = blocks::<{ neon::BYTES_ROWS }>(format);
    let mut products: Vec<(_, Product, _)> =
        vec![("portable", portable_bytes, blocks::<{ portable::ROWS }>(format)), ("neon", neon::neon_bytes, layout)];
    match has_dot() {
        true => products.push(("dotprod", neon::neon_dot, layout)),
        false => skipped("dotprod"),
    }
    products
}
