//! A Llama-family decoder for CPUs: dense f32 or bf16 weights, f32 arithmetic, every product a
//! [skinny](super::skinny) one.
//!
//! The forward is that of [`TreeLm`](super::tree_lm), which runs everything else (GPUs, quantised weights, f16),
//! without tensors: buffers live as long as the model, q, k and v are one product, so are gate and up, and the caches
//! hold keys and values as panels, so that attention is two skinny products as well.
//!
//! A row's result does not depend on the other rows of a step, nor on how its context reached the cache: sums run in
//! the order of positions, hidden nodes have weight 0 (which changes no sum), and what is summed over lanes in another
//! order (the softmax's denominator) is summed in f64. Verifying a tree therefore computes what decoding one token at a
//! time computes, to the bit but for roundings of that denominator (one in about 10^8).
//!
//! Memory: the weights, a copy of the embedding where it is tied, the caches, and buffers for the largest step.

use std::ops::Range;

use candle_core::DType;
use laser_decode::Candidate;
use rayon::prelude::*;

use super::{
    EngineError,
    config::ModelConfig,
    cpu_cache::{CachePool, CpuCache, HeadCache},
    decoder::{Batch, Decoder, Span},
    rope::Rope,
    safetensors::SafetensorsWeights,
    scores::{LANES, by_lane, exp, max, push_top_k},
    skinny::{Format, PackedMatrix, Rows, vectorized},
};

/// Nodes that attend at once: their scores (nodes × heads of a group × context) stay in the second-level cache.
const BLOCK: usize = 32;

/// Elements of a row-wise operation from which on a second thread pays.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// A projection and its bias.
#[derive(Debug)]
struct Projection {
    weights: PackedMatrix,
    bias: Option<Vec<f32>>,
}

impl Projection {
    fn forward(&self, x: &Rows, y: &mut Rows) {
        self.weights.multiply(x, y);
        let Some(bias) = &self.bias else { return };
        y.each(false, |_, row| {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        });
    }
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    /// Of single heads: queries', keys'.
    head_norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Queries, keys and values, one below the other.
    qkv: Projection,
    output: Projection,
    mlp_norm: Vec<f32>,
    /// Gate and up, one below the other.
    gate_up: Projection,
    down: Projection,
}

/// The decoder.
#[derive(Debug)]
pub(super) struct CpuLm {
    config: ModelConfig,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: PackedMatrix,
    rope: Rope,
    caches: CachePool,
    buffers: Buffers,
}

/// What a step computes, kept for the next.
#[derive(Debug, Default)]
struct Buffers {
    x: Rows,
    normed: Rows,
    qkv: Rows,
    attended: Rows,
    projected: Rows,
    gate_up: Rows,
    inner: Rows,
    logits: Rows,
    heads: Vec<HeadBuffers>,
}

/// What the attention of one key head of one sequence computes.
#[derive(Debug, Default)]
struct HeadBuffers {
    queries: Rows,
    scores: Rows,
    sums: Rows,
    sums_of_weights: Vec<f32>,
    /// `[nodes, heads of the group · head_dim]`
    attended: Rows,
}

/// Loads projections in one format.
struct Loader<'a> {
    weights: &'a SafetensorsWeights,
    format: Format,
}

impl Loader<'_> {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let tensor = self.weights.get(name, shape)?;
        Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
    }

    /// The projections `parts` (name and outputs) from the same `inputs`, as one.
    fn projection(&self, parts: &[(String, usize)], inputs: usize, bias: bool) -> Result<Projection, EngineError> {
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (name, outputs) in parts {
            weights.push(self.values(&format!("{name}.weight"), &[*outputs, inputs])?);
            if bias {
                biases.extend(self.values(&format!("{name}.bias"), &[*outputs])?);
            }
        }
        let weights: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
        Ok(Projection { weights: PackedMatrix::pack(&weights, inputs, self.format), bias: bias.then_some(biases) })
    }

    fn layer(&self, config: &ModelConfig, layer: usize) -> Result<Layer, EngineError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |part: &str, length| self.values(&format!("{}.weight", name(part)), &[length]);
        let qkv = [("q", queries), ("k", keys), ("v", keys)];
        let qkv = qkv.map(|(part, outputs)| (name(&format!("self_attn.{part}_proj")), outputs));
        let gate_up = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), inner));
        let output = [(name("self_attn.o_proj"), hidden)];
        let down = [(name("mlp.down_proj"), hidden)];
        Ok(Layer {
            attention_norm: norm("input_layernorm", hidden)?,
            head_norms: match config.head_norms() {
                true => Some((norm("self_attn.q_norm", config.head_dim)?, norm("self_attn.k_norm", config.head_dim)?)),
                false => None,
            },
            qkv: self.projection(&qkv, hidden, config.qkv_bias)?,
            output: self.projection(&output, queries, config.output_bias)?,
            mlp_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: self.projection(&gate_up, hidden, config.mlp_bias)?,
            down: self.projection(&down, inner, config.mlp_bias)?,
        })
    }
}

