//! What the kernels of a step write on a GPU.

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
