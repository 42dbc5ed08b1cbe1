//! A model directory: the files every process that reads, counts or generates tokens agrees on.
//!
//! [`ModelFiles::open`] reads the small JSON files only; weights are found, not read, until
//! [`ModelFiles::digest`] is asked for. [`resolve`] turns what the configuration says, a path or a hub
//! id, into such a directory.

mod chat;
mod cuts;
mod hub;
mod pieces;
mod tokenizer;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use laser_schema::digest::Digest;

pub use chat::{ChatTemplate, Message};
pub use hub::{Hub, resolve, resolve_drafts};
pub use pieces::PieceTokenizer;
pub use tokenizer::Tokenizer;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const SAFETENSORS: &str = "model.safetensors";
const SAFETENSORS_INDEX: &str = "model.safetensors.index.json";

/// The weights of a published EAGLE layer, where they are not safetensors.
pub const PYTORCH: &str = "pytorch_model.bin";

/// The file of an acceptance head.
pub const ACCEPTANCE_HEAD: &str = "acceptance_head.safetensors";

/// The files of heads: those of Medusa as they are published, and an acceptance head.
const HEADS: [&str; 3] = ["medusa_lm_head.safetensors", "medusa_lm_head.pt", ACCEPTANCE_HEAD];

/// `model_max_length` of a tokenizer without a limit is 1e30; no model has this many positions.
const POSITIONS_MAX: usize = 1 << 30;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Neither a local path nor a hub id.
    #[error("model {model:?}: no such path; expected a model directory, a .gguf file or a hub id like org/name")]
    NotFound {
        /// The model as configured.
        model: String,
    },
    /// A file that is not a GGUF file.
    #[error("model {path}: is a file; expected the model's directory or a .gguf file")]
    NotAModel {
        /// The file.
        path: PathBuf,
    },
    /// The tokenizer is missing.
    #[error("model {directory}: no tokenizer.json; convert the model's tokenizer to a fast one")]
    NoTokenizer {
        /// The model's directory.
        directory: PathBuf,
    },
    /// There is nothing to load.
    #[error("model {directory}: no weights; expected *.safetensors or one .gguf file")]
    NoWeights {
        /// The model's directory.
        directory: PathBuf,
    },
    /// The directory does not tell which weights are meant.
    #[error(
        "model {directory}: several weight files and no model.safetensors.index.json: {found}; give the path of one \
         .gguf, or add the index"
    )]
    SeveralWeights {
        /// The model's directory.
        directory: PathBuf,
        /// The files' names.
        found: String,
    },
    /// The index names a file that is not there.
    #[error("model {directory}: {file} is missing, though model.safetensors.index.json names it")]
    MissingShard {
        /// The model's directory.
        directory: PathBuf,
        /// The file.
        file: String,
    },
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {reason}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// Nothing says which token ends a text, so generation would never stop.
    #[error(
        "model {directory}: no end-of-text token; set eos_token_id in generation_config.json or config.json, or \
         eos_token (a token of tokenizer.json) in tokenizer_config.json"
    )]
    NoEndOfText {
        /// The model's directory.
        directory: PathBuf,
    },
    /// The tokenizer refused a text or ids.
    #[error("tokenizer: {reason}")]
    Tokenize {
        /// Its message.
        reason: String,
    },
    /// The model's chat template failed or refused the messages.
    #[error("the model's chat template: {reason}; use another one, or set chat = false")]
    Chat {
        /// Its message.
        reason: String,
    },
    /// The hub could not give the model.
    #[error(
        "model {model:?}: no such local path, and {endpoint} did not give it: {reason}. A private or gated model \
         needs HF_TOKEN"
    )]
    Hub {
        /// The model as configured.
        model: String,
        /// The hub asked.
        endpoint: String,
        /// The fault.
        reason: String,
    },
    /// The hub does not answer, or asks to be left alone for a while; the same may succeed later.
    #[error(
        "model {model:?}: no such local path, and {endpoint} cannot give it now: {reason}. Run the same command again \
         later"
    )]
    HubAway {
        /// The model as configured.
        model: String,
        /// The hub asked.
        endpoint: String,
        /// The fault.
        reason: String,
    },
    /// The hub may not be asked, and the cache does not have the model.
    #[error("model {model:?}: not a local path, not complete in {cache}, and HF_HUB_OFFLINE is set")]
    Offline {
        /// The model as configured.
        model: String,
        /// The cache looked at.
        cache: PathBuf,
    },
}

