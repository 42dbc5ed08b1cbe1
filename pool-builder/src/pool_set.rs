//! `pools.json`: the contents of a folder of pools, the members of each pool, and how they were chosen.
//!
//! It is written last and so commits the folder. It depends only on the inputs, so the same inputs give the same bytes.

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
    /// The groups per kind; a kind without entities has no entry.
    pub kinds: BTreeMap<Kind, KindGroups>,
    /// All pools, users' first. Empty without previous texts (a cold start).
    pub pools: Vec<PoolEntry>,
}

/// The entities of one kind and their groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindGroups {
    /// Number of entities.
    pub entities: u64,
    /// Decides the pool of each entity, present and future.
    pub router: Router,
    /// Statistics per group, in the router's order.
    pub statistics: Vec<GroupStatistics>,
    /// How the clusters were chosen, if there are any.
    pub clustering: Option<Clustering>,
    /// The embeddings, if clusters were asked for.
    pub embeddings: Option<EmbeddingCounts>,
}

/// The sizes of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatistics {
    /// Number of entities that belong to it; an entity belongs to up to three groups.
    pub entities: u64,
    /// Number of entities routed to its pool; an entity has one pool.
    pub routed: u64,
    /// Number of previous texts of its entities, before sampling.
    pub texts: u64,
}

/// How the embeddings were used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingCounts {
    /// The file, or none for the entity table's own column.
    pub file: Option<String>,
    /// Number of values per embedding.
    pub dimension: usize,
    /// Number of entities that have an embedding.
    pub entities: u64,
    /// Number of embeddings in the file whose id no entity has.
    pub unknown: u64,
}

/// How the previous texts were used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextCounts {
    /// Number of texts read.
    pub read: u64,
    /// Texts of only white space; not used.
    pub empty: u64,
    /// Texts whose entity is in no table; used only in the pool of all texts of the kind.
    pub without_entity: u64,
    /// Texts of a kind that has no entities; not used.
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
    /// Number of texts.
    pub texts: usize,
    /// Number of tokens, including the ends of texts.
    pub tokens: usize,
    /// The file's size.
    pub bytes: usize,
    /// Number of entities routed to it.
    pub members: u64,
}
