//! A draft model: a second, smaller engine that reads the trees of a step and extends them ([`Refined`]).
//!
//! It has a cache of its own per sequence, which holds what the sequence has committed. One forward reads the trees of
//! all sequences together with the tokens that they emitted since; more forwards extend what is new in the trees.
//!
//! A draft model that reads features, as EAGLE's layer does, gets the target's for what is committed. For a drafted
//! node it needs the feature that it gave the node's parent itself, so each forward reads one level. Medusa's heads
//! need no more than the feature before the root: one forward tells what follows at every depth, whatever the path. How
//! probable that is they say themselves, or it is measured by the rank of their candidates ([`Accuracies`]).
//!
//! [`Accuracies`]: laser_decode::Accuracies
//!
//! Under a budget each forward has to pay: the tokens that it is expected to gain must exceed those that its time gives
//! at the recent rate. It reads those nodes alone that are worth their part of its time, since most of a tree is
//! improbable, and as many texts as are worth the most. A node that is read can only gain if the text comes to it, so
//! what is expected is the sum of the path probabilities of the nodes that are to be read, times what the last forwards
//! of its place gained per unit of that, and times what came of such expectations of late: where a node has to be
//! nearly certain to pay, as in large batches on a CPU, estimates that are only a little too high promise a gain where
//! there is a loss. This is the stopping rule of SpecDec++ (arXiv:2405.19715, theorem 3.1: go on while the chance that
//! all is accepted is high enough for the cost of one more), stated for trees and batches. Its trained head is one
//! estimator of that chance: where there is one, it judges every node that the model reads.
//!
//! To read a text at all the model has to read its prompt first, which costs as much as many forwards. So what forwards
//! gain is found out on two texts, whatever the batch, then on twice as many after each few forwards. Any other text is
//! read only if what it is expected to gain pays for its share of the prompt, too: a prompt is paid for by the steps
//! that its text may still take. Its cache follows the target's forks: what prompts begin with is read once, and a
//! sample begins with what another one has.

mod learnt;
mod reading;
mod source;
mod worth;

use std::collections::BTreeMap;
use std::time::Instant;

use laser_decode::{ROOT_PARENT, Refined, TargetScores as _, Terms, Token, Verdict, chain_parents};
use laser_engine::{ACCEPTED, Engine, EngineError, EngineInfo, REJECTED, Scores, Segment, Slot};

use learnt::{Learnt, Outcome};
use reading::{Judged, Reading};
use worth::{Promise, RATE, TRIAL_TEXTS, Worth};

use super::source::{Draft, DraftSource};
use crate::cost::{StepCost, StepLoad};

/// The draft model's candidates after a node: a tree of 64 nodes rarely has more children of one.
const CANDIDATES: usize = 8;

/// The same of texts that are drawn: the noise may favour any of them.
const DRAWN_CANDIDATES: usize = 32;

/// Nodes over whose cost the price of one is averaged: kernels work on rows in tiles.
const PRICED_NODES: usize = 16;

