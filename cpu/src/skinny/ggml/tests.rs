//! Blocks as GGUF stores them against candle's reading of them, and every product of theirs.

use std::borrow::Cow;

use candle_core::{
    Device,
    quantized::{GgmlDType, QStorage, QTensor},
};
use proptest::prelude::*;

use super::{FACTOR, SIX_BITS};
use crate::skinny::{
    format::{BLOCK, BYTE_LINES, Format, NIBBLE_LINES, PANEL},
    packing::{Matrix, PackedMatrix},
    processor::tests::bytes_products,
    rows::Rows,
    tests::{check_same, quantised, rows_of, run, values},
};

const FORMATS: [(Format, GgmlDType); 5] = [
    (Format::Q8, GgmlDType::Q8_0),
    (Format::Q4, GgmlDType::Q4_0),
    (Format::Q4K, GgmlDType::Q4K),
    (Format::Q5K, GgmlDType::Q5K),
    (Format::Q6K, GgmlDType::Q6K),
];

fn formats() -> impl Strategy<Value = (Format, GgmlDType)> {
    proptest::sample::select(FORMATS.to_vec())
}

/// Where the f16 of a block are.
fn factors(format: Format) -> &'static [usize] {
    match format {
        Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q6K => &[208],
        _ => &[0],
    }
}

/// Random blocks, whose f16 are what `factor` makes of random bits.
fn random_blocks(seed: u64, count: usize, format: Format, factor: impl Fn(u16) -> u16) -> Vec<u8> {
    let (_, bytes) = format.ggml_block().unwrap();
    let random = values(seed, count * bytes);
    with_factors(random.iter().map(|value| value.to_bits().to_le_bytes()[1]).collect(), format, factor)
}

/// The same blocks, with f16 that are what `factor` makes of theirs.
fn with_factors(mut blocks: Vec<u8>, format: Format, factor: impl Fn(u16) -> u16) -> Vec<u8> {
    let (_, bytes) = format.ggml_block().unwrap();
    for block in blocks.chunks_exact_mut(bytes) {
        for at in factors(format) {
            let bits = u16::from_le_bytes([block[*at], block[*at + 1]]);
            block[*at..*at + 2].copy_from_slice(&factor(bits).to_le_bytes());
        }
    }
    blocks
}

/// Below 2, subnormals among them.
fn small(bits: u16) -> u16 {
    bits & 0xbfff
}

