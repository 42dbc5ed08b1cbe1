//! The forward of a Llama-family decoder: dense or quantised weights, f32 sums, every product a skinny one.
//!
//! Buffers live as long as the model. One product computes q, k and v, another one gate and up. The caches hold keys
//! and values as panels, so attention is two skinny products as well.
//!
//! A row's result does not depend on the other rows of a step, nor on how its context reached the cache: sums run in
//! the order of positions (by tiles in blocks of 32, of which even and odd ones are summed apart), hidden nodes have
//! weight 0 (which changes no sum), and what is summed over lanes in another order (the softmax's denominator) is
//! summed in f64. Verifying a tree therefore computes what decoding one token at a time computes, to the bit but for
//! roundings of that denominator (one in about 10^8).

use rayon::prelude::*;

use crate::{
    attention::{AttentionBuffers, position_row},
    batch::Batch,
    cache::{CachePool, CacheShape, CpuCache},
    layer::{Layer, Loader, Projection, Tensors},
    masked::{Allowed, MaskedRow},
    rope::Rope,
    sample::Weights,
    shape::ModelShape,
    skinny::{Format, PackedMatrix, Rows},
    top_k::Predictions,
    vector::{norm_in_place, silu_times},
};

/// Elements of a row-wise operation from which on a second thread pays.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// The decoder. Memory: the weights, a copy of the embedding where it is tied, the caches, and buffers for the largest
/// step.
#[derive(Debug)]
pub struct CpuDecoder {
    shape: ModelShape,
    embedding: Vec<f32>,
    /// Of embeddings and features, one behind the other.
    fusion: Option<Projection>,
    layers: Vec<Layer>,
    norm: Option<Vec<f32>>,
    head: PackedMatrix,
    rope: Rope,
    caches: CachePool,
    buffers: Buffers,
}

/// The intermediate results of a step; their memory is kept for the next.
#[derive(Debug, Default)]
struct Buffers {
    fused: Rows,
    x: Rows,
    normed: Rows,
    qkv: Rows,
    attention: AttentionBuffers,
    projected: Rows,
    gate_up: Rows,
    inner: Rows,
    logits: Rows,
}

impl CpuDecoder {
    /// Packs the weights, each in the format that it comes in.
    ///
    /// # Errors
    /// The first one of `tensors`.
    pub fn load<T: Tensors>(shape: ModelShape, tensors: &T) -> Result<Self, T::Error> {
        let (vocabulary, hidden) = (shape.vocab_size, shape.hidden_size);
        let loader = Loader(tensors);
        let embedding = "model.embed_tokens.weight";
        let head = if shape.tied_embeddings { embedding } else { "lm_head.weight" };
        let layers: Vec<Layer> =
            (0..shape.layers).map(|layer| loader.layer(&shape, layer)).collect::<Result<_, _>>()?;
        let weights = layers.first().map_or(Format::F32, |layer| layer.qkv.format());
        Ok(Self {
            layers,
            head: loader.matrix(head, vocabulary, hidden)?,
            embedding: tensors.values(embedding, &[vocabulary, hidden])?,
            fusion: match shape.fused {
                Some(bias) => Some(loader.projection(&[("model.fc".to_owned(), hidden)], 2 * hidden, bias)?),
                None => None,
            },
            norm: match shape.fused {
                Some(_) => None,
                None => Some(tensors.values("model.norm.weight", &[hidden])?),
            },
            rope: Rope::new(shape.head_dim, shape.rope_theta, &shape.rope_scaling),
            caches: CachePool::new(CacheShape::new(&shape, weights)),
            buffers: Buffers::default(),
            shape,
        })
    }

    /// The embeddings of the tokens, into x; those of a fused model together with the features before them.
    fn embed(&mut self, batch: &Batch<'_>) {
        let (width, buffers) = (self.shape.hidden_size, &mut self.buffers);
        let fused = self.fusion.is_some();
        let into = if fused { &mut buffers.fused } else { &mut buffers.x };
        into.reshape(batch.tokens.len(), if fused { 2 * width } else { width });
        for (row, token) in batch.tokens.iter().enumerate() {
            let (embedding, before) = into.row_mut(row).split_at_mut(width);
            embedding.copy_from_slice(&self.embedding[*token as usize * width..][..width]);
            before.copy_from_slice(&batch.before[row * before.len()..][..before.len()]);
        }
        if let Some(fusion) = &self.fusion {
            fusion.forward(&buffers.fused, &mut buffers.x);
        }
    }

    /// The logits of the scored nodes, into their buffer, and the features of all nodes if they are wanted.
    fn logits(&mut self, batch: &Batch<'_>, caches: &mut [CpuCache]) -> Vec<f32> {
        self.embed(batch);
        let mut features = Vec::new();
        for layer in 0..self.layers.len() {
            self.attention(layer, batch, caches);
            if layer + 1 == self.layers.len() && !batch.wants_features {
                if batch.scored.is_empty() {
                    return features;
                }
                self.buffers.x.retain(&batch.scored);
            }
            self.mlp(layer);
        }
        let buffers = &mut self.buffers;
        match &self.norm {
            Some(norm) => norm_rows(&buffers.x, norm, self.shape.norm_eps, &mut buffers.normed),
            None => std::mem::swap(&mut buffers.x, &mut buffers.normed),
        }
        if batch.wants_features {
            (0..buffers.normed.rows()).for_each(|row| features.extend_from_slice(buffers.normed.row(row)));
            buffers.normed.retain(&batch.scored);
        }
        if !batch.scored.is_empty() {
            self.head.multiply(&buffers.normed, &mut buffers.logits);
        }
        features
    }

