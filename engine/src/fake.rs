//! A deterministic model without tensors, for tests of scheduling, commit and failure.
//!
//! The next-token distribution is a seeded hash of the last tokens of the path. Inside a *phrase* the last token alone
//! decides, between phrases the last `order` tokens do, so texts repeat phrases the way real ones do and a pool of
//! earlier texts helps. Whether a text ends also depends on the position, or a text that repeats itself would never
//! end. Protocol and capacity are checked as strictly as by the tree engine.

use std::{collections::HashMap, sync::Arc};

use laser_cpu::{Allowed, MaskedRow, Predictions, Tree};
use laser_decode::{Candidate, Prediction, ROOT_PARENT, Token};
use rayon::ThreadPool;

use crate::{
    engine::{Engine, EngineInfo},
    error::EngineError,
    scores::Scores,
    segment::{MaskedNode, Segment, Slot},
    slots::{SlotState, SlotTable, check_features},
};

/// The fake's distribution and injected failures.
#[derive(Debug, Clone, PartialEq)]
pub struct FakeOptions {
    /// Number of token ids.
    pub vocab_size: u32,
    /// Context length.
    pub max_positions: usize,
    /// Another seed is another language.
    pub seed: u64,
    /// Tokens that decide between phrases.
    pub order: usize,
    /// Share of contexts inside a phrase, where the last token alone decides.
    pub phrase_probability: f64,
    /// The end-of-text token.
    pub eos: Token,
    /// Share of contexts whose most probable next token is `eos`.
    pub eos_probability: f64,
    /// The step, counted from 0, that fails.
    pub fail_on_step: Option<u64>,
    /// Every step fails in which a sequence contains this token.
    pub fail_on_token: Option<Token>,
    /// Tokens that open sequences may grow to together.
    pub cache_tokens: usize,
    /// Whether it reads features, as an EAGLE layer does. They must be those that it and the target make: wrong ones
    /// fail the step.
    pub reads_features: bool,
    /// Medusa's heads: they read features, and tell how the text would go on from each node if it were greedy.
    pub heads: Option<usize>,
}

impl Default for FakeOptions {
    /// Texts of about 50 tokens over 1,000 ids, no failures.
    fn default() -> Self {
        Self {
            vocab_size: 1_000,
            max_positions: 4_096,
            seed: 0,
            order: 3,
            phrase_probability: 0.7,
            eos: 1,
            eos_probability: 0.02,
            fail_on_step: None,
            fail_on_token: None,
            cache_tokens: usize::MAX,
            reads_features: false,
            heads: None,
        }
    }
}

/// A feature of the fake is a token and its position.
const FEATURE: usize = 2;

/// An [`Engine`] whose model is a hash function.
#[derive(Debug)]
pub struct FakeEngine {
    options: FakeOptions,
    info: EngineInfo,
    /// The tokens of each slot, then those of its provisional nodes.
    slots: SlotTable<Vec<Token>>,
    /// Steps so far, failed ones included.
    steps: u64,
    keeps_features: bool,
    keeps_logits: bool,
    /// The logits of the last step's scored nodes, if they are kept.
    logits: HashMap<(Slot, usize), Vec<f32>>,
    threads: Option<Arc<ThreadPool>>,
}

impl FakeEngine {
    /// An engine without open slots.
    #[must_use]
    pub fn new(options: FakeOptions) -> Self {
        let info = EngineInfo {
            vocab_size: options.vocab_size as usize,
            max_positions: options.max_positions,
            architecture: "fake".into(),
            parameters: 0,
            forward_parameters: 0,
            dtype: "f32".into(),
            device: "none".into(),
            hidden_size: FEATURE,
            reads_features: options.reads_features || options.heads.is_some(),
            heads: options.heads,
        };
        let slots = SlotTable::new(info.vocab_size, info.max_positions);
        Self {
            options,
            info,
            slots,
            steps: 0,
            keeps_features: false,
            keeps_logits: false,
            logits: HashMap::new(),
            threads: None,
        }
    }

    /// The same with threads, which its own forwards have no use for.
    #[must_use]
    pub fn with_threads(self, threads: Arc<ThreadPool>) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// A token of the fake takes a megabyte.
    fn check_cache(&self, capacity: usize) -> Result<(), EngineError> {
        let (limit, used) = (self.options.cache_tokens, self.slots.capacities().sum::<usize>());
        match used + capacity <= limit {
            true => Ok(()),
            false => Err(EngineError::CacheFull { capacity, megabytes: capacity, used, limit }),
        }
    }

