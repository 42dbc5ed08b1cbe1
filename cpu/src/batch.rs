//! A step: the nodes of the trees of many sequences as one batch of rows.

use laser_decode::{Draw, ROOT_PARENT};

/// One sequence's part of a step.
#[derive(Debug)]
pub struct Span<'a> {
    /// Tokens committed to its cache.
    pub cached: usize,
    /// Nodes of its tree behind them that earlier steps have computed.
    pub held: usize,
    /// First of its rows in the batch.
    pub offset: usize,
    /// `parents[i] < held + i` is the node of the tree that `i` continues, held ones first; [`ROOT_PARENT`] for the
    /// committed context.
    pub parents: &'a [u32],
    /// First nodes of the tree, held ones included, that each continue the one before: they lie at their positions.
    straight: usize,
    /// For each node of the tree a row of bits, set for those nodes that it does not see.
    hidden: Vec<u64>,
}

impl<'a> Span<'a> {
    fn new(tree: Tree<'_>, parents: &'a [u32], offset: usize) -> Self {
        let Tree { cached, held } = tree;
        let nodes = held.len() + parents.len();
        let words = nodes.div_ceil(64);
        let mut hidden = vec![u64::MAX; nodes * words];
        for (node, &parent) in held.iter().chain(parents).enumerate() {
            if parent != ROOT_PARENT {
                let from = parent as usize * words;
                hidden.copy_within(from..from + words, node * words);
            }
            hidden[node * words + node / 64] &= !(1 << (node % 64));
        }
        let continues = |(node, parent): &(u32, &u32)| **parent == node.checked_sub(1).unwrap_or(ROOT_PARENT);
        let straight = (0..).zip(held.iter().chain(parents)).take_while(continues).count();
        Self { cached, held: held.len(), offset, parents, straight, hidden }
    }

    /// Whether all positions of the cache in front of `node`, counted from the first new one, are what it sees.
    pub(crate) fn is_straight(&self, node: usize) -> bool {
        self.held + node < self.straight
    }

    /// Where the nodes of the tree that `node` sees lie in the cache, in the order of their positions.
    pub(crate) fn path(&self, node: usize) -> impl Iterator<Item = usize> {
        let words = self.hidden(node).iter().enumerate();
        words.flat_map(move |(word, hidden)| zeros(*hidden).map(move |bit| self.cached + word * 64 + bit))
    }

    /// Bit i is set if `node`, counted from the first new one, does not see node i of the tree: it is neither the node
    /// itself nor an ancestor.
    #[must_use]
    pub fn hidden(&self, node: usize) -> &[u64] {
        let words = self.tree().div_ceil(64);
        &self.hidden[(self.held + node) * words..][..words]
    }

    /// Nodes of the tree, held and new.
    #[must_use]
    pub fn tree(&self) -> usize {
        self.held + self.parents.len()
    }
}

/// The bits that are not set.
fn zeros(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = bits.trailing_ones();
        (bit < u64::BITS).then(|| {
            bits |= 1 << bit;
            bit as usize
        })
    })
}

/// What a sequence's cache has before a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tree<'a> {
    /// Committed tokens.
    pub cached: usize,
    /// Parents of the nodes behind them that earlier steps have computed.
    pub held: &'a [u32],
}

impl Tree<'_> {
    /// The position of every held node.
    fn positions(self) -> Vec<usize> {
        let mut positions: Vec<usize> = Vec::with_capacity(self.held.len());
        for &parent in self.held {
            positions.push(positions.get(parent as usize).map_or(self.cached, |parent| parent + 1));
        }
        positions
    }
}

/// Tokens whose log probabilities are wanted at each scored node, whatever their rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked<'a> {
    /// Those of all scored nodes, one node behind the other.
    pub tokens: &'a [u32],
    /// For each scored node where its tokens end; empty if nothing is asked.
    pub ends: &'a [usize],
}

/// The nodes of all sequences of a step.
#[derive(Debug, Default)]
pub struct Batch<'a> {
    /// Token of every row.
    pub tokens: Vec<u32>,
    /// Position of every row: the committed length plus the node's depth.
    pub positions: Vec<usize>,
    /// Rows whose logits are wanted.
    pub scored: Vec<u32>,
    /// How a token is drawn at each of them; the most probable one is taken where absent.
    pub draws: Vec<Option<Draw>>,
    /// The sequences, in the order of their rows.
    pub spans: Vec<Span<'a>>,
    /// Of a fused model: for every row the feature of the token before it, `[rows, hidden_size]`.
    pub before: Vec<f32>,
    /// Whether the features of all rows are wanted.
    pub wants_features: bool,
    /// Whether the logits are asked about again after the step.
    pub keeps_logits: bool,
    /// Tokens whose log probabilities are wanted, one scored row behind the other.
    pub asked: Vec<u32>,
    /// For each scored row where its tokens end.
    pub asked_ends: Vec<usize>,
}

impl<'a> Batch<'a> {
    /// Adds the nodes of a sequence, parents before children, behind what its cache has. Nodes from `scored_from` on
    /// are scored; `draw` is that after the first token of the sequence.
    pub fn push(
        &mut self,
        (tokens, parents): (&[u32], &'a [u32]),
        scored_from: usize,
        tree: Tree<'_>,
        (draw, asked): (Option<Draw>, Asked<'_>),
    ) {
        let offset = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let mut positions = tree.positions();
        for &parent in parents {
            positions.push(positions.get(parent as usize).map_or(tree.cached, |parent| parent + 1));
        }
        self.positions.extend_from_slice(&positions[tree.held.len()..]);
        let scored = offset + scored_from..self.tokens.len();
        let at = |position: &usize| draw.map(|draw| draw.after(*position));
        self.draws.extend(self.positions[scored.clone()].iter().map(at));
        let before = self.asked.len();
        let ends = asked.ends.iter().copied().chain(std::iter::repeat(asked.tokens.len()));
        self.asked_ends.extend(ends.take(scored.len()).map(|end| before + end));
        self.asked.extend_from_slice(asked.tokens);
        self.scored.extend(scored.filter_map(|row| u32::try_from(row).ok()));
        self.spans.push(Span::new(tree, parents, offset));
    }

    /// The tokens asked about at a scored row.
    #[must_use]
    pub fn asked_at(&self, row: usize) -> &[u32] {
        let start = row.checked_sub(1).map_or(0, |before| self.asked_ends[before]);
        &self.asked[start..self.asked_ends[row]]
    }
}
