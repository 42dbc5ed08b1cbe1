//! Matrices in blocks, which a GPU packs anew, and products of few nodes with them or with dense weights.

use candle_core::{
    DType, Device, Result, Tensor, bail,
    quantized::{
        GgmlDType::{self, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0},
        QTensor,
    },
};

use super::{Launch, output_of};

/// Nodes of a product that reads the blocks as they are, at most. On an H200 a step of 64 takes 2.1 ms so and one of 65
/// 2.4, with weights that are unpacked before (886M parameters in Q8_0, docs/research/gpu.md).
const NODES_MOST: usize = 64;

/// The same of dense weights. They take no longer than by cublasLt, whose call takes the host 11 us instead of 4; with
/// 16 nodes a step of 3.2B parameters took 3.5 ms instead of 3.2.
const DENSE_NODES_MOST: usize = 8;

/// Its kernels, for 8, 16, 32 and 64 nodes.
const PRODUCTS: [&str; 4] = ["few_product_1", "few_product_2", "few_product_4", "few_product_8"];

/// Nodes of the first of them, and outputs of a block of those up to 16 nodes; with more it has twice as many.
const NODES: usize = 8;
const OUTPUTS: usize = 16;

/// Inputs of a tile, and threads of a block.
const INPUTS: usize = 32;
const THREADS: usize = 256;

/// Types of blocks, in the order in which engine/cuda/blocks.h numbers them, and bytes of a packed tile of 16 outputs
/// and 32 inputs.
const TYPES: [(GgmlDType, usize); 10] = [
    (Q8_0, 544),
    (Q4_0, 288),
    (Q4_1, 320),
    (Q5_0, 352),
    (Q5_1, 384),
    (Q2K, 160),
    (Q3K, 224),
    (Q4K, 288),
    (Q5K, 352),
    (Q6K, 416),
];

/// What engine/cuda/blocks.h calls dense weights.
const DENSE: usize = TYPES.len();

/// Of eight tiles of blocks of 256, what multiplies their scales.
const MULTIPLIERS: usize = 64;

/// Matrices of one input, whose outputs stand one behind the other.
#[derive(Debug, Clone)]
pub(crate) struct BlockMatrix {
    /// At most [`PARTS`](Self::PARTS).
    parts: Vec<Part>,
    inputs: usize,
}

#[derive(Debug, Clone)]
struct Part {
    /// Packed blocks, or `[outputs, inputs]`.
    weights: Tensor,
    outputs: usize,
    /// Its place among [`TYPES`], or [`DENSE`].
    format: usize,
}

/// Threads that have the tiles of so many outputs, a warp each: the grid that packs or unpacks them.
fn lanes(outputs: usize, inputs: usize) -> usize {
    outputs.div_ceil(OUTPUTS) * (inputs / INPUTS) * 32
}

impl BlockMatrix {
    /// Matrices that are multiplied with at once.
    const PARTS: usize = 3;

    /// A matrix on `device`.
    pub(crate) fn new(weight: &QTensor, device: &Device) -> Result<Self> {
        let Some(format) = TYPES.iter().position(|(known, _)| *known == weight.dtype()) else {
            bail!("no kernel multiplies with blocks of type {:?}", weight.dtype());
        };
        let ((outputs, inputs), bytes) = (weight.shape().dims2()?, weight.data()?);
        let blocks = Tensor::from_slice(&bytes, bytes.len(), device)?;
        let lanes = lanes(outputs, inputs);
        let tiles = lanes / 32;
        let multipliers = if weight.dtype().block_size() == INPUTS { 0 } else { tiles / 8 * MULTIPLIERS };
        let packed = output_of(tiles * TYPES[format].1 + multipliers, DType::U8, device)?;
        Launch {
            kernel: "pack_blocks",
            tensors: &[Some(&blocks), Some(&packed)],
            sizes: &[outputs, inputs, format],
            floats: &[],
            grid: (lanes.div_ceil(THREADS), 1),
            threads: THREADS,
            shared: 0,
        }
        .run(device)?;
        Ok(Self { parts: vec![Part { weights: packed, outputs, format }], inputs })
    }

