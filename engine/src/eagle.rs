//! EAGLE's layer (Li et al., arXiv:2401.15077 and 2406.16858): a draft model of one decoder layer over the target's
//! features.
//!
//! What enters is a projection (`fc`) of a token's embedding and of the feature of the token before it; what comes out
//! is the feature that the target is expected to have next. Embedding and vocabulary are the target's own. Published
//! weights have `fc.weight`, `fc.bias` or none, and `layers.0.*`; the norms before attention and vocabulary are absent.

use std::path::Path;

use candle_core::Tensor;
use laser_cpu::{Format, Matrix};

use crate::{
    config::{ModelConfig, read_config},
    error::EngineError,
    linear::Linear,
    safetensors::SafetensorsWeights,
    tree_lm::Weights,
};

/// The projection of what enters; other models have none.
const FUSION: &str = "fc.weight";

/// Whether these are the weights of an EAGLE layer.
pub(super) fn is_layer(weights: &SafetensorsWeights) -> bool {
    weights.contains(FUSION)
}

/// The layer's configuration with the vocabulary and the positions of its target.
pub(super) fn config(
    folder: &Path,
    weights: &SafetensorsWeights,
    target: &ModelConfig,
) -> Result<ModelConfig, EngineError> {
    let file = folder.join("config.json");
    let mut config = read_config(&file)?;
    let refuse = |key: &str, own: usize, theirs: usize| {
        Err(EngineError::model(&file, format!("{key} is {own}, that of the model it is to draft for {theirs}")))
    };
    if !is_layer(weights) {
        return Err(EngineError::model(folder, format!("tensor {FUSION} is missing: not an EAGLE layer")));
    }
    if config.shape.hidden_size != target.shape.hidden_size {
        return refuse("hidden_size", config.shape.hidden_size, target.shape.hidden_size);
    }
    if config.shape.vocab_size != target.shape.vocab_size {
        return refuse("vocab_size", config.shape.vocab_size, target.shape.vocab_size);
    }
    config.max_positions = target.max_positions;
    config.shape.tied_embeddings = target.shape.tied_embeddings;
    config.shape.fused = Some(weights.contains("fc.bias"));
    Ok(config)
}

/// The layer's weights, with embedding and vocabulary of the target's.
pub(super) struct EagleWeights {
    pub(super) layer: SafetensorsWeights,
    pub(super) target: Box<dyn Weights>,
}

/// The layer's name of a tensor; none if it is the target's.
fn own_name(name: &str) -> Option<&str> {
    let name = name.strip_prefix("model.")?;
    (!name.starts_with("embed_tokens")).then_some(name)
}

impl Weights for EagleWeights {
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        match own_name(name) {
            Some(name) => self.layer.linear(name, outputs, inputs, bias),
            None => self.target.linear(name, outputs, inputs, bias),
        }
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        match own_name(name) {
            Some(name) => self.layer.values(name, shape),
            None => self.target.values(name, shape),
        }
    }

    fn matrix(&self, name: &str, shape: [usize; 2], format: Format) -> Result<Matrix, EngineError> {
        match own_name(name) {
            Some(name) => self.layer.matrix(name, shape, format),
            None => self.target.matrix(name, shape, format),
        }
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        match own_name(name) {
            Some(name) => self.layer.vector(name, length),
            None => self.target.vector(name, length),
        }
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        self.target.embedding(rows, width)
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        self.target.head(embedding, tied)
    }

    fn parameters(&self) -> u64 {
        self.layer.parameters() + self.target.parameters()
    }
}
