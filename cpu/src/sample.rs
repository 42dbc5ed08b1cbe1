//! The target's own sample (see [`laser_decode::Noise`]) from a row of logits.

use laser_decode::{NOISE_BLOCK, Noise, Sampling, Token, arrival};

use crate::vector::{LANES, by_lane, exp, narrow};

/// Room for a row of weights, reused from row to row.
pub(crate) type Weights = Vec<f32>;

/// Rounding of the products that tell whether a token may be the first.
const MARGIN: f32 = 1.000_001;

/// A token drawn from the row, whose largest logit is `max`.
#[inline(always)]
pub(crate) fn sample(logits: &[f32], max: f32, sampling: &Sampling, noise: Noise, weights: &mut Weights) -> Token {
    let sharpness = sampling.temperature().recip();
    weights.clear();
    weights.extend(logits.iter().map(|logit| exp((logit - max) * sharpness)));
    race(weights, least_weight(weights, sampling), noise)
}

/// The weight that a token needs to be drawn.
#[inline(always)]
fn least_weight(weights: &[f32], sampling: &Sampling) -> f32 {
    let least = sampling.top_k().map_or(0.0, |top_k| kth_largest(weights, top_k as usize));
    match sampling.top_p() {
        1.0 => least,
        top_p => nucleus(weights, least, f64::from(top_p)),
    }
}

/// The k-th largest of weights in 0..=1, or a number that as many reach: by halving the range of its bits, which are in
/// the order of the numbers.
#[inline(always)]
fn kth_largest(weights: &[f32], k: usize) -> f32 {
    let reach = |bits: u32| {
        let least = f32::from_bits(bits);
        let counts = by_lane(weights, [0_u32; LANES], |count, weight| *count += u32::from(weight >= least));
        counts.iter().sum::<u32>() as usize
    };
    let (mut low, mut high) = (0, 1.0_f32.to_bits() + 1);
    while high - low > 1 {
        let middle = low.midpoint(high);
        match reach(middle) {
            count if count == k => return f32::from_bits(middle),
            count if count > k => low = middle,
            _ => high = middle,
        }
    }
    f32::from_bits(low)
}

/// The least weight of the most probable tokens that have `top_p` of the sum of all weights from `least` on.
#[inline(always)]
fn nucleus(weights: &[f32], least: f32, top_p: f64) -> f32 {
    let mut total = 0.0;
    for block in weights.chunks(NOISE_BLOCK as usize) {
        let lanes = by_lane(block, [0.0_f32; LANES], |sum, weight| *sum += if weight >= least { weight } else { 0.0 });
        total += f64::from(lanes.iter().sum::<f32>());
    }
    // All tokens below this bound together have less than what may be left out.
    let negligible = narrow(total * (1.0 - top_p) / weights.len() as f64);
    let mut kept: Vec<f32> = weights.iter().copied().filter(|weight| *weight >= least.max(negligible)).collect();
    kept.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut left = total * top_p;
    let last = kept.iter().find(|weight| {
        left -= f64::from(**weight);
        left <= 0.0
    });
    last.copied().unwrap_or_else(|| least.max(negligible))
}

