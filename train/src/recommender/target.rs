//! The target that a recommender drafts for: another Llama model of the same codes.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use candle_core::{DType, Device};
use serde::Deserialize;
use serde_json::Value;

use crate::layer::{ROPE_THETA, Shape};
use crate::network::Network;
use crate::output::{CONFIG, WEIGHTS};
use crate::recommender::vocabulary::CodeVocabulary;

/// The keys of config.json that matter.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
}

impl Config {
    fn shape(&self) -> Shape {
        Shape {
            hidden: self.hidden_size,
            inner: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1)),
            rope_theta: self.rope_theta.unwrap_or(ROPE_THETA),
            norm_eps: self.rms_norm_eps,
        }
    }
}

/// Opens the target in a folder, for prompts with their answers of so many positions.
pub(crate) fn open(folder: &Path, vocabulary: &CodeVocabulary, positions: usize, device: &Device) -> Result<Network> {
    let file = folder.join(CONFIG);
    let read = || -> Result<Config> { Ok(serde_json::from_slice(&fs::read(&file)?)?) };
    let config = read().with_context(|| format!("{}: not the configuration of a model", file.display()))?;
    ensure!(
        config.model_type == "llama" && config.rope_scaling.is_none() && !config.attention_bias && !config.mlp_bias,
        "{}: expected a Llama model without biases and without rope_scaling",
        file.display()
    );
    ensure!(
        config.max_position_embeddings >= positions,
        "{}: {} positions, but a history and its next item take up to {positions}; lower max_items",
        file.display(),
        config.max_position_embeddings
    );
    vocabulary.check(folder)?;
    ensure!(
        config.vocab_size == vocabulary.size(),
        "{}: {} tokens, expected the {} of its codes",
        file.display(),
        config.vocab_size,
        vocabulary.size()
    );
    let network = Network::model(config.shape(), (config.vocab_size, config.tie_word_embeddings), 0, device)?;
    let file = folder.join(WEIGHTS);
    let tensors = candle_core::safetensors::load(&file, device).with_context(|| file.display().to_string())?;
    for (name, weight) in network.weights() {
        let found = tensors.get(&name).with_context(|| format!("{}: has no {name}", file.display()))?;
        let set = || weight.set(&found.to_dtype(DType::F32)?);
        set().with_context(|| format!("{}: {name}", file.display()))?;
    }
    Ok(network)
}
