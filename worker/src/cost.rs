//! The cost of a forward: measured when the model is loaded and refined by every step.
//!
//! `seconds(tokens, pairs) = curve(tokens) + pairs · pair_seconds`. The curve is interpolated between measured numbers
//! of tokens. A *pair* is a token and a cached token that it attends to. Weights are read once for all tokens, keys and
//! values once per sequence.
//!
//! While running, a machine can become slower or faster as a whole, which changes no decision about one model's steps,
//! or its curve can bend, which does. A fast average of measured over expected time tracks the overall speed; the
//! residuals per size adjust the curve, slowly. Where a forward is held against other times, those of another model for
//! one, its [seconds of late](StepCost::seconds_of_late) count: between the target's steps a small draft model takes
//! longer than by itself, when it was measured, and read texts for which that did not pay (docs/benchmarks.md).

use std::time::Instant;

use laser_decode::{ROOT_PARENT, chain_parents};
use laser_engine::{Engine, EngineError, Segment, Slot};

/// Cached tokens per sequence while the curve is measured.
const CONTEXT: usize = 64;

/// Most cached tokens of the single sequence with which attention is measured.
const LONG_CONTEXT: usize = 1024;

/// Tokens of the forwards that attention is measured with.
const ATTENTION_TOKENS: usize = 16;

/// The measured sizes: powers of two and one size between each. Up to the size where kernels work on whole tiles of
/// rows, also the next larger size, which may cost one tile more: nine tokens of a small model took 1.1 to 1.3 times as
/// long as eight.
const SIZES: [usize; 28] = [
    1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512, 768, 1024, 1536,
    2048,
];

/// A forward longer than this is the last: beyond it, time is proportional to tokens.
const LONGEST_SECONDS: f64 = 0.5;

/// Measurements per size, interleaved. The least counts, because the first forward of a size also allocates.
const ROUNDS: usize = 4;

/// Rate at which the machine's speed is tracked: about ten steps.
const DRIFT_RATE: f64 = 0.1;

/// Rate at which the machine's speed is told to others: about thirty steps, since they keep what they decide by it for
/// longer than a step (plans of lists for 128 lists).
const SPEED_RATE: f64 = 0.03;

/// Rate at which the curve adapts: after about seventy steps at its size a point has moved half of its error.
const CURVE_RATE: f64 = 0.01;

/// A step that took more or less than this factor of the expected time counts as if it took exactly the factor:
/// something else happened.
const OUTLIER: f64 = 2.0;

/// The work of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Number of tokens of all sequences.
    pub tokens: usize,
    /// Number of pairs of a token and a cached token that it attends to.
    pub pairs: usize,
}

impl StepLoad {
    /// Adds `tokens` of a sequence that has `cached` tokens.
    #[must_use]
    pub fn with(self, tokens: usize, cached: usize) -> Self {
        Self { tokens: self.tokens + tokens, pairs: self.pairs + tokens * cached }
    }
}

/// A possible step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlannedStep {
    /// Number of drafted nodes.
    pub nodes: usize,
    /// The whole work.
    pub load: StepLoad,
    /// Expected tokens.
    pub tokens: f64,
    /// Expected seconds.
    pub seconds: f64,
}

/// The cost of a forward.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Tokens and seconds, both in ascending order; never empty.
    points: Vec<(f64, f64)>,
    /// Seconds per pair.
    pair_seconds: f64,
    /// Natural logarithm of measured over expected time, over the last steps; none before the first.
    drift: Option<f64>,
    /// The same over more steps.
    of_late: Option<f64>,
}

impl StepCost {
    /// Creates a cost curve through `(tokens, seconds)`, made monotonic: no forward is cheaper than a smaller one.
    ///
    /// # Panics
    /// If there is no point.
    pub fn new(mut points: Vec<(f64, f64)>, pair_seconds: f64) -> Self {
        assert!(!points.is_empty(), "a cost curve needs a point");
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut cost = Self { points, pair_seconds, drift: None, of_late: None };
        cost.keep_rising();
        cost
    }

