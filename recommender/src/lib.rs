//! Recommender models that Laser trains itself: collaborative embeddings (LightGCN) and the CTR models of the
//! evidence (DIN, DCNv2); and the passes `laser embed` and `laser eval`, which bring tables to them.
//!
//! To the models, users and items are indices from 0 and files are unknown: only [`embed`] and [`evaluate`] read and
//! write. Everything is a function of the data, the configuration and the seed, whatever the number of threads: sums
//! run in a fixed order.

pub mod ctr;
pub mod embed;
mod embeddings;
pub mod evaluate;
mod graph;
pub mod lightgcn;
pub mod ranking;
pub mod statistics;

pub use embeddings::Embeddings;

/// A user and an item that the user interacted with, as indices.
pub type Edge = (u32, u32);

/// A key of the configuration whose value makes no sense, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub(crate) String);
