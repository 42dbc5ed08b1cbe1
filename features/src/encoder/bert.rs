//! A BERT from config.json and safetensors.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config, HiddenAct, PositionEmbeddingType};
use serde_json::Value;

use super::{EncoderError, EncoderFiles};

/// Reads the architecture that config.json describes, if it is BERT's.
pub(super) fn config(file: &Path, json: &Value) -> Result<Config, EncoderError> {
    check_architecture(file, json)?;
    let number = |key: &str, default: Option<usize>| {
        let value = match &json[key] {
            Value::Null => default,
            value => value.as_u64().and_then(|n| usize::try_from(n).ok()),
        };
        value
            .filter(|n| *n > 0 || key == "pad_token_id")
            .ok_or_else(|| unsupported(file, key, &json[key], "expected a number above 0"))
    };
    let config = Config {
        vocab_size: number("vocab_size", None)?,
        hidden_size: number("hidden_size", None)?,
        num_hidden_layers: number("num_hidden_layers", None)?,
        num_attention_heads: number("num_attention_heads", None)?,
        intermediate_size: number("intermediate_size", None)?,
        hidden_act: activation(file, &json["hidden_act"])?,
        hidden_dropout_prob: 0.0,
        max_position_embeddings: number("max_position_embeddings", None)?,
        type_vocab_size: number("type_vocab_size", Some(2))?,
        initializer_range: 0.0,
        layer_norm_eps: json["layer_norm_eps"].as_f64().unwrap_or(1e-12),
        pad_token_id: number("pad_token_id", Some(0))?,
        position_embedding_type: PositionEmbeddingType::Absolute,
        use_cache: false,
        classifier_dropout: None,
        model_type: None,
    };
    if !config.hidden_size.is_multiple_of(config.num_attention_heads) {
        let expected = format!("expected a divisor of hidden_size = {}", config.hidden_size);
        let heads = &json["num_attention_heads"];
        return Err(unsupported(file, "num_attention_heads", heads, &expected));
    }
    Ok(config)
}

/// Refuses other architectures: an encoder with BERT's tensors and another forward would give wrong embeddings.
fn check_architecture(file: &Path, json: &Value) -> Result<(), EncoderError> {
    let is = |key: &str, known: &[&str]| {
        let value = &json[key];
        let is_known = value.is_null() || value.as_str().is_some_and(|v| known.contains(&v));
        match is_known {
            true => Ok(()),
            false => Err(unsupported(
                file,
                key,
                value,
                &format!(
                    "expected {:?}: the encoder runs BERT alone (bert-base, MiniLM, e5, bge); choose such a model",
                    known[0]
                ),
            )),
        }
    };
    is("model_type", &["bert"])?;
    is("position_embedding_type", &["absolute"])?;
    let architecture = &json["architectures"][0];
    let is_bert = architecture.as_str().is_some_and(|a| a.starts_with("Bert"));
    if !is_bert && json["model_type"].is_null() || architecture == "BertLMHeadModel" {
        let expected = "expected BertModel or one that is made from it, or model_type = \"bert\"";
        return Err(unsupported(file, "architectures", architecture, expected));
    }
    if json["is_decoder"] == true {
        let expected = "expected false: a decoder's tokens see only those before them";
        return Err(unsupported(file, "is_decoder", &json["is_decoder"], expected));
    }
    Ok(())
}

fn activation(file: &Path, value: &Value) -> Result<HiddenAct, EncoderError> {
    match value.as_str() {
        Some("gelu") => Ok(HiddenAct::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(HiddenAct::GeluApproximate),
        Some("relu") => Ok(HiddenAct::Relu),
        _ => Err(unsupported(
            file,
            "hidden_act",
            value,
            "expected \"gelu\", \"gelu_new\", \"gelu_pytorch_tanh\" or \"relu\"",
        )),
    }
}

pub(super) fn unsupported(file: &Path, key: &str, value: &Value, expected: &str) -> EncoderError {
    EncoderError::Unsupported {
        file: file.to_owned(),
        key: key.to_owned(),
        value: match value {
            Value::Null => "not there".to_owned(),
            value => value.to_string(),
        },
        expected: expected.to_owned(),
    }
}

/// Loads the weights in f32, whatever they are stored as.
pub(super) fn load(files: &EncoderFiles, device: &Device) -> Result<BertModel, EncoderError> {
    let wrong = |reason: String| EncoderError::Weights { directory: files.directory().to_owned(), reason };
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for file in files.weights() {
        let read = safetensors::load(file, &Device::Cpu).map_err(|e| wrong(format!("{}: {e}", file.display())))?;
        let read = read.into_iter().map(|(name, tensor)| (rename(&name), tensor));
        tensors.extend(read);
    }
    let weights = VarBuilder::from_tensors(tensors, DType::F32, device);
    BertModel::load(weights, files.bert()).map_err(|e| wrong(e.to_string()))
}

/// Maps a tensor's name. Models with a head keep the encoder below `bert.`, and models from TensorFlow call a layer
/// norm's weights gamma and beta.
fn rename(name: &str) -> String {
    name.strip_prefix("bert.")
        .unwrap_or(name)
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias")
}
