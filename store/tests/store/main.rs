//! The contracts of input and output on real files.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as well")]

mod entities;
mod erase;
mod guards;
mod join;
mod part;
mod published;