impl CpuLm {
    /// Reads and packs the weights of a model directory.
    ///
    /// # Errors
    /// A missing tensor or one of another shape.
    pub(super) fn load(config: ModelConfig, weights: &SafetensorsWeights) -> Result<Self, EngineError> {
        let format = match weights.dtype() {
            DType::BF16 => Format::Bf16,
            _ => Format::F32,
        };
        let loader = Loader { weights, format };
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = loader.values("model.embed_tokens.weight", &shape)?;
        let head = match config.tied_embeddings {
            true => PackedMatrix::pack(&[&embedding], config.hidden_size, format),
            false => {
                let head = loader.values("lm_head.weight", &shape)?;
                PackedMatrix::pack(&[&head], config.hidden_size, format)
            }
        };
        let layers = (0..config.layers).map(|layer| loader.layer(&config, layer)).collect::<Result<_, _>>()?;
        Ok(Self {
            layers,
            head,
            embedding,
            norm: loader.values("model.norm.weight", &[config.hidden_size])?,
            rope: Rope::new(config.head_dim, config.rope_theta, &config.rope_scaling),
            caches: CachePool::default(),
            buffers: Buffers::default(),
            config,
        })
    }

    fn embed(&mut self, tokens: &[u32]) {
        let width = self.config.hidden_size;
        self.buffers.x.reshape(tokens.len(), width);
        for (row, token) in tokens.iter().enumerate() {
            let from = &self.embedding[*token as usize * width..][..width];
            self.buffers.x.row_mut(row).copy_from_slice(from);
        }
    }

    /// The logits of the scored nodes, into their buffer.
    fn logits(&mut self, batch: &Batch<'_>, caches: &mut [CpuCache]) {
        self.embed(&batch.tokens);
        for layer in 0..self.layers.len() {
            self.attention(layer, batch, caches);
            if layer + 1 == self.layers.len() {
                if batch.scored.is_empty() {
                    return;
                }
                self.buffers.x.retain(&batch.scored);
            }
            self.mlp(layer);
        }
        let buffers = &mut self.buffers;
        norm_rows(&buffers.x, &self.norm, self.config.norm_eps, &mut buffers.normed);
        self.head.multiply(&buffers.normed, &mut buffers.logits);
    }

    /// Adds a layer's attention to x.
    fn attention(&mut self, layer: usize, batch: &Batch<'_>, caches: &mut [CpuCache]) {
        let (config, buffers) = (&self.config, &mut self.buffers);
        let weights = &self.layers[layer];
        let eps = config.norm_eps;
        norm_rows(&buffers.x, &weights.attention_norm, eps, &mut buffers.normed);
        weights.qkv.forward(&buffers.normed, &mut buffers.qkv);
        self.rope.reserve(&batch.positions);
        let (rope, norms) = (&self.rope, weights.head_norms.as_ref());
        let heavy = buffers.qkv.rows() * config.heads * config.head_dim > PARALLEL_ELEMENTS;
        buffers.qkv.each(heavy, |row, data| {
            position_row(config, norms, rope.position(batch.positions[row]), data);
        });
        attend_all(config, layer, batch, caches, buffers);
        weights.output.forward(&buffers.attended, &mut buffers.projected);
        add_rows(&mut buffers.x, &buffers.projected);
    }