/// The weights' files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// One file or all shards, sorted by name.
    Safetensors(Vec<PathBuf>),
    /// One GGUF file.
    Gguf(PathBuf),
}

impl Weights {
    /// All files.
    pub fn files(&self) -> &[PathBuf] {
        match self {
            Self::Safetensors(files) => files,
            Self::Gguf(file) => std::slice::from_ref(file),
        }
    }
}

/// The contents of a model's directory.
#[derive(Debug)]
pub struct ModelFiles {
    /// Where tokenizer.json is.
    pub directory: PathBuf,
    /// Where the weights are.
    pub weights: Weights,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The tokens that end a text, at least one; the first is the canonical one.
    pub end_of_text: Vec<u32>,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// The most positions (prompt + text) of a sequence, no more than a sliding window has.
    pub max_positions: Option<usize>,
    /// The model's chat format, if it has one.
    pub chat_template: Option<ChatTemplate>,
    /// The architecture named in config.json, like `LlamaForCausalLM`.
    pub architecture: Option<String>,
    digest: OnceLock<Digest>,
}

impl ModelFiles {
    /// What an engine loads: the directory, or the .gguf file in it.
    pub fn path(&self) -> &Path {
        match &self.weights {
            Weights::Gguf(file) => file,
            Weights::Safetensors(_) => &self.directory,
        }
    }

    /// Opens the model at `path`: a directory, or a .gguf file whose directory holds tokenizer.json.
    ///
    /// # Errors
    /// See [`ModelError`]; each names the file or what is missing.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (directory, weights) = find_weights(path)?;
        let tokenizer_path = directory.join(TOKENIZER);
        if !tokenizer_path.is_file() {
            return Err(ModelError::NoTokenizer { directory });
        }
        let tokenizer = Tokenizer::open(&tokenizer_path)?;
        let config = read_json(&directory.join(CONFIG))?;
        let generation = read_json(&directory.join(GENERATION_CONFIG))?;
        let tokenizer_config = read_json(&directory.join(TOKENIZER_CONFIG))?;
        let end_of_text = end_of_text(&tokenizer, &[&generation, &config], &tokenizer_config);
        if end_of_text.is_empty() {
            return Err(ModelError::NoEndOfText { directory });
        }
        Ok(Self {
            bos: beginning_of_text(&tokenizer, &config, &tokenizer_config),
            max_positions: max_positions(&config).or_else(|| max_length(&tokenizer_config)),
            chat_template: chat_template(&directory, &tokenizer_config)?,
            architecture: config["architectures"][0].as_str().map(str::to_owned),
            directory,
            weights,
            tokenizer,
            end_of_text,
            digest: OnceLock::new(),
        })
    }

    /// The digest of what determines the model's logits: all weight files and config.json.
    ///
    /// The first call reads the weights at the disk's speed (2.5 GB/s at most, on one core); later calls are free.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn digest(&self) -> Result<Digest, ModelError> {
        if let Some(digest) = self.digest.get() {
            return Ok(digest.clone());
        }
        let config = self.directory.join(CONFIG);
        let mut files: Vec<&Path> = self.weights.files().iter().map(PathBuf::as_path).collect();
        if config.is_file() {
            files.push(&config);
        }
        let digest = digest_files(files)?;
        Ok(self.digest.get_or_init(|| digest).clone())
    }
}

