//! The noise against the published generator, and the bounds of the settings.

use std::collections::HashMap;

use super::*;
use crate::tree::{DraftTree, Source};
use crate::verify::{Candidate, Prediction, TargetScores, Verification, verify};

#[test]
fn the_noise_is_philox() {
    // The known answer of Random123 for a counter and key of zeros, in lane 0.
    let block = Noise::new(0).block(0);
    assert_eq!([0, 16, 32, 48].map(|at| block[at]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
    // Another lane, place and key: counter [16 · 1 + 3, 5, 0, 0].
    let block = Noise::new(0x1234_5678_dead_beef).after(5).block(1);
    assert_eq!([0, 16, 32, 48].map(|at| block[at + 3]), [0x438c_0b0f, 0x0245_01ca, 0xe420_858b, 0xacee_91f1]);
    // One token's word alone.
    let noise = Noise::new(0x1234_5678_dead_beef).after(5);
    for token in 0..1000 {
        assert_eq!(noise.word(token), noise.block(token / NOISE_BLOCK)[(token % NOISE_BLOCK) as usize], "{token}");
    }
}

#[test]
fn a_text_has_the_same_noise_behind_any_prompt() {
    let noise = Noise::new(7);
    assert_eq!(noise.before(30).after(30), noise);
    assert_eq!(noise.before(30).after(42), noise.after(12));
    let [low, high, place] = noise.after(12).words();
    assert_eq!((low, high, place), (7, 0, 12));
    assert_ne!(noise.block(0), noise.after(1).block(0));
    assert_ne!(noise.block(0), noise.block(1));
    assert_ne!(noise.block(0), Noise::new(8).block(0));
}

#[test]
fn tokens_arrive_exponentially_and_never_before_their_word() {
    assert!((arrival(1 << 31, 1.0) - std::f64::consts::LN_2).abs() < 1e-9);
    assert!((arrival(1 << 31, 0.5) - 2.0 * std::f64::consts::LN_2).abs() < 1e-9);
    for word in [0, 1, 12_345, 1 << 31, u32::MAX] {
        let time = arrival(word, 1.0);
        assert!(time.is_finite() && time >= unit(word), "{word}: {time}");
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    for temperature in [0.0, 0.009, -1.0, 101.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(Sampling::new(temperature, None, 1.0), Err(SamplingError::Temperature(_))));
    }
    for top_p in [0.0, -0.1, 1.1, f32::NAN] {
        assert!(matches!(Sampling::new(1.0, None, top_p), Err(SamplingError::TopP(_))));
    }
    assert_eq!(Sampling::new(1.0, Some(0), 1.0), Err(SamplingError::TopK));
    let sampling = Sampling::new(0.8, Some(40), 0.9).unwrap();
    assert_eq!((sampling.temperature(), sampling.top_k(), sampling.top_p()), (0.8, Some(40), 0.9));
}

/// Tokens of a mock target.
pub(crate) const TOKENS: u32 = 4;

/// Tokens of a sequence.
pub(crate) const LENGTH: usize = 3;

/// How a sequence comes to be; all but one of these are wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Sampler {
    /// Keyed sampling, strictly verified.
    Keyed,
    /// The same noise at every place.
    SamePlace,
    /// The most probable drafted token is accepted as often as the target has it, and otherwise the token is drawn from
    /// all: the residual is forgotten.
    NoResidual,
    /// The noise is added to the probability, not to its logarithm.
    LinearNoise,
}

/// The target's distribution behind a sequence: every context has another.
pub(crate) fn target(sequence: &[u32]) -> Vec<f32> {
    let weight = |token: u32| {
        let context = sequence.iter().fold(1, |hash, token| hash * 7 + token + 1);
        1.0 + ((context * 31 + token * token * 17) % 11) as f32
    };
    let weights: Vec<f32> = (0..TOKENS).map(weight).collect();
    let total: f32 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

pub(crate) fn first_to_arrive(times: impl Iterator<Item = f64>) -> u32 {
    let times: Vec<f64> = times.collect();
    let first = (0..TOKENS).min_by(|a, b| times[*a as usize].total_cmp(&times[*b as usize]));
    first.unwrap()
}

impl Sampler {
    /// The token after a sequence.
    fn choice(self, sequence: &[u32], noise: Noise) -> u32 {
        let p = target(sequence);
        let place = if self == Self::SamePlace { 0 } else { sequence.len() };
        let words = noise.after(place).block(0);
        let tokens = p.iter().zip(words);
        match self {
            Self::Keyed | Self::SamePlace => first_to_arrive(tokens.map(|(p, word)| arrival(word, *p))),
            Self::LinearNoise => first_to_arrive(tokens.map(|(p, word)| arrival(word, 1.0).ln() - f64::from(*p))),
            Self::NoResidual => {
                let most = (0..TOKENS).max_by(|a, b| p[*a as usize].total_cmp(&p[*b as usize])).unwrap();
                match unit(words[63]) < f64::from(p[most as usize]) {
                    true => most,
                    false => first_to_arrive(tokens.map(|(p, word)| arrival(word, *p))),
                }
            }
        }
    }

    /// A sequence, from drafts of random trees.
    fn sequence(self, noise: Noise) -> Vec<u32> {
        let mut sequence: Vec<u32> = Vec::new();
        while sequence.len() < LENGTH {
            let (tree, contexts) = draft(&sequence, noise);
            let choices = contexts.iter().map(|context| self.choice(context, noise)).collect();
            let step = verify(&tree, &Choices(choices), Verification::Strict, &[]);
            sequence.extend(&step.tokens);
        }
        sequence.truncate(LENGTH);
        sequence
    }
}

/// A tree that depends on the text so far and on the text's own noise, as drafts from an earlier text do; and what
/// stands before the token after each node.
fn draft(sequence: &[u32], noise: Noise) -> (DraftTree, Vec<Vec<u32>>) {
    let shape = noise.before(1 + sequence.len()).block(1);
    let (mut tree, mut contexts) = (DraftTree::chain(&[0]), vec![sequence.to_vec()]);
    for node in 0..shape[0] % 6 {
        let parent = (shape[node as usize + 1] % (node + 1)) as usize;
        let token = shape[node as usize + 20] % TOKENS;
        let has = |at: usize| tree.parents()[at] as usize == parent && tree.tokens()[at] == token;
        if parent < tree.len() && !(1..tree.len()).any(has) {
            tree.push(parent, token, 1.0, Source::Pool);
            contexts.push([contexts[parent].as_slice(), &[token]].concat());
        }
    }
    (tree, contexts)
}

/// The choice at each node.
struct Choices(Vec<u32>);

impl TargetScores for Choices {
    fn top(&self, _: usize) -> &[Candidate] {
        &[]
    }

    fn prediction(&self, node: usize) -> Prediction {
        let choice = Candidate { token: self.0[node], log_probability: -1.0 };
        Prediction { choice, ..Prediction::default() }
    }
}

/// Every sequence with its probability.
fn sequences() -> Vec<(Vec<u32>, f64)> {
    let mut all = vec![(Vec::new(), 1.0)];
    for _ in 0..LENGTH {
        let longer = |(before, probability): (Vec<u32>, f64)| {
            let of = target(&before).into_iter().map(f64::from);
            let next = move |(token, p)| ([before.as_slice(), &[token]].concat(), probability * p);
            (0..).zip(of).map(next).collect::<Vec<_>>()
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}

/// Pearson's χ² of the whole sequences that many keys give, in standard deviations from its mean.
pub(crate) fn deviation(sequence: impl Fn(u64) -> Vec<u32>) -> f64 {
    const DRAWS: u32 = 200_000;
    let mut counts: HashMap<Vec<u32>, u32> = HashMap::new();
    for key in 0..DRAWS {
        *counts.entry(sequence(u64::from(key))).or_default() += 1;
    }
    let all = sequences();
    let freedom = all.len() as f64 - 1.0;
    let terms = all.into_iter().map(|(sequence, probability)| {
        let expected = probability * f64::from(DRAWS);
        let found = counts.get(&sequence).copied().unwrap_or_default();
        (f64::from(found) - expected).powi(2) / expected
    });
    (terms.sum::<f64>() - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn whole_sequences_have_the_targets_distribution_whatever_is_drafted() {
    let of = |sampler: Sampler| deviation(|key| sampler.sequence(Noise::new(key)));
    let right = of(Sampler::Keyed);
    assert!(right.abs() < 4.0, "{right}");
    for wrong in [Sampler::SamePlace, Sampler::NoResidual, Sampler::LinearNoise] {
        let wrong_by = of(wrong);
        assert!(wrong_by > 100.0, "{wrong:?} passes: {wrong_by}");
    }
}
