//! A draft model: a second, smaller engine that reads the trees of a step and extends them ([`Refined`]).
//!
//! It has a cache of its own per sequence, which holds what the sequence has committed. One forward reads the trees of
//! all sequences together with the tokens that they emitted since; more forwards extend what is new in the trees.
//!
//! A draft model that reads features, as EAGLE's layer does, gets the target's for what is committed. For a drafted
//! node it needs the feature that it gave the node's parent itself, so each forward reads one level. Medusa's heads
//! need no more than the feature before the root: one forward tells what follows at every depth, whatever the path.
//!
//! Under a budget each forward has to pay: the tokens that it is expected to gain must exceed those that its time gives
//! at the recent rate. A node that is read can only gain if the text comes to it, so what is expected is the sum of the
//! path probabilities of the nodes that are to be read, times what the last forwards of its place gained per unit of
//! that. This is the stopping rule of SpecDec++ (arXiv:2405.19715, theorem 3.1: go on while the chance that all is
//! accepted is high enough for the cost of one more), stated for trees and batches. Its trained head is one estimator
//! of that chance: where there is one, it judges every node that the model reads.

use std::time::Instant;

use laser_decode::{Calibration, ROOT_PARENT, Refined, TargetScores as _, Terms, Token, Verdict};
use laser_engine::{ACCEPTED, Engine, EngineError, REJECTED, Scores, Segment, Slot};

use crate::cost::{StepCost, StepLoad};

/// The draft model's candidates after a node: a tree of 64 nodes rarely has more children of one.
const CANDIDATES: usize = 8;

/// The same of texts that are drawn: the noise may favour any of them.
const DRAWN_CANDIDATES: usize = 32;

/// Rate of the averages of gains and of tokens per second: about the last thirty steps count.
const RATE: f64 = 0.03;

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

/// Nodes over whose cost the price of one is averaged: kernels work on rows in tiles.
const PRICED_NODES: usize = 16;

/// The trust stays this far from none and from certainty, so that it can always change.
const TRUST_MARGIN: f32 = 0.02;

/// A forward that did not pay is tried again after so many steps, and then ever more rarely up to so many: it may pay
/// on other texts. What it reads anew then are whole prompts.
const RETRY_STEPS: std::ops::RangeInclusive<u32> = 32..=4096;

/// A second model that drafts.
pub struct DraftModel {
    engine: Box<dyn Engine>,
    /// Judges what the model reads, from its features.
    acceptance_head: Option<AcceptanceHead>,
    /// What forwards cost; without it every step takes all of them.
    cost: Option<StepCost>,
    /// By the depth of the node that was read, the last one's for all below it. A model that reads tokens is as good at
    /// any depth; what reads features is worse the deeper it drafts.
    learnt: Vec<Learnt>,
    /// Of each forward of a step; there are no more.
    worth: Vec<Worth>,
    /// Tokens a second of the whole step over the last steps; none before the first.
    rate: f64,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("DraftModel");
        f.field("learnt", &self.learnt).field("worth", &self.worth).field("rate", &self.rate).finish_non_exhaustive()
    }
}

/// A head over a draft model's features, and the scale and shift of the log odds that it corrects.
struct AcceptanceHead {
    engine: Box<dyn Engine>,
    scale: [f32; 2],
}

/// How far the model is to be believed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Learnt {
    trust: f32,
    /// Logarithm of the exponent of the model's probabilities.
    log_sharpness: f32,
}

