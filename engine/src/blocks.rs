//! Types of GGUF's blocks that the CPU's kernels multiply with.

use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use laser_cpu::{Format, Matrix, ModelShape};

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

/// The matrix `[outputs, inputs]` of these values, which formats of blocks round as candle does.
pub(super) fn matrix(values: Vec<f32>, shape: [usize; 2], format: Format) -> Result<Matrix, EngineError> {
    let dtype = TYPES.iter().find(|(_, known)| *known == format && format != Format::Q8);
    let Some((dtype, _)) = dtype else {
        return Ok(Matrix::Values(values, format));
    };
    let values = Tensor::from_vec(values, (shape[0], shape[1]), &Device::Cpu)?;
    Ok(Matrix::Blocks(QTensor::quantize(&values, *dtype)?.data()?.into_owned(), format))
}
