//! Lessons of one step, as tensors.

use std::borrow::Borrow;

use candle_core::{Device, Result, Tensor};
use laser_decode::Candidate;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::lesson::Lesson;
use crate::own_tokens::NONE;
use crate::verdicts::Verdicts;

/// Lessons that are ordered by length at a time, so that those of a batch are about as long.
pub(crate) const WINDOW: usize = 256;

/// The least probability of all tokens that are not among the likely ones.
pub(crate) const OTHERS_MIN: f64 = 1e-6;

/// Lessons of one step: B sequences padded to T tokens, N places of their texts.
#[derive(Debug)]
pub(crate) struct Batch {
    /// `[B, T]`: what the model reads; 0 behind the end.
    pub(crate) tokens: Tensor,
    /// `[N]`: where in the flattened `tokens` the token before each place is.
    pub(crate) before: Tensor,
    /// What the target says at the places.
    pub(crate) labels: Labels,
    /// The features that are read, by what reads features.
    pub(crate) features: Option<Features>,
    /// `[N, 2]`: of an acceptance head, the logits that it corrects.
    pub(crate) offsets: Option<Tensor>,
    /// The share of a whole model's numbers that is dropped, and the seed that says which.
    pub(crate) dropout: (f64, u64),
}

/// Features of the target; for an acceptance head, of the draft model.
#[derive(Debug)]
pub(crate) struct Features {
    /// `[B, T, hidden]`: of the token before each that the model reads.
    pub(crate) before: Tensor,
    /// `[N, hidden]`: of the token before each place, which the model is to expect; empty for an acceptance head.
    pub(crate) expected: Tensor,
}

/// What the target says at N places, K tokens of each. A likely token that is [none](NONE) of the model's has
/// probability 0: nothing is learned of it, and it is foreseen in no case.
#[derive(Debug)]
pub(crate) struct Labels {
    /// `[N, 1]`: the text's token.
    pub(crate) text: Tensor,
    /// `[N, K]`: the most probable tokens, falling.
    pub(crate) likely: Tensor,
    /// `[N, K]`: their probabilities.
    pub(crate) probabilities: Tensor,
    /// `[N, 1]`: the probability of all that are not likely.
    pub(crate) others: Tensor,
}

impl Batch {
    /// The lessons for a model that reads tokens alone.
    pub(crate) fn new(lessons: &[impl Borrow<Lesson>], device: &Device) -> Result<Self> {
        Self::from_token(0, lessons, device)
    }

    /// The lessons for a model that reads each token with the feature of the token before it, so from the second token
    /// on; a text's first token, which the target tells before there is its feature, is no place of it. `features` are
    /// of each lesson's tokens but the last, `hidden` numbers a token.
    pub(crate) fn with_features(
        lessons: &[impl Borrow<Lesson>],
        features: &[Vec<f32>],
        hidden: usize,
        device: &Device,
    ) -> Result<Self> {
        let batch = Self::from_token(1, lessons, device)?;
        let (rows, length) = batch.tokens.dims2()?;
        let (mut before, mut expected) = (vec![0.0; rows * length * hidden], Vec::new());
        for (row, (lesson, features)) in lessons.iter().map(Borrow::borrow).zip(features).enumerate() {
            let read = &features[..(lesson.tokens.len() - 2) * hidden];
            before[row * length * hidden..][..read.len()].copy_from_slice(read);
            expected.extend_from_slice(&features[lesson.prompt * hidden..]);
        }
        let features = Features {
            before: Tensor::from_vec(before, (rows, length, hidden), device)?,
            expected: Tensor::from_vec(expected, ((), hidden), device)?,
        };
        Ok(Self { features: Some(features), ..batch })
    }

    /// The proposals of a draft model for an acceptance head, whose tokens are the outcomes: N sequences of one token,
    /// before each the feature of the proposal. What is corrected are the draft model's log odds with this scale and
    /// shift.
    pub(crate) fn of_verdicts(verdicts: &Verdicts, scale: [f64; 2], device: &Device) -> Result<Self> {
        let places = verdicts.outcomes.len();
        let outcomes = Tensor::from_slice(&verdicts.outcomes, (places, 1), device)?;
        let probabilities = Tensor::ones((places, 1), candle_core::DType::F32, device)?;
        let before = Tensor::from_slice(&verdicts.features, (places, 1, ()), device)?;
        let expected = before.narrow(0, 0, 0)?.squeeze(1)?;
        let odds = Tensor::from_slice(&verdicts.odds, (places, 1), device)?.affine(scale[0], scale[1])?;
        let offsets = Tensor::cat(&[&odds.zeros_like()?, &odds], 1)?;
        Ok(Self {
            tokens: outcomes.zeros_like()?,
            before: Tensor::arange(0, places as i64, device)?,
            labels: Labels { text: outcomes.clone(), likely: outcomes, others: others(&probabilities)?, probabilities },
            features: Some(Features { before, expected }),
            offsets: Some(offsets),
            dropout: (0.0, 0),
        })
    }

