//! What known noise says about the next token of a text that is drawn.
//!
//! Under keyed sampling ([`Noise`]) the target draws the token x that arrives first: at the time t(x) = E(x) / p(x).
//! E(x) is known before the target has run, and a source's estimate a(x) stands for p(x), so whoever drafts can see who
//! is going to win. Were the estimates exact, the first of the known tokens would win unless one of the others, which
//! have the probability r together, arrived before it: with the probability exp(-r t(x)). They are not exact, so each
//! of the known tokens gets a share of that probability, in proportion to a(x)^[`ESTIMATE`] · E(x)^-[`NOISE`]. Sharing
//! noise with the draft is the idea of arXiv:2408.07978.

use crate::Token;
use crate::sampling::{Noise, arrival};

/// The exponents of a share: the surer the estimates, the larger both might be. Measured on 130 profiles and
/// descriptions by `profile-lm` at temperatures of 0.5 and 1, against the estimates alone: of a pool's estimates the
/// first one is what is drawn in 54 in place of 50 and 35 in place of 28 of 100 places, of a draft model's in 61 in
/// place of 53 and 37 in place of 28; what they say of the token that is drawn gains 0.1 to 0.3 nats a place. Exponents
/// of 1 and 0.5 or of 2 and 1 gain less at either temperature, for either source.
const ESTIMATE: f32 = 1.25;
const NOISE: f32 = 0.75;

/// A place of a text whose noise is known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Race {
    noise: Noise,
    /// The logarithms of the sum of the known tokens' shares, and of the probability that one of them wins.
    log_sum: f32,
    log_known: f32,
}

impl Race {
    /// The race of these tokens, each with its estimate above 0, and of all others.
    pub(crate) fn new(noise: Noise, known: impl Iterator<Item = (Token, f32)>) -> Self {
        // Shares are relative to the greatest one, so that none overflows.
        let (mut most, mut sum, mut others, mut first) = (f32::MIN, 0.0, 1.0_f32, f32::MAX);
        for (token, estimate) in known {
            let (time, log) = share(noise, token, estimate);
            let greatest = log.max(most);
            sum = sum * (most - greatest).exp() + (log - greatest).exp();
            most = greatest;
            others -= estimate;
            first = first.min(time);
        }
        Self { noise, log_sum: most + sum.ln(), log_known: -others.max(0.0) * first }
    }

    /// The probability that one of the known tokens is drawn.
    pub(crate) fn probability(&self, token: Token, estimate: f32) -> f32 {
        let (_, log) = share(self.noise, token, estimate);
        (self.log_known + log - self.log_sum).exp().min(1.0)
    }
}

/// When a token of this probability arrives, and the logarithm of its share.
fn share(noise: Noise, token: Token, estimate: f32) -> (f32, f32) {
    #[expect(clippy::cast_possible_truncation, reason = "it is compared, not added up")]
    let time = (arrival(noise.word(token), 1.0) as f32).max(f32::MIN_POSITIVE);
    (time / estimate, ESTIMATE * estimate.ln() - NOISE * time.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight tokens: of the first `known` the exact probabilities are known, of the others their sum.
    const PROBABILITIES: [f32; 8] = [0.3, 0.05, 0.2, 0.1, 0.15, 0.1, 0.06, 0.04];

    /// For many noises whether the target draws one of the first `known` tokens, the probability that the race gives
    /// to any of them, and whether it gives the most to the one that is drawn.
    fn outcomes(known: usize) -> Vec<(bool, f32, bool)> {
        let tokens = || (0..).zip(PROBABILITIES);
        let outcome = |key| {
            let noise = Noise::new(key).after(3);
            let arrival = |&(token, estimate): &(Token, f32)| share(noise, token, estimate).0;
            let (drawn, _) = tokens().min_by(|a, b| arrival(a).total_cmp(&arrival(b))).unwrap();
            let race = Race::new(noise, tokens().take(known));
            let given = tokens().take(known).map(|(token, estimate)| (token, race.probability(token, estimate)));
            let (favoured, _) = given.clone().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            ((drawn as usize) < known, given.map(|(_, probability)| probability).sum(), favoured == drawn)
        };
        (0..20_000).map(outcome).collect()
    }

    #[test]
    fn who_knows_the_distribution_foresees_most_of_what_is_drawn() {
        let outcomes = outcomes(PROBABILITIES.len());
        let right = outcomes.iter().filter(|(_, _, is_right)| *is_right).count();
        // The most probable token is drawn 6,000 times.
        assert!(right > 15_500, "{right}");
        assert!(outcomes.iter().all(|(_, sum, _)| (sum - 1.0).abs() < 1e-3));
    }

    #[test]
    fn others_win_as_often_as_is_said() {
        for known in [1, 2, 5] {
            let outcomes = outcomes(known);
            let wins = outcomes.iter().filter(|(is_known, ..)| *is_known).count() as f32 / outcomes.len() as f32;
            let said = outcomes.iter().map(|(_, sum, _)| sum).sum::<f32>() / outcomes.len() as f32;
            assert!((wins - said).abs() < 0.02, "{known}: {wins} {said}");
        }
    }

    #[test]
    fn probabilities_are_numbers_however_small_the_estimates() {
        let estimates = [(1, 1e-30), (2, 1e-38), (3, 1.0)];
        for key in 0..1000 {
            let race = Race::new(Noise::new(key), estimates.into_iter());
            let found = estimates.map(|(token, estimate)| race.probability(token, estimate));
            assert!(found.iter().all(|p| (0.0..=1.0).contains(p)) && found[2] > 0.99, "{found:?}");
        }
    }
}
