//! How texts are generated.

use laser_decode::{Drafter, Sampling, Token, Verification};

use crate::budget::Budget;

/// How texts are generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// The source of drafts.
    pub drafter: Drafter,
    /// Tokens that the target ranks above one copied from the prompt which are drafted beside it, at most; unless it is
    /// 0, the target scores all of every prompt.
    pub alignment: usize,
    /// Drafted tokens of a sequence and step, at most.
    pub nodes: usize,
    /// The rule by which drafted tokens are accepted.
    pub verification: Verification,
    /// How tokens are drawn; the most probable ones are taken if absent.
    pub sampling: Option<Sampling>,
    /// Sequences of a step, at most; at least 1.
    pub batch: usize,
    /// Cuts trees back to the nodes that pay. `None` drafts `nodes` always, so that relaxed texts, too, depend on
    /// the entity alone and not on measured times.
    pub budget: Option<Budget>,
    /// Tokens of a step, at most; at least 1. Longer prompts are prefilled in chunks.
    pub step_tokens: usize,
    /// Bound on a text's tokens, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a text; the first is the pools'.
    pub end_of_text: Vec<u32>,
    /// Strings that end a text; they are not part of it.
    pub stop: Vec<String>,
    /// Whether a prompt begins from the cache of the prefix that it shares with others; a benchmark measures what that
    /// gives.
    pub shared_prefixes: bool,
}

impl GenerateOptions {
    /// The token behind which nothing is drafted: the pools' end of text.
    pub(super) fn end_of_drafts(&self) -> Token {
        self.end_of_text.first().copied().unwrap_or(Token::MAX)
    }
}
