//! The folder of a draft model: a Llama model like any other, and what it belongs to.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use candle_core::Tensor;
use laser_engine::ACCEPTANCE_HEAD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{write_tensors, write_whole};
use crate::config::DraftKind;
use crate::epoch::EpochReport;
use crate::layer::Shape;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// The same of Medusa's heads, by the name that published ones have.
const HEADS: &str = "medusa_lm_head.safetensors";

/// The epochs of the training, beside the model.
const HISTORY: &str = "training.json";

/// The key of [`Belongs`] in config.json.
const BELONGS: &str = "laser_draft";

/// What a draft model that Laser trained belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Belongs {
    /// Digest of the target.
    pub target: String,
    /// Of an acceptance head: digest of its draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// Of an acceptance head: scale and shift of the draft model's log odds, which it corrects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<[f64; 2]>,
    /// What the training was a function of.
    pub training: String,
    /// The epoch that was kept.
    pub kept: EpochReport,
}

/// What the model in a folder belongs to; none if Laser did not train it.
///
/// # Errors
/// A config.json that cannot be read, or whose entry is another version's.
pub fn belongs(folder: &Path) -> Result<Option<Belongs>> {
    let file = folder.join(CONFIG);
    if !file.is_file() {
        return Ok(None);
    }
    let read = || -> Result<Option<Belongs>> {
        let config: Value = serde_json::from_slice(&fs::read(&file)?)?;
        Ok(serde_json::from_value(config[BELONGS].clone())?)
    };
    read().with_context(|| format!("{}: not the configuration of a model", file.display()))
}

/// The target that a draft model is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Digest of its weights.
    pub digest: String,
    /// Its directory; the tokenizer's files are copied from it.
    pub directory: PathBuf,
    /// Its tokens, those without a text included.
    pub vocab_size: usize,
    /// Its positions.
    pub max_positions: usize,
    /// The tokens that end a text.
    pub end_of_text: Vec<u32>,
    /// The token that begins a text, if it has one.
    pub bos: Option<u32>,
}

/// Writes the model's folder; the weights come last, and without them there is no model.
pub(crate) fn write(
    folder: &Path,
    target: &Target,
    (kind, shape): (DraftKind, &Shape),
    weights: &[(String, Tensor)],
    (belongs, history): (&Belongs, &[EpochReport]),
) -> Result<()> {
    if kind == DraftKind::Model {
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let from = target.directory.join(name);
            if from.is_file() {
                write_whole(&folder.join(name), &fs::read(&from).with_context(|| from.display().to_string())?)?;
            }
        }
    }
    let mut json = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": target.vocab_size,
        "eos_token_id": target.end_of_text,
        "tie_word_embeddings": kind == DraftKind::Model,
        "torch_dtype": "float32",
    });
    if let Some(bos) = target.bos {
        json["bos_token_id"] = bos.into();
    }
    let blocks = weights.iter().filter(|(name, _)| name.ends_with(".linear.weight")).count();
    let file = match kind {
        DraftKind::Model | DraftKind::Eagle => WEIGHTS,
        DraftKind::Medusa => {
            json = json!({ "medusa_num_heads": blocks, "medusa_num_layers": 1, "vocab_size": target.vocab_size });
            HEADS
        }
        DraftKind::Acceptance => {
            json = json!({ "hidden_size": shape.hidden, "acceptance_head_blocks": blocks });
            ACCEPTANCE_HEAD
        }
    };
    json[BELONGS] = serde_json::to_value(belongs)?;
    write_whole(&folder.join(CONFIG), &serde_json::to_vec_pretty(&json)?)?;
    write_whole(&folder.join(HISTORY), &serde_json::to_vec_pretty(history)?)?;
    write_tensors(&folder.join(file), weights, None)
}

/// The epochs of the training whose model a folder holds; none if it holds no model of Laser's.
pub(crate) fn finished(folder: &Path) -> Result<Option<(Belongs, Vec<EpochReport>)>> {
    if ![WEIGHTS, HEADS, ACCEPTANCE_HEAD].iter().any(|name| folder.join(name).is_file()) {
        return Ok(None);
    }
    let Some(belongs) = belongs(folder)? else {
        return Ok(None);
    };
    let file = folder.join(HISTORY);
    let read = || -> Result<_> { Ok(serde_json::from_slice(&fs::read(&file)?)?) };
    let history = read().with_context(|| format!("{}: not the epochs of a training", file.display()))?;
    Ok(Some((belongs, history)))
}
