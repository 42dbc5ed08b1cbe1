//! The draft budget: the number of drafted nodes that pay in a step, over the whole batch.
//!
//! A node gains its probability of acceptance, in tokens, and costs what it adds to the forward. The nodes of all
//! sequences are ranked by probability, and tokens and seconds of every prefix of that ranking follow from the
//! [cost](StepCost) of a forward. The chosen prefix maximises `tokens - rate · seconds`, where `rate` is tokens per
//! second over the last steps: a token that is not drafted now costs that time later. (This is Dinkelbach's method for
//! the largest ratio of sums. Maximising each step's own ratio drafts too much beside a prompt, whose time is spent
//! anyway, and too little where a text is easy: on two cores it lost up to 8 %.) Where nothing can be predicted nothing
//! is drafted, and speculation loses to plain decoding only the time of drafting, which is kept small too: see
//! [`Reach`].
//!
//! Drafters estimate probabilities under strict acceptance of typical texts. A calibration per pool corrects them by
//! the outcome of drafts there.

use std::collections::HashMap;

use crate::calibration::Calibration;
use crate::cost::{PlannedStep, StepCost, StepLoad};

/// Share of a step's time that useless drafts may take.
const USELESS: f64 = 0.01;

/// A pool pays if its drafts gain this many times what they cost. Nodes are kept for their high estimates, which are
/// biased upwards by that.
const PAYS: f64 = 3.0;

/// Share of a step's time that the drafts of a paying pool may take, however many nodes are kept.
const AFFORDED: f64 = 0.03;

/// Most steps between two drafts of a sequence whose drafts are useless.
const WAIT_MAX: u32 = 15;

/// Fewest nodes of a draft.
pub(crate) const REACH_MIN: usize = 4;

/// Decay per step of the averages behind the rate: about the last fifty steps count.
const RATE_DECAY: f64 = 0.98;

/// Learning rate of the averages of draft time, step time, and the gain of drafts.
const TIME_RATE: f64 = 0.05;

/// A sequence's contribution to a step.
#[derive(Debug, Clone, Copy)]
pub struct Drafted<'a> {
    /// The pool that the sequence drafts from; empty without one.
    pub pool: &'a str,
    /// Number of tokens that it has cached.
    pub cached: usize,
    /// Estimated probabilities of its nodes, in descending order.
    pub probabilities: &'a [f32],
}

/// The draft budget of a generator: the cost of forwards, and the worth of each pool's drafts so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    cost: StepCost,
    /// The worth of pools by name; a new pool starts with the calibration of all.
    pools: HashMap<String, PoolWorth>,
    all: Calibration,
    /// The load of the last step, and whether its texts are decoded plainly for an audit.
    load: StepLoad,
    is_plain: bool,
    /// Expected tokens and seconds of the last steps without prompts, by number of sequences.
    rates: Vec<(f64, f64)>,
    /// Mean seconds of a draft and of one of its nodes, and mean seconds and expected tokens of a step.
    draft_seconds: f64,
    node_seconds: f64,
    step_seconds: f64,
    step_tokens: f64,
}

/// The worth of a pool's drafts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PoolWorth {
    calibration: Calibration,
    /// Tokens that a recent draft gains, beyond those that the time of its kept nodes would give; initially none.
    gain: f64,
}

impl Budget {
    /// Creates a budget that has seen no step yet.
    pub fn new(cost: StepCost) -> Self {
        Self {
            cost,
            pools: HashMap::new(),
            all: Calibration::default(),
            load: StepLoad::default(),
            is_plain: false,
            rates: Vec::new(),
            draft_seconds: 0.0,
            node_seconds: 0.0,
            step_seconds: 0.0,
            step_tokens: 0.0,
        }
    }

    /// Returns the current estimate of the cost of forwards.
    pub fn cost(&self) -> &StepCost {
        &self.cost
    }

