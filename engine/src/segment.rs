//! The new tokens of a step.

use laser_cpu::Asked;
use laser_decode::Draw;

/// Handle of one sequence's cache; reused after [`Engine::close`](crate::Engine::close).
pub type Slot = usize;

/// One sequence's new tokens of a step: a prefill chunk (a chain) or a draft tree.
#[derive(Debug, Clone, Copy, Default)]
pub struct Segment<'a> {
    /// The sequence.
    pub slot: Slot,
    /// The nodes' tokens, parents before children.
    pub tokens: &'a [u32],
    /// `parents[i] < i` is the node that `i` continues, [`laser_decode::ROOT_PARENT`] for the committed context. Where
    /// the slot [holds](crate::Engine::hold) nodes of earlier steps, these come first in the count of nodes.
    pub parents: &'a [u32],
    /// Nodes from this index on are scored: `tokens.len()` for a prefill chunk that is not the
    /// last, `tokens.len() - 1` for the last one, 0 for a tree.
    pub scored_from: usize,
    /// How the next token is drawn after the sequence's first token, and thus after every other; the most probable one
    /// is taken if absent.
    pub draw: Option<Draw>,
    /// Of each node the feature of the token before it, `[nodes, hidden_size]`, for an engine that
    /// [reads features](crate::EngineInfo::reads_features); empty for every other.
    pub before: &'a [f32],
    /// Tokens whose log probabilities are wanted at each scored node, whatever their rank.
    pub asked: Asked<'a>,
}

/// A scored node of the last step, and the tokens that may follow it.
#[derive(Debug, Clone, Copy)]
pub struct MaskedNode<'a> {
    /// The sequence.
    pub slot: Slot,
    /// The node, counted as in the sequence's [`Segment`].
    pub node: usize,
    /// Bit t % 32 of word t / 32 is set for each token t that may follow; those beyond the last word may not.
    pub mask: &'a [u32],
    /// How the token after the node is drawn; the most probable one is taken if absent.
    pub draw: Option<Draw>,
}
