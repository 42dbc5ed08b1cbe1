//! Every product against sums in f64, and rows against each other.

use std::io::Write;
use std::ops::Range;
use std::sync::Mutex;

use proptest::prelude::*;

use super::{
    format::{BLOCK, Format, PANEL, quantise},
    kernel::{Product, Task, row_tiles},
    layout::Layout,
    packing::{Matrix, PackedMatrix, half},
    portable::FUSED,
    processor::tests::{bytes_products, products},
    rows::Rows,
};

/// Says once that this processor cannot run a product: past the test harness, which shows only what failing tests
/// print. `tests/run.sh` ends with these lines.
pub(super) fn skipped(product: &'static str) {
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

pub(super) fn packed(weights: &[f32], inputs: usize, format: Format) -> PackedMatrix {
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

pub(super) fn truncated(weight: f32) -> f32 {
    f32::from_bits(weight.to_bits() & 0xffff_0000)
}

/// x Wᵀ in f64 for weights and x as they are.
pub(super) fn expected(weights: &[f32], x: &[f32], inputs: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| (x.iter().zip(w)).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    let rows = x.chunks_exact(inputs);
    rows.flat_map(|x| weights.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
}

#[track_caller]
pub(super) fn check(y: &Rows, expected: &[f64], what: &str) {
    for (row, expected) in expected.chunks_exact(y.columns).enumerate() {
        for (output, (got, expected)) in y.row(row).iter().zip(expected).enumerate() {
            assert!(
                (f64::from(*got) - expected).abs() < 1e-4,
                "{what}, row {row}, output {output}: {got}, not {expected}"
            );
        }
    }
}

/// That all products which round a · b + c once are the same to the bit. The portable one comes first.
#[track_caller]
pub(super) fn check_same(results: impl Iterator<Item = Rows>) {
    let fused: Vec<Rows> = results.skip(usize::from(!FUSED)).collect();
    for pair in fused.windows(2) {
        assert!((0..pair[0].rows).all(|row| pair[0].row(row) == pair[1].row(row)), "products differ");
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
        let expected = expected(&weights, &x, inputs);
        let results = products().into_iter().map(|(name, product)| {
            let y = run(product, None, &packed, &rows_of(&x, inputs));
            check(&y, &expected, name);
            y
        });
        check_same(results);
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
        check_same(results);
    }

    #[test]
    fn tiles_cover_all_rows_in_order_and_are_nearly_equal(rows in 0..400_usize, most in 1..20_usize) {
        let tiles: Vec<_> = row_tiles(rows, most).collect();
        let covered: Vec<usize> = tiles.iter().cloned().flatten().collect();
        prop_assert_eq!(covered, (0..rows).collect::<Vec<_>>());
        let counts = || tiles.iter().map(Range::len);
        prop_assert_eq!(tiles.len(), rows.div_ceil(most));
        prop_assert!(counts().max() <= counts().min().map(|least| least + 1));
        prop_assert!(counts().all(|count| (1..=most).contains(&count)));
    }

    #[test]
    fn quantising_twice_changes_nothing(count in 1..=BLOCK, seed in any::<u64>(), exponent in -12..12) {
        let block: Vec<f32> = values(seed, count).iter().map(|value| value * 2f32.powi(exponent)).collect();
        let (scale, quants) = quantise(&padded(&block));
        let stored = quants.map(|quant| f32::from(quant) * half(scale));
        prop_assert_eq!(quantise(&stored), (half(scale), quants));
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

/// The MLPs of models of 7B parameters have as many inputs, of which no panel fits a stripe.
#[test]
fn matrices_of_many_inputs_are_multiplied() {
    let (rows, outputs, inputs) = (17, 80, 14_336);
    let exact = |seed, count| values(seed, count).into_iter().map(|value| truncated(value) / 64.0);
    let (weights, x): (Vec<f32>, Vec<f32>) = (exact(1, outputs * inputs).collect(), exact(2, rows * inputs).collect());
    for format in [Format::F32, Format::Bf16, Format::Q8] {
        let mut y = Rows::default();
        packed(&weights, inputs, format).multiply(&rows_of(&x, inputs), &mut y);
        let expected = match format {
            Format::Q8 => expected(&quantised(&weights, inputs, half), &quantised(&x, inputs, |scale| scale), inputs),
            _ => expected(&weights, &x, inputs),
        };
        check(&y, &expected, "many inputs");
    }
}
