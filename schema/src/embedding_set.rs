//! Embeddings without their texts: what `laser encode` writes, finds again, and checks.
//!
//! A data set of an output beside the texts, `embeddings/kind=…/dt=…/run=…`, with the same rules: parts are created
//! once, `_manifest.json` and then `_SUCCESS` come last. `docs/output.md` lists the columns.

use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::embedding::EmbeddingInfo;
use crate::entity::{EntityId, Kind};
use crate::manifest::PartEntry;

/// The version of the columns and of [`EmbeddingManifest`].
pub const EMBEDDINGS_VERSION: u32 = 1;

/// An entity of a part; its embedding stands in a column of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddedEntity {
    /// The entity, in the source's id type.
    pub entity_id: EntityId,
    /// The night that its text stands for.
    pub event_timestamp: Timestamp,
    /// When its text was generated, where the source tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_timestamp: Option<Timestamp>,
}

/// What a part says about itself in its footer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingPart {
    /// [`EMBEDDINGS_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The version of Laser that wrote it.
    pub writer: String,
    /// What made the embeddings, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
    /// Of the rows but for their embeddings.
    pub rows_digest: Digest,
    /// [`Embeddings::digest`].
    pub embeddings_digest: Digest,
}

/// Where the texts are from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextSource {
    /// The folder or file.
    pub path: String,
    /// Digest of what it held.
    pub digest: Digest,
}

/// What a data set of embeddings holds and how it came to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingManifest {
    /// [`EMBEDDINGS_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The night of the texts.
    pub date: Date,
    /// The version of Laser.
    pub writer: String,
    /// Where the texts are from.
    pub source: TextSource,
    /// What made the embeddings, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
    /// Rows of all parts.
    pub rows: u64,
    /// The parts, by name.
    pub parts: Vec<PartEntry>,
}
