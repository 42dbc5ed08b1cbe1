//! The draft budget: how many drafted nodes a step is worth, over the whole batch.
//!
//! A node earns its probability of being accepted, in tokens, and costs what it adds to the forward. The step
//! with the most expected tokens a second is the best one: nodes of all sequences are ranked by probability, and
//! of every prefix of that ranking the rate is known from the measured cost of a forward. So where nothing
//! can be predicted nothing is drafted, and speculation loses to plain decoding by no more than
//! the drafting itself.
//!
//! Drafters estimate probabilities under strict acceptance of typical texts. [`Calibration`] bends them to what
//! is accepted here, relaxed verification included.

use std::time::Instant;

use crate::engine::{Engine, EngineError, Segment};

/// Context that the forwards are measured with, in tokens.
const CONTEXT: usize = 128;

/// Measured twice, the faster one counts: the first forward of a size also allocates.
const REPEATS: usize = 3;

/// What a forward costs by its number of tokens, interpolated between measured sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Tokens and seconds, by rising tokens; never empty.
    points: Vec<(f64, f64)>,
}

impl StepCost {
    /// A cost curve through `(tokens, seconds)`, made rising: no forward is cheaper than a smaller one.
    ///
    /// # Panics
    /// If there is no point.
    pub fn new(mut points: Vec<(f64, f64)>) -> Self {
        assert!(!points.is_empty(), "a cost curve needs a point");
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        for i in 1..points.len() {
            points[i].1 = points[i].1.max(points[i - 1].1);
        }
        Self { points }
    }

    /// Measures forwards of 1, 2, 4, … up to at least `tokens_max` tokens, a few of each.
    ///
    /// # Errors
    /// The engine's.
    pub fn measure(engine: &mut dyn Engine, tokens_max: usize) -> Result<Self, EngineError> {
        let limit = engine.info().max_positions.saturating_sub(CONTEXT).max(1);
        let largest = tokens_max.next_power_of_two().min(limit);
        let context = CONTEXT.min(engine.info().max_positions - 1);
        let slot = engine.open(context + largest)?;
        let measured = measure_all(engine, slot, context, largest);
        engine.close(slot);
        measured.map(Self::new)
    }

    /// Seconds of a forward of `tokens`; beyond the largest measured size in proportion to it.
    pub fn seconds(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        let after = self.points.partition_point(|(t, _)| *t < tokens);
        match (
            after.checked_sub(1).map(|i| self.points[i]),
            self.points.get(after),
        ) {
            (None, Some((_, seconds))) => *seconds,
            (Some((t0, s0)), Some((t1, s1))) => s0 + (s1 - s0) * (tokens - t0) / (t1 - t0),
            (Some((t0, s0)), None) => s0 * tokens / t0,
            (None, None) => 0.0,
        }
    }

    /// How many of the nodes with these falling probabilities to draft, in a step of `known` tokens besides that
    /// emits `certain` tokens in any case: the number with the most expected tokens a second.
    pub fn best_count(&self, known: usize, certain: usize, probabilities: &[f32]) -> usize {
        let mut expected = certain as f64;
        let (mut best, mut best_rate) = (0, expected / self.seconds(known));
        for (count, probability) in (1..).zip(probabilities) {
            expected += f64::from(*probability);
            let rate = expected / self.seconds(known + count);
            if rate > best_rate {
                (best, best_rate) = (count, rate);
            }
        }
        best
    }
}

fn measure_all(
    engine: &mut dyn Engine,
    slot: usize,
    context: usize,
    largest: usize,
) -> Result<Vec<(f64, f64)>, EngineError> {
    forward(engine, slot, context)?;
    engine.commit(slot, &(0..context).collect::<Vec<_>>())?;
    let mut points = Vec::new();
    for exponent in 0..=largest.ilog2() {
        let tokens = 1 << exponent;
        let mut fastest = f64::INFINITY;
        for _ in 0..REPEATS {
            let start = Instant::now();
            forward(engine, slot, tokens)?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
            engine.commit(slot, &[])?;
        }
        points.push((tokens as f64, fastest));
    }
    Ok(points)
}

/// A chain of `tokens` nodes, all of them scored, as a draft tree's are.
fn forward(engine: &mut dyn Engine, slot: usize, tokens: usize) -> Result<(), EngineError> {
    let vocabulary = u32::try_from(engine.info().vocab_size).unwrap_or(u32::MAX);
    let ids: Vec<u32> = (0..)
        .map(|i: u32| (i * 37) % vocabulary)
        .take(tokens)
        .collect();
    let parents: Vec<u32> = (0..).map(|i: u32| i.wrapping_sub(1)).take(tokens).collect();
    let segment = Segment {
        slot,
        tokens: &ids,
        parents: &parents,
        scored_from: 0,
    };
    engine.step(&[segment], 2).map(drop)
}

/// Bends probabilities, p → p^g, so that as many tokens are accepted as are expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    exponent: f32,
    expected: f32,
    accepted: f32,
}

impl Default for Calibration {
    fn default() -> Self {
        Self {
            exponent: 1.0,
            expected: 0.0,
            accepted: 0.0,
        }
    }
}