/// What candle reads.
fn dequantised(blocks: &[u8], outputs: usize, inputs: usize, dtype: GgmlDType) -> Vec<f32> {
    let storage = QStorage::from_data(Cow::Borrowed(blocks), &Device::Cpu, dtype).unwrap();
    let tensor = QTensor::new(storage, (outputs, inputs)).unwrap().dequantize(&Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// What panels stand for, `[outputs, inputs]`.
fn unpacked(matrix: &PackedMatrix) -> Vec<f32> {
    let panels = matrix.panels();
    let weights = (0..panels.outputs).flat_map(|output| (0..panels.inputs).map(move |input| (output, input)));
    weights.map(|(output, input)| weight(matrix, output, input)).collect()
}

fn weight(matrix: &PackedMatrix, output: usize, input: usize) -> f32 {
    let (panels, lines) = (matrix.panels(), matrix.panels().format.block_lines());
    let (block, within) = (input / BLOCK, input % BLOCK);
    let word = |block: usize, line: usize| {
        panels.lines[output / PANEL * panels.stride + block * lines + line].0[output % PANEL]
    };
    let line = |line: usize| f32::from_bits(word(block, line));
    let byte = || f32::from(word(block, within / 4).to_le_bytes()[within % 4].cast_signed());
    let nibble = || {
        let byte = word(block, within % 16 / 4).to_le_bytes()[within % 4];
        f32::from(byte >> (within / 16 * 4) & 15)
    };
    match panels.format {
        Format::Q8 => byte() * line(BYTE_LINES),
        Format::Q4 => (nibble() - 8.0) * line(NIBBLE_LINES),
        Format::Q4K => {
            let factor = |place: usize| f32::from_bits(word(block / 2 * 2 + place, NIBBLE_LINES) & FACTOR);
            let six = |shift: u32| (word(block, NIBBLE_LINES) >> shift & SIX_BITS) as f32;
            factor(0) * six(0) * nibble() - factor(1) * six(6)
        }
        Format::Q5K => line(BYTE_LINES) * byte() - line(BYTE_LINES + 1),
        Format::Q6K => line(BYTE_LINES + within / 16) * byte(),
        Format::F32 | Format::Bf16 => panic!("no blocks"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn panels_hold_what_candle_reads_to_the_bit(
        (format, dtype) in formats(),
        outputs in 1..40_usize,
        superblocks in 1..4_usize,
        seed in any::<u64>(),
    ) {
        let inputs = 256 * superblocks;
        let count = outputs * inputs / format.ggml_block().unwrap().0;
        let bytes = random_blocks(seed, count, format, small);
        let expected = dequantised(&bytes, outputs, inputs, dtype);
        let got = unpacked(&PackedMatrix::pack(&[Matrix::Blocks(bytes, format)], inputs));
        let differs = expected.iter().zip(&got).position(|(expected, got)| expected != got);
        prop_assert_eq!(differs, None, "{:?}", format);
    }

    #[test]
    fn products_of_blocks_are_the_sums_of_their_terms(
        (format, dtype) in formats(),
        rows in 1..40_usize,
        outputs in 1..120_usize,
        superblocks in 1..3_usize,
        seed in any::<u64>(),
    ) {
        let inputs = 256 * superblocks;
        let count = outputs * inputs / format.ggml_block().unwrap().0;
        let bytes = random_blocks(seed, count, format, small);
        let weights = dequantised(&bytes, outputs, inputs, dtype);
        let packed = PackedMatrix::pack(&[Matrix::Blocks(bytes, format)], inputs);
        let x = values(seed ^ 1, rows * inputs);
        let rounded = quantised(&x, inputs, |scale| scale);
        let results = bytes_products(format).into_iter().map(|(name, product, layout)| {
            let y = run(product, Some(layout), &packed, &rows_of(&x, inputs));
            check(&y, &weights, &rounded, inputs, name);
            y
        });
        check_same(results);
    }

    #[test]
    fn integers_are_summed_exactly(
        (format, dtype) in formats(),
        rows in 1..20_usize,
        outputs in 1..40_usize,
        seed in any::<u64>(),
    ) {
        // Factors of 1, and 127 in every block of x, whose scale is 1 then: all are integers below 2^24.
        let one = |_| 0x3c00;
        let inputs = 256;
        let count = outputs * inputs / format.ggml_block().unwrap().0;
        let bytes = random_blocks(seed, count, format, one);
        let weights = dequantised(&bytes, outputs, inputs, dtype);
        let packed = PackedMatrix::pack(&[Matrix::Blocks(bytes, format)], inputs);
        let mut x: Vec<f32> = values(seed ^ 1, rows * inputs).iter().map(|x| (x * 20.0).round()).collect();
        x.iter_mut().step_by(BLOCK).for_each(|x| *x = 127.0);
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        for (name, product, layout) in bytes_products(format) {
            let y = run(product, Some(layout), &packed, &rows_of(&x, inputs));
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                for (got, weights) in y.row(row).iter().zip(weights.chunks_exact(inputs)) {
                    prop_assert_eq!(f64::from(*got), dot(x, weights), "{} {:?}", name, format);
                }
            }
        }
    }

    #[test]
    fn a_row_of_blocks_does_not_depend_on_the_others_to_the_bit(
        (format, _) in formats(),
        rows in 2..70_usize,
        outputs in 1..300_usize,
        seed in any::<u64>(),
    ) {
        let inputs = 256;
        let count = outputs * inputs / format.ggml_block().unwrap().0;
        let bytes = random_blocks(seed, count, format, small);
        let packed = PackedMatrix::pack(&[Matrix::Blocks(bytes, format)], inputs);
        let x = values(seed ^ 1, rows * inputs);
        let (mut together, mut alone) = (Rows::default(), Rows::default());
        packed.multiply(&rows_of(&x, inputs), &mut together);
        for row in 0..rows {
            packed.multiply(&rows_of(&x[row * inputs..][..inputs], inputs), &mut alone);
            prop_assert_eq!(together.row(row), alone.row(0));
        }
    }
}

#[test]
fn the_largest_products_of_a_block_are_summed() {
    let (outputs, inputs) = (20, 256);
    for ((format, dtype), byte) in FORMATS.iter().flat_map(|&format| [0, 0x0f, 0x7f, 0x80, 0xff].map(|b| (format, b))) {
        let (of_block, bytes) = format.ggml_block().unwrap();
        let blocks = with_factors(vec![byte; outputs * inputs / of_block * bytes], format, |_| 0x3c00);
        let weights = dequantised(&blocks, outputs, inputs, dtype);
        let packed = PackedMatrix::pack(&[Matrix::Blocks(blocks, format)], inputs);
        for sign in [1.0, -1.0] {
            let x = vec![127.0 * sign; 9 * inputs];
            for (name, product, layout) in bytes_products(format) {
                let y = run(product, Some(layout), &packed, &rows_of(&x, inputs));
                check(&y, &weights, &x, inputs, &format!("{name} {format:?} {byte:#x}"));
            }
        }
    }
}

/// Differences are roundings of f32: far below a millionth of the terms' magnitude.
#[track_caller]
fn check(y: &Rows, weights: &[f32], x: &[f32], inputs: usize, what: &str) {
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        for (got, weights) in y.row(row).iter().zip(weights.chunks_exact(inputs)) {
            let terms = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            assert!((f64::from(*got) - sum).abs() <= 1e-5 * magnitude, "{what}, row {row}: {got}, not {sum}");
        }
    }
}

#[test]
fn matrices_of_other_formats_share_a_row_of_sums() {
    let inputs = 256;
    let part = |format: Format, outputs: usize| {
        let count = outputs * inputs / format.ggml_block().unwrap().0;
        PackedMatrix::pack(&[Matrix::Blocks(random_blocks(7, count, format, small), format)], inputs)
    };
    let (first, second) = (part(Format::Q4K, 32), part(Format::Q6K, 5));
    let x = rows_of(&values(3, 3 * inputs), inputs);
    let (mut both, mut alone) = (Rows::default(), [Rows::default(), Rows::default()]);
    both.reshape(3, 37);
    first.multiply_into(&x, &mut both, 0);
    second.multiply_into(&x, &mut both, 32);
    first.multiply(&x, &mut alone[0]);
    second.multiply(&x, &mut alone[1]);
    for row in 0..3 {
        assert_eq!(both.row(row), [alone[0].row(row), alone[1].row(row)].concat());
    }
}
