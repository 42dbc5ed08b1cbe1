//! Why pools could not be built, opened or tuned.

use laser_decode::PoolError;
use laser_schema::{EntityId, Kind};
use laser_store::LocationError;
use laser_store::cache::CacheError;
use laser_store::join::JoinError;
use laser_store::spill::SpillError;

use crate::clusters::ClusterError;
use crate::config::ConfigError;

/// Why pools could not be built, opened or tuned.
#[derive(Debug, thiserror::Error)]
pub enum PoolsError {
    /// A configured value makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The entity tables, and what belongs to their rows.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// Embeddings that are not in the entity table.
    #[error(transparent)]
    Embeddings(#[from] laser_store::embeddings::EmbeddingError),
    /// K-means.
    #[error(transparent)]
    Clusters(#[from] ClusterError),
    /// The location of the pools.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The local copies of remote pools.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Building a pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A file does not hold the pool it should.
    #[error("{file}: {source}")]
    PoolFile {
        /// The file.
        file: String,
        /// What is wrong.
        source: PoolError,
    },
    /// The tables are empty.
    #[error("no entities in {tables}; there is nothing to group")]
    NoEntities {
        /// The tables.
        tables: String,
    },
    /// Nothing to cluster.
    #[error(
        "[pools.{kind}] grouping = \"collaborative\": none of {entities} {kind}s has an embedding; \
         set [pools.{kind}] embeddings or the table's embedding column, or group by attribute"
    )]
    NoEmbeddings {
        /// The kind.
        kind: Kind,
        /// Number of entities of the kind.
        entities: u64,
    },
    /// Embeddings of more than one dimension.
    #[error("{table}: embedding of {kind} {id} has {found} values, expected {expected} as in those before, at least 1")]
    Dimension {
        /// The table.
        table: String,
        /// The kind.
        kind: Kind,
        /// The entity.
        id: EntityId,
        /// The dimension of the first.
        expected: usize,
        /// Its own.
        found: usize,
    },
    /// The attribute exists for no entity.
    #[error("[pools.{kind}] attributes: no {kind} has {attribute:?}; they have: {available}")]
    UnknownAttribute {
        /// The kind.
        kind: Kind,
        /// As configured.
        attribute: String,
        /// The attributes there are.
        available: String,
    },
    /// The caller's reader of previous texts failed.
    #[error("previous texts: {0}")]
    Previous(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The tokenizer failed.
    #[error("tokenising previous texts: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Writing `pools.json` failed.
    #[error("{file}: cannot be written: {reason}")]
    Encode {
        /// The file.
        file: String,
        /// The encoder's error.
        reason: String,
    },
    /// There is no finished set.
    #[error("{dir}: no pools.json, so there is no finished set of pools; build it with `laser pool-builder`")]
    NoPoolSet {
        /// The folder.
        dir: String,
    },
    /// `pools.json` is not one.
    #[error("{file}: not a set of pools: {reason}; rebuild the pools")]
    PoolSet {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The set was built with another tokenizer than the model's.
    #[error(
        "{file}: the pools were built with tokenizer {found}, the model's is {expected}; rebuild them \
         with this model's tokenizer"
    )]
    OtherTokenizer {
        /// The file.
        file: String,
        /// The model's.
        expected: String,
        /// The pools'.
        found: String,
    },
    /// A pool file is not the one that `pools.json` was written with.
    #[error("{file}: digest {found}, but pools.json has {expected}; rebuild the pools")]
    Digest {
        /// The file.
        file: String,
        /// In `pools.json`.
        expected: String,
        /// The file's.
        found: String,
    },
    /// Tuning has an impossible option.
    #[error("pools tune: {option} must be {expected}, got {found}")]
    Tune {
        /// The option.
        option: &'static str,
        /// Its range.
        expected: &'static str,
        /// Its value.
        found: String,
    },
}
