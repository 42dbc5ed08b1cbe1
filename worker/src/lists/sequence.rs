//! One list under way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use laser_decode::{Allowed, Beam, BeamSearch, ROOT_PARENT, Ranked, Trie, Uniform};
use laser_engine::{Asked, Scores, Segment, Slot};

use super::coverage::{Coverage, Terms};
use super::options::{ListDraft, ListOptions};
use crate::catalogue::Catalogue;
use crate::generate::{Generated, Request, TextError};

/// A node of the engine's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A token of the prompt's end, which the tree begins with.
    Prompt,
    /// A prefix, by its node in the trie; the root is the prompt's last token.
    Prefix(u32),
}

/// One list under way.
pub(super) struct ListSequence {
    pub(super) request: Request,
    pub(super) slot: Slot,
    catalogue: Arc<Catalogue>,
    /// Leaves that must not be listed.
    seen: Vec<u32>,
    search: BeamSearch,
    /// Tokens of the prompt that are not cached yet.
    pending: VecDeque<u32>,
    pub(super) done: Generated,
    /// What the engine holds of its tree, parents before children.
    held: Vec<Place>,
    // This step's segment.
    /// Tokens of the prompt; 0 behind it.
    chunk: usize,
    places: Vec<Place>,
    tokens: Vec<u32>,
    parents: Vec<u32>,
    asked: Vec<u32>,
    ends: Vec<usize>,
    drafted: Vec<Ranked>,
}

impl ListSequence {
    pub(super) fn new(request: Request, catalogue: Arc<Catalogue>, slot: Slot, options: &ListOptions) -> Self {
        Self {
            seen: if options.repeat { Vec::new() } else { seen(&request.history, &catalogue.trie) },
            search: BeamSearch::new(options.width, options.normalisation),
            catalogue,
            pending: request.prompt.iter().copied().collect(),
            request,
            slot,
            done: Generated::default(),
            held: Vec::new(),
            chunk: 0,
            places: Vec::new(),
            tokens: Vec::new(),
            parents: Vec::new(),
            asked: Vec::new(),
            ends: Vec::new(),
            drafted: Vec::new(),
        }
    }

    /// Codes of an identifier.
    pub(super) fn levels(&self) -> usize {
        self.catalogue.trie.levels()
    }

    /// Whether nothing may be listed at all.
    pub(super) fn is_hopeless(&self) -> bool {
        self.catalogue.allowed(&self.seen).count_below(0) == 0
    }