    /// The same with uniform noise between - and + `bound` on the features that are read, if there are any.
    pub(crate) fn with_noise(mut self, bound: f64, seed: u64) -> Result<Self> {
        if let Some(features) = &mut self.features {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let shape = features.before.shape().clone();
            let noise: Vec<f32> = (0..shape.elem_count()).map(|_| rng.gen_range(-1.0..1.0)).collect();
            let noise = (Tensor::from_vec(noise, shape, features.before.device())? * bound)?;
            features.before = (&features.before + noise)?;
        }
        Ok(self)
    }

    /// The same with this share of a whole model's numbers dropped.
    pub(crate) fn with_dropout(self, share: f64, seed: u64) -> Self {
        Self { dropout: (share, seed), ..self }
    }

    /// The lessons without so many tokens at the beginning of each, and places at the beginning of its text.
    fn from_token(first: usize, lessons: &[impl Borrow<Lesson>], device: &Device) -> Result<Self> {
        let lessons: Vec<&Lesson> = lessons.iter().map(Borrow::borrow).collect();
        let read = |lesson: &Lesson| first..lesson.tokens.len() - 1;
        let length = lessons.iter().map(|lesson| read(lesson).len()).max().unwrap_or_default();
        let places: usize = lessons.iter().map(|lesson| lesson.places() - first).sum();
        let mut tokens = vec![0u32; lessons.len() * length];
        let (mut before, mut text) = (Vec::with_capacity(places), Vec::with_capacity(places));
        for (row, lesson) in lessons.iter().enumerate() {
            let read = &lesson.tokens[read(lesson)];
            tokens[row * length..][..read.len()].copy_from_slice(read);
            let at = row * length + lesson.prompt - 1;
            before.extend((at..at + lesson.places() - first).map(|at| at as i64));
            text.extend_from_slice(&lesson.tokens[lesson.prompt + first..]);
        }
        let likely = || lessons.iter().flat_map(|lesson| lesson.likely_from(first));
        let width = likely().count() / places.max(1);
        let ids: Vec<u32> =
            likely().map(|candidate| if candidate.token == NONE { 0 } else { candidate.token }).collect();
        let numbers = |of: fn(&Candidate) -> f32| Tensor::from_iter(likely().map(of), device)?.reshape((places, width));
        let of_known = |candidate: &Candidate| match candidate.token {
            NONE => 0.0,
            _ => candidate.log_probability.exp(),
        };
        Ok(Self {
            tokens: Tensor::from_vec(tokens, (lessons.len(), length), device)?,
            before: Tensor::from_vec(before, places, device)?,
            labels: Labels {
                text: Tensor::from_vec(text, (places, 1), device)?,
                likely: Tensor::from_vec(ids, (places, width), device)?,
                others: others(&numbers(|candidate| candidate.log_probability.exp())?)?,
                probabilities: numbers(of_known)?,
            },
            features: None,
            offsets: None,
            dropout: (0.0, 0),
        })
    }
}

/// What `[N, K]` probabilities leave to all other tokens, as `[N, 1]`.
pub(crate) fn others(probabilities: &Tensor) -> Result<Tensor> {
    probabilities.sum_keepdim(1)?.affine(-1.0, 1.0)?.maximum(OTHERS_MIN)
}

/// The seed of what is drawn anew in each epoch or step.
pub(crate) fn seed_at(seed: u64, at: u64) -> u64 {
    seed.wrapping_mul(1_000_003).wrapping_add(at)
}