    /// Returns how many nodes to keep per sequence, at most `room` in all, in a step with `known` load besides that
    /// emits `certain` tokens in any case.
    pub fn allot(&mut self, (known, certain, room): (StepLoad, usize, usize), sequences: &[Drafted<'_>]) -> Vec<usize> {
        let calibrations: Vec<Calibration> = sequences.iter().map(|s| self.calibration(s.pool)).collect();
        let mut ranked: Vec<(f32, usize)> = Vec::new();
        for (index, (sequence, calibration)) in sequences.iter().zip(&calibrations).enumerate() {
            let probabilities = sequence.probabilities.iter();
            ranked.extend(probabilities.map(|p| (calibration.apply(*p), index)));
        }
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(room);
        let nodes: Vec<(f32, usize)> = ranked.iter().map(|(p, index)| (*p, sequences[*index].cached)).collect();
        let best = self.best_step((known, certain), &nodes, sequences.len());
        (self.load, self.is_plain) = (best.load, false);
        follow(&mut self.step_tokens, best.tokens);
        let price = self.price(known, &best);
        let (mut kept, mut gains) = (vec![0; sequences.len()], vec![0.0; sequences.len()]);
        for (probability, index) in &ranked[..best.nodes] {
            kept[*index] += 1;
            gains[*index] += f64::from(*probability) - price;
        }
        for (sequence, gain) in sequences.iter().zip(gains) {
            if !sequence.probabilities.is_empty() {
                let pool = self.pool(sequence.pool);
                pool.gain += (gain - pool.gain) * TIME_RATE;
            }
        }
        kept
    }

    /// Takes note of a step of texts that are decoded plainly for an audit. What it takes tells what forwards cost, but
    /// its rate is not that of texts that are drafted: after a plain text of an audit, drafts would be priced by it for
    /// the next fifty steps, and too much would be drafted.
    pub fn plain(&mut self, load: StepLoad) {
        (self.load, self.is_plain) = (load, true);
    }

    /// Returns the tokens that the time of one of the step's nodes would give.
    fn price(&self, known: StepLoad, step: &PlannedStep) -> f64 {
        let added = step.seconds - self.cost.seconds(known);
        step.tokens / step.seconds * added / step.nodes.max(1) as f64
    }

    /// Returns the step of highest worth at the recent rate, or with the most tokens per second if no rate is known for
    /// this number of sequences.
    fn best_step(
        &mut self,
        (known, certain): (StepLoad, usize),
        nodes: &[(f32, usize)],
        sequences: usize,
    ) -> PlannedStep {
        let rate = self.rates.get(sequences).filter(|(_, seconds)| *seconds > 0.0);
        let rate = rate.map(|(tokens, seconds)| tokens / seconds);
        let worth = |tokens: f64, seconds: f64| match rate {
            Some(rate) => tokens - rate * seconds,
            None => tokens / seconds,
        };
        let best = self.cost.best_step((known, certain), nodes, worth);
        if known.tokens == sequences {
            self.rates.resize(self.rates.len().max(sequences + 1), (0.0, 0.0));
            let (tokens, seconds) = self.rates[sequences];
            self.rates[sequences] = (tokens * RATE_DECAY + best.tokens, seconds * RATE_DECAY + best.seconds);
        }
        best
    }

    /// Learns from the duration of the last step's forward.
    pub fn learn(&mut self, seconds: f64) {
        self.cost.learn(std::mem::take(&mut self.load), seconds);
        if !self.is_plain {
            follow(&mut self.step_seconds, seconds);
        }
    }

    /// Learns from the outcome of a pool's draft: the estimated probability of each node, and whether it was part of
    /// the text.
    pub fn judge(&mut self, pool: &str, nodes: &[(f32, bool)]) {
        if nodes.is_empty() {
            return;
        }
        let calibration = &mut self.pool(pool).calibration;
        for &(probability, happened) in nodes {
            calibration.learn(probability, happened);
        }
        for &(probability, happened) in nodes {
            self.all.learn(probability, happened);
        }
    }

    fn pool(&mut self, name: &str) -> &mut PoolWorth {
        let new = PoolWorth { calibration: self.all, gain: 0.0 };
        self.pools.entry(name.to_owned()).or_insert(new)
    }

    fn calibration(&self, pool: &str) -> Calibration {
        self.pools.get(pool).map_or(self.all, |p| p.calibration)
    }

    /// Learns from the duration of a draft of this many nodes.
    pub fn drafted(&mut self, seconds: f64, nodes: usize) {
        follow(&mut self.draft_seconds, seconds);
        follow(&mut self.node_seconds, seconds / nodes.max(1) as f64);
    }

    /// Returns what each of `sequences` sequences may spend on drafts from a pool. If the pool pays they may take a
    /// fixed share of the step, however much is kept. Otherwise useless drafts are so rare that they take no more than
    /// a hundredth of the time.
    pub fn terms(&self, pool: &str, sequences: usize) -> Terms {
        let taken = self.draft_seconds * self.step_tokens / self.step_seconds;
        let gain = self.pools.get(pool).map_or(0.0, |pool| pool.gain);
        let share = self.step_seconds / sequences as f64;
        if gain > PAYS * taken {
            #[expect(clippy::cast_possible_truncation, reason = "saturates")]
            let nodes = (AFFORDED * share / self.node_seconds) as usize;
            return Terms { patience: 0, reach: nodes.max(REACH_MIN) };
        }
        let steps = self.draft_seconds / (USELESS * share);
        let patience = (0..WAIT_MAX).find(|wait| f64::from(*wait) + 1.0 >= steps);
        Terms { patience: patience.unwrap_or(WAIT_MAX), reach: REACH_MIN }
    }
}

/// The limits on a sequence's drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Most steps to wait after a useless draft.
    patience: u32,
    /// Fewest nodes of the next draft.
    reach: usize,
}

