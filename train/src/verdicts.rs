//! What an acceptance head learns from: tokens that a draft model proposes after the true beginnings of texts, what the
//! draft model feels after reading each of them, and whether the text goes on so.
//!
//! SpecDec++ (arXiv:2405.19715, section 3.2) lets the draft model read a text in which most tokens are its own, so most
//! of what it reads follows something that the target would not have written. With tree attention every proposal is
//! read after the text itself: it is a leaf beside the token that follows. The outcome is the one that counts, whether
//! strict verification accepts the token, and outcomes are not weighted: the head tells probabilities, which the draft
//! budget weighs against costs. And the head need not find out again how probable the token was: it begins as the draft
//! model's own probability, sharpened as fits best, and learns to correct its log odds. From the features alone its log
//! loss was 0.50, as a correction of probabilities scaled one by one 0.24, and of sharpened ones 0.21.

use laser_decode::{Candidate, TargetScores as _, Token, chain_parents, log_odds, sharpened};
use laser_engine::{ACCEPTED, Engine, EngineError, REJECTED, Segment, Slot};

use crate::lesson::{CHUNK, Lesson};

/// Proposals of a place, the draft model's most probable tokens: those that trees of up to 64 nodes have most of.
const PROPOSED: usize = 3;

/// Candidates of a place among which probabilities are sharpened: as many as drafts take.
const CANDIDATES: usize = 8;

/// Places of a text that are read at once.
const PLACES: usize = 128;

/// The steps of Newton's method on two parameters.
const NEWTON_STEPS: usize = 25;

/// The proposals of texts.
#[derive(Debug, Default)]
pub(crate) struct Verdicts {
    /// `[N, hidden]`: the draft model's features of the proposals.
    pub(crate) features: Vec<f32>,
    /// [`ACCEPTED`] or [`REJECTED`].
    pub(crate) outcomes: Vec<Token>,
    /// The log odds of each proposal by the draft model's own probabilities at the sharpness.
    pub(crate) odds: Vec<f32>,
    sharpness: f32,
    /// Whether the best sharpness is still to be found.
    seeks_sharpness: bool,
    /// Then by place the logarithm of the probability of the text's token at each of [`SHARPNESS`].
    foresight: Vec<[f32; SHARPNESS.len()]>,
}

/// The sharpness is one of these.
const SHARPNESS: [f32; 12] = [0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 23.0, 32.0];

impl Verdicts {
    /// None so far; the draft model's probabilities are taken at this sharpness.
    pub(crate) fn at(sharpness: f32) -> Self {
        Self { sharpness, ..Self::default() }
    }

    /// None so far, to find the best sharpness by.
    pub(crate) fn unsharpened() -> Self {
        Self { seeks_sharpness: true, ..Self::at(1.0) }
    }

    /// The sharpness at which the texts are most probable, of those that were added [unsharpened](Self::unsharpened).
    pub(crate) fn best_sharpness(&self) -> f32 {
        let sum = |at: usize| self.foresight.iter().map(|place| place[at]).sum::<f32>();
        let best = (0..SHARPNESS.len()).max_by(|&a, &b| sum(a).total_cmp(&sum(b)));
        best.map_or(1.0, |at| SHARPNESS[at])
    }