    /// Measures forwards of up to `tokens_max` tokens, divided among at most `batch` sequences as in a step.
    ///
    /// # Errors
    /// The engine's.
    pub fn measure(engine: &mut dyn Engine, batch: usize, tokens_max: usize) -> Result<Self, EngineError> {
        let batch = batch.clamp(1, tokens_max.max(1));
        let limit = engine.info().max_positions;
        let context = CONTEXT.min(limit / 4);
        let long = LONG_CONTEXT.min(limit.saturating_sub(ATTENTION_TOKENS)).max(context);
        let most = tokens_max.div_ceil(batch);
        let capacities = (0..batch).map(|slot| match slot {
            0 => (context + most).max(long + ATTENTION_TOKENS),
            _ => context + most,
        });
        let probe = Probe::open(engine, capacities, context)?;
        let largest = (most * probe.slots.len()).min(tokens_max.max(1));
        let measured = probe.cost(engine, (context, long), largest);
        probe.close(engine);
        measured
    }

    /// Returns the expected seconds of a forward at the speed of the last steps.
    pub fn seconds_of_late(&self, load: StepLoad) -> f64 {
        self.seconds(load) * self.of_late.map_or(1.0, f64::exp)
    }

    /// Returns the expected seconds of a forward at the speed with which it was measured; beyond the largest measured
    /// size they are proportional to it.
    pub fn seconds(&self, load: StepLoad) -> f64 {
        let tokens = load.tokens as f64;
        let after = self.points.partition_point(|(t, _)| *t < tokens);
        let before = after.checked_sub(1).map(|i| self.points[i]);
        let of_tokens = match (before, self.points.get(after)) {
            (None, Some((_, seconds))) => *seconds,
            (Some((t0, s0)), Some((t1, s1))) => s0 + (s1 - s0) * (tokens - t0) / (t1 - t0),
            (Some((t0, s0)), None) => s0 * tokens / t0,
            (None, None) => 0.0,
        };
        of_tokens + load.pairs as f64 * self.pair_seconds
    }

    /// Returns the step of highest worth among those of the first 0, 1, 2, … `nodes` (descending probabilities with the
    /// cached tokens of each), beside `known` load, which emits `certain` tokens in any case. `worth` maps expected
    /// tokens and seconds to the worth.
    pub fn best_step(
        &self,
        (known, certain): (StepLoad, usize),
        nodes: &[(f32, usize)],
        worth: impl Fn(f64, f64) -> f64,
    ) -> PlannedStep {
        let seconds = self.seconds(known);
        let mut step = PlannedStep { nodes: 0, load: known, tokens: certain as f64, seconds };
        let (mut best, mut best_worth) = (step, worth(step.tokens, seconds));
        for (probability, cached) in nodes {
            let load = step.load.with(1, *cached);
            step = PlannedStep {
                nodes: step.nodes + 1,
                load,
                tokens: step.tokens + f64::from(*probability),
                seconds: self.seconds(load),
            };
            let worth = worth(step.tokens, step.seconds);
            if worth > best_worth {
                (best, best_worth) = (step, worth);
            }
        }
        best
    }

    /// Learns from the duration of a step. Steps larger than the measured ones are ignored.
    pub fn learn(&mut self, load: StepLoad, seconds: f64) {
        let tokens = load.tokens as f64;
        let after = self.points.partition_point(|(t, _)| *t < tokens);
        let measured = (seconds / self.seconds(load)).ln();
        if after == self.points.len() || !measured.is_finite() {
            return;
        }
        let drift = self.drift.unwrap_or(measured);
        let within = |deviation: f64| deviation.clamp(-OUTLIER.ln(), OUTLIER.ln());
        let bend = within(measured - drift);
        self.drift = Some(drift + DRIFT_RATE * bend);
        let of_late = self.of_late.unwrap_or(measured);
        self.of_late = Some(of_late + SPEED_RATE * within(measured - of_late));
        for (at, share) in self.neighbours(after, tokens) {
            self.points[at].1 *= (CURVE_RATE * share * bend).exp();
        }
        self.keep_rising();
    }

    /// Returns the points around a number of tokens, with their weights in the interpolation.
    fn neighbours(&self, after: usize, tokens: f64) -> [(usize, f64); 2] {
        let Some(before) = after.checked_sub(1) else {
            return [(after, 1.0), (after, 0.0)];
        };
        let (from, to) = (self.points[before].0, self.points[after].0);
        let share = (tokens - from) / (to - from);
        [(before, 1.0 - share), (after, share)]
    }

