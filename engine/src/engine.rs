//! The only thing between scheduling and tensors.

use std::sync::Arc;

use laser_cpu::Allowed;
use rayon::ThreadPool;

use crate::{
    error::EngineError,
    scores::Scores,
    segment::{MaskedNode, Segment, Slot},
};

/// A loaded model.
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
    /// Width of a feature: the hidden state that enters the projection to the vocabulary.
    pub hidden_size: usize,
    /// Whether a node is a token together with the feature of the token before it (EAGLE).
    pub reads_features: bool,
    /// Medusa's heads, if it is these and no decoder: of each scored node so many tokens are told, the next one and
    /// those after it, from the feature before the node alone.
    pub heads: Option<usize>,
}

impl EngineInfo {
    /// Tokens ahead that scores tell of.
    #[must_use]
    pub fn ahead(&self) -> usize {
        self.heads.unwrap_or(1)
    }
}

/// A causal language model with tree attention over per-sequence caches.
///
/// An error of [`step`](Self::step) or [`commit`](Self::commit) leaves every slot as it was.
pub trait Engine: Send {
    /// The loaded model.
    fn info(&self) -> &EngineInfo;

    /// The threads of its forwards, if it has its own. They wait between forwards: what is to be divided there is
    /// divided among them, and no others compete with them.
    fn threads(&self) -> Option<Arc<ThreadPool>> {
        None
    }

    /// From the next step on scores have the features of all nodes, also of those that are not scored.
    fn keep_features(&mut self);

    /// From the next step on [`masked`](Self::masked) may be asked.
    fn keep_logits(&mut self);

    /// A new, empty cache for at most `capacity` tokens, committed ones and the nodes of a step together.
    ///
    /// # Errors
    /// [`EngineError::NoCapacity`] for 0, [`EngineError::CacheFull`] if it has to wait until other slots are closed,
    /// [`EngineError::Tensor`] when memory is short.
    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError>;

    /// A new cache that starts with the first `length` committed tokens of `from`, so that a prefix
    /// shared by many prompts is computed once. Copies `length` rows per layer.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); [`EngineError::UnknownSlot`], [`EngineError::Protocol`].
    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError>;

    /// One forward over the nodes of all segments, at most one segment a slot. For each segment the `top_k` most
    /// probable next tokens after each of its scored nodes. The nodes stay provisional: every slot of the step must be
    /// committed or held before its next step.
    ///
    /// # Errors
    /// A broken protocol (see [`EngineError`]) or a failed forward.
    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError>;

    /// What scored nodes of the last step say of the tokens that may follow them, the `top_k` most probable ones of
    /// each. Nodes may be committed meanwhile.
    ///
    /// # Errors
    /// [`EngineError::Protocol`] for a node that was not scored, or that no token may follow; a failed tensor
    /// operation.
    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError>;

    /// Keeps the nodes `keep` of the slot's tree (its last segment, behind what it holds), a path from the context in
    /// ascending order (possibly empty), and drops the rest. A prefill chunk keeps all of its nodes.
    ///
    /// # Errors
    /// [`EngineError::UnknownSlot`], [`EngineError::Protocol`].
    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError>;

    /// Keeps the nodes `keep` of the slot's tree for the next step without committing any, so that later nodes may
    /// continue each of them: the beams of a search are one tree that grows. `keep` is in ascending order and has the
    /// parent of each of its nodes; in the next step they are the nodes 0, 1, 2, … and new ones follow. A commit ends
    /// the tree.
    ///
    /// # Errors
    /// [`EngineError::UnknownSlot`], [`EngineError::Protocol`].
    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError>;

    /// Ends the sequence; its memory is reused by later slots. Closing a closed slot does nothing.
    fn close(&mut self, slot: Slot);

    /// Committed tokens of the slot; 0 for one that is not open.
    fn cached(&self, slot: Slot) -> usize;
}