/// The digest of what files hold, in their order, at the disk's speed.
///
/// # Errors
/// A file that cannot be read.
pub fn digest_files<'a>(files: impl IntoIterator<Item = &'a Path>) -> Result<Digest, ModelError> {
    let hashes: Vec<[u8; 32]> = files.into_iter().map(hash_file).collect::<Result<_, _>>()?;
    Ok(Digest::of_parts(hashes.iter().map(<[u8; 32]>::as_slice)))
}

fn hash_file(path: &Path) -> Result<[u8; 32], ModelError> {
    let mut hasher = blake3::Hasher::new();
    File::open(path).and_then(|file| hasher.update_reader(file).map(|_| ())).map_err(|e| io_error(path, e))?;
    Ok(*hasher.finalize().as_bytes())
}

fn io_error(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Io { path: path.to_owned(), source }
}

fn corrupt(path: &Path, reason: impl ToString) -> ModelError {
    ModelError::Corrupt { path: path.to_owned(), reason: reason.to_string() }
}

/// The file's bytes, `None` without the file.
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(path, e)),
    }
}

/// The JSON in a file, null without the file: a key of null is null too, so that callers need no cases.
///
/// # Errors
/// A file that cannot be read or is not JSON.
pub fn read_json(path: &Path) -> Result<Value, ModelError> {
    let Some(bytes) = read_optional(path)? else {
        return Ok(Value::Null);
    };
    serde_json::from_slice(&bytes).map_err(|e| corrupt(path, format!("not JSON: {e}")))
}

fn find_weights(path: &Path) -> Result<(PathBuf, Weights), ModelError> {
    if path.is_dir() {
        return Ok((path.to_owned(), weights_in(path)?));
    }
    if !path.exists() {
        return Err(ModelError::NotFound { model: path.display().to_string() });
    }
    if path.extension().is_none_or(|e| e != "gguf") {
        return Err(ModelError::NotAModel { path: path.to_owned() });
    }
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    Ok((directory.to_owned(), Weights::Gguf(path.to_owned())))
}

/// The weights of a model's directory. The index names the shards; without one, a single safetensors file, then a
/// single GGUF file counts.
///
/// # Errors
/// There are none, or several and nothing that tells them apart.
pub fn weights_in(directory: &Path) -> Result<Weights, ModelError> {
    let index = directory.join(SAFETENSORS_INDEX);
    if index.is_file() {
        return shards_in(directory, &index);
    }
    let single = directory.join(SAFETENSORS);
    if single.is_file() {
        return Ok(Weights::Safetensors(vec![single]));
    }
    let mut safetensors = files_with(directory, "safetensors")?;
    let mut gguf = files_with(directory, "gguf")?;
    match (safetensors.len(), gguf.len()) {
        (1, _) => Ok(Weights::Safetensors(safetensors)),
        (0, 1) => Ok(Weights::Gguf(gguf.remove(0))),
        (0, 0) => Err(ModelError::NoWeights { directory: directory.to_owned() }),
        _ => {
            safetensors.append(&mut gguf);
            let names = safetensors.iter().filter_map(|f| f.file_name()?.to_str());
            Err(ModelError::SeveralWeights {
                directory: directory.to_owned(),
                found: names.collect::<Vec<_>>().join(", "),
            })
        }
    }
}

/// The file of the heads in a directory, if it has any: Medusa's, or an acceptance head.
pub fn heads_in(directory: &Path) -> Option<PathBuf> {
    HEADS.into_iter().map(|name| directory.join(name)).find(|file| file.is_file())
}

fn shards_in(directory: &Path, index: &Path) -> Result<Weights, ModelError> {
    let names = shard_names(index)?;
    if let Some(missing) = names.iter().find(|name| !directory.join(name).is_file()) {
        return Err(ModelError::MissingShard { directory: directory.to_owned(), file: missing.clone() });
    }
    let files = names.iter().map(|name| directory.join(name)).collect();
    Ok(Weights::Safetensors(files))
}

