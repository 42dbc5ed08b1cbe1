//! One list under way.

use std::collections::HashSet;
use std::sync::Arc;

use laser_decode::{Beam, BeamSearch, Expected, Listed, Noise, Ranked, Seen};
use laser_engine::{Scores, Slot};

use super::coverage::Coverage;
use super::expectation::Expectation;
use super::foresight::Foresight;
use super::options::{ListDraft, ListOptions};
use super::plan::Plan;
use super::prefixes::{PrefixTree, index_u32};
use super::reading::Reading;
use crate::catalogue::Catalogue;
use crate::generate::{Generated, Request, TextError};

/// What ranks candidates.
pub(super) enum Ranker<'a> {
    /// What a draft model has read.
    Model(&'a mut Reading),
    /// A source.
    Source(By<'a>),
}

/// A source without a draft model, and what lists so far had if it goes by that.
pub(super) type By<'a> = (ListDraft, Option<&'a Listed>);

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
    /// Whether that source foresees the list, whatever drafts it.
    pub(super) is_watched: bool,
    /// Whether lists to come are drafted by what this one has.
    pub(super) is_told: bool,
    /// What is drafted in this step; nothing if absent.
    pub(super) plan: Option<Plan>,
    /// Whether its drafts are to be judged.
    pub(super) is_judged: bool,
    /// What the source whose turn it is ranks in this step.
    pub(super) foresight: Option<Plan>,
    /// Whether a draft model drafts it.
    pub(super) is_read: bool,
    /// 1 for lists that are not drawn.
    temperature: f32,
    catalogue: Arc<Catalogue>,
    /// Leaves that must not be listed.
    seen: Seen,
    expectation: Expectation,
    search: BeamSearch,
    /// Of this step, by steps ahead.
    drafted: Vec<Ranked>,
    /// What the beams to come will judge.
    foreseen: Vec<Foresight>,
}

