//! A Llama-family decoder whose forward takes trees.
//!
//! The nodes of all sequences are one batch of rows for everything that treats rows alone (norms, projections, rotary
//! embeddings, MLP, vocabulary) and lie together in the [arena](crate::arena); in [attention](crate::attention) a
//! node's position is the committed length plus its depth, and it sees its ancestors alone. Only scored nodes pass the
//! last MLP and the vocabulary, and only their most probable tokens leave a GPU.
//!
//! Weights and linear kernels are mistralrs'; the layer loop is ours because mistralrs seals mask and positions.

use candle_core::{CpuStorage, D, DType, Device, Module, Result, Storage, Tensor};
use candle_nn::{Embedding, RmsNorm};
use laser_cpu::{Batch, Format, Matrix, ModelShape, Rope, push_top_k};
use laser_decode::Candidate;

use crate::{
    arena::{Arena, SequenceId},
    attention::Attention,
    blocks,
    decoder::Decoder,
    error::EngineError,
    linear::Linear,
    rope::RopeRows,
};

/// A result of loading; forwards return candle's.
type Loaded<T> = std::result::Result<T, EngineError>;

/// Where a model's tensors come from; names are those of Hugging Face, without `.weight`.
pub(super) trait Weights {
    /// A projection from `inputs` to `outputs`.
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Loaded<Linear>;

    /// The values of a tensor, whose name has its `.weight` or `.bias`, rounded to the dtype of all.
    fn values(&self, name: &str, shape: &[usize]) -> Loaded<Vec<f32>>;

    /// A matrix `[outputs, inputs]` for the kernels: the values in this format, or what blocks it is stored in.
    fn matrix(&self, name: &str, shape: [usize; 2], format: Format) -> Loaded<Matrix> {
        blocks::matrix(self.values(name, &shape)?, shape, format)
    }

    /// The scale of a norm.
    fn vector(&mut self, name: &str, length: usize) -> Loaded<Tensor>;

    /// The token embedding, `[rows, width]`.
    fn embedding(&mut self, rows: usize, width: usize) -> Loaded<Tensor>;

    /// The projection to the vocabulary, of the embedding's shape; the embedding itself if `tied`.
    fn head(&mut self, embedding: &Tensor, tied: bool) -> Loaded<Linear>;

    /// Weights read so far.
    fn parameters(&self) -> u64;
}

/// Norms of single heads; the heads of a layer share them.
#[derive(Debug)]
struct HeadNorms {
    query: RmsNorm,
    key: RmsNorm,
}

#[derive(Debug)]
struct Layer {
    attention_norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    head_norms: Option<HeadNorms>,
    output: Linear,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The decoder.
#[derive(Debug)]
pub(super) struct TreeLm {
    shape: ModelShape,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
    arena: Arena,
    dtype: DType,
    device: Device,
}

impl TreeLm {
    pub(super) fn load(shape: ModelShape, weights: &mut dyn Weights, device: &Device) -> Loaded<Self> {
        let ModelShape { hidden_size, vocab_size, norm_eps, .. } = shape;
        let embedding = weights.embedding(vocab_size, hidden_size)?;
        let layers = (0..shape.layers).map(|layer| Layer::load(&shape, weights, layer)).collect::<Loaded<_>>()?;
        Ok(Self {
            layers,
            norm: RmsNorm::new(weights.vector("model.norm", hidden_size)?, norm_eps),
            head: weights.head(&embedding, shape.tied_embeddings)?,
            rope: Rope::new(shape.head_dim, shape.rope_theta, &shape.rope_scaling),
            arena: Arena::new(&shape, embedding.dtype(), device),
            dtype: embedding.dtype(),
            device: device.clone(),
            embedding: Embedding::new(embedding, hidden_size),
            shape,
        })
    }

