//! Verification: selects the drafted branch that the target model's scores accept.
//!
//! One pass over the tree from the top down serves every policy. A node is accepted if its parent is and the policy
//! accepts its token there. The deepest accepted node wins; ties go to the highest product of target probabilities. The
//! target's own choice follows it (the bonus): its most probable token, or at a temperature its sample. So a step never
//! yields less than plain decoding. Costs one scan of the parent's candidates per node.

use thiserror::Error;

use crate::Token;
use crate::tree::{DraftTree, Source};

/// The rule for accepting a drafted token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verification {
    /// Accepts only the target's own choice: the output equals plain decoding, greedy or sampled.
    Strict,
    /// LASER 3.4: accepts a token among the target's `k` most probable whose probability exceeds `p`, and always the
    /// most probable one. The paper uses k = 2 and p = 0.1. With k = 1 the output equals that of `Strict`.
    Relaxed {
        /// Number of the most probable tokens that are eligible, at least 1.
        k: usize,
        /// The probability that a token must exceed, in 0..=1.
        p: f32,
    },
    /// AASD (arXiv:2505.13204), equations 4 to 6: accepts a token x with p(x) ≥ min(α·H + β, max p), where H is the
    /// entropy of the target's distribution in nats: the less certain the target is, the more probable a token must be.
    /// As in the paper only tokens copied from the prompt are accepted so, since these are what the target was given;
    /// all others are strict. The paper uses α = 0.1 or 0.2 and β = 0.1.
    Conditional {
        /// Weight of the entropy, at least 0.
        alpha: f32,
        /// The least probability where the target is certain, in [`BETA_MIN`]..=1.
        beta: f32,
        /// Whether tokens of every source are accepted so.
        all_sources: bool,
    },
    /// Medusa (arXiv:2401.10774, section 2.3.1): accepts a token x with p(x) > min(ε, δ · exp(-H)), where p is the
    /// target's distribution at the temperature of sampling and H its entropy in nats: the less certain the target is,
    /// the less probable a token may be. The paper uses ε = 0.09 and δ = 0.3. Only the 64 most probable tokens are
    /// looked at.
    Typical {
        /// The probability that suffices whatever the entropy, in 0..=1.
        epsilon: f32,
        /// The factor of exp(-H), at least 0.
        delta: f32,
    },
}

/// The most probable tokens that may be typical: others have a probability below 1/64, and may pass only where the
/// entropy exceeds ln(64 δ), 3 nats in the paper's setting.
const TYPICAL_TOP: usize = 64;

/// Least β of conditional verification: a token needs at least that probability, so 1/β candidates are looked at.
pub const BETA_MIN: f32 = 0.02;

