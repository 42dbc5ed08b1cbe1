//! Sampling-based beam search, and the relaxed verification of its drafts.
//!
//! A step of beam search keeps K of its candidates: the continuations of the prefixes that it kept before. Where it
//! samples, it draws them without replacement from p, the cumulative probabilities of the candidates divided by their
//! sum: the list x_1 ... x_K has the probability Π p(x_k) / (1 - p(x_1) - ... - p(x_(k-1))). [`sample_list`] does that.
//!
//! AtSpeed (Lin et al., arXiv:2410.05165, algorithm 2) verifies a list that a draft model drew in the same way from its
//! own distribution q. [`accept_list`] accepts each x with the probability min(1, p(x) / q(x)), and draws what is
//! missing from norm(max(0, p - q)) without those accepted. For K = 1 this is speculative sampling and lossless:
//! q(x) min(1, p(x) / q(x)) + (1 - Σ_y min(p(y), q(y))) norm(max(0, p - q))(x) = p(x). It is lossless for any K if
//! q = p, since nothing is rejected. **For K > 1 and q ≠ p it is not**: a list without replacement has x in it with
//! another probability than p(x), and acceptance knows p(x) alone. The code that the authors published drafts N > K and
//! keeps a random K of those accepted ([`accept_list_published`]), which is wrong even if q = p: the list then has x
//! with K / N times the probability that a list of N has it. What is lossless for every K is
//! [`perturbed_children`](crate::perturbed_children).
//!
//! How far off the probability is that a candidate is in the list, for the worst of 10 candidates: median and maximum
//! of 40 pairs, by enumeration. The target's logits are standard normal, the draft's have noise of this standard
//! deviation, and the total variation distance is that of p and q on average.
//!
//! | noise | distance | N = K = 1 | N = K = 2 | N = K = 4 | published, N = 3, K = 1 | published, N = 8, K = 4 |
//! |---|---|---|---|---|---|---|
//! | 0 | 0 | 0 | 0 | 0 | .049, .246 | .321, .490 |
//! | 0.1 | .04 | 0 | .008, .024 | .037, .112 | .045, .251 | .332, .501 |
//! | 0.3 | .11 | 0 | .021, .065 | .105, .244 | .056, .262 | .363, .540 |
//! | 1 | .35 | 0 | .053, .209 | .234, .501 | .114, .277 | .446, .643 |
//!
//! A distribution is a slice with a weight per candidate, as in [`accept_sampled`](crate::accept_sampled). p and q are
//! over the same candidates; what one of them cannot reach has no weight in it.

use crate::rejection::{draw, normalised, residual};

/// What became of a drafted list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListTrial {
    /// The candidates that the step keeps, each once: drafted ones that were accepted in their order, then those that
    /// were drawn. They are fewer than K only if the target has fewer candidates.
    pub chosen: Vec<usize>,
    /// Drafted candidates that were accepted; more than were chosen only if more than K were drafted.
    pub accepted: usize,
}

impl ListTrial {
    /// Whether all that were chosen are accepted drafts, so that the next step's drafts can be verified. Otherwise the
    /// round ends with this step.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.accepted >= self.chosen.len()
    }
}

/// The weights of candidates that have these logarithms of cumulative probabilities: relative to the most probable one,
/// so that long prefixes do not vanish. Where all are impossible they are alike.
#[must_use]
pub fn list_weights(log_probabilities: &[f32]) -> Vec<f32> {
    let most = log_probabilities.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most == f32::NEG_INFINITY {
        return vec![1.0; log_probabilities.len()];
    }
    log_probabilities.iter().map(|log| (log - most).exp()).collect()
}

/// Draws `k` candidates from `p` without replacement, in the order in which they are drawn; all if there are no more.
///
/// Costs two passes over `p` for each.
///
/// # Panics
/// If the weights of `p` are not 0 or more with a positive, finite sum.
pub fn sample_list(p: &[f32], k: usize, uniform: &mut impl FnMut() -> f64) -> Vec<usize> {
    draw_distinct(normalised(p), k, uniform)
}

