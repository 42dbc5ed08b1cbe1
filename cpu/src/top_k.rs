//! From logits to what the target says of the next token: the few most probable ones with their log-probabilities, its
//! choice, and the entropy.
//!
//! One pass finds the maximum of every block of logits; only blocks that reach the current k-th
//! best are looked at one by one, so a vocabulary of 150,000 costs a scan, not a sort. A second
//! pass sums the exponentials, which makes the log-probabilities those of the whole vocabulary, and the terms of the
//! entropy. Sampling at a temperature takes two more passes: the sums there, and the draw.

use laser_decode::{Candidate, Draw, Prediction};

use crate::{
    sample::{Weights, sample},
    skinny::vectorized,
    vector::{LANES, exp, max, narrow},
};

/// Logits per block: a block's maximum is one vectorised reduction.
const BLOCK: u32 = 64;

/// What rows of logits say of the next token, row after row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Predictions {
    /// The most probable tokens of each row: descending, ties by lower token id, natural logarithms over the whole
    /// vocabulary.
    pub candidates: Vec<Candidate>,
    /// What else there is to say of each row.
    pub rows: Vec<Prediction>,
    /// The features of all nodes of a step if they are wanted, scored or not: what enters the projection to the
    /// vocabulary.
    pub features: Vec<f32>,
    /// The log probabilities that were [asked](crate::Asked) for, one scored node behind the other.
    pub asked: Vec<f32>,
}

impl Predictions {
    /// Appends the `k` most probable tokens of one row and its prediction, of which a token is drawn if there is
    /// noise.
    pub fn push(&mut self, logits: &[f32], k: usize, draw: Option<Draw>) {
        self.push_with(logits, k, draw, &mut Weights::new());
    }

    /// As [`push`](Self::push), in room that is there.
    pub(crate) fn push_with(&mut self, logits: &[f32], k: usize, draw: Option<Draw>, weights: &mut Weights) {
        let row = predict(logits, k, draw, &mut self.candidates, weights);
        self.rows.push(row);
    }

    /// Appends the log probabilities of these tokens of one row, over its whole vocabulary.
    pub fn push_asked(&mut self, logits: &[f32], tokens: &[u32]) {
        if tokens.is_empty() {
            return;
        }
        let log_sum = log_sum(logits);
        let of = |token: &u32| narrow(f64::from(logits[*token as usize]) - log_sum);
        self.asked.extend(tokens.iter().map(of));
    }

    /// Appends those of other rows.
    pub fn append(&mut self, other: Self) {
        self.candidates.extend(other.candidates);
        self.rows.extend(other.rows);
        self.asked.extend(other.asked);
    }
}

vectorized! {
    /// ln Σ exp(logit).
    fn log_sum = row_log_sum(logits: &[f32]) -> f64;
    /// Appends the `k` most probable tokens to `best`.
    fn predict = predict_row(
        logits: &[f32], k: usize, draw: Option<Draw>, best: &mut Vec<Candidate>, weights: &mut Weights
    ) -> Prediction;
}

#[inline(always)]
pub(crate) fn row_log_sum(logits: &[f32]) -> f64 {
    let max = max(logits);
    f64::from(max) + sums(logits, max, 1.0).0.ln()
}

#[inline(always)]
fn predict_row(
    logits: &[f32],
    k: usize,
    draw: Option<Draw>,
    best: &mut Vec<Candidate>,
    weights: &mut Weights,
) -> Prediction {
    let start = best.len();
    scan(logits, k.max(1), best);
    let Some(&first) = best.get(start) else {
        return Prediction::default();
    };
    let max = first.log_probability;
    let (sum, weighted) = sums(logits, max, 1.0);
    let log = sum.ln();
    let log_probability = |logit: f32| logit - max - narrow(log);
    for candidate in &mut best[start..] {
        candidate.log_probability = log_probability(candidate.log_probability);
    }
    let greedy = Prediction { choice: best[start], entropy: narrow(log - weighted / sum), ..Prediction::default() };
    best.truncate(start + k);
    let Some(Draw { sampling, noise }) = draw else {
        return greedy;
    };
    let token = sample(logits, max, &sampling, noise, weights);
    let choice = Candidate { token, log_probability: log_probability(logits[token as usize]) };
    if sampling.temperature() == 1.0 {
        return Prediction { choice, ..greedy };
    }
    let sharpness = sampling.temperature().recip();
    let (tempered, weighted) = sums(logits, max, sharpness);
    Prediction {
        choice,
        entropy: narrow(tempered.ln() - weighted / tempered),
        sharpness,
        log_normaliser: narrow(tempered.ln() - log * f64::from(sharpness)),
    }
}

