//! Every product against sums in f64, and rows against each other.

use std::cmp::Ordering;
use std::io::Write;
use std::sync::Mutex;

use proptest::prelude::*;

use super::{
    amx, avx2, avx512,
    isa::{Isa, isa},
};
use super::{
    bf16::bf16,
    kernel::{Product, Task},
    layout::Layout,
    packing::{BLOCK, Format, Matrix, PANEL, PackedMatrix, half, quantise},
    portable::{portable, portable_bytes},
    product::paired_product,
    quants::blocks,
    rows::Rows,
};

/// The products of elements that this processor can run.
fn products() -> Vec<(&'static str, Product)> {
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

/// Says once that this processor cannot run a product: past the test harness, which shows only what failing tests
/// print. `tests/run.sh` ends with these lines.
fn skipped(product: &'static str) {
    static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap();
    if !said.contains(&product) {
        let line = format!("skipped: the {product} product, which this processor cannot run\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        said.push(product);
    }
}

pub(super) fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn packed(weights: &[f32], inputs: usize, format: Format) -> PackedMatrix {
    PackedMatrix::pack(&[Matrix::Values(weights.to_vec(), format)], inputs)
}

pub(super) fn rows_of(data: &[f32], columns: usize) -> Rows {
    let mut rows = Rows::default();
    rows.reshape(data.len() / columns, columns);
    for (row, data) in data.chunks(columns).enumerate() {
        rows.row_mut(row).copy_from_slice(data);
    }
    rows
}

pub(super) fn run(product: Product, layout: Option<Layout>, w: &PackedMatrix, x: &Rows) -> Rows {
    let mut y = Rows::default();
    y.reshape(x.rows, w.outputs);
    y.data.fill(f32::NAN);
    let panels = w.outputs.div_ceil(PANEL);
    let task = Task {
        w: w.panels().lines.as_ptr().cast(),
        format: w.panels().format,
        w_stride: w.panels().stride * PANEL,
        inputs: w.inputs,
        x: x.data.as_ptr(),
        x_stride: x.stride,
        y: y.data.as_mut_ptr(),
        y_stride: y.stride,
        rows: x.rows,
    };
    // SAFETY: the buffers have the shapes that the task says, and the processor was asked.
    let run = |task: &Task| unsafe { product(task, 0..panels) };
    match layout {
        Some(layout) => layout.lay_out(x, task, run),
        None => run(&task),
    }
    y
}

/// The products of bytes that this processor can run.
pub(super) fn bytes_products(format: Format) -> Vec<(&'static str, Product, Layout)> {
    let mut products: Vec<(_, Product, _)> = vec![("portable", portable_bytes, blocks(format))];
    if isa() != Isa::Portable {
        products.push(("avx2", avx2::avx2_bytes, blocks(format)));
    }
    match isa() == Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
        true => products.push(("avx512vnni", avx512::avx512_vnni, blocks(format))),
        false => skipped("avx512vnni"),
    }
    match amx::amx() {
        true => products.push(("amx", amx::amx_bytes, amx::BLOCK_TILES)),
        false => skipped("amx"),
    }
    products
}

fn padded(block: &[f32]) -> [f32; BLOCK] {
    std::array::from_fn(|place| block.get(place).copied().unwrap_or(0.0))
}

/// What rows of `inputs` values are when they are quantised in blocks, with scales as they are stored.
pub(super) fn quantised(values: &[f32], inputs: usize, stored: impl Fn(f32) -> f32) -> Vec<f32> {
    let mut rounded = Vec::with_capacity(values.len());
    for block in values.chunks_exact(inputs).flat_map(|row| row.chunks(BLOCK)) {
        let (scale, quants) = quantise(&padded(block));
        rounded.extend(quants[..block.len()].iter().map(|quant| f32::from(*quant) * stored(scale)));
    }
    rounded
}

fn truncated(weight: f32) -> f32 {
    f32::from_bits(weight.to_bits() & 0xffff_0000)
}

/// x Wᵀ in f64 for weights and x as they are.
fn expected(weights: &[f32], x: &[f32], inputs: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| (x.iter().zip(w)).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    let rows = x.chunks_exact(inputs);
    rows.flat_map(|x| weights.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
}

#[track_caller]
fn check(y: &Rows, expected: &[f64], what: &str) {
    for (row, expected) in expected.chunks_exact(y.columns).enumerate() {
        for (output, (got, expected)) in y.row(row).iter().zip(expected).enumerate() {
            assert!(
                (f64::from(*got) - expected).abs() < 1e-4,
                "{what}, row {row}, output {output}: {got}, not {expected}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_product_is_the_sum_of_its_terms(
        rows in 1..40_usize,
        outputs in 1..300_usize,
        inputs in 1..120_usize,
        format in prop_oneof![Just(Format::F32), Just(Format::Bf16)],
        seed in any::<u64>(),
    ) {
        let mut weights = values(seed, outputs * inputs);
        let x = values(seed ^ 1, rows * inputs);
        let packed = packed(&weights, inputs, format);
        if format == Format::Bf16 {
            weights.iter_mut().for_each(|weight| *weight = truncated(*weight));
        }
        for (name, product) in products() {
            let y = run(product, None, &packed, &rows_of(&x, inputs));
            check(&y, &expected(&weights, &x, inputs), name);
        }
    }

    #[test]
    fn blocks_are_multiplied_after_rounding(
        rows in 1..40_usize,
        outputs in 1..300_usize,
        inputs in 1..200_usize,
        seed in any::<u64>(),
    ) {
        let weights = values(seed, outputs * inputs);
        let x = values(seed ^ 1, rows * inputs);
        let packed = packed(&weights, inputs, Format::Q8);
        let (weights, rounded) = (quantised(&weights, inputs, half), quantised(&x, inputs, |scale| scale));
        let expected = expected(&weights, &rounded, inputs);
        let results = bytes_products(Format::Q8).into_iter().map(|(name, product, layout)| {
            let y = run(product, Some(layout), &packed, &rows_of(&x, inputs));
            check(&y, &expected, name);
            y
        });
        // Those with 16 lanes are the same to the bit: one takes few rows, the other many.
        let wide: Vec<Rows> = results.skip(2).collect();
        for row in 0..rows {
            prop_assert!(wide.windows(2).all(|pair| pair[0].row(row) == pair[1].row(row)));
        }
    }

    #[test]
    fn quantising_twice_changes_nothing(count in 1..=BLOCK, seed in any::<u64>(), exponent in -12..12) {
        let block: Vec<f32> = values(seed, count).iter().map(|value| value * 2f32.powi(exponent)).collect();
        let (scale, quants) = quantise(&padded(&block));
        let stored = quants.map(|quant| f32::from(quant) * half(scale));
        prop_assert_eq!(quantise(&stored), (half(scale), quants));
    }

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

    #[test]
    fn a_row_does_not_depend_on_the_others_to_the_bit(
        rows in 2..40_usize,
        outputs in 1..600_usize,
        inputs in prop_oneof![1..300_usize, (1..10_usize).prop_map(|tiles| 32 * tiles)],
        format in prop_oneof![Just(Format::F32), Just(Format::Bf16), Just(Format::Q8)],
        seed in any::<u64>(),
    ) {
        let weights = values(seed, outputs * inputs);
        let x = values(seed ^ 1, rows * inputs);
        let packed = packed(&weights, inputs, format);
        let (mut together, mut alone) = (Rows::default(), Rows::default());
        packed.multiply(&rows_of(&x, inputs), &mut together);
        for row in 0..rows {
            packed.multiply(&rows_of(&x[row * inputs..][..inputs], inputs), &mut alone);
            prop_assert_eq!(together.row(row), alone.row(0));
        }
    }
}

#[test]
fn matrices_that_are_packed_together_give_the_rows_of_both() {
    let (first, second) = (values(1, 5 * 8), values(2, 30 * 8));
    let x = rows_of(&values(3, 2 * 8), 8);
    let mut both = Rows::default();
    PackedMatrix::pack(&[&first, &second].map(|part| Matrix::Values(part.clone(), Format::F32)), 8)
        .multiply(&x, &mut both);
    for (part, from) in [(&first, 0), (&second, 5)] {
        let mut one = Rows::default();
        packed(part, 8, Format::F32).multiply(&x, &mut one);
        for row in 0..2 {
            assert_eq!(both.row(row)[from..][..one.columns], *one.row(row));
        }
    }
}
