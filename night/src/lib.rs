//! A night from its configuration to published data: in one process ([`Night::run`]) or on many machines
//! ([`distributed`]).
//!
//! [`encode`] and [`ids`] make embeddings and knowledge ids of what is published, [`train`] a draft model.
//!
//! Nothing here prints. What a night is at is told to a [`Progress`], how it ended is an [`Outcome`].

pub mod config;
mod counted;
pub mod deadline;
pub mod demo;
pub mod derived;
pub mod distributed;
pub mod doctor;
pub mod embedding_source;
pub mod encode;
pub mod encoder;
pub mod erasure;
pub mod failure;
mod generator;
pub mod ids;
mod lists;
mod model;
mod night;
pub mod outputs;
pub mod pool_sets;
mod previous;
mod progress;
pub mod recommender;
pub mod retention;
pub mod status;
pub mod telemetry;
pub mod train;

pub use config::Config;
pub use laser_schema::Progress;
pub use lists::{catalogue_of_run, history_files};
pub use model::{DraftFiles, DraftOptions, open_local_model, open_model};
pub use night::{Finished, Night, Outcome};
pub use previous::previous_texts;
