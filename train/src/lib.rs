//! Training of draft models, which learn to foresee a target's texts: small Llama models, EAGLE's layer or Medusa's
//! heads over the target's features; and of acceptance heads, which learn how far a draft model is right. And training
//! of recommenders, which write the identifiers of items ([`train_recommender`]).
//!
//! A draft model's texts are those that the target has written, with their prompts. The target reads each of them
//! once, by the engine that generates, and says which tokens it holds likely at every place ([`Lesson`]). The draft
//! model learns these distributions by one of three losses ([`Loss`]), and after every epoch is measured on texts that
//! it has not learned from. What is kept is the epoch of the largest overlap with the target: Σ min(p, q), the share of
//! tokens that speculative sampling accepts (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6). The draft model
//! learns over the tokens of its texts alone, and is written with them: they are all that it is going to tell of.
//!
//! Training is a function of its input and seed, on a CPU to the bit: one that is stopped and taken up again gives the
//! weights of one that was not.

mod adam;
pub mod atspeed;
mod attention;
mod batch;
mod checkpoint;
mod config;
mod course;
mod dropout;
mod epoch;
mod fused;
mod layer;
mod lesson;
mod loss;
mod network;
mod output;
mod own_tokens;
mod recommender;
mod softmax;
mod training;
mod verdicts;

pub use config::{DraftKind, Loss, TrainConfig};
pub use course::Trained;
pub use epoch::Epoch;
pub use lesson::{Example, Lesson, read, unread};
pub use output::{Belongs, Target, belongs};
pub use recommender::{
    Alignment, Catalogue, CodeVocabulary, History, RecommenderBelongs, RecommenderJob, RecommenderLoss,
    RecommenderOptions, RecommenderTarget, TargetLists, train_recommender,
};
pub use training::{Job, Lessons, train};
