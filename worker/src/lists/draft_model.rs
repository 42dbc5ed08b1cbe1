//! A draft model of lists: a smaller recommender that runs ahead of the target's beams.
//!
//! It has a cache of its own for each list, which holds the prefixes that it has read as one tree. A forward reads the
//! beams, or what was drafted one step ahead of them, of all lists together, and tells how likely their continuations
//! are. The target's beams are where it goes on in the next step, whatever it had drafted.

use std::time::Instant;

use laser_engine::{Engine, EngineError, Segment};

use super::coverage::Coverage;
use super::options::{ListDraft, ListOptions};
use super::reading::Reading;
use super::sequence::{ListSequence, Ranker};
use crate::cost::{StepCost, StepLoad};

/// A smaller recommender of the same codes.
pub struct ListDraftModel {
    engine: Box<dyn Engine>,
    /// What forwards cost; without it, it drafts for every list.
    pub(super) cost: Option<StepCost>,
    pub(super) coverage: Coverage,
}

impl std::fmt::Debug for ListDraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListDraftModel").field("coverage", &self.coverage).finish_non_exhaustive()
    }
}

impl ListDraftModel {
    /// A draft model whose forwards have to pay by what they `cost`, or run in any case if that is absent. The engine's
    /// vocabulary must be the target's.
    #[must_use]
    pub fn new(engine: Box<dyn Engine>, cost: Option<StepCost>) -> Self {
        Self { engine, cost, coverage: Coverage::default() }
    }

    /// Whether it drafts for the list that was counted last whatever that costs.
    pub(super) fn is_tried(&self) -> bool {
        self.cost.is_none() || self.coverage.is_tried()
    }

    /// The seconds that it reads so many tokens of so many lists for, whose prompts have so many tokens together.
    pub(super) fn seconds(&self, (tokens, lists): (usize, usize), prompts: usize) -> f64 {
        let load = StepLoad { tokens: tokens * lists, pairs: tokens * prompts };
        self.cost.as_ref().map_or(0.0, |cost| cost.seconds_of_late(load))
    }

    /// Reads what it takes to rank one more step ahead, of all these lists, and ranks. A list whose cache has no room,
    /// or that has more tokens than the draft model has positions, is ranked as if nothing were read.
    ///
    /// # Errors
    /// The engine's.
    pub(super) fn draft(&mut self, lists: &mut [&mut ListSequence], options: &ListOptions) -> Result<(), EngineError> {
        let positions = self.engine.info().max_positions;
        let is_new = |list: &&mut &mut ListSequence| {
            list.reading.is_none() && list.request.prompt.len() + list.levels() <= positions
        };
        for list in lists.iter_mut().filter(is_new) {
            if let Ok(slot) = self.engine.open(options.capacity(&list.request, list.levels())) {
                list.reading = Some(Reading::new(slot, &list.request.prompt));
            }
        }
        let mut readings: Vec<(usize, Reading)> = Vec::with_capacity(lists.len());
        for (at, list) in lists.iter_mut().enumerate() {
            let Some(mut reading) = list.reading.take() else {
                list.rank(Ranker::Source((ListDraft::None, None)));
                continue;
            };
            reading.tree.feed(usize::MAX);
            list.ask(&mut reading);
            readings.push((at, reading));
        }
        let outcome = self.read(lists, &mut readings);
        for (at, mut reading) in readings {
            lists[at].rank_timed(Ranker::Model(&mut reading), &mut self.coverage);
            lists[at].reading = Some(reading);
        }
        outcome
    }

    /// One forward over the segments of the readings.
    fn read(&mut self, lists: &[&mut ListSequence], readings: &mut [(usize, Reading)]) -> Result<(), EngineError> {
        let mut part: Vec<&mut (usize, Reading)> = readings.iter_mut().filter(|(_, r)| r.tree.nodes() > 0).collect();
        if part.is_empty() {
            return Ok(());
        }
        let segments: Vec<Segment<'_>> = part.iter().map(|(_, reading)| reading.tree.segment()).collect();
        let tokens = segments.iter().map(|segment| segment.tokens.len()).sum();
        let pairs = part.iter().map(|(at, r)| r.tree.nodes() * lists[*at].request.prompt.len()).sum();
        let start = Instant::now();
        let scores = self.engine.step(&segments, 0)?;
        if let Some(cost) = &mut self.cost {
            cost.learn(StepLoad { tokens, pairs }, start.elapsed().as_secs_f64());
        }
        for ((at, reading), scores) in part.iter_mut().zip(&scores) {
            let keep = lists[*at].take_in(reading, scores);
            self.engine.hold(reading.tree.slot, &keep)?;
        }
        Ok(())
    }

    /// Forgets a list.
    pub(super) fn close(&mut self, list: &ListSequence) {
        if let Some(reading) = &list.reading {
            self.engine.close(reading.tree.slot);
        }
    }
}
