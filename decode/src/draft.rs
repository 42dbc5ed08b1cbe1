//! Drafting: from the text so far to a tree of likely continuations.
//!
//! A [`DraftContext`] belongs to one text. It owns that text's temporary branches (prompt, output, the entity's
//! previous text) and shares the pool. Dropping it drops everything it learnt from the text, so nothing from one text
//! is ever drafted for another. In steady state a draft allocates nothing.

use thiserror::Error;

use crate::Token;
use crate::alignment::Alignment;
use crate::blend::Rule;
use crate::growth::Growth;
use crate::lookahead::{Lookahead, Shape, WINDOW_MAX};
use crate::pool::Pool;
use crate::runners_up::Sharpness;
use crate::sampling::Draw;
use crate::sources::{SourceWeights, Sources};
use crate::tree::{DraftTree, Source};

/// Longest context to match, in tokens. Longer contexts occur at the same positions: in replay, order 12 accepts no
/// more than order 6.
pub const ORDER_MAX: usize = 16;

/// How continuations are drafted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Drafter {
    /// No drafting: plain decoding, where the tree is only the root.
    None,
    /// Prompt lookup (LLMA, PLD): one chain, copied from the most recent occurrence in prompt and output of the longest
    /// matching end of the context, up to `max_ngram` tokens. Only [aligned](Alignment) tokens are beside it.
    /// Probabilities are not estimated; all are 1.
    PromptLookup {
        /// Longest match looked for, in tokens.
        max_ngram: usize,
    },
    /// Lookahead decoding: n-grams that the target itself makes beside the text, from a window of guesses. The drafter
    /// learns of them by [`DraftContext::observe`]. It needs a tree of [`Drafter::most_nodes`], and neither pool nor
    /// model. The authors' README sets a window of 7, n-grams of 5 and 7 guesses.
    Lookahead {
        /// Columns of the window.
        window: usize,
        /// Tokens of an n-gram, of which the first is the text's last.
        ngram: usize,
        /// N-grams that are verified in a step, at most.
        guesses: usize,
    },
    /// LASER 3.3: the last n tokens select a subtree. n starts at `max_ngram` and shrinks until the subtree fills the
    /// budget; of a larger subtree the most frequent nodes are taken. All sources count alike.
    RawFrequency {
        /// Longest context, in tokens.
        max_ngram: usize,
    },
    /// The tree with the largest sum of path probabilities, which come from Witten-Bell smoothing over contexts of 1 to
    /// `order` tokens and all sources.
    Blended {
        /// Longest context, in tokens.
        order: usize,
        /// Weight of a distinct continuation relative to a count: how quickly shorter contexts gain weight.
        alpha: f32,
        /// Path probability below which nothing is drafted.
        min_probability: f32,
        /// Weight of an occurrence in each source.
        weights: SourceWeights,
    },
}

impl Default for Drafter {
    /// Blended, tuned by replay of real texts (docs/benchmarks.md).
    fn default() -> Self {
        let weights = SourceWeights::default();
        Self::Blended { order: 8, alpha: 4.0, min_probability: 0.002, weights }
    }
}

/// A drafter's option is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
#[error("drafter: {option} must be {expected}, got {found}")]
pub struct DrafterError {
    /// The option's name.
    pub option: &'static str,
    /// Its range.
    pub expected: &'static str,
    /// Its value.
    pub found: f64,
}

impl Drafter {
    /// Whether it drafts from a pool, if there is one.
    #[must_use]
    pub fn reads_pools(&self) -> bool {
        matches!(self, Self::RawFrequency { .. } | Self::Blended { .. })
    }

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// Names the first option that is out of range.
    pub fn check(&self) -> Result<(), DrafterError> {
        const LENGTH: &str = "1 to 16";
        let length = |option, len: usize| check(option, LENGTH, len as f64, 1.0, ORDER_MAX as f64);
        match *self {
            Self::None => Ok(()),
            Self::PromptLookup { max_ngram } | Self::RawFrequency { max_ngram } => length("max_ngram", max_ngram),
            Self::Lookahead { window, ngram, guesses } => {
                let count = |option, found: usize| check(option, "1 to 32", found as f64, 1.0, WINDOW_MAX as f64);
                count("window", window)?;
                check("ngram", "2 to 16", ngram as f64, 2.0, ORDER_MAX as f64)?;
                count("guesses", guesses)
            }
            Self::Blended { order, alpha, min_probability, weights } => {
                length("order", order)?;
                check("alpha", "0.01 to 1000", alpha.into(), 0.01, 1e3)?;
                check("min_probability", "0 to 1", min_probability.into(), 0.0, 1.0)?;
                check("weights.context", "0.01 to 1000", weights.context.into(), 0.01, 1e3)?;
                check("weights.previous", "0.01 to 1000", weights.previous.into(), 0.01, 1e3)
            }
        }
    }

    /// The path probability below which nothing is drafted.
    #[must_use]
    pub fn min_probability(&self) -> f32 {
        match *self {
            Self::Blended { min_probability, .. } => min_probability,
            Self::None | Self::PromptLookup { .. } | Self::RawFrequency { .. } | Self::Lookahead { .. } => 0.0,
        }
    }

    /// Drafted nodes of a whole tree, if there is such a bound: with fewer, less of the window goes on.
    #[must_use]
    pub fn most_nodes(&self) -> Option<usize> {
        self.shape().map(Shape::nodes)
    }

    /// The sizes of lookahead decoding.
    fn shape(&self) -> Option<Shape> {
        match *self {
            Self::Lookahead { window, ngram, guesses } => Some(Shape { window, ngram, guesses }),
            Self::None | Self::PromptLookup { .. } | Self::RawFrequency { .. } | Self::Blended { .. } => None,
        }
    }