    fn keep_rising(&mut self) {
        for i in 1..self.points.len() {
            self.points[i].1 = self.points[i].1.max(self.points[i - 1].1);
        }
    }
}

/// Open sequences with which forwards of any size are timed.
#[derive(Debug)]
pub struct Probe {
    slots: Vec<Slot>,
}

impl Probe {
    /// Opens sequences of these capacities, as many as there are caches for, each with `context` tokens cached.
    ///
    /// # Errors
    /// The engine's; then none stays open.
    pub fn open(
        engine: &mut dyn Engine,
        capacities: impl IntoIterator<Item = usize>,
        context: usize,
    ) -> Result<Self, EngineError> {
        let mut probe = Self { slots: Vec::new() };
        for capacity in capacities {
            let opened = engine.open(capacity).and_then(|slot| {
                probe.slots.push(slot);
                prefill(engine, slot, context)
            });
            if let Err(EngineError::CacheFull { .. }) = opened
                && !probe.slots.is_empty()
            {
                break;
            }
            if let Err(error) = opened {
                probe.close(engine);
                return Err(error);
            }
        }
        Ok(probe)
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.slots.len()
    }

    /// Ends the sequences.
    pub fn close(self, engine: &mut dyn Engine) {
        self.slots.iter().for_each(|slot| engine.close(*slot));
    }

    /// Measures the curve up to `tokens_max` tokens, then attention from a short to a long context.
    fn cost(
        &self,
        engine: &mut dyn Engine,
        (context, long): (usize, usize),
        tokens_max: usize,
    ) -> Result<StepCost, EngineError> {
        let mut points = self.curve(engine, tokens_max)?;
        let pair_seconds = self.attention(engine, (context, long))?;
        for (tokens, seconds) in &mut points {
            *seconds = (*seconds - *tokens * context as f64 * pair_seconds).max(*seconds / 2.0);
        }
        Ok(StepCost::new(points, pair_seconds))
    }

    /// Least seconds by number of tokens.
    fn curve(&self, engine: &mut dyn Engine, tokens_max: usize) -> Result<Vec<(f64, f64)>, EngineError> {
        let sizes = SIZES.iter().filter(|size| **size < tokens_max);
        let sizes = sizes.copied().chain([tokens_max.min(SIZES[SIZES.len() - 1])]);
        let mut points: Vec<(usize, f64)> = sizes.map(|size| (size, f64::INFINITY)).collect();
        for _ in 0..ROUNDS {
            let mut measured = 0;
            for (tokens, least) in &mut points {
                let seconds = self.forward(engine, *tokens)?;
                *least = least.min(seconds);
                measured += 1;
                if seconds > LONGEST_SECONDS {
                    break;
                }
            }
            points.truncate(measured);
        }
        Ok(points.into_iter().map(|(t, s)| (t as f64, s)).collect())
    }

    /// Measures the seconds per pair: the same tokens with a short and with a long context.
    fn attention(&self, engine: &mut dyn Engine, (short, long): (usize, usize)) -> Result<f64, EngineError> {
        let slot = self.slots[0];
        let tokens = ATTENTION_TOKENS.min(engine.info().max_positions - long);
        if long <= 2 * short || tokens == 0 {
            return Ok(0.0);
        }
        let least = |engine: &mut dyn Engine| -> Result<f64, EngineError> {
            let mut least = f64::INFINITY;
            for _ in 0..ROUNDS {
                least = least.min(timed(engine, &[(slot, tokens)], true)?);
            }
            Ok(least)
        };
        let before = least(engine)?;
        prefill(engine, slot, long - short)?;
        let after = least(engine)?;
        Ok(((after - before) / (tokens * (long - short)) as f64).max(0.0))
    }

    /// Measures the seconds of a forward of `tokens`, divided among as many of the sequences as there are tokens for.
    /// Nothing of it is kept.
    ///
    /// # Errors
    /// The engine's.
    pub fn forward(&self, engine: &mut dyn Engine, tokens: usize) -> Result<f64, EngineError> {
        timed(engine, &self.shares(tokens), true)
    }

    /// Measures the same with no token scored: without the unembedding, and on CPUs the last layer's MLP.
    ///
    /// # Errors
    /// The engine's.
    pub fn unscored(&self, engine: &mut dyn Engine, tokens: usize) -> Result<f64, EngineError> {
        timed(engine, &self.shares(tokens), false)
    }

