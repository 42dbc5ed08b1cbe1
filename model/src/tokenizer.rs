//! The model's tokenizer: text to ids and back.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::cuts::Ends;
use super::{ModelError, corrupt, io_error};

/// A tokenizer that neither truncates nor pads. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    vocab_size: usize,
    fingerprint: [u8; 32],
    /// What is put around texts that may be cut, if they may.
    ends: Option<Arc<Ends>>,
}

impl Tokenizer {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// A file that cannot be read or is not a tokenizer.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = std::fs::read(path).map_err(|e| io_error(path, e))?;
        let mut json: Value = serde_json::from_slice(&bytes).map_err(|e| corrupt(path, format!("not JSON: {e}")))?;
        json.sort_all_objects();
        let fingerprint = *blake3::hash(json.to_string().as_bytes()).as_bytes();
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| corrupt(path, format!("not a tokenizer: {e}")))?;
        inner.with_padding(None).with_truncation(None).map_err(|e| corrupt(path, e))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.map_or(0, |id| id as usize + 1);
        Ok(Self { inner: Arc::new(inner), vocab_size, fingerprint, ends: Ends::of(&json).map(Arc::new) })
    }

    /// The ids of a text. `add_special_tokens` adds what the tokenizer puts around a text, usually the
    /// beginning-of-text token.
    ///
    /// # Errors
    /// [`ModelError::Tokenize`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, add_special_tokens);
        Ok(encoding.map_err(refused)?.get_ids().to_vec())
    }

    /// The ids of several texts, on all cores.
    ///
    /// # Errors
    /// [`ModelError::Tokenize`].
    pub fn encode_batch(&self, texts: &[&str], add_special_tokens: bool) -> Result<Vec<Vec<u32>>, ModelError> {
        let encodings = self.inner.encode_batch_fast(texts.to_vec(), add_special_tokens);
        let encodings = encodings.map_err(refused)?;
        Ok(encodings.iter().map(|e| e.get_ids().to_vec()).collect())
    }

    /// The text of ids, without special tokens.
    ///
    /// # Errors
    /// [`ModelError::Tokenize`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(refused)
    }

    pub(super) fn ends(&self) -> Option<&Ends> {
        self.ends.as_deref()
    }

    /// One more than the largest id, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokenizer as its own library knows it, for batch work.
    pub fn library(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// BLAKE3 of tokenizer.json as JSON: whitespace and the order of keys do not count.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// The id of a token's text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}

fn refused(error: tokenizers::Error) -> ModelError {
    ModelError::Tokenize { reason: error.to_string() }
}
