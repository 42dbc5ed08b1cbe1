//! Features of users or items as learnt fields of a network's input.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use super::knowledge::{Bags, Feature};
use super::layers::{Embedding, Linear, Parameters};

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
    /// The values of each entity, and the table of all values.
    Bags(Arc<Bags>, Embedding),
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
                (Input::Bags(bags.clone(), Embedding::new(bags.vocabulary, dimension, parameters)?), 1)
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
        self.project(Some(indices))
    }

    /// `[entities, width]` of all entities.
    pub(super) fn all(&self) -> Result<Tensor> {
        self.project(None)
    }

    /// `[entities, dimension]`, the sum of each entity's vectors, from those of [`Field::all`].
    pub(super) fn content(&self, all: &Tensor) -> Result<Tensor> {
        match self.levels {
            1 => Ok(all.clone()),
            levels => all.reshape((self.entities, levels, self.dimension))?.sum(1),
        }
    }

    /// Of these entities, or of all.
    fn project(&self, indices: Option<&Tensor>) -> Result<Tensor> {
        let rows_of = |table: &Tensor| match indices {
            Some(indices) => table.index_select(indices, 0),
            None => Ok(table.clone()),
        };
        match &self.input {
            Input::Vectors(table, first, second) => second.forward(&first.forward(&rows_of(table)?)?.relu()?),
            Input::Codes(table, embedding) => {
                let rows = rows_of(table)?;
                embedding.forward(&rows.flatten_all()?)?.reshape((rows.dim(0)?, self.width()))
            }
            Input::Bags(bags, embedding) => {
                let entities = match indices {
                    Some(indices) => indices.to_vec1()?,
                    None => (0..).take(self.entities).collect(),
                };
                embedding.sums(BagSums { bags: bags.clone(), entities })
            }
        }
    }
}

/// The weighted sums of the vectors of bags: a sparse matrix of `[entities, vocabulary]` times a table. The words of a
/// few thousand texts are half a million, whose vectors would be copied in each step if the sum were made of candle's
/// operations.
pub(super) struct BagSums {
    pub(super) bags: Arc<Bags>,
    pub(super) entities: Vec<u32>,
}

impl BagSums {
    /// For each row of the result and each token of its bag, with the weight.
    fn each(&self, mut visit: impl FnMut(usize, usize, f32)) {
        for (row, &entity) in self.entities.iter().enumerate() {
            for &(token, weight) in self.bags.bag(entity as usize) {
                visit(row, token as usize, weight);
            }
        }
    }
}

/// `to += weight · from`.
fn add(to: &mut [f32], from: &[f32], weight: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += weight * from);
}

impl CustomOp1 for BagSums {
    fn name(&self) -> &'static str {
        "bag sums"
    }

    /// `[vocabulary, dimension]`, contiguous, to `[entities, dimension]`.
    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (table, (_, dimension)) = (storage.as_slice::<f32>()?, layout.shape().dims2()?);
        let mut sums = vec![0.0; self.entities.len() * dimension];
        self.each(|row, token, weight| {
            add(&mut sums[row * dimension..][..dimension], &table[token * dimension..][..dimension], weight);
        });
        Ok((CpuStorage::F32(sums), Shape::from((self.entities.len(), dimension))))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, of_sums: &Tensor) -> Result<Option<Tensor>> {
        let (dimension, of_sums) = (table.dim(1)?, of_sums.flatten_all()?.to_vec1::<f32>()?);
        let mut of_table = vec![0.0; table.elem_count()];
        self.each(|row, token, weight| {
            add(&mut of_table[token * dimension..][..dimension], &of_sums[row * dimension..][..dimension], weight);
        });
        Tensor::from_vec(of_table, table.shape(), table.device()).map(Some)
    }
}
