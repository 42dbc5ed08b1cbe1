//! Types of GGUF's blocks that the CPU's kernels multiply with, and quantising while a model is loaded.

use std::borrow::Cow;

use candle_core::{
    Device, Shape, Tensor,
    quantized::{GgmlDType, QStorage, QTensor},
};
use laser_cpu::{Format, Matrix, ModelShape};
use rayon::prelude::*;

use crate::error::EngineError;

/// The types, and how the kernels store them.
const TYPES: [(GgmlDType, Format); 5] = [
    (GgmlDType::Q8_0, Format::Q8),
    (GgmlDType::Q4_0, Format::Q4),
    (GgmlDType::Q4K, Format::Q4K),
    (GgmlDType::Q5K, Format::Q5K),
    (GgmlDType::Q6K, Format::Q6K),
];

/// How the kernels store blocks of a type, if they can.
pub(super) fn format_of(dtype: GgmlDType) -> Option<Format> {
    TYPES.iter().find(|(known, _)| *known == dtype).map(|(_, format)| *format)
}

/// Whether the matrices of such a model consist of whole blocks of a format. Q8 fills the last one up with zeros.
pub(super) fn fits(shape: &ModelShape, format: Format) -> bool {
    let block = match format {
        Format::Q8 => 1,
        format => format.ggml_block().map_or(1, |(inputs, _)| inputs),
    };
    [shape.hidden_size, shape.intermediate_size, shape.query_width()].iter().all(|inputs| inputs.is_multiple_of(block))
}

/// The matrix of these values, row by row, which formats of blocks round as candle does.
pub(super) fn matrix(values: Vec<f32>, format: Format) -> Result<Matrix, EngineError> {
    let dtype = TYPES.iter().find(|(_, known)| *known == format && format != Format::Q8);
    let Some((dtype, _)) = dtype else {
        return Ok(Matrix::Values(values, format));
    };
    Ok(Matrix::Blocks(quantise(&values, *dtype)?, format))
}

/// A tensor of blocks on the CPU, with a copy of these bytes. They are lent: bytes that it owns candle 0.10 frees
/// before it copies them.
pub(super) fn tensor(bytes: &[u8], dtype: GgmlDType, shape: &Shape) -> candle_core::Result<QTensor> {
    QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?, shape)
}

/// Values that a thread quantises at a time: whole blocks of each type, and a few milliseconds' work.
const PART: usize = 1 << 18;

/// Whole rows of whole blocks, as candle rounds them, on all threads of rayon: on one of them a model of 886M
/// parameters took 36 s in Q4_K.
pub(super) fn quantise(values: &[f32], dtype: GgmlDType) -> candle_core::Result<Vec<u8>> {
    let quantised = |part: &[f32]| {
        let part = Tensor::from_slice(part, part.len(), &Device::Cpu)?;
        Ok(QTensor::quantize(&part, dtype)?.data()?.into_owned())
    };
    let parts: Vec<Vec<u8>> = values.par_chunks(PART).map(quantised).collect::<candle_core::Result<_>>()?;
    Ok(parts.concat())
}

#[cfg(test)]
mod tests {
    use GgmlDType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

    use super::*;

    /// Types, where their blocks' f16 lie, and what engine/cuda/host/blocks_test.cpp expects of a GPU's kernels.
    const DIGESTS: [(GgmlDType, &[usize], u64); 10] = [
        (Q8_0, &[0], 0x78fb_fb42_c6d0_daa5),
        (Q4_0, &[0], 0x7eb3_1f22_dbfe_9825),
        (Q4_1, &[0, 2], 0x6180_a9dc_18e7_f025),
        (Q5_0, &[0], 0x24c6_3e5d_a87e_1225),
        (Q5_1, &[0, 2], 0x67a8_52fc_9d30_2845),
        (Q2K, &[80, 82], 0x2e07_fa6a_3386_e425),
        (Q3K, &[108], 0xb589_8782_fd3c_6525),
        (Q4K, &[0, 2], 0x5b55_3aa3_58f6_4ca2),
        (Q5K, &[0, 2], 0x41b9_c529_55c0_54cf),
        (Q6K, &[208], 0x9d08_2f57_0655_c55b),
    ];

    /// 50 blocks of bytes that a linear congruential generator gives, whose f16 are from 2^-7 to 2^-3.
    fn blocks(dtype: GgmlDType, halves: &[usize], mut state: u32) -> Vec<u8> {
        let bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_le_bytes()[3]
        });
        let mut blocks: Vec<u8> = bytes.take(50 * dtype.type_size()).collect();
        for block in blocks.chunks_mut(dtype.type_size()) {
            halves.iter().for_each(|half| block[half + 1] = block[half + 1] & 15 | 0x20);
        }
        blocks
    }

    #[test]
    fn blocks_are_what_the_tests_of_kernels_for_gpus_expect() {
        for (seed, (dtype, halves, digest)) in (0..).zip(DIGESTS) {
            let shape = Shape::from(50 * dtype.block_size());
            let weights = tensor(&blocks(dtype, halves, seed), dtype, &shape).unwrap();
            let weights: Vec<f32> = weights.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap();
            let fnv = |hash: u64, weight: f32| (hash ^ u64::from(weight.to_bits())).wrapping_mul(0x100_0000_01b3);
            let found = weights.into_iter().fold(0xcbf2_9ce4_8422_2325, fnv);
            assert_eq!(found, digest, "{dtype:?}: {found:#x}");
        }
    }

    #[test]
    fn parts_are_quantised_as_the_whole_is() {
        let (rows, inputs) = (3, PART / 2 - 256);
        let values: Vec<f32> = (0..rows * inputs).map(|at| (at as f32 * 0.7).sin() * (at % 977) as f32).collect();
        let whole = Tensor::from_slice(&values, (rows, inputs), &Device::Cpu).unwrap();
        for (dtype, ..) in DIGESTS {
            let expected = QTensor::quantize(&whole, dtype).unwrap();
            assert!(quantise(&values, dtype).unwrap() == *expected.data().unwrap(), "{dtype:?}");
        }
    }
}
