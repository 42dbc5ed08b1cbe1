//! A draft model that tells of some tokens only: of those in the texts that it learnt from, say.
//!
//! A recommender's texts need few of a vocabulary's tokens, and what a small draft model computes is mostly the
//! projection to the vocabulary: of 32,000 tokens it took two thirds of a draft's time (docs/benchmarks.md, "A wider
//! vocabulary"). So a draft model's weights may come with [`DRAFT_TOKENS`], and of the projection only their rows are
//! loaded. What the draft model reads stays the whole vocabulary. FR-Spec (Zhao et al., arXiv:2502.14856) cuts EAGLE's
//! vocabulary down to frequent tokens in the same way; EAGLE-3 (arXiv:2503.01840) trains a smaller one.

use candle_core::{DType, Device, Tensor};
use laser_cpu::{Format, Matrix};
use laser_decode::Token;

use crate::{error::EngineError, linear::Linear, tree_lm::Weights};

/// The tensor `[tokens]` of the token ids that a draft model tells of, ascending.
pub const DRAFT_TOKENS: &str = "draft_tokens";

const EMBEDDING: &str = "model.embed_tokens";

/// Weights of which the projections to the vocabulary have the rows of some tokens only.
pub(super) struct WeightsOfTokens {
    pub(super) weights: Box<dyn Weights>,
    pub(super) tokens: Vec<Token>,
    /// Of the projections on mistralrs' layers, which are not quantised.
    pub(super) place: (DType, Device),
}

/// Whether a matrix of this name projects to the vocabulary, or is the embedding, which may.
fn is_projection(name: &str) -> bool {
    let is_vocabulary_of_medusa = name.starts_with("medusa.") && !name.ends_with(".linear");
    name == "lm_head" || name == EMBEDDING || is_vocabulary_of_medusa
}

impl WeightsOfTokens {
    /// The rows of the tokens as a layer, of a matrix `[rows, width]`.
    fn projection(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Linear, EngineError> {
        let values = self.weights.values(&format!("{name}.weight"), &[rows, width])?;
        let (dtype, device) = &self.place;
        let whole = Tensor::from_vec(values, (rows, width), &Device::Cpu)?;
        let own = whole.index_select(&Tensor::new(&self.tokens[..], &Device::Cpu)?, 0)?;
        Ok(Linear::dense(own.to_dtype(*dtype)?.to_device(device)?, None, None, device)?)
    }
}

impl Weights for WeightsOfTokens {
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        match is_projection(name) {
            true => self.projection(name, [outputs, inputs]),
            false => self.weights.linear(name, outputs, inputs, bias),
        }
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.weights.values(name, shape)
    }

    fn matrix(&self, name: &str, shape: [usize; 2], format: Format) -> Result<Matrix, EngineError> {
        let matrix = self.weights.matrix(name, shape, format)?;
        match is_projection(name.trim_end_matches(".weight")) {
            true => Ok(matrix.with_rows(&self.tokens, shape[1])),
            false => Ok(matrix),
        }
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        self.weights.vector(name, length)
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        self.weights.embedding(rows, width)
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        let (rows, width) = embedding.dims2()?;
        self.projection(if tied { EMBEDDING } else { "lm_head" }, [rows, width])
    }

    fn parameters(&self) -> u64 {
        self.weights.parameters()
    }
}
