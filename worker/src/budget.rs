//! The draft budget: how many drafted nodes a step is worth, over the whole batch.
//!
//! A node earns its probability of being accepted, in tokens, and costs what it adds to the forward. Nodes of all
//! sequences are ranked by probability, and of every prefix of that ranking tokens and seconds are known from the
//! [cost](StepCost) of a forward. Of these the one with the most `tokens - rate · seconds` is taken, where `rate` is
//! tokens a second over the last steps: a token that is not drafted now costs that time later. (This is Dinkelbach's
//! way to the largest ratio of sums. The best ratio of each step alone drafts too much beside a prompt, whose time is
//! spent anyway, and too little where a text is easy: on two cores it lost up to 8 %.) Where nothing can be predicted
//! nothing is drafted, and speculation loses to plain decoding by no more than the drafting itself, which is made small as
//! well: see [`Reach`].
//!
//! Drafters estimate probabilities under strict acceptance of typical texts. A [`Calibration`] for each pool bends them
//! to what is accepted there, relaxed verification included.

use std::collections::HashMap;

use crate::cost::{PlannedStep, StepCost, StepLoad};

/// Share of a step that drafts of no use may take.
const USELESS: f64 = 0.01;

/// Steps between two drafts of a sequence whose drafts are of no use, at most.
const WAIT_MAX: u32 = 15;

/// Nodes of the first draft after one of which nothing was kept.
const REACH_MIN: usize = 4;

/// Steps are forgotten by this share a step when the rate is taken: about the last fifty count.
const RATE_DECAY: f64 = 0.98;

/// How fast the time of a draft and of a step is followed.
const TIME_RATE: f64 = 0.05;

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

/// What a sequence brings to a step.
#[derive(Debug, Clone, Copy)]
pub struct Drafted<'a> {
    /// The pool that it drafts from; empty without one.
    pub pool: &'a str,
    /// Tokens that it has cached.
    pub cached: usize,
    /// Estimated probabilities of its nodes, falling.
    pub probabilities: &'a [f32],
}

/// The step that was allotted last.
#[derive(Debug, Clone, Default, PartialEq)]
struct Step {
    load: StepLoad,
    /// Each sequence's pool, and the accepted tokens that its calibrated probabilities promise.
    promised: Vec<(String, f32)>,
}

/// The draft budget of a generator: what forwards cost, and what the drafts of each pool were worth so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    cost: StepCost,
    /// By pool; a pool that is new begins with that of all.
    calibrations: HashMap<String, Calibration>,
    all: Calibration,
    step: Step,
    /// Expected tokens and seconds of the last steps without prompts, by number of sequences.
    rates: Vec<(f64, f64)>,
    /// Mean seconds of a draft and of a step.
    draft_seconds: f64,
    step_seconds: f64,
}

impl Budget {
    /// A budget that has seen no step yet.
    pub fn new(cost: StepCost) -> Self {
        Self {
            cost,
            calibrations: HashMap::new(),
            all: Calibration::default(),
            step: Step::default(),
            rates: Vec::new(),
            draft_seconds: 0.0,
            step_seconds: 0.0,
        }
    }

    /// What forwards cost, as far as is known now.
    pub fn cost(&self) -> &StepCost {
        &self.cost
    }

