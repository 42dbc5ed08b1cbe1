//! Lookahead decoding (Fu et al., arXiv:2402.02057): drafts from the target alone, without a pool or another model.
//!
//! Beside the text the target continues a window of guesses by Jacobi iteration. The window has `window` columns of
//! `ngram` - 1 levels. Column i is a run of tokens that begins i places behind the root, and column 0 begins in the
//! root itself. A step scores all of them, and what the target chooses after a column makes an n-gram of it: one that
//! it would have written itself behind those tokens. The n-grams are pooled by their first token. Those that begin with
//! the text's last token are drafted (the verification branch). Then each column drops its first token and takes the
//! choice as its last, and so the window moves on by one place a step, as in the published code, however many tokens
//! the text has moved on by.
//!
//! The lookahead branch is a draft tree. The first tokens of the columns are a chain below the root, and from each of
//! them hangs the rest of its column. A node then sees the first level up to its own column and its column's earlier
//! levels, at the position of its depth: exactly what the published code's attention mask lets it see.
//!
//! The window begins as in the published code: with one level of tokens from the prompt and `ngram` - 2 columns more. A
//! step then adds a level and drops the first column, until the window is whole. What differs:
//! - The prompt's tokens are taken by a rule instead of at random, so the same text has the same drafts.
//! - Branches that begin alike share nodes. A node of the lookahead branch that is right is accepted like any other,
//!   where the published code accepts only n-grams.
//! - A choice that ends the text is drafted as the end of an n-gram, but a token of the prompt takes its place in the
//!   window.
//! - Where the nodes do not suffice, the last columns are left out and stay as they are.
//!
//! A whole tree has (`window` + `guesses`) · (`ngram` - 1) - 1 nodes at most. Every node is looked up among its
//! siblings, which costs a pass over the tree. The n-grams of a text are in memory, at most `guesses` per first token
//! and `window` more a step.

use std::collections::{HashMap, VecDeque};

use crate::Token;
use crate::sources::Sources;
use crate::tree::{DraftTree, Source};

/// Most columns of the window, and most n-grams verified in a step.
pub(crate) const WINDOW_MAX: usize = 32;

/// The probability of nodes that are there to be continued: hardly any is accepted. It is not zero, because
/// probabilities of paths are divided by each other.
const UNLIKELY: f32 = 1e-3;

/// The sizes of [`Drafter::Lookahead`](crate::Drafter::Lookahead).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shape {
    pub(crate) window: usize,
    pub(crate) ngram: usize,
    pub(crate) guesses: usize,
}

impl Shape {
    /// Nodes of a whole tree, at most.
    pub(crate) fn nodes(self) -> usize {
        let branches = self.window.saturating_add(self.guesses);
        branches.saturating_mul(self.ngram.saturating_sub(1)).saturating_sub(1)
    }

    /// Levels of a whole column.
    fn levels(self) -> usize {
        self.ngram - 1
    }
}

/// The window and the n-grams of one text.
#[derive(Debug, Clone)]
pub(crate) struct Lookahead {
    shape: Shape,
    /// Whether the window was begun.
    is_begun: bool,
    /// The tokens of each column, first level first. The root stands in for the first one of column 0.
    columns: VecDeque<VecDeque<Token>>,
    /// What followed a token, newest first, each once.
    ngrams: HashMap<Token, Vec<Vec<Token>>>,
    /// Tokens taken from the prompt so far.
    taken: u64,
}

impl Lookahead {
    /// Of a text without any token. Sizes out of their range count as the nearest ones in it.
    pub(crate) fn new(Shape { window, ngram, guesses }: Shape) -> Self {
        let shape = Shape {
            window: window.clamp(1, WINDOW_MAX),
            ngram: ngram.clamp(2, crate::ORDER_MAX),
            guesses: guesses.min(WINDOW_MAX),
        };
        Self { shape, is_begun: false, columns: VecDeque::new(), ngrams: HashMap::new(), taken: 0 }
    }

