//! The loop over steps: who takes part, the forward, and what becomes of its scores.

mod constrained;

use std::collections::VecDeque;
use std::time::Instant;

use laser_decode::{PoolMeta, chain_parents};
use laser_engine::{Engine, EngineError, Scores, Segment, Slot};
use laser_grammar::{Grammar, Parser};
use laser_model::Tokenizer;

use super::counts::Counts;
use super::options::GenerateOptions;
use super::request::{Finished, GenerateError, Generated, Request, TextError, TextGenerator};
use super::sequence::{Room, Sequence};
use super::source::{Draft, DraftSource, DraftTerms, Opening, Outcome, SequenceId, SharedPrefix, with_each};
use super::threads::Threads;
use super::waiting::Waiting;
use crate::budget::Drafted;
use crate::cost::StepLoad;

/// Prompts that begin alike for fewer tokens than this are prefilled apart: a fork costs about as much
/// as a forward of a few tokens.
const SHARED_PREFIX_MIN: usize = 16;

/// Prefixes kept for forking; one a template and pool is what a run needs.
const SHARED_PREFIXES_MAX: usize = 4;

/// What prompts begin with, computed once.
struct Prefix {
    tokens: Vec<u32>,
    slot: Slot,
}

/// Generates texts for requests with one engine. Memory: `batch` caches plus the pending requests.
pub struct Generator {
    engine: Box<dyn Engine>,
    threads: Threads,
    tokenizer: Tokenizer,
    options: GenerateOptions,
    waiting: Waiting,
    active: Vec<Sequence>,
    prefixes: VecDeque<Prefix>,
    /// Nodes of the last step.
    drafted: usize,
    /// Whether a request has waited because there was no cache for it.
    waited_for_cache: bool,
    /// Duration of prefills of shared prefixes, added to the next step.
    unattributed_seconds: f64,
    /// Draft one after the other; what counts occurrences is the first.
    sources: Vec<Box<dyn DraftSource>>,
    /// That of the sequence that joined last.
    last_id: u64,
    /// What every text follows, if anything, and the parsers of texts that have ended: they know more of it.
    grammar: Option<Grammar>,
    parsers: Vec<Parser>,
}

impl std::fmt::Debug for Generator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator")
            .field("options", &self.options)
            .field("active", &self.active.len())
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

impl Generator {
    /// A generator without requests.
    pub fn new(engine: Box<dyn Engine>, tokenizer: Tokenizer, options: GenerateOptions) -> Self {
        let threads = Threads::of(engine.as_ref());
        Self {
            sources: vec![Box::new(Counts::new(threads.clone()))],
            threads,
            engine,
            tokenizer,
            options,
            waiting: Waiting::default(),
            active: Vec::new(),
            prefixes: VecDeque::new(),
            drafted: 0,
            waited_for_cache: false,
            unattributed_seconds: 0.0,
            last_id: 0,
            grammar: None,
            parsers: Vec::new(),
        }
    }

    /// The same with further sources, of which each gets the trees of the one before it. Draft models' vocabularies
    /// must have every token of the tokenizer; the trees of several are merged as in SpecInfer (arXiv:2305.09781).
    #[must_use]
    pub fn with_draft_sources(mut self, mut sources: Vec<Box<dyn DraftSource>>) -> Self {
        self.swap_draft_sources(&mut sources);
        self
    }

    /// The same for texts that follow a grammar.
    #[must_use]
    pub fn with_grammar(mut self, grammar: Option<Grammar>) -> Self {
        self.grammar = grammar;
        if self.grammar.is_some() {
            self.engine.keep_logits();
        }
        self
    }

    /// Drafts with other further sources, or with none, from now on; no text may be under way. `others` gets those that
    /// drafted until now, with what they have learnt.
    pub fn swap_draft_sources(&mut self, others: &mut Vec<Box<dyn DraftSource>>) {
        debug_assert!(self.active.is_empty(), "sources follow the texts under way");
        let mut until_now = self.sources.split_off(1);
        for prefix in &self.prefixes {
            until_now.iter_mut().for_each(|source| source.forget_prefix(&prefix.tokens));
        }
        self.sources.append(others);
        *others = until_now;
        if self.reads_features() {
            self.engine.keep_features();
        }
    }