impl ListSequence {
    pub(super) fn new(request: Request, catalogue: Arc<Catalogue>, slot: Slot, options: &ListOptions) -> Self {
        let seen = match options.repeat {
            true => Seen::default(),
            false => Seen::new(&catalogue.trie, &catalogue.stock, &seen(&request.history, &catalogue)),
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
            is_told: false,
            plan: None,
            is_judged: false,
            foresight: None,
            is_read: false,
            catalogue,
            seen,
            drafted: Vec::new(),
            foreseen: Vec::new(),
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
        (self.plan, self.foresight, self.is_read) = (None, None, false);
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

    /// Ranks the candidates of one more step ahead that is drafted for.
    pub(super) fn rank(&mut self, by: Ranker<'_>) {
        let Some(&width) = self.plan.as_ref().and_then(|plan| plan.widths.get(self.drafted.len())) else { return };
        let mut drafted = std::mem::take(&mut self.drafted);
        self.rank_next(&mut drafted, width, by);
        self.drafted = drafted;
    }

    /// The same, and the source learns how long it takes.
    pub(super) fn rank_timed(&mut self, by: Ranker<'_>, coverage: &mut Coverage) {
        coverage.time(|| self.rank(by));
    }

    /// Ranks the candidates of the step behind those that are `ranked`, of which so many are drafted.
    fn rank_next(&mut self, ranked: &mut Vec<Ranked>, width: usize, by: Ranker<'_>) {
        let allowed = self.catalogue.allowed(&self.seen);
        let mut rank = |expected: &mut dyn Expected| {
            let next = self.search.candidates(&allowed, ranked.last(), width, expected);
            ranked.push(next);
        };
        match by {
            Ranker::Model(reading) => rank(reading),
            Ranker::Source((draft, listed)) => {
                self.expectation.rank((draft, &self.request), (&self.catalogue, listed), rank);
            }
        }
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
        if let Some(plan) = self.plan.as_ref().filter(|_| self.is_judged) {
            let ranked = std::mem::take(&mut self.drafted);
            self.foreseen.push(Foresight::new(plan.offer, self.search.depth(), ranked));
        }
    }

    /// Ranks as far ahead as the source whose turn it is might draft, behind what it does draft in this step. Nothing
    /// is computed for that: the beams to come tell what it would have taken. Where drafts of two steps ahead save
    /// nothing and those of three a forward, nobody would get there step by step.
    pub(super) fn foresee(&mut self, by: By<'_>, coverage: &mut Coverage) {
        let Some(Plan { offer, widths }) = self.foresight.take() else { return };
        let depth = self.depth();
        let drafted = self.foreseen.pop_if(|drafted| drafted.offer == offer && drafted.depth == depth);
        let mut ranked = drafted.map_or_else(Vec::new, |drafted| drafted.ranked);
        for width in widths.into_iter().skip(ranked.len()) {
            coverage.time(|| self.rank_next(&mut ranked, width, Ranker::Source(by)));
        }
        self.foreseen.push(Foresight::new(offer, depth, ranked));
    }

    /// Takes over what the target says, and tells `listed` of the beams. Returns whether the list is complete.
    pub(super) fn accept(
        &mut self,
        scores: &Scores,
        options: &ListOptions,
        listed: Option<&mut Listed>,
    ) -> Result<bool, TextError> {
        let allowed = self.catalogue.allowed(&self.seen);
        for (node, log_probabilities) in self.tree.scored(scores) {
            if log_probabilities.iter().any(|log_probability| log_probability.is_nan()) {
                return Err(TextError::NotANumber);
            }
            self.search.learn(&allowed, node, log_probabilities);
        }
        let steps = self.advance(listed);
        self.done.step_accepted.push(index_u32(steps.saturating_sub(1)));
        let is_done = self.search.depth() == self.levels();
        if is_done {
            self.done.items = items_of(self.search.beams(), &self.request, (&self.catalogue, options));
        }
        Ok(is_done)
    }

    /// What was foreseen and has been judged since this was asked.
    pub(super) fn judged(&mut self) -> impl Iterator<Item = Foresight> {
        self.foreseen.extract_if(.., |foresight| foresight.is_judged())
    }

    /// Goes on step by step, and judges what was foreseen of each. Returns the number of steps.
    fn advance(&mut self, mut listed: Option<&mut Listed>) -> usize {
        let start = self.search.depth();
        while let Some(is_accepted) = self.advance_one() {
            let (beams, depth) = (self.search.beams(), self.search.depth());
            self.foreseen.iter_mut().for_each(|foresight| foresight.judge(beams, depth, is_accepted));
            if let Some(listed) = &mut listed {
                self.tell(listed);
            }
        }
        self.search.depth() - start
    }

    /// Goes on by one step; none where scores are missing. Where drafts are drawn, returns whether those of this step
    /// were accepted.
    fn advance_one(&mut self) -> Option<Option<bool>> {
        let (allowed, depth) = (self.catalogue.allowed(&self.seen), self.search.depth());
        let drafted = self.foreseen.last().and_then(|drafted| drafted.next(depth));
        if let Some(drafted) = drafted.filter(|_| self.search.is_sampled()) {
            return self.search.accept(&allowed, drafted).map(Some);
        }
        (self.search.advance(&allowed, depth + 1) > 0).then_some(None)
    }

    /// Tells of the beams. The last codes are never drafted; and an audit's plain search comes before the same list
    /// with drafts, which must not know it.
    fn tell(&mut self, listed: &mut Listed) {
        if self.search.depth() < self.levels() && self.is_told {
            let context = self.expectation.context(&self.request, &self.catalogue);
            listed.learn(&self.catalogue.trie, context, self.search.beams().iter().map(|beam| beam.node));
        }
    }

    /// The nodes of the engine's tree that later steps need.
    pub(super) fn keep(&mut self) -> Vec<usize> {
        self.tree.keep(self.search.beams().iter().map(|beam| beam.node), &self.catalogue.trie)
    }
}

/// The leaves that hold no other items in stock than the user has had.
fn seen(history: &[u32], catalogue: &Catalogue) -> Vec<u32> {
    let Catalogue { trie, stock, .. } = catalogue;
    let had: HashSet<u32> = history.iter().copied().collect();
    let leaves: HashSet<u32> = had.iter().map(|&item| trie.leaf_of_item(item)).collect();
    let is_had = |item: u32| had.contains(&item) || !stock.contains_item(trie, item);
    leaves.into_iter().filter(|&leaf| trie.items_of(leaf).all(is_had)).collect()
}

/// The items of the best leaves, as many as a list has.
fn items_of(beams: &[Beam], request: &Request, (catalogue, options): (&Catalogue, &ListOptions)) -> Vec<(u32, f64)> {
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
