//! Attention of draft trees.

use candle_core::{DType, Device, Result, Tensor, bail};
use laser_cpu::Batch;

use super::{
    Launch,
    splits::{Parts, SplitScratch, partial},
    workspace::Workspace,
};
use crate::{
    arena::{Arena, SequenceId},
    output::Output,
    tree_plan::{splits, tree_plan},
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
    /// Blocks that share a context, and what they need if these are several.
    splits: usize,
    parts: Option<Parts>,
}

impl TreeAttend {
    /// For a step whose nodes have the arena's rows from `start` on, and heads of which `shared` have one key head.
    pub(crate) fn plan(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        (start, shared): (usize, usize),
        (device, scratch): (&Device, &mut SplitScratch),
    ) -> Result<Self> {
        let kernel = tensor_kernel(arena.dtype(), arena.head_dim());
        let width = if kernel.is_some() { TENSOR_QUERIES } else { QUERIES };
        let committed = sequences.iter().map(|&sequence| arena.rows_of(sequence));
        let (plan, tiles) = tree_plan(batch, committed, (start, shared), width);
        let longest = batch.spans.iter().map(|span| span.cached + span.tree()).max().unwrap_or(0);
        let splits = match kernel {
            Some(_) => splits(tiles * arena.kv_heads(), longest, scratch.multiprocessors(device)?),
            None => 1,
        };
        let parts = match splits {
            1 => None,
            _ => Some(scratch.parts(arena.head_dim(), device)?),
        };
        Ok(Self { plan: Tensor::new(plan, device)?, tiles, kernel, splits, parts })
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
        let (partials, counters) = self.parts.as_ref().map(|parts| (&parts.0, &parts.1)).unzip();
        let tensors = [Some(queries), Some(keys), Some(values), Some(&attended), Some(&self.plan), partials, counters];
        let sizes = [rows, heads, kv_heads, dim];
        // Kernels for tensor cores are made for their heads, and only they share contexts.
        let (kernel, tensors, sizes, threads, shared) = match self.kernel {
            Some(kernel) => (kernel, &tensors[..], &sizes[..3], 32 * TENSOR_WARPS, TENSOR_WARPS / 2 * partial(dim)),
            None => {
                let shared = QUERIES * dim + KEYS * (dim + 1) + 2 * QUERIES * KEYS;
                ("tree_attend", &tensors[..5], &sizes[..], 128, shared)
            }
        };
        Launch { kernel, tensors, sizes, floats: &[], grid: (self.tiles, kv_heads), threads, shared }
            .run_split(self.splits, queries.device())?;
        Ok(attended)
    }
}
