//! A Llama-family decoder whose forward takes trees.
//!
//! The nodes of all sequences are one batch of rows for everything that treats rows alone (norms,
//! projections, rotary embeddings, MLP, vocabulary). Attention runs per sequence over its cache and
//! its new nodes: a node's position is the committed length plus its depth, and a mask hides every
//! new node that is not an ancestor. Masks and rotary rows are made once a step, not once a layer.
//! Only scored nodes pass the last MLP and the vocabulary.
//!
//! Weights and linear kernels are mistralrs'; the layer loop is ours because mistralrs seals mask
//! and positions.

use candle_core::{CpuStorage, D, DType, Device, Module, Result, Storage, Tensor};
use candle_nn::Embedding;
use laser_decode::ROOT_PARENT;
use mistralrs_core::layers::RmsNorm;

use super::{
    EngineError,
    cache::KvCache,
    config::ModelConfig,
    decoder::{Batch, Decoder, Span},
    linear::Linear,
    rope::{Rope, RopeRows},
};

/// A result of loading; forwards return candle's.
type Loaded<T> = std::result::Result<T, EngineError>;

/// Where a model's tensors come from; names are those of Hugging Face, without `.weight`.
pub(super) trait Weights {
    /// A projection from `inputs` to `outputs`.
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Loaded<Linear>;

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
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
    dtype: DType,
    device: Device,
}

impl TreeLm {
    pub(super) fn load(
        config: ModelConfig,
        weights: &mut dyn Weights,
        device: &Device,
    ) -> Loaded<Self> {
        let ModelConfig {
            hidden_size,
            vocab_size,
            norm_eps,
            ..
        } = config;
        let embedding = weights.embedding(vocab_size, hidden_size)?;
        let layers = (0..config.layers)
            .map(|layer| Layer::load(&config, weights, layer))
            .collect::<Loaded<_>>()?;
        Ok(Self {
            layers,
            norm: RmsNorm::from_w(weights.vector("model.norm", hidden_size)?, norm_eps)?,
            head: weights.head(&embedding, config.tied_embeddings)?,
            rope: Rope::new(config.head_dim, config.rope_theta, &config.rope_scaling),
            dtype: embedding.dtype(),
            device: device.clone(),
            embedding: Embedding::new(embedding, hidden_size),
            config,
        })
    }

    /// Appends the nodes to their caches and returns the logits `[scored, vocab_size]` in f32, or
    /// nothing if no row is scored.
    fn logits(&mut self, batch: &Batch<'_>, caches: &[KvCache]) -> Result<Option<Tensor>> {
        let rope = self.rope.rows(&batch.positions, self.dtype, &self.device)?;
        let masks = batch
            .spans
            .iter()
            .map(|span| tree_mask(span, self.dtype, &self.device))
            .collect::<Result<Vec<_>>>()?;
        let mut x = self
            .embedding
            .forward(&Tensor::new(&batch.tokens[..], &self.device)?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let attention = self.attention(index, &x, &rope, (batch, caches), &masks)?;
            x = (x + attention)?;
            if index + 1 == self.layers.len() {
                if batch.scored.is_empty() {
                    return Ok(None);
                }
                x = self.scored_rows(x, batch)?;
            }
            x = (&x + layer.mlp(&x)?)?;
        }
        self.head.forward_logits(&self.norm.forward(&x)?).map(Some)
    }

    fn scored_rows(&self, x: Tensor, batch: &Batch<'_>) -> Result<Tensor> {
        if batch.scored.len() == batch.tokens.len() {
            return Ok(x);
        }
        x.index_select(&Tensor::new(&batch.scored[..], &self.device)?, 0)
    }