    /// Adds to `tree`, which is only its root: n-grams, newest first, and then the columns for which there is room.
    pub(crate) fn draft(&mut self, sources: &Sources, max_nodes: usize, tree: &mut DraftTree) {
        if !std::mem::replace(&mut self.is_begun, true) {
            self.begin(sources);
        }
        let known = self.ngrams.get(&tree.tokens()[0]);
        for ngram in known.into_iter().flatten() {
            let room = max_nodes - tree.drafted();
            let (node, found) = descend(tree, 0, ngram.iter());
            append(tree, node, ngram.iter().skip(found).take(room), 1.0);
        }
        let mut first = 0;
        for at in 0..self.columns.len() {
            let (node, found) = descend(tree, first, self.below(at));
            let rest = self.below(at).skip(found);
            if rest.len() > max_nodes - tree.drafted() {
                return;
            }
            append(tree, node, rest, UNLIKELY);
            if at > 0 {
                (first, _) = descend(tree, first, self.below(at).take(1));
            }
        }
    }

    /// Takes over what the target chose after each node of a tree that was scored: the one drafted last, or what is
    /// left of it.
    pub(crate) fn observe(&mut self, sources: &Sources, tree: &DraftTree, choice: impl Fn(usize) -> Token) {
        let Some(&root) = tree.tokens().first() else { return };
        let (mut first, mut is_second_scored) = (0, false);
        for at in 0..self.columns.len() {
            let (node, found) = descend(tree, first, self.below(at));
            if found < self.below(at).len() {
                // What is left of a tree is its beginning.
                break;
            }
            if at > 0 {
                (first, _) = descend(tree, first, self.below(at).take(1));
            }
            is_second_scored |= at == 1;
            self.advance(sources, at, root, choice(node));
        }
        if self.columns.len() > self.shape.window && is_second_scored {
            self.columns.pop_front();
        }
    }

    /// Fills the first level.
    fn begin(&mut self, sources: &Sources) {
        for _ in 0..self.shape.window + self.shape.ngram - 2 {
            let token = self.take(sources);
            self.columns.extend(token.map(|token| VecDeque::from([token])));
        }
    }

    /// A token of the prompt that may be drafted, if it has any. Multiples of the golden ratio are spread evenly,
    /// however many there are.
    fn take(&mut self, sources: &Sources) -> Option<Token> {
        const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
        self.taken += 1;
        let prompt = &sources.context.tokens()[..sources.prompt];
        let part = u128::from(self.taken.wrapping_mul(GOLDEN));
        let place = usize::try_from((part * prompt.len() as u128) >> 64).unwrap_or_default();
        let (before, after) = prompt.split_at(place);
        after.iter().chain(before).copied().find(|&token| sources.continues(token))
    }

    /// The tokens of a column that are nodes of their own: all but for the root.
    fn below(&self, at: usize) -> impl ExactSizeIterator<Item = &Token> {
        self.columns[at].iter().skip(usize::from(at == 0))
    }

    /// Continues a column by the target's choice after it.
    fn advance(&mut self, sources: &Sources, at: usize, root: Token, choice: Token) {
        let levels = self.columns[at].len();
        if levels == self.shape.levels() {
            if choice < sources.vocab_size {
                let key = if at == 0 { root } else { self.columns[at][0] };
                self.learn(key, at, choice);
            }
            self.columns[at].pop_front();
        } else if at == 0 && levels == 1 {
            // After the root alone comes what the step writes anyway.
            return;
        }
        let token = if sources.continues(choice) { Some(choice) } else { self.take(sources) };
        self.columns[at].extend(token);
    }

    /// Pools the n-gram of a column, as the newest.
    fn learn(&mut self, key: Token, at: usize, choice: Token) {
        let column = &self.columns[at];
        let tokens = column.iter().skip(1).copied().chain([choice]);
        let known = self.ngrams.entry(key).or_default();
        match known.iter().position(|ngram| ngram.iter().copied().eq(tokens.clone())) {
            Some(place) => known[..=place].rotate_right(1),
            None => known.insert(0, tokens.collect()),
        }
        known.truncate(self.shape.guesses);
    }
}

/// Follows `tokens` from a node as far as the tree has them: the node reached, and how many there were.
fn descend<'a>(tree: &DraftTree, from: usize, tokens: impl Iterator<Item = &'a Token>) -> (usize, usize) {
    let (mut node, mut found) = (from, 0);
    for token in tokens {
        let Some(child) = tree.children(node).find(|&child| tree.tokens()[child] == *token) else {
            break;
        };
        (node, found) = (child, found + 1);
    }
    (node, found)
}

/// Appends a chain below a node.
fn append<'a>(tree: &mut DraftTree, from: usize, tokens: impl Iterator<Item = &'a Token>, probability: f32) {
    tokens.fold(from, |node, &token| tree.push(node, token, probability, Source::Context));
}

#[cfg(test)]
mod tests;
