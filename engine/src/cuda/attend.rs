//! Attention of draft trees.

use candle_core::{DType, Device, Result, Tensor, bail};
use laser_cpu::Batch;

use super::{Launch, workspace::Workspace};
use crate::{
    arena::{Arena, SequenceId},
    tree_plan::tree_plan,
    workspace::Output,
};

/// Queries of a block, keys of its step, and the widest head, as in tree.cu.
const QUERIES: usize = 8;
const KEYS: usize = 32;
const HEAD_MAX: usize = 256;

/// Queries and warps of a block, as in tree_tensor.cu.
const TENSOR_QUERIES: usize = 16;
const TENSOR_WARPS: usize = 4;

/// The kernel for tensor cores, if keys and heads are of a kind that it is made for.
fn tensor_kernel(dtype: DType, head_dim: usize) -> Option<&'static str> {
    match (dtype, head_dim) {
        (DType::F16 | DType::BF16, 32) => Some("tree_attend_32"),
        (DType::F16 | DType::BF16, 64) => Some("tree_attend_64"),
        (DType::F16 | DType::BF16, 96) => Some("tree_attend_96"),
        (DType::F16 | DType::BF16, 128) => Some("tree_attend_128"),
        _ => None,
    }
}

/// How the nodes of a step attend; the same for all layers.
#[derive(Debug)]
pub(crate) struct TreeAttend {
    plan: Tensor,
    tiles: usize,
    /// For tensor cores.
    kernel: Option<&'static str>,
}

impl TreeAttend {
    /// For a step whose nodes have the arena's rows from `start` on, and heads of which `shared` have one key head.
    pub(crate) fn plan(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        (start, shared): (usize, usize),
        device: &Device,
    ) -> Result<Self> {
        let kernel = tensor_kernel(arena.dtype(), arena.head_dim());
        let width = if kernel.is_some() { TENSOR_QUERIES } else { QUERIES };
        let committed = sequences.iter().map(|&sequence| arena.rows_of(sequence));
        let (plan, tiles) = tree_plan(batch, committed, (start, shared), width);
        Ok(Self { plan: Tensor::new(plan, device)?, tiles, kernel })
    }

    /// Rows `[nodes, heads · head_dim]` for scaled queries `[nodes, heads, head_dim]` over all keys and values of a
    /// layer, `[kv_heads, rows, head_dim]`.
    pub(crate) fn attend(
        &self,
        queries: &Tensor,
        (keys, values): &(Tensor, Tensor),
        workspace: &mut Workspace,
    ) -> Result<Tensor> {
        let (nodes, heads, dim) = queries.dims3()?;
        let (kv_heads, rows, _) = keys.dims3()?;
        if dim > HEAD_MAX {
            bail!("attention on GPUs takes heads of at most {HEAD_MAX}, this model's have {dim}");
        }
        let attended = workspace.output(Output::Attended, (nodes, heads * dim), queries)?;
        let sizes = [rows, heads, kv_heads, dim];
        // Kernels for tensor cores are made for their heads.
        let (kernel, sizes, threads, shared) = match self.kernel {
            Some(kernel) => (kernel, &sizes[..3], 32 * TENSOR_WARPS, TENSOR_WARPS / 2 * 32 * (4 + dim / 2)),
            None => ("tree_attend", &sizes[..], 128, QUERIES * dim + KEYS * (dim + 1) + 2 * QUERIES * KEYS),
        };
        Launch {
            kernel,
            tensors: &[Some(queries), Some(keys), Some(values), Some(&attended), Some(&self.plan)],
            sizes,
            floats: &[],
            grid: (self.tiles, kv_heads),
            threads,
            shared,
        }
        .run(queries.device())?;
        Ok(attended)
    }
}
