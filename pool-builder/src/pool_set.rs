//! `pools.json`: what a folder of pools holds, who belongs to which, and how that came about.
//!
//! It is written last and so commits the folder; it depends on nothing but the inputs, so the same
//! inputs give the same bytes.

use std::collections::BTreeMap;

use laser_schema::{Digest, Kind};
use serde::{Deserialize, Serialize};

use crate::clusters::Clustering;
use crate::config::PoolsConfig;
use crate::router::Router;

/// The version of `pools.json` that this build reads and writes.
pub const POOL_SET_VERSION: u32 = 1;
/// The name of the file that commits a folder of pools.
pub const POOL_SET_FILE: &str = "pools.json";
/// The name of the table of every entity's pool.
pub const ASSIGNMENTS_FILE: &str = "assignments.parquet";

/// A set of pools and the routers that lead to them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolSet {
    /// [`POOL_SET_VERSION`].
    pub version: u32,
    /// Fingerprint of the tokenizer of all pools.
    pub tokenizer: Digest,
    /// The configuration the pools were built with.
    pub config: PoolsConfig,
    /// The previous texts that were read.
    pub texts: TextCounts,
    /// By kind; a kind without entities has no entry.
    pub kinds: BTreeMap<Kind, KindGroups>,
    /// All pools, users' first. Empty without previous texts: a cold start.
    pub pools: Vec<PoolEntry>,
}

/// The entities of one kind and their groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindGroups {
    /// How many entities there are.
    pub entities: u64,
    /// Decides the pool of each of them, and of those to come.
    pub router: Router,
    /// By group, in the router's order.
    pub statistics: Vec<GroupStatistics>,
    /// How the clusters came about, if there are any.
    pub clustering: Option<Clustering>,
    /// The embeddings, if clusters were asked for.
    pub embeddings: Option<EmbeddingCounts>,
}

/// How many belong to a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatistics {
    /// Entities that belong to it; an entity belongs to up to three groups.
    pub entities: u64,
    /// Entities whose pool it is; an entity has one.
    pub routed: u64,
    /// Previous texts of its entities, before sampling.
    pub texts: u64,
}

/// What became of the embeddings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingCounts {
    /// The file, or none for the entity table's own column.
    pub file: Option<String>,
    /// Values in each.
    pub dimension: usize,
    /// Entities that have one.
    pub entities: u64,
    /// Embeddings in the file whose id no entity has.
    pub unknown: u64,
}

/// What became of the previous texts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextCounts {
    /// All that were read.
    pub read: u64,
    /// Those without any character but white space; not used.
    pub empty: u64,
    /// Those whose entity is in no table; used in the pool of all texts of the kind only.
    pub without_entity: u64,
    /// Those of a kind of which there is no entity; not used.
    pub of_other_kind: u64,
}

/// One pool file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolEntry {
    /// The pool's name.
    pub name: String,
    /// The kind of its texts' entities.
    pub kind: Kind,
    /// The file's name in the folder.
    pub file: String,
    /// The pool's digest.
    pub digest: Digest,
    /// Texts in it.
    pub texts: usize,
    /// Tokens in it, the ends of texts included.
    pub tokens: usize,
    /// The file's size.
    pub bytes: usize,
    /// Entities whose pool it is.
    pub members: u64,
}

impl PoolSet {
    /// The router of a kind, if the pools were built with entities of it.
    pub fn router(&self, kind: Kind) -> Option<&Router> {
        self.kinds.get(&kind).map(|groups| &groups.router)
    }
}
