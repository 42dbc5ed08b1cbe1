//! Texts to vectors: encoders of the BERT family, as sentence-transformers runs them.
//!
//! A text is tokenised (cut off at `max_tokens`), run through the encoder in f32, and its token vectors are pooled and,
//! if asked for, normalised. Texts are batched by length, so little is padded; a text's embedding does not depend on
//! its batch but for rounding (below 1e-6 on CPUs), and embeddings come back in the order of the texts.
//!
//! [`EncoderFiles`] finds out what an encoder is, and reads no weights but for their digest; [`Encoder`] is loaded.

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

/// What a division by the length of a vector of zeros divides by, as in torch's `normalize`.
const LENGTH_MIN: f64 = 1e-12;

/// `[encoder]`: which encoder, and how it is used. What is not set is what the encoder's own files say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncoderConfig {
    /// A directory (config.json, tokenizer.json, *.safetensors), a hub id, or the URL of such a directory.
    pub path: String,
    /// How token vectors become one; what 1_Pooling/config.json says, or the mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// Whether embeddings have length 1; if modules.json has a Normalize.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalise: Option<bool>,
    /// Tokens of a text that are read; max_seq_length of sentence_bert_config.json, or all that the model has positions
    /// for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// What stands before every text (e5 wants `"query: "` or `"passage: "`); the default prompt of
    /// config_sentence_transformers.json, or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// The type of the output's column.
    pub layout: EmbeddingLayout,
    /// Tokens of a batch at most, padding included; a text longer than that is a batch of its own.
    pub batch_tokens: usize,
    /// Where to run.
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

/// Why there are no embeddings.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// The encoder's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file that is needed is not there.
    #[error("encoder {}: no {file}; {remedy}", directory.display())]
    MissingFile {
        /// The encoder's directory.
        directory: PathBuf,
        /// The file.
        file: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A file says something that this encoder cannot do.
    #[error("{}: {key} is {value}; {expected}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The key in it.
        key: String,
        /// Its value as JSON, or `not there`.
        value: String,
        /// What was expected and what to do.
        expected: String,
    },
    /// The configuration does not fit the encoder.
    #[error("[encoder] {key} = {value}: {reason}")]
    Option {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The weights are not those of this architecture.
    #[error(
        "encoder {}: its weights do not fit config.json: {reason}; fetch the model again, with all its files from one \
         place",
        directory.display()
    )]
    Weights {
        /// The encoder's directory.
        directory: PathBuf,
        /// What did not fit.
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

/// The embeddings of some texts.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// A row for each text, in order.
    pub embeddings: Embeddings,
    /// Texts that were cut off.
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
    /// Reads the weights: memory is twice their size while loading, then once as f32.
    ///
    /// # Errors
    /// [`EncoderError`]: weights that do not fit config.json, a device that is not there.
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

    /// What decides the embeddings.
    pub fn info(&self) -> &EncoderInfo {
        &self.info
    }

    /// The embeddings of texts, a row each, in their order. Memory besides: the tokens of all, and one batch.
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

    /// The tokens of each text, and how many texts were cut off.
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

    /// `[texts, dimensions]` of a batch.
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

/// One vector a text from `hidden`, `[texts, tokens, dimensions]`, and `mask`, `[texts, tokens]`: 1 for a token, 0 for
/// padding.
fn pool(hidden: &Tensor, mask: &Tensor, pooling: Pooling) -> candle_core::Result<Tensor> {
    match pooling {
        Pooling::Cls => hidden.narrow(1, 0, 1)?.squeeze(1),
        Pooling::Mean => {
            let sum = hidden.broadcast_mul(&mask.unsqueeze(2)?)?.sum(1)?;
            sum.broadcast_div(&mask.sum_keepdim(1)?)
        }
    }
}

/// Rows divided by their Euclidean length.
fn normalised(rows: &Tensor) -> candle_core::Result<Tensor> {
    let length = rows.sqr()?.sum_keepdim(1)?.sqrt()?;
    rows.broadcast_div(&length.maximum(LENGTH_MIN)?)
}

/// Texts of like length together, the longest first, `batch_tokens` at most with padding.
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
        DeviceOption::Cuda(index) => Device::new_cuda(index).map_err(|error| EncoderError::Option {
            key: "device",
            value: option.to_string(),
            reason: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests;
