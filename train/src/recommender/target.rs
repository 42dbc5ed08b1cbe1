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
    rope_parameters: Option<RopeParameters>,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
}

/// What newer checkpoints have in place of `rope_theta` and `rope_scaling`.
#[derive(Debug, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

impl Config {
    /// Whether it is a Llama model as training has it: without biases, and with positions that are not scaled.
    fn is_plain(&self) -> bool {
        let rope_type = self.rope_parameters.as_ref().and_then(|rope| rope.rope_type.as_deref());
        self.model_type == "llama"
            && self.rope_scaling.is_none()
            && matches!(rope_type, None | Some("default"))
            && !self.attention_bias
            && !self.mlp_bias
    }

    fn shape(&self) -> Shape {
        let nested_theta = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        Shape {
            hidden: self.hidden_size,
            inner: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1)),
            rope_theta: self.rope_theta.or(nested_theta).unwrap_or(ROPE_THETA),
            norm_eps: self.rms_norm_eps,
        }
    }
}

/// Opens the target in a folder, for prompts with their answers of so many positions.
pub(crate) fn open(folder: &Path, vocabulary: &CodeVocabulary, positions: usize, device: &Device) -> Result<Network> {
    let file = folder.join(CONFIG);
    let read = || -> Result<Config> { Ok(serde_json::from_slice(&fs::read(&file)?)?) };
    let config = read().with_context(|| format!("{}: not the configuration of a model", file.display()))?;
    ensure!(config.is_plain(), "{}: expected a Llama model without biases and scaled positions", file.display());
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rotations_are_read_under_both_names_and_scaled_ones_are_refused() {
        let config = |key: &str, rope: Value| {
            let mut config = json!({
                "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
                "num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 8,
            });
            config[key] = rope;
            serde_json::from_value::<Config>(config).unwrap()
        };
        for (key, rope, theta) in [
            ("rope_theta", json!(5.0), 5.0),
            ("rope_parameters", json!({"rope_theta": 5.0, "rope_type": "default"}), 5.0),
            ("rope_scaling", Value::Null, ROPE_THETA),
        ] {
            let config = config(key, rope);
            assert!(config.is_plain() && config.shape().rope_theta == theta, "{config:?}");
        }
        for key in ["rope_scaling", "rope_parameters"] {
            assert!(!config(key, json!({"rope_type": "linear", "factor": 2.0})).is_plain(), "{key}");
        }
    }
}
