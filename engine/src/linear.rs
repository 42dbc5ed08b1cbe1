//! A linear layer y = x Wᵀ + b over any of mistralrs' weight formats.

use std::sync::{Arc, atomic::AtomicUsize};

use candle_core::{Device, Result, Tensor};
use candle_nn::Linear as DenseWeights;
use mistralrs_quant::{IsqType, QuantMethod, QuantMethodConfig, QuantizeOntoGuard, UnquantLinear};

/// Rows for which the CPU computes (W xᵀ)ᵀ. candle's gemm copies the left matrix of x Wᵀ
/// transposed, that is the weights; in this order it streams them once. Measured for 8 rows: 1.4 to
/// 1.9 times faster from 256 × 256 to 2,048 × 8,192, and the same time for 2 as for 16 rows. One
/// row has a path of its own, and above 32 transposing the result costs what the order gains.
const STREAMED_ROWS: std::ops::RangeInclusive<usize> = 2..=32;

/// One projection of the model; rows of `x` are nodes.
///
/// The bias is added apart from the product: on CUDA, mistralrs' dense layer gives products of nine rows and more that
/// have a bias to cublasLt, which wants three dimensions and refuses these two.
#[derive(Debug)]
pub(super) struct Linear {
    method: Arc<dyn QuantMethod>,
    /// The same weights, if they are dense and on the CPU.
    dense: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Linear {
    /// Weights as they are, which must have no bias of their own.
    pub(super) fn new(method: Arc<dyn QuantMethod>, bias: Option<Tensor>) -> Self {
        let dense = method.unquant_weight_bias().map(|(weight, _)| weight).filter(|weight| weight.device().is_cpu());
        Self { method, dense, bias }
    }

    /// Dense weights `[outputs, inputs]`, quantised here if `isq` says so, on `device`.
    pub(super) fn dense(weight: Tensor, bias: Option<Tensor>, isq: Option<IsqType>, device: &Device) -> Result<Self> {
        let weights = QuantMethodConfig::Unquantized(DenseWeights::new(weight, None));
        let dense = Arc::new(UnquantLinear::new(weights)?);
        let Some(isq) = isq else {
            return Ok(Self::new(dense, bias));
        };
        let (counter, guard) = (AtomicUsize::new(0), QuantizeOntoGuard::new());
        Ok(Self::new(dense.apply_isq(Some(isq), device.clone(), &counter, None, guard)?, bias))
    }

    /// `[nodes, inputs]` to `[nodes, outputs]`, in the dtype of `x`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.product(x)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// What [`forward`](Self::forward) adds to the product.
    #[cfg(feature = "cuda")]
    pub(super) fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Without the bias.
    pub(super) fn product(&self, x: &Tensor) -> Result<Tensor> {
        match &self.dense {
            None => self.method.forward_autocast(x),
            Some(weight) if STREAMED_ROWS.contains(&x.dim(0)?) => weight.matmul(&x.t()?)?.t()?.contiguous(),
            Some(_) => self.method.forward(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn the_product_knows_no_bias() {
        let weight = Tensor::ones((64, 32), DType::F32, &Device::Cpu).unwrap();
        let bias = Tensor::arange(0_f32, 64.0, &Device::Cpu).unwrap();
        for isq in [None, Some(IsqType::Q8_0)] {
            let linear = Linear::dense(weight.clone(), Some(bias.clone()), isq, &Device::Cpu).unwrap();
            assert!(linear.method.unquant_weight_bias().is_none_or(|(_, bias)| bias.is_none()));
            for rows in [1, 8, 9, 40] {
                let y = linear.forward(&Tensor::ones((rows, 32), DType::F32, &Device::Cpu).unwrap()).unwrap();
                let last = y.to_vec2::<f32>().unwrap()[rows - 1].clone();
                let right = |(at, y): (usize, &f32)| (y - 32.0 - at as f32).abs() < 0.1;
                assert!(last.iter().enumerate().all(right), "{isq:?}, {rows} rows: {last:?}");
            }
        }
    }
}
