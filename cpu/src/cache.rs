//! Key/value caches of single sequences, in the panels of the skinny product.
//!
//! Keys are a matrix with a position for each output (scores = queries · keysᵀ), values one with a position for each
//! input (sums = weights · values), so attention reads both as they lie. A commit moves the kept rows in place.
//! Buffers of closed sequences are reused; open and idle ones together never hold more tokens than were open at once
//! before, so memory is bounded by the largest batch seen.
//!
//! Beside weights in f32 keys and values are f32, beside all others bf16: half as much to read, and where the processor
//! multiplies pairs or tiles of bf16, panels of both are such.

use rayon::prelude::*;

use crate::{
    shape::ModelShape,
    skinny::{Format, Line, Order, PANEL, Panels, Rows, TILE_INPUTS, TILED_OUTPUTS, ZERO, add_pairs, bf16, vectorized},
};

/// Positions of a block, of which tiles sum the values of even and of odd ones apart.
pub(crate) const POSITIONS: usize = TILE_INPUTS;

/// Values, and weights of positions, below which there are none beside tiles: 2^-50. So no product of two, and no sum
/// of such, is subnormal, which a tile takes as zero.
pub(crate) const LEAST: f32 = 8.881_784e-16;

/// Capacities are rounded up to this many tokens, so that buffers of similar texts are interchangeable.
const ROUNDING: usize = 128;

/// Keys and values of all layers of one sequence; the default is empty.
#[derive(Debug, Default)]
pub struct CpuCache {
    layers: Vec<LayerCache>,
    shape: CacheShape,
    /// Positions, a multiple of [`ROUNDING`].
    capacity: usize,
}

/// What the caches of a model have in common.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CacheShape {
    layers: usize,
    heads: usize,
    head_dim: usize,
    /// [`Format::F32`] or [`Format::Bf16`].
    format: Format,
    /// How panels are multiplied.
    order: Order,
}

impl CacheShape {
    /// That of a model whose weights have this format.
    pub(crate) fn new(model: &ModelShape, weights: Format) -> Self {
        let format = if weights == Format::F32 { Format::F32 } else { Format::Bf16 };
        let shape =
            Self { layers: model.layers, heads: model.kv_heads, head_dim: model.head_dim, format, ..Self::default() };
        [Order::Tiles, Order::Pairs].into_iter().find_map(|order| shape.multiplied(order)).unwrap_or(shape)
    }

    /// The same with panels that are multiplied in this order, if they can be.
    pub(crate) fn multiplied(self, order: Order) -> Option<Self> {
        let fits = match order {
            Order::Single => true,
            Order::Pairs => self.format == Format::Bf16,
            Order::Tiles => self.format == Format::Bf16 && self.head_dim.is_multiple_of(TILE_INPUTS),
        };
        (fits && order.is_there()).then_some(Self { order, ..self })
    }

    /// Columns that scores of so many positions have: as many, or those of whole tiles.
    fn columns(self, total: usize) -> usize {
        if self.order == Order::Tiles { total.next_multiple_of(POSITIONS).max(TILED_OUTPUTS) } else { total }
    }

    /// Lines of the keys of a head for 16 positions.
    fn key_panel(self) -> usize {
        self.format.lines(self.head_dim)
    }

    /// Lines of the keys of a head.
    fn key_lines(self, capacity: usize) -> usize {
        capacity / PANEL * self.key_panel()
    }

    /// Lines of the values of a head for 16 dimensions.
    fn value_panel(self, capacity: usize) -> usize {
        self.format.lines(capacity)
    }

    /// Lines of the values of a head.
    fn value_lines(self, capacity: usize) -> usize {
        self.head_dim.div_ceil(PANEL) * self.value_panel(capacity)
    }

    /// Bytes of a cache for `capacity` positions, as [`CachePool`] makes it.
    fn bytes(self, capacity: usize) -> usize {
        let capacity = capacity.next_multiple_of(ROUNDING);
        self.layers * self.heads * (self.key_lines(capacity) + self.value_lines(capacity)) * size_of::<Line>()
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
    shape: CacheShape,
    capacity: usize,
}

impl CpuCache {
    /// Zeros for `capacity` positions.
    pub(crate) fn new(shape: CacheShape, capacity: usize) -> Self {
        let capacity = capacity.next_multiple_of(ROUNDING);
        let layer = || LayerCache {
            keys: vec![ZERO; shape.heads * shape.key_lines(capacity)],
            values: vec![ZERO; shape.heads * shape.value_lines(capacity)],
        };
        // 70 MB for 71M parameters and 900 tokens: a thread would take a third of a list's time to zero them.
        Self { layers: (0..shape.layers).into_par_iter().map(|_| layer()).collect(), shape, capacity }
    }

