//! From logits to the few most probable tokens with their log-probabilities.
//!
//! One pass finds the maximum of every block of logits; only blocks that reach the current k-th
//! best are looked at one by one, so a vocabulary of 150,000 costs a scan, not a sort. A second
//! pass sums the exponentials, which makes the log-probabilities those of the whole vocabulary.

use laser_decode::{Candidate, TargetScores};

/// Scores of the scored nodes of one segment.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    scored_from: usize,
    width: usize,
    candidates: Vec<Candidate>,
}

impl Scores {
    /// `candidates` holds `width` per scored node, the first of which is node `scored_from`.
    pub(super) fn new(scored_from: usize, width: usize, candidates: Vec<Candidate>) -> Self {
        Self { scored_from, width, candidates }
    }
}

impl TargetScores for Scores {
    /// The most probable next tokens after `node`, counted from the segment's first node:
    /// descending, ties by lower token id, natural logarithms over the whole vocabulary. Empty for
    /// a node that was not scored.
    fn top(&self, node: usize) -> &[Candidate] {
        node.checked_sub(self.scored_from)
            .and_then(|row| self.candidates.chunks_exact(self.width.max(1)).nth(row))
            .unwrap_or(&[])
    }
}

/// Logits per block: a block's maximum is one vectorised reduction.
const BLOCK: u32 = 64;

/// The `k` most probable tokens of one row of logits, appended to `best`.
#[inline(always)]
pub(super) fn push_top_k(logits: &[f32], k: usize, best: &mut Vec<Candidate>) {
    let start = best.len();
    let mut threshold = f32::NEG_INFINITY;
    let mut token = 0_u32;
    for block in logits.chunks(BLOCK as usize) {
        let full = best.len() - start == k;
        if !full || max(block) > threshold {
            for (&logit, token) in block.iter().zip(token..) {
                insert(best, start, k, Candidate { token, log_probability: logit });
            }
            if best.len() - start == k {
                threshold = best.last().map_or(threshold, |last| last.log_probability);
            }
        }
        token += BLOCK;
    }
    let normaliser = log_sum_exp(logits, best.get(start).map_or(0.0, |top| top.log_probability));
    for candidate in &mut best[start..] {
        candidate.log_probability -= normaliser;
    }
}

/// Keeps `best[start..]` the at most `k` largest, descending; an equal logit stays behind the
/// earlier token.
fn insert(best: &mut Vec<Candidate>, start: usize, k: usize, candidate: Candidate) {
    let logit = candidate.log_probability;
    let ahead = best[start..].iter().rev().skip_while(|other| other.log_probability < logit).count();
    if ahead < k {
        best.truncate(start + k - usize::from(best.len() - start == k));
        best.insert(start + ahead, candidate);
    }
}

/// Folds each value into the lane of its place, modulo `N`: lanes do not wait for each other, and whole arrays of them
/// are what the compiler turns into vectors. It does not with `chunks`, whose last one is shorter, nor with a single
/// fold: the softmax of 600 scores takes 3.5 times as long so.
#[inline(always)]
pub(super) fn by_lane<T, const N: usize>(values: &[f32], mut lanes: [T; N], fold: impl Fn(&mut T, f32)) -> [T; N] {
    let (parts, rest) = values.as_chunks::<N>();
    for part in parts {
        (lanes.iter_mut().zip(part)).for_each(|(lane, value)| fold(lane, *value));
    }
    (lanes.iter_mut().zip(rest)).for_each(|(lane, value)| fold(lane, *value));
    lanes
}

/// Lanes of [`by_lane`] for f32.
pub(super) const LANES: usize = 16;

/// The largest value.
#[inline(always)]
pub(super) fn max(values: &[f32]) -> f32 {
    let larger = |max: f32, value: f32| if value > max { value } else { max };
    let lanes = [f32::NEG_INFINITY; LANES];
    let lanes = by_lane(values, lanes, |max, value| *max = larger(*max, value));
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
}

/// ln Σ exp(logit), shifted by the maximum. Blocks are summed in f64, so that 150,000 small terms
/// do not vanish.
#[inline(always)]
fn log_sum_exp(logits: &[f32], max: f32) -> f32 {
    let sum: f64 = logits
        .chunks(BLOCK as usize)
        .map(|block| {
            let lanes = [0.0_f32; LANES];
            let lanes = by_lane(block, lanes, |sum, logit| *sum += exp(logit - max));
            f64::from(lanes.iter().sum::<f32>())
        })
        .sum();
    #[expect(clippy::cast_possible_truncation, reason = "a logarithm near the logits' own range")]
    let log = sum.ln() as f32;
    max + log
}

/// e^x for x ≤ 0, with a relative error below 3e-7; 0 stands in for what is below e^-87. Free of
/// branches and calls, so that a loop over it is vectorised: 64 rows of 150,000 logits are 10
/// million exponentials.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 · 2^23 rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = clamped - power * LN_2_HIGH - power * LN_2_LOW;
    let tail = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0)));
    let mantissa = 1.0 + r * (1.0 + r * (0.5 + r * tail));
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x > -87.0 { mantissa * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All candidates by sorting.
    fn reference(logits: &[f32], k: usize) -> Vec<(u32, f64)> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
        let normaliser = f64::from(max) + sum.ln();
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(k);
        all.into_iter().map(|(token, logit)| (token, f64::from(logit) - normaliser)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_top_k_is_that_of_a_sort_with_ties_to_lower_tokens(
            coarse in proptest::collection::vec(-40..40_i8, 1..400),
            scale in 0.1..2.0_f32,
            k in 1..12_usize,
        ) {
            let logits: Vec<f32> = coarse.iter().map(|&value| f32::from(value) * scale).collect();
            let mut best = vec![Candidate { token: 9, log_probability: 9.0 }];
            push_top_k(&logits, k, &mut best);
            let expected = reference(&logits, k);
            prop_assert_eq!(best.len() - 1, expected.len());
            for (got, (token, log_probability)) in best[1..].iter().zip(expected) {
                prop_assert_eq!(got.token, token);
                prop_assert!((f64::from(got.log_probability) - log_probability).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn the_exponential_is_accurate_over_its_whole_range() {
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!([exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
    }

    #[test]
    fn unscored_nodes_have_no_candidates() {
        let candidate = Candidate { token: 1, log_probability: -0.5 };
        let scores = Scores::new(2, 1, vec![candidate; 3]);
        for (node, expected) in [(0, 0), (1, 0), (2, 1), (4, 1), (5, 0)] {
            assert_eq!(scores.top(node).len(), expected, "node {node}");
        }
    }
}
