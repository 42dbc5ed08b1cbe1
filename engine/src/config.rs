//! The configuration of a checkpoint: config.json of Hugging Face models, the header of GGUF files.
//!
//! Everything the forward depends on is read here or refused here, so a model either runs as it was
//! trained or does not load.

use std::{fs, path::Path};

use laser_cpu::{ModelShape, RopeScaling};
use laser_model::{architecture_name, max_positions};
use serde::Deserialize;
use serde_json::Value;

use crate::{architecture::Architecture, error::EngineError};

/// A decoder as its checkpoint describes it.
#[derive(Debug, Clone)]
pub(super) struct ModelConfig {
    pub(super) architecture: Architecture,
    /// As the checkpoint writes it.
    pub(super) architecture_name: String,
    /// Context length; a smaller sliding window becomes the limit, so that it never bites.
    pub(super) max_positions: usize,
    pub(super) shape: ModelShape,
}

impl ModelConfig {
    /// Refuses shapes that no forward could be made of.
    pub(super) fn validate(self, file: &Path) -> Result<Self, EngineError> {
        let &ModelShape { heads, kv_heads, head_dim, layers, vocab_size, .. } = &self.shape;
        let problem = if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            format!("{heads} attention heads do not divide over {kv_heads} key/value heads")
        } else if head_dim == 0 || !head_dim.is_multiple_of(2) {
            format!("head dimension {head_dim} is not a positive even number")
        } else if layers == 0 || vocab_size == 0 || self.max_positions == 0 {
            format!("{layers} layers, vocabulary {vocab_size}, {} positions", self.max_positions)
        } else {
            return Ok(self);
        };
        Err(EngineError::model(file, problem))
    }
}

/// The architecture called `name` in `file`.
pub(super) fn architecture(file: &Path, name: &str) -> Result<Architecture, EngineError> {
    let unsupported = || {
        format!(
            "architecture {name} is not supported by the tree engine (supported: {}); choose engine = \"mistralrs\" to \
             decode it without speculation",
            Architecture::supported()
        )
    };
    Architecture::parse(name).ok_or_else(|| EngineError::model(file, unsupported()))
}

/// The keys of config.json that matter; unknown ones describe training.
#[derive(Deserialize)]
struct ConfigFile {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    rope_theta: Option<f32>,
    rope_scaling: Option<RopeFile>,
    rope_parameters: Option<RopeFile>,
    hidden_act: String,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    quantization_config: Option<Value>,
}

/// `rope_scaling`, or `rope_parameters` of transformers 5, which also holds the base.
#[derive(Deserialize)]
struct RopeFile {
    rope_type: Option<String>,
    /// The older name of `rope_type`; transformers writes both for some models, and reads the newer one.
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<u32>,
}