fn follow(mean: &mut f64, value: f64) {
    *mean += (value - *mean) * if *mean == 0.0 { 1.0 } else { TIME_RATE };
}

/// How far and when a sequence drafts: about twice as many nodes as were kept last time, at least as many as its terms
/// allow, and not at every step after a useless draft.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reach {
    /// Number of nodes; none before the first draft.
    nodes: Option<usize>,
    /// Steps left to wait, and the length of the last wait.
    wait: u32,
    waited: u32,
}

impl Reach {
    /// Returns the number of nodes to draft in this step, at most `nodes`.
    pub fn next(&mut self, nodes: usize) -> usize {
        if self.wait > 0 {
            self.wait -= 1;
            return 0;
        }
        self.nodes.unwrap_or(nodes).min(nodes)
    }

    /// Learns from the number of kept nodes of a draft.
    pub fn learn(&mut self, kept: usize, terms: Terms) {
        self.nodes = Some((2 * kept).max(terms.reach));
        self.waited = match kept {
            0 => (2 * self.waited + 1).min(terms.patience),
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
        Drafted { pool, cached: 0, probabilities }
    }

    fn known(tokens: usize) -> (StepLoad, usize, usize) {
        (StepLoad { tokens, pairs: 0 }, tokens, usize::MAX)
    }

    #[test]
    fn nodes_go_to_the_sequences_where_they_are_likely() {
        let kept = budget().allot(known(2), &[drafted("a", &[0.9, 0.8, 0.02]), drafted("a", &[0.05, 0.01])]);
        assert_eq!(kept, [2, 0]);
    }

    #[test]
    fn the_most_likely_nodes_take_what_room_there_is() {
        let (load, certain, _) = known(2);
        let sequences = [drafted("a", &[0.9, 0.7]), drafted("a", &[0.8, 0.75])];
        for (room, expected) in [(0, [0, 0]), (1, [1, 0]), (3, [1, 2]), (9, [2, 2])] {
            assert_eq!(budget().allot((load, certain, room), &sequences), expected, "{room}");
        }
    }

    #[test]
    fn a_pool_that_promised_too_much_loses_its_nodes_to_another() {
        let mut budget = budget();
        let sequences = [drafted("good", &[0.6, 0.5]), drafted("bad", &[0.7, 0.6])];
        assert_eq!(budget.allot(known(2), &sequences), [2, 2]);
        for _ in 0..500 {
            budget.judge("good", &[(0.6, true), (0.5, false)]);
            budget.judge("bad", &[(0.7, false), (0.6, false)]);
        }
        assert_eq!(budget.allot(known(2), &sequences), [2, 0]);
    }

    #[test]
    fn a_pool_that_promised_too_little_gets_nodes_though_it_had_none() {
        let mut budget = budget();
        let sequences = [drafted("shy", &[0.03, 0.02])];
        assert_eq!(budget.allot(known(1), &sequences), [0]);
        for _ in 0..500 {
            budget.judge("shy", &[(0.03, true), (0.02, true)]);
        }
        assert_eq!(budget.allot(known(1), &sequences), [2]);
    }

    #[test]
    fn a_new_pool_begins_with_what_all_have_taught() {
        let mut budget = budget();
        (0..500).for_each(|_| budget.judge("bad", &[(0.7, false), (0.6, false)]));
        assert!(budget.calibration("new").apply(0.7) < 0.3);
    }

    #[test]
    fn beside_a_prompt_no_more_is_drafted_than_pays_later() {
        let mut budget = budget();
        let likely = [drafted("a", &[0.9, 0.8, 0.06])];
        (0..20).for_each(|_| assert_eq!(budget.allot(known(1), &likely), [2]));
        // By itself a step of 100 tokens would be worth many nodes; the third one is cheaper had in the next.
        let prompt = (StepLoad { tokens: 100, pairs: 0 }, 1, usize::MAX);
        assert_eq!(budget.allot(prompt, &likely), [2]);
    }

    #[test]
    fn plain_texts_of_an_audit_change_no_price() {
        let mut budget = budget();
        let likely = [drafted("a", &[0.9, 0.8, 0.12])];
        for _ in 0..100 {
            drop(budget.allot(known(1), &likely));
            budget.learn(1.3);
        }
        let before = budget.clone();
        for _ in 0..100 {
            budget.plain(known(1).0);
            budget.learn(1.1);
        }
        assert_eq!(budget.allot(known(1), &likely), [2]);
        assert_eq!(budget.step_seconds, before.step_seconds);
        // A plain rate would have made the third node worth its time.
        let mut polluted = before;
        (0..100).for_each(|_| drop(polluted.allot(known(1), &[drafted("a", &[])])));
        assert_eq!(polluted.allot(known(1), &likely), [3]);
    }

    fn terms(patience: u32, reach: usize) -> Terms {
        Terms { patience, reach }
    }

    #[test]
    fn a_pool_that_pays_is_drafted_from_at_every_step() {
        let mut budget = budget();
        let sequences = [drafted("good", &[0.9, 0.8]), drafted("bad", &[0.01])];
        (0..50).for_each(|_| assert_eq!(budget.allot(known(2), &sequences), [2, 0]));
        budget.learn(1e-3);
        budget.drafted(5e-6, 10);
        // 3 % of 1 ms are 60 nodes of 0.5 µs, or nearly; of 64 sequences each may have one, but drafts have four.
        let alone = budget.terms("good", 1);
        assert!(alone.patience == 0 && (59..=60).contains(&alone.reach), "{alone:?}");
        assert_eq!(budget.terms("good", 64), terms(0, REACH_MIN));
        assert_eq!(budget.terms("bad", 64), terms(WAIT_MAX, REACH_MIN));
        // It does not where drafting takes longer than what it gains.
        budget.drafted(1.0, 10);
        assert_eq!(budget.terms("good", 1), terms(WAIT_MAX, REACH_MIN));
    }

    #[test]
    fn useless_drafts_become_rare_where_they_cost() {
        let mut budget = budget();
        budget.learn(1e-3);
        budget.drafted(5e-6, 10);
        // 5 µs of 1 ms are half a percent; of 64 sequences they are 32 %.
        assert_eq!(budget.terms("a", 1).patience, 0);
        assert_eq!(budget.terms("a", 64).patience, WAIT_MAX);
        let mut reach = Reach::default();
        let mut drafts = 0;
        for _ in 0..160 {
            if reach.next(32) > 0 {
                drafts += 1;
                reach.learn(0, terms(WAIT_MAX, REACH_MIN));
            }
        }
        assert!((10..16).contains(&drafts), "{drafts}");
        while reach.next(32) == 0 {}
        reach.learn(6, terms(WAIT_MAX, REACH_MIN));
        assert_eq!(reach.next(32), 12);
        reach.learn(12, terms(WAIT_MAX, REACH_MIN));
        assert_eq!(reach.next(16), 16);
        reach.learn(1, terms(0, 10));
        assert_eq!(reach.next(16), 10);
    }
}
