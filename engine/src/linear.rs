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
#[derive(Debug)]
pub(super) struct Linear {
    method: Arc<dyn QuantMethod>,
    /// The same weights and bias, if they are dense and on the CPU.
    dense: Option<(Tensor, Option<Tensor>)>,
}

impl Linear {
    /// Quantised weights as they are.
    pub(super) fn new(method: Arc<dyn QuantMethod>) -> Self {
        let dense = method.unquant_weight_bias().filter(|(weight, _)| weight.device().is_cpu());
        Self { method, dense }
    }

    /// Dense weights `[outputs, inputs]`, quantised here if `isq` says so, on `device`.
    pub(super) fn dense(weight: Tensor, bias: Option<Tensor>, isq: Option<IsqType>, device: &Device) -> Result<Self> {
        let weights = QuantMethodConfig::Unquantized(DenseWeights::new(weight, bias));
        let dense = Arc::new(UnquantLinear::new(weights)?);
        let Some(isq) = isq else {
            return Ok(Self::new(dense));
        };
        let (counter, guard) = (AtomicUsize::new(0), QuantizeOntoGuard::new());
        Ok(Self::new(dense.apply_isq(Some(isq), device.clone(), &counter, None, guard)?))
    }

    /// `[nodes, inputs]` to `[nodes, outputs]`, in the dtype of `x`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some((weight, bias)) = &self.dense else {
            return self.method.forward_autocast(x);
        };
        if !STREAMED_ROWS.contains(&x.dim(0)?) {
            return self.method.forward(x);
        }
        let y = weight.matmul(&x.t()?)?.t()?.contiguous()?;
        match bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
