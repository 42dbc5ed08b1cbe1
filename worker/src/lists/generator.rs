//! The loop over steps of many lists.

use std::sync::Arc;
use std::time::Instant;

use laser_engine::{Engine, EngineError, Scores, Segment, Slot};
use laser_model::Tokenizer;

use super::coverage::{AHEAD, Coverage};
use super::draft_model::ListDraftModel;
use super::foresight::Foresight;
use super::options::ListOptions;
use super::plan::{Offer, Plan, Plans, StepSize, Terms};
use super::sequence::{ListSequence, Ranker};
use super::sources::Sources;
use crate::catalogue::Catalogue;
use crate::cost::StepLoad;
use crate::generate::{Finished, GenerateError, Request, TextError, TextGenerator, Waiting};

/// Plans are made for prompts of this many tokens, and multiples, so that few are.
const PROMPT_UNIT: usize = 8;

/// Makes lists for requests with one engine. Memory: `batch` caches plus the pending requests.
pub struct ListGenerator {
    engine: Box<dyn Engine>,
    tokenizer: Tokenizer,
    options: ListOptions,
    /// What is drafted without a draft model.
    sources: Sources,
    model: Option<ListDraftModel>,
    plans: Plans,
    /// Whether anything was drafted for the list that ended last.
    has_drafted: bool,
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
        let sources = Sources::new(options.draft, options.drafted().is_some());
        let (plans, waiting) = Default::default();
        let (model, active) = (None, Vec::new());
        Self { engine, tokenizer, options, sources, model, plans, has_drafted: false, waiting, active }
    }

    /// Lets a draft model draft where it pays.
    #[must_use]
    pub fn with_draft_model(self, model: Option<ListDraftModel>) -> Self {
        Self { model, ..self }
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
            match self.engine.open(self.options.capacity(&request, catalogue.trie.levels())) {
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
        let mut sequence = ListSequence::new(request, catalogue, slot, &self.options);
        if !sequence.request.plain {
            self.count(&mut sequence);
        }
        match sequence.is_hopeless() {
            false => self.active.push(sequence),
            true => {
                self.engine.close(slot);
                finished.push(Finished { id: sequence.request.id, result: Err(TextError::NothingToList) });
            }
        }
    }

    /// Counts a list, and decides whether drafts are made for it whatever they cost, and whether the source whose turn
    /// it is foresees it. Where drafts are drawn only drafts tell.
    fn count(&mut self, list: &mut ListSequence) {
        list.turn = self.sources.begin();
        let coverage = list.turn.and_then(|turn| self.sources.get(turn)).map(|source| &source.coverage);
        let is_drawn = self.options.drafted().is_some();
        list.is_watched = !is_drawn && coverage.is_some_and(Coverage::is_watched);
        // Where drafts do not pay it is enough to learn slowly: learning of a list takes a hundredth of its time at
        // 2.1M parameters.
        list.is_told = list.is_watched || self.has_drafted;
        list.is_tried = match &mut self.model {
            Some(model) => {
                model.coverage.begin();
                model.is_tried()
            }
            None => is_drawn && coverage.is_some_and(Coverage::is_tried),
        };
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
        let missing: usize = self.active.iter().map(ListSequence::missing).sum();
        let mut room = self.options.step_tokens.max(1).saturating_sub(missing);
        for list in &mut self.active {
            room -= list.begin(room);
        }
        let start = Instant::now();
        self.plan();
        self.draft();
        let scored = self.active.iter().filter(|list| list.tree.is_scored()).count().max(1);
        for list in self.active.iter_mut().filter(|list| list.tree.is_scored()) {
            list.grow(self.options.nodes);
            if let Some((by, coverage)) = list.turn.and_then(|turn| self.sources.ranking(turn)) {
                list.foresee(by, coverage);
            }
            list.done.draft_seconds += start.elapsed().as_secs_f64() / scored as f64;
        }
        (0..self.active.len()).filter(|&index| self.active[index].tree.nodes() > 0).collect()
    }

    /// Decides what is drafted for each list.
    fn plan(&mut self) {
        let Self { active, options, sources, model, plans, .. } = self;
        let mut scored: Vec<&mut ListSequence> = active.iter_mut().filter(|list| list.tree.is_scored()).collect();
        let Some(levels) = scored.first().map(|list| list.levels()) else { return };
        let count = scored.len();
        let mean = |of: &dyn Fn(&ListSequence) -> usize| scored.iter().map(|list| of(list)).sum::<usize>() / count;
        let size = StepSize {
            lists: count,
            width: mean(&|list| options.width(&list.request)),
            prompt: mean(&|list| list.request.prompt.len()).next_multiple_of(PROMPT_UNIT),
        };
        let seconds = |nodes: usize| match &options.cost {
            Some(cost) => {
                let tokens = nodes * count;
                cost.seconds_of_late(StepLoad { tokens, pairs: tokens * size.prompt }) / count as f64
            }
            None => 0.0,
        };
        let reading = |tokens: usize| {
            model.as_ref().map_or(0.0, |m| m.seconds((tokens, count), size.prompt * count) / count as f64)
        };
        let read = model.as_ref().map(|model| Offer { coverage: &model.coverage, reading: Some(&reading) });
        let offers: Vec<Offer<'_>> = sources.offers().chain(read).collect();
        let of_model = read.map(|_| offers.len() - 1);
        let terms = Terms {
            levels,
            size,
            nodes: options.nodes,
            steps: options.steps,
            drafted: options.drafted(),
            seconds: &seconds,
        };
        plans.refresh(sources.lists());
        let mut planner = options.cost.is_some().then(|| plans.planner(&offers, terms));
        for list in &mut scored {
            if list.request.plain {
                continue;
            }
            let tried = of_model.or(list.turn).filter(|_| list.is_tried);
            list.plan = match (tried, list.turn, &mut planner) {
                (Some(offer), ..) | (None, Some(offer), None) => most(offer, list.depth(), &terms),
                (None, _, Some(planner)) => planner.plan(list.depth(), list.missing()),
                (None, None, None) => None,
            };
            list.is_read = of_model.is_some() && list.offer() == of_model;
            let foresees = list.turn.filter(|_| list.is_watched);
            list.foresight = foresees.and_then(|offer| most(offer, list.depth(), &terms));
            // Lists of which a source drafts fewer steps than it might would crowd out those of which all are known.
            let steps = list.plan.as_ref().map_or(0, |plan| plan.widths.len());
            let is_whole = steps == steps_left(list.depth(), &terms);
            let is_foreseen = foresees.is_some() && foresees == list.offer();
            list.is_judged = is_whole || is_foreseen || list.is_read || terms.drafted.is_some();
        }
    }

    /// Ranks what the plans say. A draft model that fails is not asked again, and costs no list.
    fn draft(&mut self) {
        loop {
            let (mut read, mut counted): (Vec<_>, Vec<_>) =
                self.active.iter_mut().filter(|list| list.is_drafting()).partition(|list| list.is_read);
            for list in &mut counted {
                match list.offer().and_then(|offer| self.sources.ranking(offer)) {
                    Some((by, coverage)) => list.rank_timed(Ranker::Source(by), coverage),
                    None => list.draft_nothing(),
                }
            }
            match &mut self.model {
                _ if read.is_empty() && counted.is_empty() => return,
                Some(model) if !read.is_empty() => {
                    if let Err(error) = model.draft(&mut read, &self.options) {
                        tracing::warn!(%error, "the draft model failed and is not used any more");
                        self.model = None;
                        // Those that were made name it.
                        self.plans = Plans::default();
                        self.active.iter_mut().filter(|list| list.is_read).for_each(ListSequence::draft_nothing);
                    }
                }
                _ => {}
            }
        }
    }

    fn forward(&mut self, part: &[usize]) -> Result<Vec<Scores>, EngineError> {
        let segments: Vec<Segment<'_>> = part.iter().map(|&index| self.active[index].tree.segment()).collect();
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
            let accepted = match list.tree.is_scored() {
                true => list.accept(scores, &self.options, self.sources.listed()).map(Some),
                false => Ok(None),
            };
            for Foresight { offer, depth, taken, .. } in list.judged() {
                // A draft model's offer comes after those of all sources.
                let of_source = self.sources.ranking(offer).map(|(_, coverage)| coverage);
                if let Some(coverage) = of_source.or(self.model.as_mut().map(|model| &mut model.coverage)) {
                    coverage.learn(depth, taken);
                }
            }
            match accepted {
                Ok(None) => {
                    outcome = self.engine.commit(list.tree.slot, &(0..list.tree.nodes()).collect::<Vec<_>>());
                }
                Ok(Some(false)) => outcome = self.engine.hold(list.tree.slot, &list.keep()),
                Ok(Some(true)) => ended.push((index, Ok(()))),
                Err(error) => ended.push((index, Err(error))),
            }
            if outcome.is_err() {
                break;
            }
        }
        for (index, result) in ended.into_iter().rev() {
            let list = self.active.remove(index);
            self.close(&list);
            let ListSequence { request, done, .. } = list;
            if !request.plain {
                self.has_drafted = done.drafted > 0;
            }
            if result.is_ok() {
                self.waiting.succeeded();
            }
            finished.push(Finished { id: request.id, result: result.map(|()| done) });
        }
        outcome
    }

    fn close(&mut self, list: &ListSequence) {
        self.engine.close(list.tree.slot);
        if let Some(model) = &mut self.model {
            model.close(list);
        }
    }

    /// After a failed step every list starts over.
    fn isolate(&mut self, error: EngineError, finished: &mut Vec<Finished>) -> Result<(), GenerateError> {
        let lists = std::mem::take(&mut self.active);
        lists.iter().for_each(|list| self.close(list));
        self.waiting.isolate(lists.into_iter().map(|list| list.request).collect(), error, finished)
    }
}

impl TextGenerator for ListGenerator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn device(&self) -> &str {
        &self.engine.info().device
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
        let tokens = part.iter().map(|&index| self.active[index].tree.nodes()).sum();
        let pairs =
            part.iter().map(|&index| self.active[index].tree.nodes() * self.active[index].request.prompt.len()).sum();
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
            self.close(&list);
        }
    }
}

/// As many as there may be, the same number for each step ahead that may be drafted for.
fn most(offer: usize, depth: usize, terms: &Terms<'_>) -> Option<Plan> {
    let steps = steps_left(depth, terms);
    let width = terms.drafted.unwrap_or_else(|| (terms.nodes / terms.steps.min(AHEAD)).max(1));
    (steps > 0).then(|| Plan { offer, widths: vec![width; steps] })
}

/// Steps ahead of beams of this depth that may be drafted for.
fn steps_left(depth: usize, terms: &Terms<'_>) -> usize {
    terms.steps.min(AHEAD).min(terms.levels.saturating_sub(depth + 1))
}
