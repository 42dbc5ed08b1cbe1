//! Embeddings without their texts: a data set that `laser encode` makes. `docs/output.md` lists the columns.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::embedding::EmbeddingInfo;
use crate::entity::{EntityId, Kind};
use crate::layout::DataSet;
use crate::manifest::{Details, Source};

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

/// The footer of a part: how its embeddings were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingPart {
    /// [`SCHEMA_VERSION`](crate::knowledge::SCHEMA_VERSION).
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The version of Laser that wrote it.
    pub writer: String,
    /// The encoder, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
}

/// The details of a manifest of embeddings, whose `created` is when the newest of the texts was generated or, where
/// that is not known, when their file was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingSet {
    /// Where the texts are from.
    pub source: Source,
    /// The encoder, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
}

impl Details for EmbeddingSet {
    const DATA_SETS: &'static [DataSet] = &[DataSet::Embeddings];

    fn data_set(&self) -> DataSet {
        DataSet::Embeddings
    }
}