    /// The heads of a layer.
    pub(crate) fn heads(&mut self, layer: usize) -> impl Iterator<Item = HeadCache<'_>> {
        let (shape, capacity) = (self.shape, self.capacity);
        let LayerCache { keys, values } = &mut self.layers[layer];
        let keys = keys.chunks_exact_mut(shape.key_lines(capacity));
        let values = values.chunks_exact_mut(shape.value_lines(capacity));
        keys.zip(values).map(move |(keys, values)| HeadCache { keys, values, shape, capacity })
    }
}

impl HeadCache<'_> {
    /// Writes the key and the value of a position.
    pub(crate) fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let (panel, lane) = (self.shape.key_panel(), position % PANEL);
        let lines = &mut self.keys[position / PANEL * panel..][..panel];
        let value_panel = self.shape.value_panel(self.capacity);
        let values = self.values.chunks_exact_mut(value_panel).zip(value.chunks(PANEL));
        match self.shape.format {
            Format::F32 => {
                for (line, key) in lines.iter_mut().zip(key) {
                    line.0[lane] = key.to_bits();
                }
                for (panel, value) in values {
                    let line = &mut panel[position].0;
                    line.iter_mut().zip(value).for_each(|(to, value)| *to = value.to_bits());
                }
            }
            _ => {
                for (line, &[low, high]) in lines.iter_mut().zip(key.as_chunks::<2>().0) {
                    line.0[lane] = bf16(low) | bf16(high) << 16;
                }
                for (panel, value) in values {
                    if position.is_multiple_of(POSITIONS) {
                        // What another sequence left there would be multiplied by zero, which not even NaN may meet.
                        panel[position / 2..][..POSITIONS / 2].fill(ZERO);
                    }
                    let line = &mut panel[position / 2].0;
                    for (to, &value) in line.iter_mut().zip(value) {
                        let bits = if value.abs() < LEAST { 0 } else { bf16(value) };
                        *to = with_half(*to, position, bits);
                    }
                }
            }
        }
    }

    /// How many positions are summed together, in places that their numbers say: one, a pair, or a block. Weights of
    /// more than one are rounded to bf16.
    pub(crate) fn together(&self) -> usize {
        match self.shape.order {
            Order::Single => 1,
            Order::Pairs => 2,
            Order::Tiles => POSITIONS,
        }
    }

    /// Queries times the keys of the first `total` positions, into so many columns or some more.
    pub(crate) fn scores(&self, total: usize, queries: &Rows, scores: &mut Rows) {
        self.keys(self.shape.columns(total)).multiply(queries, scores, self.shape.order);
    }

    /// The values of the first `total` positions, summed by their weights, which have the columns of scores.
    pub(crate) fn sums(&self, total: usize, weights: &Rows, sums: &mut Rows) {
        let total = if self.shape.order == Order::Tiles { total.next_multiple_of(POSITIONS) } else { total };
        self.values(total).multiply(weights, sums, self.shape.order);
    }

    /// Goes on with the sums of a row, padded to whole panels, over values that lie elsewhere than at their positions:
    /// `slots` has where, from the first position of those that are summed [together](Self::together) on, and `weights`
    /// what they weigh, rounded to bf16.
    pub(crate) fn add_moved(&self, slots: &[usize], weights: &[f32], sums: &mut [f32]) {
        let panel = self.shape.value_panel(self.capacity);
        match self.shape.order {
            Order::Tiles => add_blocks(self.values, panel, slots, weights, sums),
            Order::Pairs => add_pairs(self.values, panel, (slots, weights), sums),
            Order::Single => unreachable!("values are summed one by one wherever they lie"),
        }
    }

    /// The keys of the first `total` positions, an output each.
    fn keys(&self, total: usize) -> Panels<'_> {
        Panels {
            lines: self.keys,
            format: self.shape.format,
            inputs: self.shape.head_dim,
            outputs: total,
            stride: self.shape.key_panel(),
        }
    }

    /// The values of the first `total` positions, an input each.
    fn values(&self, total: usize) -> Panels<'_> {
        Panels {
            lines: self.values,
            format: self.shape.format,
            inputs: total,
            outputs: self.shape.head_dim,
            stride: self.shape.value_panel(self.capacity),
        }
    }

    /// Copies position `from` over position `to`.
    fn copy(&mut self, from: usize, to: usize) {
        let lines = self.shape.key_panel();
        for line in 0..lines {
            let word = self.keys[from / PANEL * lines + line].0[from % PANEL];
            self.keys[to / PANEL * lines + line].0[to % PANEL] = word;
        }
        for panel in self.values.chunks_exact_mut(self.shape.value_panel(self.capacity)) {
            match self.shape.format {
                Format::F32 => panel[to] = panel[from],
                _ => {
                    let pairs = panel[from / 2].0;
                    let to_line = panel[to / 2].0.iter_mut().zip(pairs);
                    to_line.for_each(|(word, pair)| *word = with_half(*word, to, half_of(pair, from)));
                }
            }
        }
    }

    /// Copies the first `length` positions of `other`.
    fn copy_prefix(&mut self, other: &HeadCache<'_>, length: usize) {
        let keys = length.div_ceil(PANEL) * self.shape.key_panel();
        self.keys[..keys].copy_from_slice(&other.keys[..keys]);
        let lines = self.shape.format.lines(length);
        let from = other.values.chunks_exact(self.shape.value_panel(other.capacity));
        let to = self.values.chunks_exact_mut(self.shape.value_panel(self.capacity));
        for (to, from) in to.zip(from) {
            to[..lines].copy_from_slice(&from[..lines]);
            // As in `write`.
            to[lines..lines.next_multiple_of(POSITIONS / 2)].fill(ZERO);
        }
    }
}

