//! The sources from which one text is drafted: the pool, the entity's previous text, and prompt and output so far.

use crate::Token;
use crate::alignment::Alignment;
use crate::pool::Pool;
use crate::runners_up::Sharpness;
use crate::sampling::Noise;
use crate::suffix::{Match, Matches, Suffixes};
use crate::temporary::Temporary;
use crate::tree::Source;

/// Weight of an occurrence in a temporary branch relative to one in the pool, which counts 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SourceWeights {
    /// In the prompt and the output so far.
    pub context: f32,
    /// In the entity's own previous text.
    pub previous: f32,
}

impl Default for SourceWeights {
    /// Tuned by replay: context weights of 1 to 8 differ by 0.5 %. Previous texts about the same film by another model
    /// add 15 % of accepted tokens at weights 4 to 16 and less beyond. 16 suits texts by one model, which are more
    /// alike.
    fn default() -> Self {
        Self { context: 4.0, previous: 16.0 }
    }
}

impl SourceWeights {
    /// Every occurrence counts 1.
    pub(crate) const EQUAL: Self = Self { context: 1.0, previous: 1.0 };

    pub(crate) fn of(&self, source: Source) -> f32 {
        match source {
            Source::Pool | Source::Model => 1.0,
            Source::Previous => self.previous,
            Source::Context | Source::Prompt => self.context,
        }
    }
}

/// The sources from which one text is drafted.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    pool: Option<Pool>,
    pub(crate) previous: Temporary,
    pub(crate) context: Temporary,
    /// Tokens of the context that are the prompt; none before it is known.
    pub(crate) prompt: usize,
    /// What the target would have written in place of the prompt's tokens.
    pub(crate) alignment: Alignment,
    pub(crate) end_of_text: Token,
    /// Only tokens below this are drafted: damage to a pool must not reach the model.
    pub(crate) vocab_size: u32,
    /// Matches of the context's last tokens in the pool, and their greatest length.
    pub(crate) matches: Vec<Match>,
    pub(crate) longest: usize,
    /// The noise at the first token after the prompt, of a text that is drawn.
    pub(crate) noise: Option<Noise>,
    /// What the probabilities of a pool's runners-up come to in such a text.
    pub(crate) sharpness: Option<Box<Sharpness>>,
}

impl Sources {
    /// The sources of a text without any token. `end_of_text` must be the pool's.
    pub(crate) fn new(pool: Option<Pool>, end_of_text: Token) -> Self {
        Self {
            vocab_size: pool.as_ref().map_or(u32::MAX, |pool| pool.meta().vocab_size),
            pool,
            previous: Temporary::new(Source::Previous),
            context: Temporary::new(Source::Context),
            prompt: 0,
            alignment: Alignment::default(),
            end_of_text,
            matches: Vec::new(),
            longest: 0,
            noise: None,
            sharpness: None,
        }
    }

    /// The noise of the token that comes after the context and so many more.
    pub(crate) fn noise_after(&self, more: u32) -> Option<Noise> {
        let written = self.context.tokens().len() - self.prompt;
        Some(self.noise?.after(written + more as usize))
    }

    /// The pool's suffixes; none without a pool.
    pub(crate) fn suffixes(&self) -> Suffixes<'_> {
        self.pool.as_ref().map_or_else(Suffixes::default, Pool::suffixes)
    }

    /// Iterates over the last tokens of the context, newest first, at most `limit` and none beyond the end of a text.
    pub(crate) fn recent(&self, limit: usize) -> impl Iterator<Item = Token> + '_ {
        let backwards = self.context.tokens().iter().rev().take(limit).copied();
        backwards.take_while(|&token| token != self.end_of_text)
    }

    /// Whether a token may be drafted, and others behind it.
    pub(crate) fn continues(&self, token: Token) -> bool {
        token != self.end_of_text && token < self.vocab_size
    }

    /// The source of the context's token at a place.
    pub(crate) fn source_at(&self, place: usize) -> Source {
        if place < self.prompt { Source::Prompt } else { Source::Context }
    }

    /// Advances the pool's matches over the context's last `added` tokens.
    pub(crate) fn advance(&mut self, added: usize, order: usize) {
        let tokens = self.context.tokens();
        if added >= order {
            (self.matches, self.longest) = (Vec::with_capacity(2 * order), 0);
        }
        let mut arena = std::mem::take(&mut self.matches);
        for &token in &tokens[tokens.len() - added.min(order)..] {
            let known = arena.len();
            let from = Matches { at: 0..known, longest: self.longest };
            let mut next = Matches::default();
            if token != self.end_of_text {
                next = self.suffixes().advance(&mut arena, &from, token, order);
            }
            arena.drain(..known);
            self.longest = next.longest;
        }
        self.matches = arena;
    }
}