/// Reads and checks config.json.
pub(super) fn read_config(file: &Path) -> Result<ModelConfig, EngineError> {
    let invalid = |message: String| EngineError::model(file, message);
    let text = fs::read_to_string(file).map_err(|error| invalid(error.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let name = architecture_name(&json).ok_or_else(|| invalid("neither architectures nor model_type is set".into()))?;
    let architecture = architecture(file, name)?;
    let name = name.to_owned();
    let max_positions =
        max_positions(&json).ok_or_else(|| invalid("max_position_embeddings is missing or not a size".into()))?;
    let config: ConfigFile = serde_json::from_value(json).map_err(|error| invalid(error.to_string()))?;
    if config.hidden_act != "silu" {
        return Err(invalid(format!("hidden_act is {:?}, expected \"silu\"", config.hidden_act)));
    }
    if config.quantization_config.is_some() {
        return Err(invalid(
            "quantization_config: quantised checkpoints are not supported; use the original weights with isq, or GGUF"
                .into(),
        ));
    }
    let rope = config.rope().map_err(&invalid)?;
    let shape = config.into_shape(architecture, rope);
    ModelConfig { architecture, architecture_name: name, max_positions, shape }.validate(file)
}

impl ConfigFile {
    /// The base of the rotary embedding and its scaling. Some checkpoints say them twice, for older and newer readers.
    fn rope(&self) -> Result<(f32, RopeScaling), String> {
        let said = [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)];
        let mut bases: Vec<f32> = self.rope_theta.into_iter().collect();
        let mut scalings = Vec::new();
        for (key, rope) in said {
            let Some(rope) = rope else { continue };
            bases.extend(rope.rope_theta);
            scalings.push(rope.scaling(key)?);
        }
        if let [scaling, other] = &scalings[..]
            && scaling != other
        {
            return Err(format!(
                "rope_scaling and rope_parameters differ: {scaling:?}, {other:?}; remove the wrong one"
            ));
        }
        let base = bases.first().copied().unwrap_or(10_000.0);
        if let Some(other) = bases.iter().find(|other| **other != base) {
            return Err(format!("rope_theta is given twice, as {base} and as {other}; remove the wrong one"));
        }
        Ok((base, scalings.pop().unwrap_or(RopeScaling::None)))
    }

    fn into_shape(self, architecture: Architecture, (rope_theta, rope_scaling): (f32, RopeScaling)) -> ModelShape {
        ModelShape {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1)),
            norm_eps: self.rms_norm_eps,
            rope_theta,
            rope_scaling,
            tied_embeddings: self.tie_word_embeddings,
            qkv_bias: self.attention_bias || architecture == Architecture::Qwen2,
            output_bias: self.attention_bias && architecture != Architecture::Qwen2,
            mlp_bias: self.mlp_bias,
            head_norms: architecture == Architecture::Qwen3,
            fused: None,
            medusa: None,
        }
    }
}

impl RopeFile {
    /// The scaling that stands under `key`.
    fn scaling(&self, key: &str) -> Result<RopeScaling, String> {
        let need = |value: Option<f32>, name: &str| value.ok_or_else(|| format!("{key} has no {name}"));
        match self.rope_type.as_deref().or(self.older_type.as_deref()) {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need(self.factor, "factor")? }),
            Some("llama3") => {
                let original = self.original_max_position_embeddings.map(|length| length as f32);
                Ok(RopeScaling::Llama3 {
                    factor: need(self.factor, "factor")?,
                    low_freq_factor: need(self.low_freq_factor, "low_freq_factor")?,
                    high_freq_factor: need(self.high_freq_factor, "high_freq_factor")?,
                    original_positions: need(original, "original_max_position_embeddings")?,
                })
            }
            Some(other) => Err(format!("{key} type {other:?} is not supported (supported: default, linear, llama3)")),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two layers of two heads.
    pub(crate) fn tiny() -> ModelShape {
        check(&[("num_hidden_layers", "2")]).unwrap().shape
    }