    /// Writes the nodes' keys and values and returns the logits `[scored, vocab_size]` in f32, or
    /// nothing if no row is scored.
    fn logits(&mut self, batch: &Batch<'_>, sequences: &[SequenceId]) -> Result<Option<Tensor>> {
        let start = self.arena.begin(batch.tokens.len())?;
        let place = (self.dtype, &self.device);
        let shared = self.shape.heads / self.shape.kv_heads;
        let attention = Attention::plan(batch, (&self.arena, sequences), (start, shared), place)?;
        let rope = RopeRows::new(&mut self.rope, &batch.positions, self.dtype, &self.device)?;
        let mut x = self.embedding.forward(&Tensor::new(&batch.tokens[..], &self.device)?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (query, key, value) = layer.project(&self.shape, &x, &rope)?;
            let context = self.arena.write(index, start, (&key, &value))?;
            let attended = attention.attend(&query, context)?;
            x = (x + layer.output.forward(&attended)?)?;
            if index + 1 == self.layers.len() {
                if batch.scored.is_empty() {
                    return Ok(None);
                }
                x = self.scored_rows(x, batch)?;
            }
            x = (&x + layer.mlp(&x)?)?;
        }
        // Logits are compared, not fed on.
        self.head.forward(&self.norm.forward(&x)?)?.to_dtype(DType::F32).map(Some)
    }

    fn scored_rows(&self, x: Tensor, batch: &Batch<'_>) -> Result<Tensor> {
        if batch.scored.len() == batch.tokens.len() {
            return Ok(x);
        }
        x.index_select(&Tensor::new(&batch.scored[..], &self.device)?, 0)
    }
}

impl Decoder for TreeLm {
    type Cache = SequenceId;

    fn cache_bytes(&self, capacity: usize) -> usize {
        self.arena.bytes(capacity)
    }

    fn open(&mut self, capacity: usize) -> Loaded<SequenceId> {
        Ok(self.arena.open(capacity))
    }

    fn fork(&mut self, from: &mut SequenceId, length: usize, capacity: usize) -> Loaded<SequenceId> {
        Ok(self.arena.fork(*from, length, capacity))
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        sequences: &mut [SequenceId],
        top_k: usize,
        best: &mut Vec<Candidate>,
    ) -> Loaded<()> {
        match self.logits(batch, sequences)? {
            Some(logits) => push_all(&logits, top_k, best)?,
            // Nothing comes back that the host would wait for, and the step's time would be that of its launches.
            None => self.device.synchronize()?,
        }
        for (sequence, span) in sequences.iter().zip(&batch.spans) {
            self.arena.append(*sequence, span.parents.len());
        }
        Ok(())
    }

    fn commit(&mut self, sequence: &mut SequenceId, length: usize, keep: &[usize]) -> Loaded<()> {
        self.arena.commit(*sequence, length, keep);
        Ok(())
    }

