//! Stochastic beam search: lists that are drawn without replacement, and can be verified strictly.
//!
//! Give every leaf x of a tree the score G(x) = φ(x) + Gumbel noise, where φ(x) is its log probability. The K leaves of
//! the largest scores, the largest first, are then a list drawn from p = exp φ without replacement (Gumbel-top-k). A
//! prefix s has the probability of all leaves below it, and the greatest of their scores, which is again Gumbel noise
//! about φ(s). So scores can be drawn from the root down (Kool et al. 2019, arXiv:1903.06059, section 4.1): those of
//! the children c of s are G(c) = φ(c) + g(c), under the condition that the greatest is G(s). With Z = max_c G(c),
//! G̃(c) = -log(exp(-G(s)) - exp(-Z) + exp(-G(c))). In the times t = exp(-G) of [`arrival`] that is
//! t̃(c) = t(s) + t(c) - min t: the first child arrives when its parent does, the others as much later as they would
//! have. No child arrives before its parent, and one arrives with it. So the K best prefixes of a depth have the K best
//! leaves below them, and beam search of width K finds these.
//!
//! The noise is a function of the list's key and of the prefix. So the score of a prefix is a function of the key, of
//! the target's log probabilities of its ancestors' children, and of nothing else: a step's K best prefixes are the
//! same whatever was drafted, and [`Verification::Strict`](crate::Verification::Strict)'s rule, to keep what was
//! drafted of them, is lossless for lists that are drawn as it is for the most probable ones. A draft model that knows
//! the key drafts the best prefixes by its own scores under the same noise.

use crate::sampling::{Noise, arrival};

/// A prefix of a list that is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perturbed {
    /// φ: the logarithm of the prefix's probability, in nats.
    pub log_probability: f64,
    /// G: the log probability with noise, by which prefixes compete. It is at most that of the parent.
    pub score: f64,
}

impl Perturbed {
    /// The empty prefix. Its score might be any number, since no order depends on it.
    pub const ROOT: Self = Self { log_probability: 0.0, score: 0.0 };

    /// A prefix that no list has.
    const IMPOSSIBLE: Self = Self { log_probability: f64::NEG_INFINITY, score: f64::NEG_INFINITY };
}

/// The `children` of a prefix with their scores, in the order given.
///
/// A child is a number that names its prefix, and the log probability of its last code behind `parent`. The number may
/// be that of a trie's node; a hash of the codes gives the same list where another night's trie has other nodes. All
/// children must be there, since the greatest of them is the parent's equal. Log probabilities need not sum to 1: they
/// are normalised over the children, so lists have the distribution of a model that is masked before its softmax. An
/// only child is its parent's equal, whatever its log probability.
///
/// A child that is to be left out has the log probability -∞, and gets it as its score. So do all children if none is
/// left: such a parent takes a place in the list for nothing, and should be left out itself.
///
/// `noise` is that of the list, the same for all its prefixes: `Noise::new` of a hash of seed and user. Scores depend
/// on the set of children and not on their order. Noise has 32 bits, so probabilities are exact to 2^-32; equal scores
/// are to be told apart by the number. Costs a sort of the children and four logarithms for each.
///
/// # Panics
/// If a log probability or the parent's score is NaN or +∞.
#[must_use]
pub fn perturbed_children(noise: Noise, parent: Perturbed, children: &[(u32, f32)]) -> Vec<Perturbed> {
    let Perturbed { log_probability, score } = parent;
    assert!(log_probability < f64::INFINITY && score < f64::INFINITY, "a parent has numbers, got {parent:?}");
    assert!(children.iter().all(|(_, log)| *log < f32::INFINITY), "log probabilities are numbers or -∞");
    let log_total = log_sum(children.iter().map(|(_, log)| f64::from(*log)).collect());
    if [log_total, log_probability, score].contains(&f64::NEG_INFINITY) {
        return vec![Perturbed::IMPOSSIBLE; children.len()];
    }
    let unconditioned = |(prefix, log): &(u32, f32)| {
        let log_probability = log_probability + (f64::from(*log) - log_total);
        Perturbed { log_probability, score: log_probability - arrival(noise.word(*prefix), 1.0).ln() }
    };
    let mut children: Vec<Perturbed> = children.iter().map(unconditioned).collect();
    let greatest = children.iter().map(|child| child.score).fold(f64::NEG_INFINITY, f64::max);
    for child in &mut children {
        child.score = conditioned(child.score, greatest, score);
    }
    children
}

/// -log(exp(-`bound`) - exp(-`greatest`) + exp(-`score`)), where `score` is at most `greatest`: appendix B.3 of the
/// paper, which neither overflows nor takes a difference of exponentials. The greatest score becomes exactly `bound`,
/// and none more.
fn conditioned(score: f64, greatest: f64, bound: f64) -> f64 {
    let later = bound - score + log_1m_exp(score - greatest);
    bound - later.max(0.0) - (-later.abs()).exp().ln_1p()
}

/// log(1 - exp(`x`)) for `x` of 0 or less, by the one of two forms that is exact.
fn log_1m_exp(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}

/// log Σ exp; -∞ of nothing. The least are added first: that is most exact, and the order of `logs` does not matter.
fn log_sum(mut logs: Vec<f64>) -> f64 {
    logs.sort_unstable_by(f64::total_cmp);
    let most = logs.last().copied().unwrap_or(f64::NEG_INFINITY);
    if most == f64::NEG_INFINITY {
        return most;
    }
    most + logs.iter().map(|log| (log - most).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests;
