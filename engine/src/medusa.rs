//! Medusa's heads (Cai et al., arXiv:2401.10774, section 2.1.1) over the features of a target.
//!
//! Head k tells the token k + 1 places after the one whose feature it is given, by residual blocks x + SiLU(W x + b)
//! and a projection to the vocabulary, which is its own or the target's. It has no cache and reads no tokens. Published
//! weights are in `medusa_lm_head.safetensors` or `medusa_lm_head.pt`: `HEAD.BLOCK.linear.weight`, `.bias`, and behind
//! the blocks `HEAD.BLOCKS.weight`.
//!
//! An acceptance head (SpecDec++, arXiv:2405.19715, section 3.2) is one such head over the features of a draft model,
//! whose vocabulary are two outcomes: the token whose feature it is given is [`REJECTED`] or [`ACCEPTED`]. Its weights
//! are in `acceptance_head.safetensors`.

use std::path::Path;

use candle_core::{Device, Tensor};
use laser_cpu::{Batch, CpuHeads, MedusaShape, ModelShape, Predictions};
use laser_decode::Token;
use laser_model::ACCEPTANCE_HEAD;

use crate::{
    config::ModelConfig,
    decoder::Decoder,
    error::EngineError,
    linear::Linear,
    tree_lm::{Weights, predictions},
    weight_files::WeightFiles,
    workspace::Workspace,
};

/// What an acceptance head says in place of a token: the target is not going to accept it.
pub const REJECTED: Token = 0;

/// The target is going to accept it.
pub const ACCEPTED: Token = 1;

/// The target's configuration with the heads in place of its layers.
pub(super) fn config(file: &Path, weights: &WeightFiles, target: &ModelConfig) -> Result<ModelConfig, EngineError> {
    let count = |name: &dyn Fn(usize) -> String| (0..).take_while(|&at| weights.contains(&name(at))).count();
    let heads = count(&|head| format!("{head}.0.linear.weight"));
    let blocks = count(&|block| format!("0.{block}.linear.weight"));
    if heads == 0 {
        return Err(EngineError::model(file, "tensor 0.0.linear.weight is missing: not the heads of Medusa"));
    }
    let own_vocabulary = weights.contains(&format!("0.{blocks}.weight"));
    let mut config = target.clone();
    if file.ends_with(ACCEPTANCE_HEAD) {
        config.shape.vocab_size = 2;
        if (heads, own_vocabulary) != (1, true) {
            return Err(EngineError::model(
                file,
                format!("tensor 0.{blocks}.weight is missing: not an acceptance head"),
            ));
        }
    }
    let medusa = MedusaShape { heads, blocks, own_vocabulary };
    check_shapes(file, weights, &config.shape, medusa)?;
    config.shape.medusa = Some(medusa);
    Ok(config)
}

/// Refuses heads over features of another width, or of another vocabulary.
fn check_shapes(
    file: &Path,
    weights: &WeightFiles,
    shape: &ModelShape,
    medusa: MedusaShape,
) -> Result<(), EngineError> {
    let width = shape.hidden_size;
    for head in 0..medusa.heads {
        let blocks = (0..medusa.blocks).map(|block| (format!("{head}.{block}.linear.weight"), [width, width]));
        let vocabulary = (format!("{head}.{}.weight", medusa.blocks), [shape.vocab_size, width]);
        for (name, expected) in blocks.chain(medusa.own_vocabulary.then_some(vocabulary)) {
            // What is missing is named when it is loaded.
            let Some(own) = weights.shape(&name).filter(|own| *own != expected) else { continue };
            let needed = format!("the model it is to draft for needs {expected:?}");
            return Err(EngineError::misfit(file, format!("tensor {name} has shape {own:?}, and {needed}")));
        }
    }
    Ok(())
}

/// The heads' name of a tensor; none if it is the target's.
pub(super) fn own_name(name: &str) -> Option<&str> {
    name.strip_prefix("medusa.")
}

/// The features before the nodes that are asked about, `[rows, hidden_size]`.
fn features(batch: &Batch<'_>, hidden_size: usize) -> Vec<f32> {
    let of = |&row: &u32| &batch.before[row as usize * hidden_size..][..hidden_size];
    batch.scored.iter().flat_map(of).copied().collect()
}

