//! How lists are made.

use laser_decode::Normalisation;

use crate::cost::StepCost;

/// What is drafted for lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListDraft {
    /// Nothing.
    None,
    /// Continuations that the trie has: of the last codes few are left.
    #[default]
    Trie,
}

/// How lists are made.
#[derive(Debug, Clone)]
pub struct ListOptions {
    /// Items of a list.
    pub items: usize,
    /// Beams of a search, at least as many as items.
    pub width: usize,
    /// What a code's probability is relative to.
    pub normalisation: Normalisation,
    /// Whether items of the user's history may be listed.
    pub repeat: bool,
    /// Whether all items are listed that share an identifier, or only the first.
    pub all_ties: bool,
    /// What is drafted.
    pub draft: ListDraft,
    /// Drafted prefixes of a user and step, at most.
    pub nodes: usize,
    /// Lists that are worked on at a time; at least 1.
    pub batch: usize,
    /// Tokens of a step, at most; at least 1. Longer prompts are prefilled in chunks.
    pub step_tokens: usize,
    /// The cost of a forward, by which drafts are cut to what pays; the most is drafted if absent.
    pub cost: Option<StepCost>,
}
