//! Verification: selects the drafted branch that the target model's scores accept.
//!
//! One pass over the tree from the top down serves every policy. A node is accepted if its parent is and the policy
//! accepts its token there. The deepest accepted node wins; ties go to the highest product of target probabilities. The
//! target's own most probable token follows it (the bonus), so a step never yields less than plain decoding. Costs one
//! scan of the parent's candidates per node.

use thiserror::Error;

use crate::Token;
use crate::tree::DraftTree;

/// The rule for accepting a drafted token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verification {
    /// Accepts only the target's most probable token: the output equals plain greedy decoding.
    Strict,
    /// LASER 3.4: accepts a token among the target's `k` most probable whose probability exceeds `p`, and always the
    /// most probable one. The paper uses k = 2 and p = 0.1. With k = 1 the output equals that of `Strict`.
    Relaxed {
        /// Number of the most probable tokens that are eligible, at least 1.
        k: usize,
        /// The probability that a token must exceed, in 0..=1.
        p: f32,
    },
}

/// A relaxed policy is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum PolicyError {
    /// `k` was 0.
    #[error("relaxed verification: k must be at least 1, got 0 (k = 1 is strict)")]
    K,
    /// `p` was not a probability.
    #[error("relaxed verification: p must be in 0..=1, got {0}")]
    P(f32),
}

impl Verification {
    /// Creates the relaxed policy.
    ///
    /// # Errors
    /// If `k` is 0 or `p` is not in 0..=1.
    pub fn relaxed(k: usize, p: f32) -> Result<Self, PolicyError> {
        match (k, p) {
            (0, _) => Err(PolicyError::K),
            (_, p) if !(0.0..=1.0).contains(&p) => Err(PolicyError::P(p)),
            _ => Ok(Self::Relaxed { k, p }),
        }
    }

    /// Number of the target's candidates per node that the policy needs.
    #[must_use]
    pub fn top_k(&self) -> usize {
        match *self {
            Self::Strict => 1,
            Self::Relaxed { k, .. } => k,
        }
    }

    /// Iterates over the accepted candidates of the target, with their ranks.
    pub fn accepted(self, candidates: &[Candidate]) -> impl Iterator<Item = (usize, Candidate)> {
        let eligible = candidates.iter().copied().take(self.top_k()).enumerate();
        eligible.filter(move |(rank, candidate)| match self {
            Self::Strict => true,
            // The argmax would follow as the bonus anyway: rejecting it would cost a forward and change no text.
            Self::Relaxed { p, .. } => *rank == 0 || candidate.log_probability.exp() > p,
        })
    }

    /// Returns the rank and candidate by which `token` is accepted, given the target's candidates there.
    fn accepts(self, candidates: &[Candidate], token: Token) -> Option<(usize, Candidate)> {
        self.accepted(candidates).find(|(_, c)| c.token == token)
    }
}

/// One of the target's most probable next tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: Token,
    /// Its natural log probability.
    pub log_probability: f32,
}

/// The scores that the target's forward computed for the nodes of a tree.
pub trait TargetScores {
    /// Returns the most probable tokens to follow `node`, most probable first: at least [`Verification::top_k`] of
    /// them, or the whole vocabulary if that is smaller.
    fn top(&self, node: usize) -> &[Candidate];
}

/// The outcome of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verified {
    /// The accepted nodes in order, without the root.
    pub path: Vec<usize>,
    /// The tokens of the path and the bonus token; nothing follows an end-of-text token.
    pub tokens: Vec<Token>,
    /// The target's log probability of each of `tokens`.
    pub log_probabilities: Vec<f32>,
    /// Number of tokens of the path that were not the target's most probable.
    pub relaxed: usize,
    /// Whether the last of `tokens` ends the text.
    pub ended: bool,
}

/// The state of a visited node.
#[derive(Clone, Copy)]
struct Acceptance {
    relaxed: usize,
    log_probability: f32,
    path_log_probability: f32,
}

/// Accepts a branch of `tree` and appends the target's choice after it. `end_of_text` are the tokens that end a text;
/// nothing follows one, not even a bonus.
///
/// # Panics
/// If the tree is empty or `scores` has no candidate for an accepted node.
pub fn verify(tree: &DraftTree, scores: &impl TargetScores, policy: Verification, end_of_text: &[Token]) -> Verified {
    let accepted = accept(tree, scores, policy, end_of_text);
    let by_length_then_product = |a: &(usize, Acceptance), b: &(usize, Acceptance)| {
        let by_length = tree.depths()[a.0].cmp(&tree.depths()[b.0]);
        by_length.then(a.1.path_log_probability.total_cmp(&b.1.path_log_probability))
    };
    let nodes = accepted.iter().enumerate().filter_map(|(node, a)| Some((node, (*a)?)));
    // `max_by` keeps the last of equals; counted from the back, that is the first drafted.
    let best = nodes.rev().max_by(by_length_then_product).map_or(0, |(node, _)| node);
    outcome(tree, scores, &accepted, best, end_of_text)
}

/// Computes the acceptance per node, if the policy accepts it and all nodes above it.
fn accept(
    tree: &DraftTree,
    scores: &impl TargetScores,
    policy: Verification,
    end_of_text: &[Token],
) -> Vec<Option<Acceptance>> {
    let root = Acceptance { relaxed: 0, log_probability: 0.0, path_log_probability: 0.0 };
    let mut accepted = vec![Some(root)];
    for node in 1..tree.len() {
        let parent = tree.parents()[node] as usize;
        let ended = parent != 0 && end_of_text.contains(&tree.tokens()[parent]);
        let above = accepted[parent].filter(|_| !ended);
        accepted.push(above.and_then(|above| {
            let (rank, candidate) = policy.accepts(scores.top(parent), tree.tokens()[node])?;
            Some(Acceptance {
                relaxed: above.relaxed + usize::from(rank > 0),
                log_probability: candidate.log_probability,
                path_log_probability: above.path_log_probability + candidate.log_probability,
            })
        }));
    }
    accepted
}

fn outcome(
    tree: &DraftTree,
    scores: &impl TargetScores,
    accepted: &[Option<Acceptance>],
    last: usize,
    end_of_text: &[Token],
) -> Verified {
    let mut verified = Verified::default();
    let mut node = last;
    while node != 0 {
        verified.path.push(node);
        node = tree.parents()[node] as usize;
    }
    verified.path.reverse();
    for &node in &verified.path {
        verified.tokens.push(tree.tokens()[node]);
        verified.log_probabilities.extend(accepted[node].map(|a| a.log_probability));
    }
    verified.relaxed = accepted[last].map_or(0, |a| a.relaxed);
    let ends = |tokens: &[Token]| tokens.last().is_some_and(|last| end_of_text.contains(last));
    if !ends(&verified.tokens) {
        let bonus = scores.top(last)[0];
        verified.tokens.push(bonus.token);
        verified.log_probabilities.push(bonus.log_probability);
    }
    verified.ended = ends(&verified.tokens);
    verified
}

#[cfg(test)]
pub(crate) mod tests;
