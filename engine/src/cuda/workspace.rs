//! Memory for outputs and kept algorithms of products: what small steps would otherwise wait for.
//!
//! A step of 16 layers made 185 allocations and returns of 1.7 us and chose an algorithm for each of 64 products. With
//! this one of 16 nodes takes 1.5 ms where it took 2.2 (886M parameters on an H200, docs/research/gpu.md).

use candle_core::{DType, Result, Tensor};

use super::{
    blocks::BlockMatrix,
    output_of,
    product::{PADDED, Products, padded},
    splits::SplitScratch,
};
use crate::output::Output;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    /// Of each [`Output`], `[rows, width]`, as many rows as the largest step had.
    outputs: [Option<Tensor>; Output::COUNT],
    /// None before the first.
    products: Option<Products>,
    /// Weights of a product that are stored in blocks, as many as the largest matrix has.
    unpacked: Option<Tensor>,
    pub(crate) splits: SplitScratch,
}

impl Workspace {
    /// `[rows, width]` of an output, which the next layer writes again.
    pub(super) fn output(&mut self, output: Output, (rows, width): (usize, usize), like: &Tensor) -> Result<Tensor> {
        let fits = |memory: &Tensor| memory.dims()[0] >= rows && memory.dims()[1] == width;
        let make = || output_of((rows.next_multiple_of(PADDED[1]), width), like.dtype(), like.device());
        kept(&mut self.outputs[output as usize], fits, make)?.narrow(0, 0, rows)
    }

    /// x Wᵀ of weights `[outputs, inputs]`, as that output or in memory of its own.
    pub(crate) fn product(&mut self, to: Option<Output>, x: &Tensor, weights: ProductWeights<'_>) -> Result<Tensor> {
        let size = (x.dim(0)?, weights.outputs()?);
        let y = match to {
            Some(output) => self.output(output, size, x)?,
            None => own(size, x.dtype(), x)?,
        };
        self.multiply(x, weights, y)
    }

    /// The same in f32 and in memory of its own: logits outlive their step.
    pub(crate) fn logits(&mut self, x: &Tensor, weights: ProductWeights<'_>) -> Result<Tensor> {
        let logits = own((x.dim(0)?, weights.outputs()?), DType::F32, x)?;
        self.multiply(x, weights, logits)
    }

    fn multiply(&mut self, x: &Tensor, weights: ProductWeights<'_>, y: Tensor) -> Result<Tensor> {
        let weights = match weights {
            ProductWeights::Dense(weights) => match BlockMatrix::dense(weights, x)? {
                Some(matrix) => {
                    matrix.multiply(x, &y)?;
                    return Ok(y);
                }
                None => weights.clone(),
            },
            ProductWeights::Blocks(blocks) if blocks.is_for(x)? => {
                blocks.multiply(x, &y)?;
                return Ok(y);
            }
            ProductWeights::Blocks(blocks) => self.unpacked(blocks, x)?,
        };
        let products = match &mut self.products {
            Some(products) => products,
            none => none.insert(Products::new(x.device().as_cuda_device()?.cuda_stream())?),
        };
        products.multiply(x, &weights, &y)?;
        Ok(y)
    }

    /// Weights in the dtype of x, which the next product writes again.
    fn unpacked(&mut self, blocks: &BlockMatrix, x: &Tensor) -> Result<Tensor> {
        let count = blocks.weights();
        let make = || output_of(count, x.dtype(), x.device());
        let memory = kept(&mut self.unpacked, |memory| memory.elem_count() >= count, make)?;
        let weights = memory.narrow(0, 0, count)?.reshape((blocks.outputs(), ()))?;
        blocks.unpack(&weights)?;
        Ok(weights)
    }
}

/// Weights `[outputs, inputs]` of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProductWeights<'a> {
    Dense(&'a Tensor),
    Blocks(&'a BlockMatrix),
}

impl<'a> ProductWeights<'a> {
    pub(crate) fn dense(self) -> Option<&'a Tensor> {
        match self {
            Self::Dense(weights) => Some(weights),
            Self::Blocks(_) => None,
        }
    }

    pub(crate) fn blocks(self) -> Option<&'a BlockMatrix> {
        match self {
            Self::Blocks(blocks) => Some(blocks),
            Self::Dense(_) => None,
        }
    }

    pub(crate) fn outputs(self) -> Result<usize> {
        match self {
            Self::Dense(weights) => weights.dim(0),
            Self::Blocks(blocks) => Ok(blocks.outputs()),
        }
    }
}

/// What is kept there if it fits, else what is made in its place: the old memory goes before the new comes.
fn kept(
    memory: &mut Option<Tensor>,
    fits: impl FnOnce(&Tensor) -> bool,
    make: impl FnOnce() -> Result<Tensor>,
) -> Result<&Tensor> {
    memory.take_if(|memory| !fits(memory));
    let all = match memory.take() {
        Some(all) => all,
        None => make()?,
    };
    Ok(memory.insert(all))
}

/// `[rows, width]` for a product.
fn own((rows, width): (usize, usize), dtype: DType, like: &Tensor) -> Result<Tensor> {
    output_of((padded(rows), width), dtype, like.device())?.narrow(0, 0, rows)
}
