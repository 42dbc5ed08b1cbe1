//! Memory for outputs and kept algorithms of products: what small steps would otherwise wait for.
//!
//! A step of 16 layers made 185 allocations and returns of 1.7 us and chose an algorithm for each of 64 products. With
//! this one of 16 nodes takes 1.5 ms where it took 2.2 (886M parameters on an H200, docs/research/gpu.md).

use candle_core::{DType, Result, Tensor};

use super::{
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
            None => output_of((rows.next_multiple_of(PADDED[1]), width), like.dtype(), like.device())?,
        };
        memory.insert(all).narrow(0, 0, rows)
    }

    /// x Wᵀ of dense weights `[outputs, inputs]`, as that output or in memory of its own.
    pub(crate) fn product(&mut self, to: Option<Output>, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let (rows, outputs) = (x.dim(0)?, weight.dim(0)?);
        let y = match to {
            Some(output) => self.output(output, (rows, outputs), x)?,
            None => own((rows, outputs), x.dtype(), x)?,
        };
        self.multiply(x, weight, y)
    }

    /// The same in f32 and in memory of its own: logits outlive their step.
    pub(crate) fn logits(&mut self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let logits = own((x.dim(0)?, weight.dim(0)?), DType::F32, x)?;
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

/// `[rows, width]` for a product.
fn own((rows, width): (usize, usize), dtype: DType, like: &Tensor) -> Result<Tensor> {
    output_of((padded(rows), width), dtype, like.device())?.narrow(0, 0, rows)
}
