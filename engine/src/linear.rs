//! A linear layer y = x Wᵀ + b over any of mistralrs' weight formats.

use std::sync::{Arc, atomic::AtomicUsize};

use candle_core::{
    DType, Device, Result, Tensor,
    quantized::{GgmlDType, QTensor},
};
use candle_nn::Linear as DenseWeights;
use mistralrs_quant::{GgufMatMul, IsqType, QuantMethod, QuantMethodConfig, QuantizeOntoGuard, UnquantLinear};

#[cfg(feature = "cuda")]
use crate::cuda::{blocks::BlockMatrix, workspace::ProductWeights};
use crate::{
    blocks::{quantise, tensor},
    output::Output,
    workspace::Workspace,
};

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
    weights: Weights,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Weights {
    /// `[outputs, inputs]`, and how mistralrs multiplies with them.
    Dense(Tensor, Arc<dyn QuantMethod>),
    /// As mistralrs quantises them.
    Quantised(Arc<dyn QuantMethod>),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Blocks(BlockMatrix),
}

impl Linear {
    /// Weights in blocks `[outputs, inputs]`, which are moved to `device`.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no device but the CPU"))]
    pub(super) fn quantised(weight: QTensor, bias: Option<Tensor>, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            return Ok(Self { weights: Weights::Blocks(BlockMatrix::new(&weight, device)?), bias });
        }
        let method = GgufMatMul::new(QuantMethodConfig::Gguf { q_weight: Arc::new(weight), b: None })?;
        Ok(Self { weights: Weights::Quantised(Arc::new(method)), bias })
    }

    /// Dense weights `[outputs, inputs]`, quantised here if `isq` says so, on `device`.
    pub(super) fn dense(weight: Tensor, bias: Option<Tensor>, isq: Option<IsqType>, device: &Device) -> Result<Self> {
        let method = QuantMethodConfig::Unquantized(DenseWeights::new(weight.clone(), None));
        let method = Arc::new(UnquantLinear::new(method)?);
        let Some(isq) = isq else {
            return Ok(Self { weights: Weights::Dense(weight, method), bias });
        };
        if device.is_cuda()
            && let Some(blocks) = in_blocks(&weight, isq)?
        {
            return Self::quantised(blocks, bias, device);
        }
        let (counter, guard) = (AtomicUsize::new(0), QuantizeOntoGuard::new());
        let method = method.apply_isq(Some(isq), device.clone(), &counter, None, guard)?;
        Ok(Self { weights: Weights::Quantised(method), bias })
    }

    /// `[nodes, inputs]` to `[nodes, outputs]`, in the dtype of `x`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.with_bias(self.product(x)?)
    }

    fn with_bias(&self, y: Tensor) -> Result<Tensor> {
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
    fn product(&self, x: &Tensor) -> Result<Tensor> {
        match &self.weights {
            Weights::Dense(weights, _) if x.device().is_cpu() && STREAMED_ROWS.contains(&x.dim(0)?) => {
                weights.matmul(&x.t()?)?.t()?.contiguous()
            }
            Weights::Dense(_, method) => method.forward(x),
            Weights::Quantised(method) => method.forward_autocast(x),
            #[cfg(feature = "cuda")]
            Weights::Blocks(blocks) => Workspace::default().product(None, x, ProductWeights::Blocks(blocks)),
        }
    }

    /// [`forward`](Self::forward), on a GPU with the workspace's means: into that output, or into memory of its own.
    pub(super) fn forward_to(&self, to: Option<Output>, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        self.with_bias(self.product_to(to, x, workspace)?)
    }

    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    fn product_to(&self, to: Option<Output>, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(matrix) = self.on_gpu() {
            return workspace.product(to, x, matrix);
        }
        self.product(x)
    }

    /// [`forward`](Self::forward) for the vocabulary. A GPU gives logits in f32 where a product does: in bf16 one of 20
    /// would be rounded to multiples of an eighth, so that the two most probable tokens often tie.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn logits(&self, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let (Some(matrix), None) = (self.on_gpu(), &self.bias) {
            return workspace.logits(x, matrix);
        }
        self.forward(x)
    }

    /// The weights, if a product of our own can multiply with them.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Option<ProductWeights<'_>> {
        match &self.weights {
            Weights::Dense(weights, _) if weights.device().is_cuda() => Some(ProductWeights::Dense(weights)),
            Weights::Blocks(blocks) => Some(ProductWeights::Blocks(blocks)),
            _ => None,
        }
    }
}

