//! Growing a draft tree best-first.
//!
//! A child is never more probable than its parent. So taking the most probable open node again and again yields the
//! tree of `max_nodes` nodes with the largest sum of path probabilities, which is the largest expected number of
//! accepted tokens. All buffers are kept from step to step.

use crate::Token;
use crate::blend::{Child, Distribution, Evidence, Rule};
use crate::race::Race;
use crate::sources::Sources;
use crate::suffix::{Match, Matches, Suffixes};
use crate::tree::{DraftTree, Source};

/// Longest branch drafted by raw frequency. Otherwise a context that occurs once would be followed to the end of its
/// text; the paper's own code stops at 12.
const FREQUENCY_DEPTH_MAX: u32 = 12;

/// A node is not expanded if no child could enter the tree even with this probability. Smoothed probabilities are
/// rarely above it.
const LIKELIEST: f32 = 0.9;

/// A token that may be drafted next, or has been.
#[derive(Debug, Clone, Copy)]
struct Open {
    parent: usize,
    probability: f32,
    child: Child,
}

/// The `limit` most probable tokens seen. Their children cannot be more probable than they are, so they enter the tree
/// in this order and no other token ever does.
#[derive(Debug, Clone, Default)]
struct Frontier {
    /// Probability and index in `seen`, most probable first; equals in the order found.
    best: Vec<(f32, usize)>,
    seen: Vec<Open>,
    taken: usize,
    limit: usize,
    floor: f32,
}

impl Frontier {
    fn restart(&mut self, limit: usize, floor: f32) {
        self.best.clear();
        self.seen.clear();
        (self.taken, self.limit, self.floor) = (0, limit, floor);
    }

    /// The probability that a token must exceed to be drafted: `limit` other tokens have at least that.
    fn threshold(&self) -> f32 {
        match self.best.last() {
            Some(&(least, _)) if self.best.len() == self.limit => least,
            _ => self.floor,
        }
    }

    fn offer(&mut self, parent: usize, child: Child, probability: f32) {
        if probability <= self.threshold() {
            return;
        }
        if self.best.len() == self.limit {
            self.best.pop();
        }
        let before = |&(other, _): &(f32, usize)| other >= probability;
        let at = self.taken + self.best[self.taken..].partition_point(before);
        self.best.insert(at, (probability, self.seen.len()));
        self.seen.push(Open { parent, probability, child });
    }

    /// The next token to draft.
    fn take(&mut self) -> Option<Open> {
        let &(_, at) = self.best.get(self.taken)?;
        self.taken += 1;
        Some(self.seen[at])
    }
}

/// Buffers for growing trees.
#[derive(Debug, Clone, Default)]
pub(crate) struct Growth {
    frontier: Frontier,
    arena: Vec<Match>,
    matches: Vec<Matches>,
    recent: Vec<Token>,
    distribution: Distribution,
    racing: Vec<Child>,
}

impl Growth {
    /// Grows `tree`, which is only its root, by up to `max_nodes` nodes with path probabilities above `floor`.
    pub(crate) fn grow(
        &mut self,
        sources: &Sources,
        rule: Rule,
        (max_nodes, floor): (usize, f32),
        tree: &mut DraftTree,
    ) {
        self.frontier.restart(max_nodes, floor);
        self.distribution.restart();
        self.arena.clear();
        self.matches.clear();
        let root = self.root_matches(sources, rule);
        self.matches.push(root);
        let suffixes = &sources.suffixes();
        if max_nodes > 0 {
            self.expand(sources, suffixes, rule, tree, 0);
        }
        while let Some(open) = self.frontier.take() {
            let token = open.child.token;
            let node = tree.push(open.parent, token, open.probability, self.source(suffixes, &open));
            self.matches.push(Matches::default());
            let leaf = token == sources.end_of_text
                || open.probability * LIKELIEST <= self.frontier.threshold()
                || matches!(rule, Rule::Frequency { .. }) && tree.depths()[node] >= FREQUENCY_DEPTH_MAX;
            if !leaf {
                self.matches[node] = self.descend(suffixes, rule, &open);
                self.expand(sources, suffixes, rule, tree, node);
            }
        }
    }

