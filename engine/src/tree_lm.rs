//! A Llama-family decoder whose forward takes trees.
//!
//! The nodes of all sequences are one batch of rows for everything that treats rows alone (norms, projections, rotary
//! embeddings, MLP, vocabulary) and lie together in the [arena](crate::arena); in [attention](crate::attention) a
//! node's position is the committed length plus its depth, and it sees its ancestors alone. Only scored nodes pass the
//! last MLP and the vocabulary, and only their most probable tokens leave a GPU.
//!
//! Weights and linear kernels are mistralrs'; the layer loop is ours because mistralrs seals mask and positions.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use laser_cpu::{Allowed, Batch, Format, MaskedRow, Matrix, ModelShape, Predictions, Rope, is_allowed};
use laser_decode::{Candidate, Draw};

use crate::{
    arena::{Arena, SequenceId, number},
    attention::Attention,
    blocks,
    decoder::Decoder,
    error::EngineError,
    linear::{Linear, Projections},
    norm::Norm,
    output::Output,
    rotation::{Heads, Rotation},
    workspace::Workspace,
};

/// A result of loading; forwards return candle's.
type Loaded<T> = std::result::Result<T, EngineError>;

/// Where a model's tensors come from; names are those of Hugging Face, without `.weight`.
pub(super) trait Weights: Send {
    /// A projection from `inputs` to `outputs`.
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Loaded<Linear>;

    /// The values of a tensor, whose name has its `.weight` or `.bias`, rounded to the dtype of all.
    fn values(&self, name: &str, shape: &[usize]) -> Loaded<Vec<f32>>;

