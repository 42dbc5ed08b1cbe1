//! The target model: one forward verifies the draft trees of a whole batch.
//!
//! [`Engine`] is the only thing between scheduling and tensors. A *slot* is one sequence's key/value cache. A *step*
//! runs one forward over new nodes of any number of slots: a prefill chunk is a chain, a draft is a tree, and a node
//! sees the committed context and its own ancestors, nothing else. The nodes are provisional until [`Engine::commit`]
//! keeps one path of them and forgets the rest.
//!
//! - The tree engine, by [`load`]: Llama, Mistral, Qwen2/2.5 and Qwen3 weights (safetensors or GGUF), on CPUs in f32
//!   and bf16 with the decoder of [`laser_cpu`], otherwise with one on mistralrs' layers.
//!   What works on the features of such a model is an engine as well: EAGLE's layer, whose nodes come with features,
//!   and Medusa's heads, which need nothing else; an acceptance head is one of these.
//! - [`FakeEngine`]: a seeded function of the last tokens, for tests of everything above the engine.
//! - `MistralEngine` (feature `mistralrs`): mistralrs decoding by itself, without trees, for every other architecture.
//!   It is the baseline of benchmarks and the oracle of the tests, and not an [`Engine`].
//!
//! Guarantee: a node's scores do not depend, up to rounding, on how its ancestors reached the cache (one at a time, in
//! chunks, in a tree, by [`Engine::fork`]) nor on the other segments of the step.

mod architecture;
mod arena;
mod attention;
mod awake;
mod blocks;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod decoder;
mod dense;
mod draft_tokens;
mod eagle;
mod engine;
mod error;
mod fake;
mod gguf;
mod gpu;
mod linear;
mod medusa;
#[cfg(feature = "mistralrs")]
mod mistral;
mod norm;
mod options;
mod output;
mod rotation;
mod scores;
mod segment;
mod selftest;
mod shared;
mod slots;
mod tree;
mod tree_lm;
#[cfg(any(feature = "cuda", test))]
mod tree_plan;
mod weight_files;
mod workspace;

pub use draft_tokens::DRAFT_TOKENS;
pub use engine::{Engine, EngineInfo};
pub use error::EngineError;
pub use fake::{FakeEngine, FakeOptions};
pub use gguf::gguf_positions;
pub use laser_cpu::{Allowed, Asked};
pub use laser_model::ACCEPTANCE_HEAD;
pub use medusa::{ACCEPTED, REJECTED};
#[cfg(feature = "mistralrs")]
pub use mistral::{Completion, Finish, MistralEngine};
pub use options::{DTypeOption, EngineOptions};
pub use scores::Scores;
pub use segment::{MaskedNode, Segment, Slot};
pub use selftest::{SelfTest, selftest};
pub use tree::{TargetParts, check_drafts, load, reads_features, target_parts};
