//! The target model: one forward verifies the draft trees of a whole batch.
//!
//! [`Engine`] is the only thing between scheduling and tensors. A *slot* is one sequence's
//! key/value cache. A *step* runs one forward over new nodes of any number of slots: a prefill
//! chunk is a chain, a draft is a tree, and a node sees the committed context and its own
//! ancestors, nothing else. The nodes are provisional until [`Engine::commit`] keeps one path of
//! them and forgets the rest.
//!
//! - [`TreeEngine`]: Llama, Mistral, Qwen2/2.5 and Qwen3 weights (safetensors or GGUF): on CPUs in f32 and bf16 on
//!   skinny matrix products of our own, otherwise on mistralrs' layers.
//! - [`FakeEngine`]: a seeded function of the last tokens, for tests of everything above the
//!   engine.
//! - `MistralEngine` (feature `mistralrs`): mistralrs decoding by itself, without trees, for every other architecture.
//!   It is the baseline of benchmarks and the oracle of the tests, and not an [`Engine`].
//!
//! Guarantee: a node's scores do not depend, up to rounding, on how its ancestors reached the cache
//! (one at a time, in chunks, in a tree, by [`Engine::fork`]) nor on the other segments of the
//! step.

mod arena;
mod attention;
mod config;
mod cpu_cache;
mod cpu_lm;
mod decoder;
mod error;
mod fake;
mod gguf;
mod linear;
#[cfg(feature = "mistralrs")]
mod mistral;
mod options;
mod rope;
mod safetensors;
mod scores;
mod skinny;
mod slots;
mod tree;
mod tree_lm;

pub use error::EngineError;
pub use fake::{FakeEngine, FakeOptions};
pub use laser_schema::DeviceOption;
#[cfg(feature = "mistralrs")]
pub use mistral::{Completion, Finish, MistralEngine};
pub use options::{DTypeOption, EngineOptions};
pub use scores::Scores;
pub use tree::TreeEngine;

/// Handle of one sequence's cache; reused after [`Engine::close`].
pub type Slot = usize;

/// What is known of a loaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInfo {
    /// Number of token ids; every id given to the engine must be below it.
    pub vocab_size: usize,
    /// Positions the model was made for, or its sliding window if that is smaller: no token may be
    /// placed at or beyond it.
    pub max_positions: usize,
    /// Architecture as the model's own configuration names it, e.g. `LlamaForCausalLM`.
    pub architecture: String,
    /// Number of weights, tied ones counted once.
    pub parameters: u64,
    /// Weights that a forward multiplies with: all of them but an embedding that is not tied.
    pub forward_parameters: u64,
    /// Storage of the weights, e.g. `f32`, `f32+q4k` (quantised while loading), `gguf`.
    pub dtype: String,
    /// Where the tensors live, e.g. `cpu`, `cuda:0`.
    pub device: String,
}

/// One sequence's new tokens of a step: a prefill chunk (a chain) or a draft tree.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// The sequence.
    pub slot: Slot,
    /// The nodes' tokens, parents before children.
    pub tokens: &'a [u32],
    /// `parents[i] < i` is the node that `i` continues, [`laser_decode::ROOT_PARENT`] for the
    /// committed context.
    pub parents: &'a [u32],
    /// Nodes from this index on are scored: `tokens.len()` for a prefill chunk that is not the
    /// last, `tokens.len() - 1` for the last one, 0 for a tree.
    pub scored_from: usize,
}

/// A causal language model with tree attention over per-sequence caches.
///
/// An error of [`step`](Self::step) or [`commit`](Self::commit) leaves every slot as it was.
pub trait Engine: Send {
    /// The loaded model.
    fn info(&self) -> &EngineInfo;

    /// A new, empty cache for at most `capacity` tokens, committed ones and the nodes of a step
    /// together.
    ///
    /// # Errors
    /// [`EngineError::InvalidCapacity`] for 0, [`EngineError::Tensor`] when memory is short.
    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError>;

    /// A new cache that starts with the first `length` committed tokens of `from`, so that a prefix
    /// shared by many prompts is computed once. Copies `length` rows per layer.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`EngineError::UnknownSlot`], [`EngineError::InvalidFork`].
    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError>;

    /// One forward over the nodes of all segments, at most one segment a slot. For each segment the
    /// `top_k` most probable next tokens after each of its scored nodes. The nodes stay
    /// provisional: every slot of the step must be committed before its next step.
    ///
    /// # Errors
    /// A broken protocol (see [`EngineError`]) or a failed forward.
    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError>;

    /// Of the slot's last segment keeps the nodes `keep`, a path from the context in ascending
    /// order (possibly empty), and drops the rest. A prefill chunk keeps all of its nodes.
    ///
    /// # Errors
    /// [`EngineError::UnknownSlot`], [`EngineError::InvalidCommit`].
    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError>;

    /// Ends the sequence; its memory is reused by later slots. Closing a closed slot does nothing.
    fn close(&mut self, slot: Slot);

    /// Committed tokens of the slot; 0 for one that is not open.
    fn cached(&self, slot: Slot) -> usize;
}