    /// A matrix `[outputs, inputs]` for the kernels: the values in this format, or what blocks it is stored in.
    fn matrix(&self, name: &str, shape: [usize; 2], format: Format) -> Loaded<Matrix> {
        blocks::matrix(self.values(name, &shape)?, format)
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

#[derive(Debug)]
struct Layer {
    attention_norm: Option<Norm>,
    heads: Heads,
    output: Linear,
    mlp_norm: Norm,
    gate_up: Projections,
    down: Linear,
}

/// The decoder.
#[derive(Debug)]
pub(super) struct TreeLm {
    shape: ModelShape,
    embedding: Tensor,
    /// Of embeddings and features, one behind the other.
    fusion: Option<Linear>,
    layers: Vec<Layer>,
    norm: Option<Norm>,
    head: Linear,
    rope: Rope,
    arena: Arena,
    workspace: Workspace,
    /// Of the last step's scored nodes, if they are kept.
    logits: Option<Tensor>,
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
            fusion: match shape.fused {
                Some(bias) => Some(weights.linear("model.fc", hidden_size, 2 * hidden_size, bias)?),
                None => None,
            },
            norm: match shape.fused {
                Some(_) => None,
                None => Some(Norm::new(weights.vector("model.norm", hidden_size)?, norm_eps)),
            },
            head: weights.head(&embedding, shape.tied_embeddings)?,
            rope: Rope::new(shape.head_dim, shape.rope_theta, &shape.rope_scaling),
            arena: Arena::new(&shape, embedding.dtype(), device),
            workspace: Workspace::default(),
            logits: None,
            dtype: embedding.dtype(),
            device: device.clone(),
            embedding,
            shape,
        })
    }

    /// What enters the first layer: the embeddings, those of a fused model together with the features before them.
    fn embed(&mut self, batch: &Batch<'_>) -> Result<Tensor> {
        let tokens = Tensor::new(&batch.tokens[..], &self.device)?;
        let x = select(&self.embedding, &tokens, Output::Stream, &mut self.workspace)?;
        let Some(fusion) = &self.fusion else {
            return Ok(x);
        };
        let before = Tensor::from_slice(&batch.before, x.dims(), &self.device)?.to_dtype(self.dtype)?;
        fusion.forward_to(None, &Tensor::cat(&[x, before], 1)?, &mut self.workspace)
    }

    /// Writes the nodes' keys and values and returns the features `[rows, hidden_size]`, of all nodes if they are
    /// wanted, else of the scored ones; nothing if there is no such row.
    fn features(&mut self, batch: &Batch<'_>, sequences: &[SequenceId]) -> Result<Option<Tensor>> {
        let start = self.arena.begin(batch.tokens.len())?;
        let place = (self.dtype, &self.device);
        let shared = self.shape.heads / self.shape.kv_heads;
        let attention = Attention::plan(batch, (&self.arena, sequences), (start, shared), place, &mut self.workspace)?;
        let rotation = Rotation::new(&mut self.rope, &batch.positions, place)?;
        let mut x = self.embed(batch)?;
        let norms = self.layers.iter().map(|layer| &layer.attention_norm).chain([&self.norm]);
        let mut normed = match self.layers.first().map_or(&self.norm, |layer| &layer.attention_norm) {
            Some(norm) => norm.first(&x, &mut self.workspace)?,
            None => x.clone(),
        };
        let workspace = &mut self.workspace;
        for ((index, layer), next_norm) in self.layers.iter().enumerate().zip(norms.skip(1)) {
            let query = rotation.write(&layer.heads, &normed, (&self.arena, index), start, workspace)?;
            let mut attended = attention.attend(&query, self.arena.layer(index), workspace)?;
            if index + 1 == self.layers.len() && !batch.wants_features {
                if batch.scored.is_empty() {
                    return Ok(None);
                }
                if batch.scored.len() < batch.tokens.len() {
                    let scored = Tensor::new(&batch.scored[..], &self.device)?;
                    x = select(&x, &scored, Output::ScoredStream, workspace)?;
                    attended = select(&attended, &scored, Output::ScoredAttended, workspace)?;
                }
            }
            let y = layer.output.forward_to(Some(Output::Branch), &attended, workspace)?;
            (x, normed) = layer.mlp_norm.add(x, &y, workspace)?;
            let y = layer.mlp(&normed, workspace)?;
            (x, normed) = match next_norm {
                Some(norm) => norm.add(x, &y, workspace)?,
                None => {
                    let sum = (x + y)?;
                    (sum.clone(), sum)
                }
            };
        }
        Ok(Some(normed))
    }

    /// What the scored nodes say, and the features of all nodes if they are wanted.
    fn predictions(&mut self, batch: &Batch<'_>, sequences: &[SequenceId], top_k: usize) -> Result<Predictions> {
        let Some(mut rows) = self.features(batch, sequences)? else {
            // Nothing comes back that the host would wait for, and the step's time would be that of its launches.
            self.device.synchronize()?;
            return Ok(Predictions::default());
        };
        let mut features = Vec::new();
        if batch.wants_features {
            features = rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            if batch.scored.is_empty() {
                return Ok(Predictions { features, ..Predictions::default() });
            }
            let scored = Tensor::new(&batch.scored[..], &self.device)?;
            rows = select(&rows, &scored, Output::ScoredStream, &mut self.workspace)?;
        }
        let logits = self.head.logits(&rows, &mut self.workspace)?;
        let asked = asked(&logits, batch, NORMALISED_MAX)?;
        let predictions = predictions(&logits, top_k, &batch.draws)?;
        self.logits = batch.keeps_logits.then_some(logits);
        Ok(Predictions { features, asked, ..predictions })
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

    fn forward(&mut self, batch: &Batch<'_>, sequences: &mut [SequenceId], top_k: usize) -> Loaded<Predictions> {
        let predictions = self.predictions(batch, sequences, top_k)?;
        for (sequence, span) in sequences.iter().zip(&batch.spans) {
            self.arena.append(*sequence, span.parents.len());
        }
        Ok(predictions)
    }

    fn masked(&mut self, rows: &[MaskedRow<'_>], top_k: usize) -> Loaded<Vec<Option<Allowed>>> {
        Ok(self.logits.as_ref().map(|logits| masked(logits, rows, top_k)).transpose()?.unwrap_or_default())
    }

    fn commit(&mut self, sequence: &mut SequenceId, length: usize, keep: &[usize]) -> Loaded<()> {
        self.arena.commit(*sequence, length, keep);
        Ok(())
    }

    fn close(&mut self, sequence: SequenceId) {
        self.arena.close(sequence);
    }
}

/// The rows of `from`, `[rows, width]`, that an index names; on a GPU in the workspace's memory.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
fn select(from: &Tensor, index: &Tensor, to: Output, workspace: &mut Workspace) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if from.device().is_cuda() {
        return crate::cuda::layer::gather(from, index, to, workspace);
    }
    from.index_select(index, 0)
}

