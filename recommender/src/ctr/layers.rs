//! Layers with seeded weights. candle's own initialisers use the device's generator, which has no seed on CPUs.

use candle_core::{CustomOp1, DType, Device, Result, Tensor, Var};
use rand::Rng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Initial embeddings lie between -EMBEDDING and +EMBEDDING.
const EMBEDDING: f32 = 0.05;

/// Creates a network's parameters and keeps them for the optimiser.
#[derive(Debug)]
pub(super) struct Parameters {
    pub(super) rng: Xoshiro256PlusPlus,
    pub(super) vars: Vec<Var>,
}

impl Parameters {
    fn uniform(&mut self, rows: usize, columns: usize, bound: f32) -> Result<Var> {
        let values: Vec<f32> = (0..rows * columns).map(|_| self.rng.gen_range(-bound..bound)).collect();
        self.keep(Var::from_vec(values, (rows, columns), &Device::Cpu)?)
    }

    fn zeros(&mut self, columns: usize) -> Result<Var> {
        self.keep(Var::zeros(columns, DType::F32, &Device::Cpu)?)
    }

    fn keep(&mut self, var: Var) -> Result<Var> {
        self.vars.push(var.clone());
        Ok(var)
    }

    /// Returns copies of all values.
    pub(super) fn values(&self) -> Result<Vec<Tensor>> {
        self.vars.iter().map(|var| var.as_tensor().copy()).collect()
    }

    /// Restores copied values.
    pub(super) fn restore(&self, values: &[Tensor]) -> Result<()> {
        self.vars.iter().zip(values).try_for_each(|(var, value)| var.set(value))
    }
}

/// `x W + b`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Var,
    bias: Var,
}

impl Linear {
    /// Creates Xavier's uniform weights and a bias of zero.
    pub(super) fn new(inputs: usize, outputs: usize, parameters: &mut Parameters) -> Result<Self> {
        let bound = (6.0 / (inputs + outputs) as f32).sqrt();
        Ok(Self { weight: parameters.uniform(inputs, outputs, bound)?, bias: parameters.zeros(outputs)? })
    }

    /// Maps `[rows, inputs]` to `[rows, outputs]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// A table of vectors by token.
#[derive(Debug)]
pub(super) struct Embedding(Var);

impl Embedding {
    pub(super) fn new(tokens: usize, dimension: usize, parameters: &mut Parameters) -> Result<Self> {
        parameters.uniform(tokens, dimension, EMBEDDING).map(Self)
    }

    /// Maps `[n]` tokens to `[n, dimension]`.
    pub(super) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.0.index_select(tokens, 0)
    }

    /// Maps the whole table.
    pub(super) fn sums(&self, sums: impl CustomOp1 + 'static + Send + Sync) -> Result<Tensor> {
        self.0.apply_op1(sums)
    }
}

/// Layers with ReLU between them and after the last.
#[derive(Debug)]
pub(super) struct Deep(Vec<Linear>);

impl Deep {
    pub(super) fn new(inputs: usize, widths: &[usize], parameters: &mut Parameters) -> Result<Self> {
        let inputs = std::iter::once(&inputs).chain(widths);
        let layers = inputs.zip(widths).map(|(&i, &o)| Linear::new(i, o, parameters));
        layers.collect::<Result<_>>().map(Self)
    }

    pub(super) fn forward(&self, x: &Tensor, dropout: &mut Dropout<'_>) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| dropout.forward(&layer.forward(&x)?.relu()?))
    }
}

/// The cross network of DCNv2 with full matrices: `x' = x₀ ⊙ (W x + b) + x` (Wang et al. 2021, equation 1).
#[derive(Debug)]
pub(super) struct Cross(Vec<Linear>);

impl Cross {
    pub(super) fn new(inputs: usize, layers: usize, parameters: &mut Parameters) -> Result<Self> {
        let layers = (0..layers).map(|_| Linear::new(inputs, inputs, parameters));
        layers.collect::<Result<_>>().map(Self)
    }

    pub(super) fn forward(&self, first: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(first.clone(), |x, layer| (first * layer.forward(&x)?)? + x)
    }
}

/// Dropout: leaves values out during training and scales the others up.
#[derive(Debug)]
pub(super) struct Dropout<'a> {
    /// The share that is left out and its generator; none outside of training.
    pub(super) training: Option<(f64, &'a mut Xoshiro256PlusPlus)>,
}

impl Dropout<'_> {
    fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
        let Some((share, rng)) = &mut self.training else {
            return Ok(x.clone());
        };
        let share = *share;
        if share == 0.0 {
            return Ok(x.clone());
        }
        let kept = 1.0 / (1.0 - share);
        let mask: Vec<f32> = (0..x.elem_count()).map(|_| f32::from(u8::from(!rng.gen_bool(share)))).collect();
        let mask = Tensor::from_vec(mask, x.shape(), &Device::Cpu)?;
        (x * mask)? * kept
    }
}

/// The sum of `[rows · length, dimension]` vectors, weighted by `[rows, length]`, as `[rows, dimension]`.
pub(super) fn weighted_sum(vectors: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let (rows, length) = weights.dims2()?;
    let dimension = vectors.dim(1)?;
    let weighted = vectors.broadcast_mul(&weights.reshape((rows * length, 1))?)?;
    weighted.reshape((rows, length, dimension))?.sum(1)
}