    /// Attention of every sequence of the batch; rows in, rows out.
    fn attention(
        &self,
        index: usize,
        x: &Tensor,
        rope: &RopeRows,
        (batch, caches): (&Batch<'_>, &[KvCache]),
        masks: &[Option<Tensor>],
    ) -> Result<Tensor> {
        let layer = &self.layers[index];
        let (query, key, value) = layer.project(&self.config, x, rope)?;
        let attended = batch
            .spans
            .iter()
            .zip(caches)
            .zip(masks)
            .map(|((span, cache), mask)| {
                let nodes = span.parents.len();
                let rows = |tensor: &Tensor| tensor.narrow(0, span.offset, nodes);
                let by_head = |tensor: &Tensor| rows(tensor)?.transpose(0, 1)?.contiguous();
                let (keys, values) =
                    cache.append(index, span.cached, &by_head(&key)?, &by_head(&value)?)?;
                attend(&by_head(&query)?, &keys, &values, mask.as_ref())
            })
            .collect::<Result<Vec<_>>>()?;
        let attended = match &attended[..] {
            [only] => only.clone(),
            several => Tensor::cat(several, 0)?,
        };
        layer.output.forward(&attended)
    }
}

impl Decoder for TreeLm {
    type Cache = KvCache;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn cache(&self, capacity: usize) -> Loaded<KvCache> {
        Ok(KvCache::new(
            &self.config,
            capacity,
            self.dtype,
            &self.device,
        )?)
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        caches: &mut [KvCache],
        row: &mut dyn FnMut(&[f32]),
    ) -> Loaded<()> {
        match self.logits(batch, caches)? {
            Some(logits) => each_row(&logits, row),
            None => Ok(()),
        }
    }
}

/// Lends the rows of a contiguous f32 matrix, without a copy when they are on the CPU.
fn each_row(matrix: &Tensor, row: &mut dyn FnMut(&[f32])) -> Loaded<()> {
    let (_, width) = matrix.dims2()?;
    let (storage, layout) = matrix.storage_and_layout();
    if let (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    {
        data[start..end].chunks_exact(width).for_each(row);
        return Ok(());
    }
    drop(storage);
    let data = matrix.flatten_all()?.to_vec1::<f32>()?;
    data.chunks_exact(width).for_each(row);
    Ok(())
}

impl Layer {
    fn load(config: &ModelConfig, weights: &mut dyn Weights, layer: usize) -> Loaded<Self> {
        let &ModelConfig {
            hidden_size: hidden,
            intermediate_size: inner,
            head_dim,
            norm_eps,
            ..
        } = config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let (qkv_bias, mlp_bias) = (config.qkv_bias, config.mlp_bias);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |weights: &mut dyn Weights, part: &str, length: usize| {
            Ok::<_, EngineError>(RmsNorm::from_w(
                weights.vector(&name(part), length)?,
                norm_eps,
            )?)
        };
        let linear = |weights: &mut dyn Weights, part: &str, outputs, inputs, bias| {
            weights.linear(&name(part), outputs, inputs, bias)
        };
        Ok(Self {
            attention_norm: norm(weights, "input_layernorm", hidden)?,
            query: linear(weights, "self_attn.q_proj", queries, hidden, qkv_bias)?,
            key: linear(weights, "self_attn.k_proj", keys, hidden, qkv_bias)?,
            value: linear(weights, "self_attn.v_proj", keys, hidden, qkv_bias)?,
            head_norms: match config.head_norms() {
                true => Some(HeadNorms {
                    query: norm(weights, "self_attn.q_norm", head_dim)?,
                    key: norm(weights, "self_attn.k_norm", head_dim)?,
                }),
                false => None,
            },
            output: linear(
                weights,
                "self_attn.o_proj",
                hidden,
                queries,
                config.output_bias,
            )?,
            mlp_norm: norm(weights, "post_attention_layernorm", hidden)?,
            gate: linear(weights, "mlp.gate_proj", inner, hidden, mlp_bias)?,
            up: linear(weights, "mlp.up_proj", inner, hidden, mlp_bias)?,
            down: linear(weights, "mlp.down_proj", hidden, inner, mlp_bias)?,
        })
    }

    /// Rotated queries (scaled by 1/√d) and keys, and values, each `[nodes, heads, head_dim]`.
    fn project(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        rope: &RopeRows,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let x = self.attention_norm.forward(x)?;
        let nodes = x.dim(0)?;
        let heads = |linear: &Linear, heads: usize| {
            linear.forward(&x)?.reshape((nodes, heads, config.head_dim))
        };
        let mut query = heads(&self.query, config.heads)?;
        let mut key = heads(&self.key, config.kv_heads)?;
        if let Some(norms) = &self.head_norms {
            query = norms.query.forward(&query)?;
            key = norms.key.forward(&key)?;
        }
        Ok((
            rotate(&query, &rope.query)?,
            rotate(&key, &rope.key)?,
            heads(&self.value, config.kv_heads)?,
        ))
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.mlp_norm.forward(x)?;
        self.down
            .forward(&(self.gate.forward(&x)?.silu()? * self.up.forward(&x)?)?)
    }
}

/// Rotary embedding of `[nodes, heads, head_dim]`.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    candle_nn::rotary_emb::rope_thd(&x.unsqueeze(0)?, cos, sin)?.squeeze(0)
}

/// Softmax attention of scaled queries `[heads, nodes, head_dim]` over keys and values `[kv_heads,
/// total, head_dim]`, as rows `[nodes, heads · head_dim]`. Query heads that share a key head are
/// stacked as more rows of one product instead of repeating the keys.
fn attend(query: &Tensor, keys: &Tensor, values: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (heads, nodes, head_dim) = query.dims3()?;
    let (kv_heads, total, _) = keys.dims3()?;
    let stacked = (kv_heads, heads / kv_heads * nodes, head_dim);
    let scores = query.reshape(stacked)?.matmul(&keys.transpose(1, 2)?)?;
    let scores = match mask {
        Some(mask) => scores.reshape((heads, nodes, total))?.broadcast_add(mask)?,
        None => scores,
    };
    let weights = candle_nn::ops::softmax_last_dim(&scores)?;
    let weights = weights.reshape((kv_heads, heads / kv_heads * nodes, total))?;
    let attended = weights.matmul(values)?.reshape((heads, nodes, head_dim))?;
    attended.transpose(0, 1)?.flatten_from(D::Minus2)
}

/// What is added to the scores `[nodes, cached + nodes]`: 0 for the committed context, the node
/// itself and its ancestors, -∞ for the rest. None for a single node, which sees everything.
fn tree_mask(span: &Span<'_>, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
    let (nodes, cached) = (span.parents.len(), span.cached);
    if nodes == 1 {
        return Ok(None);
    }
    let width = cached + nodes;
    let mut mask = vec![f32::NEG_INFINITY; nodes * width];
    for node in 0..nodes {
        let (above, row) = mask.split_at_mut(node * width);
        match span.parents[node] {
            ROOT_PARENT => row[..cached].fill(0.0),
            parent => row[..width].copy_from_slice(&above[parent as usize * width..][..width]),
        }
        row[cached + node] = 0.0;
    }
    Tensor::from_vec(mask, (nodes, width), device)?
        .to_dtype(dtype)
        .map(Some)
}