/// Logits that are normalised at a time, at most, but for those of one row. Kernels number them by 32 bits, which the
/// beams of many lists exceed with a large vocabulary, and 4 bytes of each are copied several times.
const NORMALISED_MAX: usize = 1 << 28;

/// The log probabilities that are asked for, the only ones that leave the device; of as many rows at a time as have
/// `most` logits.
fn asked(logits: &Tensor, batch: &Batch<'_>, most: usize) -> Result<Vec<f32>> {
    if batch.asked.is_empty() {
        return Ok(Vec::new());
    }
    let (rows, width) = logits.dims2()?;
    let at_a_time = (most / width).max(1);
    let mut found = Vec::with_capacity(batch.asked.len());
    for start in (0..rows).step_by(at_a_time) {
        found.extend(asked_of(logits, start..rows.min(start + at_a_time), batch)?);
    }
    Ok(found)
}

/// Those of some rows.
fn asked_of(logits: &Tensor, rows: Range<usize>, batch: &Batch<'_>) -> Result<Vec<f32>> {
    let (_, width) = logits.dims2()?;
    let (first, count) = (rows.start, rows.len());
    let row_of = |row: usize| batch.asked_at(first + row).iter().map(move |token| number(row * width) + token);
    let places: Vec<u32> = (0..count).flat_map(row_of).collect();
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let logits = logits.narrow(0, first, count)?.to_dtype(DType::F32)?;
    let of_row = logits.log_sum_exp(1)?.unsqueeze(1)?;
    let log_probabilities = logits.broadcast_sub(&of_row)?.flatten_all()?;
    log_probabilities.index_select(&Tensor::new(places, logits.device())?, 0)?.to_vec1()
}

/// What is added to the logit of a token that may not follow: its probability is 0, and its part in sums as well.
const FORBIDDEN: f32 = -1e30;

/// What rows of logits say of the tokens that may follow, found where the logits are: as
/// [`MaskedRow::choose`] finds it.
fn masked(logits: &Tensor, rows: &[MaskedRow<'_>], top_k: usize) -> Result<Vec<Option<Allowed>>> {
    let (_, width) = logits.dims2()?;
    let device = logits.device();
    let places: Vec<u32> = rows.iter().map(|row| number(row.row)).collect();
    let logits = logits.index_select(&Tensor::new(places, device)?, 0)?.to_dtype(DType::F32)?;
    let forbidden = |row: &MaskedRow<'_>| {
        let mask = row.mask;
        (0..number(width)).map(move |token| if is_allowed(mask, token) { 0.0 } else { FORBIDDEN }).collect::<Vec<f32>>()
    };
    let forbidden: Vec<f32> = rows.iter().flat_map(forbidden).collect();
    let allowed = (&logits + Tensor::from_vec(forbidden, (rows.len(), width), device)?)?;
    let draws: Vec<Option<Draw>> = rows.iter().map(|row| row.draw).collect();
    let found = predictions(&allowed, top_k.max(1), &draws)?;
    // From the probabilities among the allowed tokens to those among all.
    let shifts: Vec<f32> = (allowed.log_sum_exp(1)? - logits.log_sum_exp(1)?)?.to_vec1()?;
    let of_all = |candidate: Candidate, shift: f32| Candidate {
        log_probability: candidate.log_probability + shift,
        ..candidate
    };
    let width = found.candidates.len() / rows.len().max(1);
    let of_row = |at: usize| {
        let candidates = found.candidates[at * width..][..width].iter();
        let candidates = candidates.filter(|candidate| is_allowed(rows[at].mask, candidate.token));
        let candidates: Vec<Candidate> = candidates.map(|candidate| of_all(*candidate, shifts[at])).collect();
        let choice = of_all(found.rows[at].choice, shifts[at]);
        (!candidates.is_empty()).then_some(Allowed { candidates, choice })
    };
    Ok((0..rows.len()).map(of_row).collect())
}