/// A policy is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum PolicyError {
    /// `k` was 0.
    #[error("relaxed verification: k must be at least 1, got 0 (k = 1 is strict)")]
    K,
    /// `p` was not a probability.
    #[error("relaxed verification: p must be in 0..=1, got {0}")]
    P(f32),
    /// `alpha` was negative or not a number.
    #[error("conditional verification: alpha must be 0 or more, got {0}")]
    Alpha(f32),
    /// `beta` was not a probability of at least [`BETA_MIN`].
    #[error("conditional verification: beta must be in {BETA_MIN}..=1, got {0}")]
    Beta(f32),
    /// `epsilon` was not a probability.
    #[error("typical verification: epsilon must be in 0..=1, got {0}")]
    Epsilon(f32),
    /// `delta` was negative or not a number.
    #[error("typical verification: delta must be 0 or more, got {0}")]
    Delta(f32),
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

    /// Creates the conditional policy.
    ///
    /// # Errors
    /// If `alpha` is negative or `beta` is not in [`BETA_MIN`]..=1.
    pub fn conditional(alpha: f32, beta: f32, all_sources: bool) -> Result<Self, PolicyError> {
        match (alpha, beta) {
            (alpha, _) if !(0.0..f32::INFINITY).contains(&alpha) => Err(PolicyError::Alpha(alpha)),
            (_, beta) if !(BETA_MIN..=1.0).contains(&beta) => Err(PolicyError::Beta(beta)),
            _ => Ok(Self::Conditional { alpha, beta, all_sources }),
        }
    }

    /// Creates the typical policy.
    ///
    /// # Errors
    /// If `epsilon` is not in 0..=1 or `delta` is negative.
    pub fn typical(epsilon: f32, delta: f32) -> Result<Self, PolicyError> {
        match (epsilon, delta) {
            (epsilon, _) if !(0.0..=1.0).contains(&epsilon) => Err(PolicyError::Epsilon(epsilon)),
            (_, delta) if !(0.0..f32::INFINITY).contains(&delta) => Err(PolicyError::Delta(delta)),
            _ => Ok(Self::Typical { epsilon, delta }),
        }
    }

    /// Number of the target's candidates per node that the policy needs.
    #[must_use]
    pub fn top_k(&self) -> usize {
        match *self {
            Self::Strict => 1,
            Self::Relaxed { k, .. } => k,
            // No more tokens than that have a probability of β.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to 1 / BETA_MIN")]
            Self::Conditional { beta, .. } => (1.0 / beta) as usize,
            Self::Typical { .. } => TYPICAL_TOP,
        }
    }

    /// Whether a drafted token of this source may be another than the target's choice.
    #[must_use]
    pub fn relaxes(&self, source: Source) -> bool {
        match *self {
            Self::Strict => false,
            Self::Relaxed { .. } | Self::Typical { .. } => true,
            Self::Conditional { all_sources, .. } => all_sources || source == Source::Prompt,
        }
    }

    /// Iterates over the tokens that are accepted after a node, the target's choice first, and then those of
    /// `candidates` that are accepted of a source which the policy [relaxes](Self::relaxes).
    pub fn accepted(self, candidates: &[Candidate], prediction: Prediction) -> impl Iterator<Item = Candidate> {
        let choice = prediction.choice;
        let most = candidates.first().map_or(1.0, |first| first.log_probability.exp());
        let others = candidates
            .iter()
            .copied()
            .take(self.top_k())
            .filter(move |candidate| candidate.token != choice.token && self.passes(*candidate, prediction, most));
        // The choice would follow as the bonus anyway: rejecting it would cost a forward and change no text.
        std::iter::once(choice).chain(others)
    }

    /// Whether a candidate is probable enough to be accepted where it is not the target's choice; `most` is the
    /// probability of the most probable one.
    #[must_use]
    pub fn passes(self, candidate: Candidate, prediction: Prediction, most: f32) -> bool {
        let probability = candidate.log_probability.exp();
        match self {
            Self::Strict => false,
            Self::Relaxed { p, .. } => probability > p,
            Self::Conditional { alpha, beta, .. } => probability >= (alpha * prediction.entropy + beta).min(most),
            Self::Typical { epsilon, delta } => {
                prediction.probability(candidate) > epsilon.min(delta * (-prediction.entropy).exp())
            }
        }
    }

    /// Returns the candidate by which a drafted token is accepted after a node with these candidates and prediction.
    pub fn accepts(
        self,
        (candidates, prediction): (&[Candidate], Prediction),
        (token, source): (Token, Source),
    ) -> Option<Candidate> {
        let accepted = self.accepted(candidates, prediction).find(|candidate| candidate.token == token);
        accepted.filter(|_| token == prediction.choice.token || self.relaxes(source))
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

/// What the target says of the token after a node, beside its candidates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// What plain decoding writes: the most probable token, or the sample.
    pub choice: Candidate,
    /// The entropy of the distribution over all tokens in nats, at the temperature of sampling.
    pub entropy: f32,
    /// One over the temperature of sampling; 1 without.
    pub sharpness: f32,
    /// ln Σ p^sharpness over all tokens; 0 without sampling.
    pub log_normaliser: f32,
}

impl Prediction {
    /// A candidate's probability at the temperature of sampling.
    #[must_use]
    pub fn probability(&self, candidate: Candidate) -> f32 {
        (candidate.log_probability * self.sharpness - self.log_normaliser).exp()
    }
}

impl Default for Prediction {
    /// Of a node that was not scored: no token with no probability.
    fn default() -> Self {
        let choice = Candidate { token: Token::MAX, log_probability: f32::NAN };
        Self { choice, entropy: 0.0, sharpness: 1.0, log_normaliser: 0.0 }
    }
}

/// The scores that the target's forward computed for the nodes of a tree.
pub trait TargetScores {
    /// Returns the most probable tokens to follow `node`, most probable first: at least [`Verification::top_k`] of
    /// them, or the whole vocabulary if that is smaller.
    fn top(&self, node: usize) -> &[Candidate];

    /// Returns what the target says of the token after `node`.
    fn prediction(&self, node: usize) -> Prediction;
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
    /// Number of tokens of the path that were not the target's choice.
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
/// If the tree is empty.
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
            let drafted = (tree.tokens()[node], tree.sources()[node]);
            let told = (scores.top(parent), scores.prediction(parent));
            let candidate = policy.accepts(told, drafted)?;
            let is_relaxed = candidate.token != told.1.choice.token;
            Some(Acceptance {
                relaxed: above.relaxed + usize::from(is_relaxed),
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
        let bonus = scores.prediction(last).choice;
        verified.tokens.push(bonus.token);
        verified.log_probabilities.push(bonus.log_probability);
    }
    verified.ended = ends(&verified.tokens);
    verified
}

#[cfg(test)]
pub(crate) mod tests;