    fn injected_failure(&self, segments: &[Segment<'_>]) -> Result<(), EngineError> {
        let fail = |message: String| Err(EngineError::Tensor(candle_core::Error::Msg(message)));
        if self.options.fail_on_step == Some(self.steps) {
            return fail(format!("injected failure of step {}", self.steps));
        }
        let Some(token) = self.options.fail_on_token else {
            return Ok(());
        };
        for segment in segments {
            if self.slots.get(segment.slot)?.data.iter().chain(segment.tokens).any(|t| *t == token) {
                return fail(format!("injected failure of token {token}"));
            }
        }
        Ok(())
    }

    fn score(&mut self, segment: &Segment<'_>, depths: &[usize], top_k: usize) -> Result<Scores, EngineError> {
        let state = self.slots.get(segment.slot)?;
        let Tree { cached, held } = state.tree();
        let (context, known) = state.data.split_at(cached);
        let tree = Nodes { tokens: [known, segment.tokens], parents: [held, segment.parents] };
        let width = top_k.min(self.info.vocab_size);
        let (mut predictions, mut kept) = (Predictions::default(), Vec::new());
        for (node, depth) in depths.iter().enumerate() {
            let last = tree.last_tokens(context, known.len() + node, self.options.order);
            let position = self.position(segment, node, (&last, cached + depth))?;
            if self.keeps_features {
                predictions.features.extend([segment.tokens[node] as f32, position as f32]);
            }
            let Some(scored) = node.checked_sub(segment.scored_from) else {
                continue;
            };
            if self.keeps_logits {
                kept.push(((segment.slot, node), self.options.logits(&last, position)));
            }
            if let Some(&end) = segment.asked.ends.get(scored) {
                let start = scored.checked_sub(1).map_or(0, |before| segment.asked.ends[before]);
                predictions.push_asked(&self.options.logits(&last, position), &segment.asked.tokens[start..end]);
            }
            if let Some(draw) = segment.draw.filter(|_| self.info.heads.is_none()) {
                let logits = self.options.logits(&last, position);
                predictions.push(&logits, width, Some(draw.after(position)));
                continue;
            }
            let mut last = last;
            for further in 0..self.info.ahead() {
                let candidates = self.options.candidates(&last, position + further, width);
                last.splice(0..0, candidates.first().map(|first| first.token));
                last.truncate(self.options.order);
                predictions.rows.extend(candidates.first().map(greedy));
                predictions.candidates.extend(candidates);
            }
        }
        self.logits.extend(kept);
        let scores = Scores::new((segment.scored_from, self.info.ahead()), width, predictions, FEATURE);
        Ok(scores.with_ends(segment.asked.ends))
    }

    /// The position of a node: one after that of the feature before it if it reads features, whose token must be the
    /// one before; else where it is.
    fn position(
        &self,
        segment: &Segment<'_>,
        node: usize,
        (last, position): (&[Token], usize),
    ) -> Result<usize, EngineError> {
        let Some(&[token, before]) = segment.before.as_chunks::<FEATURE>().0.get(node) else {
            return Ok(position);
        };
        if last.get(1).is_some_and(|&last| last as f32 != token) {
            let message = format!("node {node} comes after {:?} and has the feature of {token}", last[1]);
            return Err(EngineError::Tensor(candle_core::Error::Msg(message)));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a position, as it was given out")]
        let before = before as usize;
        Ok(before + 1)
    }
}

impl Engine for FakeEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn threads(&self) -> Option<Arc<ThreadPool>> {
        self.threads.clone()
    }

    fn keep_features(&mut self) {
        self.keeps_features = true;
    }

    fn keep_logits(&mut self) {
        self.keeps_logits = true;
    }

    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError> {
        let choose = |&MaskedNode { slot, node, mask, draw }: &MaskedNode<'_>| {
            let logits = self.logits.get(&(slot, node));
            let found = logits.and_then(|logits| MaskedRow { row: 0, mask, draw }.choose(logits, top_k));
            found.ok_or(EngineError::Protocol { slot, message: format!("nothing is known of node {node}") })
        };
        nodes.iter().map(choose).collect()
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        if capacity == 0 {
            return Err(EngineError::NoCapacity);
        }
        self.check_cache(capacity)?;
        Ok(self.slots.open(capacity, 0, Vec::new()))
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        self.slots.check_fork(from, length, capacity)?;
        if capacity == 0 {
            return Err(EngineError::NoCapacity);
        }
        self.check_cache(capacity)?;
        let tokens = self.slots.get(from)?.data[..length].to_vec();
        Ok(self.slots.open(capacity, length, tokens))
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        let depths = self.slots.check_step(segments)?;
        segments.iter().try_for_each(|segment| check_features(segment, &self.info))?;
        let outcome = self.injected_failure(segments);
        self.steps += 1;
        outcome?;
        self.logits.clear();
        let scores: Vec<Scores> = segments
            .iter()
            .zip(&depths)
            .map(|(segment, depths)| self.score(segment, depths, top_k))
            .collect::<Result<_, _>>()?;
        for segment in segments {
            self.slots.get_mut(segment.slot)?.data.extend_from_slice(segment.tokens);
        }
        self.slots.append(segments)?;
        Ok(scores)
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.slots.check_commit(slot, keep)?;
        let state = self.slots.get_mut(slot)?;
        let nodes = state.data.split_off(state.cached());
        state.data.extend(keep.iter().map(|&node| nodes[node]));
        self.slots.commit(slot, keep.len())
    }

    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        let parents = self.slots.check_hold(slot, keep)?;
        let state = self.slots.get_mut(slot)?;
        let nodes = state.data.split_off(state.cached());
        state.data.extend(keep.iter().map(|&node| nodes[node]));
        self.slots.hold(slot, parents)
    }

    fn close(&mut self, slot: Slot) {
        self.slots.close(slot);
    }

    fn cached(&self, slot: Slot) -> usize {
        self.slots.get(slot).map_or(0, SlotState::cached)
    }
}

