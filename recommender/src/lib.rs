//! Recommender models that Laser trains itself: collaborative embeddings (LightGCN) and the CTR models of the
//! evidence (DIN, DCNv2); and the passes `laser embed` and `laser eval`, which bring tables to them.
//!
//! To the models, users and items are indices from 0 and files are unknown: only [`embed`] and [`evaluate`] read and
//! write. Everything is a function of the data, the configuration and the seed, whatever the number of threads: sums
//! run in a fixed order.

pub mod ctr;
pub mod embed;
pub mod evaluate;
mod graph;
pub mod lightgcn;
pub mod lists;
pub mod ranking;
pub mod statistics;

/// A user and an item that the user interacted with, as indices.
pub type Edge = (u32, u32);

/// Vectors of all users and items, which training makes and ranking judges.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    /// Values of a vector.
    pub dimension: usize,
    /// One row per user, row-major.
    pub users: Vec<f32>,
    /// One row per item, row-major.
    pub items: Vec<f32>,
}
