//! The folder of a trained model: a Llama model like any other, and what it was trained on or belongs to.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use laser_engine::{ACCEPTANCE_HEAD, DRAFT_TOKENS};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{write_tensors, write_whole};
use crate::config::DraftKind;
use crate::epoch::Epoch;
use crate::layer::Shape;
use crate::network::EMBEDDING;
use crate::own_tokens::OwnTokens;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";

/// The same of Medusa's heads, by the name that published ones have.
const HEADS: &str = "medusa_lm_head.safetensors";

/// The epochs of the training, beside the model.
const HISTORY: &str = "training.json";

/// The key of [`Belongs`] in config.json.
pub(crate) const BELONGS: &str = "laser_draft";

/// What a draft model that Laser trained belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Belongs {
    /// Digest of the target.
    pub target: String,
    /// Fingerprint of the target's tokenizer, whose tokens the model drafts.
    pub tokenizer: String,
    /// Of an acceptance head: digest of its draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// Of an acceptance head: scale and shift of the draft model's log odds, which it corrects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<[f64; 2]>,
    /// What the training was a function of.
    pub training: String,
    /// The epoch that was kept.
    pub kept: Epoch,
}

/// What the model in a folder belongs to; none if Laser did not train it.
///
/// # Errors
/// A config.json that cannot be read, or whose entry is another version's.
pub fn belongs(folder: &Path) -> Result<Option<Belongs>> {
    entry(folder, BELONGS)
}

/// What config.json says at a key; none without the file or the key.
pub(crate) fn entry<T: DeserializeOwned>(folder: &Path, key: &str) -> Result<Option<T>> {
    let file = folder.join(CONFIG);
    if !file.is_file() {
        return Ok(None);
    }
    let read = || -> Result<_> {
        let config: Value = serde_json::from_slice(&fs::read(&file)?)?;
        serde_json::from_value(config[key].clone()).with_context(|| {
            format!("{key:?} is not what this version of Laser writes; train the model again into another folder")
        })
    };
    read().with_context(|| format!("{}: not the configuration of a model", file.display()))
}

/// The target that a draft model is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Digest of its weights.
    pub digest: String,
    /// Fingerprint of its tokenizer.
    pub tokenizer: String,
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

/// The tokens of a Llama model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub(crate) vocab_size: usize,
    pub(crate) max_positions: usize,
    pub(crate) end_of_text: &'a [u32],
    pub(crate) bos: Option<u32>,
}

/// The config.json of a Llama model; `is_tied` says that its embedding is its vocabulary as well.
pub(crate) fn llama(shape: &Shape, tokens: Tokens<'_>, is_tied: bool) -> Value {
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
        "max_position_embeddings": tokens.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": tokens.vocab_size,
        "eos_token_id": tokens.end_of_text,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
    });
    if let Some(bos) = tokens.bos {
        json["bos_token_id"] = bos.into();
    }
    json
}

/// Writes config.json, the epochs, and last the weights in the file of this name: without them there is no model.
pub(crate) fn write(
    folder: &Path,
    config: &Value,
    history: &[impl Serialize],
    (file, weights): (&str, &[(String, Tensor)]),
) -> Result<()> {
    write_whole(&folder.join(CONFIG), &serde_json::to_vec_pretty(config)?)?;
    write_whole(&folder.join(HISTORY), &serde_json::to_vec_pretty(history)?)?;
    write_tensors(&folder.join(file), weights, None)
}

/// Writes the folder of a draft model that tells of these tokens.
pub(crate) fn write_draft(
    folder: &Path,
    target: &Target,
    (kind, shape): (DraftKind, &Shape),
    (weights, own): (&[(String, Tensor)], &OwnTokens),
    (belongs, history): (&Belongs, &[Epoch]),
) -> Result<()> {
    if kind == DraftKind::Model {
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let from = target.directory.join(name);
            if from.is_file() {
                write_whole(&folder.join(name), &fs::read(&from).with_context(|| from.display().to_string())?)?;
            }
        }
    }
    let &Target { vocab_size, max_positions, ref end_of_text, bos, .. } = target;
    let blocks = weights.iter().filter(|(name, _)| name.ends_with(".linear.weight")).count();
    let (mut json, file) = match kind {
        DraftKind::Model | DraftKind::Eagle => {
            let tokens = Tokens { vocab_size, max_positions, end_of_text, bos };
            (llama(shape, tokens, kind == DraftKind::Model), WEIGHTS)
        }
        DraftKind::Medusa => {
            (json!({ "medusa_num_heads": blocks, "medusa_num_layers": 1, "vocab_size": vocab_size }), HEADS)
        }
        DraftKind::Acceptance => {
            (json!({ "hidden_size": shape.hidden, "acceptance_head_blocks": blocks }), ACCEPTANCE_HEAD)
        }
    };
    json[BELONGS] = serde_json::to_value(belongs)?;
    let mut tensors = weights.to_vec();
    if let Some((_, embedding)) = tensors.iter_mut().find(|(name, _)| name == EMBEDDING) {
        *embedding = own.among_all(embedding, vocab_size)?;
    }
    if kind != DraftKind::Acceptance {
        tensors.push((DRAFT_TOKENS.to_owned(), Tensor::new(own.tokens(), &Device::Cpu)?));
    }
    write(folder, &json, history, (file, &tensors))
}

/// What config.json says at a key of the model that a folder holds, and the epochs of its training; none if it holds
/// no model.
///
/// # Errors
/// A model that says nothing at this key, which a training would replace.
pub(crate) fn finished<T: DeserializeOwned>(folder: &Path, key: &str) -> Result<Option<(T, Vec<Epoch>)>> {
    let has_weights = [WEIGHTS, HEADS, ACCEPTANCE_HEAD].iter().any(|name| folder.join(name).is_file());
    let entry: Option<T> = entry(folder, key)?;
    ensure!(
        entry.is_some() || !(has_weights || folder.join(CONFIG).is_file()),
        "{}: holds a model that this training has not made; name another output, or remove the folder",
        folder.display()
    );
    let Some(entry) = entry.filter(|_| has_weights) else {
        return Ok(None);
    };
    let file = folder.join(HISTORY);
    let read = || -> Result<_> { Ok(serde_json::from_slice(&fs::read(&file)?)?) };
    let history = read().with_context(|| format!("{}: not the epochs of a training", file.display()))?;
    Ok(Some((entry, history)))
}
