//! The protocol of [`Engine`](crate::Engine), kept and checked in one place for every implementation.
//!
//! A table of open slots with what each has committed and which nodes of its last step are still
//! provisional; `T` is what an implementation keeps beside that.

use laser_cpu::{Asked, Tree};
use laser_decode::ROOT_PARENT;

use crate::{
    engine::EngineInfo,
    error::EngineError,
    segment::{Segment, Slot},
};

/// One open sequence.
#[derive(Debug)]
pub(super) struct SlotState<T> {
    capacity: usize,
    cached: usize,
    /// Parents of the nodes of the tree: the held ones, then the provisional ones.
    tree: Vec<u32>,
    held: usize,
    pub(super) data: T,
}

impl<T> SlotState<T> {
    /// Committed tokens.
    pub(super) fn cached(&self) -> usize {
        self.cached
    }

    /// What the next step finds.
    pub(super) fn tree(&self) -> Tree<'_> {
        Tree { cached: self.cached, held: &self.tree[..self.held] }
    }

    fn pending(&self) -> usize {
        self.tree.len() - self.held
    }
}

/// All slots of an engine; the lowest free handle is used next.
#[derive(Debug)]
pub(super) struct SlotTable<T> {
    slots: Vec<Option<SlotState<T>>>,
    vocab_size: usize,
    max_positions: usize,
}

impl<T> SlotTable<T> {
    pub(super) fn new(vocab_size: usize, max_positions: usize) -> Self {
        Self { slots: Vec::new(), vocab_size, max_positions }
    }