    fn reads_features(&self) -> bool {
        self.sources.iter().any(|source| source.reads_features())
    }

    /// The model.
    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    /// The model again, without open sequences.
    pub fn into_engine(mut self) -> Box<dyn Engine> {
        self.reset();
        self.engine
    }

    /// How texts are generated.
    pub fn options(&self) -> &GenerateOptions {
        &self.options
    }

    /// Generates differently from the next step on; sequences that are under way keep their drafter. `options` gets
    /// what was in force, so that a later swap goes on with its budget where that stood.
    pub fn swap_options(&mut self, options: &mut GenerateOptions) {
        std::mem::swap(&mut self.options, options);
    }

    /// Computes a prefix, and what the sources want to know of it.
    fn prefill_prefix(&mut self, slot: Slot, prefix: &[u32], step_tokens: usize) -> Result<Vec<Scores>, EngineError> {
        let (top_k, aligns) = (self.top_k(), self.options.alignment > 0);
        let prefill = |chunk: &[u32]| {
            let parents: Vec<u32> = chain_parents(chunk.len()).collect();
            let scored_from = if aligns { 0 } else { chunk.len() };
            let segment = Segment { slot, tokens: chunk, parents: &parents, scored_from, ..Segment::default() };
            let mut scores = self.engine.step(&[segment], top_k)?;
            self.engine.commit(slot, &(0..chunk.len()).collect::<Vec<_>>())?;
            Ok(scores.swap_remove(0))
        };
        prefix.chunks(step_tokens).map(prefill).collect()
    }

