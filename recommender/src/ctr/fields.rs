//! Features of users or items as learnt fields of a network's input.

use candle_core::{Device, Result, Tensor};

use super::knowledge::Feature;
use super::layers::{Embedding, Linear, Parameters, weighted_sum};

/// One feature of one kind of entity.
#[derive(Debug)]
pub(super) struct Field {
    input: Input,
    /// Values of a vector.
    dimension: usize,
    /// Vectors of an entity.
    levels: usize,
    entities: usize,
}

#[derive(Debug)]
enum Input {
    /// `[entities, values]`, and the projection.
    Vectors(Tensor, Linear, Linear),
    /// `[entities, levels]`, and the table of all codebooks.
    Codes(Tensor, Embedding),
    /// `[entities, length]` tokens and weights, and the table of values.
    Bags(Tensor, Tensor, Embedding),
}

impl Field {
    pub(super) fn new(
        feature: &Feature,
        entities: usize,
        dimension: usize,
        parameters: &mut Parameters,
    ) -> Result<Self> {
        let cpu = &Device::Cpu;
        let (input, levels) = match feature {
            Feature::Vectors(vectors) => {
                let shape = (entities, vectors.dimension);
                let table = Tensor::from_slice(&vectors.values, shape, cpu)?;
                let first = Linear::new(vectors.dimension, 2 * dimension, parameters)?;
                let second = Linear::new(2 * dimension, dimension, parameters)?;
                (Input::Vectors(table, first, second), 1)
            }
            Feature::Codes(codes) => {
                let table = Tensor::from_slice(&codes.tokens, (entities, codes.levels), cpu)?;
                (Input::Codes(table, Embedding::new(codes.vocabulary, dimension, parameters)?), codes.levels)
            }
            Feature::Bags(bags) => {
                let shape = (entities, bags.length);
                let tokens = Tensor::from_slice(&bags.tokens, shape, cpu)?;
                let weights = Tensor::from_slice(&bags.weights, shape, cpu)?;
                (Input::Bags(tokens, weights, Embedding::new(bags.vocabulary, dimension, parameters)?), 1)
            }
        };
        Ok(Self { input, dimension, levels, entities })
    }

    /// Values that it adds to the network's input.
    pub(super) fn width(&self) -> usize {
        self.levels * self.dimension
    }

    /// `[rows]` indices to `[rows, width]`.
    pub(super) fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        self.project(|table| table.index_select(indices, 0), indices.dim(0)?)
    }

    /// `[entities, dimension]`: the sum of each entity's vectors.
    pub(super) fn content(&self) -> Result<Tensor> {
        let all = self.project(|table| Ok(table.clone()), self.entities)?;
        match self.levels {
            1 => Ok(all),
            levels => all.reshape((self.entities, levels, self.dimension))?.sum(1),
        }
    }

    fn project(&self, rows_of: impl Fn(&Tensor) -> Result<Tensor>, rows: usize) -> Result<Tensor> {
        match &self.input {
            Input::Vectors(table, first, second) => second.forward(&first.forward(&rows_of(table)?)?.relu()?),
            Input::Codes(table, embedding) => {
                embedding.forward(&rows_of(table)?.flatten_all()?)?.reshape((rows, self.width()))
            }
            Input::Bags(tokens, weights, embedding) => {
                weighted_sum(&embedding.forward(&rows_of(tokens)?.flatten_all()?)?, &rows_of(weights)?)
            }
        }
    }
}
