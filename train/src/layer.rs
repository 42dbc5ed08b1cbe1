//! A decoder layer that gradients flow through.
//!
//! The engine that generates has no gradients, so the forward is written here once more, over whole texts. Tests hold
//! the two against each other.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::rotary_emb::rope_slow;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::attention::Causal;
use crate::dropout::Dropout;
use crate::fused::{gated, rms_norm};
use crate::softmax::attention_weights;

/// The standard deviation of initial weights, as in GPT-2 and Llama.
const DEVIATION: f32 = 0.02;

/// The constants of a whole model.
pub(crate) const NORM_EPS: f64 = 1e-5;
pub(crate) const ROPE_THETA: f64 = 10_000.0;

/// The shape of a model's layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shape {
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Width of the MLP.
    pub(crate) inner: usize,
    /// Number of layers.
    pub(crate) layers: usize,
    /// Heads of the queries.
    pub(crate) heads: usize,
    /// Heads of keys and values; they divide the others.
    pub(crate) kv_heads: usize,
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// Base of the rotary embedding.
    pub(crate) rope_theta: f64,
    /// Added to the mean square before the root of every norm.
    pub(crate) norm_eps: f64,
}

impl Shape {
    /// Of a whole model: widths of the residual stream and of the MLP, heads of queries and of keys and values.
    pub(crate) fn llama([hidden, inner]: [usize; 2], layers: usize, [heads, kv_heads]: [usize; 2]) -> Self {
        let head_dim = hidden / heads;
        Self { hidden, inner, layers, heads, kv_heads, head_dim, rope_theta: ROPE_THETA, norm_eps: NORM_EPS }
    }
}

/// Makes seeded weights; candle's own initialisers use the device's generator, which has no seed on CPUs.
pub(crate) struct Initial<'a> {
    rng: Xoshiro256PlusPlus,
    device: &'a Device,
}

impl<'a> Initial<'a> {
    pub(crate) fn new(seed: u64, device: &'a Device) -> Self {
        Self { rng: Xoshiro256PlusPlus::seed_from_u64(seed), device }
    }

    /// `[outputs, inputs]`, uniform with the usual standard deviation.
    pub(crate) fn matrix(&mut self, outputs: usize, inputs: usize) -> Result<Var> {
        self.uniform(outputs, inputs, DEVIATION)
    }

    fn uniform(&mut self, outputs: usize, inputs: usize, deviation: f32) -> Result<Var> {
        let bound = deviation * 3f32.sqrt();
        let values: Vec<f32> = (0..outputs * inputs).map(|_| self.rng.gen_range(-bound..bound)).collect();
        Var::from_vec(values, (outputs, inputs), self.device)
    }

    pub(crate) fn ones(&self, width: usize) -> Result<Var> {
        Var::ones(width, DType::F32, self.device)
    }

    pub(crate) fn zeros(&self, shape: impl Into<candle_core::Shape>) -> Result<Var> {
        Var::zeros(shape, DType::F32, self.device)
    }

    /// Residual blocks of a head that add nothing yet: of each the projection and its bias.
    pub(crate) fn blocks(&self, width: usize, count: usize) -> Result<Vec<[Var; 2]>> {
        (0..count).map(|_| Ok([self.zeros((width, width))?, self.zeros(width)?])).collect()
    }

    /// A layer, with or without a norm before its attention.
    pub(crate) fn layer(&mut self, shape: &Shape, has_attention_norm: bool) -> Result<Layer> {
        let Shape { hidden, inner, heads, kv_heads, head_dim, .. } = *shape;
        // What is added to the residual stream starts smaller, the more of it there is (GPT-2).
        let added = DEVIATION / (2.0 * shape.layers as f32).sqrt();
        Ok(Layer {
            shape: *shape,
            attention_norm: if has_attention_norm { Some(self.ones(hidden)?) } else { None },
            q: self.matrix(heads * head_dim, hidden)?,
            k: self.matrix(kv_heads * head_dim, hidden)?,
            v: self.matrix(kv_heads * head_dim, hidden)?,
            output: self.uniform(hidden, heads * head_dim, added)?,
            mlp_norm: self.ones(hidden)?,
            gate: self.matrix(inner, hidden)?,
            up: self.matrix(inner, hidden)?,
            down: self.uniform(hidden, inner, added)?,
        })
    }
}

/// A layer and its weights.
#[derive(Debug)]
pub(crate) struct Layer {
    shape: Shape,
    attention_norm: Option<Var>,
    q: Var,
    k: Var,
    v: Var,
    output: Var,
    mlp_norm: Var,
    gate: Var,
    up: Var,
    down: Var,
}

/// Keys and values of all positions, `[B, heads, T, D]` each.
#[derive(Debug, Clone)]
pub(crate) struct Attended {
    keys: Tensor,
    values: Tensor,
}

