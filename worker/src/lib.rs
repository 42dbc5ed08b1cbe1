//! The worker leases shards, generates their texts with tree speculation, and commits one Parquet part per shard.

pub mod budget;
mod calibration;
pub mod cost;
pub mod error;
pub mod generate;
pub mod lists;
#[cfg(feature = "mistralrs")]
pub mod plain;
pub mod progress;
pub mod run;
pub mod telemetry;

mod audit;
mod catalogue;
mod part;