/// Of a distribution in which every token takes the share that the first one has of what is left.
fn greedy(first: &Candidate) -> Prediction {
    let (share, left) = (first.log_probability.exp(), -first.log_probability.exp_m1());
    let entropy = -(first.log_probability + left / share * left.ln());
    Prediction { choice: *first, entropy, ..Prediction::default() }
}

/// A slot's tree: the held nodes and those of the segment.
struct Nodes<'a> {
    tokens: [&'a [Token]; 2],
    parents: [&'a [u32]; 2],
}

impl Nodes<'_> {
    /// The last at most `order` tokens up to and including `node`, last one first.
    fn last_tokens(&self, context: &[Token], node: usize, order: usize) -> Vec<Token> {
        let of = |parts: [&[u32]; 2], node: usize| match node.checked_sub(parts[0].len()) {
            Some(new) => parts[1][new],
            None => parts[0][node],
        };
        let mut last = Vec::with_capacity(order);
        let mut next = Some(node);
        while let (Some(node), true) = (next, last.len() < order) {
            last.push(of(self.tokens, node));
            let parent = of(self.parents, node);
            next = (parent != ROOT_PARENT).then_some(parent as usize);
        }
        last.extend(context.iter().rev().take(order - last.len()));
        last
    }
}

impl FakeOptions {
    /// The `width` most probable tokens after `last` (last one first, at `position`). Each takes
    /// the same share, 0.4 to 0.9, of the probability that the ones before it left.
    fn candidates(&self, last: &[Token], position: usize, width: usize) -> Vec<Candidate> {
        let context = last.iter().fold(self.seed, |hash, &token| mix(hash ^ u64::from(token)));
        let newest = last.first().map_or(self.seed, |&token| mix(!self.seed ^ u64::from(token)));
        let in_phrase = unit(mix(newest ^ 1)) < self.phrase_probability;
        let state = if in_phrase { newest } else { context };
        let ends = unit(mix(context ^ mix(position as u64))) < self.eos_probability;
        let share = 0.4 + 0.5 * unit(mix(state ^ 3));
        // Consecutive ids from a hashed first one, so that no token comes twice.
        let first = mix(state ^ 4) % u64::from(self.vocab_size);
        let token_at = |rank: u64| {
            let token = (first + rank) % u64::from(self.vocab_size);
            u32::try_from(token).unwrap_or(0)
        };
        let eos = ends.then_some(self.eos);
        let others = (0..u64::from(self.vocab_size)).map(token_at).filter(|t| Some(*t) != eos);
        let mut remaining = 1.0;
        eos.into_iter()
            .chain(others)
            .take(width)
            .map(|token| {
                let probability = remaining * share;
                remaining -= probability;
                #[expect(clippy::cast_possible_truncation, reason = "a small logarithm")]
                let log_probability = probability.ln() as f32;
                Candidate { token, log_probability }
            })
            .collect()
    }

    /// The log probability of every token.
    fn logits(&self, last: &[Token], position: usize) -> Vec<f32> {
        let mut logits = vec![f32::NEG_INFINITY; self.vocab_size as usize];
        for candidate in self.candidates(last, position, logits.len()) {
            logits[candidate.token as usize] = candidate.log_probability;
        }
        logits
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A hash as a number in [0, 1).
fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}
