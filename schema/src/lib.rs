//! The contract: every type that crosses a process or a night. Entities in, jobs between coordinator and worker,
//! knowledge records and manifests out.
//!
//! This crate reads and writes nothing, and decides nothing.

pub mod audit;
pub mod canary;
pub mod constraint;
pub mod device;
pub mod digest;
pub mod embedding;
pub mod embedding_set;
pub mod entity;
pub mod erasure;
pub mod estimate;
pub mod guard;
pub mod history;
pub mod ids;
pub mod interactions;
pub mod job;
pub mod knowledge;
pub mod layout;
pub mod lists;
pub mod manifest;
pub mod parsed;
pub mod progress;
pub mod sample;
pub mod value;

pub use constraint::Constraint;
pub use device::DeviceOption;
pub use digest::Digest;
pub use embedding::{EmbeddingLayout, EmbeddingSpec, Embeddings, EncoderInfo, Pooling};
pub use entity::{Columns, Entity, EntityId, EntityTable, Kind};
pub use history::{History, Interaction};
pub use progress::Progress;
