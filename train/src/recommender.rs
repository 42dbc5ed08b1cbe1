//! Training of recommenders: small Llama models that write the identifier of the item that a user comes to next.
//!
//! An item's identifier is a few codes, one a level, and each code is one token (TIGER, arXiv:2305.05065; LC-Rec,
//! arXiv:2311.09049). One forward reads a history and trains all of its items, each after those before it
//! ([`Catalogue::prompt`] has the format). A recommender may also be trained to draft for a larger one (AtSpeed,
//! arXiv:2410.05165), from what that says of the same histories, or from the lists that it makes for them.

mod alignment;
mod belongs;
mod catalogue;
mod history;
mod job;
mod learner;
mod lists;
mod objective;
mod options;
mod target;
#[cfg(test)]
mod tests;
mod training;
mod vocabulary;

pub use alignment::Alignment;
pub use belongs::RecommenderBelongs;
pub use catalogue::Catalogue;
pub use history::History;
pub use job::{RecommenderJob, RecommenderTarget, TargetLists};
pub use options::{RecommenderLoss, RecommenderOptions};
pub use training::train_recommender;
pub use vocabulary::CodeVocabulary;