    /// The source of a token that is drafted. The pool leaves rare continuations uncounted: what the prompt has and the
    /// pool knows, however rarely, is not the prompt's alone. Asked of the few tokens that are drafted, not of all that
    /// are offered.
    fn source(&self, suffixes: &Suffixes<'_>, open: &Open) -> Source {
        let Child { token, source, .. } = open.child;
        // What follows a longer context follows the shortest one, too.
        let shortest = self.matches[open.parent].at.clone().next().map(|at| self.arena[at]);
        let is_in_pool = || shortest.is_some_and(|context| suffixes.has_child(context, token));
        if source == Source::Prompt && is_in_pool() { Source::Context } else { source }
    }

    fn root_matches(&mut self, sources: &Sources, rule: Rule) -> Matches {
        let known = &sources.matches;
        match rule {
            Rule::Blend { .. } => self.arena.extend(known),
            Rule::Frequency { ngram } if ngram > sources.longest => {}
            Rule::Frequency { ngram } => {
                self.arena.extend(known.iter().rev().find(|known| known.len <= ngram));
            }
        }
        Matches { at: 0..self.arena.len(), longest: sources.longest }
    }

    fn descend(&mut self, suffixes: &Suffixes<'_>, rule: Rule, open: &Open) -> Matches {
        let (parent, token) = (&self.matches[open.parent], open.child.token);
        match rule {
            Rule::Blend { order, .. } => {
                let steps = self.distribution.steps(open.child.steps);
                suffixes.follow(&mut self.arena, parent, (token, order), steps)
            }
            Rule::Frequency { .. } => {
                let start = self.arena.len();
                let child = parent.at.clone().next().and_then(|at| suffixes.child(self.arena[at], token));
                self.arena.extend(child);
                Matches { at: start..self.arena.len(), longest: parent.longest + 1 }
            }
        }
    }

    /// Offers the children of `node` to the frontier.
    fn expand(&mut self, sources: &Sources, suffixes: &Suffixes<'_>, rule: Rule, tree: &DraftTree, node: usize) {
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
            suffixes,
            sharpness: sources.sharpness.as_deref(),
            matches: &self.arena[at],
            longest,
            temporaries: [&sources.previous, &sources.context],
            prompt: sources.prompt,
            alignment: &sources.alignment,
            recent: &self.recent,
        };
        let path = tree.probabilities()[node];
        let noise = sources.noise_after(tree.depths()[node]).filter(|_| matches!(rule, Rule::Blend { .. }));
        // The noise may favour a token however improbable it is.
        let threshold = if noise.is_some() { 0.0 } else { self.frontier.threshold() / path };
        let children = self.distribution.children(&evidence, rule, threshold);
        let children = children.filter(|child| child.token < sources.vocab_size);
        let Some(noise) = noise else {
            return children.for_each(|child| self.frontier.offer(node, child, path * child.probability));
        };
        self.racing.clear();
        self.racing.extend(children.filter(|child| child.probability > 0.0));
        let race = Race::new(noise, self.racing.iter().map(|child| (child.token, child.probability)));
        for &child in &self.racing {
            let probability = race.probability(child.token, child.probability);
            self.frontier.offer(node, child, path * probability);
        }
    }
}

/// Fills `recent` with the last tokens of the text that ends in `node`, newest first: at most `limit`, and none beyond
/// the end of a text.
fn recall(recent: &mut Vec<Token>, sources: &Sources, tree: &DraftTree, mut node: usize, limit: usize) {
    recent.clear();
    while node != 0 && recent.len() < limit {
        recent.push(tree.tokens()[node]);
        node = tree.parents()[node] as usize;
    }
    let room = limit - recent.len();
    recent.extend(sources.recent(room));
}
