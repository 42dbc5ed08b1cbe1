//! Memory for outputs and kept algorithms of products: what small steps would otherwise wait for.
//!
//! A step of 16 layers made 185 allocations and returns of 1.7 us, and 64 products of 11 us, most of which cuBLAS took
//! to choose an algorithm (an H200, docs/research/gpu.md).

use candle_core::{DType, Result, Tensor};

use super::{attend::SplitScratch, output_of, product::Products};
use crate::workspace::Output;

/// Memory grows by so many rows at a time: draft trees grow by a node.
const ROWS: usize = 64;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    /// Of each [`Output`], `[rows, width]`, as many rows as the largest step had.
    outputs: [Option<Tensor>; Output::COUNT],
    /// None before the first.
    products: Option<Products>,
    pub(crate) splits: SplitScratch,
}

impl Workspace {
    /// `[rows, width]` of an output, which the next layer writes again.
    pub(super) fn output(&mut self, output: Output, (rows, width): (usize, usize), like: &Tensor) -> Result<Tensor> {
        let memory = &mut self.outputs[output as usize];
        // What is too small goes before its successor comes.
        memory.take_if(|memory| memory.dims()[0] < rows || memory.dims()[1] != width);
        let all = match memory.take() {
            Some(all) => all,
            None => output_of((rows.next_multiple_of(ROWS), width), like.dtype(), like.device())?,
        };
        memory.insert(all).narrow(0, 0, rows)
    }

    /// x Wᵀ of dense weights `[outputs, inputs]`.
    pub(crate) fn product(&mut self, to: Output, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let y = self.output(to, (x.dim(0)?, weight.dim(0)?), x)?;
        self.multiply(x, weight, y)
    }

    /// The same in f32 and in memory of its own, which outlives the step.
    pub(crate) fn logits(&mut self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let logits = output_of((x.dim(0)?, weight.dim(0)?), DType::F32, x.device())?;
        self.multiply(x, weight, logits)
    }

    fn multiply(&mut self, x: &Tensor, weight: &Tensor, y: Tensor) -> Result<Tensor> {
        let products = match &mut self.products {
            Some(products) => products,
            none => none.insert(Products::new(x.device().as_cuda_device()?.cuda_stream())?),
        };
        products.multiply(x, weight, &y)?;
        Ok(y)
    }
}