impl Learnt {
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

/// What a forward of a step is worth, by its place among them.
#[derive(Debug, Clone, Copy, Default)]
struct Worth {
    /// Sums over the last forwards: the expected tokens that they gained, and the path probabilities of the nodes that
    /// they read. None before the first.
    gain: f64,
    reached: f64,
    /// Steps since the last one, and after how many it is tried again.
    idle: u32,
    wait: u32,
}

/// What the draft model has of one sequence.
#[derive(Debug)]
pub(super) struct Reader {
    slot: Slot,
    /// That of the acceptance head, if there is one.
    judged_slot: Option<Slot>,
    /// Tokens of the sequence that it has not cached.
    unread: Vec<Token>,
    /// If it reads features: those of the tokens before the first of `unread`, as far as the target has told them.
    features: Vec<f32>,
    pub(super) refined: Refined,
    /// Whether that is of this step.
    pub(super) is_current: bool,
    /// Of each token emitted in the last step that was in the tree: the depth of the node before it, and the
    /// probabilities that the other sources and the model gave it.
    opinions: Vec<(usize, (f32, f32))>,
    /// Of each emitted token after a node that the model read: the node's depth, and the slope of the token's log
    /// probability by the sharpness.
    slopes: Vec<(usize, f32)>,
}

impl Reader {
    /// Takes over the target's features of tokens that it has cached, one after the other.
    pub(super) fn computed(&mut self, feature: &[f32]) {
        self.features.extend_from_slice(feature);
    }

    /// Takes note of tokens that the sequence has emitted, and, if they were to follow the refined tree's root, of who
    /// foresaw them.
    pub(super) fn emitted(&mut self, tokens: &[Token]) {
        self.unread.extend(tokens);
        let (tree, mut node) = (self.refined.tree(), 0);
        for (depth, token) in tokens.iter().enumerate().filter(|_| self.is_current) {
            self.slopes.extend(self.refined.slope(node, *token).map(|slope| (depth, slope)));
            let Some(child) = tree.children(node).find(|&child| tree.tokens()[child] == *token) else {
                return;
            };
            self.opinions.extend(self.refined.opinions(child).map(|opinions| (depth, opinions)));
            node = child;
        }
    }
}

/// One sequence's part of a forward.
struct Reading {
    /// Its place among the readers.
    reader: usize,
    /// Tokens of `unread` that become cached, and whether none is left then: the last one is the root.
    chunk: usize,
    is_whole: bool,
    /// The drafted nodes behind them.
    nodes: Vec<usize>,
    tokens: Vec<Token>,
    parents: Vec<u32>,
    /// The features before the tokens, if the model reads any.
    before: Vec<f32>,
    /// Path probabilities of the nodes that are read for the first time, the root's among them: that of the text coming
    /// to where something is asked.
    reached: f32,
}

impl DraftModel {
    /// A draft model that is given at most `forwards` forwards per step; with `cost` only those that pay.
    pub fn new(mut engine: Box<dyn Engine>, forwards: usize, cost: Option<StepCost>) -> Self {
        if engine.info().reads_features {
            engine.keep_features();
        }
        // Heads have said all after one forward.
        let (forwards, depths) = match (engine.info().heads, engine.info().reads_features) {
            (Some(heads), _) => (1, heads),
            (None, true) => (forwards, forwards),
            (None, false) => (forwards, 1),
        };
        let (worth, learnt) = (vec![Worth::default(); forwards], vec![Learnt::NOTHING; depths]);
        Self { engine, acceptance_head: None, cost, learnt, worth, rate: 0.0 }
    }

    /// The same with an acceptance head over its features, which corrects the log odds of its probabilities, scaled by
    /// the first and shifted by the second of these numbers.
    #[must_use]
    pub fn with_acceptance_head(mut self, engine: Box<dyn Engine>, scale: [f32; 2]) -> Self {
        self.engine.keep_features();
        self.acceptance_head = Some(AcceptanceHead { engine, scale });
        self
    }

    /// What is learnt of nodes at this depth.
    fn learnt(&mut self, depth: usize) -> Option<&mut Learnt> {
        let last = self.learnt.len().checked_sub(1)?;
        self.learnt.get_mut(depth.min(last))
    }

    /// How what it says after nodes at this depth is to be taken.
    fn calibration(&self, depth: usize) -> Calibration {
        let learnt = self.learnt.get(depth).or(self.learnt.last()).copied();
        learnt.unwrap_or(Learnt::NOTHING).calibration()
    }

    /// Whether it reads the target's features, which are to be told then ([`Reader::computed`]).
    pub(super) fn reads_features(&self) -> bool {
        self.engine.info().reads_features
    }