    /// Whether tokens of the prompt are left to be fed.
    pub(super) fn is_prompt(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Beams whose continuations are not known: nodes that this step computes in any case.
    pub(super) fn missing(&self) -> usize {
        if self.is_prompt() { 0 } else { self.search.missing(&self.catalogue.allowed(&self.seen)).count() }
    }

    /// Takes up to `room` tokens of the prompt into this step's segment. Returns how many.
    pub(super) fn feed(&mut self, room: usize) -> usize {
        self.chunk = self.pending.len().min(room);
        [&mut self.tokens, &mut self.parents, &mut self.asked].iter_mut().for_each(|part| part.clear());
        self.places.clear();
        self.ends.clear();
        self.drafted.clear();
        for (at, token) in self.pending.drain(..self.chunk).enumerate() {
            self.tokens.push(token);
            self.parents.push(at.checked_sub(1).map_or(ROOT_PARENT, index_u32));
            self.places.push(Place::Prompt);
        }
        self.chunk
    }

    /// Whether the step scores prefixes of it.
    pub(super) fn is_scored(&self) -> bool {
        !self.is_prompt() && (self.chunk > 0 || !self.held.is_empty())
    }

    /// Adds the prefixes that this step computes: those of the beams whose continuations are not known, and drafted
    /// ones. The widths of drafts are decided under `terms`, or the most if there are none.
    pub(super) fn grow(
        &mut self,
        options: &ListOptions,
        coverage: &Coverage,
        (terms, room): (Option<&Terms<'_>>, usize),
    ) {
        let catalogue = self.catalogue.clone();
        let allowed = catalogue.allowed(&self.seen);
        let (depth, levels) = (self.search.depth(), catalogue.trie.levels());
        let missing: Vec<u32> = self.search.missing(&allowed).collect();
        let mut widths = match (options.draft, terms) {
            (ListDraft::None, _) => Vec::new(),
            _ if self.request.plain => Vec::new(),
            (ListDraft::Trie, Some(terms)) => coverage.widths((depth, missing.len()), terms),
            (ListDraft::Trie, None) => vec![options.nodes],
        };
        if widths.is_empty() && terms.is_some() {
            // Nothing is computed for it, and what it would have taken is learnt all the same.
            widths.push(0);
        }
        self.drafted = self.search.draft(&allowed, (&widths, levels), &mut Uniform);
        let mut places = self.placed();
        if depth == 0
            && let Some(last) = self.places.last_mut()
        {
            *last = Place::Prefix(0);
            places.insert(0, self.held.len() + self.places.len() - 1);
        }
        let drafted: Vec<u32> =
            self.drafted.iter().flat_map(Ranked::drafted).map(|beam| beam.node).take(room).collect();
        self.done.drafted += drafted.iter().filter(|node| !self.search.knows(&allowed, **node)).count() as u64;
        for node in missing.into_iter().chain(drafted) {
            self.add(node, &catalogue, &mut places);
        }
        let scored = self.chunk.saturating_sub(1);
        for place in &self.places[scored..] {
            if let Place::Prefix(node) = *place {
                self.asked.extend(allowed.children(node).map(|child| catalogue.token(child)));
            }
            self.ends.push(self.asked.len());
        }
    }

    /// Where the prefixes are that the engine holds.
    fn placed(&self) -> HashMap<u32, usize> {
        let prefix = |(at, place): (usize, &Place)| match place {
            Place::Prefix(node) => Some((*node, at)),
            Place::Prompt => None,
        };
        self.held.iter().enumerate().filter_map(prefix).collect()
    }

    /// Adds a prefix to the segment, with those before it that are missing, unless it is there.
    fn add(&mut self, node: u32, catalogue: &Catalogue, places: &mut HashMap<u32, usize>) -> usize {
        if let Some(&place) = places.get(&node) {
            return place;
        }
        let parent = catalogue.trie.parent(node).unwrap_or(0);
        let parent = self.add(parent, catalogue, places);
        self.tokens.push(catalogue.token(node));
        self.parents.push(index_u32(parent));
        self.places.push(Place::Prefix(node));
        let place = self.held.len() + self.places.len() - 1;
        places.insert(node, place);
        place
    }

    /// Its part of this step.
    pub(super) fn segment(&self) -> Segment<'_> {
        let scored_from = if self.is_scored() { self.chunk.saturating_sub(1) } else { self.tokens.len() };
        let asked = Asked { tokens: &self.asked, ends: &self.ends };
        Segment {
            slot: self.slot,
            tokens: &self.tokens,
            parents: &self.parents,
            scored_from,
            asked,
            ..Segment::default()
        }
    }

    /// Nodes of this step.
    pub(super) fn nodes(&self) -> usize {
        self.tokens.len()
    }

    /// Takes over what the target says. Returns whether the list is complete.
    pub(super) fn accept(
        &mut self,
        scores: &Scores,
        options: &ListOptions,
        coverage: &mut Coverage,
    ) -> Result<bool, TextError> {
        if !self.is_scored() {
            return Ok(false);
        }
        let catalogue = self.catalogue.clone();
        let allowed = catalogue.allowed(&self.seen);
        for (at, place) in self.places.iter().enumerate() {
            let &Place::Prefix(node) = place else { continue };
            let log_probabilities = scores.asked(at);
            if log_probabilities.iter().any(|log_probability| log_probability.is_nan()) {
                return Err(TextError::NotANumber);
            }
            self.search.learn(&allowed, node, log_probabilities);
        }
        let steps = self.advance(&allowed, coverage);
        self.done.step_accepted.push(index_u32(steps.saturating_sub(1)));
        let is_done = self.search.depth() == catalogue.trie.levels();
        if is_done {
            self.done.items = listed(self.search.beams(), &self.request.history, (&catalogue, options));
        }
        Ok(is_done)
    }

    /// Goes on step by step, and judges the drafts of each. Returns the number of steps.
    fn advance(&mut self, allowed: &Allowed<'_>, coverage: &mut Coverage) -> usize {
        let (start, mut covered) = (self.search.depth(), true);
        for ahead in 0.. {
            if self.search.advance(allowed, start + ahead + 1) == 0 {
                return ahead;
            }
            if let Some(ranked) = self.drafted.get(ahead).filter(|ranked| covered && !ranked.is_empty()) {
                let width = ranked.width_for(self.search.beams()).unwrap_or(ranked.len());
                coverage.learn((start, ahead), width, ranked.len());
                covered = width <= ranked.drafted().len();
            }
        }
        0
    }

    /// The nodes of the engine's tree that later steps need: what leads to the beams, and what was computed below
    /// them.
    pub(super) fn keep(&mut self) -> Vec<usize> {
        let tree: Vec<Place> = self.held.drain(..).chain(self.places.iter().copied()).collect();
        let beams: HashSet<u32> = self.search.beams().iter().map(|beam| beam.node).collect();
        let mut above: HashSet<u32> = HashSet::new();
        for &beam in &beams {
            let mut node = Some(beam);
            while let Some(at) = node.filter(|at| above.insert(*at)) {
                node = self.catalogue.trie.parent(at);
            }
        }
        let mut below = beams;
        let mut keep = Vec::new();
        for (at, place) in tree.into_iter().enumerate() {
            let is_needed = match place {
                Place::Prompt => true,
                Place::Prefix(node) => {
                    let is_below = self.catalogue.trie.parent(node).is_some_and(|parent| below.contains(&parent));
                    is_below && below.insert(node) || above.contains(&node)
                }
            };
            if is_needed {
                keep.push(at);
                self.held.push(place);
            }
        }
        keep
    }
}

/// The leaves all of whose items the user has had.
fn seen(history: &[u32], trie: &Trie) -> Vec<u32> {
    let had: HashSet<u32> = history.iter().copied().collect();
    let leaves: HashSet<u32> = had.iter().map(|&item| trie.leaf_of_item(item)).collect();
    leaves.into_iter().filter(|&leaf| trie.items_of(leaf).all(|item| had.contains(&item))).collect()
}

/// The items of the best leaves, as many as a list has.
fn listed(beams: &[Beam], history: &[u32], (catalogue, options): (&Catalogue, &ListOptions)) -> Vec<(u32, f64)> {
    let Catalogue { trie, stock, .. } = catalogue;
    let may_be = |item: &u32| stock.contains_item(trie, *item) && (options.repeat || !history.contains(item));
    let of_beam = |beam: &Beam| {
        let leaf = trie.leaf_of_node(beam.node).unwrap_or(u32::MAX);
        let score = beam.score;
        let items = trie.items_of(leaf).filter(may_be).map(move |item| (item, score));
        items.take(if options.all_ties { usize::MAX } else { 1 }).collect::<Vec<_>>()
    };
    beams.iter().flat_map(of_beam).take(options.items).collect()
}

/// Numbers of nodes are far below 2^32.
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(ROOT_PARENT)
}
