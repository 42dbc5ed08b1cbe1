//! The products that an aarch64 processor can run.

use super::has_dot;
use crate::skinny::{
    kernel::Product,
    layout::Layout,
    neon,
    packing::Format,
    portable::{portable, portable_bytes},
    quants::blocks,
    tests::skipped,
};

/// The products of elements that this processor can run.
pub(in crate::skinny) fn products() -> Vec<(&'static str, Product)> {
    vec![("portable", portable), ("neon", neon::neon)]
}

/// The products of bytes that this processor can run.
pub(in crate::skinny) fn bytes_products(format: Format) -> Vec<(&'static str, Product, Layout)> {
    let mut products: Vec<(_, Product)> = vec![("portable", portable_bytes), ("neon", neon::neon_bytes)];
    match has_dot() {
        true => products.push(("dotprod", neon::neon_dot)),
        false => skipped("dotprod"),
    }
    products.into_iter().map(|(name, product)| (name, product, blocks(format))).collect()
}