    /// A reader of a sequence with this prompt, of which the target has cached so many tokens, that may grow to
    /// `capacity` tokens and drafted nodes; none where the model has no room or no such token.
    pub(super) fn open(&mut self, prompt: &[Token], cached: usize, capacity: usize) -> Option<Reader> {
        let capacity = capacity.min(self.engine.info().max_positions);
        let slot = self.engine.open(capacity).ok()?;
        let judged_slot = self.acceptance_head.as_mut().and_then(|head| head.engine.open(capacity).ok());
        // The first feature that the target is going to tell is that of its first token, and comes before the second.
        // Where a prefix is shared, the layer's context begins behind it.
        let first = if self.reads_features() { cached + 1 } else { 0 };
        Some(Reader {
            slot,
            judged_slot,
            unread: prompt[first..].to_vec(),
            features: Vec::new(),
            refined: Refined::default(),
            is_current: false,
            opinions: Vec::new(),
            slopes: Vec::new(),
        })
    }

    /// Gives back a reader's cache.
    pub(super) fn close(&mut self, reader: &Reader) {
        self.engine.close(reader.slot);
        if let (Some(head), Some(slot)) = (&mut self.acceptance_head, reader.judged_slot) {
            head.engine.close(slot);
        }
    }

    /// Whether the reader may read this tree: there is room for it, and the model knows the tokens.
    pub(super) fn can_read(&self, reader: &Reader, nodes: usize) -> bool {
        let info = self.engine.info();
        let length = self.engine.cached(reader.slot) + reader.unread.len() + nodes;
        let has_features = reader.features.len() == reader.unread.len() * info.hidden_size;
        length <= info.max_positions
            && (!info.reads_features || (has_features && !reader.unread.is_empty()))
            && reader.unread.iter().all(|&token| (token as usize) < info.vocab_size)
    }

    /// Refines the trees of all readers, of which each may have so many nodes, in forwards of at most about
    /// `step_tokens` tokens.
    ///
    /// # Errors
    /// The engine's; the readers are of no use then.
    pub(super) fn refine(
        &mut self,
        readers: &mut [(&mut Reader, usize)],
        step_tokens: usize,
        terms: Terms,
    ) -> Result<(), EngineError> {
        for place in 0..self.worth.len() {
            let readings = self.readings(readers, step_tokens, terms.end_of_text);
            let load = self.load(readers, &readings);
            let reached = readings.iter().map(|reading| f64::from(reading.reached)).sum();
            if readings.is_empty() || !self.pays(place, load, reached) {
                break;
            }
            let start = Instant::now();
            let mut gain = 0.0;
            let scores = self.forward(readers, &readings)?;
            self.judge_nodes(readers, &readings, &scores)?;
            for (reading, scores) in readings.iter().zip(&scores) {
                let (reader, max_nodes) = &mut readers[reading.reader];
                self.engine.commit(reader.slot, &(0..reading.chunk).collect::<Vec<_>>())?;
                reader.unread.drain(..reading.chunk);
                reader.features.drain(..reading.chunk_features());
                if reading.is_whole {
                    let terms = Terms { max_nodes: *max_nodes, ..terms };
                    gain += f64::from(self.grow(reading, &mut reader.refined, scores, terms));
                }
            }
            let tokens: usize = readings.iter().map(|reading| reading.tokens.len()).sum();
            let seconds = (tokens == load.tokens).then(|| start.elapsed().as_secs_f64());
            self.learn(place, (gain, reached), (load, seconds));
        }
        Ok(())
    }

    /// Grows the tree from what one forward says: of one that reads tokens of all nodes that it was given, of heads of
    /// every depth, one after the other. Returns what that gains, in tokens.
    fn grow(&self, reading: &Reading, refined: &mut Refined, scores: &Scores, terms: Terms) -> f32 {
        for (node, at) in reading.scored() {
            let calibration = self.calibration(refined.tree().depths()[node] as usize);
            refined.read(node, scores.ahead(at, 0), calibration, scores.feature(at));
        }
        let mut gain = refined.grow(terms);
        for depth in 1..self.engine.info().heads.unwrap_or(1) {
            let candidates = scores.ahead(reading.chunk - 1, depth);
            for node in refined.unread_at(depth, terms.end_of_text) {
                refined.read(node, candidates, self.calibration(depth), &[]);
            }
            gain += refined.grow(terms);
        }
        gain
    }

