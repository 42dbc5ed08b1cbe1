//! Embeddings of texts: the values, and what must be known of the encoder that made them.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// The column of embeddings.
pub const EMBEDDING_COLUMN: &str = "embedding";

/// How the vectors of a text's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The mean over all tokens of the text, special tokens included.
    Mean,
    /// That of the first token, `[CLS]`.
    Cls,
}

/// The column's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingLayout {
    /// `FixedSizeList<Float32>`: the dimension is part of the type.
    #[default]
    Fixed,
    /// `List<Float32>`, for readers that know no fixed-size lists.
    List,
}

/// Everything that decides the embedding of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EncoderInfo {
    /// Digest of the weights and of config.json.
    pub model: Digest,
    /// Fingerprint of the tokenizer.
    pub tokenizer: Digest,
    /// How token vectors become one.
    pub pooling: Pooling,
    /// Whether embeddings have length 1 (the Euclidean norm).
    pub normalise: bool,
    /// Tokens of a text that are read, special tokens included; the rest is cut off.
    pub max_tokens: usize,
    /// The words put before every text.
    pub prefix: String,
    /// Whether texts are turned to lower case before they reach the tokenizer.
    pub lower_case: bool,
    /// Values of an embedding.
    pub dimensions: usize,
}

impl EncoderInfo {
    /// Equal digests: equal embeddings of equal texts, up to the rounding of other devices and batches.
    pub fn digest(&self) -> Digest {
        Digest::of_json(self)
    }
}

/// The embeddings that a run's output has: part of its plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingSpec {
    /// The encoder that makes them.
    pub encoder: EncoderInfo,
    /// The type of their column.
    pub layout: EmbeddingLayout,
}

/// How the embeddings of a part or data set were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingInfo {
    /// The encoder and the type of the column.
    #[serde(flatten)]
    pub spec: EmbeddingSpec,
    /// [`EncoderInfo::digest`].
    pub encoder_digest: Digest,
    /// Texts that were cut off.
    pub truncated: u64,
}

impl EmbeddingInfo {
    /// Describes embeddings made as `spec` says.
    pub fn new(spec: EmbeddingSpec, truncated: u64) -> Self {
        Self { encoder_digest: spec.encoder.digest(), spec, truncated }
    }
}

/// Vectors of one dimension, row after row.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    dimensions: usize,
    values: Vec<f32>,
}

/// The cosine of the angle between two vectors; 0 where one of them is zero.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { dot(a, b) / lengths } else { 0.0 }
}

impl Embeddings {
    /// No rows yet, of vectors of `dimensions` values.
    pub fn new(dimensions: usize) -> Self {
        Self { dimensions, values: Vec::new() }
    }

    /// Rows from their values one after the other; `None` if the last one is not whole.
    pub fn from_values(dimensions: usize, values: Vec<f32>) -> Option<Self> {
        let is_whole = dimensions > 0 && values.len().is_multiple_of(dimensions);
        is_whole.then_some(Self { dimensions, values })
    }

    /// Appends one row.
    ///
    /// # Panics
    /// If it has another number of values.
    pub fn push(&mut self, row: &[f32]) {
        assert_eq!(row.len(), self.dimensions, "a row has as many values as the matrix has columns");
        self.values.extend_from_slice(row);
    }

    /// Values of a row.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.values.len() / self.dimensions.max(1)
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// One row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.dimensions..(row + 1) * self.dimensions]
    }

    /// All rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.dimensions.max(1))
    }

    /// All values, row after row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Embeddings that are not in the entity table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected { npy = …, ids = …, skip_rows = 0 } or { table = …, id = \"id\", embedding = \"embedding\" }"
)]
pub enum EmbeddingSource {
    /// A matrix and the ids of its rows.
    Npy {
        /// A `.npy` file of float32 or float64, shape [rows, dimension].
        npy: String,
        /// A text file of one entity id a line, in the order of the rows.
        ids: String,
        /// Rows of padding before the first entity's.
        #[serde(default)]
        skip_rows: usize,
    },
    /// A Parquet, CSV or JSONL table.
    Table {
        /// Where it is.
        table: String,
        /// The name of its id column.
        #[serde(default = "id_column")]
        id: String,
        /// The name of its embedding column, a list of floats.
        #[serde(default = "embedding_column")]
        embedding: String,
    },
}

fn id_column() -> String {
    "id".to_owned()
}

fn embedding_column() -> String {
    "embedding".to_owned()
}
