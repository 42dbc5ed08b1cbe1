//! From logits to the few most probable tokens with their log-probabilities.
//!
//! One pass finds the maximum of every block of logits; only blocks that reach the current k-th
//! best are looked at one by one, so a vocabulary of 150,000 costs a scan, not a sort. A second
//! pass sums the exponentials, which makes the log-probabilities those of the whole vocabulary.

use laser_decode::Candidate;

use crate::{
    skinny::vectorized,
    vector::{LANES, by_lane, exp, max},
};

/// Logits per block: a block's maximum is one vectorised reduction.
const BLOCK: u32 = 64;

/// Appends to `best` the `k` most probable tokens of one row of logits: descending, ties by lower token id, natural
/// logarithms over the whole vocabulary.
pub fn push_top_k(logits: &[f32], k: usize, best: &mut Vec<Candidate>) {
    vectorized(|| scan(logits, k, best));
}

#[inline(always)]
fn scan(logits: &[f32], k: usize, best: &mut Vec<Candidate>) {
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
}