    /// What is to be read: unread tokens, and behind the last of them the nodes.
    fn readings(&self, readers: &[(&mut Reader, usize)], step_tokens: usize, end_of_text: Token) -> Vec<Reading> {
        let mut room = step_tokens.max(1);
        let mut readings = Vec::new();
        for (at, (reader, _)) in readers.iter().enumerate() {
            let chunk = reader.unread.len().min(room);
            let is_whole = chunk == reader.unread.len();
            let nodes = match is_whole {
                false => Vec::new(),
                true if self.reads_features() => reader.refined.to_read_next(end_of_text),
                true => reader.refined.to_read(end_of_text),
            };
            room -= chunk;
            if chunk + nodes.len() > 0 {
                let mut reading = Reading::new((at, is_whole), &reader.unread[..chunk], &reader.refined, nodes);
                if self.reads_features() {
                    reading.add_features(reader, self.engine.info().hidden_size);
                }
                readings.push(reading);
            }
        }
        readings
    }

    /// The work of reading, but for prompts: these are read once, whatever follows.
    fn load(&self, readers: &[(&mut Reader, usize)], readings: &[Reading]) -> StepLoad {
        readings.iter().fold(StepLoad::default(), |load, reading| {
            let cached = self.engine.cached(readers[reading.reader].0.slot);
            let tokens = if cached == 0 { reading.nodes.len() + 1 } else { reading.tokens.len() };
            load.with(tokens, cached)
        })
    }

    fn forward(&mut self, readers: &[(&mut Reader, usize)], readings: &[Reading]) -> Result<Vec<Scores>, EngineError> {
        let segments = readings.iter().map(|reading| Segment {
            slot: readers[reading.reader].0.slot,
            tokens: &reading.tokens,
            parents: &reading.parents,
            // Where more is left to be read than the chunk, nothing is asked.
            scored_from: if reading.is_whole { reading.chunk.saturating_sub(1) } else { reading.chunk },
            before: &reading.before,
            ..Segment::default()
        });
        let is_drawn = readers.iter().any(|(reader, _)| reader.refined.is_drawn());
        self.engine.step(&segments.collect::<Vec<_>>(), if is_drawn { DRAWN_CANDIDATES } else { CANDIDATES })
    }

    /// Lets the acceptance head judge the nodes that were read, if there is one.
    fn judge_nodes(
        &mut self,
        readers: &mut [(&mut Reader, usize)],
        readings: &[Reading],
        scores: &[Scores],
    ) -> Result<(), EngineError> {
        let Some(AcceptanceHead { engine, scale: [scale, shift] }) = &mut self.acceptance_head else {
            return Ok(());
        };
        let with_nodes = readings.iter().zip(scores).filter(|(reading, _)| !reading.nodes.is_empty());
        let judged: Vec<Judged<'_>> = with_nodes
            .filter_map(|(reading, scores)| Some(Judged::new(reading, scores, readers[reading.reader].0.judged_slot?)))
            .collect();
        let segments: Vec<Segment<'_>> = judged.iter().map(Judged::segment).collect();
        let scores = engine.step(&segments, 2)?;
        for (judged, scores) in judged.iter().zip(&scores) {
            engine.commit(judged.slot, &[])?;
            let refined = &mut readers[judged.reading.reader].0.refined;
            for (at, &node) in judged.reading.nodes.iter().enumerate() {
                let log = |token| scores.top(at).iter().find(|found| found.token == token).map(|f| f.log_probability);
                let odds = log(ACCEPTED).zip(log(REJECTED)).map_or(0.0, |(accepted, rejected)| accepted - rejected);
                refined.judge(node, Verdict { scale: *scale, shift: *shift + odds });
            }
        }
        Ok(())
    }

