//! Pools of previous knowledge: entities are grouped, each group's previous texts become a pool to draft from, and a
//! router assigns every entity, including new ones, to its pool (LASER 3.2).
//!
//! [`build_pools`] writes a folder of pools, and [`OpenPools`] opens it. [`tune()`] finds the fastest pool size,
//! [`inspect()`] lists the contents of pools, and [`replay()`] measures drafting without a model. [`PoolRegistry`]
//! manages the sets of an output and which of them is promoted. Everything except measured times is a function of the
//! inputs and the seed.

mod attribute_tree;
mod build;
mod clusters;
mod config;
mod embeddings;
mod error;
mod fit;
mod grouped;
mod inspect;
mod open;
mod pool_set;
mod purge;
mod registry;
mod replay;
mod router;
mod texts;
mod tune;

pub use build::{build_pools, clear_pools};
pub use clusters::{ClusterCandidate, Clustering};
pub use config::{Attributes, Best, Clusters, Grouping, GroupingConfig, KMeansConfig, PoolsConfig};
pub use embeddings::{embedding_fingerprints, join_embeddings};
pub use error::PoolsError;
pub use inspect::{Branch, GroupInspection, Inspection, KindInspection, PoolInspection, inspect};
pub use open::OpenPools;
pub use pool_set::{
    EmbeddingCounts, GroupStatistics, KindGroups, POOL_SET_FILE, POOL_SET_VERSION, PoolEntry, PoolSet, TextCounts,
};
pub use purge::{POOL_SOURCES_FILE, TextCounter, find_texts, purge_texts, read_pool_set, read_sources, write_sources};
pub use registry::{POOLS_FOLDER, PoolPromotion, PoolRegistry, PromotedPools, RegistryError};
pub use replay::{RELIABILITY_BINS, ReliabilityBin, ReplayReport, ReplayText, replay};
pub use router::{Group, Router};
pub use texts::{PoolTokenizer, ReadError};
pub use tune::{GroupTuning, KindTuning, TuneConfig, TuneReport, TuneRow, tune};

/// Is told how far a build or a tuning is, at most once per batch: how much is done, of how much if that is known, and
/// what is being done.
pub type Progress<'a> = &'a mut (dyn FnMut(u64, Option<u64>, &'static str) + Send);

#[cfg(test)]
mod tests;
