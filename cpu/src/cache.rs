//! Key/value caches of single sequences, in the panels of the skinny product.
//!
//! Keys are a matrix with a position for each output (scores = queries · keysᵀ), values one with a position for each
//! input (sums = weights · values), so attention reads both as they lie. A commit moves the kept rows in place.
//! Buffers of closed sequences are reused; open and idle ones together never hold more tokens than were open at once
//! before, so memory is bounded by the largest batch seen.

use crate::{
    shape::ModelShape,
    skinny::{Format, Line, PANEL, Panels, ZERO},
};

/// Capacities are rounded up to this many tokens, so that buffers of similar texts are interchangeable.
const ROUNDING: usize = 128;

/// Keys and values of all layers of one sequence; the default is empty.
#[derive(Debug, Default)]
pub struct CpuCache {
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
pub(crate) struct HeadCache<'a> {
    keys: &'a mut [Line],
    values: &'a mut [Line],
    shape: Shape,
}

impl CpuCache {
    /// Zeros for `capacity` positions.
    pub(crate) fn new(model: &ModelShape, capacity: usize) -> Self {
        let capacity = capacity.next_multiple_of(PANEL);
        let shape = Shape { heads: model.kv_heads, head_dim: model.head_dim, capacity };
        let layer = || LayerCache {
            keys: vec![ZERO; shape.heads * shape.key_lines()],
            values: vec![ZERO; shape.heads * shape.value_lines()],
        };
        Self { layers: (0..model.layers).map(|_| layer()).collect(), shape }
    }

    /// Bytes of a cache for `capacity` positions, as [`CachePool`] makes it.
    pub(crate) fn bytes(model: &ModelShape, capacity: usize) -> usize {
        let capacity = capacity.next_multiple_of(ROUNDING);
        let shape = Shape { heads: model.kv_heads, head_dim: model.head_dim, capacity };
        model.layers * shape.heads * (shape.key_lines() + shape.value_lines()) * size_of::<Line>()
    }

    /// The heads of a layer.
    pub(crate) fn heads(&mut self, layer: usize) -> impl Iterator<Item = HeadCache<'_>> {
        let shape = self.shape;
        let LayerCache { keys, values } = &mut self.layers[layer];
        let keys = keys.chunks_exact_mut(shape.key_lines());
        let values = values.chunks_exact_mut(shape.value_lines());
        keys.zip(values).map(move |(keys, values)| HeadCache { keys, values, shape })
    }
}

impl HeadCache<'_> {
    /// Writes the key and the value of a position.
    pub(crate) fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let dim = self.shape.head_dim;
        let (panel, lane) = (position / PANEL, position % PANEL);
        let lines = &mut self.keys[panel * dim..][..dim];
        for (line, key) in lines.iter_mut().zip(key) {
            line.0[lane] = key.to_bits();
        }
        let panels = self.values.chunks_exact_mut(self.shape.capacity);
        for (panel, value) in panels.zip(value.chunks(PANEL)) {
            let line = &mut panel[position].0;
            line.iter_mut().zip(value).for_each(|(to, value)| *to = value.to_bits());
        }
    }

    /// The keys of the first `total` positions, an output each.
    pub(crate) fn keys(&self, total: usize) -> Panels<'_> {
        Panels {
            lines: self.keys,
            format: Format::F32,
            inputs: self.shape.head_dim,
            outputs: total,
            stride: self.shape.head_dim,
        }
    }

    /// The values of the first `total` positions, an input each.
    pub(crate) fn values(&self, total: usize) -> Panels<'_> {
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

impl CpuCache {
    /// Positions that it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.shape.capacity
    }

    /// Moves positions `length + keep[i]` to `length + i`.
    pub fn compact(&mut self, length: usize, keep: &[usize]) {
        let moved = || keep.iter().enumerate().filter(|(to, from)| to != *from);
        for layer in 0..self.layers.len() {
            for mut head in self.heads(layer) {
                moved().for_each(|(to, from)| head.copy(length + from, length + to));
            }
        }
    }

    /// Copies the first `length` positions of `other`.
    pub(crate) fn copy_prefix(&mut self, other: &mut Self, length: usize) {
        for layer in 0..self.layers.len() {
            for (mut to, from) in self.heads(layer).zip(other.heads(layer)) {
                to.copy_prefix(&from, length);
            }
        }
    }
}

/// Keeps the caches of closed sequences for the next ones.
#[derive(Debug, Default)]
pub(crate) struct CachePool {
    idle: Vec<CpuCache>,
    open_tokens: usize,
    peak_tokens: usize,
}