    /// Whether one more forward of this load, which reads nodes of so much probability, is worth its time.
    fn pays(&mut self, place: usize, load: StepLoad, reached: f64) -> bool {
        let (Some(cost), worth) = (&self.cost, &mut self.worth[place]) else {
            return true;
        };
        let price = self.rate * cost.seconds(load);
        if worth.reached == 0.0 || worth.gain / worth.reached * reached > price {
            (worth.idle, worth.wait) = (0, *RETRY_STEPS.start());
            return true;
        }
        worth.idle += 1;
        let tries = worth.idle > worth.wait.max(*RETRY_STEPS.start());
        if tries {
            (worth.idle, worth.wait) = (0, (2 * worth.wait).clamp(2 * RETRY_STEPS.start(), *RETRY_STEPS.end()));
        }
        tries
    }

    /// What one more node of a target's step of this load costs, in tokens.
    pub(super) fn price(&self, target: &StepCost, load: StepLoad) -> f32 {
        let more = load.with(PRICED_NODES, 0);
        let seconds = (target.seconds(more) - target.seconds(load)) / PRICED_NODES as f64;
        #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough")]
        let price = (self.rate * seconds) as f32;
        price
    }

    /// Learns from a forward: what it gained of how much that it read, and its seconds unless it also read prompts.
    fn learn(&mut self, place: usize, (gain, reached): (f64, f64), (load, seconds): (StepLoad, Option<f64>)) {
        let worth = &mut self.worth[place];
        worth.gain += gain - RATE * worth.gain;
        worth.reached += reached - RATE * worth.reached;
        if let (Some(cost), Some(seconds)) = (&mut self.cost, seconds) {
            cost.learn(load, seconds);
        }
    }

    /// Learns from a step: the tokens that it emitted and its seconds.
    pub(super) fn stepped(&mut self, tokens: usize, seconds: f64) {
        let rate = tokens as f64 / seconds;
        self.rate += (rate - self.rate) * if self.rate == 0.0 { 1.0 } else { RATE };
    }

    /// Learns from the tokens that a sequence has emitted how sharp the model's probabilities are, by ascent of their
    /// log likelihood, and whom to trust: a step of online expectation-maximisation for the weight of a mixture.
    pub(super) fn learn_from(&mut self, reader: &mut Reader) {
        let is_drawn = reader.refined.is_drawn();
        for (depth, slope) in reader.slopes.drain(..) {
            self.learnt(depth).into_iter().for_each(|learnt| learnt.sharpen(slope, is_drawn));
        }
        for (depth, opinions) in reader.opinions.drain(..) {
            self.learnt(depth).into_iter().for_each(|learnt| learnt.weigh(opinions));
        }
    }
}

impl Reading {
    fn new((reader, is_whole): (usize, bool), unread: &[Token], refined: &Refined, nodes: Vec<usize>) -> Self {
        let tree = refined.tree();
        let chunk = unread.len();
        let tokens = unread.iter().copied().chain(nodes.iter().map(|&node| tree.tokens()[node])).collect();
        let root = chunk.checked_sub(1);
        // The nodes are ascending and have their ancestors among them.
        let place = |node: u32| match nodes.binary_search(&(node as usize)) {
            Ok(at) => Some(chunk + at),
            Err(_) => root,
        };
        let of = |&node: &usize| place(tree.parents()[node]).map_or(ROOT_PARENT, index_u32);
        let parents = laser_decode::chain_parents(chunk).chain(nodes.iter().map(of)).collect();
        let new = nodes.iter().filter(|&&node| refined.is_unread(node)).map(|&node| tree.probabilities()[node]);
        let reached = root.map_or(0.0, |_| 1.0) + new.sum::<f32>();
        Self { reader, chunk, is_whole, nodes, tokens, parents, before: Vec::new(), reached }
    }

    /// The features before its tokens: the target's before the chunk, the model's own before the nodes.
    fn add_features(&mut self, reader: &Reader, hidden_size: usize) {
        self.before.extend_from_slice(&reader.features[..self.chunk * hidden_size]);
        let before = self.nodes.iter().filter_map(|&node| reader.refined.feature_before(node));
        before.for_each(|feature| self.before.extend_from_slice(feature));
    }

