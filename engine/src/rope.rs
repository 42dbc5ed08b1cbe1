//! Rotary embeddings of a step as tensors.

use candle_core::{DType, Device, Result, Tensor};
use laser_cpu::Rope;

/// Cosines and sines of the nodes of a step, `[nodes, head_dim / 2]`; those of the queries carry the attention's 1/√d.
#[derive(Debug)]
pub(super) struct RopeRows {
    pub(super) query: (Tensor, Tensor),
    pub(super) key: (Tensor, Tensor),
}

impl RopeRows {
    pub(super) fn new(rope: &mut Rope, positions: &[usize], dtype: DType, device: &Device) -> Result<Self> {
        rope.reserve(positions);
        let width = positions.first().map_or(0, |first| rope.position(*first).0.len());
        let scale = 1.0 / ((2 * width) as f32).sqrt();
        let (cos, sin): (Vec<_>, Vec<_>) = positions.iter().map(|position| rope.position(*position)).unzip();
        let gather = |rows: &[&[f32]], scale: f32| {
            let values: Vec<f32> = rows.iter().copied().flatten().map(|value| value * scale).collect();
            Tensor::from_vec(values, (positions.len(), width), device)?.to_dtype(dtype)
        };
        Ok(Self { query: (gather(&cos, scale)?, gather(&sin, scale)?), key: (gather(&cos, 1.0)?, gather(&sin, 1.0)?) })
    }
}
