//! The products that an x86-64 processor can run, and pairs of bf16.

use std::cmp::Ordering;

use proptest::prelude::*;

use super::paired_product;
use crate::skinny::{
    amx, avx2, avx512,
    format::{Format, PANEL, bf16},
    isa::{Isa, isa},
    kernel::Product,
    layout::Layout,
    portable::{self, portable, portable_bytes},
    quants::blocks,
    rows::Rows,
    tests::{check, expected, packed, rows_of, skipped, truncated, values},
};

/// The products of elements that this processor can run.
pub(in crate::skinny) fn products() -> Vec<(&'static str, Product)> {
    let mut products: Vec<(&'static str, Product)> = vec![("portable", portable)];
    if isa() != Isa::Portable {
        products.push(("avx2", avx2::avx2));
    }
    if isa() == Isa::Avx512 {
        products.push(("avx512", avx512::avx512));
    }
    for name in ["avx2", "avx512"] {
        if !products.iter().any(|(product, _)| *product == name) {
            skipped(name);
        }
    }
    products
}

/// The products of bytes that this processor can run.
pub(in crate::skinny) fn bytes_products(format: Format) -> Vec<(&'static str, Product, Layout)> {
    let mut products: Vec<(_, Product, _)> = vec![("portable", portable_bytes, blocks::<{ portable::ROWS }>(format))];
    if isa() != Isa::Portable {
        products.push(("avx2", avx2::avx2_bytes, blocks::<{ avx2::BYTES_ROWS }>(format)));
    }
    match isa() == Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
        true => products.push(("avx512vnni", avx512::avx512_vnni, blocks::<{ avx512::ROWS }>(format))),
        false => skipped("avx512vnni"),
    }
    match amx::amx() {
        true => products.push(("amx", amx::amx_bytes, amx::BLOCK_TILES)),
        false => skipped("amx"),
    }
    products
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn pairs_are_multiplied_after_rounding(
        rows in 1..40_usize,
        outputs in 1..300_usize,
        inputs in prop_oneof![1..120_usize, (1..8_usize).prop_map(|tiles| 32 * tiles)],
        seed in any::<u64>(),
    ) {
        if paired_product(inputs, outputs.div_ceil(PANEL)).is_none() {
            skipped("avx512bf16");
            return Ok(());
        }
        let weights = values(seed, outputs * inputs).into_iter().map(truncated);
        let weights: Vec<f32> = weights.collect();
        let mut x = values(seed ^ 1, rows * inputs);
        let packed = packed(&weights, inputs, Format::Bf16);
        let mut y = Rows::default();
        packed.multiply(&rows_of(&x, inputs), &mut y);
        x.iter_mut().for_each(|x| *x = f32::from_bits(bf16(*x) << 16));
        check(&y, &expected(&weights, &x, inputs), "pairs");
    }

    #[test]
    fn bf16_is_the_nearest_and_of_two_the_even_one(bits in any::<u32>()) {
        let value = f32::from_bits(bits);
        let got = f32::from_bits(bf16(value) << 16);
        if !value.is_finite() {
            prop_assert!(got == value || (got.is_nan() && value.is_nan()), "{value} to {got}");
            return Ok(());
        }
        let below = bits & 0xffff_0000;
        let distance = |bits: u32| (f64::from(f32::from_bits(bits)) - f64::from(value)).abs();
        let above = below + 0x1_0000;
        // Beyond the largest there is infinity, which is as far as a next number would be.
        prop_assume!(f32::from_bits(above).is_finite());
        let even = if below >> 16 & 1 == 0 { below } else { above };
        let expected = match distance(below).total_cmp(&distance(above)) {
            Ordering::Less => below,
            Ordering::Greater => above,
            Ordering::Equal => even,
        };
        prop_assert_eq!(got.to_bits(), expected);
    }
}
