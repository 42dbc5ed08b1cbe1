//! A decoder layer that gradients flow through.
//!
//! The engine that generates has no gradients, so the forward is written here once more, over whole texts. Tests hold
//! the two against each other.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::rms_norm_slow;
use candle_nn::rotary_emb::rope_slow;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::softmax::attention_weights;

/// The standard deviation of initial weights, as in GPT-2 and Llama.
const DEVIATION: f32 = 0.02;

/// The shape of a draft model's layers.
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

    /// `[B, T, hidden]` of the positions, and what later passes attend to. See [`attend`](Self::attend) for the passes
    /// before this one.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        earlier: &[Attended],
        positions: &Positions,
    ) -> Result<(Tensor, Attended)> {
        let normed = match &self.attention_norm {
            Some(norm) => self.norm(x, norm)?,
            None => x.clone(),
        };
        let (attended, own) = self.attend(&normed, earlier, positions)?;
        let x = (x + attended)?;
        let normed = self.norm(&x, &self.mlp_norm)?;
        let inner = (product(&normed, &self.gate)?.silu()? * product(&normed, &self.up)?)?;
        Ok(((x + product(&inner, &self.down)?)?, own))
    }

    pub(crate) fn norm(&self, x: &Tensor, scale: &Var) -> Result<Tensor> {
        norm(x, scale, &self.shape)
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
}

impl Positions {
    pub(crate) fn new(length: usize, shape: &Shape, device: &Device) -> Result<Self> {
        let dim = shape.head_dim;
        let frequency = |pair: usize| shape.rope_theta.powf(-((2 * pair) as f64) / dim as f64);
        let angle = |at: usize, pair: usize| at as f64 * frequency(pair);
        let angles: Vec<f64> = (0..length).flat_map(|at| (0..dim / 2).map(move |pair| angle(at, pair))).collect();
        let angles = Tensor::from_vec(angles, (length, dim / 2), &Device::Cpu)?;
        let here = |values: Tensor| values.to_dtype(DType::F32)?.to_device(device);
        Ok(Self { cos: here(angles.cos()?)?, sin: here(angles.sin()?)? })
    }
}

/// RMS norm over the last dimension.
pub(crate) fn norm(x: &Tensor, scale: &Var, shape: &Shape) -> Result<Tensor> {
    #[expect(clippy::cast_possible_truncation, reason = "norms compute in f32")]
    let eps = shape.norm_eps as f32;
    rms_norm_slow(x, scale, eps)
}

/// `[B, T, inputs]` times a matrix `[outputs, inputs]`, in one product over all rows.
pub(crate) fn product(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    let (rows, length, inputs) = x.dims3()?;
    x.reshape((rows * length, inputs))?.matmul(&matrix.t()?)?.reshape((rows, length, matrix.dim(0)?))
}
