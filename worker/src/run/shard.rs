//! The messages that carry a shard through the worker.

use laser_schema::job::Lease;
use tracing::Span;

use crate::part::{Output, Work};

/// A leased shard whose input was read.
pub(super) struct Loaded {
    pub(super) lease: Lease,
    pub(super) work: Work,
    pub(super) span: Span,
}

/// A leased shard and what it came to.
pub(super) struct Done {
    pub(super) lease: Lease,
    pub(super) output: Output,
}
