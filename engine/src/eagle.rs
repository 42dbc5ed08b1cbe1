//! EAGLE's layer (Li et al., arXiv:2401.15077 and 2406.16858): a draft model of one decoder layer over the target's
//! features.
//!
//! What enters is a projection (`fc`) of a token's embedding and of the feature of the token before it; what comes out
//! is the feature that the target is expected to have next. Embedding and vocabulary are the target's own. Published
//! weights have `fc.weight`, `fc.bias` or none, and `layers.0.*`; the norms before attention and vocabulary are absent.
//! They are safetensors, or in `pytorch_model.bin`.

use std::path::Path;

use candle_core::{DType, Device};
use laser_model::{ModelError, PYTORCH, weights_in};
use mistralrs_quant::IsqType;

use crate::{
    config::{ModelConfig, read_config},
    error::EngineError,
    weight_files::WeightFiles,
};

/// The projection of what enters; other models have none.
const FUSION: &str = "fc.weight";

/// The weights in a folder, safetensors rather than what PyTorch saved.
pub(super) fn open(
    folder: &Path,
    dtype: DType,
    isq: Option<IsqType>,
    device: &Device,
) -> Result<WeightFiles, EngineError> {
    let file = folder.join(PYTORCH);
    match weights_in(folder) {
        Err(ModelError::NoWeights { .. }) if file.is_file() => WeightFiles::open_file(&file, dtype, isq, device),
        _ => WeightFiles::open(folder, dtype, isq, device),
    }
}

/// Whether these are the weights of an EAGLE layer.
pub(super) fn is_layer(weights: &WeightFiles) -> bool {
    weights.contains(FUSION)
}

/// The layer's configuration with the vocabulary and the positions of its target.
pub(super) fn config(folder: &Path, weights: &WeightFiles, target: &ModelConfig) -> Result<ModelConfig, EngineError> {
    let file = folder.join("config.json");
    let mut config = read_config(&file)?;
    let refuse = |key: &str, own: usize, theirs: usize| {
        Err(EngineError::misfit(&file, format!("{key} is {own}, that of the model it is to draft for {theirs}")))
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

/// The layer's name of a tensor; none if it is the target's.
pub(super) fn own_name(name: &str) -> Option<&str> {
    let name = name.strip_prefix("model.")?;
    (!name.starts_with("embed_tokens")).then_some(name)
}
