//! Key/value caches: one pair of preallocated tensors per layer and sequence.
//!
//! Rows are appended in place, and a commit moves the kept rows only if the path has gaps. Buffers
//! of closed sequences are reused; open and idle ones together never hold more tokens than were
//! open at once before, so memory is bounded by the largest batch seen.

use candle_core::{DType, Device, Result, Tensor};

use super::{EngineError, config::ModelConfig, decoder::Cache};

/// Capacities are rounded up to this many tokens, so that buffers of similar texts are
/// interchangeable.
const ROUNDING: usize = 128;

/// Keys and values of one layer, each `[kv_heads, capacity, head_dim]`.
#[derive(Debug)]
struct LayerCache {
    keys: Tensor,
    values: Tensor,
}

/// The cache of one sequence.
#[derive(Debug, Default)]
pub(super) struct KvCache {
    layers: Vec<LayerCache>,
    capacity: usize,
}

impl KvCache {
    /// Zeros for `capacity` tokens.
    pub(super) fn new(
        config: &ModelConfig,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let shape = (config.kv_heads, capacity, config.head_dim);
        let layers = (0..config.layers)
            .map(|_| {
                Ok(LayerCache {
                    keys: Tensor::zeros(shape, dtype, device)?,
                    values: Tensor::zeros(shape, dtype, device)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, capacity })
    }

    /// Writes the rows of new nodes (`[kv_heads, nodes, head_dim]`) behind the first `length` ones
    /// of `layer` and returns all rows so far, without a copy.
    pub(super) fn append(
        &self,
        layer: usize,
        length: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let cache = &self.layers[layer];
        cache.keys.slice_set(keys, 1, length)?;
        cache.values.slice_set(values, 1, length)?;
        let total = length + keys.dim(1)?;
        Ok((
            cache.keys.narrow(1, 0, total)?,
            cache.values.narrow(1, 0, total)?,
        ))
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layers
            .iter()
            .flat_map(|layer| [&layer.keys, &layer.values])
    }
}

impl Cache for KvCache {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn compact(&mut self, length: usize, keep: &[usize]) -> std::result::Result<(), EngineError> {
        let in_place = keep
            .iter()
            .enumerate()
            .take_while(|(to, from)| to == *from)
            .count();
        let (length, moved) = (length + in_place, &keep[in_place..]);
        let Some(last) = moved.last() else {
            return Ok(());
        };
        let rows: Vec<u32> = moved
            .iter()
            .filter_map(|from| u32::try_from(from - in_place).ok())
            .collect();
        let span = last - in_place + 1;
        let rows = Tensor::new(rows, self.layers[0].keys.device())?;
        for tensor in self.tensors() {
            let kept = tensor
                .narrow(1, length, span)?
                .contiguous()?
                .index_select(&rows, 1)?;
            tensor.slice_set(&kept, 1, length)?;
        }
        Ok(())
    }

    fn copy_prefix(
        &mut self,
        other: &mut Self,
        length: usize,
    ) -> std::result::Result<(), EngineError> {
        for (to, from) in self.tensors().zip(other.tensors()) {
            to.slice_set(&from.narrow(1, 0, length)?.contiguous()?, 1, 0)?;
        }
        Ok(())
    }
}

/// Keeps the caches of closed sequences for the next ones.
#[derive(Debug)]
pub(super) struct CachePool<C> {
    idle: Vec<C>,
    open_tokens: usize,
    peak_tokens: usize,
}

impl<C: Cache> CachePool<C> {
    pub(super) fn new() -> Self {
        Self {
            idle: Vec::new(),
            open_tokens: 0,
            peak_tokens: 0,
        }
    }

    /// A cache for at least `capacity` tokens: the smallest idle one that fits, or a new one of `make`.
    pub(super) fn acquire(
        &mut self,
        capacity: usize,
        make: impl FnOnce(usize) -> std::result::Result<C, EngineError>,
    ) -> std::result::Result<C, EngineError> {
        let fits = |(index, cache): (usize, &C)| {
            (cache.capacity() >= capacity).then_some((cache.capacity(), index))
        };
        let best = self.idle.iter().enumerate().filter_map(fits).min();
        let cache = match best {
            Some((_, index)) => self.idle.swap_remove(index),
            None => {
                let capacity = capacity.next_multiple_of(ROUNDING);
                self.make_room(capacity);
                make(capacity)?
            }
        };
        self.open_tokens += cache.capacity();
        self.peak_tokens = self.peak_tokens.max(self.open_tokens);
        Ok(cache)
    }

    /// Takes back the cache of a closed sequence.
    pub(super) fn release(&mut self, cache: C) {
        self.open_tokens -= cache.capacity();
        self.idle.push(cache);
    }

    /// Idle caches, all too small, make room for a new one.
    fn make_room(&mut self, capacity: usize) {
        while self.tokens() + capacity > self.peak_tokens && self.idle.pop().is_some() {}
    }

    /// Tokens that open and idle caches have room for.
    fn tokens(&self) -> usize {
        self.open_tokens + self.idle.iter().map(C::capacity).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A cache of two layers.
    fn make(capacity: usize) -> std::result::Result<KvCache, EngineError> {
        let zeros = || Tensor::zeros((2, capacity, 2), DType::F32, &Device::Cpu);
        let layer = || {
            Ok::<_, EngineError>(LayerCache {
                keys: zeros()?,
                values: zeros()?,
            })
        };
        let layers = vec![layer()?, layer()?];
        Ok(KvCache { layers, capacity })
    }

    /// Rows `first..first + count`, every element of a row being its number.
    fn rows(first: usize, count: usize) -> Tensor {
        let row = |row: usize| vec![row as f32; 2];
        let rows: Vec<f32> = (0..2)
            .flat_map(|_| (first..first + count).flat_map(row))
            .collect();
        Tensor::from_vec(rows, (2, count, 2), &Device::Cpu).unwrap()
    }

    fn numbers(cache: &KvCache, length: usize) -> Vec<Vec<f32>> {
        let first = |tensor: &Tensor| {
            let rows = tensor
                .narrow(1, 0, length)
                .unwrap()
                .narrow(2, 0, 1)
                .unwrap();
            let heads: Vec<Vec<f32>> = rows
                .squeeze(2)
                .unwrap()
                .contiguous()
                .unwrap()
                .to_vec2()
                .unwrap();
            assert_eq!(heads[0], heads[1]);
            heads[0].clone()
        };
        cache.tensors().map(first).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_commit_keeps_exactly_the_rows_of_the_path(
            base in 0..20_usize,
            nodes in proptest::collection::vec(any::<bool>(), 1..40),
        ) {
            let mut cache = make(64).unwrap();
            let keep: Vec<usize> = (0..nodes.len()).filter(|&node| nodes[node]).collect();
            for layer in 0..2 {
                let all = rows(0, base + nodes.len());
                cache.append(layer, 0, &all, &all).unwrap();
            }
            cache.compact(base, &keep).unwrap();
            let expected: Vec<f32> =
                (0..base).chain(keep.iter().map(|node| base + node)).map(|row| row as f32).collect();
            for got in numbers(&cache, base + keep.len()) {
                prop_assert_eq!(&got, &expected);
            }
        }

        #[test]
        fn memory_never_exceeds_the_largest_batch(
            steps in proptest::collection::vec((1..600_usize, any::<bool>()), 1..60),
        ) {
            let mut pool = CachePool::new();
            let mut open: Vec<KvCache> = Vec::new();
            let mut peak = 0;
            for (capacity, close) in steps {
                if close && !open.is_empty() {
                    let closed = open.remove(capacity % open.len());
                    pool.release(closed);
                } else {
                    let cache = pool.acquire(capacity, make).unwrap();
                    prop_assert!(cache.capacity >= capacity);
                    open.push(cache);
                }
                let tokens: usize = open.iter().map(|cache| cache.capacity).sum();
                peak = peak.max(tokens);
                prop_assert_eq!(pool.open_tokens, tokens);
                prop_assert!(pool.tokens() <= peak, "{} > {}", pool.tokens(), peak);
            }
        }
    }

    #[test]
    fn a_closed_cache_is_reused() {
        let mut pool = CachePool::new();
        let cache = pool.acquire(100, make).unwrap();
        let data = cache.layers[0].keys.id();
        pool.release(cache);
        assert_eq!(pool.acquire(60, make).unwrap().layers[0].keys.id(), data);
    }

    #[test]
    fn a_copy_starts_with_the_prefix_and_is_independent() {
        let (mut first, mut copy) = (make(64).unwrap(), make(300).unwrap());
        for layer in 0..2 {
            first.append(layer, 0, &rows(0, 10), &rows(0, 10)).unwrap();
        }
        copy.copy_prefix(&mut first, 6).unwrap();
        for layer in 0..2 {
            copy.append(layer, 6, &rows(50, 2), &rows(50, 2)).unwrap();
        }
        assert_eq!(numbers(&copy, 8)[3], [0., 1., 2., 3., 4., 5., 50., 51.]);
        assert_eq!(
            numbers(&first, 10)[3],
            [0., 1., 2., 3., 4., 5., 6., 7., 8., 9.]
        );
    }
}
