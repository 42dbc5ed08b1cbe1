//! What a row of logits says of some tokens alone: those that a grammar allows.

use laser_decode::{Candidate, Draw};

use crate::{
    sample::{Weights, sample},
    skinny::vectorized,
    top_k::{row_log_sum, scan},
};

/// A scored row of a step, and the tokens that may follow there.
#[derive(Debug, Clone, Copy)]
pub struct MaskedRow<'a> {
    /// The row, counted among the scored ones of the step.
    pub row: usize,
    /// Bit t % 32 of word t / 32 is set for each token t that may follow; those beyond the last word may not.
    pub mask: &'a [u32],
    /// How a token is drawn; the most probable one is taken if absent.
    pub draw: Option<Draw>,
}

/// What a row says of the tokens that may follow.
#[derive(Debug, Clone, PartialEq)]
pub struct Allowed {
    /// The most probable of them: descending, ties by lower token id, natural logarithms over the whole vocabulary.
    pub candidates: Vec<Candidate>,
    /// The token that plain decoding takes.
    pub choice: Candidate,
}

/// Whether a mask has the token.
#[must_use]
pub fn is_allowed(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

impl MaskedRow<'_> {
    /// What these logits say of the tokens of the mask, the `k` most probable ones and a choice; nothing if the mask
    /// has none.
    #[must_use]
    pub fn choose(&self, logits: &[f32], k: usize) -> Option<Allowed> {
        let masked: Vec<f32> = (0..).zip(logits).map(|(token, &logit)| self.masked(token, logit)).collect();
        choose(self, &masked, logits, k)
    }

    /// The logit, below that of every other token if this one may not follow.
    fn masked(&self, token: u32, logit: f32) -> f32 {
        if is_allowed(self.mask, token) { logit.max(f32::MIN) } else { f32::NEG_INFINITY }
    }
}

vectorized! {
    /// [`MaskedRow::choose`], of logits and those that the mask has left.
    fn choose = choose_row(row: &MaskedRow<'_>, masked: &[f32], logits: &[f32], k: usize) -> Option<Allowed>;
}

#[inline(always)]
fn choose_row(row: &MaskedRow<'_>, masked: &[f32], logits: &[f32], k: usize) -> Option<Allowed> {
    let mut candidates = Vec::new();
    scan(masked, k.max(1), &mut candidates);
    candidates.retain(|candidate| is_allowed(row.mask, candidate.token));
    let max = candidates.first()?.log_probability;
    let log_sum = row_log_sum(logits);
    let log_probability = |logit: f32| crate::vector::narrow(f64::from(logit) - log_sum);
    let choice = match &row.draw {
        None => candidates[0].token,
        Some(Draw { sampling, noise }) => sample(masked, max, sampling, *noise, &mut Weights::new()),
    };
    let of = |token: u32| Candidate { token, log_probability: log_probability(logits[token as usize]) };
    candidates.iter_mut().for_each(|candidate| *candidate = of(candidate.token));
    Some(Allowed { candidates, choice: of(choice) })
}

#[cfg(test)]
mod tests {
    use laser_decode::{Noise, Sampling};
    use proptest::prelude::*;

    use super::*;
    use crate::Predictions;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_chosen_is_what_the_allowed_logits_alone_would_choose(
            coarse in prop::collection::vec((-40..40_i8, any::<bool>()), 1..300),
            k in 1..12_usize,
            temperature in prop::option::of(0.3..2.0_f32),
            top_k in prop::option::of(1..20_u32),
            key in any::<u64>(),
        ) {
            let logits: Vec<f32> = coarse.iter().map(|(logit, _)| f32::from(*logit) / 4.0).collect();
            let mut mask = vec![0_u32; logits.len().div_ceil(32)];
            (0..logits.len()).filter(|&at| coarse[at].1).for_each(|at| mask[at / 32] |= 1 << (at % 32));
            let sampling = temperature.map(|temperature| Sampling::new(temperature, top_k, 0.9).unwrap());
            let draw = sampling.map(|sampling| Draw { sampling, noise: Noise::new(key) });
            let got = MaskedRow { row: 0, mask: &mask, draw }.choose(&logits, k);
            let allowed = |token: &usize| coarse[*token].1;
            prop_assert_eq!(got.is_some(), (0..logits.len()).any(|token| allowed(&token)));
            let Some(got) = got else { return Ok(()) };
            // Far below all others, as where the logits of other tokens were never computed.
            let far = |token: usize| if allowed(&token) { logits[token] } else { -1e4 };
            let mut alone = Predictions::default();
            alone.push(&(0..logits.len()).map(far).collect::<Vec<_>>(), k, draw);
            prop_assert_eq!(got.choice.token, alone.rows[0].choice.token);
            let mut whole = Predictions::default();
            whole.push(&logits, logits.len(), draw);
            let of = |token: u32| whole.candidates.iter().find(|candidate| candidate.token == token).unwrap();
            let expected = whole.candidates.iter().filter(|candidate| allowed(&(candidate.token as usize))).take(k);
            let expected: Vec<u32> = expected.map(|candidate| candidate.token).collect();
            prop_assert_eq!(got.candidates.iter().map(|candidate| candidate.token).collect::<Vec<_>>(), expected);
            for candidate in got.candidates.iter().chain([&got.choice]) {
                let log_probability = of(candidate.token).log_probability;
                prop_assert!((candidate.log_probability - log_probability).abs() < 1e-4);
            }
        }
    }
}
