//! What a text is worth to a model: embeddings of texts and knowledge ids.

pub mod encoder;

mod churn;
mod codebook;
mod fit;
mod kmeans;

pub use churn::ChurnCounter;
pub use codebook::{Codebook, CodebookError, Coded};
pub use fit::{FitError, FitInput, FitProgress, IdsConfig, fit};