vectorized! {
    /// [`HeadCache::add_moved`] as tiles add, for values whose panels have so many lines.
    fn add_blocks = sum_blocks(values: &[Line], panel: usize, slots: &[usize], weights: &[f32], sums: &mut [f32]);
}

#[inline(always)]
fn sum_blocks(values: &[Line], panel: usize, slots: &[usize], weights: &[f32], sums: &mut [f32]) {
    for (slots, weights) in slots.chunks(POSITIONS).zip(weights.chunks(POSITIONS)) {
        for (panel, sums) in values.chunks_exact(panel).zip(sums.as_chunks_mut::<PANEL>().0) {
            let (mut even, mut odd) = ([0.0_f32; PANEL], [0.0_f32; PANEL]);
            for (slots, weights) in slots.chunks(2).zip(weights.chunks(2)) {
                add_value(&mut even, panel, slots[0], weights[0]);
                if let (Some(slot), Some(weight)) = (slots.get(1), weights.get(1)) {
                    add_value(&mut odd, panel, *slot, *weight);
                }
            }
            sums.iter_mut().zip(even.iter().zip(odd)).for_each(|(sum, (even, odd))| *sum += even + odd);
        }
    }
}

/// Adds the value of a slot in bf16, times its weight.
#[inline(always)]
fn add_value(sums: &mut [f32; PANEL], panel: &[Line], slot: usize, weight: f32) {
    for (sum, pair) in sums.iter_mut().zip(panel[slot / 2].0) {
        *sum = weight.mul_add(f32::from_bits(half_of(pair, slot) << 16), *sum);
    }
}

/// The bf16 of a position in a word, which holds those of an even position and of the next.
fn half_of(word: u32, position: usize) -> u32 {
    word >> (position % 2 * 16) & 0xffff
}

/// The word with another bf16 for a position.
fn with_half(word: u32, position: usize, bits: u32) -> u32 {
    let shift = position % 2 * 16;
    word & !(0xffff << shift) | bits << shift
}

impl CpuCache {
    /// Positions that it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
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
#[derive(Debug)]
pub(crate) struct CachePool {
    shape: CacheShape,
    idle: Vec<CpuCache>,
    open_tokens: usize,
    peak_tokens: usize,
}

impl CachePool {
    pub(crate) fn new(shape: CacheShape) -> Self {
        Self { shape, idle: Vec::new(), open_tokens: 0, peak_tokens: 0 }
    }

