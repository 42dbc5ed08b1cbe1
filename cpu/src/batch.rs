//! A step: the nodes of the trees of many sequences as one batch of rows.

use laser_decode::{Draw, ROOT_PARENT};

/// One sequence's part of a step.
#[derive(Debug)]
pub struct Span<'a> {
    /// Tokens committed to its cache.
    pub cached: usize,
    /// First of its rows in the batch.
    pub offset: usize,
    /// `parents[i] < i` is the node that `i` continues, [`ROOT_PARENT`] for the committed context.
    pub parents: &'a [u32],
    /// For each node a row of bits, set for those nodes that it does not see.
    hidden: Vec<u64>,
}

impl<'a> Span<'a> {
    fn new(parents: &'a [u32], cached: usize, offset: usize) -> Self {
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
    #[must_use]
    pub fn hidden(&self, node: usize) -> &[u64] {
        let words = self.parents.len().div_ceil(64);
        &self.hidden[node * words..][..words]
    }
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
}

impl<'a> Batch<'a> {
    /// Adds the nodes of a sequence, parents before children, behind its `cached` tokens. Nodes from `scored_from` on
    /// are scored; `draw` is that after the first token of the sequence.
    pub fn push(&mut self, tokens: &[u32], parents: &'a [u32], scored_from: usize, cached: usize, draw: Option<Draw>) {
        let offset = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        for &parent in parents {
            let position = match parent {
                ROOT_PARENT => cached,
                parent => self.positions[offset + parent as usize] + 1,
            };
            self.positions.push(position);
        }
        let scored = offset + scored_from..self.tokens.len();
        let at = |position: &usize| draw.map(|draw| draw.after(*position));
        self.draws.extend(self.positions[scored.clone()].iter().map(at));
        self.scored.extend(scored.filter_map(|row| u32::try_from(row).ok()));
        self.spans.push(Span::new(parents, cached, offset));
    }
}