impl Calibration {
    /// Steps are forgotten by this share a step: about the last hundred count.
    const DECAY: f32 = 0.99;
    /// How fast the exponent follows; a whole unit takes some hundred steps of a gross misestimate.
    const RATE: f32 = 0.02;

    /// How fast drafting that did not pay is tried again: by half within some 350 steps.
    const RETRY: f32 = 0.002;

    /// The calibrated probability.
    pub fn apply(&self, probability: f32) -> f32 {
        probability.powf(self.exponent)
    }

    /// Learns from a step that drafted nodes of `expected` calibrated probabilities in sum. A step that drafted
    /// nothing teaches nothing: then the exponent goes back to where it began, so that drafting is tried again.
    pub fn learn(&mut self, expected: f32, accepted: u32) {
        if expected == 0.0 {
            self.exponent += Self::RETRY * (1.0 - self.exponent);
            return;
        }
        let accepted = accepted as f32;
        self.expected = self.expected * Self::DECAY + expected;
        self.accepted = self.accepted * Self::DECAY + accepted;
        let error = (self.expected - self.accepted) / self.expected.max(self.accepted).max(1.0);
        self.exponent = (self.exponent + Self::RATE * error).clamp(0.2, 5.0);
    }
}

/// The draft budget of a generator: what forwards cost, and what drafts were worth so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    cost: StepCost,
    calibration: Calibration,
    /// Accepted tokens that this step's calibrated probabilities promise.
    expected: f32,
}

impl Budget {
    /// A budget that has seen no step yet.
    pub fn new(cost: StepCost) -> Self {
        Self {
            cost,
            calibration: Calibration::default(),
            expected: 0.0,
        }
    }

    /// How many drafted nodes to keep of each of `sequences` sequences. `drafted` holds an estimated probability and the
    /// sequence's number for every node; `known` and `certain` are as in [`StepCost::best_count`].
    pub fn allot(
        &mut self,
        (known, certain): (usize, usize),
        mut drafted: Vec<(f32, usize)>,
        sequences: usize,
    ) -> Vec<usize> {
        for (probability, _) in &mut drafted {
            *probability = self.calibration.apply(*probability);
        }
        drafted.sort_by(|a, b| b.0.total_cmp(&a.0));
        let probabilities: Vec<f32> = drafted.iter().map(|(p, _)| *p).collect();
        let count = self.cost.best_count(known, certain, &probabilities);
        self.expected = probabilities[..count].iter().sum();
        let mut nodes = vec![0; sequences];
        for (_, sequence) in &drafted[..count] {
            nodes[*sequence] += 1;
        }
        nodes
    }

    /// Takes over how many drafted tokens of the step were accepted.
    pub fn learn(&mut self, accepted: u32) {
        self.calibration.learn(self.expected, accepted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost() -> StepCost {
        StepCost::new(vec![(1.0, 1.0), (2.0, 3.0), (8.0, 4.0), (16.0, 6.0)])
    }

    #[test]
    fn costs_are_interpolated_and_rise() {
        let cost = cost();
        let cases = [(1, 1.0), (2, 3.0), (5, 3.5), (16, 6.0), (32, 12.0)];
        for (tokens, seconds) in cases {
            assert!((cost.seconds(tokens) - seconds).abs() < 1e-9, "{tokens}");
        }
        let noisy = StepCost::new(vec![(2.0, 1.0), (1.0, 2.0)]);
        assert!(noisy.seconds(2) >= noisy.seconds(1));
    }

    #[test]
    fn nothing_is_drafted_that_does_not_pay() {
        assert_eq!(cost().best_count(1, 1, &[0.1; 15]), 0);
        assert_eq!(cost().best_count(1, 1, &[]), 0);
    }

    #[test]
    fn sure_drafts_fill_the_budget() {
        assert_eq!(cost().best_count(1, 1, &[1.0; 15]), 15);
    }

    #[test]
    fn the_count_has_the_best_rate_of_all() {
        let probabilities = [0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.1, 0.05, 0.01];
        let rate = |n: usize| {
            let expected = 1.0
                + probabilities[..n]
                    .iter()
                    .map(|p| f64::from(*p))
                    .sum::<f64>();
            expected / cost().seconds(1 + n)
        };
        let best = cost().best_count(1, 1, &probabilities);
        assert!((0..=probabilities.len()).all(|n| rate(n) <= rate(best)));
        assert!(best > 0);
    }

    #[test]
    fn calibration_follows_what_is_accepted() {
        let mut calibration = Calibration::default();
        for _ in 0..4000 {
            // Of two nodes drafted at 0.25 one is accepted: the truth is 0.5.
            let expected = 2.0 * calibration.apply(0.25);
            calibration.learn(expected, 1);
        }
        assert!(
            (calibration.apply(0.25) - 0.5).abs() < 0.03,
            "{calibration:?}"
        );
    }

    #[test]
    fn drafting_that_never_paid_is_tried_again() {
        let mut calibration = Calibration::default();
        for _ in 0..1000 {
            calibration.learn(1.0, 0);
        }
        assert!(calibration.apply(0.5) < 0.1);
        for _ in 0..2000 {
            calibration.learn(0.0, 0);
        }
        assert!(calibration.apply(0.5) > 0.4);
    }
}