    fn check(changes: &[(&str, &str)]) -> Result<ModelConfig, EngineError> {
        let mut config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 100,
        });
        for (key, value) in changes {
            config[*key] = serde_json::from_str(value).unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.json");
        fs::write(&file, config.to_string()).unwrap();
        read_config(&file)
    }

    #[test]
    fn defaults_follow_the_published_ones() {
        let config = check(&[]).unwrap();
        assert_eq!((config.shape.kv_heads, config.shape.head_dim, config.max_positions), (2, 4, 100));
        assert_eq!(config.shape.rope_theta, 10_000.0);
        assert!(!config.shape.qkv_bias && !config.shape.tied_embeddings && !config.shape.head_norms);
    }

    #[test]
    fn qwen2_has_a_bias_on_queries_keys_and_values_only() {
        let config = check(&[("architectures", r#"["Qwen2ForCausalLM"]"#)]).unwrap();
        assert!(config.shape.qkv_bias && !config.shape.output_bias);
    }

    #[test]
    fn a_sliding_window_in_use_limits_the_context() {
        let mistral = ("architectures", r#"["MistralForCausalLM"]"#);
        let qwen = ("architectures", r#"["Qwen2ForCausalLM"]"#);
        let window = ("sliding_window", "64");
        for (changes, expected) in [
            (vec![mistral, window], 64),
            (vec![mistral, ("sliding_window", "null")], 100),
            (vec![qwen, window], 100),
            (vec![qwen, window, ("use_sliding_window", "true")], 64),
        ] {
            assert_eq!(check(&changes).unwrap().max_positions, expected, "{changes:?}");
        }
    }

    #[test]
    fn rope_base_may_be_nested() {
        let nested = ("rope_parameters", r#"{"rope_type": "default", "rope_theta": 500000.0}"#);
        assert_eq!(check(&[nested]).unwrap().shape.rope_theta, 500_000.0);
    }

    #[test]
    fn of_both_names_of_the_rope_type_the_newer_one_counts() {
        let scaling = |rope: &str| check(&[("rope_scaling", rope)]).unwrap().shape.rope_scaling;
        let both = scaling(r#"{"rope_type": "linear", "type": "linear", "factor": 2.0}"#);
        assert_eq!(both, RopeScaling::Linear { factor: 2.0 });
        let newer = scaling(r#"{"rope_type": "default", "type": "linear", "factor": 2.0}"#);
        assert_eq!(newer, RopeScaling::None);
        let older = scaling(r#"{"type": "linear", "factor": 2.0}"#);
        assert_eq!(older, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn both_names_of_the_rotary_embedding_are_read_where_they_agree() {
        let older = r#"{"type": "linear", "factor": 2}"#;
        let newer = r#"{"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}"#;
        let both = |older: &str, newer: &str, base: &str| {
            check(&[("rope_scaling", older), ("rope_parameters", newer), ("rope_theta", base)])
        };
        for (older, base) in [(older, "null"), (older, "500000"), ("null", "500000.0"), (newer, "null")] {
            let shape = both(older, newer, base).unwrap().shape;
            assert_eq!((shape.rope_theta, shape.rope_scaling), (500_000.0, RopeScaling::Linear { factor: 2.0 }));
        }
        let plain = both("null", r#"{"rope_type": "default"}"#, "null").unwrap().shape;
        assert_eq!((plain.rope_theta, plain.rope_scaling), (10_000.0, RopeScaling::None));
        for (older, base, expected) in [
            (r#"{"type": "linear", "factor": 4}"#, "null", "rope_scaling and rope_parameters differ"),
            (r#"{"type": "default"}"#, "null", "rope_scaling and rope_parameters differ"),
            (older, "10000", "rope_theta is given twice, as 10000 and as 500000"),
        ] {
            let error = both(older, newer, base).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn what_cannot_run_is_refused_by_name() {
        for (key, value, expected) in [
            (
                "architectures",
                r#"["GPT2LMHeadModel"]"#,
                "architecture GPT2LMHeadModel is not supported by the tree engine (supported: LlamaForCausalLM, \
                 MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)",
            ),
            ("hidden_act", r#""gelu""#, "hidden_act is \"gelu\", expected \"silu\""),
            ("max_position_embeddings", "null", "max_position_embeddings is missing or not a size"),
            ("hidden_size", r#""big""#, "invalid type: string \"big\", expected usize"),
            ("num_key_value_heads", "3", "2 attention heads do not divide over 3 key/value heads"),
            ("head_dim", "3", "head dimension 3 is not a positive even number"),
            ("num_hidden_layers", "0", "0 layers, vocabulary 10, 100 positions"),
            ("quantization_config", r#"{"quant_method": "gptq"}"#, "quantised checkpoints are not supported"),
            (
                "rope_scaling",
                r#"{"type": "yarn", "factor": 4.0}"#,
                "rope_scaling type \"yarn\" is not supported (supported: default, linear, llama3)",
            ),
            ("rope_scaling", r#"{"type": "linear"}"#, "rope_scaling has no factor"),
            ("rope_parameters", r#"{"rope_type": "linear"}"#, "rope_parameters has no factor"),
        ] {
            let error = check(&[(key, value)]).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("config.json"), "{error}");
        }
    }
}
