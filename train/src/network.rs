//! What is trained: a whole small model, EAGLE's layer, Medusa's heads, or an acceptance head.

use candle_core::{Device, Result, Tensor, Var};
use laser_decode::Token;
use laser_engine::TargetParts;

use crate::batch::Batch;
use crate::config::TrainConfig;
use crate::dropout::Dropout;
use crate::layer::{Attended, Initial, Layer, NORM_EPS, Positions, ROPE_THETA, Shape, norm, product};

/// The name of a whole model's embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";

/// What a draft model says at the places of a batch.
#[derive(Debug)]
pub(crate) struct Pass {
    /// `[N, V]`.
    pub(crate) logits: Tensor,
    /// `[N, hidden]`: the features that it expects, if it works on features.
    pub(crate) features: Option<Tensor>,
}

/// A draft model and its weights.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) shape: Shape,
    layers: Vec<Layer>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Without a projection `[V, hidden]` of its own, its embedding is that as well.
    Model { embedding: Var, norm: Var, head: Option<Var> },
    /// Medusa's heads with the vocabulary `[V, hidden]`, rows of the target's which stay as they are, or an acceptance
    /// head with its own.
    Heads { vocabulary: Vocabulary, heads: Vec<Blocks> },
    /// Embedding `[V, hidden]` and vocabulary `[V, hidden]` are rows of the target's and stay as they are; what enters
    /// is a projection `[hidden, 2 · hidden]`.
    Eagle { embedding: Tensor, head: Tensor, fusion: Var, bias: Var },
}

/// The residual blocks of a head: of each the projection `[hidden, hidden]` and its bias.
type Blocks = Vec<[Var; 2]>;

/// A projection `[V, hidden]` to what is told of: a draft model's own tokens, or an acceptance head's outcomes.
#[derive(Debug)]
enum Vocabulary {
    /// The target's, which is not trained.
    Shared(Tensor),
    /// Its own.
    Own(Var),
}

impl Network {
    /// A whole model of so many tokens with initial weights; its embedding is its vocabulary as well if that is `tied`.
    pub(crate) fn model(
        shape: Shape,
        (vocab_size, is_tied): (usize, bool),
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let mut initial = Initial::new(seed, device);
        let embedding = initial.matrix(vocab_size, shape.hidden)?;
        let layers = (0..shape.layers).map(|_| initial.layer(&shape, true)).collect::<Result<_>>()?;
        let norm = initial.ones(shape.hidden)?;
        let head = if is_tied { None } else { Some(initial.matrix(vocab_size, shape.hidden)?) };
        Ok(Self { shape, layers, kind: Kind::Model { embedding, norm, head } })
    }

    /// EAGLE's layer for a target, of the shape of the target's own layers, over some of its tokens.
    pub(crate) fn eagle(
        config: &TrainConfig,
        (target, tokens): (&TargetParts, &[Token]),
        device: &Device,
    ) -> Result<Self> {
        let shape = shape_of(target, 1);
        let mut initial = Initial::new(config.seed, device);
        let embedding = table(target, &target.embedding, tokens, device)?;
        let head = vocabulary(target, tokens, device)?;
        let fusion = initial.matrix(shape.hidden, 2 * shape.hidden)?;
        let bias = initial.zeros(shape.hidden)?;
        let layers = vec![initial.layer(&shape, false)?];
        Ok(Self { shape, layers, kind: Kind::Eagle { embedding, head, fusion, bias } })
    }

    /// Medusa's heads for a target, over some of its tokens. Each begins as nothing but the target's vocabulary
    /// (section 2.2.1).
    pub(crate) fn medusa(
        config: &TrainConfig,
        (target, tokens): (&TargetParts, &[Token]),
        device: &Device,
    ) -> Result<Self> {
        let shape = shape_of(target, 0);
        let initial = Initial::new(config.seed, device);
        let heads = (0..config.medusa_heads).map(|_| initial.blocks(shape.hidden, 1)).collect::<Result<_>>()?;
        let vocabulary = Vocabulary::Shared(vocabulary(target, tokens, device)?);
        Ok(Self { shape, layers: Vec::new(), kind: Kind::Heads { vocabulary, heads } })
    }

