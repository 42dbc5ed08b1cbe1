//! Matrices in blocks, which stay on a GPU as GGUF stores them.

use candle_core::{
    DType, Device, Result, Tensor, bail,
    quantized::{
        GgmlDType::{self, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0},
        QTensor,
    },
};

use super::Launch;

/// Nodes of a product that reads the blocks as they are, at most. It reads all inputs of all nodes for every 16
/// outputs, so that with more nodes its time would be that of the inputs.
pub(super) const NODES_MOST: usize = 32;

/// Its kernels, for 8, 16 and 32 nodes.
const PRODUCTS: [&str; 3] = ["blocks_product_1", "blocks_product_2", "blocks_product_4"];

/// Nodes of the first of them, and outputs of a block of each.
const TILE: [usize; 2] = [8, 16];

/// Threads of a block.
const THREADS: usize = 256;

/// Neighbouring weights that a thread unpacks.
const RUN: usize = 8;

/// Types of blocks, in the order in which engine/cuda/blocks.cu numbers them.
const TYPES: [GgmlDType; 10] = [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K];

/// Matrices of one input, whose outputs stand one behind the other.
#[derive(Debug, Clone)]
pub(crate) struct BlockMatrix {
    /// At most [`PARTS`](Self::PARTS).
    parts: Vec<Part>,
    inputs: usize,
}

#[derive(Debug, Clone)]
struct Part {
    /// `[outputs, bytes]`.
    blocks: Tensor,
    /// Its place among [`TYPES`].
    format: usize,
}

impl Part {
    fn outputs(&self) -> usize {
        self.blocks.dims()[0]
    }
}

impl BlockMatrix {
    /// Matrices that are multiplied with at once.
    const PARTS: usize = 3;

    /// A matrix on `device`.
    pub(crate) fn new(weight: &QTensor, device: &Device) -> Result<Self> {
        let Some(format) = TYPES.iter().position(|known| *known == weight.dtype()) else {
            bail!("no kernel multiplies with blocks of type {:?}", weight.dtype());
        };
        let ((outputs, inputs), bytes) = (weight.shape().dims2()?, weight.data()?);
        let blocks = Tensor::from_slice(&bytes, (outputs, bytes.len() / outputs), device)?;
        Ok(Self { parts: vec![Part { blocks, format }], inputs })
    }

    /// The outputs of all of these matrices; none if they are too many.
    pub(crate) fn joined(matrices: &[&Self]) -> Option<Self> {
        let parts: Vec<Part> = matrices.iter().flat_map(|matrix| matrix.parts.iter().cloned()).collect();
        let inputs = matrices.first()?.inputs;
        (parts.len() <= Self::PARTS).then_some(Self { parts, inputs })
    }

    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(Part::outputs).sum()
    }

    /// How many weights it has.
    pub(super) fn weights(&self) -> usize {
        self.outputs() * self.inputs
    }

    /// y = x Wᵀ for x `[nodes, inputs]` of 16 bits, at most [`NODES_MOST`] nodes, and y `[nodes, outputs]` of the same
    /// dtype or f32.
    pub(super) fn multiply(&self, x: &Tensor, y: &Tensor) -> Result<()> {
        let (nodes, inputs) = x.dims2()?;
        if inputs != self.inputs || y.dims() != [nodes, self.outputs()] || !(x.is_contiguous() && y.is_contiguous()) {
            bail!("a product of {:?} and blocks of {} inputs to {:?}", x.layout(), self.inputs, y.layout());
        }
        let tiles = nodes.div_ceil(TILE[0]).next_power_of_two();
        let Some(kernel) = PRODUCTS.get(tiles.ilog2() as usize) else {
            bail!("a product of {nodes} nodes with blocks, of which {NODES_MOST} fit");
        };
        let outputs = self.parts.iter().map(|part| part.outputs().div_ceil(TILE[1]));
        let is_wide = y.dtype() == DType::F32;
        self.launch(
            kernel,
            &[x, y],
            &[nodes, usize::from(is_wide)],
            outputs.sum(),
            THREADS / 32 * tiles * TILE[0] * TILE[1],
        )
    }

    /// The weights as `to`, `[outputs, inputs]`.
    pub(super) fn unpack(&self, to: &Tensor) -> Result<()> {
        self.launch("unpack_blocks", &[to], &[], (self.weights() / RUN).div_ceil(THREADS), 0)
    }

    fn launch(
        &self,
        kernel: &'static str,
        tensors: &[&Tensor],
        sizes: &[usize],
        grid: usize,
        shared: usize,
    ) -> Result<()> {
        let part = |at: usize| self.parts.get(at);
        let blocks = (0..Self::PARTS).map(|at| part(at).map(|part| &part.blocks));
        let outputs = (0..Self::PARTS).map(|at| part(at).map_or(0, Part::outputs));
        let formats = self.parts.iter().rev().fold(0, |all, part| all << 8 | part.format);
        let tensors: Vec<Option<&Tensor>> = tensors.iter().copied().map(Some).chain(blocks).collect();
        let own = [self.inputs].into_iter().chain(outputs).chain([formats]);
        let sizes: Vec<usize> = own.chain(sizes.iter().copied()).collect();
        Launch { kernel, tensors: &tensors, sizes: &sizes, floats: &[], grid: (grid, 1), threads: THREADS, shared }
            .run(tensors[0].map_or(&Device::Cpu, Tensor::device))
    }
}
