//! The description of an encoder, from the files of its directory and the configuration.

use std::path::{Path, PathBuf};

use candle_transformers::models::bert;
use laser_model::{self, Tokenizer, Weights, digest_files, read_json, weights_in};
use laser_schema::{Digest, EncoderInfo, Pooling};

use super::bert::config as bert_config;
use super::sentence_transformers::Settings;
use super::{EncoderConfig, EncoderError};

/// An encoder on the local disk that fits the configuration; not loaded yet.
#[derive(Debug)]
pub struct EncoderFiles {
    directory: PathBuf,
    weights: Vec<PathBuf>,
    tokenizer: Tokenizer,
    bert: bert::Config,
    info: EncoderInfo,
    config: EncoderConfig,
}

impl EncoderFiles {
    /// Reads the encoder's description at `directory`, and its weights once for their digest. The path in `config` is
    /// ignored: resolve it first.
    ///
    /// # Errors
    /// [`EncoderError`], naming the file and key that is missing or asks for something unsupported.
    pub fn open(directory: &Path, config: &EncoderConfig) -> Result<Self, EncoderError> {
        let missing = |file: &str, remedy| EncoderError::MissingFile {
            directory: directory.to_owned(),
            file: file.to_owned(),
            remedy,
        };
        let config_file = directory.join("config.json");
        if !config_file.is_file() {
            let remedy = "give the directory of a BERT model, as transformers saves it";
            return Err(missing("config.json", remedy));
        }
        let bert = bert_config(&config_file, &read_json(&config_file)?)?;
        let tokenizer_file = directory.join("tokenizer.json");
        if !tokenizer_file.is_file() {
            let remedy = "convert the model's tokenizer to a fast one (AutoTokenizer, save_pretrained)";
            return Err(missing("tokenizer.json", remedy));
        }
        let tokenizer = Tokenizer::open(&tokenizer_file)?;
        let Weights::Safetensors(weights) = weights_in(directory)? else {
            let remedy = "the encoder reads no GGUF; save the model as safetensors";
            return Err(missing("model.safetensors", remedy));
        };
        let special = special_tokens(&tokenizer, &tokenizer_file, &bert)?;
        let files = weights.iter().map(PathBuf::as_path).chain([config_file.as_path()]);
        let settings = Settings::read(directory)?;
        let info = EncoderInfo {
            model: digest_files(files)?,
            tokenizer: Digest::from_bytes(tokenizer.fingerprint()),
            pooling: pooling(config, &settings)?,
            normalise: config.normalise.unwrap_or(settings.normalise),
            max_tokens: max_tokens(config, &settings, &bert, special)?,
            prefix: prefix(config, &settings)?,
            lower_case: settings.lower_case,
            dimensions: bert.hidden_size,
        };
        if config.batch_tokens == 0 {
            return Err(EncoderError::option("batch_tokens", 0, "expected at least 1"));
        }
        Ok(Self { directory: directory.to_owned(), weights, tokenizer, bert, info, config: config.clone() })
    }

    /// Returns what determines the embeddings.
    pub fn info(&self) -> &EncoderInfo {
        &self.info
    }

    /// Returns how the encoder is used.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn weights(&self) -> &[PathBuf] {
        &self.weights
    }

    pub(super) fn tokenizer(&self) -> &tokenizers::Tokenizer {
        self.tokenizer.library()
    }

    pub(super) fn bert(&self) -> &bert::Config {
        &self.bert
    }

    /// Returns the padding token; it is masked, so any token of the vocabulary will do.
    pub(super) fn padding(&self) -> u32 {
        u32::try_from(self.bert.pad_token_id).unwrap_or_default()
    }
}

/// Returns the number of special tokens around a text, at least one: an empty text must have something to pool.
fn special_tokens(tokenizer: &Tokenizer, file: &Path, bert: &bert::Config) -> Result<usize, EncoderError> {
    let corrupt = |reason: String| laser_model::ModelError::Corrupt { path: file.to_owned(), reason };
    if tokenizer.vocab_size() > bert.vocab_size {
        let reason = format!(
            "has tokens up to {}, but vocab_size of config.json is {}: not this model's tokenizer",
            tokenizer.vocab_size() - 1,
            bert.vocab_size
        );
        return Err(corrupt(reason).into());
    }
    match tokenizer.encode("", true)?.len() {
        0 => Err(corrupt(
            "puts no [CLS] and [SEP] around a text: not BERT's tokenizer (it has no post_processor)".to_owned(),
        )
        .into()),
        special => Ok(special),
    }
}

fn pooling(config: &EncoderConfig, settings: &Settings) -> Result<Pooling, EncoderError> {
    match config.pooling {
        Some(pooling) => Ok(pooling),
        None => Ok(settings.pooling()?.unwrap_or(Pooling::Mean)),
    }
}

fn max_tokens(
    config: &EncoderConfig,
    settings: &Settings,
    bert: &bert::Config,
    special: usize,
) -> Result<usize, EncoderError> {
    let positions = bert.max_position_embeddings;
    let own = settings.max_tokens.unwrap_or(positions).min(positions);
    let tokens = config.max_tokens.unwrap_or(own);
    if tokens > special && tokens <= positions {
        return Ok(tokens);
    }
    let reason = format!(
        "expected {} to {positions}: {special} special tokens and one of the text, and no more than the model has \
         positions for",
        special + 1
    );
    Err(EncoderError::option("max_tokens", tokens, reason))
}

fn prefix(config: &EncoderConfig, settings: &Settings) -> Result<String, EncoderError> {
    let own = settings.prefix.clone().unwrap_or_default();
    let prefix = config.prefix.clone().unwrap_or(own);
    if prefix.is_empty() || settings.pools_prompt() {
        return Ok(prefix);
    }
    let reason = "the model's pooling leaves its prompt out (include_prompt = false), which this encoder cannot; \
                  choose another model, or prefix = \"\"";
    Err(EncoderError::option("prefix", format!("{prefix:?}"), reason))
}