    /// An acceptance head over features of this width, with the configured layers as residual blocks.
    pub(crate) fn acceptance(config: &TrainConfig, hidden: usize, device: &Device) -> Result<Self> {
        let shape = Shape {
            hidden,
            inner: hidden,
            layers: 0,
            heads: 1,
            kv_heads: 1,
            head_dim: hidden,
            rope_theta: ROPE_THETA,
            norm_eps: NORM_EPS,
        };
        let initial = Initial::new(config.seed, device);
        // It begins as what it corrects.
        let vocabulary = Vocabulary::Own(initial.zeros((2, hidden))?);
        let heads = vec![initial.blocks(hidden, config.layers)?];
        Ok(Self { shape, layers: Vec::new(), kind: Kind::Heads { vocabulary, heads } })
    }

    /// All weights, by the names that checkpoints give them.
    pub(crate) fn weights(&self) -> Vec<(String, &Var)> {
        let mut weights = Vec::new();
        let prefix = match &self.kind {
            Kind::Model { embedding, norm, head } => {
                weights.push((EMBEDDING.to_owned(), embedding));
                weights.push(("model.norm.weight".to_owned(), norm));
                weights.extend(head.iter().map(|head| ("lm_head.weight".to_owned(), head)));
                "model."
            }
            Kind::Eagle { fusion, bias, .. } => {
                weights.push(("fc.weight".to_owned(), fusion));
                weights.push(("fc.bias".to_owned(), bias));
                ""
            }
            Kind::Heads { vocabulary, heads } => {
                for (head, blocks) in heads.iter().enumerate() {
                    for (block, [weight, bias]) in blocks.iter().enumerate() {
                        weights.push((format!("{head}.{block}.linear.weight"), weight));
                        weights.push((format!("{head}.{block}.linear.bias"), bias));
                    }
                    if let Vocabulary::Own(own) = vocabulary {
                        weights.push((format!("{head}.{}.weight", blocks.len()), own));
                    }
                }
                ""
            }
        };
        for (index, layer) in self.layers.iter().enumerate() {
            weights.extend(layer.named().map(|(name, var)| (format!("{prefix}layers.{index}.{name}.weight"), var)));
        }
        weights
    }

    /// What it says at the places of a batch: a whole model once, EAGLE's layer once from the target's features, then
    /// from its own of the pass before, as it drafts deeper and deeper (HASS), in so many `passes`. Each head is a
    /// pass, from the features of one place more before.
    pub(crate) fn forward(&self, batch: &Batch, passes: usize) -> Result<Vec<Pass>> {
        match &self.kind {
            Kind::Model { embedding, norm, head } => {
                let vocabulary = head.as_ref().unwrap_or(embedding);
                let features = self.model_features(batch, embedding, norm)?;
                Ok(vec![Pass { logits: features.matmul(&vocabulary.t()?)?, features: None }])
            }
            Kind::Eagle { .. } => self.eagle_passes(batch, passes),
            Kind::Heads { vocabulary, heads } => head_passes(batch, vocabulary, heads),
        }
    }

    /// `[N, hidden]`: what a whole model's vocabulary is applied to.
    fn model_features(&self, batch: &Batch, embedding: &Var, last_norm: &Var) -> Result<Tensor> {
        let mut dropout = Dropout::new(batch.dropout);
        let mut x = dropout.apply(&embed(embedding, &batch.tokens)?)?;
        let positions = Positions::new(batch.tokens.dim(1)?, &self.shape, x.device())?;
        for layer in &self.layers {
            x = layer.forward(&x, &positions, &mut dropout)?;
        }
        norm(&at_places(&x, batch)?, last_norm, &self.shape)
    }

