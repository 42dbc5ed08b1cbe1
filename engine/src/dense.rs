//! Models whose tensors are dense: each part of one is made from its tensors in the same way, wherever these come from.

use candle_core::{DType, Device, Tensor};
use mistralrs_quant::IsqType;

use crate::{error::EngineError, linear::Linear, tree_lm::Weights};

/// Dense tensors by their names at Hugging Face.
pub(super) trait DenseTensors: Send {
    /// The tensor of that name and shape on the CPU, in the dtype of all.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError>;

    /// How linear layers are quantised, and where the model runs.
    fn place(&self) -> (Option<IsqType>, &Device);

    /// Weights read so far.
    fn count(&self) -> u64;
}

impl<T: DenseTensors> Weights for T {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        Ok(self.tensor(name, shape)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
    }

    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        let (isq, device) = self.place();
        let mut weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        // Quantisation runs on the CPU, on the weights as they come.
        if isq.is_none() {
            weight = weight.to_device(device)?;
        }
        let bias = match bias {
            true => Some(self.tensor(&format!("{name}.bias"), &[outputs])?.to_device(device)?),
            false => None,
        };
        Ok(Linear::dense(weight, bias, isq, device)?)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        Ok(self.tensor(&format!("{name}.weight"), &[length])?.to_device(self.place().1)?)
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        Ok(self.tensor("model.embed_tokens.weight", &[rows, width])?.to_device(self.place().1)?)
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        let (rows, width) = embedding.dims2()?;
        if tied {
            let (isq, device) = self.place();
            return Ok(Linear::dense(embedding.clone(), None, isq, device)?);
        }
        self.linear("lm_head", rows, width, false)
    }

    fn parameters(&self) -> u64 {
        self.count()
    }
}
