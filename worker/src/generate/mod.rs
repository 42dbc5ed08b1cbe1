//! The generation loop: continuous batching of draft, forward, verify, commit.
//!
//! Sequences join and leave at every step. What a sequence feeds into a step is always the same shape:
//! its *pending* tokens, which are known but not yet cached (a chunk of its prompt, later the last
//! token it emitted), and below the last of them a draft tree. So the prompt's last chunk already
//! carries a draft, and prefill needs no path of its own.
//!
//! Guarantees: with [`Verification::Strict`](laser_decode::Verification::Strict) every text equals plain greedy
//! decoding, whatever the drafter, the tree and the batch, up to rounding in the engine's forward. An engine error
//! costs the sequences of the batch their progress: each starts over alone, and the one that then fails is reported.
//! Nothing of one text is visible to the next.

mod constraint;
mod counts;
mod draft_model;
mod generator;
mod options;
mod request;
mod sequence;
mod source;
mod stop;
mod threads;
mod waiting;

pub use draft_model::DraftModel;
pub use generator::Generator;
pub use options::GenerateOptions;
#[cfg(feature = "mistralrs")]
pub(crate) use request::FAILURES_IN_A_ROW_MAX;
pub use request::{Finished, GenerateError, Generated, Request, StopReason, TextError, TextGenerator};
pub use source::{Draft, DraftSource, DraftTerms, Opening, Outcome, SequenceId, SharedPrefix};
#[cfg(feature = "mistralrs")]
pub(crate) use stop::cut_at_stop;
pub(crate) use stop::whole_characters;
pub(crate) use waiting::Waiting;