    fn eagle_passes(&self, batch: &Batch, passes: usize) -> Result<Vec<Pass>> {
        let (Kind::Eagle { embedding, head, fusion, bias }, Some(layer), Some(told)) =
            (&self.kind, self.layers.first(), &batch.features)
        else {
            candle_core::bail!("a layer that reads features needs those of the target");
        };
        let tokens = embed(embedding, &batch.tokens)?;
        let length = batch.tokens.dim(1)?;
        let positions = Positions::new(length, &self.shape, tokens.device())?;
        let (mut before, mut earlier, mut found) = (told.before.clone(), Vec::<Attended>::new(), Vec::new());
        for _ in 0..passes {
            let x = product(&Tensor::cat(&[&tokens, &before], 2)?, fusion)?.broadcast_add(bias)?;
            let (expected, own) = layer.forward_after(&earlier, &x, &positions)?;
            earlier.push(own);
            // At each position the feature that was expected of it, as the position before said.
            let first = told.before.narrow(1, 0, 1)?;
            before = Tensor::cat(&[first, expected.narrow(1, 0, length - 1)?], 1)?.detach();
            let features = at_places(&expected, batch)?;
            found.push(Pass { logits: features.matmul(&head.t()?)?, features: Some(features) });
        }
        Ok(found)
    }
}

fn head_passes(batch: &Batch, vocabulary: &Vocabulary, heads: &[Blocks]) -> Result<Vec<Pass>> {
    let Some(told) = &batch.features else {
        candle_core::bail!("heads over features need some");
    };
    let vocabulary = match vocabulary {
        Vocabulary::Shared(tensor) => tensor,
        Vocabulary::Own(var) => var.as_tensor(),
    };
    let length = batch.tokens.dim(1)?;
    let mut before = told.before.clone();
    let mut found = Vec::with_capacity(heads.len());
    for blocks in heads {
        let mut x = at_places(&before, batch)?;
        for [weight, bias] in blocks {
            let added = x.matmul(&weight.t()?)?.broadcast_add(bias)?.silu()?;
            x = (x + added)?;
        }
        let logits = x.matmul(&vocabulary.t()?)?;
        let logits = batch.offsets.as_ref().map_or_else(|| Ok(logits.clone()), |offsets| &logits + offsets)?;
        found.push(Pass { logits, features: None });
        // One place earlier; where there is none, the first.
        before = Tensor::cat(&[before.narrow(1, 0, 1)?, before.narrow(1, 0, length - 1)?], 1)?;
    }
    Ok(found)
}

/// The shape of so many of the target's own layers.
fn shape_of(target: &TargetParts, layers: usize) -> Shape {
    let of = &target.shape;
    Shape {
        hidden: of.hidden_size,
        inner: of.intermediate_size,
        layers,
        heads: of.heads,
        kv_heads: of.kv_heads,
        head_dim: of.head_dim,
        rope_theta: f64::from(of.rope_theta),
        norm_eps: of.norm_eps,
    }
}

/// `[tokens, hidden]`: the rows of these tokens of a matrix of the target's.
fn table(target: &TargetParts, values: &[f32], tokens: &[Token], device: &Device) -> Result<Tensor> {
    let width = target.shape.hidden_size;
    let rows: Vec<f32> = tokens.iter().flat_map(|token| &values[*token as usize * width..][..width]).copied().collect();
    Tensor::from_vec(rows, (tokens.len(), width), device)
}

/// The same of the target's projection to the vocabulary.
fn vocabulary(target: &TargetParts, tokens: &[Token], device: &Device) -> Result<Tensor> {
    table(target, target.head.as_ref().unwrap_or(&target.embedding), tokens, device)
}

/// `[B, T]` tokens as `[B, T, hidden]`.
fn embed(embedding: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    let (rows, length) = tokens.dims2()?;
    embedding.index_select(&tokens.flatten_all()?, 0)?.reshape((rows, length, embedding.dim(1)?))
}

/// Of `[B, T, hidden]` the rows of the places, `[N, hidden]`.
fn at_places(x: &Tensor, batch: &Batch) -> Result<Tensor> {
    let (rows, length, hidden) = x.dims3()?;
    x.reshape((rows * length, hidden))?.index_select(&batch.before, 0)
}
