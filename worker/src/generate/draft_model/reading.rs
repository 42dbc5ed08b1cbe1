//! One forward of a draft model: what of a sequence is read, and what of that an acceptance head judges.

use laser_decode::{ROOT_PARENT, Token, chain_parents};
use laser_engine::{ACCEPTED, Scores, Segment, Slot};

use super::{Reader, index_u32};

/// One sequence's part of a forward.
pub(super) struct Reading {
    /// Its place among the readers.
    pub(super) reader: usize,
    /// Tokens of `unread` that become cached, and whether none is left then: the last one is the root.
    pub(super) chunk: usize,
    pub(super) is_whole: bool,
    /// The drafted nodes behind them.
    pub(super) nodes: Vec<usize>,
    pub(super) tokens: Vec<Token>,
    pub(super) parents: Vec<u32>,
    /// The features before the tokens, if the model reads any.
    pub(super) before: Vec<f32>,
    /// As [`Reader::reached`] tells of the nodes.
    pub(super) reached: f32,
}

impl Reading {
    pub(super) fn new((at, is_whole): (usize, bool), reader: &Reader, chunk: usize, nodes: Vec<usize>) -> Self {
        let tree = reader.refined.tree();
        let tokens =
            reader.unread[..chunk].iter().copied().chain(nodes.iter().map(|&node| tree.tokens()[node])).collect();
        let root = chunk.checked_sub(1);
        // The nodes are ascending and have their ancestors among them.
        let place = |node: u32| match nodes.binary_search(&(node as usize)) {
            Ok(at) => Some(chunk + at),
            Err(_) => root,
        };
        let of = |&node: &usize| place(tree.parents()[node]).map_or(ROOT_PARENT, index_u32);
        let parents = chain_parents(chunk).chain(nodes.iter().map(of)).collect();
        let reached = reader.reached(&nodes);
        Self { reader: at, chunk, is_whole, nodes, tokens, parents, before: Vec::new(), reached }
    }

    /// The features before its tokens: the target's before the chunk, the model's own before the nodes.
    pub(super) fn add_features(&mut self, reader: &Reader, hidden_size: usize) {
        self.before.extend_from_slice(&reader.features[..self.chunk * hidden_size]);
        let before = self.nodes.iter().filter_map(|&node| reader.refined.feature_before(node));
        before.for_each(|feature| self.before.extend_from_slice(feature));
    }

    /// Numbers of the features before the chunk.
    pub(super) fn chunk_features(&self) -> usize {
        self.chunk * self.before.len() / self.tokens.len()
    }

    /// Nodes of the tree that are scored, and where in the segment they are.
    pub(super) fn scored(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let root = self.chunk.checked_sub(1).map(|root| (0, root));
        root.into_iter().chain(self.nodes.iter().copied().zip(self.chunk..))
    }
}

/// The drafted nodes of a reading as the acceptance head gets them: it looks at their features alone.
pub(super) struct Judged<'a> {
    pub(super) reading: &'a Reading,
    pub(super) slot: Slot,
    tokens: Vec<Token>,
    parents: Vec<u32>,
    features: Vec<f32>,
}

impl<'a> Judged<'a> {
    pub(super) fn new(reading: &'a Reading, scores: &Scores, slot: Slot) -> Self {
        let nodes = reading.nodes.len();
        let features = (reading.chunk..).take(nodes).flat_map(|at| scores.feature(at)).copied().collect();
        Self { reading, slot, tokens: vec![ACCEPTED; nodes], parents: vec![ROOT_PARENT; nodes], features }
    }

    pub(super) fn segment(&self) -> Segment<'_> {
        let Self { slot, tokens, parents, features, .. } = self;
        Segment { slot: *slot, tokens, parents, scored_from: 0, before: features, ..Segment::default() }
    }
}
