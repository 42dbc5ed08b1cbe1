//! Turns texts into vectors with encoders of the BERT family, as sentence-transformers runs them.
//!
//! A text is tokenised (cut off at `max_tokens`) and run through the encoder in f32. Its token vectors are pooled and,
//! if configured, normalised. Texts are batched by length, so there is little padding. Apart from rounding (below 1e-6
//! on CPUs) a text's embedding does not depend on its batch. Embeddings come back in the order of the texts.
//!
//! [`EncoderFiles`] describes an encoder and reads its weights only for their digest; [`Encoder`] is loaded.

mod bert;
mod files;
mod sentence_transformers;

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use candle_transformers::models::bert::BertModel;
use laser_model::ModelError;
use laser_schema::{DeviceOption, EmbeddingLayout, Embeddings, EncoderInfo, Pooling};
use serde::{Deserialize, Serialize};
use tokenizers::{Tokenizer, TruncationParams};

pub use files::EncoderFiles;

/// Least divisor of a normalisation, for vectors of zeros, as in torch's `normalize`.
const LENGTH_MIN: f64 = 1e-12;

/// `[encoder]`: the encoder and its use. Keys that are not set come from the encoder's own files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncoderConfig {
    /// A directory (config.json, tokenizer.json, *.safetensors), a hub id, or the URL of such a directory.
    pub path: String,
    /// The pooling of token vectors; by default what 1_Pooling/config.json says, or the mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// Whether embeddings have length 1; by default, if modules.json has a Normalize.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalise: Option<bool>,
    /// Most tokens of a text that are read; by default max_seq_length of sentence_bert_config.json, or all positions of
    /// the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Prefix of every text (e5 needs `"query: "` or `"passage: "`); by default the default prompt of
    /// config_sentence_transformers.json, or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// The type of the output's column.
    pub layout: EmbeddingLayout,
    /// Most tokens of a batch, including padding; a longer text is a batch of its own.
    pub batch_tokens: usize,
    /// The device to run on.
    pub device: DeviceOption,
}

impl Default for EncoderConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            pooling: None,
            normalise: None,
            max_tokens: None,
            prefix: None,
            layout: EmbeddingLayout::default(),
            batch_tokens: 2048,
            device: DeviceOption::default(),
        }
    }
}

/// The reasons why there are no embeddings.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// The encoder's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A required file is missing.
    #[error("encoder {}: no {file}; {remedy}", directory.display())]
    MissingFile {
        /// The encoder's directory.
        directory: PathBuf,
        /// The file.
        file: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A file asks for something that this encoder does not support.
    #[error("{}: {key} is {value}; {expected}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The key in it.
        key: String,
        /// Its value as JSON, or `not there`.
        value: String,
        /// The expectation and the remedy.
        expected: String,
    },
    /// The configuration does not fit the encoder.
    #[error("[encoder] {key} = {value}: {reason}")]
    Option {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The fault and the remedy.
        reason: String,
    },
    /// The weights are not of this architecture.
    #[error(
        "encoder {}: its weights do not fit config.json: {reason}; fetch the model again, with all its files from one \
         place",
        directory.display()
    )]
    Weights {
        /// The encoder's directory.
        directory: PathBuf,
        /// The mismatch.
        reason: String,
    },
    /// A text could not be tokenised.
    #[error("encoder: the tokenizer failed: {0}")]
    Tokenise(String),
    /// The forward failed.
    #[error("encoder: {0}; if memory ran out, lower [encoder] batch_tokens")]
    Forward(#[from] candle_core::Error),
    /// An embedding holds NaN or infinity.
    #[error(
        "encoder: the embedding of text {text} is not finite; the weights are damaged: fetch the encoder again and run \
         `laser doctor`"
    )]
    NotFinite {
        /// The text, counted from 1.
        text: usize,
    },
}

impl EncoderError {
    fn option(key: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self::Option { key, value: value.to_string(), reason: reason.into() }
    }
}

/// The embeddings of some texts.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// One row per text, in order.
    pub embeddings: Embeddings,
    /// Number of texts that were cut off.
    pub truncated: u64,
}

