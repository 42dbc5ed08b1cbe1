//! Memory for what blocks find that share a context.

use candle_core::{
    DType, Device, Result, Tensor,
    cuda::{WrapErr as _, cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
};

use super::output_of;
use crate::tree_plan::split_blocks;

/// Floats of what a block found for heads of that many elements, as in tree_tensor.cu.
pub(super) fn partial(head_dim: usize) -> usize {
    32 * (4 + head_dim / 2)
}

/// Where blocks that share a context leave what they found, and counters of those that have.
pub(super) type Parts = (Tensor, Tensor);

/// The [`Parts`] of all steps: a kernel leaves the counters as it finds them, at 0.
#[derive(Debug, Default)]
pub(crate) struct SplitScratch {
    multiprocessors: Option<usize>,
    /// For as many blocks as share contexts in any step; none before the first that do.
    parts: Option<Parts>,
}

impl SplitScratch {
    pub(super) fn multiprocessors(&mut self, device: &Device) -> Result<usize> {
        if let Some(count) = self.multiprocessors {
            return Ok(count);
        }
        let stream = device.as_cuda_device()?.cuda_stream();
        let count = stream.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).w()?;
        Ok(*self.multiprocessors.insert(usize::try_from(count)?))
    }

    pub(super) fn parts(&mut self, head_dim: usize, device: &Device) -> Result<Parts> {
        if let Some(parts) = &self.parts {
            return Ok(parts.clone());
        }
        let blocks = split_blocks(self.multiprocessors(device)?);
        let partials = output_of((blocks, partial(head_dim)), DType::F32, device)?;
        Ok(self.parts.insert((partials, Tensor::zeros(blocks, DType::U32, device)?)).clone())
    }
}