/// The first token to arrive of those that have at least the weight `least`; of equals the lower one.
#[inline(always)]
fn race(weights: &[f32], least: f32, noise: Noise) -> Token {
    let (mut winner, mut first) = (0, f64::INFINITY);
    let mut from: Token = 0;
    for (at, block) in (0..).zip(weights.chunks(NOISE_BLOCK as usize)) {
        let words = noise.block(at);
        // A token takes at least its word's share of 2^32, over its weight.
        let bound = narrow(first) * MARGIN;
        let may_win = |word: u32, weight: f32| weight >= least && (word as f32 / 4_294_967_296.0) <= bound * weight;
        let mut any = false;
        for (word, weight) in words.iter().zip(block) {
            any |= may_win(*word, *weight);
        }
        if any {
            for ((word, &weight), token) in words.iter().zip(block).zip(from..) {
                if may_win(*word, weight) {
                    let time = arrival(*word, weight);
                    if time < first {
                        (winner, first) = (token, time);
                    }
                }
            }
        }
        from += NOISE_BLOCK;
    }
    winner
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The tokens that may be drawn and their probabilities, by a sort.
    fn reference(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
        let weight = |logit: &f32| f64::from(*logit / sampling.temperature()).exp();
        let mut weights: Vec<f64> = logits.iter().map(weight).collect();
        let mut keep = |least: f64| weights.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
        let mut order: Vec<f64> = logits.iter().map(weight).collect();
        order.sort_unstable_by(|a, b| b.total_cmp(a));
        let last = order[order.len().min(sampling.top_k().map_or(usize::MAX, |k| k as usize)) - 1];
        order.retain(|w| *w >= last);
        keep(last);
        let total: f64 = order.iter().sum();
        let mut sum = 0.0;
        let last = order.iter().find(|w| {
            sum += **w;
            sum >= total * f64::from(sampling.top_p()) * (1.0 - 1e-9)
        });
        keep(*last.unwrap_or(&0.0) * (1.0 - 1e-6));
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect()
    }

    fn drawn(logits: &[f32], sampling: &Sampling, noise: Noise) -> usize {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        sample(logits, max, sampling, noise, &mut Vec::new()) as usize
    }

    /// Pearson's χ² of counts against probabilities, and its degrees of freedom.
    fn chi_squared(counts: &[usize], probabilities: &[f64]) -> (f64, usize) {
        let draws: usize = counts.iter().sum();
        let mut sum = 0.0;
        let mut cells = 0_usize;
        for (&count, probability) in counts.iter().zip(probabilities) {
            if *probability == 0.0 {
                assert_eq!(count, 0, "a token that must not be drawn");
                continue;
            }
            let expected = draws as f64 * probability;
            sum += (count as f64 - expected).powi(2) / expected;
            cells += 1;
        }
        (sum, cells - 1)
    }

    #[test]
    fn samples_have_the_distribution_that_is_asked_for() {
        let logits: Vec<f32> = (0..150_u8).map(|token| f32::from(token % 10) / 2.0 - f32::from(token) / 40.0).collect();
        for sampling in [
            Sampling::new(1.0, None, 1.0).unwrap(),
            Sampling::new(0.6, None, 1.0).unwrap(),
            Sampling::new(1.5, Some(20), 1.0).unwrap(),
            Sampling::new(1.0, None, 0.8).unwrap(),
            Sampling::new(0.8, Some(30), 0.9).unwrap(),
        ] {
            // Over places of one text, and over texts at one place.
            for over_texts in [false, true] {
                let mut counts = vec![0; logits.len()];
                for at in 0..200_000_u32 {
                    let noise = match over_texts {
                        true => Noise::new(u64::from(at)).after(7),
                        false => Noise::new(99).after(at as usize),
                    };
                    counts[drawn(&logits, &sampling, noise)] += 1;
                }
                let (sum, freedom) = chi_squared(&counts, &reference(&logits, &sampling));
                // Five standard deviations.
                let bound = freedom as f64 + 5.0 * (2.0 * freedom as f64).sqrt();
                assert!(sum < bound, "{sampling:?}: {sum} of {freedom} degrees of freedom");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_drawn_may_be_drawn_and_is_the_first_of_all_by_its_definition(
            coarse in prop::collection::vec(-40..40_i8, 1..300),
            temperature in 0.1..3.0_f32,
            top_k in prop::option::of(1..50_u32),
            top_p in prop::sample::select(vec![0.1, 0.5, 0.9, 1.0]),
            key in any::<u64>(),
        ) {
            let logits: Vec<f32> = coarse.iter().map(|&value| f32::from(value) / 4.0).collect();
            let sampling = Sampling::new(temperature, top_k, top_p).unwrap();
            let noise = Noise::new(key).after(3);
            let winner = drawn(&logits, &sampling, noise);
            let probabilities = reference(&logits, &sampling);
            prop_assert!(probabilities[winner] > 0.0);
            let time = |token: usize| {
                let size = NOISE_BLOCK as usize;
                let word = noise.block(u32::try_from(token / size).unwrap())[token % size];
                let unit = (f64::from(word) + 0.5) / 2_f64.powi(32);
                -(1.0 - unit).ln() / probabilities[token]
            };
            for token in (0..logits.len()).filter(|token| probabilities[*token] > 0.0) {
                prop_assert!(time(winner) <= time(token) * (1.0 + 1e-5));
            }
        }
    }
}