    /// Numbers of the features before the chunk.
    fn chunk_features(&self) -> usize {
        self.chunk * self.before.len() / self.tokens.len()
    }

    /// Nodes of the tree that are scored, and where in the segment they are.
    fn scored(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let root = self.chunk.checked_sub(1).map(|root| (0, root));
        root.into_iter().chain(self.nodes.iter().copied().zip(self.chunk..))
    }
}

/// The drafted nodes of a reading as the acceptance head gets them: it looks at their features alone.
struct Judged<'a> {
    reading: &'a Reading,
    slot: Slot,
    tokens: Vec<Token>,
    parents: Vec<u32>,
    features: Vec<f32>,
}

impl<'a> Judged<'a> {
    fn new(reading: &'a Reading, scores: &Scores, slot: Slot) -> Self {
        let nodes = reading.nodes.len();
        let features = (reading.chunk..).take(nodes).flat_map(|at| scores.feature(at)).copied().collect();
        Self { reading, slot, tokens: vec![ACCEPTED; nodes], parents: vec![ROOT_PARENT; nodes], features }
    }

    fn segment(&self) -> Segment<'_> {
        let Self { slot, tokens, parents, features, .. } = self;
        Segment { slot: *slot, tokens, parents, scored_from: 0, before: features, ..Segment::default() }
    }
}

/// Node indexes fit u32: a step's tokens are bounded far below.
pub(super) fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(ROOT_PARENT)
}

#[cfg(test)]
mod tests {
    use laser_engine::{FakeEngine, FakeOptions};

    use super::*;

    fn model() -> DraftModel {
        let cost = StepCost::new(vec![(1.0, 1e-3), (64.0, 1e-3)], 0.0);
        let mut model = DraftModel::new(Box::new(FakeEngine::new(FakeOptions::default())), 2, Some(cost));
        // A thousand tokens a second: a forward of a millisecond costs a token.
        model.stepped(5, 5e-3);
        model
    }

    const LOAD: StepLoad = StepLoad { tokens: 8, pairs: 0 };

    #[test]
    fn a_forward_is_run_if_it_gains_more_than_its_time_and_tried_again_later() {
        let mut model = model();
        for _ in 0..100 {
            assert!(model.pays(0, LOAD, 2.0));
            model.learn(0, (1.2, 2.0), (LOAD, Some(1e-3)));
        }
        // 0.6 tokens for each of two sequences pay for one token; for one sequence they do not, nor for two that the
        // text comes to in half of all cases.
        assert!(model.pays(0, LOAD, 1.7) && !model.pays(0, LOAD, 1.6));
        assert!(!model.pays(0, LOAD, 1.0));
        // After 32 steps, then 64, 128 and so on.
        let tried: Vec<usize> = (2..1001).filter(|_| model.pays(0, LOAD, 1.0)).collect();
        assert_eq!(tried, [32, 97, 226, 483, 996]);
        // What is learned of one forward says nothing of the next.
        assert!(model.pays(1, LOAD, 1.0));
    }

    #[test]
    fn without_costs_every_forward_is_run() {
        let mut model = DraftModel { cost: None, ..model() };
        model.learn(0, (0.0, 1.0), (LOAD, None));
        assert!((0..50).all(|_| model.pays(0, LOAD, 1.0)));
    }

    #[test]
    fn trust_goes_to_who_is_right() {
        for (opinions, low, high) in [((0.9, 0.1), 0.0, 0.05), ((0.1, 0.9), 0.95, 1.0), ((0.3, 0.3), 0.5, 0.5)] {
            let mut model = model();
            let mut reader = model.open(&[1], 0, 8).unwrap();
            reader.opinions = vec![(3, opinions); 2000];
            model.learn_from(&mut reader);
            let trust = model.calibration(0).trust;
            assert!((low..=high).contains(&trust), "{opinions:?}: {trust}");
            assert!(reader.opinions.is_empty());
        }
    }
}