/// What every row of logits says, found where the logits are.
pub(super) fn predictions(logits: &Tensor, top_k: usize, draws: &[Option<Draw>]) -> Result<Predictions> {
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        return crate::cuda::top_k::predictions(logits, top_k, draws);
    }
    let (_, width) = logits.dims2()?;
    let logits = logits.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = logits.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("logits are on {:?}, whose most probable tokens nothing finds", logits.device());
    };
    let mut predictions = Predictions::default();
    let rows = data[start..end].chunks_exact(width);
    rows.zip(draws).for_each(|(row, draw)| predictions.push(row, top_k, *draw));
    Ok(predictions)
}

impl Layer {
    fn load(shape: &ModelShape, weights: &mut dyn Weights, layer: usize) -> Loaded<Self> {
        let &ModelShape { hidden_size: hidden, intermediate_size: inner, head_dim, norm_eps, .. } = shape;
        let (queries, keys) = (shape.heads * head_dim, shape.kv_heads * head_dim);
        let (qkv_bias, mlp_bias) = (shape.qkv_bias, shape.mlp_bias);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |weights: &mut dyn Weights, part: &str, length: usize| {
            Ok::<_, EngineError>(Norm::new(weights.vector(&name(part), length)?, norm_eps))
        };
        let linear = |weights: &mut dyn Weights, part: &str, outputs, inputs, bias| {
            weights.linear(&name(part), outputs, inputs, bias)
        };
        let mut projections = Vec::with_capacity(3);
        for (part, outputs) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
            projections.push(linear(weights, &format!("self_attn.{part}"), outputs, hidden, qkv_bias)?);
        }
        let norms = match shape.head_norms {
            true => Some((norm(weights, "self_attn.q_norm", head_dim)?, norm(weights, "self_attn.k_norm", head_dim)?)),
            false => None,
        };
        Ok(Self {
            attention_norm: match (shape.fused, layer) {
                (Some(_), 0) => None,
                _ => Some(norm(weights, "input_layernorm", hidden)?),
            },
            heads: Heads { projections: Projections::new(projections)?, counts: (shape.heads, shape.kv_heads), norms },
            output: linear(weights, "self_attn.o_proj", hidden, queries, shape.output_bias)?,
            mlp_norm: norm(weights, "post_attention_layernorm", hidden)?,
            gate_up: Projections::new(vec![
                linear(weights, "mlp.gate_proj", inner, hidden, mlp_bias)?,
                linear(weights, "mlp.up_proj", inner, hidden, mlp_bias)?,
            ])?,
            down: linear(weights, "mlp.down_proj", hidden, inner, mlp_bias)?,
        })
    }

    fn mlp(&self, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        let inner = self.silu_mul(x, workspace)?;
        self.down.forward_to(Some(Output::Branch), &inner, workspace)
    }

    /// silu(gate) · up.
    fn silu_mul(&self, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        let (gate, up) = (self.gate_up.part(0), self.gate_up.part(1));
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && gate.bias().is_none() {
            let products = self.gate_up.products(x, Output::GateUp, workspace)?;
            return crate::cuda::layer::silu_mul(&products[0], &products[1], workspace);
        }
        gate.forward_to(None, x, workspace)?.silu()? * up.forward_to(None, x, workspace)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_the_same_however_many_logits_are_normalised_at_a_time() {
        let (rows, width) = (5, 7);
        let logits: Vec<f32> = (0..rows * width).map(|at| (at * 37 % 23) as f32 / 5.0).collect();
        // Nothing is asked of the third row, nor of the last one.
        let (asked, ends) = (vec![6, 0, 3, 3, 1, 5], vec![2, 3, 3, 6, 6]);
        let batch = Batch { asked, asked_ends: ends, ..Batch::default() };
        let expected: Vec<f32> = (0..rows)
            .flat_map(|row| {
                let logits = &logits[row * width..][..width];
                let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
                batch.asked_at(row).iter().map(|token| logits[*token as usize] - sum.ln()).collect::<Vec<_>>()
            })
            .collect();
        let logits = Tensor::from_vec(logits, (rows, width), &Device::Cpu).unwrap();
        let whole = asked_of(&logits, 0..rows, &batch).unwrap();
        assert_eq!(whole.len(), expected.len());
        for (found, expected) in whole.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found}, expected {expected}");
        }
        for most in [1, width, 2 * width, 3 * width + 1, 100 * width] {
            assert_eq!(super::asked(&logits, &batch, most).unwrap(), whole, "{most}");
        }
    }
}