/// A loaded encoder. It can be shared between threads; one call uses all cores (or the GPU).
pub struct Encoder {
    model: BertModel,
    tokenizer: Tokenizer,
    info: EncoderInfo,
    batch_tokens: usize,
    padding: u32,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Encoder {
    /// Reads the weights. Memory is twice their size while loading, then once as f32.
    ///
    /// # Errors
    /// [`EncoderError`]: weights that do not fit config.json, or a missing device.
    pub fn load(files: &EncoderFiles) -> Result<Self, EncoderError> {
        let config = files.config();
        let device = device(config.device)?;
        let mut tokenizer = files.tokenizer().clone();
        let truncation = TruncationParams { max_length: files.info().max_tokens, ..TruncationParams::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(|e| EncoderError::Tokenise(e.to_string()))?;
        Ok(Self {
            model: bert::load(files, &device)?,
            tokenizer,
            info: files.info().clone(),
            batch_tokens: config.batch_tokens,
            padding: files.padding(),
        })
    }

    /// Returns what determines the embeddings.
    pub fn info(&self) -> &EncoderInfo {
        &self.info
    }

    /// Returns the embeddings of texts, one row per text in their order. Memory: also the tokens of all texts, and one
    /// batch.
    ///
    /// # Errors
    /// [`EncoderError::Forward`], [`EncoderError::NotFinite`].
    pub fn encode<T: AsRef<str>>(&self, texts: &[T]) -> Result<Encoded, EncoderError> {
        let (tokens, truncated) = self.tokenise(texts)?;
        let dimensions = self.info.dimensions;
        let mut values = vec![0.0; texts.len() * dimensions];
        for batch in batches(&tokens, self.batch_tokens) {
            let rows: Vec<&[u32]> = batch.iter().map(|&text| tokens[text].as_slice()).collect();
            let embedded = self.forward(&rows)?.flatten_all()?.to_vec1::<f32>()?;
            for (&text, row) in batch.iter().zip(embedded.chunks_exact(dimensions)) {
                if !row.iter().all(|value| value.is_finite()) {
                    return Err(EncoderError::NotFinite { text: text + 1 });
                }
                values[text * dimensions..][..dimensions].copy_from_slice(row);
            }
        }
        let embeddings = Embeddings::from_values(dimensions, values).unwrap_or_else(|| Embeddings::new(dimensions));
        Ok(Encoded { embeddings, truncated })
    }

    /// Returns the tokens of each text, and the number of texts that were cut off.
    fn tokenise<T: AsRef<str>>(&self, texts: &[T]) -> Result<(Vec<Vec<u32>>, u64), EncoderError> {
        let prefixed = texts.iter().map(|text| {
            let text = format!("{}{}", self.info.prefix, text.as_ref());
            match self.info.lower_case {
                true => text.to_lowercase(),
                false => text,
            }
        });
        let encodings = self
            .tokenizer
            .encode_batch_fast(prefixed.collect::<Vec<_>>(), true)
            .map_err(|e| EncoderError::Tokenise(e.to_string()))?;
        let cut = |e: &&tokenizers::Encoding| !e.get_overflowing().is_empty();
        let truncated = encodings.iter().filter(cut).count() as u64;
        let tokens = encodings.iter().map(|e| e.get_ids().to_vec()).collect();
        Ok((tokens, truncated))
    }

    /// Runs a batch and returns `[texts, dimensions]`.
    fn forward(&self, rows: &[&[u32]]) -> candle_core::Result<Tensor> {
        let length = rows.iter().map(|row| row.len()).max().unwrap_or_default();
        let mut ids = vec![self.padding; rows.len() * length];
        let mut mask = vec![0f32; rows.len() * length];
        for (index, row) in rows.iter().enumerate() {
            ids[index * length..][..row.len()].copy_from_slice(row);
            mask[index * length..][..row.len()].fill(1.0);
        }
        let device = &self.model.device;
        let ids = Tensor::from_vec(ids, (rows.len(), length), device)?;
        let mask = Tensor::from_vec(mask, (rows.len(), length), device)?;
        let hidden = self.model.forward(&ids, &ids.zeros_like()?, Some(&mask))?.to_dtype(DType::F32)?;
        let pooled = pool(&hidden, &mask, self.info.pooling)?;
        match self.info.normalise {
            true => normalised(&pooled),
            false => Ok(pooled),
        }
    }
}

/// Pools `hidden`, `[texts, tokens, dimensions]`, into one vector per text; `mask`, `[texts, tokens]`, is 1 for a token
/// and 0 for padding.
fn pool(hidden: &Tensor, mask: &Tensor, pooling: Pooling) -> candle_core::Result<Tensor> {
    match pooling {
        Pooling::Cls => hidden.narrow(1, 0, 1)?.squeeze(1),
        Pooling::Mean => {
            let sum = hidden.broadcast_mul(&mask.unsqueeze(2)?)?.sum(1)?;
            sum.broadcast_div(&mask.sum_keepdim(1)?)
        }
    }
}

/// Divides rows by their Euclidean length.
fn normalised(rows: &Tensor) -> candle_core::Result<Tensor> {
    let length = rows.sqr()?.sum_keepdim(1)?.sqrt()?;
    rows.broadcast_div(&length.maximum(LENGTH_MIN)?)
}

/// Batches texts of similar length, the longest first, with at most `batch_tokens` tokens including padding.
fn batches(tokens: &[Vec<u32>], batch_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&text| std::cmp::Reverse(tokens[text].len()));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for text in order {
        match batches.last_mut() {
            Some(batch) if tokens[batch[0]].len() * (batch.len() + 1) <= batch_tokens => {
                batch.push(text);
            }
            _ => batches.push(vec![text]),
        }
    }
    batches
}

fn device(option: DeviceOption) -> Result<Device, EncoderError> {
    match option {
        DeviceOption::Cpu => Ok(Device::Cpu),
        DeviceOption::Cuda(index) => {
            Device::new_cuda(index).map_err(|error| EncoderError::option("device", option, error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests;