/// Appends the `k` largest logits to `best`.
#[inline(always)]
pub(crate) fn scan(logits: &[f32], k: usize, best: &mut Vec<Candidate>) {
    let start = best.len();
    let mut threshold = f32::NEG_INFINITY;
    let mut token = 0_u32;
    for block in logits.chunks(BLOCK as usize) {
        // A token in a block that only ties with the threshold has a higher id than the k-th best: it loses.
        if best.len() - start < k || max(block) > threshold {
            for (place, &logit) in (token..).zip(block) {
                if best.len() - start < k || logit > threshold {
                    insert(best, start, k, Candidate { token: place, log_probability: logit });
                    threshold = best.last().map_or(f32::NEG_INFINITY, |last| last.log_probability);
                }
            }
        }
        token += BLOCK;
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

/// Σ exp(x) and Σ x · exp(x) for x = (logit - max) · sharpness. Blocks are summed in f64, so that 150,000 small terms
/// do not vanish.
#[inline(always)]
fn sums(logits: &[f32], max: f32, sharpness: f32) -> (f64, f64) {
    let (mut sum, mut weighted) = (0.0, 0.0);
    for block in logits.chunks(BLOCK as usize) {
        let (mut lanes, mut weighted_lanes) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        let (parts, rest) = block.as_chunks::<LANES>();
        for part in parts {
            for lane in 0..LANES {
                add((part[lane] - max) * sharpness, &mut lanes[lane], &mut weighted_lanes[lane]);
            }
        }
        for (lane, logit) in rest.iter().enumerate() {
            add((logit - max) * sharpness, &mut lanes[lane], &mut weighted_lanes[lane]);
        }
        sum += f64::from(lanes.iter().sum::<f32>());
        weighted += f64::from(weighted_lanes.iter().sum::<f32>());
    }
    (sum, weighted)
}

#[inline(always)]
fn add(x: f32, sum: &mut f32, weighted: &mut f32) {
    // Finite, so that a token of probability 0 adds 0.
    let x = if x > -88.0 { x } else { -88.0 };
    let exp = exp(x);
    *sum += exp;
    *weighted += exp * x;
}

#[cfg(test)]
mod tests {
    use laser_decode::{Noise, Sampling};
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

    #[test]
    fn tokens_that_are_impossible_add_nothing() {
        let mut found = Predictions::default();
        found.push(&[1.0, f32::NEG_INFINITY, 1.0], 1, None);
        assert!((found.rows[0].entropy - 2.0_f32.ln()).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn a_sample_comes_with_the_distribution_at_its_temperature() {
        let logits: Vec<f32> = (0..300_u16).map(|token| f32::from(token * 37 % 101) / 20.0).collect();
        for temperature in [0.5, 1.0, 2.0] {
            let sampling = Sampling::new(temperature, None, 1.0).unwrap();
            let mut found = Predictions::default();
            found.push(&logits, 300, Some(Draw { sampling, noise: Noise::new(5) }));
            let row = found.rows[0];
            assert_eq!(found.candidates.iter().find(|c| c.token == row.choice.token), Some(&row.choice));
            let tempered: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
            let expected = reference(&tempered, 300);
            for (candidate, (token, log_probability)) in found.candidates.iter().zip(&expected) {
                assert_eq!(candidate.token, *token);
                let ratio = f64::from(row.probability(*candidate)) / log_probability.exp();
                assert!((ratio - 1.0).abs() < 1e-4, "{ratio}");
            }
            let entropy: f64 = expected.iter().map(|(_, log)| -log.exp() * log).sum();
            assert!((f64::from(row.entropy) - entropy).abs() < 1e-4);
        }
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
            let before = Candidate { token: 9, log_probability: 9.0 };
            let mut found = Predictions { candidates: vec![before], ..Predictions::default() };
            found.push(&logits, k, None);
            let expected = reference(&logits, k);
            prop_assert_eq!(found.candidates.len() - 1, expected.len());
            for (got, (token, log_probability)) in found.candidates[1..].iter().zip(expected) {
                prop_assert_eq!(got.token, token);
                prop_assert!((f64::from(got.log_probability) - log_probability).abs() < 1e-4);
            }
            let entropy: f64 = reference(&logits, logits.len()).into_iter().map(|(_, log)| -log.exp() * log).sum();
            prop_assert!((f64::from(found.rows[0].entropy) - entropy).abs() < 1e-4, "{found:?} {entropy}");
            prop_assert_eq!(found.rows[0].choice, found.candidates[1]);
        }
    }
}
