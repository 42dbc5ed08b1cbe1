//! Between [`TreeEngine`](super::TreeEngine), which keeps slots and the protocol, and the two decoders.

use laser_decode::{Candidate, ROOT_PARENT};

use super::{EngineError, Segment, config::ModelConfig};

/// A model that runs steps over caches of its own kind.
pub(super) trait Decoder: Send {
    /// Keys and values of one sequence. The default is empty and stands in while a step has the real one.
    type Cache: Default + Send;

    fn config(&self) -> &ModelConfig;

    /// A cache for `capacity` tokens.
    fn open(&mut self, capacity: usize) -> Result<Self::Cache, EngineError>;

    /// A cache for `capacity` tokens that begins with the first `length` of another.
    fn fork(&mut self, from: &mut Self::Cache, length: usize, capacity: usize) -> Result<Self::Cache, EngineError>;

    /// Appends the nodes to their caches (one a span) and to `best`, for each scored node in order, the `top_k` most
    /// probable next tokens (at most the vocabulary).
    fn forward(
        &mut self,
        batch: &Batch<'_>,
        caches: &mut [Self::Cache],
        top_k: usize,
        best: &mut Vec<Candidate>,
    ) -> Result<(), EngineError>;

    /// Keeps of the tokens behind the first `length` those at `keep`.
    fn commit(&mut self, cache: &mut Self::Cache, length: usize, keep: &[usize]) -> Result<(), EngineError>;

    /// Takes back the cache of a closed sequence.
    fn close(&mut self, cache: Self::Cache);
}

/// One sequence's part of a step.
#[derive(Debug)]
pub(super) struct Span<'a> {
    /// Tokens committed to its cache.
    pub(super) cached: usize,
    /// First of its rows in the batch.
    pub(super) offset: usize,
    /// Parent of each node, as in [`Segment`].
    pub(super) parents: &'a [u32],
    /// For each node a row of bits, set for those nodes that it does not see.
    hidden: Vec<u64>,
}

impl<'a> Span<'a> {
    pub(super) fn new(segment: &Segment<'a>, cached: usize, offset: usize) -> Self {
        let parents = segment.parents;
        let words = parents.len().div_ceil(64);
        let mut hidden = vec![u64::MAX; parents.len() * words];
        for (node, &parent) in parents.iter().enumerate() {
            if parent != ROOT_PARENT {
                let from = parent as usize * words;
                hidden.copy_within(from..from + words, node * words);
            }
            hidden[node * words + node / 64] &= !(1 << (node % 64));
        }
        Self { cached, offset, parents, hidden }
    }

    /// Bit i is set if `node` does not see node i: it is neither the node itself nor an ancestor.
    pub(super) fn hidden(&self, node: usize) -> &[u64] {
        let words = self.parents.len().div_ceil(64);
        &self.hidden[node * words..][..words]
    }
}

/// A step: the nodes of all sequences.
#[derive(Debug, Default)]
pub(super) struct Batch<'a> {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<usize>,
    /// Rows whose logits are wanted.
    pub(super) scored: Vec<u32>,
    pub(super) spans: Vec<Span<'a>>,
}

impl<'a> Batch<'a> {
    /// Adds a sequence's nodes, whose depths are known, behind `cached` tokens.
    pub(super) fn push(&mut self, segment: &Segment<'a>, depths: &[usize], cached: usize) {
        let offset = self.tokens.len();
        self.tokens.extend_from_slice(segment.tokens);
        self.positions.extend(depths.iter().map(|depth| cached + depth));
        let scored = offset + segment.scored_from..self.tokens.len();
        self.scored.extend(scored.filter_map(|row| u32::try_from(row).ok()));
        self.spans.push(Span::new(segment, cached, offset));
    }
}
