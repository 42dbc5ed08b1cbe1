//! Between the tree engine, which keeps slots and the protocol, and the two decoders.

use laser_cpu::{Allowed, Batch, CpuCache, CpuDecoder, MaskedRow, Predictions};

use crate::error::EngineError;

/// A model that runs steps over caches of its own kind.
pub(super) trait Decoder: Send {
    /// Keys and values of one sequence. The default is empty and stands in while a step has the real one.
    type Cache: Default + Send;

    /// Bytes that a cache for `capacity` tokens takes, with its share of what is kept in reserve.
    fn cache_bytes(&self, capacity: usize) -> usize;

    /// A cache for `capacity` tokens.
    fn open(&mut self, capacity: usize) -> Result<Self::Cache, EngineError>;

    /// A cache for `capacity` tokens that begins with the first `length` of another.
    fn fork(&mut self, from: &mut Self::Cache, length: usize, capacity: usize) -> Result<Self::Cache, EngineError>;

    /// Appends the nodes to their caches (one per span) and returns, for each scored node in order, the `top_k` most
    /// probable next tokens (at most the vocabulary).
    fn forward(
        &mut self,
        batch: &Batch<'_>,
        caches: &mut [Self::Cache],
        top_k: usize,
    ) -> Result<Predictions, EngineError>;

    /// What rows of the last step say of the tokens that may follow there, if the step
    /// [kept its logits](Batch::keeps_logits); nothing of a row that no token may follow. Only targets are asked.
    fn masked(&mut self, _rows: &[MaskedRow<'_>], _top_k: usize) -> Result<Vec<Option<Allowed>>, EngineError> {
        Ok(Vec::new())
    }

    /// Keeps of the tokens behind the first `length` those at `keep`.
    fn commit(&mut self, cache: &mut Self::Cache, length: usize, keep: &[usize]) -> Result<(), EngineError>;

    /// Takes back the cache of a closed sequence.
    fn close(&mut self, cache: Self::Cache);
}

impl Decoder for CpuDecoder {
    type Cache = CpuCache;

    fn cache_bytes(&self, capacity: usize) -> usize {
        self.cache_bytes(capacity)
    }

    fn open(&mut self, capacity: usize) -> Result<CpuCache, EngineError> {
        Ok(self.open(capacity))
    }

    fn fork(&mut self, from: &mut CpuCache, length: usize, capacity: usize) -> Result<CpuCache, EngineError> {
        Ok(self.fork(from, length, capacity))
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        caches: &mut [CpuCache],
        top_k: usize,
    ) -> Result<Predictions, EngineError> {
        Ok(self.forward(batch, caches, top_k))
    }

    fn masked(&mut self, rows: &[MaskedRow<'_>], top_k: usize) -> Result<Vec<Option<Allowed>>, EngineError> {
        Ok(CpuDecoder::masked(self, rows, top_k))
    }

    fn commit(&mut self, cache: &mut CpuCache, length: usize, keep: &[usize]) -> Result<(), EngineError> {
        cache.compact(length, keep);
        Ok(())
    }

    fn close(&mut self, cache: CpuCache) {
        self.close(cache);
    }
}