/// The heads on kernels of our own.
pub(super) struct KernelHeads {
    pub(super) heads: CpuHeads,
    pub(super) hidden_size: usize,
}

/// The heads on mistralrs' layers.
#[derive(Debug)]
pub(super) struct TensorHeads {
    hidden_size: usize,
    heads: Vec<Vec<Linear>>,
    /// One for all, or one for each.
    vocabularies: Vec<Linear>,
    workspace: Workspace,
    dtype: candle_core::DType,
    device: Device,
}

impl TensorHeads {
    pub(super) fn load(
        shape: &ModelShape,
        medusa: MedusaShape,
        weights: &mut dyn Weights,
        device: &Device,
    ) -> Result<Self, EngineError> {
        let (hidden, vocabulary) = (shape.hidden_size, shape.vocab_size);
        let embedding = weights.embedding(vocabulary, hidden)?;
        let mut heads = Vec::with_capacity(medusa.heads);
        for head in 0..medusa.heads {
            let name = |block| format!("medusa.{head}.{block}.linear");
            let blocks = (0..medusa.blocks).map(|block| weights.linear(&name(block), hidden, hidden, true));
            heads.push(blocks.collect::<Result<_, _>>()?);
        }
        let vocabularies = match medusa.own_vocabulary {
            false => vec![weights.head(&embedding, shape.tied_embeddings)?],
            true => (0..medusa.heads)
                .map(|head| weights.linear(&format!("medusa.{head}.{}", medusa.blocks), vocabulary, hidden, false))
                .collect::<Result<_, _>>()?,
        };
        let workspace = Workspace::default();
        let (dtype, device) = (embedding.dtype(), device.clone());
        Ok(Self { hidden_size: hidden, heads, vocabularies, workspace, dtype, device })
    }

    /// `[rows · heads, vocab_size]`: a row's heads one behind the other.
    fn logits(&mut self, features: Vec<f32>) -> candle_core::Result<Tensor> {
        let x = Tensor::from_vec(features, ((), self.hidden_size), &self.device)?.to_dtype(self.dtype)?;
        let mut logits = Vec::with_capacity(self.heads.len());
        for (blocks, vocabulary) in self.heads.iter().zip(self.vocabularies.iter().cycle()) {
            let mut x = x.clone();
            for block in blocks {
                x = (&x + block.forward_to(None, &x, &mut self.workspace)?.silu()?)?;
            }
            logits.push(vocabulary.logits(&x, &mut self.workspace)?);
        }
        Tensor::stack(&logits, 1)?.flatten(0, 1)
    }
}

/// What all heads have in common as decoders: no cache.
macro_rules! without_cache {
    () => {
        type Cache = ();

        fn cache_bytes(&self, _: usize) -> usize {
            0
        }

        fn open(&mut self, _: usize) -> Result<(), EngineError> {
            Ok(())
        }

        fn fork(&mut self, _: &mut (), _: usize, _: usize) -> Result<(), EngineError> {
            Ok(())
        }

        fn commit(&mut self, _: &mut (), _: usize, _: &[usize]) -> Result<(), EngineError> {
            Ok(())
        }

        fn close(&mut self, _: ()) {}
    };
}

impl Decoder for KernelHeads {
    without_cache!();

    fn forward(&mut self, batch: &Batch<'_>, _: &mut [()], top_k: usize) -> Result<Predictions, EngineError> {
        Ok(self.heads.forward(&features(batch, self.hidden_size), top_k, &batch.draws))
    }
}

impl Decoder for TensorHeads {
    without_cache!();

    fn forward(&mut self, batch: &Batch<'_>, _: &mut [()], top_k: usize) -> Result<Predictions, EngineError> {
        if batch.scored.is_empty() {
            return Ok(Predictions::default());
        }
        let logits = self.logits(features(batch, self.hidden_size))?;
        let draws: Vec<_> = batch.draws.iter().flat_map(|draw| vec![*draw; self.heads.len()]).collect();
        Ok(predictions(&logits, top_k, &draws)?)
    }
}