    /// How many of its nodes to keep of each sequence, in a step of `known` load besides that emits `certain` tokens in
    /// any case.
    pub fn allot(
        &mut self,
        (known, certain): (StepLoad, usize),
        sequences: &[Drafted<'_>],
    ) -> Vec<usize> {
        let calibrations: Vec<Calibration> =
            sequences.iter().map(|s| self.calibration(s.pool)).collect();
        let mut ranked: Vec<(f32, usize)> = Vec::new();
        for (index, (sequence, calibration)) in sequences.iter().zip(&calibrations).enumerate() {
            let probabilities = sequence.probabilities.iter();
            ranked.extend(probabilities.map(|p| (calibration.apply(*p), index)));
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        let nodes: Vec<(f32, usize)> = ranked
            .iter()
            .map(|(p, index)| (*p, sequences[*index].cached))
            .collect();
        let best = self.best_step((known, certain), &nodes, sequences.len());
        ranked.truncate(best.nodes);
        let mut step = Step {
            load: best.load,
            promised: sequences.iter().map(|s| (s.pool.to_owned(), 0.0)).collect(),
        };
        let mut kept = vec![0; sequences.len()];
        for (probability, index) in ranked {
            kept[index] += 1;
            step.promised[index].1 += probability;
        }
        self.step = step;
        kept
    }

    /// The step of most worth at the rate of late; of most tokens a second where none is known for so many sequences.
    fn best_step(
        &mut self,
        (known, certain): (StepLoad, usize),
        nodes: &[(f32, usize)],
        sequences: usize,
    ) -> PlannedStep {
        let rate = self
            .rates
            .get(sequences)
            .filter(|(_, seconds)| *seconds > 0.0);
        let rate = rate.map(|(tokens, seconds)| tokens / seconds);
        let worth = |tokens: f64, seconds: f64| match rate {
            Some(rate) => tokens - rate * seconds,
            None => tokens / seconds,
        };
        let best = self.cost.best_step((known, certain), nodes, worth);
        if known.tokens == sequences {
            self.rates
                .resize(self.rates.len().max(sequences + 1), (0.0, 0.0));
            let (tokens, seconds) = self.rates[sequences];
            self.rates[sequences] = (
                tokens * RATE_DECAY + best.tokens,
                seconds * RATE_DECAY + best.seconds,
            );
        }
        best
    }

    /// Takes over how many drafted tokens of the allotted step were accepted, by sequence, and how long its forward took.
    pub fn learn(&mut self, accepted: &[u32], seconds: f64) {
        let step = std::mem::take(&mut self.step);
        self.cost.learn(step.load, seconds);
        follow(&mut self.step_seconds, seconds);
        let mut pools: HashMap<String, (f32, u32)> = HashMap::new();
        for ((pool, promised), accepted) in step.promised.into_iter().zip(accepted) {
            let sum = pools.entry(pool).or_default();
            *sum = (sum.0 + promised, sum.1 + accepted);
        }
        for (pool, (promised, accepted)) in pools {
            self.all.learn(promised, accepted);
            let new = self.all;
            let calibration = self.calibrations.entry(pool).or_insert(new);
            calibration.learn(promised, accepted);
        }
    }

    fn calibration(&self, pool: &str) -> Calibration {
        self.calibrations.get(pool).copied().unwrap_or(self.all)
    }

    /// Takes over how long a draft took.
    pub fn drafted(&mut self, seconds: f64) {
        follow(&mut self.draft_seconds, seconds);
    }

    /// Steps that each of `sequences` sequences waits at most after a draft of no use, so that such drafts take no more
    /// than a hundredth of the time.
    pub fn patience(&self, sequences: usize) -> u32 {
        let share = sequences as f64 * self.draft_seconds / (USELESS * self.step_seconds);
        (0..WAIT_MAX)
            .find(|wait| f64::from(*wait) + 1.0 >= share)
            .unwrap_or(WAIT_MAX)
    }
}

fn follow(mean: &mut f64, value: f64) {
    *mean += (value - *mean) * if *mean == 0.0 { 1.0 } else { TIME_RATE };
}

/// How far a sequence drafts, and when: about twice as many nodes as were kept the last time, and after a draft of no use
/// not at every step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reach {
    /// Nodes; none before the first draft.
    nodes: Option<usize>,
    /// Steps to wait, and how many it was the last time.
    wait: u32,
    waited: u32,
}

impl Reach {
    /// Nodes to draft in this step, of at most `nodes`.
    pub fn next(&mut self, nodes: usize) -> usize {
        if self.wait > 0 {
            self.wait -= 1;
            return 0;
        }
        self.nodes.unwrap_or(nodes).min(nodes)
    }

