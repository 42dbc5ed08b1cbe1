//! Growing a draft tree best-first.
//!
//! The children of a node are never more probable than the node, so taking the most probable open node
//! again and again yields the tree of `max_nodes` nodes with the largest sum of path probabilities: the
//! largest expected number of accepted tokens. All buffers are kept from step to step.

use std::cmp::Ordering;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Token;
use crate::blend::{Distribution, Evidence, Rule};
use crate::draft::Sources;
use crate::suffix::{Match, Matches};
use crate::tree::{DraftTree, Source};

/// Longest branch drafted by raw frequency. A place that occurs once would else be followed to
/// the end of its text; the paper's own code stops at 12.
const FREQUENCY_DEPTH_MAX: u32 = 12;

/// A token that may be drafted next.
#[derive(Debug, Clone, Copy)]
struct Open {
    probability: f32,
    serial: u32,
    parent: usize,
    token: Token,
    source: Source,
}

impl Ord for Open {
    /// By probability; of equals the one found first is the greater.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_probability = self.probability.total_cmp(&other.probability);
        by_probability.then_with(|| other.serial.cmp(&self.serial))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open {}

/// The open tokens, and the probability below which a token cannot enter the tree any more.
#[derive(Debug, Clone, Default)]
struct Frontier {
    open: BinaryHeap<Open>,
    /// Bits of the `limit` highest probabilities seen; the bits of positive floats sort as they do.
    best: BinaryHeap<Reverse<u32>>,
    limit: usize,
    floor: f32,
    found: u32,
}

impl Frontier {
    fn restart(&mut self, limit: usize, floor: f32) {
        self.open.clear();
        self.best.clear();
        (self.limit, self.floor, self.found) = (limit, floor, 0);
    }

    /// The probability that a token must exceed to be drafted: `limit` others have at least that.
    fn threshold(&self) -> f32 {
        match self.best.peek() {
            Some(&Reverse(bits)) if self.best.len() == self.limit => f32::from_bits(bits),
            _ => self.floor,
        }
    }

    fn offer(&mut self, parent: usize, token: Token, probability: f32, source: Source) {
        if probability <= self.threshold() {
            return;
        }
        if self.best.len() == self.limit {
            self.best.pop();
        }
        self.best.push(Reverse(probability.to_bits()));
        self.open.push(Open {
            probability,
            serial: self.found,
            parent,
            token,
            source,
        });
        self.found += 1;
    }
}

/// The buffers that trees are grown with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Growth {
    frontier: Frontier,
    arena: Vec<Match>,
    matches: Vec<Matches>,
    recent: Vec<Token>,
    distribution: Distribution,
}

impl Growth {
    /// Grows `tree`, which is its root alone, by up to `max_nodes` nodes of path probability above
    /// `floor`.
    pub(crate) fn grow(
        &mut self,
        sources: &Sources,
        rule: Rule,
        (max_nodes, floor): (usize, f32),
        tree: &mut DraftTree,
    ) {
        self.frontier.restart(max_nodes, floor);
        self.arena.clear();
        self.matches.clear();
        let root = self.root_matches(sources, rule);
        self.matches.push(root);
        if max_nodes > 0 {
            self.expand(sources, rule, tree, 0);
        }
        while tree.drafted() < max_nodes {
            let Some(open) = self.frontier.open.pop() else {
                break;
            };
            let node = tree.push(open.parent, open.token, open.probability, open.source);
            self.matches.push(Matches::default());
            let leaf = open.token == sources.end_of_text
                || open.probability <= self.frontier.threshold()
                || matches!(rule, Rule::Frequency { .. })
                    && tree.depths()[node] >= FREQUENCY_DEPTH_MAX;
            if !leaf {
                self.matches[node] = self.descend(sources, rule, open.parent, open.token);
                self.expand(sources, rule, tree, node);
            }
        }
    }

    fn root_matches(&mut self, sources: &Sources, rule: Rule) -> Matches {
        let known = &sources.matches;
        match rule {
            Rule::Blend { .. } => self.arena.extend(known),
            Rule::Frequency { ngram } if ngram > sources.longest => {}
            Rule::Frequency { ngram } => {
                self.arena
                    .extend(known.iter().rev().find(|known| known.len <= ngram));
            }
        }
        Matches {
            at: 0..self.arena.len(),
            longest: sources.longest,
        }
    }

    fn descend(&mut self, sources: &Sources, rule: Rule, parent: usize, token: Token) -> Matches {
        let suffixes = sources.suffixes();
        let parent = &self.matches[parent];
        match rule {
            Rule::Blend { order, .. } => suffixes.advance(&mut self.arena, parent, token, order),
            Rule::Frequency { .. } => {
                let start = self.arena.len();
                let child = parent
                    .at
                    .clone()
                    .next()
                    .map(|at| suffixes.child(self.arena[at], token));
                self.arena.extend(child);
                Matches {
                    at: start..self.arena.len(),
                    longest: parent.longest + 1,
                }
            }
        }
    }

    /// Offers the children of `node` to the frontier.
    fn expand(&mut self, sources: &Sources, rule: Rule, tree: &DraftTree, node: usize) {
        let (order, ngram) = match rule {
            Rule::Blend { order, .. } => (order, 1),
            Rule::Frequency { ngram } => {
                let ngram = ngram + tree.depths()[node] as usize;
                (ngram, ngram)
            }
        };
        recall(&mut self.recent, sources, tree, node, order);
        if self.recent.len() < ngram {
            return;
        }
        let Matches { at, longest } = self.matches[node].clone();
        let evidence = Evidence {
            suffixes: sources.suffixes(),
            matches: &self.arena[at],
            longest,
            temporaries: [&sources.previous, &sources.context],
            recent: &self.recent,
        };
        let path = tree.probabilities()[node];
        let children =
            self.distribution
                .children(&evidence, rule, self.frontier.threshold() / path);
        for child in children {
            self.frontier
                .offer(node, child.token, path * child.probability, child.source);
        }
    }
}

/// Fills `recent` with the last tokens of the text that ends in `node`, newest first: at most `limit`,
/// none of them across the end of a text.
fn recall(
    recent: &mut Vec<Token>,
    sources: &Sources,
    tree: &DraftTree,
    mut node: usize,
    limit: usize,
) {
    recent.clear();
    while node != 0 && recent.len() < limit {
        recent.push(tree.tokens()[node]);
        node = tree.parents()[node] as usize;
    }
    let room = limit - recent.len();
    recent.extend(sources.recent(room));
}