    /// Lets requests join while there is room.
    fn admit(&mut self, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let room = self.waiting.room(self.options.batch, self.active.is_empty());
        while self.active.len() < room
            && let Some(request) = self.waiting.next()
        {
            if self.is_computing_prompt_of(&request) {
                self.waiting.put_back(request);
                break;
            }
            let max_tokens = match self.check(&request) {
                Ok(max_tokens) => max_tokens,
                Err(error) => {
                    finished.push(Finished { id: request.id, result: Err(error) });
                    continue;
                }
            };
            match self.open(&request, max_tokens) {
                Ok(room) => {
                    self.last_id += 1;
                    let sequence = Sequence::new(SequenceId(self.last_id), request, &room, &self.options);
                    self.begin(sequence, &room, finished);
                }
                Err(_) if self.active.is_empty() && !self.prefixes.is_empty() => {
                    self.forget_prefixes();
                    self.waiting.put_back(request);
                }
                Err(error) if self.active.is_empty() => self.waiting.fail(&request, error, finished)?,
                Err(error) => {
                    self.wait_for_cache(&error);
                    self.waiting.put_back(request);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Says once that the batch is smaller than configured.
    fn wait_for_cache(&mut self, error: &EngineError) {
        if !std::mem::replace(&mut self.waited_for_cache, true) {
            let (texts, batch) = (self.active.len(), self.options.batch);
            tracing::warn!(%error, texts, batch, "fewer texts at a time than [generate] batch");
        }
    }

    /// Gives back the caches of shared prefixes.
    fn forget_prefixes(&mut self) {
        while self.forget_prefix() {}
    }

    /// Gives back those of the oldest one; whether there was one.
    fn forget_prefix(&mut self) -> bool {
        let Some(prefix) = self.prefixes.pop_front() else {
            return false;
        };
        self.engine.close(prefix.slot);
        self.sources.iter_mut().for_each(|source| source.forget_prefix(&prefix.tokens));
        true
    }

    /// The bound on the request's text, or why there can be none.
    fn check(&self, request: &Request) -> Result<usize, TextError> {
        let (length, limit) = (request.prompt.len(), self.engine.info().max_positions);
        if length == 0 {
            return Err(TextError::EmptyPrompt);
        }
        if length >= limit {
            return Err(TextError::PromptTooLong { length, limit });
        }
        Ok(self.options.max_new_tokens.min(limit - length))
    }

    /// Whether another sample of the request's entity is at its prompt, which the request then need not compute.
    fn is_computing_prompt_of(&self, request: &Request) -> bool {
        self.shares_prompts() && self.active.iter().any(|other| other.is_prompt() && other.is_of_prompt(request))
    }

    /// Whether samples of an entity, which follow each other, share what their prompt comes to.
    fn shares_prompts(&self) -> bool {
        self.options.shared_prefixes && self.options.sampling.is_some()
    }

    /// What a cache for the request may grow to: its text, and the nodes of a step.
    fn capacity(&self, request: &Request, max_tokens: usize) -> usize {
        request.prompt.len() + max_tokens + self.options.nodes
    }

    /// A cache for the request, which begins with that of its prompt or with a shared prefix if there is one.
    fn open(&mut self, request: &Request, max_tokens: usize) -> Result<Room, EngineError> {
        let length = request.prompt.len();
        let capacity = self.capacity(request, max_tokens);
        let at = self.active.iter().position(|other| !other.is_prompt() && other.is_of_prompt(request));
        if let Some(at) = at.filter(|_| self.shares_prompts()) {
            let slot = self.engine.fork(self.active[at].slot, length - 1, capacity)?;
            return Ok(Room { slot, cached: length - 1, sample: Some(self.active[at].draft.id), max_tokens });
        }
        let fits = |prefix: &&Prefix| {
            let shares = self.options.shared_prefixes && prefix.tokens.len() < length;
            shares && request.prompt.starts_with(&prefix.tokens)
        };
        let Some(prefix) = self.prefixes.iter().filter(fits).max_by_key(|prefix| prefix.tokens.len()) else {
            return Ok(Room { slot: self.engine.open(capacity)?, cached: 0, sample: None, max_tokens });
        };
        let cached = prefix.tokens.len();
        let slot = self.engine.fork(prefix.slot, cached, capacity)?;
        Ok(Room { slot, cached, sample: None, max_tokens })
    }

    /// Lets the sources follow a sequence.
    fn follow(&mut self, sequence: &Sequence, room: &Room) {
        if sequence.request.plain {
            return;
        }
        let opening = Opening {
            request: &sequence.request,
            options: &self.options,
            begun: &sequence.done.tokens,
            cached: room.cached,
            sample: room.sample,
            capacity: self.capacity(&sequence.request, room.max_tokens),
            vocab_size: self.engine.info().vocab_size,
        };
        self.sources.iter_mut().for_each(|source| source.open(sequence.draft.id, &opening));
    }

    /// Fills the sequences' segments. Returns the indexes of those that take part.
    fn prepare(&mut self) -> Vec<usize> {
        let room = self.feed();
        self.draft(room);
        let part: Vec<usize> = (0..self.active.len()).filter(|&index| self.active[index].chunk > 0).collect();
        self.budget(&part, room);
        self.cut_forbidden();
        self.drafted = part.iter().map(|&index| self.active[index].draft.tree.drafted()).sum();
        part.iter().for_each(|&index| self.active[index].attach_tree());
        part
    }

    /// Divides the step's tokens: those of each sequence that is generating, one and the forced ones, then prompts,
    /// oldest first. Trees have what is left, and of what prompts could take as much as trees had in the last step, up
    /// to half: otherwise drafts of a large batch, most of which the budget cuts, would keep prompts waiting, and with
    /// them their texts.
    fn feed(&mut self) -> usize {
        let mut left = self.options.step_tokens.max(1);
        for sequence in &mut self.active {
            let takes = if sequence.is_prompt() { 0 } else { sequence.pending.len().min(left) };
            sequence.feed(takes);
            left -= takes;
        }
        let trees = self.drafted.min(left / 2);
        left -= trees;
        for prompt in self.active.iter_mut().filter(|sequence| sequence.is_prompt()) {
            left -= prompt.feed(left);
        }
        left + trees
    }

    /// Drafts where the next token is going to be scored: the nodes that may share `room`, or under a budget, which
    /// cuts them, all that may be of use.
    fn draft(&mut self, room: usize) {
        let Self { sources, active, options, engine, .. } = self;
        // As large as the last step, or nearly.
        let tokens = active.iter().map(|sequence| sequence.chunk).sum::<usize>() + self.drafted;
        let load = StepLoad { tokens, pairs: 0 };
        let sharers = active.iter().filter(|sequence| sequence.is_scored()).count();
        let adapts = options.budget.is_some();
        let share = |at: usize| if adapts { room } else { room / sharers + usize::from(at < room % sharers) };
        let scored = active.iter_mut().filter(|sequence| sequence.is_scored()).enumerate();
        let mut drafts: Vec<&mut Draft> =
            scored.map(|(at, sequence)| sequence.begin_draft(options.nodes.min(share(at)), adapts)).collect();
        let terms = DraftTerms {
            step_tokens: options.step_tokens,
            min_probability: options.drafter.min_probability(),
            end_of_text: options.end_of_drafts(),
            vocab_size: engine.info().vocab_size,
            cost: options.budget.as_ref().map(|budget| (budget.cost(), load)),
        };
        with_each(sources, |source| source.draft(&mut drafts, &terms));
    }

    /// Cuts the trees back to the nodes that pay, over the whole batch, and of those to `room`. A tree's nodes come in
    /// falling probability, so what is left of it is its beginning.
    fn budget(&mut self, part: &[usize], room: usize) {
        let Some(budget) = &mut self.options.budget else {
            return;
        };
        part.iter().for_each(|&index| self.active[index].watch());
        let (mut known, mut certain) = (StepLoad::default(), 0);
        let mut drafted = Vec::with_capacity(part.len());
        for &index in part {
            let sequence = &self.active[index];
            if sequence.draft.rationed > 0.0 {
                budget.drafted(sequence.draft.rationed, sequence.draft.tree.drafted());
            }
            let cached = self.engine.cached(sequence.slot);
            known = known.with(sequence.chunk, cached);
            certain += usize::from(sequence.is_scored());
            drafted.push(Drafted {
                pool: sequence.worth(),
                cached,
                probabilities: sequence.draft.tree.probabilities().get(1..).unwrap_or_default(),
            });
        }
        if part.iter().all(|&index| self.active[index].request.plain) {
            return budget.plain(known);
        }
        let kept = budget.allot((known, certain, room), &drafted);
        for (&index, kept) in part.iter().zip(kept) {
            let sequence = &mut self.active[index];
            let terms = budget.terms(sequence.worth(), part.len());
            sequence.cut(kept, terms);
        }
    }

    fn forward(&mut self, part: &[usize]) -> Result<Vec<Scores>, EngineError> {
        let segments: Vec<Segment<'_>> = part.iter().map(|&i| self.active[i].segment()).collect();
        self.engine.step(&segments, self.top_k())
    }

    fn attribute(&mut self, part: &[usize], seconds: f64) {
        let share = seconds / part.len() as f64;
        for &index in part {
            self.active[index].done.engine_seconds += share;
        }
    }

    /// Takes over the scores of a step. On an error what had ended before it is finished all the same.
    fn advance(
        &mut self,
        (part, seconds): (&[usize], f64),
        scores: &[Scores],
        finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        let (mut ended, mut emitted) = (Vec::new(), 0);
        let texts = part.iter().filter(|&&index| self.active[index].is_scored()).count();
        let mut outcome = Ok(());
        for (&index, scores) in part.iter().zip(scores) {
            let sequence = &mut self.active[index];
            let before = sequence.done.tokens.len();
            let accepted = sequence.accept(scores, &self.options, &self.tokenizer);
            if let Ok((keep, stop)) = &accepted {
                let outcome = Outcome {
                    scores,
                    chunk: sequence.chunk,
                    tree: &sequence.draft.tree,
                    emitted: &sequence.done.tokens[before..],
                    kept: stop.is_none().then_some(keep.as_slice()),
                };
                self.sources.iter_mut().for_each(|source| source.follow(sequence.draft.id, &outcome));
            }
            match accepted {
                Ok((keep, None)) => outcome = self.engine.commit(sequence.slot, &keep),
                Ok((_, Some(stop))) => ended.push((index, Ok(stop))),
                Err(error) => ended.push((index, Err(error))),
            }
            emitted += sequence.done.tokens.len() - before;
            if let Some(budget) = &mut self.options.budget {
                let has_ended = ended.last().is_some_and(|(last, _)| *last == index);
                let judged = sequence.hindsight.judge(&sequence.done.tokens, has_ended);
                budget.judge(sequence.watched_worth(), &judged);
            }
            if outcome.is_err() {
                break;
            }
        }
        self.sources.iter_mut().for_each(|source| source.stepped((emitted, texts), seconds));
        for (index, stop) in ended.into_iter().rev() {
            let mut sequence = self.active.remove(index);
            self.close(&mut sequence);
            let Sequence { request, done, .. } = sequence;
            if stop.is_ok() {
                self.waiting.succeeded();
            }
            let result = stop.and_then(|stop| self.whole(Generated { stop, ..done }));
            finished.push(Finished { id: request.id, result });
        }
        outcome
    }

    /// Gives back the caches of a sequence, and its parser.
    fn close(&mut self, sequence: &mut Sequence) {
        self.engine.close(sequence.slot);
        self.sources.iter_mut().for_each(|source| source.close(sequence.draft.id));
        let parser = sequence.take_parser().map(|mut parser| parser.pop(parser.length()).map(|()| parser));
        self.parsers.extend(parser.and_then(Result::ok));
    }

    /// After a failed step every sequence starts over. Shared prefixes are forgotten, too: an engine that ran out of
    /// memory may have lost them, and then fails every step until all its slots are closed.
    fn isolate(&mut self, error: EngineError, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let mut sequences = std::mem::take(&mut self.active);
        sequences.iter_mut().for_each(|sequence| self.close(sequence));
        self.forget_prefixes();
        let requests = sequences.into_iter().map(|sequence| sequence.request).collect();
        self.waiting.isolate(requests, error, finished)
    }
}

impl TextGenerator for Generator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn device(&self) -> &str {
        &self.engine.info().device
    }

    fn pool_meta(&self) -> Option<PoolMeta> {
        let end_of_text = *self.options.end_of_text.first()?;
        let vocab_size = u32::try_from(self.engine.info().vocab_size).ok()?;
        let meta =
            || PoolMeta { name: "tonight".into(), tokenizer: self.tokenizer.fingerprint(), vocab_size, end_of_text };
        self.options.drafter.reads_pools().then(meta)
    }

    fn adapts(&self) -> bool {
        self.options.budget.is_some()
    }

    fn batch(&self) -> usize {
        self.options.batch
    }

    fn load(&self) -> usize {
        self.active.len() + self.waiting.len()
    }

    fn submit(&mut self, request: Request) {
        self.waiting.submit(request);
    }

    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError> {
        let Some((first, rest)) = prompts.split_first() else {
            return Ok(());
        };
        let common = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let length = rest.iter().map(|p| common(first, p)).min().unwrap_or_default();
        let prefix = &first[..length];
        if length < SHARED_PREFIX_MIN || self.prefixes.iter().any(|known| known.tokens == prefix) {
            return Ok(());
        }
        let start = Instant::now();
        if self.prefixes.len() == SHARED_PREFIXES_MAX {
            self.forget_prefix();
        }
        let slot = self.engine.open(prefix.len())?;
        // Known to `reset` before the forward, which may panic.
        self.prefixes.push_back(Prefix { tokens: prefix.to_vec(), slot });
        let step_tokens = self.options.step_tokens.max(1);
        let scores = match self.prefill_prefix(slot, prefix, step_tokens) {
            Ok(scores) => scores,
            Err(error) => {
                self.prefixes.pop_back();
                self.engine.close(slot);
                return Err(error);
            }
        };
        let alignment = self.options.alignment;
        let prefix = SharedPrefix { tokens: prefix, scores: &scores, step_tokens, alignment };
        with_each(&mut self.sources, |source| source.share_prefix(&prefix));
        self.unattributed_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        let start = Instant::now();
        let mut finished = Vec::new();
        self.admit(&mut finished)?;
        if self.active.is_empty() {
            return Ok(finished);
        }
        let part = self.prepare();
        let forward = Instant::now();
        let outcome = self.forward(&part).and_then(|scores| {
            let forward = forward.elapsed().as_secs_f64();
            self.look_at_allowed(&scores)?;
            let seconds = start.elapsed().as_secs_f64() + self.unattributed_seconds;
            self.unattributed_seconds = 0.0;
            self.attribute(&part, seconds);
            let outcome = self.advance((&part, seconds), &scores, &mut finished);
            if let Some(budget) = &mut self.options.budget {
                budget.learn(forward);
            }
            outcome
        });
        if let Err(error) = outcome {
            self.isolate(error, &mut finished)?;
        }
        Ok(finished)
    }

    fn reset(&mut self) {
        self.waiting.clear();
        self.unattributed_seconds = 0.0;
        for mut sequence in std::mem::take(&mut self.active) {
            self.close(&mut sequence);
        }
        self.forget_prefixes();
    }
}