    fn close(&mut self, sequence: SequenceId) {
        self.arena.close(sequence);
    }
}

/// The `top_k` most probable tokens of every row of logits, found where the logits are.
fn push_all(logits: &Tensor, top_k: usize, best: &mut Vec<Candidate>) -> Result<()> {
    let (_, width) = logits.dims2()?;
    let (storage, layout) = logits.storage_and_layout();
    if let (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
        let rows = data[start..end].chunks_exact(width);
        rows.for_each(|row| push_top_k(row, top_k, best));
        return Ok(());
    }
    drop(storage);
    push_from_device(logits, top_k, best)
}

/// The same in `top_k` passes over the logits: a vocabulary of 32,000 would be 128 kB a node to send to the host. Of
/// tokens with the same logit as the last that is taken, the device decides which is.
fn push_from_device(logits: &Tensor, top_k: usize, best: &mut Vec<Candidate>) -> Result<()> {
    let normaliser = logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?;
    let taken = Tensor::full(f32::NEG_INFINITY, normaliser.shape(), logits.device())?;
    let (mut tokens, mut found) = (Vec::new(), Vec::new());
    for _ in 0..top_k {
        let token = logits.argmax_keepdim(D::Minus1)?;
        found.push((logits.gather(&token, 1)? - &normaliser)?);
        logits.scatter_set(&token, &taken, 1)?;
        tokens.push(token);
    }
    let tokens = Tensor::cat(&tokens, 1)?.to_vec2::<u32>()?;
    let found = Tensor::cat(&found, 1)?.to_vec2::<f32>()?;
    for (tokens, found) in tokens.into_iter().zip(found) {
        let start = best.len();
        let pairs = tokens.into_iter().zip(found);
        best.extend(pairs.map(|(token, log_probability)| Candidate { token, log_probability }));
        best[start..].sort_by(|a, b| {
            let descending = b.log_probability.total_cmp(&a.log_probability);
            descending.then(a.token.cmp(&b.token))
        });
    }
    Ok(())
}

impl Layer {
    fn load(shape: &ModelShape, weights: &mut dyn Weights, layer: usize) -> Loaded<Self> {
        let &ModelShape { hidden_size: hidden, intermediate_size: inner, head_dim, norm_eps, .. } = shape;
        let (queries, keys) = (shape.heads * head_dim, shape.kv_heads * head_dim);
        let (qkv_bias, mlp_bias) = (shape.qkv_bias, shape.mlp_bias);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |weights: &mut dyn Weights, part: &str, length: usize| {
            Ok::<_, EngineError>(RmsNorm::new(weights.vector(&name(part), length)?, norm_eps))
        };
        let linear = |weights: &mut dyn Weights, part: &str, outputs, inputs, bias| {
            weights.linear(&name(part), outputs, inputs, bias)
        };
        Ok(Self {
            attention_norm: norm(weights, "input_layernorm", hidden)?,
            query: linear(weights, "self_attn.q_proj", queries, hidden, qkv_bias)?,
            key: linear(weights, "self_attn.k_proj", keys, hidden, qkv_bias)?,
            value: linear(weights, "self_attn.v_proj", keys, hidden, qkv_bias)?,
            head_norms: match shape.head_norms {
                true => Some(HeadNorms {
                    query: norm(weights, "self_attn.q_norm", head_dim)?,
                    key: norm(weights, "self_attn.k_norm", head_dim)?,
                }),
                false => None,
            },
            output: linear(weights, "self_attn.o_proj", hidden, queries, shape.output_bias)?,
            mlp_norm: norm(weights, "post_attention_layernorm", hidden)?,
            gate: linear(weights, "mlp.gate_proj", inner, hidden, mlp_bias)?,
            up: linear(weights, "mlp.up_proj", inner, hidden, mlp_bias)?,
            down: linear(weights, "mlp.down_proj", hidden, inner, mlp_bias)?,
        })
    }

    /// Rotated queries (scaled by 1/√d) and keys, and values, each `[nodes, heads, head_dim]`.
    fn project(&self, shape: &ModelShape, x: &Tensor, rope: &RopeRows) -> Result<(Tensor, Tensor, Tensor)> {
        let x = self.attention_norm.forward(x)?;
        let nodes = x.dim(0)?;
        let heads = |linear: &Linear, heads: usize| linear.forward(&x)?.reshape((nodes, heads, shape.head_dim));
        let mut query = heads(&self.query, shape.heads)?;
        let mut key = heads(&self.key, shape.kv_heads)?;
        if let Some(norms) = &self.head_norms {
            query = norms.query.forward(&query)?;
            key = norms.key.forward(&key)?;
        }
        Ok((rotate(&query, &rope.query)?, rotate(&key, &rope.key)?, heads(&self.value, shape.kv_heads)?))
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.mlp_norm.forward(x)?;
        self.down.forward(&(self.gate.forward(&x)?.silu()? * self.up.forward(&x)?)?)
    }
}

/// Rotary embedding of `[nodes, heads, head_dim]`.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    candle_nn::rotary_emb::rope_thd(&x.unsqueeze(0)?, cos, sin)?.squeeze(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_device_finds_the_tokens_that_a_scan_finds(
            seed in any::<u64>(),
            rows in 1..5_usize,
            top_k in 1..9_usize,
        ) {
            let width = 101;
            // A permutation of distinct logits in each row.
            let logit = |at: usize| ((at as u64 * 57 + seed % 101 * (at as u64 / 101 + 1)) % 101) as f32 / 8.0;
            let data: Vec<f32> = (0..rows * width).map(logit).collect();
            let logits = Tensor::from_vec(data.clone(), (rows, width), &Device::Cpu).unwrap();
            let (mut scanned, mut found) = (Vec::new(), Vec::new());
            push_all(&logits, top_k, &mut scanned).unwrap();
            push_from_device(&logits, top_k, &mut found).unwrap();
            prop_assert_eq!(found.len(), rows * top_k);
            for (found, scanned) in found.iter().zip(&scanned) {
                prop_assert_eq!(found.token, scanned.token);
                prop_assert!((found.log_probability - scanned.log_probability).abs() < 1e-4);
            }
        }
    }
}
