//! Why pools could not be built, opened or tuned.

use laser_decode::PoolError;
use laser_store::cache::CacheError;
use laser_store::join::JoinError;
use laser_store::spill::SpillError;
use laser_store::{Location, LocationError};

/// Why pools could not be built, opened or tuned.
#[derive(Debug, thiserror::Error)]
pub enum PoolsError {
    /// The entity tables, and what belongs to their rows.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// Embeddings that are not in the entity table.
    #[error(transparent)]
    Embeddings(#[from] laser_store::embeddings::EmbeddingError),
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
    /// The configuration, the entities or the previous texts are not what is needed.
    #[error("{0}")]
    Input(String),
    /// A folder or one of its files is not the pool set it should be, or cannot be written.
    #[error("{file}: {reason}")]
    PoolSet {
        /// The folder or file.
        file: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The caller's reader of previous texts failed.
    #[error("previous texts: {0}")]
    Previous(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The tokenizer failed.
    #[error("tokenising previous texts: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl PoolsError {
    /// A folder or file that is not what it should be.
    pub(crate) fn at(place: &Location, reason: String) -> Self {
        Self::PoolSet { file: place.url().to_owned(), reason }
    }
}
