//! What an engine has of a list: the end of its prompt and prefixes of identifiers, as one tree.

use std::collections::{HashMap, HashSet, VecDeque};

use laser_decode::{Allowed, ROOT_PARENT, Trie};
use laser_engine::{Asked, Scores, Segment, Slot};

use crate::catalogue::Catalogue;

/// A node of the engine's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A token of the prompt.
    Prompt,
    /// A prefix, by its node in the trie; the root is the prompt's last token.
    Prefix(u32),
}

impl Place {
    fn prefix(self) -> Option<u32> {
        match self {
            Self::Prefix(node) => Some(node),
            Self::Prompt => None,
        }
    }
}

/// The tree of a list in an engine: what it holds, and the segment of the step under way.
pub(super) struct PrefixTree {
    pub(super) slot: Slot,
    /// Tokens of the prompt that are not cached yet.
    pending: VecDeque<u32>,
    /// What the engine holds, parents before children.
    held: Vec<Place>,
    // This step's segment.
    /// Tokens of the prompt; 0 behind it.
    chunk: usize,
    places: Vec<Place>,
    tokens: Vec<u32>,
    parents: Vec<u32>,
    asked: Vec<u32>,
    ends: Vec<usize>,
}

impl PrefixTree {
    pub(super) fn new(slot: Slot, prompt: &[u32]) -> Self {
        Self {
            slot,
            pending: prompt.iter().copied().collect(),
            held: Vec::new(),
            chunk: 0,
            places: Vec::new(),
            tokens: Vec::new(),
            parents: Vec::new(),
            asked: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Whether tokens of the prompt are left to be fed.
    pub(super) fn is_prompt(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Begins a segment with up to `room` tokens of the prompt. Returns how many.
    pub(super) fn feed(&mut self, room: usize) -> usize {
        self.chunk = self.pending.len().min(room);
        [&mut self.tokens, &mut self.parents, &mut self.asked].iter_mut().for_each(|part| part.clear());
        self.places.clear();
        self.ends.clear();
        for (at, token) in self.pending.drain(..self.chunk).enumerate() {
            self.tokens.push(token);
            self.parents.push(at.checked_sub(1).map_or(ROOT_PARENT, index_u32));
            self.places.push(Place::Prompt);
        }
        self.chunk
    }

    /// Whether the segment scores prefixes.
    pub(super) fn is_scored(&self) -> bool {
        !self.is_prompt() && (self.chunk > 0 || !self.held.is_empty())
    }

    /// Nodes of the segment.
    pub(super) fn nodes(&self) -> usize {
        self.tokens.len()
    }

    /// Adds prefixes to a segment that [is scored](Self::is_scored), with those before them, unless they are there.
    pub(super) fn grow(&mut self, prefixes: impl Iterator<Item = u32>, allowed: &Allowed<'_>, catalogue: &Catalogue) {
        let mut there = self.there();
        if self.chunk > 0
            && let Some(last) = self.places.last_mut()
        {
            *last = Place::Prefix(0);
            there.insert(0, self.held.len() + self.places.len() - 1);
        }
        for node in prefixes {
            self.add(node, catalogue, &mut there);
        }
        let places = &self.places[self.chunk.saturating_sub(1)..];
        allowed.fetch(places.iter().filter_map(|place| place.prefix()));
        for place in places {
            if let Some(node) = place.prefix() {
                catalogue.tokens_below(allowed, node, &mut self.asked);
            }
            self.ends.push(self.asked.len());
        }
    }

    /// Where the prefixes are that the engine holds.
    fn there(&self) -> HashMap<u32, usize> {
        self.held.iter().zip(0..).filter_map(|(place, at)| Some((place.prefix()?, at))).collect()
    }

    /// The place of a prefix, which is added with those before it if it is missing.
    fn add(&mut self, node: u32, catalogue: &Catalogue, there: &mut HashMap<u32, usize>) -> usize {
        if let Some(&place) = there.get(&node) {
            return place;
        }
        let parent = catalogue.trie.parent(node).unwrap_or(0);
        let parent = self.add(parent, catalogue, there);
        self.tokens.push(catalogue.token(node));
        self.parents.push(index_u32(parent));
        self.places.push(Place::Prefix(node));
        let place = self.held.len() + self.places.len() - 1;
        there.insert(node, place);
        place
    }

    /// The segment.
    pub(super) fn segment(&self) -> Segment<'_> {
        let scored_from = if self.is_scored() { self.chunk.saturating_sub(1) } else { self.tokens.len() };
        let asked = Asked { tokens: &self.asked, ends: &self.ends };
        let (tokens, parents) = (&self.tokens, &self.parents);
        Segment { slot: self.slot, tokens, parents, scored_from, asked, ..Segment::default() }
    }

    /// The prefixes that the segment computed, with the log probabilities of their allowed children, in their order.
    pub(super) fn scored<'a>(&'a self, scores: &'a Scores) -> impl Iterator<Item = (u32, &'a [f32])> {
        self.places.iter().zip(0..).filter_map(|(place, at)| Some((place.prefix()?, scores.asked(at))))
    }

    /// The nodes of the engine's tree that later steps need: what leads to the beams, and what was computed below
    /// them.
    pub(super) fn keep(&mut self, beams: impl Iterator<Item = u32>, trie: &Trie) -> Vec<usize> {
        let tree: Vec<Place> = self.held.drain(..).chain(self.places.iter().copied()).collect();
        let mut below: HashSet<u32> = beams.collect();
        let mut above: HashSet<u32> = HashSet::new();
        for &beam in &below {
            let mut node = Some(beam);
            while let Some(at) = node.filter(|at| above.insert(*at)) {
                node = trie.parent(at);
            }
        }
        let mut keep = Vec::new();
        for (at, place) in tree.into_iter().enumerate() {
            let is_needed = match place {
                Place::Prompt => true,
                Place::Prefix(node) => {
                    let is_below = trie.parent(node).is_some_and(|parent| below.contains(&parent));
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

/// Numbers of nodes are far below 2^32.
pub(super) fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(ROOT_PARENT)
}