impl Layer {
    /// The weights by the names that checkpoints of Llama models give them.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &Var)> {
        let norm = self.attention_norm.iter().map(|norm| ("input_layernorm", norm));
        norm.chain([
            ("self_attn.q_proj", &self.q),
            ("self_attn.k_proj", &self.k),
            ("self_attn.v_proj", &self.v),
            ("self_attn.o_proj", &self.output),
            ("post_attention_layernorm", &self.mlp_norm),
            ("mlp.gate_proj", &self.gate),
            ("mlp.up_proj", &self.up),
            ("mlp.down_proj", &self.down),
        ])
    }

    /// `[B, T, hidden]` of the positions of whole texts.
    pub(crate) fn forward(&self, x: &Tensor, positions: &Positions, dropout: &mut Dropout) -> Result<Tensor> {
        let normed = self.attention_normed(x)?;
        let attended = match x.device() {
            Device::Cpu => self.attend_at_once(&normed, positions)?,
            _ => self.attend(&normed, &[], positions)?.0,
        };
        self.after_attention(x, &attended, dropout)
    }

    /// The same in a pass after others over these positions (see [`attend`](Self::attend)), and what later ones attend
    /// to.
    pub(crate) fn forward_after(
        &self,
        earlier: &[Attended],
        x: &Tensor,
        positions: &Positions,
    ) -> Result<(Tensor, Attended)> {
        let (attended, own) = self.attend(&self.attention_normed(x)?, earlier, positions)?;
        Ok((self.after_attention(x, &attended, &mut Dropout::none())?, own))
    }

    fn attention_normed(&self, x: &Tensor) -> Result<Tensor> {
        match &self.attention_norm {
            Some(scale) => norm(x, scale, &self.shape),
            None => Ok(x.clone()),
        }
    }

    fn after_attention(&self, x: &Tensor, attended: &Tensor, dropout: &mut Dropout) -> Result<Tensor> {
        let x = (x + dropout.apply(attended)?)?;
        let normed = norm(&x, &self.mlp_norm, &self.shape)?;
        let inner = gated(&product(&normed, &self.gate)?, &product(&normed, &self.up)?)?;
        &x + dropout.apply(&product(&inner, &self.down)?)?
    }

    /// Causal attention as one operation, after one product.
    fn attend_at_once(&self, x: &Tensor, positions: &Positions) -> Result<Tensor> {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let all = product(x, &Tensor::cat(&[self.q.as_tensor(), &self.k, &self.v], 0)?)?;
        let attention = Causal { heads, kv_heads, dim: head_dim, rotation: positions.rotation.clone() };
        product(&attention.of(&all)?, &self.output)
    }

    /// `[B, T, H · D]` as `[B, H, T, D]`, with as many heads as the queries have.
    fn heads(&self, x: &Tensor, matrix: &Var, heads: usize) -> Result<Tensor> {
        let (rows, length, _) = x.dims3()?;
        let (dim, group) = (self.shape.head_dim, self.shape.heads / heads);
        let y = product(x, matrix)?.reshape((rows, length, heads, dim))?.transpose(1, 2)?.contiguous()?;
        if group == 1 {
            return Ok(y);
        }
        let y = y.unsqueeze(2)?.broadcast_as((rows, heads, group, length, dim))?;
        y.contiguous()?.reshape((rows, heads * group, length, dim))
    }

    /// Causal attention. With earlier passes over the same positions (HASS, arXiv:2408.15766, section 3.2), the last
    /// positions up to its own that a query sees are those of the later passes, one of each, as they are when a draft
    /// is made: of j passes a query at i sees the first one's keys up to i - j + 1, then the second's at i - j + 2, and
    /// so on to its own.
    fn attend(&self, x: &Tensor, earlier: &[Attended], positions: &Positions) -> Result<(Tensor, Attended)> {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let (rows, length, _) = x.dims3()?;
        let (cos, sin) = (&positions.cos, &positions.sin);
        let q = rope_slow(&self.heads(x, &self.q, heads)?, cos, sin)?;
        let own = Attended {
            keys: rope_slow(&self.heads(x, &self.k, kv_heads)?, cos, sin)?,
            values: self.heads(x, &self.v, kv_heads)?,
        };
        let q = (q / (head_dim as f64).sqrt())?;
        let first = earlier.first().unwrap_or(&own);
        let later: Vec<&Attended> = earlier.iter().skip(1).chain(earlier.first().map(|_| &own)).collect();
        let mut scores = vec![q.matmul(&first.keys.t()?)?];
        for (at, pass) in later.iter().enumerate() {
            scores.push((&q * behind(&pass.keys, later.len() - 1 - at)?)?.sum_keepdim(D::Minus1)?);
        }
        let weights = attention_weights(&Tensor::cat(&scores, D::Minus1)?, later.len())?;
        let mut seen = weights.narrow(D::Minus1, 0, length)?.contiguous()?.matmul(&first.values)?;
        for (at, pass) in later.iter().enumerate() {
            let weight = weights.narrow(D::Minus1, length + at, 1)?;
            seen = (seen + behind(&pass.values, later.len() - 1 - at)?.broadcast_mul(&weight)?)?;
        }
        let seen = seen.transpose(1, 2)?.reshape((rows, length, heads * head_dim))?;
        Ok((product(&seen, &self.output)?, own))
    }
}

