//! Queries, keys and values of a step, by their positions.

use candle_core::{DType, Device, Result, Tensor};
use laser_cpu::Rope;

use crate::{arena::Arena, linear::Linear, norm::Norm};

/// A projection to the heads of one kind.
#[derive(Debug)]
pub(super) struct Heads {
    pub(super) linear: Linear,
    /// Of each head.
    pub(super) norm: Option<Norm>,
    pub(super) count: usize,
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
    pub(super) fn write(
        &self,
        [query, key, value]: [&Heads; 3],
        x: &Tensor,
        (arena, layer): (&Arena, usize),
        start: usize,
    ) -> Result<Tensor> {
        match self {
            Self::Tensors { query: query_angles, key: key_angles } => {
                let keys = rotate(&key.forward(x)?, key_angles)?;
                arena.write(layer, start, (&keys, &value.forward(x)?))?;
                rotate(&query.forward(x)?, query_angles)
            }
            #[cfg(feature = "cuda")]
            Self::Kernel(angles) => {
                let [q, k, v] = [query.linear.product(x)?, key.linear.product(x)?, value.linear.product(x)?];
                let heads = [query.products(&q), key.products(&k), value.products(&v)];
                crate::cuda::layer::rotate_write(heads, angles, arena.layer(layer), start)
            }
        }
    }
}

impl Heads {
    /// `[nodes, heads, head_dim]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(x)?;
        let (nodes, width) = y.dims2()?;
        let heads = y.reshape((nodes, self.count, width / self.count))?;
        match &self.norm {
            Some(norm) => norm.forward(&heads),
            None => Ok(heads),
        }
    }

    #[cfg(feature = "cuda")]
    fn products<'a>(&'a self, products: &'a Tensor) -> crate::cuda::layer::HeadProducts<'a> {
        let norm = self.norm.as_ref().map(Norm::parts);
        crate::cuda::layer::HeadProducts { products, bias: self.linear.bias(), norm, heads: self.count }
    }
}

/// Rotary embedding of `[nodes, heads, head_dim]`.
fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    candle_nn::rotary_emb::rope_thd(&x.unsqueeze(0)?, cos, sin)?.squeeze(0)
}