    /// Takes over how many nodes of a draft were kept; after none it waits up to `patience` steps.
    pub fn learn(&mut self, kept: usize, patience: u32) {
        self.nodes = Some((2 * kept).max(REACH_MIN));
        self.waited = match kept {
            0 => (2 * self.waited + 1).min(patience),
            _ => 0,
        };
        self.wait = self.waited;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Budget {
        let points = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0].map(|t| (t, 1.0 + 0.1 * t));
        Budget::new(StepCost::new(points.to_vec(), 0.0))
    }

    fn drafted<'a>(pool: &'a str, probabilities: &'a [f32]) -> Drafted<'a> {
        Drafted {
            pool,
            cached: 0,
            probabilities,
        }
    }

    fn known(tokens: usize) -> (StepLoad, usize) {
        (StepLoad { tokens, pairs: 0 }, tokens)
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

    #[test]
    fn nodes_go_to_the_sequences_where_they_are_likely() {
        let kept = budget().allot(
            known(2),
            &[drafted("a", &[0.9, 0.8, 0.02]), drafted("a", &[0.05, 0.01])],
        );
        assert_eq!(kept, [2, 0]);
    }

    #[test]
    fn a_pool_that_promised_too_much_loses_its_nodes_to_another() {
        let mut budget = budget();
        let sequences = [drafted("good", &[0.6, 0.5]), drafted("bad", &[0.7, 0.6])];
        assert_eq!(budget.allot(known(2), &sequences), [2, 2]);
        let mut sum = [0, 0];
        for _ in 0..500 {
            let kept = budget.allot(known(2), &sequences);
            budget.learn(&[u32::from(kept[0] > 0), 0], 1.5);
            sum = [sum[0] + kept[0], sum[1] + kept[1]];
        }
        assert!(sum[0] > 900 && sum[1] < 600, "{sum:?}");
        assert!(budget.calibration("good").apply(0.6) > 0.4);
        assert!(budget.calibration("bad").apply(0.7) < 0.35);
    }

    #[test]
    fn a_new_pool_begins_with_what_all_have_taught() {
        let mut budget = budget();
        for _ in 0..500 {
            budget.allot(known(1), &[drafted("bad", &[0.7, 0.6])]);
            budget.learn(&[0], 1.1);
        }
        assert!(budget.calibration("new").apply(0.7) < 0.3);
    }

    #[test]
    fn beside_a_prompt_no_more_is_drafted_than_pays_later() {
        let mut budget = budget();
        let likely = [drafted("a", &[0.9, 0.8, 0.06])];
        (0..20).for_each(|_| assert_eq!(budget.allot(known(1), &likely), [2]));
        // By itself a step of 100 tokens would be worth many nodes; the third one is cheaper had in the next.
        let prompt = (
            StepLoad {
                tokens: 100,
                pairs: 0,
            },
            1,
        );
        assert_eq!(budget.allot(prompt, &likely), [2]);
    }

    #[test]
    fn useless_drafts_become_rare_where_they_cost() {
        let mut budget = budget();
        budget.learn(&[], 1e-3);
        budget.drafted(5e-6);
        // 5 µs of 1 ms are half a percent; of 64 sequences they are 32 %.
        assert_eq!((budget.patience(1), budget.patience(64)), (0, WAIT_MAX));
        let mut reach = Reach::default();
        let mut drafts = 0;
        for _ in 0..160 {
            if reach.next(32) > 0 {
                drafts += 1;
                reach.learn(0, WAIT_MAX);
            }
        }
        assert!((10..16).contains(&drafts), "{drafts}");
        while reach.next(32) == 0 {}
        reach.learn(6, WAIT_MAX);
        assert_eq!(reach.next(32), 12);
        reach.learn(12, WAIT_MAX);
        assert_eq!(reach.next(16), 16);
    }
}
