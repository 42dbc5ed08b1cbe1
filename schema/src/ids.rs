//! Knowledge ids: a data set that `laser ids` makes. `docs/output.md` lists the columns.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::EntityId;
use crate::knowledge::ratio;
use crate::layout::DataSet;
use crate::manifest::{Details, Source};

/// The version of the codebook's file.
pub const CODEBOOK_VERSION: u32 = 1;

/// The codebook's file in the folder of a run; readers of data sets ignore names that start with `_`.
pub const CODEBOOK: &str = "_codebook.safetensors";

/// The ids of one entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRecord {
    /// The entity, in the input's id type.
    pub entity_id: EntityId,
    /// For each codebook and in it for each level: the number of the nearest centroid, from 0.
    pub knowledge_ids: Vec<i64>,
    /// The night the record stands for.
    pub event_timestamp: Timestamp,
    /// When the codebook was made.
    pub created_timestamp: Timestamp,
}

/// The details of a manifest of knowledge ids, whose `created` is when the codebook was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IdSet {
    /// Where the embeddings are from.
    pub source: Source,
    /// How the codebook was fitted.
    pub codebook: CodebookEntry,
    /// Mean squared distance of all embeddings to what their ids stand for, as the codebook scales them.
    pub distortion: f64,
    /// Against the night before; none without one.
    pub churn: Option<Churn>,
}

impl Details for IdSet {
    const DATA_SETS: &'static [DataSet] = &[DataSet::KnowledgeIds];

    fn data_set(&self) -> DataSet {
        DataSet::KnowledgeIds
    }
}

/// A codebook as a manifest names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodebookEntry {
    /// Digest of the file's bytes.
    pub digest: Digest,
    /// The codebook's own description.
    #[serde(flatten)]
    pub info: CodebookInfo,
}

/// The shape of a codebook and the fit it came from. A *place* is one of the `codebooks * levels` ids of an entity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodebookInfo {
    /// [`CODEBOOK_VERSION`].
    pub version: u32,
    /// When it was made.
    pub created: Timestamp,
    /// Digest of the encoder whose embeddings it was fitted on, where that is known.
    pub encoder: Option<Digest>,
    /// Digest of the codebook it was begun with; none for the first.
    pub parent: Option<Digest>,
    /// Whether the parent's centroids were kept, since fitting them again gained too little.
    pub kept: bool,
    /// Values of an embedding.
    pub dimension: usize,
    /// Whether embeddings are scaled to length 1.
    pub normalise: bool,
    /// Equal parts that an embedding is cut into.
    pub codebooks: usize,
    /// Ids of each part: all but the first are of what the ones before leave over.
    pub levels: usize,
    /// How many centroids, and so ids, there are at each place.
    pub clusters: usize,
    /// The seed of the sample and of the first centroids.
    pub seed: u64,
    /// How many embeddings it was fitted on.
    pub fitted_on: u64,
    /// Mean squared distance of these to their mean: what one centroid alone would leave.
    pub variance: f64,
    /// By level: mean squared distance of these to what the ids up to this level stand for.
    pub inertia: Vec<f64>,
    /// By place: centroids that are nearest to none of these.
    pub empty: Vec<u64>,
    /// By place: root mean squared distance of the centroids to those of the parent; empty without one.
    pub drift: Vec<f64>,
}

impl CodebookInfo {
    /// Ids of an entity.
    pub fn places(&self) -> usize {
        self.codebooks * self.levels
    }
}

/// How many entities' ids are not those of the night before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Churn {
    /// The folder of the night before, below the output's root.
    pub previous: String,
    /// Entities of that night that were looked at: all, or a seeded sample.
    pub looked_at: u64,
    /// How many of them are still there tonight.
    pub common: u64,
    /// How many of the common ones have any other id.
    pub changed: u64,
    /// The same by place in `knowledge_ids`.
    pub changed_by_place: Vec<u64>,
}

impl Churn {
    /// Share of the entities that are there on both nights and have any other id; 0 without such entities.
    pub fn share(&self) -> f64 {
        ratio(self.changed as f64, self.common as f64)
    }
}