    /// Adds a layer's MLP to x.
    fn mlp(&mut self, layer: usize) {
        let (config, buffers) = (&self.config, &mut self.buffers);
        let weights = &self.layers[layer];
        let eps = config.norm_eps;
        norm_rows(&buffers.x, &weights.mlp_norm, eps, &mut buffers.normed);
        weights.gate_up.forward(&buffers.normed, &mut buffers.gate_up);
        let inner = config.intermediate_size;
        buffers.inner.reshape(buffers.gate_up.rows(), inner);
        let gate_up = &buffers.gate_up;
        let heavy = gate_up.rows() * inner > PARALLEL_ELEMENTS;
        buffers.inner.each(heavy, |row, data| {
            let (gate, up) = gate_up.row(row).split_at(inner);
            vectorized(|| silu_times(gate, up, data));
        });
        weights.down.forward(&buffers.inner, &mut buffers.projected);
        add_rows(&mut buffers.x, &buffers.projected);
    }
}

impl Decoder for CpuLm {
    type Cache = CpuCache;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn open(&mut self, capacity: usize) -> Result<CpuCache, EngineError> {
        Ok(self.caches.acquire(&self.config, capacity))
    }

    fn fork(&mut self, from: &mut CpuCache, length: usize, capacity: usize) -> Result<CpuCache, EngineError> {
        let mut cache = self.caches.acquire(&self.config, capacity);
        cache.copy_prefix(from, length);
        Ok(cache)
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        caches: &mut [CpuCache],
        top_k: usize,
        best: &mut Vec<Candidate>,
    ) -> Result<(), EngineError> {
        // On a thread of the pool, so that products begin and end there: each would otherwise wake this thread anew,
        // which took a fifth of a small model's forward.
        rayon::scope(|_| self.logits(batch, caches));
        for row in 0..batch.scored.len() {
            let logits = self.buffers.logits.row(row);
            vectorized(|| push_top_k(logits, top_k, best));
        }
        Ok(())
    }

    fn commit(&mut self, cache: &mut CpuCache, length: usize, keep: &[usize]) -> Result<(), EngineError> {
        cache.compact(length, keep);
        Ok(())
    }

    fn close(&mut self, cache: CpuCache) {
        self.caches.release(cache);
    }
}

