//! Recommender models that Laser trains itself: collaborative embeddings (LightGCN) and the CTR models of the evidence
//! (DIN, DCNv2).
//!
//! Users and items are indices from 0; tables and ids belong to the caller. Everything is a function of the data, the
//! configuration and the seed, whatever the number of threads: sums run in a fixed order.

pub mod ctr;
mod graph;
pub mod lightgcn;
pub mod ranking;
pub mod statistics;

/// A user and an item that the user interacted with, as indices.
pub type Edge = (u32, u32);
