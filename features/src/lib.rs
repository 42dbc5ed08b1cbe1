//! Texts as features of a model: embeddings of texts and knowledge ids.

mod churn;
mod codebook;
pub mod encoder;
mod fit;
mod kmeans;

pub use churn::ChurnCounter;
pub use codebook::{Codebook, CodebookError, Coded};
pub use fit::{FitError, FitInput, IdsConfig, fit};