    /// The log odds with the outcomes.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (f32, bool)> {
        self.odds.iter().copied().zip(self.outcomes.iter().map(|&outcome| outcome == ACCEPTED))
    }

    /// Adds the proposals of a text; `engine` is the draft model and keeps features.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn add(&mut self, engine: &mut dyn Engine, lesson: &Lesson) -> Result<(), EngineError> {
        let slot = engine.open(lesson.tokens.len() + PLACES * PROPOSED)?;
        let (prompt, text) = lesson.tokens.split_at(lesson.prompt);
        let (&last, before) = prompt.split_last().unwrap_or((&0, &[]));
        for chunk in before.chunks(CHUNK) {
            let parents: Vec<u32> = chain_parents(chunk.len()).collect();
            engine.step(&[segment(slot, chunk, &parents, chunk.len())], 1)?;
            engine.commit(slot, &(0..chunk.len()).collect::<Vec<_>>())?;
        }
        let roots = std::iter::once(last).chain(text.chunks(PLACES).filter_map(|places| places.last().copied()));
        for (root, places) in roots.zip(text.chunks(PLACES)) {
            self.add_places(engine, slot, &[&[root], places].concat())?;
        }
        engine.close(slot);
        Ok(())
    }

    /// Adds the proposals after each token of a chain but the last, and commits these.
    fn add_places(&mut self, engine: &mut dyn Engine, slot: Slot, chain: &[Token]) -> Result<(), EngineError> {
        let places = chain.len() - 1;
        let (mut tokens, mut parents) = (chain.to_vec(), chain_parents(chain.len()).collect::<Vec<_>>());
        let scores = engine.step(&[segment(slot, &tokens[..places], &parents[..places], 0)], CANDIDATES)?;
        engine.commit(slot, &[])?;
        let mut proposals: Vec<(usize, f32)> = Vec::new();
        for (parent, place) in (0..).zip(0..places) {
            let candidates = scores[0].top(place);
            if self.seeks_sharpness {
                self.foresight.push(SHARPNESS.map(|sharpness| foresight(candidates, chain[place + 1], sharpness)));
            }
            let own = sharpened(candidates, self.sharpness);
            for (proposal, own) in candidates.iter().zip(own).take(PROPOSED) {
                let node = if proposal.token == chain[place + 1] { place + 1 } else { tokens.len() };
                if node == tokens.len() {
                    tokens.push(proposal.token);
                    parents.push(parent);
                }
                proposals.push((node, log_odds(own)));
            }
        }
        let scores = engine.step(&[segment(slot, &tokens, &parents, tokens.len())], 1)?;
        engine.commit(slot, &(0..places).collect::<Vec<_>>())?;
        for (node, odds) in proposals {
            self.features.extend_from_slice(scores[0].feature(node));
            self.outcomes.push(if node <= places { ACCEPTED } else { REJECTED });
            self.odds.push(odds);
        }
        Ok(())
    }
}

/// The logarithm of the probability of a token at a sharpness; one that is no candidate is as probable as the last.
fn foresight(candidates: &[Candidate], token: Token, sharpness: f32) -> f32 {
    let probabilities = sharpened(candidates, sharpness);
    let found = candidates.iter().position(|candidate| candidate.token == token);
    let probability = found.map_or(probabilities.last(), |at| probabilities.get(at)).copied();
    probability.unwrap_or(0.0).max(f32::MIN_POSITIVE).ln()
}

fn segment<'a>(slot: Slot, tokens: &'a [Token], parents: &'a [u32], scored_from: usize) -> Segment<'a> {
    Segment { slot, tokens, parents, scored_from, ..Segment::default() }
}

/// The scale a and shift b of 1 / (1 + exp(-(a · odds + b))) that fit outcomes best, by Newton's method.
pub(crate) fn best_scale(pairs: &[(f32, bool)]) -> [f64; 2] {
    let count = pairs.len().max(1) as f64;
    let (mut scale, mut shift) = (1.0, 0.0);
    for _ in 0..NEWTON_STEPS {
        // Gradient and second derivatives of the mean; the little on the diagonal keeps them apart from 0.
        let (mut gradient, mut hessian) = ([0.0; 2], [1e-9, 0.0, 1e-9]);
        for &(odds, happened) in pairs {
            let (x, y) = (f64::from(odds), f64::from(u8::from(happened)));
            let p = 1.0 / (1.0 + (-(scale * x + shift)).exp());
            let (error, weight) = ((p - y) / count, p * (1.0 - p) / count);
            gradient = [gradient[0] + error * x, gradient[1] + error];
            hessian = [hessian[0] + weight * x * x, hessian[1] + weight * x, hessian[2] + weight];
        }
        let determinant = hessian[0] * hessian[2] - hessian[1] * hessian[1];
        // Steps of at most 1, since far from the optimum the second derivatives vanish.
        scale -= ((hessian[2] * gradient[0] - hessian[1] * gradient[1]) / determinant).clamp(-1.0, 1.0);
        shift -= ((hessian[0] * gradient[1] - hessian[1] * gradient[0]) / determinant).clamp(-1.0, 1.0);
    }
    [scale, shift]
}

/// The mean log loss of the draft model's own probabilities at this scale, in nats.
pub(crate) fn log_loss(pairs: &[(f32, bool)], [scale, shift]: [f64; 2]) -> f64 {
    let loss = |&(odds, happened): &(f32, bool)| {
        let sign = if happened { 1.0 } else { -1.0 };
        (1.0 + (-(scale * f64::from(odds) + shift) * sign).exp()).ln()
    };
    pairs.iter().map(loss).sum::<f64>() / pairs.len().max(1) as f64
}

#[cfg(test)]
mod tests;
