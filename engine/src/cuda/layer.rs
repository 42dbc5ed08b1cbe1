//! What a layer does between its products and attention.

use candle_core::{Result, Tensor, bail};

use super::{
    Launch,
    rows::{THREADS, launch_move, wide},
    workspace::Workspace,
};
use crate::output::Output;

/// Threads of a head.
const WARP: usize = 32;

/// Adds y, if there is one, to x and returns the RMS norm of the sum, all `[nodes, width]`.
pub(crate) fn add_norm(
    x: &Tensor,
    y: Option<&Tensor>,
    (weight, eps): (&Tensor, f32),
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let (nodes, width) = x.dims2()?;
    let norms = workspace.output(Output::Normed, (nodes, width), x)?;
    Launch {
        kernel: "add_norm",
        tensors: &[Some(x), y, Some(weight), Some(x), Some(&norms)],
        sizes: &[width],
        floats: &[eps],
        grid: (nodes, 1),
        threads: THREADS,
        shared: THREADS / WARP,
    }
    .run(x.device())?;
    Ok(norms)
}

/// The rows of `from`, `[rows, width]`, that an index names.
pub(crate) fn gather(from: &Tensor, index: &Tensor, to: Output, workspace: &mut Workspace) -> Result<Tensor> {
    let ((rows, width), count) = (from.dims2()?, index.elem_count());
    let to = workspace.output(to, (count, width), from)?;
    launch_move((from, &to), index, [count, 1, rows, count, width])?;
    Ok(to)
}

/// silu(gate) · up, all `[nodes, width]`; gate and up may be columns of one product.
pub(crate) fn silu_mul(gate: &Tensor, up: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
    let (nodes, width) = gate.dims2()?;
    let product = workspace.output(Output::Inner, (nodes, width), gate)?;
    Launch {
        kernel: "silu_mul",
        tensors: &[Some(gate), Some(up), Some(&product)],
        sizes: &[width, row_stride(gate, up)?],
        floats: &[],
        grid: (nodes, width.div_ceil(wide(gate) * THREADS)),
        threads: THREADS,
        shared: 0,
    }
    .run(gate.device())?;
    Ok(product)
}

/// How far apart rows of both tensors begin.
fn row_stride(one: &Tensor, two: &Tensor) -> Result<usize> {
    match (one.stride(), two.stride()) {
        ([one, _], [two, _]) if one == two => Ok(*one),
        (one, two) => bail!("a kernel wants rows that are equally far apart: {one:?}, {two:?}"),
    }
}

/// Products of a step for heads of one kind, `[nodes, heads · head_dim]`, which may be columns of a product of all
/// kinds, and what is to be done with them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadProducts<'a> {
    pub(crate) products: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    /// The scale of a norm of each head, and what is added to the mean square.
    pub(crate) norm: Option<(&'a Tensor, f32)>,
    pub(crate) heads: usize,
}

/// Rotated and scaled queries `[nodes, heads, head_dim]`; rotated keys and values go to rows `start..` of a layer,
/// `[kv_heads, rows, head_dim]`. `angles` are `[nodes, head_dim]` in f32: of each node the cosines, then the sines.
pub(crate) fn rotate_write(
    [query, key, value]: [HeadProducts<'_>; 3],
    angles: &Tensor,
    (keys, values): &(Tensor, Tensor),
    start: usize,
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let (nodes, dim) = angles.dims2()?;
    let (kv_heads, rows, _) = keys.dims3()?;
    let rotated = workspace.output(Output::Queries, (nodes, query.heads * dim), query.products)?;
    let rotated = rotated.reshape((nodes, query.heads, dim))?;
    let key_stride = row_stride(key.products, value.products)?;
    let eps = query.norm.map_or(0.0, |norm| norm.1);
    Launch {
        kernel: "rotate_write",
        tensors: &[
            Some(query.products),
            Some(key.products),
            Some(value.products),
            query.bias,
            key.bias,
            value.bias,
            query.norm.map(|norm| norm.0),
            key.norm.map(|norm| norm.0),
            Some(angles),
            Some(&rotated),
            Some(keys),
            Some(values),
        ],
        sizes: &[query.heads, kv_heads, dim, rows, start, query.products.stride()[0], key_stride],
        floats: &[eps, 1.0 / (dim as f32).sqrt()],
        grid: (nodes, (query.heads + 2 * kv_heads).div_ceil(THREADS / WARP)),
        threads: THREADS,
        shared: 0,
    }
    .run(angles.device())?;
    Ok(rotated)
}