/// The weights in blocks of this type, if it is one that candle has and their rows are whole blocks; on the CPU.
fn in_blocks(weight: &Tensor, isq: IsqType) -> Result<Option<QTensor>> {
    let Ok(dtype) = GgmlDType::try_from(isq) else { return Ok(None) };
    if weight.dim(1)? % dtype.block_size() > 0 {
        return Ok(None);
    }
    let values: Vec<f32> = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    tensor(&quantise(&values, dtype)?, dtype, weight.shape()).map(Some)
}

/// Projections of one input.
///
/// On a GPU they are one product: what its launch costs the host bounds steps of small models and batches. A step of
/// 886M parameters on an H100 with 64 nodes took 3.0 ms with seven products a layer and takes 1.9 with four.
#[derive(Debug)]
pub(super) struct Projections {
    parts: Vec<Linear>,
    /// All of them without their biases, and the outputs of each.
    #[cfg(feature = "cuda")]
    joined: Option<(Linear, Vec<usize>)>,
}

impl Projections {
    pub(super) fn new(parts: Vec<Linear>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Self::joined(parts);
        #[cfg(not(feature = "cuda"))]
        Ok(Self { parts })
    }

    /// If they can be one product, dense parts share its weights.
    #[cfg(feature = "cuda")]
    fn joined(parts: Vec<Linear>) -> Result<Self> {
        let Some(matrices) = parts.iter().map(Linear::on_gpu).collect::<Option<Vec<_>>>() else {
            return Ok(Self { parts, joined: None });
        };
        let widths = matrices.iter().map(|matrix| matrix.outputs()).collect::<Result<Vec<_>>>()?;
        if let Some(dense) = matrices.iter().map(|matrix| matrix.dense()).collect::<Option<Vec<_>>>() {
            let all = Tensor::cat(&dense, 0)?;
            let device = all.device().clone();
            let views = split(&all, 0, &widths)?;
            let own = parts.iter().zip(views).map(|(part, view)| Linear::dense(view, part.bias.clone(), None, &device));
            let own = own.collect::<Result<_>>()?;
            return Ok(Self { parts: own, joined: Some((Linear::dense(all, None, None, &device)?, widths)) });
        }
        let blocks = matrices.iter().map(|matrix| matrix.blocks()).collect::<Option<Vec<_>>>();
        let all = blocks.and_then(|blocks| BlockMatrix::joined(&blocks));
        let joined = all.map(|all| (Linear { weights: Weights::Blocks(all), bias: None }, widths));
        Ok(Self { parts, joined })
    }

    pub(super) fn part(&self, at: usize) -> &Linear {
        &self.parts[at]
    }

    /// The products of all, `[nodes, outputs]` each, without their biases; those of one product are its columns.
    #[cfg(feature = "cuda")]
    pub(super) fn products(&self, x: &Tensor, to: Output, workspace: &mut Workspace) -> Result<Vec<Tensor>> {
        let Some((joined, widths)) = &self.joined else {
            return self.parts.iter().map(|part| part.product_to(None, x, workspace)).collect();
        };
        split(&joined.product_to(Some(to), x, workspace)?, 1, widths)
    }
}

/// Neighbouring parts of a tensor along a dimension, of these widths.
#[cfg(feature = "cuda")]
fn split(all: &Tensor, dimension: usize, widths: &[usize]) -> Result<Vec<Tensor>> {
    let mut end = 0;
    let part = |width: &usize| {
        end += width;
        all.narrow(dimension, end - width, *width)
    };
    widths.iter().map(part).collect()
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
            let method = match &linear.weights {
                Weights::Dense(_, method) | Weights::Quantised(method) => method,
                #[cfg(feature = "cuda")]
                Weights::Blocks(_) => panic!("of a GPU"),
            };
            assert!(method.unquant_weight_bias().is_none_or(|(_, bias)| bias.is_none()));
            for rows in [1, 8, 9, 40] {
                let y = linear.forward(&Tensor::ones((rows, 32), DType::F32, &Device::Cpu).unwrap()).unwrap();
                let last = y.to_vec2::<f32>().unwrap()[rows - 1].clone();
                let right = |(at, y): (usize, &f32)| (y - 32.0 - at as f32).abs() < 0.1;
                assert!(last.iter().enumerate().all(right), "{isq:?}, {rows} rows: {last:?}");
            }
        }
    }
}