/// Verifies a list that [`sample_list`] drew from `q`: algorithm 2 of AtSpeed with N = K.
///
/// `drafted` are `k` distinct candidates, or fewer if `q` has no more. For `k` = 1 it is
/// [`accept_sampled`](crate::accept_sampled), number by number; for more it is as biased as the module says. What `q`
/// gives no weight was not drawn from it and is passed over. Costs a pass over the candidates, and two for each that is
/// drawn.
///
/// # Panics
/// If the lengths of `p` and `q` differ, more than `k` candidates are drafted, one is drafted twice or is none, or the
/// weights of a distribution are not 0 or more with a positive, finite sum.
pub fn accept_list(p: &[f32], q: &[f32], drafted: &[usize], k: usize, uniform: &mut impl FnMut() -> f64) -> ListTrial {
    assert!(drafted.len() <= k, "at most {k} candidates are drafted, got {}", drafted.len());
    accept_list_published(p, q, drafted, k, uniform)
}

/// Verifies a list that [`sample_list`] drew from `q` as the authors' code does: N > K candidates are drafted, and a
/// random K of those accepted are kept. **It is biased, whatever the draft**, and here to be measured against.
///
/// A random K of N distinct candidates has the improbable ones too often, and the rule has no way to know. Any number
/// of candidates may be drafted; otherwise like [`accept_list`].
///
/// # Panics
/// Like [`accept_list`], but not for the number of drafts.
pub fn accept_list_published(
    p: &[f32],
    q: &[f32],
    drafted: &[usize],
    k: usize,
    uniform: &mut impl FnMut() -> f64,
) -> ListTrial {
    assert_eq!(p.len(), q.len(), "target and draft have the same candidates");
    assert!((1..drafted.len()).all(|at| !drafted[..at].contains(&drafted[at])), "drafted candidates are distinct");
    let (p, q) = (normalised(p), normalised(q));
    let mut chosen: Vec<usize> = drafted.iter().copied().filter(|x| q[*x] > 0.0).collect();
    let tried = chosen.len();
    // The quotient is 1 or more exactly where p(x) ≥ q(x): none of these is rejected by rounding.
    chosen.retain(|x| uniform() < p[*x] / q[*x]);
    let accepted = chosen.len();
    if accepted > k {
        let mut kept = draw_distinct(vec![1.0; accepted], k, uniform);
        kept.sort_unstable();
        chosen = kept.into_iter().map(|at| chosen[at]).collect();
    }
    fill(&mut chosen, [&p, &q], [tried - accepted, k], uniform);
    ListTrial { chosen, accepted }
}

/// Fills a list up to `k`: in place of those that were rejected it draws from norm(max(0, p - q)) without those chosen,
/// and what is missing then from p without those chosen.
///
/// Places without a draft are the target's own draws, hence from p. But places of rejected drafts get there too. The
/// residual has only candidates that q gives too little, and these may be few, or be accepted themselves: for K > 1 it
/// runs out where nothing was rounded. A list left short would lack items that the target has, so the target draws on
/// from what is left, and a rejected candidate may come back.
fn fill(chosen: &mut Vec<usize>, [p, q]: [&[f64]; 2], [rejected, k]: [usize; 2], uniform: &mut impl FnMut() -> f64) {
    let above = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    for (mut weights, most) in [(above, rejected), (p.to_vec(), k)] {
        for x in chosen.iter() {
            weights[*x] = 0.0;
        }
        let missing = k.saturating_sub(chosen.len());
        chosen.extend(draw_distinct(weights, missing.min(most), uniform));
    }
}

/// Draws so many without replacement; all that have a weight if there are no more.
fn draw_distinct(mut weights: Vec<f64>, count: usize, uniform: &mut impl FnMut() -> f64) -> Vec<usize> {
    let most = weights.iter().filter(|weight| **weight > 0.0).count();
    let mut drawn = Vec::new();
    while drawn.len() < count.min(most) {
        weights = residual(weights, |_, weight| weight);
        let x = draw(&weights, uniform) as usize;
        weights[x] = 0.0;
        drawn.push(x);
    }
    drawn
}

#[cfg(test)]
pub(crate) mod tests;