    pub(super) fn get(&self, slot: Slot) -> Result<&SlotState<T>, EngineError> {
        self.slots.get(slot).and_then(Option::as_ref).ok_or(EngineError::UnknownSlot { slot })
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Result<&mut SlotState<T>, EngineError> {
        self.slots.get_mut(slot).and_then(Option::as_mut).ok_or(EngineError::UnknownSlot { slot })
    }

    /// Opens a slot that already holds `cached` tokens.
    pub(super) fn open(&mut self, capacity: usize, cached: usize, data: T) -> Slot {
        let state = SlotState { capacity, cached, tree: Vec::new(), held: 0, data };
        match self.slots.iter().position(Option::is_none) {
            Some(slot) => {
                self.slots[slot] = Some(state);
                slot
            }
            None => {
                self.slots.push(Some(state));
                self.slots.len() - 1
            }
        }
    }

    /// What each open slot may grow to.
    pub(super) fn capacities(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().flatten().map(|state| state.capacity)
    }

    pub(super) fn close(&mut self, slot: Slot) -> Option<T> {
        self.slots.get_mut(slot).and_then(Option::take).map(|state| state.data)
    }

    /// Refuses a fork that asks for more than is there or fits.
    pub(super) fn check_fork(&self, slot: Slot, length: usize, capacity: usize) -> Result<(), EngineError> {
        let cached = self.get(slot)?.cached;
        if length > cached || length > capacity {
            let fork = format!("cannot fork {length} tokens of {cached} cached ones into a capacity of {capacity}");
            return Err(protocol(slot, fork));
        }
        Ok(())
    }

    /// Refuses a step that breaks the protocol; otherwise the depth of every node, per segment.
    pub(super) fn check_step(&self, segments: &[Segment<'_>]) -> Result<Vec<Vec<usize>>, EngineError> {
        segments
            .iter()
            .enumerate()
            .map(|(index, segment)| {
                if segments[..index].iter().any(|other| other.slot == segment.slot) {
                    return Err(invalid(segment.slot, "the slot has two segments in one step"));
                }
                self.check_segment(segment)
            })
            .collect()
    }

    fn check_segment(&self, segment: &Segment<'_>) -> Result<Vec<usize>, EngineError> {
        let &Segment { slot, tokens, parents, scored_from, asked, .. } = segment;
        let state = self.get(slot)?;
        let nodes = tokens.len();
        if state.pending() > 0 {
            return Err(protocol(slot, format!("{} nodes of the last step are not committed", state.pending())));
        }
        if nodes == 0 || parents.len() != nodes || scored_from > nodes {
            let parents = parents.len();
            return Err(invalid(slot, format!("{nodes} tokens, {parents} parents, scored from {scored_from}")));
        }
        if let Some((node, token)) = tokens.iter().enumerate().find(|(_, token)| **token as usize >= self.vocab_size) {
            let size = self.vocab_size;
            return Err(invalid(slot, format!("node {node} has token {token}, vocabulary is {size}")));
        }
        check_asked(&asked, nodes - scored_from, self.vocab_size).map_err(|message| invalid(slot, message))?;
        let &SlotState { cached, capacity, held, .. } = state;
        if cached + held + nodes > capacity {
            let message =
                format!("{cached} cached tokens and {} nodes exceed the capacity of {capacity}", held + nodes);
            return Err(protocol(slot, message));
        }
        let depths = depths(slot, &state.tree[..held], parents)?;
        let position = cached + depths.iter().copied().max().unwrap_or(0);
        if position >= self.max_positions {
            let limit = self.max_positions;
            return Err(protocol(slot, format!("position {position} is beyond the model's {limit} positions")));
        }
        Ok(depths)
    }

    /// Makes the nodes of a successful step provisional.
    pub(super) fn append(&mut self, segments: &[Segment<'_>]) -> Result<(), EngineError> {
        for segment in segments {
            self.get_mut(segment.slot)?.tree.extend_from_slice(segment.parents);
        }
        Ok(())
    }

    /// Refuses a commit that is no path of the last segment.
    pub(super) fn check_commit(&self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        let tree = &self.get(slot)?.tree;
        let error = |message: String| protocol(slot, format!("invalid commit: {message}"));
        if tree.is_empty() {
            return Err(error("no step since the last commit".into()));
        }
        let mut previous = ROOT_PARENT;
        for &node in keep {
            let Some(&parent) = tree.get(node) else {
                return Err(error(format!("node {node} of {} nodes", tree.len())));
            };
            if parent != previous {
                let (parent, previous) = (name(parent), name(previous));
                return Err(error(format!("node {node} continues {parent}, not {previous}")));
            }
            previous = index(node);
        }
        Ok(())
    }

    /// Counts `kept` nodes as committed and forgets the others.
    pub(super) fn commit(&mut self, slot: Slot, kept: usize) -> Result<(), EngineError> {
        let state = self.get_mut(slot)?;
        state.cached += kept;
        state.held = 0;
        state.tree.clear();
        Ok(())
    }

    /// The parents of the nodes `keep` of the tree, as they are once only these are kept; refuses nodes without their
    /// parents.
    pub(super) fn check_hold(&self, slot: Slot, keep: &[usize]) -> Result<Vec<u32>, EngineError> {
        let tree = &self.get(slot)?.tree;
        let error = |message: String| protocol(slot, format!("invalid hold: {message}"));
        let mut parents = Vec::with_capacity(keep.len());
        for (at, &node) in keep.iter().enumerate() {
            let Some(&parent) = tree.get(node) else {
                return Err(error(format!("node {node} of {} nodes", tree.len())));
            };
            if at > 0 && keep[at - 1] >= node {
                return Err(error(format!("node {node} after node {}", keep[at - 1])));
            }
            let kept = match parent {
                ROOT_PARENT => ROOT_PARENT,
                parent => match keep[..at].binary_search(&(parent as usize)) {
                    Ok(kept) => index(kept),
                    Err(_) => return Err(error(format!("node {node} without its parent, node {parent}"))),
                },
            };
            parents.push(kept);
        }
        Ok(parents)
    }

    /// Makes these the held nodes.
    pub(super) fn hold(&mut self, slot: Slot, parents: Vec<u32>) -> Result<(), EngineError> {
        let state = self.get_mut(slot)?;
        state.held = parents.len();
        state.tree = parents;
        Ok(())
    }
}

/// Depth of every new node of a tree; children of the context have depth 0.
fn depths(slot: Slot, held: &[u32], parents: &[u32]) -> Result<Vec<usize>, EngineError> {
    let mut depths: Vec<usize> = Vec::with_capacity(held.len() + parents.len());
    for (node, &parent) in held.iter().chain(parents).enumerate() {
        let depth = match depths.get(parent as usize) {
            _ if parent == ROOT_PARENT => 0,
            Some(depth) => depth + 1,
            None => {
                return Err(invalid(slot, format!("node {node} has parent {parent} after itself")));
            }
        };
        depths.push(depth);
    }
    Ok(depths.split_off(held.len()))
}

/// Refuses ends that do not divide the tokens among the scored nodes, and tokens that do not exist.
fn check_asked(asked: &Asked<'_>, scored: usize, vocab_size: usize) -> Result<(), String> {
    let &Asked { tokens, ends } = asked;
    if (ends.is_empty() && tokens.is_empty()) || (ends.len() == scored && ends.last() == Some(&tokens.len())) {
        if !ends.is_sorted() {
            return Err("the tokens that are asked for end before they begin".into());
        }
        return match tokens.iter().find(|token| **token as usize >= vocab_size) {
            Some(token) => Err(format!("token {token} is asked for, vocabulary is {vocab_size}")),
            None => Ok(()),
        };
    }
    Err(format!("{} tokens are asked for at {} of {scored} scored nodes", tokens.len(), ends.len()))
}

/// Refuses a segment whose features are not those that the model reads.
pub(super) fn check_features(segment: &Segment<'_>, info: &EngineInfo) -> Result<(), EngineError> {
    let expected = if info.reads_features { segment.tokens.len() * info.hidden_size } else { 0 };
    match segment.before.len() {
        found if found == expected => Ok(()),
        found => Err(invalid(segment.slot, format!("features of {found} numbers, expected {expected}"))),
    }
}

fn invalid(slot: Slot, message: impl std::fmt::Display) -> EngineError {
    protocol(slot, format!("invalid segment: {message}"))
}

fn protocol(slot: Slot, message: String) -> EngineError {
    EngineError::Protocol { slot, message }
}

fn name(node: u32) -> String {
    if node == ROOT_PARENT { "the context".into() } else { format!("node {node}") }
}

/// A node number as parents hold it. Segments are checked against capacities far below `u32::MAX`,
/// so the fallback, which no parent equals, is never taken.
fn index(node: usize) -> u32 {
    u32::try_from(node).unwrap_or(ROOT_PARENT)
}
