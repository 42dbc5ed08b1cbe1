//! Queries, keys and values of a step, by their positions.

use candle_core::{DType, Device, Result, Tensor};
use laser_cpu::Rope;

#[cfg(feature = "cuda")]
use crate::output::Output;
use crate::{
    arena::Arena,
    linear::{Linear, Projections},
    norm::Norm,
    workspace::Workspace,
};

/// A layer's projections to queries, keys and values, and what becomes of these.
#[derive(Debug)]
pub(super) struct Heads {
    /// In that order.
    pub(super) projections: Projections,
    /// Query heads, and as many key as value heads.
    pub(super) counts: (usize, usize),
    /// Of each query head and of each key head.
    pub(super) norms: Option<(Norm, Norm)>,
}

/// Rotary embeddings of a step's nodes; the queries' carry the attention's 1/√d.
#[derive(Debug)]
pub(super) enum Rotation {
    /// By candle's kernels: cosines and sines `[nodes, head_dim / 2]`.
    Tensors { query: (Tensor, Tensor), key: (Tensor, Tensor) },
    /// By one of our own, on a GPU: `[nodes, head_dim]` in f32, of each node the cosines, then the sines.
    #[cfg(feature = "cuda")]
    Kernel(Tensor),
}

impl Rotation {
    pub(super) fn new(rope: &mut Rope, positions: &[usize], (dtype, device): (DType, &Device)) -> Result<Self> {
        rope.reserve(positions);
        let width = positions.first().map_or(0, |first| rope.position(*first).0.len());
        let angles = positions.iter().map(|position| rope.position(*position));
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let angles: Vec<f32> = angles.flat_map(|(cos, sin)| [cos, sin]).flatten().copied().collect();
            return Tensor::from_vec(angles, (positions.len(), 2 * width), device).map(Self::Kernel);
        }
        let (cos, sin): (Vec<_>, Vec<_>) = angles.unzip();
        let gather = |rows: &[&[f32]], scale: f32| {
            let values: Vec<f32> = rows.iter().copied().flatten().map(|value| value * scale).collect();
            Tensor::from_vec(values, (positions.len(), width), device)?.to_dtype(dtype)
        };
        let scale = 1.0 / ((2 * width) as f32).sqrt();
        let query = (gather(&cos, scale)?, gather(&sin, scale)?);
        Ok(Self::Tensors { query, key: (gather(&cos, 1.0)?, gather(&sin, 1.0)?) })
    }

    /// Rotated queries `[nodes, heads, head_dim]` of x, `[nodes, hidden_size]`. Rotated keys, and values, go to the
    /// rows of a layer of the arena from `start` on.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn write(
        &self,
        heads: &Heads,
        x: &Tensor,
        (arena, layer): (&Arena, usize),
        start: usize,
        workspace: &mut Workspace,
    ) -> Result<Tensor> {
        match self {
            Self::Tensors { query: query_angles, key: key_angles } => {
                let keys = rotate(&heads.keys(x)?, key_angles)?;
                arena.write(layer, start, (&keys, &heads.values(x)?))?;
                rotate(&heads.queries(x)?, query_angles)
            }
            #[cfg(feature = "cuda")]
            Self::Kernel(angles) => {
                let products = heads.projections.products(x, Output::Heads, workspace)?;
                let heads = heads.products(&products);
                crate::cuda::layer::rotate_write(heads, angles, arena.layer(layer), start, workspace)
            }
        }
    }
}

impl Heads {
    /// `[nodes, heads, head_dim]`.
    fn queries(&self, x: &Tensor) -> Result<Tensor> {
        let norm = self.norms.as_ref().map(|norms| &norms.0);
        by_head(self.projections.part(0), self.counts.0, norm, x)
    }

    /// `[nodes, kv_heads, head_dim]`.
    fn keys(&self, x: &Tensor) -> Result<Tensor> {
        let norm = self.norms.as_ref().map(|norms| &norms.1);
        by_head(self.projections.part(1), self.counts.1, norm, x)
    }

    /// `[nodes, kv_heads, head_dim]`.
    fn values(&self, x: &Tensor) -> Result<Tensor> {
        by_head(self.projections.part(2), self.counts.1, None, x)
    }

    #[cfg(feature = "cuda")]
    fn products<'a>(&'a self, products: &'a [Tensor]) -> [crate::cuda::layer::HeadProducts<'a>; 3] {
        let norms = self.norms.as_ref();
        let norms = [norms.map(|norms| norms.0.parts()), norms.map(|norms| norms.1.parts()), None];
        let of = |at: usize| crate::cuda::layer::HeadProducts {
            products: &products[at],
            bias: self.projections.part(at).bias(),
            norm: norms[at],
            heads: if at == 0 { self.counts.0 } else { self.counts.1 },
        };
        [of(0), of(1), of(2)]
    }
}

/// `[nodes, heads, head_dim]`.
fn by_head(linear: &Linear, heads: usize, norm: Option<&Norm>, x: &Tensor) -> Result<Tensor> {
    let y = linear.forward(x)?;
    let (nodes, width) = y.dims2()?;
    let y = y.reshape((nodes, heads, width / heads))?;
    match norm {
        Some(norm) => norm.forward(&y),
        None => Ok(y),
    }
}

/// Rotary embedding of `[nodes, heads, head_dim]`.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    candle_nn::rotary_emb::rope_thd(&x.unsqueeze(0)?, cos, sin)?.squeeze(0)
}