/// `[B, H, T, D]` moved so many positions back: at i what was at i - `back`, 0 where there was nothing.
fn behind(x: &Tensor, back: usize) -> Result<Tensor> {
    let length = x.dim(2)?;
    let back = back.min(length);
    x.narrow(2, 0, length - back)?.pad_with_zeros(2, back, 0)
}

/// What attention needs to know of T positions.
#[derive(Debug)]
pub(crate) struct Positions {
    /// `[T, D/2]`.
    cos: Tensor,
    sin: Tensor,
    /// The same as numbers.
    rotation: Arc<[Vec<f32>; 2]>,
}

impl Positions {
    pub(crate) fn new(length: usize, shape: &Shape, device: &Device) -> Result<Self> {
        let dim = shape.head_dim;
        let frequency = |pair: usize| shape.rope_theta.powf(-((2 * pair) as f64) / dim as f64);
        let angle = |at: usize, pair: usize| at as f64 * frequency(pair);
        let angles: Vec<f64> = (0..length).flat_map(|at| (0..dim / 2).map(move |pair| angle(at, pair))).collect();
        #[expect(clippy::cast_possible_truncation, reason = "attention computes in f32")]
        let rotation = [f64::cos, f64::sin].map(|of| angles.iter().map(|&angle| of(angle) as f32).collect::<Vec<_>>());
        let here = |values: &[f32]| Tensor::from_slice(values, (length, dim / 2), device);
        Ok(Self { cos: here(&rotation[0])?, sin: here(&rotation[1])?, rotation: Arc::new(rotation) })
    }
}

/// RMS norm over the last dimension.
pub(crate) fn norm(x: &Tensor, scale: &Var, shape: &Shape) -> Result<Tensor> {
    #[expect(clippy::cast_possible_truncation, reason = "norms compute in f32")]
    let eps = shape.norm_eps as f32;
    rms_norm(x, scale, eps)
}

/// `[B, T, inputs]` times a matrix `[outputs, inputs]`, in one product over all rows.
pub(crate) fn product(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    let (rows, length, inputs) = x.dims3()?;
    x.reshape((rows * length, inputs))?.matmul(&matrix.t()?)?.reshape((rows, length, matrix.dim(0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What attention finds, and its gradients by its input and its matrices.
    fn found(layer: &Layer, of: impl Fn(&Tensor) -> Result<Tensor>, length: usize) -> Vec<Vec<f32>> {
        let count = u16::try_from(2 * length * layer.shape.hidden).unwrap();
        let values = |step: u16| (0..count).map(|at| f32::from(at * step % 101) / 50.0 - 1.0).collect::<Vec<_>>();
        let shape = (2, length, layer.shape.hidden);
        let x = Var::from_vec(values(37), shape, &Device::Cpu).unwrap();
        let attended = of(&x).unwrap();
        let weights = Tensor::from_vec(values(29), shape, &Device::Cpu).unwrap();
        let gradients = (&attended * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let by = [&x, &layer.q, &layer.k, &layer.v, &layer.output].map(|var| flat(gradients.get(var).unwrap()));
        std::iter::once(flat(&attended)).chain(by).collect()
    }

    #[test]
    fn attention_as_one_operation_is_that_of_candles() {
        for (heads, kv_heads, length) in [(2, 2, 1), (4, 2, 7), (4, 1, 30)] {
            let shape = Shape::llama([32, 48], 1, [heads, kv_heads]);
            let mut layer = Initial::new(1, &Device::Cpu).layer(&shape, true).unwrap();
            // Weights as far from 0 as a training brings them.
            for var in [&mut layer.q, &mut layer.k, &mut layer.v, &mut layer.output] {
                *var = Var::from_tensor(&(var.as_tensor() * 20.0).unwrap()).unwrap();
            }
            let positions = Positions::new(length, &shape, &Device::Cpu).unwrap();
            let own = found(&layer, |x| layer.attend_at_once(x, &positions), length);
            let theirs = found(&layer, |x| Ok(layer.attend(x, &[], &positions)?.0), length);
            for (own, theirs) in own.iter().zip(&theirs) {
                let most = theirs.iter().map(|x| x.abs()).fold(0.0, f32::max);
                for (own, theirs) in own.iter().zip(theirs) {
                    assert!((own - theirs).abs() < 1e-5 * (1.0 + most), "{heads} {length}: {own} {theirs}");
                }
            }
        }
    }
}
