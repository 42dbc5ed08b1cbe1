//! Lists: constrained beam search over item identifiers, many users at a time.
//!
//! All beams of a user are nodes of one tree behind the prompt: they share its cache, nothing is copied or reordered,
//! and users of a batch may be at different depths. A step computes the beams whose continuations have no scores yet,
//! and, along with them, prefixes that may be beams of the next steps; what they are does not change a list
//! ([`BeamSearch`](laser_decode::BeamSearch)). The first step is the end of the prompt, so it may carry drafts, too.
//!
//! How many are drafted, and by which source, is decided by measured costs, as for texts: `coverage.rs` remembers how
//! many candidates it took to have all beams among them, and a draft has to pay for its nodes, and a [draft
//! model](ListDraftModel) for what it reads, by the forwards that it saves.

mod coverage;
mod draft_model;
mod expectation;
mod foresight;
mod generator;
mod options;
mod plan;
mod prefixes;
mod reading;
mod sequence;
mod sources;

pub use draft_model::ListDraftModel;
pub use generator::ListGenerator;
pub use options::{ListDraft, ListOptions, ListSampling};

pub use crate::catalogue::{Catalogue, Counted};
