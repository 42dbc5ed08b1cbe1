//! What a decoder keeps from one step to the next beside its cache: on a GPU, memory that kernels write in every step
//! and products whose algorithms are known.

#[cfg(feature = "cuda")]
pub(super) use crate::cuda::workspace::Workspace;

/// Nothing without a GPU.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Default)]
pub(super) struct Workspace(());
