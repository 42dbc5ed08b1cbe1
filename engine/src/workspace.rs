//! What a decoder keeps from one step to the next beside its cache: on a GPU, memory that kernels write in every step
//! and products whose algorithms are known.

#[cfg(feature = "cuda")]
pub(super) use crate::cuda::workspace::Workspace;

/// Nothing without a GPU.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Default)]
pub(super) struct Workspace(());

/// What the kernels of a layer write. Layers follow each other on one stream, so that all of them, in every step, can
/// write the same memory.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing has memory of its own without a GPU"))]
pub(super) enum Output {
    /// The residual stream.
    Stream,
    /// Queries, keys and values as their product gives them.
    Heads,
    /// Rotated queries.
    Queries,
    Attended,
    /// What is added to the residual stream.
    Branch,
    Normed,
    GateUp,
    /// silu(gate) · up.
    Inner,
    /// Of the last layer, [`Stream`](Self::Stream) and [`Attended`](Self::Attended) of scored nodes alone.
    ScoredStream,
    ScoredAttended,
}

impl Output {
    /// How many there are.
    #[cfg(feature = "cuda")]
    pub(super) const COUNT: usize = Self::ScoredAttended as usize + 1;
}