/// The lessons of each step of an epoch, as indices: in an order that seed and epoch decide, those of a step about as
/// long as each other, and of at most `tokens` tokens with their padding. So many lessons in that order, the `window`,
/// are sorted by length at a time.
pub(crate) fn steps(lessons: &[&Lesson], (tokens, window): (usize, usize), seed: u64, epoch: usize) -> Vec<Vec<usize>> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed_at(seed, epoch as u64));
    let mut order: Vec<usize> = (0..lessons.len()).collect();
    order.shuffle(&mut rng);
    let mut steps: Vec<Vec<usize>> = Vec::new();
    for window in order.chunks_mut(window) {
        window.sort_by_key(|&index| lessons[index].tokens.len());
        let mut step = Vec::new();
        for &index in window.iter() {
            // The last one is the longest.
            if !step.is_empty() && (step.len() + 1) * lessons[index].tokens.len() > tokens {
                steps.push(std::mem::take(&mut step));
            }
            step.push(index);
        }
        steps.push(step);
    }
    steps.shuffle(&mut rng);
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lesson(prompt: usize, text: usize) -> Lesson {
        let likely = (0..).map(|at: u16| Candidate { token: u32::from(at) % 7, log_probability: -1.0 - f32::from(at) });
        Lesson { tokens: (10..).take(prompt + text).collect(), prompt, likely: likely.take(text * 2).collect() }
    }

    #[test]
    fn the_token_before_a_place_is_found_in_the_padded_tokens() {
        let lessons = [lesson(2, 3), lesson(1, 1), lesson(4, 2)];
        let batch = Batch::new(&lessons, &Device::Cpu).unwrap();
        assert_eq!(batch.tokens.dims(), [3, 5]);
        let read = batch.tokens.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let before = batch.before.to_vec1::<i64>().unwrap();
        assert_eq!(
            before.iter().map(|&at| read[usize::try_from(at).unwrap()]).collect::<Vec<_>>(),
            [11, 12, 13, 10, 13, 14]
        );
        let text = batch.labels.text.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(text, [12, 13, 14, 11, 14, 15]);
        assert_eq!(batch.labels.likely.dims(), [6, 2]);
        let others = batch.labels.others.to_vec2::<f32>().unwrap();
        let expected = 1.0 - (-1f32).exp() - (-2f32).exp();
        assert!((others[0][0] - expected).abs() < 1e-6, "{others:?}");
    }

    #[test]
    fn likely_tokens_that_the_model_does_not_know_are_neither_learned_nor_others() {
        let mut known = lesson(1, 2);
        let labels = |lesson: &Lesson| Batch::new(&[lesson], &Device::Cpu).unwrap().labels;
        let before = labels(&known);
        known.likely[2].token = NONE;
        let after = labels(&known);
        assert_eq!(after.others.to_vec2::<f32>().unwrap(), before.others.to_vec2::<f32>().unwrap());
        let mut expected = before.probabilities.to_vec2::<f32>().unwrap();
        expected[1][0] = 0.0;
        assert_eq!(after.probabilities.to_vec2::<f32>().unwrap(), expected);
        assert_eq!(after.likely.to_vec2::<u32>().unwrap(), [[0, 1], [0, 3]]);
    }

    #[test]
    fn a_place_is_expected_from_the_token_before_it_and_the_feature_before_that() {
        let lessons = [lesson(2, 3), lesson(1, 2), lesson(4, 2)];
        // The feature of token 10 + i is i.
        let features: Vec<Vec<f32>> = lessons
            .iter()
            .map(|lesson| lesson.tokens.iter().rev().skip(1).rev().map(|&t| t as f32 - 10.0).collect())
            .collect();
        let batch = Batch::with_features(&lessons, &features, 1, &Device::Cpu).unwrap();
        let read = batch.tokens.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let told = batch.features.as_ref().unwrap();
        let before = told.before.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let rows: Vec<usize> =
            batch.before.to_vec1::<i64>().unwrap().iter().map(|&at| usize::try_from(at).unwrap()).collect();
        // Places are the texts' second tokens and later ones.
        assert_eq!(batch.labels.text.flatten_all().unwrap().to_vec1::<u32>().unwrap(), [13, 14, 12, 15]);
        assert_eq!(rows.iter().map(|&at| read[at]).collect::<Vec<_>>(), [12, 13, 11, 14]);
        assert_eq!(rows.iter().map(|&at| before[at]).collect::<Vec<_>>(), [1.0, 2.0, 0.0, 3.0]);
        assert_eq!(told.expected.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2.0, 3.0, 1.0, 4.0]);
        assert_eq!(batch.labels.likely.dims(), [4, 2]);
    }

    proptest! {
        #[test]
        fn an_epoch_has_every_lesson_once_and_steps_that_fit(
            lengths in prop::collection::vec(1usize..60, 1..700),
            tokens in 1usize..400,
            seed in 0u64..4,
        ) {
            let lessons: Vec<Lesson> = lengths.iter().map(|&length| lesson(1, length)).collect();
            let lessons: Vec<&Lesson> = lessons.iter().collect();
            let steps = steps(&lessons, (tokens, WINDOW), seed, 1);
            let mut all: Vec<usize> = steps.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lessons.len()).collect::<Vec<_>>());
            for step in &steps {
                let longest = step.iter().map(|&index| lessons[index].tokens.len()).max().unwrap();
                prop_assert!(step.len() == 1 || step.len() * longest <= tokens);
            }
            prop_assert_eq!(&super::steps(&lessons, (tokens, WINDOW), seed, 1), &steps);
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let lessons: Vec<Lesson> = (0..300).map(|at| lesson(1, 1 + at % 20)).collect();
        let lessons: Vec<&Lesson> = lessons.iter().collect();
        let orders = [(0, 1), (0, 2), (1, 1)].map(|(seed, epoch)| steps(&lessons, (200, WINDOW), seed, epoch));
        assert!(orders[0] != orders[1] && orders[0] != orders[2] && orders[1] != orders[2]);
    }
}
