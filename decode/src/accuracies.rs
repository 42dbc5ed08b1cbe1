//! How often what Medusa's heads put first, second and so on is what the text goes on with.
//!
//! Medusa's paper (arXiv:2401.10774, section 2.3.3) grows a sparse tree from such accuracies, measured once on a
//! calibration set: the node whose path has the greatest product of accuracies is added until there are as many as
//! wanted. [`Refined::grow`](crate::Refined::grow) does just that with whatever probabilities it is told, so all that
//! is needed are candidates with their accuracies in place of the heads' own probabilities.
//!
//! The accuracies are learnt from the texts as they are generated. What a head says of a depth counts where the text
//! got to that depth along the draft, so that their product is the probability of a path; the paper counts everywhere,
//! and takes heads to be right independently of each other.

use crate::verify::Candidate;

/// Tokens that a head's own probabilities count for beside those that were seen.
const PRIOR_TOKENS: f32 = 16.0;

/// The average is over about as many tokens at most, so that it follows other texts. Its standard error is then below
/// 0.006.
const SEEN_MAX: f32 = 4096.0;

/// The least accuracy, whose logarithm is finite.
const LEAST: f32 = 1e-6;

/// The accuracy of each of Medusa's heads by the rank of its candidates.
#[derive(Debug, Clone)]
pub struct Accuracies {
    heads: Vec<Head>,
}

/// What is known of one head.
#[derive(Debug, Clone)]
struct Head {
    /// Tokens that the averages are over.
    seen: f32,
    /// Of each rank the share of tokens that were the candidate of that rank.
    shares: Vec<f32>,
}

impl Accuracies {
    /// Those of so many heads and ranks; of all tokens that are no candidate of these ranks nothing is kept.
    #[must_use]
    pub fn new(heads: usize, ranks: usize) -> Self {
        Self { heads: vec![Head { seen: 0.0, shares: vec![0.0; ranks] }; heads] }
    }

    /// Takes note that the text went on, at the depth of a head, with its candidate of this rank, or with none of its
    /// candidates if there are no more than `rank`.
    pub fn learn(&mut self, head: usize, rank: usize) {
        let Some(head) = self.heads.get_mut(head) else { return };
        head.seen = (head.seen + 1.0).min(SEEN_MAX);
        for (at, share) in head.shares.iter_mut().enumerate() {
            let right = if at == rank { 1.0 } else { 0.0 };
            *share += (right - *share) / head.seen;
        }
    }

    /// The candidates of a head, in falling order of its own probabilities, with their accuracies in place of these.
    #[must_use]
    pub fn of(&self, head: usize, candidates: &[Candidate]) -> Vec<Candidate> {
        let Some(head) = self.heads.get(head) else { return candidates.to_vec() };
        let prior = PRIOR_TOKENS / (PRIOR_TOKENS + head.seen);
        let measured = candidates.iter().zip(&head.shares).map(|(&Candidate { token, log_probability }, share)| {
            let accuracy = prior * log_probability.exp() + (1.0 - prior) * share;
            Candidate { token, log_probability: accuracy.max(LEAST).ln() }
        });
        measured.collect()
    }
}

#[cfg(test)]
mod tests;