impl CachePool {
    /// A cache for at least `capacity` positions: an idle one of that size, or a new one. A larger one would take more
    /// than [`CpuCache::bytes`] says.
    pub(crate) fn acquire(&mut self, shape: &ModelShape, capacity: usize) -> CpuCache {
        let capacity = capacity.next_multiple_of(ROUNDING);
        let cache = match self.idle.iter().position(|cache| cache.capacity() == capacity) {
            Some(index) => self.idle.swap_remove(index),
            None => {
                self.make_room(capacity);
                CpuCache::new(shape, capacity)
            }
        };
        self.open_tokens += cache.capacity();
        self.peak_tokens = self.peak_tokens.max(self.open_tokens);
        cache
    }

    /// Takes back the cache of a closed sequence.
    pub(crate) fn release(&mut self, cache: CpuCache) {
        self.open_tokens -= cache.capacity();
        self.idle.push(cache);
    }

    /// Idle caches, all of other sizes, make room for a new one.
    fn make_room(&mut self, capacity: usize) {
        while self.tokens() + capacity > self.peak_tokens && self.idle.pop().is_some() {}
    }

    /// Tokens that open and idle caches have room for.
    fn tokens(&self) -> usize {
        self.open_tokens + self.idle.iter().map(CpuCache::capacity).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shape::tests::tiny;

    /// Every element of the key and the value of a position is its number.
    fn write(cache: &mut CpuCache, first: usize, count: usize, number: usize) {
        let dim = cache.shape.head_dim;
        for layer in 0..cache.layers.len() {
            for mut head in cache.heads(layer) {
                for position in 0..count {
                    let value = vec![(number + position) as f32; dim];
                    head.write(first + position, &value, &value);
                }
            }
        }
    }

    /// The first element of keys and of values of the first positions, the same in all heads and layers.
    fn numbers(cache: &mut CpuCache, length: usize) -> Vec<f32> {
        let (dim, mut all) = (cache.shape.head_dim, Vec::new());
        for layer in 0..cache.layers.len() {
            for head in cache.heads(layer) {
                let key = |at: usize| head.keys[at / PANEL * dim].0[at % PANEL];
                all.push((0..length).map(key).collect::<Vec<_>>());
                all.push((0..length).map(|at| head.values[at].0[0]).collect());
            }
        }
        assert!(all.iter().all(|one| *one == all[0]));
        all[0].iter().map(|bits| f32::from_bits(*bits)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_commit_keeps_exactly_the_rows_of_the_path(
            base in 0..20_usize,
            nodes in proptest::collection::vec(any::<bool>(), 1..40),
        ) {
            let mut cache = CpuCache::new(&tiny(), 64);
            let keep: Vec<usize> = (0..nodes.len()).filter(|&node| nodes[node]).collect();
            write(&mut cache, 0, base + nodes.len(), 0);
            cache.compact(base, &keep);
            let rows = (0..base).chain(keep.iter().map(|node| base + node));
            let expected: Vec<f32> = rows.map(|row| row as f32).collect();
            prop_assert_eq!(numbers(&mut cache, base + keep.len()), expected);
        }

        #[test]
        fn memory_never_exceeds_the_largest_batch(
            steps in proptest::collection::vec((1..600_usize, any::<bool>()), 1..60),
        ) {
            let mut pool = CachePool::default();
            let mut open: Vec<CpuCache> = Vec::new();
            let mut peak = 0;
            for (capacity, close) in steps {
                if close && !open.is_empty() {
                    let closed = open.remove(capacity % open.len());
                    pool.release(closed);
                } else {
                    let cache = pool.acquire(&tiny(), capacity);
                    prop_assert!(cache.capacity() >= capacity);
                    let lines = cache.layers.iter().map(|layer| layer.keys.len() + layer.values.len());
                    prop_assert_eq!(lines.sum::<usize>() * size_of::<Line>(), CpuCache::bytes(&tiny(), capacity));
                    open.push(cache);
                }
                let tokens: usize = open.iter().map(CpuCache::capacity).sum();
                peak = peak.max(tokens);
                prop_assert_eq!(pool.open_tokens, tokens);
                prop_assert!(pool.tokens() <= peak, "{} > {}", pool.tokens(), peak);
            }
        }
    }

    #[test]
    fn a_closed_cache_is_reused() {
        let mut pool = CachePool::default();
        let mut cache = pool.acquire(&tiny(), 100);
        write(&mut cache, 0, 1, 7);
        pool.release(cache);
        assert_eq!(numbers(&mut pool.acquire(&tiny(), 60), 1), [7.0]);
    }

    #[test]
    fn a_copy_starts_with_the_prefix_and_is_independent() {
        let (mut first, mut copy) = (CpuCache::new(&tiny(), 64), CpuCache::new(&tiny(), 300));
        write(&mut first, 0, 10, 0);
        copy.copy_prefix(&mut first, 6);
        write(&mut copy, 6, 2, 50);
        assert_eq!(numbers(&mut copy, 8), [0., 1., 2., 3., 4., 5., 50., 51.]);
        assert_eq!(numbers(&mut first, 10), [0., 1., 2., 3., 4., 5., 6., 7., 8., 9.]);
    }
}