/// The files an index names. A name with a folder in it could leave the directory and is refused.
fn shard_names(index: &Path) -> Result<BTreeSet<String>, ModelError> {
    let json = read_json(index)?;
    let map = json["weight_map"].as_object();
    let names: Option<BTreeSet<String>> = map
        .into_iter()
        .flat_map(|map| map.values())
        .map(|name| {
            let name = name.as_str()?;
            (name.ends_with(".safetensors") && !name.contains(['/', '\\'])).then(|| name.to_owned())
        })
        .collect();
    names
        .filter(|names| !names.is_empty())
        .ok_or_else(|| corrupt(index, "weight_map must name the file of each tensor, *.safetensors beside the index"))
}

fn files_with(directory: &Path, extension: &str) -> Result<Vec<PathBuf>, ModelError> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(|e| io_error(directory, e))? {
        let path = entry.map_err(|e| io_error(directory, e))?.path();
        if path.extension().is_some_and(|e| e == extension) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn as_token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn as_size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|size| usize::try_from(size).ok())
}

/// A special token's text: a string, or an object that says how it is matched.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// Ids in the order of precedence, each once. A chat model often ends a turn with another token
/// than a text, and generation_config.json lists both.
fn end_of_text(tokenizer: &Tokenizer, configs: &[&Value], tokenizer_config: &Value) -> Vec<u32> {
    let mut ids = Vec::new();
    let listed = configs.iter().map(|config| &config["eos_token_id"]);
    let flat = listed.flat_map(|eos| match eos {
        Value::Array(ids) => ids.iter().collect(),
        id => vec![id],
    });
    let named = token_text(&tokenizer_config["eos_token"]).and_then(|t| tokenizer.token_to_id(t));
    for id in flat.filter_map(as_token_id).chain(named) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// A tokenizer_config.json without `bos_token` says that texts begin without one, whatever config.json says.
fn beginning_of_text(tokenizer: &Tokenizer, config: &Value, tokenizer_config: &Value) -> Option<u32> {
    if tokenizer_config.is_null() {
        return as_token_id(&config["bos_token_id"]);
    }
    token_text(&tokenizer_config["bos_token"]).and_then(|token| tokenizer.token_to_id(token))
}

/// What a config.json calls the architecture: its class, else the type of the model.
pub fn architecture_name(config: &Value) -> Option<&str> {
    config["architectures"][0].as_str().or_else(|| config["model_type"].as_str())
}

/// The most positions of a sequence for a model with this config.json: its positions, or a smaller sliding window, so
/// that the window never bites. Mistral uses a window that is given; other architectures say whether they use it.
pub fn max_positions(config: &Value) -> Option<usize> {
    let is_mistral = matches!(architecture_name(config), Some("MistralForCausalLM" | "mistral"));
    let is_used = config["use_sliding_window"].as_bool().unwrap_or(is_mistral);
    let window = as_size(&config["sliding_window"]).filter(|_| is_used);
    as_size(&config["max_position_embeddings"]).into_iter().chain(window).min()
}

/// What a tokenizer_config.json says in place of a config.json.
fn max_length(tokenizer_config: &Value) -> Option<usize> {
    as_size(&tokenizer_config["model_max_length"]).filter(|positions| *positions < POSITIONS_MAX)
}

/// chat_template.jinja goes before tokenizer_config.json, and there `default` before other names.
fn chat_template(directory: &Path, tokenizer_config: &Value) -> Result<Option<ChatTemplate>, ModelError> {
    let path = directory.join(CHAT_TEMPLATE);
    let source = match read_optional(&path)? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|e| corrupt(&path, e))?),
        None => match &tokenizer_config["chat_template"] {
            Value::String(source) => Some(source.clone()),
            Value::Array(named) => named
                .iter()
                .find(|entry| entry["name"] == "default")
                .or(named.first())
                .and_then(|entry| entry["template"].as_str())
                .map(str::to_owned),
            _ => None,
        },
    };
    let token = |key: &str| token_text(&tokenizer_config[key]).unwrap_or_default();
    Ok(source.map(|source| ChatTemplate::new(&source, token("bos_token"), token("eos_token"))))
}

#[cfg(test)]
mod tests;
