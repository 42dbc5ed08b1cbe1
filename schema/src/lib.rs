//! Everything in Laser that crosses a process or a night: entities in, jobs between coordinator and
//! worker, knowledge records and manifests out, and the places they live in.
//!
//! Only this crate (and each crate's own configuration) serialises. It generates nothing and decides nothing.

pub mod audit;
pub mod cache;
pub mod device;
pub mod digest;
pub mod embedding;
pub mod embedding_set;
pub mod embedding_table;
pub mod entity;
pub mod guard;
pub mod ids;
pub mod interactions;
pub mod job;
pub mod join;
pub mod knowledge;
pub mod layout;
pub mod location;
pub mod manifest;
pub mod model;
pub mod previous;
pub mod rows;
pub mod sample;
pub mod spill;
pub mod table;
pub mod verify;

pub use cache::Cache;
pub use device::DeviceOption;
pub use digest::Digest;
pub use embedding::{EmbeddingLayout, EmbeddingSpec, Embeddings, EncoderInfo, Pooling};
pub use entity::{Columns, Entity, EntityError, EntityId, EntityReader, EntityTable, Interaction, Kind};
pub use location::{Location, LocationError, StoreError};