/// A second model that drafts.
pub struct DraftModel {
    engine: Box<dyn Engine>,
    /// Judges what the model reads, from its features.
    acceptance_head: Option<AcceptanceHead>,
    /// What forwards cost; without it every step takes all of them.
    cost: Option<StepCost>,
    /// The path probability below which it drafts nothing.
    min_probability: f32,
    learnt: Learnt,
    /// Of each forward of a step; there are no more.
    worth: Vec<Worth>,
    /// What refined trees promised, by the binary logarithm of how many texts there were.
    promises: Vec<Promise>,
    /// What a node of the last step cost, in tokens, and how many texts there were.
    price: f32,
    texts: usize,
    /// Tokens a second of the whole step over the last steps; none before the first.
    rate: f64,
    /// Tokens that a text gets per step, over the last steps; none before the first.
    pace: f64,
    /// What prompts begin with, and what it has of that.
    prefixes: Vec<(Vec<Token>, Reader)>,
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

/// What the draft model has of one sequence.
#[derive(Debug)]
struct Reader {
    slot: Slot,
    /// That of the acceptance head, if there is one.
    judged_slot: Option<Slot>,
    /// Tokens that the text has before its context begins: where it reads features, those of which it was not told.
    skipped: usize,
    /// Tokens of the sequence that it has not cached, and how many of these the last step emitted.
    unread: Vec<Token>,
    recent: usize,
    /// If it reads features: those of the tokens before the first of `unread`, as far as the target has told them.
    features: Vec<f32>,
    refined: Refined,
    /// Whether that is of this step.
    is_current: bool,
    /// What it was to gain, if the model has read it.
    promised: Option<f32>,
    /// Of each token emitted in the last step that was in the tree: the depth of the node before it, and the
    /// probabilities that the other sources and the model gave it.
    opinions: Vec<(usize, (f32, f32))>,
    /// Of each emitted token after a node that the model read.
    outcomes: Vec<Outcome>,
}

impl Reader {
    /// Path probabilities of those of the nodes that are read for the first time, with the root's if tokens are left to
    /// read: that of the text coming to where something is asked.
    fn reached(&self, nodes: &[usize]) -> f32 {
        let new = nodes.iter().filter(|&&node| self.refined.is_unread(node));
        let root = if self.unread.is_empty() { 0.0 } else { 1.0 };
        root + new.map(|&node| self.refined.tree().probabilities()[node]).sum::<f32>()
    }

    /// Takes over the target's features of tokens that it has cached, one after the other.
    fn computed(&mut self, feature: &[f32]) {
        self.features.extend_from_slice(feature);
    }

    /// Takes note of tokens that the sequence has emitted, and, if they were to follow the refined tree's root, of who
    /// foresaw them.
    fn emitted(&mut self, tokens: &[Token]) {
        self.unread.extend(tokens);
        self.recent = tokens.len();
        let (tree, mut node) = (self.refined.tree(), 0);
        for (depth, token) in tokens.iter().enumerate().filter(|_| self.is_current) {
            let outcome = self.refined.slope(node, *token).zip(self.refined.rank(node, *token));
            self.outcomes.extend(outcome.map(|(slope, rank)| Outcome { depth, slope, rank }));
            let Some(child) = tree.children(node).find(|&child| tree.tokens()[child] == *token) else {
                return;
            };
            self.opinions.extend(self.refined.opinions(child).map(|opinions| (depth, opinions)));
            node = child;
        }
    }
}

/// What a reader begins with: so many tokens of another one's cache, which may have skipped some before, and the
/// features behind them.
struct Origin {
    slot: Slot,
    skipped: usize,
    kept: usize,
    features: Vec<f32>,
}

/// The nodes of a tree that a forward is to read.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// Nothing follows this token.
    end_of_text: Token,
    /// The least path probability.
    min_probability: f32,
}

/// A sequence that may be read in a step.
struct Readable<'a> {
    reader: &'a mut Reader,
    /// Nodes that may be drafted for it.
    nodes: usize,
    /// Tokens that its text may still get.
    left: usize,
}

impl<'a> Readable<'a> {
    /// Begins with the tree of a draft.
    fn begin(reader: &'a mut Reader, draft: &Draft) -> Self {
        reader.is_current = true;
        reader.refined.begin(&draft.tree, draft.noise);
        Readable { reader, nodes: draft.nodes, left: draft.left }
    }
}

