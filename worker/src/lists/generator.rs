//! The loop over steps of many lists.

use std::sync::Arc;
use std::time::Instant;

use laser_engine::{Engine, EngineError, Scores, Segment, Slot};
use laser_model::Tokenizer;

use super::coverage::{Coverage, Terms};
use super::options::ListOptions;
use super::sequence::ListSequence;
use crate::catalogue::Catalogue;
use crate::cost::StepLoad;
use crate::generate::{Finished, GenerateError, Request, TextError, TextGenerator, Waiting};

/// Makes lists for requests with one engine. Memory: `batch` caches plus the pending requests.
pub struct ListGenerator {
    engine: Box<dyn Engine>,
    tokenizer: Tokenizer,
    options: ListOptions,
    coverage: Coverage,
    waiting: Waiting,
    active: Vec<ListSequence>,
}

impl std::fmt::Debug for ListGenerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("ListGenerator");
        f.field("active", &self.active.len()).field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl ListGenerator {
    /// A generator without requests.
    pub fn new(engine: Box<dyn Engine>, tokenizer: Tokenizer, options: ListOptions) -> Self {
        let (coverage, waiting) = (Coverage::default(), Waiting::default());
        Self { engine, tokenizer, options, coverage, waiting, active: Vec::new() }
    }

    /// Makes lists differently from now on; none may be under way. `options` gets what was in force, and `coverage`
    /// what was learnt of its drafts.
    pub fn swap(&mut self, options: &mut ListOptions, coverage: &mut Coverage) {
        debug_assert!(self.active.is_empty(), "lists under way have drafts of their own");
        std::mem::swap(&mut self.options, options);
        std::mem::swap(&mut self.coverage, coverage);
    }

    /// The model.
    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    /// Lets requests join while there is room.
    fn admit(&mut self, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let room = self.waiting.room(self.options.batch, self.active.is_empty());
        while self.active.len() < room
            && let Some(request) = self.waiting.next()
        {
            let catalogue = match self.check(&request) {
                Ok(catalogue) => catalogue,
                Err(error) => {
                    finished.push(Finished { id: request.id, result: Err(error) });
                    continue;
                }
            };
            match self.engine.open(self.capacity(&request, &catalogue)) {
                Ok(slot) => self.begin(request, (catalogue, slot), finished),
                Err(error) if self.active.is_empty() => self.waiting.fail(&request, error, finished)?,
                Err(_) => {
                    self.waiting.put_back(request);
                    break;
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, request: Request, (catalogue, slot): (Arc<Catalogue>, Slot), finished: &mut Vec<Finished>) {
        let sequence = ListSequence::new(request, catalogue, slot, &self.options);
        match sequence.is_hopeless() {
            false => self.active.push(sequence),
            true => {
                self.engine.close(slot);
                finished.push(Finished { id: sequence.request.id, result: Err(TextError::NothingToList) });
            }
        }
    }

    /// What a cache for the request may grow to: the prompt, and the prefixes of all steps.
    fn capacity(&self, request: &Request, catalogue: &Catalogue) -> usize {
        request.prompt.len() + catalogue.trie.levels() * (self.options.width + self.options.nodes)
    }

    fn check(&self, request: &Request) -> Result<Arc<Catalogue>, TextError> {
        let (length, limit) = (request.prompt.len(), self.engine.info().max_positions);
        match &request.catalogue {
            _ if length == 0 => Err(TextError::EmptyPrompt),
            None => Err(TextError::NoCatalogue),
            Some(catalogue) if length + catalogue.trie.levels() > limit => {
                Err(TextError::PromptTooLong { length, limit })
            }
            Some(catalogue) => Ok(catalogue.clone()),
        }
    }

    /// Fills the lists' segments. Returns the indexes of those that take part.
    fn prepare(&mut self) -> Vec<usize> {
        let Self { active, options, engine, coverage, .. } = self;
        let missing: usize = active.iter().map(ListSequence::missing).sum();
        let mut room = options.step_tokens.max(1).saturating_sub(missing);
        for list in active.iter_mut() {
            room -= list.feed(room);
        }
        let scored = active.iter().filter(|list| list.is_scored()).count().max(1);
        let cached = active.iter().map(|list| engine.cached(list.slot) + list.request.prompt.len()).sum::<usize>();
        let seconds = |nodes: usize| match &options.cost {
            Some(cost) => {
                let load = StepLoad { tokens: nodes * scored, pairs: nodes * cached };
                cost.seconds(load) / scored as f64
            }
            None => 0.0,
        };
        let terms = Terms {
            levels: active.first().map_or(0, ListSequence::levels),
            width: options.width,
            nodes: options.nodes.min((room / scored).max(1)),
            seconds: &seconds,
        };
        let terms = options.cost.is_some().then_some(&terms);
        for list in active.iter_mut().filter(|list| list.is_scored()) {
            let start = Instant::now();
            list.grow(options, coverage, (terms, room / scored));
            list.done.draft_seconds += start.elapsed().as_secs_f64();
        }
        (0..active.len()).filter(|&index| active[index].nodes() > 0).collect()
    }

    fn forward(&mut self, part: &[usize]) -> Result<Vec<Scores>, EngineError> {
        let segments: Vec<Segment<'_>> = part.iter().map(|&index| self.active[index].segment()).collect();
        self.engine.step(&segments, 0)
    }

    /// Takes over the scores of a step. On an error what had ended before it is finished all the same.
    fn advance(
        &mut self,
        (part, scores): (&[usize], &[Scores]),
        finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        let mut outcome = Ok(());
        for (&index, scores) in part.iter().zip(scores) {
            let list = &mut self.active[index];
            match list.accept(scores, &self.options, &mut self.coverage) {
                Ok(false) if list.is_scored() => {
                    let keep = list.keep();
                    outcome = self.engine.hold(list.slot, &keep);
                }
                Ok(false) => outcome = self.engine.commit(list.slot, &(0..list.nodes()).collect::<Vec<_>>()),
                Ok(true) => ended.push((index, Ok(()))),
                Err(error) => ended.push((index, Err(error))),
            }
            if outcome.is_err() {
                break;
            }
        }
        for (index, result) in ended.into_iter().rev() {
            let ListSequence { request, slot, done, .. } = self.active.remove(index);
            self.engine.close(slot);
            if result.is_ok() {
                self.waiting.succeeded();
            }
            finished.push(Finished { id: request.id, result: result.map(|()| done) });
        }
        outcome
    }

    /// After a failed step every list starts over.
    fn isolate(&mut self, error: EngineError, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let lists = std::mem::take(&mut self.active);
        lists.iter().for_each(|list| self.engine.close(list.slot));
        self.waiting.isolate(lists.into_iter().map(|list| list.request).collect(), error, finished)
    }
}

impl TextGenerator for ListGenerator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
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

    /// Histories have nothing in common.
    fn share_prefix(&mut self, _: &[&[u32]]) -> Result<(), EngineError> {
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
        let tokens = part.iter().map(|&index| self.active[index].nodes()).sum();
        let pairs =
            part.iter().map(|&index| self.active[index].nodes() * self.active[index].request.prompt.len()).sum();
        let forward = Instant::now();
        let outcome = self.forward(&part);
        if let Some(cost) = self.options.cost.as_mut().filter(|_| outcome.is_ok()) {
            cost.learn(StepLoad { tokens, pairs }, forward.elapsed().as_secs_f64());
        }
        let outcome = outcome.and_then(|scores| {
            let share = start.elapsed().as_secs_f64() / part.len() as f64;
            part.iter().for_each(|&index| self.active[index].done.engine_seconds += share);
            self.advance((&part, &scores), &mut finished)
        });
        if let Err(error) = outcome {
            self.isolate(error, &mut finished)?;
        }
        Ok(finished)
    }

    fn reset(&mut self) {
        self.waiting.clear();
        for list in std::mem::take(&mut self.active) {
            self.engine.close(list.slot);
        }
    }
}
