//! Everything that reads and writes: locations, tables, joins that spill to the local disk, published data sets, and
//! what a run keeps beside them.

mod batch;
pub mod cache;
pub mod catalogue;
mod cells;
pub mod data_set;
pub mod embedding_column;
pub mod embedding_set;
pub mod embeddings;
pub mod entities;
pub mod erase;
mod histories;
pub mod id_list;
pub mod id_set;
pub mod interactions;
pub mod join;
mod lists;
pub mod location;
pub mod map;
pub mod parallel;
pub mod parsed_column;
pub mod part;
pub mod previous;
pub mod promotions;
pub mod rows;
pub mod run_store;
pub mod sealed;
pub mod sequences;
pub mod shard;
pub mod spill;
pub mod table;
pub mod unique;
pub mod user_items;

pub use cache::Cache;
pub use entities::{EntityReader, TablesReader};
pub use location::{Location, LocationError, StoreError};
pub use rows::RowError;
