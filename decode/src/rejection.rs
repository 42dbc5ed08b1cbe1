//! Rejection sampling: the lossless rules of the literature, which draw with fresh randomness.
//!
//! Laser's own rule for texts at a temperature is keyed sampling ([`Noise`](crate::Noise)); these are what it is
//! measured against. Each function decides one place of a text: it tries the drafted children one after the other, and
//! if all are rejected it draws the token from the residual, what is left of the target's distribution p. However
//! bad the draft, the token that comes of it has the distribution p. [`accept_sampled`] is for children drawn from a
//! draft model's distribution q, [`accept_given`] for children that have none, such as a pool's.
//!
//! A distribution is a slice with a weight per token of the vocabulary. Weights need not sum to 1, as those of an f32
//! softmax do not: they are divided by their sum, and all sums are in f64. `uniform` gives independent numbers in
//! [0, 1), also independent of the children.

use crate::Token;

/// What became of the children of one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// The child at this index was accepted, and its own children are to be tried.
    Accepted(usize),
    /// No child was accepted: this token was drawn in their stead, and the step ends with it.
    Rejected(Token),
}

/// Tries `children`, each drawn from `q` independently of the others, so that a token may be among them twice.
///
/// Child x is accepted with the probability min(1, p(x) / q(x)), and every rejection makes norm(max(0, p - q)) of p.
/// With one child this is speculative sampling (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1), with more the
/// multi-step speculative sampling of SpecInfer (Miao et al., arXiv:2305.09781); without any it is [`sample`].
///
/// `p` and `q` are as long as the vocabulary. A child that `q` gives no weight was not drawn from it and is passed
/// over, which keeps the rule lossless. If a residual is empty, p equals q but for rounding, and p stays as it is.
/// Costs a pass over the vocabulary for each of `p` and `q` and for each rejection.
///
/// # Panics
/// If the lengths of `p` and `q` differ, a child is outside of the vocabulary, or the weights of a distribution are not
/// 0 or more with a positive, finite sum.
pub fn accept_sampled(p: &[f32], q: &[f32], children: &[Token], uniform: &mut impl FnMut() -> f64) -> Trial {
    assert_eq!(p.len(), q.len(), "target and draft have the same vocabulary");
    let (mut p, q) = (normalised(p), normalised(q));
    for (child, &token) in children.iter().enumerate() {
        let x = token as usize;
        if q[x] == 0.0 {
            continue;
        }
        // The quotient is 1 or more exactly where p(x) ≥ q(x): none of these is rejected by rounding.
        if uniform() < p[x] / q[x] {
            return Trial::Accepted(child);
        }
        p = residual(p, |token, p| p - q[token]);
    }
    Trial::Rejected(draw(&p, uniform))
}

/// Tries `children` that are given and not drawn: tokens of a pool, of a prompt, or the most probable ones of a draft
/// model.
///
/// Child x is accepted with the probability p(x), and every rejection takes x out of p, which is normalised again. So
/// one of them is accepted as often as p draws one of them. This is how the published code of EAGLE (Li et al.,
/// arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858) verifies trees of most probable tokens: the rule of
/// [`accept_sampled`] for a q that is certain of x.
///
/// `p` is as long as the vocabulary. A token that is among `children` twice is never accepted at the second place.
/// Costs a pass over the vocabulary, and one for each rejection.
///
/// # Panics
/// If a child is outside of the vocabulary, or the weights of `p` are not 0 or more with a positive, finite sum.
pub fn accept_given(p: &[f32], children: &[Token], uniform: &mut impl FnMut() -> f64) -> Trial {
    let mut p = normalised(p);
    for (child, &token) in children.iter().enumerate() {
        let x = token as usize;
        if uniform() < p[x] {
            return Trial::Accepted(child);
        }
        p = residual(p, |token, p| if token == x { 0.0 } else { p });
    }
    Trial::Rejected(draw(&p, uniform))
}

/// Draws a token from `p`: a child of a draft model's distribution, or the bonus token after the last accepted one.
///
/// `p` is as long as the vocabulary. Costs two passes over it.
///
/// # Panics
/// If the weights of `p` are not 0 or more with a positive, finite sum.
pub fn sample(p: &[f32], uniform: &mut impl FnMut() -> f64) -> Token {
    draw(&normalised(p), uniform)
}

/// The weights as probabilities.
pub(crate) fn normalised(weights: &[f32]) -> Vec<f64> {
    assert!(weights.iter().all(|weight| *weight >= 0.0), "weights are 0 or more");
    let total: f64 = weights.iter().copied().map(f64::from).sum();
    assert!(total > 0.0 && total.is_finite(), "weights have a positive, finite sum, got {total}");
    weights.iter().map(|weight| f64::from(*weight) / total).collect()
}

/// What `left` leaves of each token's probability, normalised; `p` itself if it leaves nothing. In exact arithmetic a
/// rejection always leaves something, so that happens no more often than numbers are rounded.
pub(crate) fn residual(mut p: Vec<f64>, left: impl Fn(usize, f64) -> f64) -> Vec<f64> {
    let left_of = |(token, p): (usize, &f64)| left(token, *p).max(0.0);
    let total: f64 = p.iter().enumerate().map(left_of).sum();
    if total > 0.0 {
        for (token, p) in p.iter_mut().enumerate() {
            *p = left_of((token, p)) / total;
        }
    }
    p
}

/// The token at which the running sum of probabilities exceeds a uniform number.
#[expect(clippy::cast_possible_truncation, reason = "a vocabulary has fewer than 2^32 tokens")]
pub(crate) fn draw(p: &[f64], uniform: &mut impl FnMut() -> f64) -> Token {
    let mut rest = uniform();
    let reached = p.iter().position(|p| {
        let is_reached = rest < *p;
        rest -= p;
        is_reached
    });
    // The sum may be less than 1 by rounding; the last token that has any probability gets what is missing.
    let last = || p.iter().rposition(|p| *p > 0.0);
    reached.or_else(last).unwrap_or_default() as Token
}

#[cfg(test)]
pub(crate) mod tests;
