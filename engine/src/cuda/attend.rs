//! Attention of draft trees.

use candle_core::{Device, Result, Tensor, bail};
use laser_cpu::Batch;

use super::{Launch, output};
use crate::{
    arena::{Arena, SequenceId},
    tree_plan::{QUERIES, tree_plan},
};

/// Keys of a step of a block, and the widest head, as in tree.cu.
const KEYS: usize = 32;
const HEAD_MAX: usize = 256;

/// How the nodes of a step attend; the same for all layers.
#[derive(Debug)]
pub(crate) struct TreeAttend {
    plan: Tensor,
    tiles: usize,
}

impl TreeAttend {
    /// For a step whose nodes have the arena's rows from `start` on, and heads of which `shared` have one key head.
    pub(crate) fn plan(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        (start, shared): (usize, usize),
        device: &Device,
    ) -> Result<Self> {
        let committed = sequences.iter().map(|&sequence| arena.rows_of(sequence));
        let (plan, tiles) = tree_plan(batch, committed, (start, shared));
        Ok(Self { plan: Tensor::new(plan, device)?, tiles })
    }

    /// Rows `[nodes, heads · head_dim]` for scaled queries `[nodes, heads, head_dim]` over all keys and values of a
    /// layer, `[kv_heads, rows, head_dim]`.
    pub(crate) fn attend(&self, queries: &Tensor, (keys, values): &(Tensor, Tensor)) -> Result<Tensor> {
        let (nodes, heads, dim) = queries.dims3()?;
        let (kv_heads, rows, _) = keys.dims3()?;
        if dim > HEAD_MAX {
            bail!("attention on GPUs takes heads of at most {HEAD_MAX}, this model's have {dim}");
        }
        let attended = output((nodes, heads * dim), queries)?;
        Launch {
            kernel: "tree_attend",
            tensors: &[Some(queries), Some(keys), Some(values), Some(&attended), Some(&self.plan)],
            sizes: &[rows, heads, kv_heads, dim],
            floats: &[],
            grid: (self.tiles, kv_heads),
            threads: 128,
            shared: QUERIES * dim + KEYS * (dim + 1) + 2 * QUERIES * KEYS,
        }
        .run(queries.device())?;
        Ok(attended)
    }
}
