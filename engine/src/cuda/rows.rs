//! The move of rows.

use candle_core::{Result, Tensor};

use super::{Launch, output_of};

/// Threads of a block.
pub(super) const THREADS: usize = 256;

/// `[kv_heads, rows, head_dim]` for an index of so many rows, whose first `kept` are those of `from` that it names;
/// nothing has written the others.
pub(crate) fn move_rows(from: &Tensor, index: &Tensor, kept: usize) -> Result<Tensor> {
    let (kv_heads, from_rows, dim) = from.dims3()?;
    let rows = index.elem_count();
    let to = output_of((kv_heads, rows, dim), from.dtype(), from.device())?;
    launch_move((from, &to), index, [kept, kv_heads, from_rows, rows, dim])?;
    Ok(to)
}

/// Heads, and rows of each, that `kept` words of an index name, from one tensor to the start of another.
pub(super) fn launch_move(
    (from, to): (&Tensor, &Tensor),
    index: &Tensor,
    [kept, heads, from_rows, rows, dim]: [usize; 5],
) -> Result<()> {
    Launch {
        kernel: "move_rows",
        tensors: &[Some(from), Some(to), Some(index)],
        sizes: &[kept, from_rows, rows, dim],
        floats: &[],
        grid: ((kept * dim).div_ceil(wide(from) * THREADS), heads),
        threads: THREADS,
        shared: 0,
    }
    .run(from.device())
}

/// Elements that a thread loads at a time.
pub(super) fn wide(tensor: &Tensor) -> usize {
    16 / tensor.dtype().size_in_bytes()
}
