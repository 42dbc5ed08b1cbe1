//! Weights of what drafts from a target's features: its own, and with them the target's embedding and vocabulary.

use candle_core::Tensor;
use laser_cpu::{Format, Matrix};

use crate::{error::EngineError, linear::Linear, tree_lm::Weights, weight_files::WeightFiles};

/// The weights of an EAGLE layer or of Medusa's heads, which share the rest with their target.
pub(super) struct SharedWeights {
    pub(super) own: WeightFiles,
    pub(super) target: Box<dyn Weights>,
    /// Its own name of a tensor; none if that is the target's.
    pub(super) own_name: fn(&str) -> Option<&str>,
}

impl Weights for SharedWeights {
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear, EngineError> {
        match (self.own_name)(name) {
            Some(name) => self.own.linear(name, outputs, inputs, bias),
            None => self.target.linear(name, outputs, inputs, bias),
        }
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        match (self.own_name)(name) {
            Some(name) => self.own.values(name, shape),
            None => self.target.values(name, shape),
        }
    }

    fn matrix(&self, name: &str, shape: [usize; 2], format: Format) -> Result<Matrix, EngineError> {
        match (self.own_name)(name) {
            Some(name) => self.own.matrix(name, shape, format),
            None => self.target.matrix(name, shape, format),
        }
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Tensor, EngineError> {
        match (self.own_name)(name) {
            Some(name) => self.own.vector(name, length),
            None => self.target.vector(name, length),
        }
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Result<Tensor, EngineError> {
        self.target.embedding(rows, width)
    }

    fn head(&mut self, embedding: &Tensor, tied: bool) -> Result<Linear, EngineError> {
        self.target.head(embedding, tied)
    }

    fn parameters(&self) -> u64 {
        self.own.parameters() + self.target.parameters()
    }
}