    fn shares(&self, tokens: usize) -> Vec<(Slot, usize)> {
        let used = self.slots.len().min(tokens);
        let share = |index: usize| tokens * (index + 1) / used - tokens * index / used;
        let slots = self.slots.iter().take(used).copied().enumerate();
        slots.map(|(i, slot)| (slot, share(i))).collect()
    }
}

/// Caches `tokens` more tokens.
fn prefill(engine: &mut dyn Engine, slot: Slot, tokens: usize) -> Result<(), EngineError> {
    if tokens == 0 {
        return Ok(());
    }
    step(engine, &[(slot, tokens)], false)?;
    engine.commit(slot, &(0..tokens).collect::<Vec<_>>())
}

/// Measures the seconds of a forward that leaves no trace.
fn timed(engine: &mut dyn Engine, shares: &[(Slot, usize)], scored: bool) -> Result<f64, EngineError> {
    let start = Instant::now();
    step(engine, shares, scored)?;
    let seconds = start.elapsed().as_secs_f64();
    for (slot, _) in shares {
        engine.commit(*slot, &[])?;
    }
    Ok(seconds)
}

/// Runs chains of tokens, with all of them scored like a draft tree's, or none. Where the model has no position for
/// more, the others are siblings of a chain's last one: a model of lists has few positions, and trees that are larger.
fn step(engine: &mut dyn Engine, shares: &[(Slot, usize)], scored: bool) -> Result<(), EngineError> {
    let vocabulary = u32::try_from(engine.info().vocab_size).unwrap_or(u32::MAX);
    let most = shares.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
    let ids = (0..).map(|i: u32| (i * 37) % vocabulary);
    let tokens: Vec<u32> = ids.take(most).collect();
    let positions = engine.info().max_positions;
    let parents: Vec<Vec<u32>> =
        shares.iter().map(|&(slot, count)| tree(count, positions.saturating_sub(engine.cached(slot)))).collect();
    let width = if engine.info().reads_features { engine.info().hidden_size } else { 0 };
    let before = vec![0.5; most * width];
    let segments: Vec<Segment<'_>> = (shares.iter())
        .zip(&parents)
        .map(|(&(slot, count), parents)| Segment {
            slot,
            tokens: &tokens[..count],
            parents,
            scored_from: if scored { 0 } else { count },
            before: &before[..count * width],
            ..Segment::default()
        })
        .collect();
    engine.step(&segments, 2).map(drop)
}

/// The parents of a tree of so many tokens: a chain down to this depth, to whose last one all others are siblings.
fn tree(tokens: usize, depth: usize) -> Vec<u32> {
    let chain: Vec<u32> = chain_parents(tokens.min(depth)).collect();
    let last = chain.last().copied().unwrap_or(ROOT_PARENT);
    chain.into_iter().chain(std::iter::repeat(last)).take(tokens).collect()
}

#[cfg(test)]
mod tests {
    use laser_engine::{FakeEngine, FakeOptions};

    use super::*;

    fn load(tokens: usize) -> StepLoad {
        StepLoad { tokens, pairs: 0 }
    }

    fn cost() -> StepCost {
        StepCost::new(vec![(1.0, 1.0), (2.0, 3.0), (8.0, 4.0), (16.0, 6.0)], 0.0)
    }

    /// Nodes of the step with the most tokens a second.
    fn fastest(cost: &StepCost, known: StepLoad, nodes: &[(f32, usize)]) -> usize {
        let per_second = |tokens, seconds| tokens / seconds;
        cost.best_step((known, 1), nodes, per_second).nodes
    }

    fn nodes(probabilities: &[f32]) -> Vec<(f32, usize)> {
        probabilities.iter().map(|p| (*p, 0)).collect()
    }

    #[test]
    fn costs_are_interpolated_and_rise() {
        let cost = cost();
        let cases = [(1, 1.0), (2, 3.0), (5, 3.5), (16, 6.0), (32, 12.0)];
        for (tokens, seconds) in cases {
            assert!((cost.seconds(load(tokens)) - seconds).abs() < 1e-9, "{tokens}");
        }
        let noisy = StepCost::new(vec![(2.0, 1.0), (1.0, 2.0)], 0.0);
        assert!(noisy.seconds(load(2)) >= noisy.seconds(load(1)));
    }

