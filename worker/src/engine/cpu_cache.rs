//! The key/value cache of one sequence on a CPU, in the panels of the skinny product.
//!
//! Keys are a matrix with a position for each output (scores = queries · keysᵀ), values one with a position for each
//! input (sums = weights · values), so attention reads both as they lie. A commit moves the kept rows in place.

use super::{
    EngineError,
    config::ModelConfig,
    decoder::Cache,
    skinny::{Format, Line, PANEL, Panels, ZERO},
};

/// Keys and values of all layers; empty until made by [`new`](Self::new).
#[derive(Debug, Default)]
pub(super) struct CpuCache {
    layers: Vec<LayerCache>,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, Default)]
struct Shape {
    heads: usize,
    head_dim: usize,
    /// Positions, a multiple of 16.
    capacity: usize,
}

impl Shape {
    /// Lines of the keys of a head: for each 16 positions one for each dimension.
    fn key_lines(self) -> usize {
        self.capacity / PANEL * self.head_dim
    }

    /// Lines of the values of a head: for each 16 dimensions one for each position.
    fn value_lines(self) -> usize {
        self.head_dim.div_ceil(PANEL) * self.capacity
    }
}

#[derive(Debug)]
struct LayerCache {
    keys: Vec<Line>,
    values: Vec<Line>,
}

/// Keys and values of one head of one layer.
#[derive(Debug)]
pub(super) struct HeadCache<'a> {
    keys: &'a mut [Line],
    values: &'a mut [Line],
    shape: Shape,
}

impl CpuCache {
    /// Zeros for `capacity` positions.
    pub(super) fn new(config: &ModelConfig, capacity: usize) -> Self {
        let shape = Shape {
            heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: capacity.next_multiple_of(PANEL),
        };
        let layer = || LayerCache {
            keys: vec![ZERO; shape.heads * shape.key_lines()],
            values: vec![ZERO; shape.heads * shape.value_lines()],
        };
        Self {
            layers: (0..config.layers).map(|_| layer()).collect(),
            shape,
        }
    }

    /// The heads of a layer.
    pub(super) fn heads(&mut self, layer: usize) -> impl Iterator<Item = HeadCache<'_>> {
        let shape = self.shape;
        let LayerCache { keys, values } = &mut self.layers[layer];
        let keys = keys.chunks_exact_mut(shape.key_lines());
        let values = values.chunks_exact_mut(shape.value_lines());
        keys.zip(values).map(move |(keys, values)| HeadCache {
            keys,
            values,
            shape,
        })
    }
}

impl HeadCache<'_> {
    /// Writes the key and the value of a position.
    pub(super) fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let dim = self.shape.head_dim;
        let (panel, lane) = (position / PANEL, position % PANEL);
        let lines = &mut self.keys[panel * dim..][..dim];
        for (line, key) in lines.iter_mut().zip(key) {
            line.0[lane] = key.to_bits();
        }
        let panels = self.values.chunks_exact_mut(self.shape.capacity);
        for (panel, value) in panels.zip(value.chunks(PANEL)) {
            let line = &mut panel[position].0;
            line.iter_mut()
                .zip(value)
                .for_each(|(to, value)| *to = value.to_bits());
        }
    }

    /// The keys of the first `total` positions, an output each.
    pub(super) fn keys(&self, total: usize) -> Panels<'_> {
        Panels {
            lines: self.keys,
            format: Format::F32,
            inputs: self.shape.head_dim,
            outputs: total,
            stride: self.shape.head_dim,
        }
    }

    /// The values of the first `total` positions, an input each.
    pub(super) fn values(&self, total: usize) -> Panels<'_> {
        Panels {
            lines: self.values,
            format: Format::F32,
            inputs: total,
            outputs: self.shape.head_dim,
            stride: self.shape.capacity,
        }
    }

    /// Copies position `from` over position `to`.
    fn copy(&mut self, from: usize, to: usize) {
        let dim = self.shape.head_dim;
        for index in 0..dim {
            let value = self.keys[from / PANEL * dim + index].0[from % PANEL];
            self.keys[to / PANEL * dim + index].0[to % PANEL] = value;
        }
        for panel in self.values.chunks_exact_mut(self.shape.capacity) {
            panel[to] = panel[from];
        }
    }

    /// Copies the first `length` positions of `other`.
    fn copy_prefix(&mut self, other: &HeadCache<'_>, length: usize) {
        let keys = length.div_ceil(PANEL) * self.shape.head_dim;
        self.keys[..keys].copy_from_slice(&other.keys[..keys]);
        let from = other.values.chunks_exact(other.shape.capacity);
        let to = self.values.chunks_exact_mut(self.shape.capacity);
        for (to, from) in to.zip(from) {
            to[..length].copy_from_slice(&from[..length]);
        }
    }
}

impl Cache for CpuCache {
    fn capacity(&self) -> usize {
        self.shape.capacity
    }

    fn compact(&mut self, length: usize, keep: &[usize]) -> Result<(), EngineError> {
        let moved = || keep.iter().enumerate().filter(|(to, from)| to != *from);
        for layer in 0..self.layers.len() {
            for mut head in self.heads(layer) {
                moved().for_each(|(to, from)| head.copy(length + from, length + to));
            }
        }
        Ok(())
    }

    fn copy_prefix(&mut self, other: &mut Self, length: usize) -> Result<(), EngineError> {
        for layer in 0..self.layers.len() {
            for (mut to, from) in self.heads(layer).zip(other.heads(layer)) {
                to.copy_prefix(&from, length);
            }
        }
        Ok(())
    }
}