    /// Dense weights `[outputs, inputs]`, if a product of that input with few nodes takes them as they are.
    pub(super) fn dense(weights: &Tensor, x: &Tensor) -> Result<Option<Self>> {
        let (outputs, inputs) = weights.dims2()?;
        let fits = x.dim(0)? <= DENSE_NODES_MOST
            && x.dtype() != DType::F32
            && x.dtype() == weights.dtype()
            && inputs % INPUTS == 0;
        let part = || Part { weights: weights.clone(), outputs, format: DENSE };
        Ok(fits.then(|| Self { parts: vec![part()], inputs }))
    }

    /// Whether a product with x reads the blocks as they are.
    pub(super) fn is_for(&self, x: &Tensor) -> Result<bool> {
        Ok(x.dtype() != DType::F32 && x.dim(0)? <= NODES_MOST)
    }

    /// The outputs of all of these matrices; none if they are too many.
    pub(crate) fn joined(matrices: &[&Self]) -> Option<Self> {
        let parts: Vec<Part> = matrices.iter().flat_map(|matrix| matrix.parts.iter().cloned()).collect();
        let inputs = matrices.first()?.inputs;
        (parts.len() <= Self::PARTS).then_some(Self { parts, inputs })
    }

    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.outputs).sum()
    }

    /// How many weights it has.
    pub(super) fn weights(&self) -> usize {
        self.outputs() * self.inputs
    }

    /// y = x Wᵀ for x `[nodes, inputs]` of 16 bits, [`NODES_MOST`] nodes at most, and y `[nodes, outputs]` of the same
    /// dtype or f32.
    pub(super) fn multiply(&self, x: &Tensor, y: &Tensor) -> Result<()> {
        let (nodes, inputs) = x.dims2()?;
        if inputs != self.inputs || y.dims() != [nodes, self.outputs()] || !(x.is_contiguous() && y.is_contiguous()) {
            bail!("a product of {:?} and {} inputs to {:?}", x.layout(), self.inputs, y.layout());
        }
        let tiles = nodes.div_ceil(NODES).next_power_of_two();
        let Some(kernel) = PRODUCTS.get(tiles.ilog2() as usize) else {
            bail!("a product of {nodes} nodes with blocks, of which {NODES_MOST} fit");
        };
        let outputs = if tiles < 4 { OUTPUTS } else { 2 * OUTPUTS };
        let grid = self.parts.iter().map(|part| part.outputs.div_ceil(outputs)).sum();
        let shared = THREADS / 64 * outputs * tiles * NODES;
        self.launch(kernel, &[x, y], &[nodes, usize::from(y.dtype() == DType::F32)], grid, shared)
    }

    /// The weights as `to`, `[outputs, inputs]`.
    pub(super) fn unpack(&self, to: &Tensor) -> Result<()> {
        let lanes: usize = self.parts.iter().map(|part| lanes(part.outputs, self.inputs)).sum();
        self.launch("unpack_blocks", &[to], &[], lanes.div_ceil(THREADS), 0)
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
        let weights = (0..Self::PARTS).map(|at| part(at).map(|part| &part.weights));
        let outputs = (0..Self::PARTS).map(|at| part(at).map_or(0, |part| part.outputs));
        let formats = self.parts.iter().rev().fold(0, |all, part| all << 8 | part.format);
        let tensors: Vec<Option<&Tensor>> = tensors.iter().copied().map(Some).chain(weights).collect();
        let own = [self.inputs].into_iter().chain(outputs).chain([formats]);
        let sizes: Vec<usize> = own.chain(sizes.iter().copied()).collect();
        Launch { kernel, tensors: &tensors, sizes: &sizes, floats: &[], grid: (grid, 1), threads: THREADS, shared }
            .run(tensors[0].map_or(&Device::Cpu, Tensor::device))
    }
}