    #[test]
    fn attention_costs_by_cached_tokens() {
        let cost = StepCost::new(vec![(1.0, 1.0), (4.0, 1.0)], 0.01);
        let load = load(0).with(2, 100).with(1, 50);
        assert_eq!(load, StepLoad { tokens: 3, pairs: 250 });
        assert!((cost.seconds(load) - 3.5).abs() < 1e-9);
        // The same node pays in a short context and not in a long one.
        let known = StepLoad { tokens: 1, pairs: 0 };
        assert_eq!(fastest(&cost, known, &[(0.5, 10)]), 1);
        assert_eq!(fastest(&cost, known, &[(0.5, 100)]), 0);
    }

    #[test]
    fn nothing_is_drafted_that_does_not_pay() {
        assert_eq!(fastest(&cost(), load(1), &nodes(&[0.1; 15])), 0);
        assert_eq!(fastest(&cost(), load(1), &[]), 0);
    }

    #[test]
    fn sure_drafts_fill_the_budget() {
        assert_eq!(fastest(&cost(), load(1), &nodes(&[1.0; 15])), 15);
    }

    #[test]
    fn the_count_has_the_best_rate_of_all() {
        let probabilities = [0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.1, 0.05, 0.01];
        let rate = |n: usize| {
            let sum: f64 = probabilities[..n].iter().map(|p| f64::from(*p)).sum();
            (1.0 + sum) / cost().seconds(load(1 + n))
        };
        let best = fastest(&cost(), load(1), &nodes(&probabilities));
        assert!((0..=probabilities.len()).all(|n| rate(n) <= rate(best)));
        assert!(best > 0);
    }

    #[test]
    fn a_machine_that_slows_down_bends_no_curve() {
        let mut cost = cost();
        for step in 0..2000 {
            let tokens = if step % 3 == 0 { 8 } else { 1 };
            let factor = 1.0 + f64::from(step) / 1000.0;
            let seconds = factor * self::cost().seconds(load(tokens));
            cost.learn(load(tokens), seconds);
        }
        let ratio = cost.seconds(load(8)) / cost.seconds(load(1));
        assert!((ratio / 4.0 - 1.0).abs() < 0.02, "{ratio}");
        // It is told to whom the machine is something else, too.
        let [one, eight] = [1, 8].map(|tokens| cost.seconds_of_late(load(tokens)));
        assert!((one / 3.0 - 1.0).abs() < 0.03 && (eight / 12.0 - 1.0).abs() < 0.03, "{one} {eight}");
        assert_eq!(self::cost().seconds_of_late(load(8)), self::cost().seconds(load(8)));
    }

    #[test]
    fn a_curve_that_was_measured_wrongly_is_mended() {
        let mut cost = cost();
        for step in 0..2000 {
            // In truth 8 tokens cost twice as much as one, not four times.
            let (tokens, seconds) = if step % 2 == 0 { (8, 2.0) } else { (1, 1.0) };
            cost.learn(load(tokens), seconds);
        }
        let ratio = cost.seconds(load(8)) / cost.seconds(load(1));
        assert!((ratio - 2.0).abs() < 0.1, "{ratio}");
    }

    #[test]
    fn one_hiccup_moves_nothing() {
        let mut cost = cost();
        (0..50).for_each(|_| cost.learn(load(1), 1.0));
        let before = cost.seconds(load(8)) / cost.seconds(load(1));
        cost.learn(load(8), 4000.0);
        let after = cost.seconds(load(8)) / cost.seconds(load(1));
        assert!((after / before - 1.0).abs() < 0.01, "{before} {after}");
    }

    #[test]
    fn trees_are_larger_than_a_model_has_positions() {
        let fake = FakeOptions { max_positions: 85, ..FakeOptions::default() };
        let cost = StepCost::measure(&mut FakeEngine::new(fake), 1, 300).unwrap();
        assert_eq!(cost.points.last().map(|(tokens, _)| *tokens), Some(300.0));
        assert_eq!(tree(5, 3), [ROOT_PARENT, 0, 1, 1, 1]);
        assert_eq!(tree(2, 3), [ROOT_PARENT, 0]);
        assert_eq!(tree(2, 1), [ROOT_PARENT, ROOT_PARENT]);
    }
}