impl Readable<'_> {
    /// Tokens to read before it is where a sequence is that was read in the last step: its prompt, as a rule.
    fn backlog(&self) -> usize {
        self.reader.unread.len().saturating_sub(self.reader.recent)
    }

    /// Tokens of a forward that reads so many nodes, of the backlog a share for each of the steps that the text may
    /// still take at this pace.
    fn tokens_per_step(&self, nodes: usize, pace: f64) -> usize {
        let steps = (self.left as f64 / pace.max(1.0)).max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the backlog")]
        let share = (self.backlog() as f64 / steps).ceil() as usize;
        self.reader.unread.len() - self.backlog() + share + nodes
    }
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
        let (worth, learnt) = (vec![Worth::default(); forwards], Learnt::new(depths));
        Self {
            engine,
            acceptance_head: None,
            cost,
            min_probability: 0.0,
            learnt,
            worth,
            promises: Vec::new(),
            price: 0.0,
            texts: 0,
            rate: 0.0,
            pace: 0.0,
            prefixes: Vec::new(),
        }
    }

    /// The same with trees that follow how often the candidates of each of Medusa's heads have been right, by rank, and
    /// not the heads' own probabilities: the tree of Medusa's paper. Without effect on other models.
    #[must_use]
    pub fn with_measured_tree(mut self) -> Self {
        if let Some(heads) = self.engine.info().heads {
            self.learnt.measure(heads, DRAWN_CANDIDATES);
        }
        self
    }

    /// The same with a threshold h at which drafts stop, if there is one: a node is drafted as long as the probability
    /// that the target rejects some token of its path, 1 − Π p, is at most h, and where no such node is new nothing
    /// more is read (SpecDec++, arXiv:2405.19715, section 3.1, for the paths of a tree).
    #[must_use]
    pub fn with_stop_threshold(mut self, threshold: Option<f32>) -> Self {
        self.min_probability = threshold.map_or(0.0, |threshold| 1.0 - threshold);
        self
    }

    /// The same with an acceptance head over its features, which corrects the log odds of its probabilities, scaled by
    /// the first and shifted by the second of these numbers.
    #[must_use]
    pub fn with_acceptance_head(mut self, engine: Box<dyn Engine>, scale: [f32; 2]) -> Self {
        self.engine.keep_features();
        self.acceptance_head = Some(AcceptanceHead { engine, scale });
        self
    }

    /// The source that drafts with it.
    #[must_use]
    pub fn into_source(self) -> Box<dyn DraftSource> {
        Box::new(source::ModelSource { model: self, readers: BTreeMap::new() })
    }

    /// Whether it reads the target's features, which are to be told then ([`Reader::computed`]).
    fn reads_features(&self) -> bool {
        self.engine.info().reads_features
    }

    /// A reader of a sequence with this prompt that may grow to `capacity` tokens and drafted nodes; none where the
    /// model has no room. The target has cached so many tokens of it, which it computed for `sample`, another text of
    /// this prompt, or else for a prefix: the reader begins with what the model has of these.
    fn open(&mut self, prompt: &[Token], cached: usize, sample: Option<&Reader>, capacity: usize) -> Option<Reader> {
        let capacity = capacity.min(self.engine.info().max_positions);
        let origin = self.origin(prompt, cached, sample);
        let slot = match &origin {
            Some(origin) => self.engine.fork(origin.slot, origin.kept, capacity).ok()?,
            None => self.engine.open(capacity).ok()?,
        };
        let judged_slot = self.acceptance_head.as_mut().and_then(|head| head.engine.open(capacity).ok());
        // Where the target has computed the beginning for a text of which nothing is known, its features will never be.
        let (skipped, kept, features) = match origin {
            Some(origin) => (origin.skipped, origin.kept, origin.features),
            None if self.reads_features() => (cached, 0, Vec::new()),
            None => (0, 0, Vec::new()),
        };
        // The first feature is that of the first token, and comes before the second.
        let first = skipped + kept + usize::from(self.reads_features());
        Some(Reader {
            slot,
            judged_slot,
            skipped,
            unread: prompt.get(first..).unwrap_or_default().to_vec(),
            recent: 0,
            features,
            refined: Refined::default(),
            is_current: false,
            promised: None,
            opinions: Vec::new(),
            outcomes: Vec::new(),
        })
    }

    /// What a reader begins with.
    fn origin(&self, prompt: &[Token], cached: usize, sample: Option<&Reader>) -> Option<Origin> {
        let is_of = |(prefix, _): &&(Vec<Token>, Reader)| prefix.len() == cached && prompt.starts_with(prefix);
        let reader = sample.or_else(|| self.prefixes.iter().find(is_of).map(|(_, reader)| reader))?;
        let (slot, skipped) = (reader.slot, reader.skipped);
        let known = cached.checked_sub(skipped)?;
        let kept = self.engine.cached(slot).min(known);
        let features = if self.reads_features() { (known - kept) * self.engine.info().hidden_size } else { 0 };
        Some(Origin { slot, skipped, kept, features: reader.features.get(..features)?.to_vec() })
    }

    /// Reads what prompts begin with, in forwards of at most `step_tokens` tokens. `features` are the target's of all
    /// of these tokens, if it reads any.
    ///
    /// # Errors
    /// The engine's.
    fn share_prefix(&mut self, prefix: &[Token], features: &[f32], step_tokens: usize) -> Result<(), EngineError> {
        let &EngineInfo { max_positions, vocab_size, hidden_size, .. } = self.engine.info();
        if prefix.len() > max_positions || prefix.iter().any(|&token| token as usize >= vocab_size) {
            return Ok(());
        }
        let Some(reader) = self.open(prefix, 0, None, prefix.len()) else {
            return Ok(());
        };
        let width = if self.reads_features() { hidden_size } else { 0 };
        // Known to `forget_prefix` before a forward, which may panic.
        self.prefixes.push((prefix.to_vec(), reader));
        let Some((_, reader)) = self.prefixes.last_mut() else { return Ok(()) };
        if width > 0 {
            reader.computed(features);
        }
        while !reader.unread.is_empty() {
            let chunk = reader.unread.len().min(step_tokens.max(1));
            let segment = Segment {
                slot: reader.slot,
                tokens: &reader.unread[..chunk],
                parents: &chain_parents(chunk).collect::<Vec<_>>(),
                scored_from: chunk,
                before: &reader.features[..chunk * width],
                ..Segment::default()
            };
            self.engine.step(&[segment], CANDIDATES)?;
            self.engine.commit(reader.slot, &(0..chunk).collect::<Vec<_>>())?;
            reader.unread.drain(..chunk);
            reader.features.drain(..chunk * width);
        }
        Ok(())
    }

    /// Gives back the cache of what prompts began with.
    fn forget_prefix(&mut self, prefix: &[Token]) {
        let at = self.prefixes.iter().position(|(tokens, _)| tokens == prefix);
        if let Some((_, reader)) = at.map(|at| self.prefixes.swap_remove(at)) {
            self.close(&reader);
        }
    }

    /// Gives back a reader's cache.
    fn close(&mut self, reader: &Reader) {
        self.engine.close(reader.slot);
        if let (Some(head), Some(slot)) = (&mut self.acceptance_head, reader.judged_slot) {
            head.engine.close(slot);
        }
    }

    /// Whether the reader may read this tree: there is room for it, and the model knows the tokens.
    fn can_read(&self, reader: &Reader, nodes: usize) -> bool {
        let info = self.engine.info();
        let length = self.engine.cached(reader.slot) + reader.unread.len() + nodes;
        let has_features = reader.features.len() == reader.unread.len() * info.hidden_size;
        length <= info.max_positions
            && (!info.reads_features || (has_features && !reader.unread.is_empty()))
            && reader.unread.iter().all(|&token| (token as usize) < info.vocab_size)
    }

    /// Refines the trees of the readers for which that pays, in forwards of at most about `step_tokens` tokens.
    ///
    /// # Errors
    /// The engine's; the readers are of no use then.
    fn refine(&mut self, readers: &mut [Readable<'_>], step_tokens: usize, terms: Terms) -> Result<(), EngineError> {
        let terms = Terms { min_probability: terms.min_probability.max(self.min_probability), ..terms };
        (self.price, self.texts) = (terms.price, readers.len());
        let mut taken: Vec<usize> = (0..readers.len()).collect();
        for place in 0..self.worth.len() {
            let wanted = self.wanted(place, readers, &taken, terms.end_of_text);
            taken = self.paying(place, readers, &taken, wanted);
            let readings = self.readings(readers, &taken, step_tokens, wanted);
            if readings.is_empty() {
                break;
            }
            let load = self.load(readers, &readings);
            let caught_up = readings.iter().all(|reading| readers[reading.reader].backlog() == 0);
            let start = Instant::now();
            let (mut gain, mut reached) = (0.0, 0.0);
            let scores = self.forward(readers, &readings)?;
            self.judge_nodes(readers, &readings, &scores)?;
            for (reading, scores) in readings.iter().zip(&scores) {
                let Readable { reader, nodes, .. } = &mut readers[reading.reader];
                self.engine.commit(reader.slot, &(0..reading.chunk).collect::<Vec<_>>())?;
                reader.unread.drain(..reading.chunk);
                reader.features.drain(..reading.chunk_features());
                if reading.is_whole {
                    let terms = Terms { max_nodes: *nodes, ..terms };
                    gain += f64::from(self.grow(reading, &mut reader.refined, scores, terms));
                    reached += f64::from(reading.reached);
                }
            }
            if reached > 0.0 {
                let seconds = caught_up.then(|| start.elapsed().as_secs_f64());
                self.learn(place, (gain, reached), (load, seconds));
            }
        }
        for Readable { reader, .. } in readers {
            let refined = &reader.refined;
            reader.promised = (!refined.tree().is_empty() && !refined.is_unread(0)).then(|| refined.gain(terms));
        }
        Ok(())
    }

    /// The nodes that are worth their part of a forward of this place. What follows a node is worth nothing unless its
    /// own path is above what the target pays for a node, and what the node's path is above that has to gain what it
    /// costs to read. Most of a tree of 64 nodes is less probable, and to read all of it made the third forward of a
    /// text take 0.55 ms in place of 0.12, so that none paid.
    fn wanted(&self, place: usize, readers: &[Readable<'_>], among: &[usize], end_of_text: Token) -> Wanted {
        let Some(cost) = &self.cost else {
            return Wanted { end_of_text, min_probability: 0.0 };
        };
        let load = among.iter().fold(StepLoad::default(), |load, &at| {
            let readable = &readers[at];
            load.with(readable.tokens_per_step(0, self.pace), self.engine.cached(readable.reader.slot))
        });
        #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough")]
        let gain = (self.promise().share() * self.worth[place].rate().unwrap_or(1.0)) as f32;
        Wanted {
            end_of_text,
            min_probability: self.price + self.price_of_node(cost, load) / gain.max(f32::MIN_POSITIVE),
        }
    }

    /// Of these readers those that are to be read in the forward of this place: where its gain is known, as many as
    /// are worth the most over their time, those with the least backlog first; otherwise those that it is tried with.
    fn paying(&mut self, place: usize, readers: &[Readable<'_>], among: &[usize], wanted: Wanted) -> Vec<usize> {
        let Some(cost) = &self.cost else {
            return among.to_vec();
        };
        let mut among: Vec<usize> = among.to_vec();
        among.sort_by_key(|&at| readers[at].backlog());
        let tried = among.len().min(TRIAL_TEXTS);
        let worth = &self.worth[place];
        among.truncate(worth.texts());
        let share = self.promise().share();
        let count = worth.rate().map_or(Some(tried), |gain| {
            let (mut load, mut reached) = (StepLoad::default(), 0.0);
            let (mut best, mut most) = (None, 0.0);
            for (&at, count) in among.iter().zip(1..) {
                let readable = &readers[at];
                let nodes = self.nodes_to_read(readable.reader, wanted);
                load = load
                    .with(readable.tokens_per_step(nodes.len(), self.pace), self.engine.cached(readable.reader.slot));
                reached += f64::from(readable.reader.reached(&nodes));
                let value = share * gain * reached - self.rate * cost.seconds_of_late(load);
                if value > most {
                    (best, most) = (Some(count), value);
                }
            }
            best
        });
        let tries = self.worth[place].tries(count.is_some());
        among.truncate(count.unwrap_or(if tries { tried } else { 0 }));
        among
    }

    /// The nodes of a reader's tree that the next forward reads.
    fn nodes_to_read(&self, reader: &Reader, Wanted { end_of_text, min_probability }: Wanted) -> Vec<usize> {
        if self.reads_features() {
            return reader.refined.to_read_next(end_of_text, min_probability);
        }
        reader.refined.to_read(end_of_text, min_probability)
    }

    /// Grows the tree from what one forward says: of one that reads tokens of all nodes that it was given, of heads of
    /// every depth, one after the other. Returns what that gains, in tokens.
    fn grow(&self, reading: &Reading, refined: &mut Refined, scores: &Scores, terms: Terms) -> f32 {
        for (node, at) in reading.scored() {
            let (candidates, calibration) =
                self.learnt.taken(refined.tree().depths()[node] as usize, scores.ahead(at, 0));
            refined.read(node, &candidates, calibration, scores.feature(at));
        }
        let mut gain = refined.grow(terms);
        for depth in 1..self.engine.info().heads.unwrap_or(1) {
            let (candidates, calibration) = self.learnt.taken(depth, scores.ahead(reading.chunk - 1, depth));
            for node in refined.unread_at(depth, terms.end_of_text) {
                refined.read(node, &candidates, calibration, &[]);
            }
            gain += refined.grow(terms);
        }
        gain
    }

    /// What is to be read of these readers: unread tokens, and behind the last of them the nodes.
    fn readings(&self, readers: &[Readable<'_>], taken: &[usize], step_tokens: usize, wanted: Wanted) -> Vec<Reading> {
        let mut room = step_tokens.max(1);
        let mut readings = Vec::new();
        for &at in taken {
            let reader = &*readers[at].reader;
            let chunk = reader.unread.len().min(room);
            let is_whole = chunk == reader.unread.len();
            let nodes = if is_whole { self.nodes_to_read(reader, wanted) } else { Vec::new() };
            room -= chunk;
            if chunk + nodes.len() > 0 {
                let mut reading = Reading::new((at, is_whole), reader, chunk, nodes);
                if self.reads_features() {
                    reading.add_features(reader, self.engine.info().hidden_size);
                }
                readings.push(reading);
            }
        }
        readings
    }

    fn load(&self, readers: &[Readable<'_>], readings: &[Reading]) -> StepLoad {
        readings.iter().fold(StepLoad::default(), |load, reading| {
            load.with(reading.tokens.len(), self.engine.cached(readers[reading.reader].reader.slot))
        })
    }

    fn forward(&mut self, readers: &[Readable<'_>], readings: &[Reading]) -> Result<Vec<Scores>, EngineError> {
        let segments = readings.iter().map(|reading| Segment {
            slot: readers[reading.reader].reader.slot,
            tokens: &reading.tokens,
            parents: &reading.parents,
            // Where more is left to be read than the chunk, nothing is asked.
            scored_from: if reading.is_whole { reading.chunk.saturating_sub(1) } else { reading.chunk },
            before: &reading.before,
            ..Segment::default()
        });
        let is_drawn = readers.iter().any(|readable| readable.reader.refined.is_drawn());
        self.engine.step(&segments.collect::<Vec<_>>(), if is_drawn { DRAWN_CANDIDATES } else { CANDIDATES })
    }

    /// Lets the acceptance head judge the nodes that were read, if there is one.
    fn judge_nodes(
        &mut self,
        readers: &mut [Readable<'_>],
        readings: &[Reading],
        scores: &[Scores],
    ) -> Result<(), EngineError> {
        let Some(AcceptanceHead { engine, scale: [scale, shift] }) = &mut self.acceptance_head else {
            return Ok(());
        };
        let with_nodes = readings.iter().zip(scores).filter(|(reading, _)| !reading.nodes.is_empty());
        let judged: Vec<Judged<'_>> = with_nodes
            .filter_map(|(reading, scores)| {
                Some(Judged::new(reading, scores, readers[reading.reader].reader.judged_slot?))
            })
            .collect();
        let segments: Vec<Segment<'_>> = judged.iter().map(Judged::segment).collect();
        let scores = engine.step(&segments, 2)?;
        for (judged, scores) in judged.iter().zip(&scores) {
            engine.commit(judged.slot, &[])?;
            let refined = &mut readers[judged.reading.reader].reader.refined;
            for (at, &node) in judged.reading.nodes.iter().enumerate() {
                let log = |token| scores.top(at).iter().find(|found| found.token == token).map(|f| f.log_probability);
                let odds = log(ACCEPTED).zip(log(REJECTED)).map_or(0.0, |(accepted, rejected)| accepted - rejected);
                refined.judge(node, Verdict { scale: *scale, shift: *shift + odds });
            }
        }
        Ok(())
    }

    /// What one more node of a step of this load costs, in tokens.
    fn price_of_node(&self, cost: &StepCost, load: StepLoad) -> f32 {
        let more = load.with(PRICED_NODES, 0);
        let seconds = (cost.seconds_of_late(more) - cost.seconds_of_late(load)) / PRICED_NODES as f64;
        #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough")]
        let price = (self.rate * seconds) as f32;
        price
    }

    /// Learns from a forward: what it gained of how much that it read, and its seconds unless it also read prompts.
    fn learn(&mut self, place: usize, (gain, reached): (f64, f64), (load, seconds): (StepLoad, Option<f64>)) {
        self.worth[place].learn(gain, reached);
        if let (Some(cost), Some(seconds)) = (&mut self.cost, seconds) {
            cost.learn(load, seconds);
        }
    }

    /// Learns from a step: the tokens that it emitted in so many texts, and its seconds.
    fn stepped(&mut self, (tokens, texts): (usize, usize), seconds: f64) {
        let follow = |mean: &mut f64, new: f64| *mean += (new - *mean) * if *mean == 0.0 { 1.0 } else { RATE };
        follow(&mut self.rate, tokens as f64 / seconds);
        if texts > 0 {
            follow(&mut self.pace, tokens as f64 / texts as f64);
        }
    }

    fn promise(&self) -> Promise {
        self.promises.get(self.scale()).copied().unwrap_or_default()
    }

    /// Where the promises of so many texts are.
    fn scale(&self) -> usize {
        self.texts.max(1).ilog2() as usize
    }

    /// Learns from a sequence's drafted nodes and how many of them were accepted what came of its promise.
    fn kept(&mut self, reader: &mut Reader, drafted: usize, accepted: usize) {
        let Some(expected) = reader.promised.take() else { return };
        let scale = self.scale();
        self.promises.resize(self.promises.len().max(scale + 1), Promise::default());
        let kept = accepted as f64 - f64::from(self.price) * drafted as f64;
        self.promises[scale].learn(f64::from(expected), kept, self.texts);
    }

    /// Learns from the tokens that a sequence has emitted what the model's predictions are worth.
    fn learn_from(&mut self, reader: &mut Reader) {
        let is_drawn = reader.refined.is_drawn();
        reader.outcomes.drain(..).for_each(|outcome| self.learnt.hear(outcome, is_drawn));
        reader.opinions.drain(..).for_each(|(depth, opinions)| self.learnt.weigh(depth, opinions));
    }
}

/// Node indexes fit u32: a step's tokens are bounded far below.
pub(super) fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(ROOT_PARENT)
}

#[cfg(test)]
mod tests;
