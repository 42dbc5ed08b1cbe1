//! Planning and publishing on real folders, with a worker that writes texts without a model.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as well")]

mod plan;
mod publish;
mod support;