    /// Bytes that a cache for `capacity` positions takes.
    pub(crate) fn bytes(&self, capacity: usize) -> usize {
        self.shape.bytes(capacity)
    }

    /// A cache for at least `capacity` positions: an idle one of that size, or a new one. A larger one would take more
    /// than [`CachePool::bytes`] says.
    pub(crate) fn acquire(&mut self, capacity: usize) -> CpuCache {
        let capacity = capacity.next_multiple_of(ROUNDING);
        let cache = match self.idle.iter().position(|cache| cache.capacity() == capacity) {
            Some(index) => self.idle.swap_remove(index),
            None => {
                self.make_room(capacity);
                CpuCache::new(self.shape, capacity)
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

    fn shape(format: Format) -> CacheShape {
        CacheShape::new(&tiny(), format)
    }

    fn formats() -> impl Strategy<Value = Format> {
        prop_oneof![Just(Format::F32), Just(Format::Q8)]
    }

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
        let lines = cache.shape.key_panel();
        let (wide, mut all) = (cache.shape.format == Format::F32, Vec::new());
        for layer in 0..cache.layers.len() {
            for head in cache.heads(layer) {
                let key = |at: usize| head.keys[at / PANEL * lines].0[at % PANEL];
                let keys = (0..length).map(|at| if wide { key(at) } else { key(at) << 16 });
                all.push(keys.collect::<Vec<_>>());
                let value = |at: usize| half_of(head.values[at / 2].0[0], at) << 16;
                all.push((0..length).map(|at| if wide { head.values[at].0[0] } else { value(at) }).collect());
            }
        }
        assert!(all.iter().all(|one| *one == all[0]));
        all[0].iter().map(|bits| f32::from_bits(*bits)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_commit_keeps_exactly_the_rows_of_the_path(
            format in formats(),
            base in 0..20_usize,
            nodes in proptest::collection::vec(any::<bool>(), 1..40),
        ) {
            let mut cache = CpuCache::new(shape(format), 64);
            let keep: Vec<usize> = (0..nodes.len()).filter(|&node| nodes[node]).collect();
            write(&mut cache, 0, base + nodes.len(), 0);
            cache.compact(base, &keep);
            let rows = (0..base).chain(keep.iter().map(|node| base + node));
            let expected: Vec<f32> = rows.map(|row| row as f32).collect();
            prop_assert_eq!(numbers(&mut cache, base + keep.len()), expected);
        }

        #[test]
        fn memory_never_exceeds_the_largest_batch(
            format in formats(),
            steps in proptest::collection::vec((1..600_usize, any::<bool>()), 1..60),
        ) {
            let mut pool = CachePool::new(shape(format));
            let mut open: Vec<CpuCache> = Vec::new();
            let mut peak = 0;
            for (capacity, close) in steps {
                if close && !open.is_empty() {
                    let closed = open.remove(capacity % open.len());
                    pool.release(closed);
                } else {
                    let cache = pool.acquire(capacity);
                    prop_assert!(cache.capacity() >= capacity);
                    let lines = cache.layers.iter().map(|layer| layer.keys.len() + layer.values.len());
                    prop_assert_eq!(lines.sum::<usize>() * size_of::<Line>(), pool.bytes(capacity));
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
        let mut pool = CachePool::new(shape(Format::F32));
        let mut cache = pool.acquire(100);
        write(&mut cache, 0, 1, 7);
        pool.release(cache);
        assert_eq!(numbers(&mut pool.acquire(60), 1), [7.0]);
    }

    #[test]
    fn a_copy_starts_with_the_prefix_and_is_independent() {
        for format in [Format::F32, Format::Bf16] {
            let (mut first, mut copy) = (CpuCache::new(shape(format), 64), CpuCache::new(shape(format), 300));
            write(&mut first, 0, 10, 0);
            copy.copy_prefix(&mut first, 5);
            write(&mut copy, 5, 2, 50);
            assert_eq!(numbers(&mut copy, 7), [0., 1., 2., 3., 4., 50., 51.]);
            assert_eq!(numbers(&mut first, 10), [0., 1., 2., 3., 4., 5., 6., 7., 8., 9.]);
        }
    }
}
