//! What a draft model's predictions are worth, learnt from what the texts went on with.

use std::borrow::Cow;

use laser_decode::{Accuracies, Calibration, Candidate};

/// Rate at which the trust in the model follows its predictions: about the last hundred tokens count.
const TRUST_RATE: f32 = 0.01;

/// Rate at which the sharpness follows greedy texts, and the most that one token moves it, times the rate.
const SHARPNESS_RATE: f32 = 0.03;
const SHARPNESS_STEP: f32 = 1.0;

/// The same for drawn texts. What is drawn now and then is improbable by right, and a bound on what that moves would
/// leave the sharpness too high: at 1.3 where 1 is right, with the bound of greedy texts.
const DRAWN_RATE: f32 = 0.01;
const DRAWN_STEP: f32 = 10.0;

/// Largest logarithm of the sharpness, either way: a sharpness of 33 is that of a model which is the target itself.
const LOG_SHARPNESS_MAX: f32 = 3.5;

/// The trust stays this far from none and from certainty, so that it can always change.
const TRUST_MARGIN: f32 = 0.02;

/// What the model had said of a token that was emitted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    /// That of the node before it.
    pub(super) depth: usize,
    /// Of the token's log probability by the sharpness.
    pub(super) slope: f32,
    /// Of the token among the model's candidates; their count if it was none of them.
    pub(super) rank: usize,
}

/// How far the model is to be believed after nodes of one depth.
#[derive(Debug, Clone, Copy, PartialEq)]
struct AtDepth {
    trust: f32,
    /// Logarithm of the exponent of the model's probabilities.
    log_sharpness: f32,
}

impl AtDepth {
    const NOTHING: Self = Self { trust: 0.5, log_sharpness: 0.0 };

    fn calibration(self) -> Calibration {
        Calibration { trust: self.trust, sharpness: self.log_sharpness.exp() }
    }

    /// From the slope of the log likelihood by the sharpness at an emitted token.
    fn sharpen(&mut self, slope: f32, is_drawn: bool) {
        let (rate, most) = if is_drawn { (DRAWN_RATE, DRAWN_STEP) } else { (SHARPNESS_RATE, SHARPNESS_STEP) };
        let step = rate * (slope * self.log_sharpness.exp()).clamp(-most, most);
        self.log_sharpness = (self.log_sharpness + step).clamp(-LOG_SHARPNESS_MAX, LOG_SHARPNESS_MAX);
    }

    /// From the probabilities that the other sources and the model gave an emitted token.
    fn weigh(&mut self, (others, model): (f32, f32)) {
        let (of_model, of_others) = (self.trust * model, (1.0 - self.trust) * others);
        if of_model + of_others > 0.0 {
            let share = of_model / (of_model + of_others);
            let trust = self.trust + TRUST_RATE * (share - self.trust);
            self.trust = trust.clamp(TRUST_MARGIN, 1.0 - TRUST_MARGIN);
        }
    }
}

/// How far the model is to be believed, by the depth of the node that was read.
#[derive(Debug)]
pub(super) struct Learnt {
    /// The last one's for all below it. A model that reads tokens is as good at any depth; what reads features is worse
    /// the deeper it drafts.
    depths: Vec<AtDepth>,
    /// Of Medusa's heads, if trees are to follow these and not the heads' own probabilities.
    accuracies: Option<Accuracies>,
}

impl Learnt {
    /// Nothing yet, of so many depths.
    pub(super) fn new(depths: usize) -> Self {
        Self { depths: vec![AtDepth::NOTHING; depths], accuracies: None }
    }

    /// From now on measures how often the candidates of so many heads and ranks are right.
    pub(super) fn measure(&mut self, heads: usize, ranks: usize) {
        self.accuracies = Some(Accuracies::new(heads, ranks));
    }

    fn at(&mut self, depth: usize) -> Option<&mut AtDepth> {
        let last = self.depths.len().checked_sub(1)?;
        self.depths.get_mut(depth.min(last))
    }

    /// How what it says after nodes at this depth is to be taken.
    pub(super) fn calibration(&self, depth: usize) -> Calibration {
        let learnt = self.depths.get(depth).or(self.depths.last()).copied();
        learnt.unwrap_or(AtDepth::NOTHING).calibration()
    }

    /// What is to be taken for the candidates that it has after nodes at this depth, and how.
    pub(super) fn taken<'a>(&self, depth: usize, candidates: &'a [Candidate]) -> (Cow<'a, [Candidate]>, Calibration) {
        let calibration = self.calibration(depth);
        match &self.accuracies {
            None => (Cow::Borrowed(candidates), calibration),
            // What was measured needs no sharpening.
            Some(accuracies) => {
                (Cow::Owned(accuracies.of(depth, candidates)), Calibration { sharpness: 1.0, ..calibration })
            }
        }
    }

    /// Learns from an emitted token how often candidates of its rank are right, where that is measured, or else how
    /// sharp the model's probabilities are, by ascent of their log likelihood.
    pub(super) fn hear(&mut self, Outcome { depth, slope, rank }: Outcome, is_drawn: bool) {
        match &mut self.accuracies {
            Some(accuracies) => accuracies.learn(depth, rank),
            None => self.at(depth).into_iter().for_each(|learnt| learnt.sharpen(slope, is_drawn)),
        }
    }

    /// Learns from the probabilities that the other sources and the model gave an emitted token whom to trust: a step
    /// of online expectation-maximisation for the weight of a mixture.
    pub(super) fn weigh(&mut self, depth: usize, opinions: (f32, f32)) {
        self.at(depth).into_iter().for_each(|learnt| learnt.weigh(opinions));
    }
}