    /// Adds a layer's attention to x.
    fn attention(&mut self, layer: usize, batch: &Batch<'_>, caches: &mut [CpuCache]) {
        let (shape, buffers) = (&self.shape, &mut self.buffers);
        let weights = &self.layers[layer];
        let eps = shape.norm_eps;
        match &weights.attention_norm {
            Some(norm) => {
                norm_rows(&buffers.x, norm, eps, &mut buffers.normed);
                weights.qkv.forward(&buffers.normed, &mut buffers.qkv);
            }
            None => weights.qkv.forward(&buffers.x, &mut buffers.qkv),
        }
        self.rope.reserve(&batch.positions);
        let (rope, norms) = (&self.rope, weights.head_norms.as_ref());
        let heavy = buffers.qkv.rows() * shape.query_width() > PARALLEL_ELEMENTS;
        buffers.qkv.each(heavy, |row, data| {
            position_row(shape, norms, rope.position(batch.positions[row]), data);
        });
        buffers.attention.attend(shape, batch, (layer, caches), &buffers.qkv);
        weights.output.forward(&buffers.attention.attended, &mut buffers.projected);
        add_rows(&mut buffers.x, &buffers.projected);
    }

    /// Adds a layer's MLP to x.
    fn mlp(&mut self, layer: usize) {
        let (shape, buffers) = (&self.shape, &mut self.buffers);
        let weights = &self.layers[layer];
        let eps = shape.norm_eps;
        norm_rows(&buffers.x, &weights.mlp_norm, eps, &mut buffers.normed);
        weights.gate_up.forward(&buffers.normed, &mut buffers.gate_up);
        let inner = shape.intermediate_size;
        buffers.inner.reshape(buffers.gate_up.rows(), inner);
        let gate_up = &buffers.gate_up;
        let heavy = gate_up.rows() * inner > PARALLEL_ELEMENTS;
        buffers.inner.each(heavy, |row, data| {
            let (gate, up) = gate_up.row(row).split_at(inner);
            silu_times(gate, up, data);
        });
        weights.down.forward(&buffers.inner, &mut buffers.projected);
        add_rows(&mut buffers.x, &buffers.projected);
    }
}

/// Sequences and steps.
impl CpuDecoder {
    /// Bytes that a cache for `capacity` tokens takes.
    pub fn cache_bytes(&self, capacity: usize) -> usize {
        self.caches.bytes(capacity)
    }

    /// A cache for `capacity` tokens.
    pub fn open(&mut self, capacity: usize) -> CpuCache {
        self.caches.acquire(capacity)
    }

    /// A cache for `capacity` tokens that begins with the first `length` of another.
    pub fn fork(&mut self, from: &mut CpuCache, length: usize, capacity: usize) -> CpuCache {
        let mut cache = self.open(capacity);
        cache.copy_prefix(from, length);
        cache
    }

    /// Appends the nodes to their caches (one per span) and returns, for each scored node in order, the `top_k` most
    /// probable next tokens (at most the vocabulary) and its prediction; the features of all nodes if they are wanted.
    /// Runs on the rayon threads that it is called on.
    pub fn forward(&mut self, batch: &Batch<'_>, caches: &mut [CpuCache], top_k: usize) -> Predictions {
        let features = self.logits(batch, caches);
        let logits = &self.buffers.logits;
        let predict = |weights: &mut Weights, row: usize| {
            let mut predictions = Predictions::default();
            predictions.push_with(logits.row(row), top_k, batch.draws[row], weights);
            predictions.push_asked(logits.row(row), batch.asked_at(row));
            predictions
        };
        let rows: Vec<Predictions> = (0..batch.scored.len()).into_par_iter().map_init(Weights::new, predict).collect();
        let mut predictions = Predictions { features, ..Predictions::default() };
        rows.into_iter().for_each(|row| predictions.append(row));
        predictions
    }

    /// What rows of the last step say of the tokens that may follow there, the `top_k` most probable ones of each;
    /// nothing of a row that no token may follow. Runs on the rayon threads that it is called on.
    pub fn masked(&self, rows: &[MaskedRow<'_>], top_k: usize) -> Vec<Option<Allowed>> {
        rows.par_iter().map(|row| row.choose(self.buffers.logits.row(row.row), top_k)).collect()
    }

    /// Takes back the cache of a closed sequence.
    pub fn close(&mut self, cache: CpuCache) {
        self.caches.release(cache);
    }
}

/// `y = x / √(mean x² + eps) · scale`, row by row.
fn norm_rows(x: &Rows, scale: &[f32], eps: f64, y: &mut Rows) {
    y.reshape(x.rows(), scale.len());
    y.each(x.rows() * scale.len() > PARALLEL_ELEMENTS, |row, to| {
        to.copy_from_slice(x.row(row));
        norm_in_place(to, scale, eps);
    });
}

fn add_rows(x: &mut Rows, y: &Rows) {
    x.each(x.rows() * x.row(0).len() > PARALLEL_ELEMENTS, |row, x| {
        x.iter_mut().zip(y.row(row)).for_each(|(x, y)| *x += y);
    });
}
