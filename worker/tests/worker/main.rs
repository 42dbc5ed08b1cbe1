//! Generation against a naive decoder, and the worker's life against a queue and a store.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as well")]
mod constraint;
mod draft_model;
mod ending;
mod failures;
mod generate;
mod guards;
mod limits;
mod lists;
mod planned;
mod run;
mod support;
mod tonight;
mod watch;