/// Norms of single heads, and rotation of queries (also scaled by 1/√d) and keys of one row of q, k and v.
fn position_row(
    config: &ModelConfig,
    norms: Option<&(Vec<f32>, Vec<f32>)>,
    (cos, sin): (&[f32], &[f32]),
    row: &mut [f32],
) {
    let dim = config.head_dim;
    let scale = 1.0 / (dim as f32).sqrt();
    let heads = row.chunks_exact_mut(dim).enumerate();
    for (head, data) in heads.take(config.heads + config.kv_heads) {
        let is_query = head < config.heads;
        if let Some((query, key)) = norms {
            norm_in_place(data, if is_query { query } else { key }, config.norm_eps);
        }
        let scale = if is_query { scale } else { 1.0 };
        let (low, high) = data.split_at_mut(dim / 2);
        for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (cos, sin) = (cos * scale, sin * scale);
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Attention of every key head of every sequence, each on one thread, into `attended`.
fn attend_all(config: &ModelConfig, layer: usize, batch: &Batch<'_>, caches: &mut [CpuCache], buffers: &mut Buffers) {
    let (heads, dim) = (config.kv_heads, config.head_dim);
    let group = config.heads / heads * dim;
    buffers.heads.resize_with(batch.spans.len() * heads, HeadBuffers::default);
    let qkv = &buffers.qkv;
    let spans = batch.spans.iter().zip(caches);
    let tasks = spans.flat_map(|(span, cache)| {
        let rows = cache.heads(layer);
        rows.enumerate().map(move |(head, rows)| (span, head, rows))
    });
    let mut tasks: Vec<_> = tasks.zip(&mut buffers.heads).collect();
    tasks.par_iter_mut().for_each(|((span, head, rows), own)| {
        attend_head(config, span, *head, rows, qkv, own);
    });
    buffers.attended.reshape(qkv.rows(), config.heads * dim);
    for (index, own) in buffers.heads.iter().enumerate() {
        let (span, head) = (&batch.spans[index / heads], index % heads);
        for node in 0..span.parents.len() {
            let to = buffers.attended.row_mut(span.offset + node);
            to[head * group..][..group].copy_from_slice(own.attended.row(node));
        }
    }
}

/// Appends the keys and values of the span's nodes to the cache of one key head, and attends over it.
fn attend_head(
    config: &ModelConfig,
    span: &Span<'_>,
    head: usize,
    cache: &mut HeadCache<'_>,
    qkv: &Rows,
    own: &mut HeadBuffers,
) {
    let (dim, nodes) = (config.head_dim, span.parents.len());
    let group = config.heads / config.kv_heads;
    for node in 0..nodes {
        let row = &qkv.row(span.offset + node)[config.heads * dim..];
        let (keys, values) = row.split_at(config.kv_heads * dim);
        let position = span.cached + node;
        cache.write(position, &keys[head * dim..][..dim], &values[head * dim..][..dim]);
    }
    own.attended.reshape(nodes, group * dim);
    for start in (0..nodes).step_by(BLOCK) {
        let block = start..nodes.min(start + BLOCK);
        own.queries.reshape(block.len() * group, dim);
        for (index, node) in block.clone().enumerate() {
            let queries = &qkv.row(span.offset + node)[head * group * dim..];
            for (member, query) in queries.chunks_exact(dim).take(group).enumerate() {
                let to = own.queries.row_mut(index * group + member);
                to.copy_from_slice(query);
            }
        }
        attend_block(span, block, cache, group, own);
    }
}

/// Softmax attention of the queries of a block of nodes.
fn attend_block(span: &Span<'_>, block: Range<usize>, cache: &HeadCache<'_>, group: usize, own: &mut HeadBuffers) {
    let total = span.cached + block.end;
    cache.keys(total).multiply(&own.queries, &mut own.scores);
    own.sums_of_weights.clear();
    for row in 0..own.scores.rows() {
        let hidden = span.hidden(block.start + row / group);
        let scores = &mut own.scores.row_mut(row);
        let sum = vectorized(|| exponentials(scores, span.cached, hidden));
        own.sums_of_weights.push(sum);
    }
    cache.values(total).multiply(&own.scores, &mut own.sums);
    for (row, weight) in own.sums_of_weights.iter().enumerate() {
        let sums = own.sums.row(row);
        let to = own.attended.row_mut(block.start + row / group);
        let to = to[row % group * sums.len()..].iter_mut();
        to.zip(sums).for_each(|(to, sum)| *to = sum / weight);
    }
}

/// Scores to softmax weights before the division by their sum, which is returned. Columns from `cached` on whose bit is
/// set in `hidden` get weight 0.
#[inline(always)]
fn exponentials(scores: &mut [f32], cached: usize, hidden: &[u64]) -> f32 {
    for (node, score) in scores[cached..].iter_mut().enumerate() {
        if hidden[node / 64] >> (node % 64) & 1 == 1 {
            *score = f32::NEG_INFINITY;
        }
    }
    let max = max(scores);
    scores.iter_mut().for_each(|score| *score = exp(*score - max));
    let sums = by_lane(scores, [0.0_f64; 8], |sum, weight| *sum += f64::from(weight));
    narrow(sums.iter().sum())
}

/// `y = x / √(mean x² + eps) · scale`, row by row.
fn norm_rows(x: &Rows, scale: &[f32], eps: f64, y: &mut Rows) {
    y.reshape(x.rows(), scale.len());
    y.each(x.rows() * scale.len() > PARALLEL_ELEMENTS, |row, to| {
        to.copy_from_slice(x.row(row));
        vectorized(|| norm_in_place(to, scale, eps));
    });
}

#[inline(always)]
fn norm_in_place(row: &mut [f32], scale: &[f32], eps: f64) {
    let sums = by_lane(row, [0.0_f32; LANES], |sum, x| *sum += x * x);
    let mean = f64::from(sums.iter().sum::<f32>()) / row.len() as f64;
    let factor = narrow(1.0 / (mean + eps).sqrt());
    row.iter_mut().zip(scale).for_each(|(x, scale)| *x = *x * factor * scale);
}

/// `silu(gate) · up`, where silu(x) = x / (1 + e^-x).
#[inline(always)]
fn silu_times(gate: &[f32], up: &[f32], to: &mut [f32]) {
    for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
        let small = exp(-gate.abs());
        let above = if *gate < 0.0 { small } else { 1.0 };
        *to = gate * above / (1.0 + small) * up;
    }
}

fn add_rows(x: &mut Rows, y: &Rows) {
    x.each(x.rows() * x.row(0).len() > PARALLEL_ELEMENTS, |row, x| {
        x.iter_mut().zip(y.row(row)).for_each(|(x, y)| *x += y);
    });
}

#[expect(clippy::cast_possible_truncation, reason = "a sum of f32 in the range of f32")]
fn narrow(value: f64) -> f32 {
    value as f32
}