    /// Longest context that is matched.
    fn order(&self) -> usize {
        let order = match *self {
            Self::None | Self::Lookahead { .. } => 1,
            Self::PromptLookup { max_ngram } | Self::RawFrequency { max_ngram } => max_ngram,
            Self::Blended { order, .. } => order,
        };
        order.clamp(1, ORDER_MAX)
    }
}

fn check(option: &'static str, expected: &'static str, found: f64, min: f64, max: f64) -> Result<(), DrafterError> {
    if (min..=max).contains(&found) {
        return Ok(());
    }
    Err(DrafterError { option, expected, found })
}

/// The drafting state of one text.
#[derive(Debug, Clone)]
pub struct DraftContext {
    drafter: Drafter,
    sources: Sources,
    growth: Growth,
    /// Of [`Drafter::Lookahead`].
    lookahead: Option<Lookahead>,
}

impl DraftContext {
    /// Creates the state of a text without any token. `end_of_text` must be the pool's. Options that [`Drafter::check`]
    /// would refuse give worse or empty drafts, but are not errors here.
    #[must_use]
    pub fn new(drafter: Drafter, pool: Option<Pool>, end_of_text: Token) -> Self {
        let lookahead = drafter.shape().map(Lookahead::new);
        Self { drafter, sources: Sources::new(pool, end_of_text), growth: Growth::default(), lookahead }
    }

    /// Adds a previous text of the same entity as a temporary branch of the highest weight, ended by
    /// the end-of-text token.
    pub fn add_previous(&mut self, tokens: &[Token]) {
        let end_of_text = self.sources.end_of_text;
        let text = tokens.iter().copied().take_while(|&token| token != end_of_text);
        for token in text.chain([end_of_text]) {
            self.sources.previous.push(token);
        }
    }

    /// The text is drawn like this, from its first token after the prompt on: drafts estimated by [`Drafter::Blended`]
    /// take into account which tokens the noise favours, and how probable a pool's runners-up are at the temperature.
    pub fn draw_by(&mut self, draw: Draw) {
        self.sources.noise = Some(draw.noise);
        self.sources.sharpness = Some(Box::new(Sharpness::new(draw.sampling.temperature())));
    }

    /// Appends to the context: first the prompt, then the accepted tokens of each step.
    pub fn extend(&mut self, tokens: &[Token]) {
        if self.sources.prompt == 0 {
            self.sources.prompt = tokens.len();
        }
        for &token in tokens {
            self.sources.context.push(token);
        }
        self.sources.advance(tokens.len(), self.drafter.order());
    }

    /// What the target would have written in place of the prompt's tokens, to be told as the prefill goes on: where a
    /// token is copied from the prompt, those that the target ranks above it are drafted beside it.
    pub fn alignment_mut(&mut self) -> &mut Alignment {
        &mut self.sources.alignment
    }

    /// The same, to be read.
    #[must_use]
    pub fn alignment(&self) -> &Alignment {
        &self.sources.alignment
    }

    /// Takes over the target's choice after each node of a tree that was scored: the one drafted last, or what is left
    /// of it. To be called before the step's tokens are appended. Only [`Drafter::Lookahead`] learns from it.
    pub fn observe(&mut self, tree: &DraftTree, choice: impl Fn(usize) -> Token) {
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.observe(&self.sources, tree, choice);
        }
    }

    /// Replaces `tree` by a draft of what follows the context. Its root is the context's last token, followed by up to
    /// `max_nodes` drafted tokens. Nothing is drafted beyond an end-of-text token. An empty context gives an empty
    /// tree.
    pub fn draft(&mut self, max_nodes: usize, tree: &mut DraftTree) {
        tree.clear();
        let Some(&root) = self.sources.context.tokens().last() else {
            return;
        };
        tree.reset(root);
        let Self { sources, growth, lookahead, .. } = self;
        match self.drafter {
            Drafter::None => {}
            Drafter::PromptLookup { .. } => self.copy(max_nodes, tree),
            Drafter::Lookahead { .. } => {
                if let Some(lookahead) = lookahead {
                    lookahead.draft(sources, max_nodes, tree);
                }
            }
            Drafter::RawFrequency { .. } => {
                for ngram in (1..=self.drafter.order()).rev() {
                    tree.reset(root);
                    growth.grow(sources, Rule::Frequency { ngram }, (max_nodes, 0.0), tree);
                    if tree.drafted() == max_nodes {
                        break;
                    }
                }
            }
            Drafter::Blended { alpha, min_probability, weights, .. } => {
                let rule = Rule::Blend { order: self.drafter.order(), alpha, weights };
                growth.grow(sources, rule, (max_nodes, min_probability), tree);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn lookahead(&self) -> Option<&Lookahead> {
        self.lookahead.as_ref()
    }

    /// Copies the continuation of the longest match in the context; among equals, of the most recent.
    fn copy(&self, max_nodes: usize, tree: &mut DraftTree) {
        let Sources { context, alignment, end_of_text, .. } = &self.sources;
        let recent: Vec<Token> = self.sources.recent(self.drafter.order()).collect();
        let mut best = (0, context.tokens().len());
        context.matches(&recent, |next, len| {
            if len > best.0 && next < context.tokens().len() {
                best = (len, next);
            }
        });
        let mut parent = 0;
        for (&token, place) in context.tokens()[best.1..].iter().zip(best.1..) {
            if tree.drafted() == max_nodes {
                break;
            }
            let (source, copied) = (self.sources.source_at(place), parent);
            parent = tree.push(copied, token, 1.0, source);
            if source == Source::Prompt {
                let better = alignment.above(place, token).take(max_nodes - tree.drafted());
                better.for_each(|better| {
                    tree.push(copied, better.token, 1.0, source);
                });
            }
            if token == *end_of_text {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
