//! One list under way.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use laser_decode::{Beam, BeamSearch, Expected, Listed, Noise, Ranked, Seen, Trie};
use laser_engine::{Scores, Slot};

use super::coverage::{Coverage, NEVER};
use super::expectation::Expectation;
use super::options::{ListDraft, ListOptions};
use super::plan::Plan;
use super::prefixes::{PrefixTree, index_u32};
use super::reading::Reading;
use super::sources::Learners;
use crate::catalogue::Catalogue;
use crate::generate::{Generated, Request, TextError};

/// What ranks candidates.
pub(super) enum Ranker<'a> {
    /// What a draft model has read.
    Model(&'a mut Reading),
    /// The source that drafts the list, and what lists so far had.
    Source(Option<&'a Listed>),
}

/// One list under way.
pub(super) struct ListSequence {
    pub(super) request: Request,
    pub(super) tree: PrefixTree,
    pub(super) done: Generated,
    /// What a draft model has read, if it has.
    pub(super) reading: Option<Reading>,
    /// Whether a draft model, or where there is none that source, drafts for it whatever that costs.
    pub(super) is_tried: bool,
    /// The source of drafts whose turn it is to learn of this list, by number; none of a plain search.
    pub(super) turn: Option<usize>,
    /// Whether it is learnt what its drafts would have to be, even if there are none.
    pub(super) is_watched: bool,
    /// What is drafted in this step; nothing if absent.
    pub(super) plan: Option<Plan>,
    /// Whether a draft model drafts it.
    pub(super) is_read: bool,
    /// What drafts it otherwise.
    pub(super) draft: ListDraft,
    /// 1 for lists that are not drawn.
    temperature: f32,
    catalogue: Arc<Catalogue>,
    /// Leaves that must not be listed.
    seen: Seen,
    expectation: Expectation,
    search: BeamSearch,
    /// Of this step, by steps ahead.
    drafted: Vec<Ranked>,
}

impl ListSequence {
    pub(super) fn new(request: Request, catalogue: Arc<Catalogue>, slot: Slot, options: &ListOptions) -> Self {
        let seen = match options.repeat {
            true => Seen::default(),
            false => Seen::new(&catalogue.trie, &catalogue.stock, &seen(&request.history, &catalogue.trie)),
        };
        let search = BeamSearch::new(options.width(&request), options.normalisation);
        Self {
            search: match options.temperature {
                Some(temperature) if options.drafted().is_some() => {
                    search.sampled_under(Noise::new(request.key), temperature)
                }
                Some(temperature) => search.drawn_under(Noise::new(request.key), temperature),
                None => search,
            },
            tree: PrefixTree::new(slot, &request.prompt),
            expectation: Expectation::default(),
            #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough for a draft")]
            temperature: options.temperature.unwrap_or(1.0) as f32,
            request,
            done: Generated::default(),
            reading: None,
            is_tried: false,
            turn: None,
            is_watched: false,
            plan: None,
            is_read: false,
            draft: ListDraft::None,
            catalogue,
            seen,
            drafted: Vec::new(),
        }
    }

    /// Codes of an identifier.
    pub(super) fn levels(&self) -> usize {
        self.catalogue.trie.levels()
    }

    /// Codes of the beams.
    pub(super) fn depth(&self) -> usize {
        self.search.depth()
    }

    /// Whether nothing may be listed at all.
    pub(super) fn is_hopeless(&self) -> bool {
        self.catalogue.allowed(&self.seen).count_below(0) == 0
    }

    /// Beams whose continuations are not known: nodes that this step computes in any case.
    pub(super) fn missing(&self) -> usize {
        if self.tree.is_prompt() { 0 } else { self.search.missing(&self.catalogue.allowed(&self.seen)).count() }
    }

    /// Begins a step, with up to `room` tokens of the prompt. Returns how many.
    pub(super) fn begin(&mut self, room: usize) -> usize {
        self.draft_nothing();
        self.tree.feed(room)
    }

    /// Nothing is drafted in this step.
    pub(super) fn draft_nothing(&mut self) {
        (self.plan, self.is_read) = (None, false);
        self.drafted.clear();
    }

    /// What drafts in this step, by its number among all that offered to.
    pub(super) fn offer(&self) -> Option<usize> {
        self.plan.as_ref().map(|plan| plan.offer)
    }

    /// Whether candidates are to be ranked for one more step ahead.
    pub(super) fn is_drafting(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| self.drafted.len() < plan.widths.len())
    }

    /// Adds to the segment of a draft model's tree what it has to read to rank one more step ahead.
    pub(super) fn ask(&mut self, reading: &mut Reading) {
        let allowed = self.catalogue.allowed(&self.seen);
        let from = self.drafted.last().map_or(self.search.beams(), Ranked::drafted);
        let unread: Vec<u32> = from.iter().map(|beam| beam.node).filter(|node| !reading.knows(*node)).collect();
        reading.tree.grow(unread.into_iter(), &allowed, &self.catalogue);
    }

    /// Takes in what a draft model says. Returns what it has to hold on to.
    pub(super) fn take_in(&self, reading: &mut Reading, scores: &Scores) -> Vec<usize> {
        reading.learn(scores, self.temperature);
        reading.tree.keep(self.search.beams().iter().map(|beam| beam.node), &self.catalogue.trie)
    }

    /// Ranks the candidates of one more step ahead.
    pub(super) fn rank(&mut self, by: Ranker<'_>) {
        let Some(&width) = self.plan.as_ref().and_then(|plan| plan.widths.get(self.drafted.len())) else { return };
        let allowed = self.catalogue.allowed(&self.seen);
        let mut rank = |expected: &mut dyn Expected| {
            let ranked = self.search.candidates(&allowed, self.drafted.last(), width, expected);
            self.drafted.push(ranked);
        };
        match by {
            Ranker::Model(reading) => rank(reading),
            Ranker::Source(listed) => {
                self.expectation.rank((self.draft, &self.request), (&self.catalogue, listed), rank);
            }
        }
    }

    /// The same, and the source learns how long it takes.
    pub(super) fn rank_timed(&mut self, by: Ranker<'_>, coverage: &mut Coverage) {
        let start = Instant::now();
        self.rank(by);
        coverage.learn_ranking(start.elapsed().as_secs_f64());
    }

    /// Adds the prefixes that this step computes: those of the beams whose continuations are not known, and up to
    /// `room` drafted ones.
    pub(super) fn grow(&mut self, room: usize) {
        let allowed = self.catalogue.allowed(&self.seen);
        let drafted = self.drafted.iter().flat_map(Ranked::drafted).map(|beam| beam.node);
        let drafted: Vec<u32> = drafted.take(room).filter(|node| !self.search.knows(&allowed, *node)).collect();
        self.done.drafted += drafted.len() as u64;
        let missing: Vec<u32> = self.search.missing(&allowed).collect();
        self.tree.grow(missing.into_iter().chain(drafted), &allowed, &self.catalogue);
    }

    /// Takes over what the target says, of which others learn. Returns whether the list is complete.
    pub(super) fn accept(
        &mut self,
        scores: &Scores,
        options: &ListOptions,
        learners: Learners<'_>,
    ) -> Result<bool, TextError> {
        let allowed = self.catalogue.allowed(&self.seen);
        for (node, log_probabilities) in self.tree.scored(scores) {
            if log_probabilities.iter().any(|log_probability| log_probability.is_nan()) {
                return Err(TextError::NotANumber);
            }
            self.search.learn(&allowed, node, log_probabilities);
        }
        let steps = self.advance(learners);
        self.done.step_accepted.push(index_u32(steps.saturating_sub(1)));
        let is_done = self.search.depth() == self.levels();
        if is_done {
            self.done.items = listed(self.search.beams(), &self.request, (&self.catalogue, options));
        }
        Ok(is_done)
    }

    /// Goes on step by step, and judges the drafts of each. Returns the number of steps.
    fn advance(&mut self, mut learners: Learners<'_>) -> usize {
        let (start, mut covered) = (self.search.depth(), true);
        for ahead in 0.. {
            let Some(judged) = self.advance_one((start, ahead), covered) else { return ahead };
            if let (Some((width, candidates, _)), Some(coverage)) = (judged, &mut learners.coverage) {
                coverage.learn((start, ahead), width, candidates);
            }
            covered = judged.map_or(covered, |(_, _, is_covered)| is_covered);
            if let Some(listed) = &mut learners.listed {
                self.tell(listed);
            }
        }
        0
    }

    /// Goes on by the step that is so many ahead of where the forward found the list. Returns how many candidates would
    /// have had to be drafted for it, of how many, and whether they were, if it was drafted for and all steps before it
    /// were `covered`; none where scores are missing.
    fn advance_one(&mut self, (start, ahead): (usize, usize), covered: bool) -> Option<Option<(usize, usize, bool)>> {
        let allowed = self.catalogue.allowed(&self.seen);
        let ranked = self.drafted.get(ahead).filter(|ranked| covered && !ranked.is_empty());
        if let Some(ranked) = ranked.filter(|_| self.search.is_sampled()) {
            let accepted = self.search.accept(&allowed, ranked)?;
            return Some(Some((if accepted { 1 } else { NEVER }, ranked.len(), accepted)));
        }
        if self.search.advance(&allowed, start + ahead + 1) == 0 {
            return None;
        }
        Some(ranked.map(|ranked| {
            let width = ranked.width_for(self.search.beams()).unwrap_or(ranked.len());
            (width, ranked.len(), width <= ranked.drafted().len())
        }))
    }

    /// Tells of the beams. The last codes are never drafted; and an audit's plain search comes before the same list
    /// with drafts, which must not know it.
    fn tell(&mut self, listed: &mut Listed) {
        if self.search.depth() < self.levels() && !self.request.plain {
            let context = self.expectation.context(&self.request, &self.catalogue);
            listed.learn(&self.catalogue.trie, context, self.search.beams().iter().map(|beam| beam.node));
        }
    }

    /// The nodes of the engine's tree that later steps need.
    pub(super) fn keep(&mut self) -> Vec<usize> {
        self.tree.keep(self.search.beams().iter().map(|beam| beam.node), &self.catalogue.trie)
    }
}

/// The leaves all of whose items the user has had.
fn seen(history: &[u32], trie: &Trie) -> Vec<u32> {
    let had: HashSet<u32> = history.iter().copied().collect();
    let leaves: HashSet<u32> = had.iter().map(|&item| trie.leaf_of_item(item)).collect();
    leaves.into_iter().filter(|&leaf| trie.items_of(leaf).all(|item| had.contains(&item))).collect()
}

/// The items of the best leaves, as many as a list has.
fn listed(beams: &[Beam], request: &Request, (catalogue, options): (&Catalogue, &ListOptions)) -> Vec<(u32, f64)> {
    let Catalogue { trie, stock, .. } = catalogue;
    let may_be = |item: &u32| stock.contains_item(trie, *item) && (options.repeat || !request.history.contains(item));
    let of_beam = |beam: &Beam| {
        let leaf = trie.leaf_of_node(beam.node).unwrap_or(u32::MAX);
        let score = beam.key;
        let items = trie.items_of(leaf).filter(may_be).map(move |item| (item, score));
        items.take(if options.all_ties { usize::MAX } else { 1 }).collect::<Vec<_>>()
    };
    beams.iter().flat_map(of_beam).take(options.items(request)).collect()
}
