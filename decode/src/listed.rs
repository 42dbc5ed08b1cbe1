//! What lists had so far, by what their users had last, and what the user's own previous list had: drafts of lists that
//! need neither a model nor a file.
//!
//! Texts of one night are the best drafts of like texts (LASER, SIGIR 2025, section 3.2), and so are lists: users whose
//! last items share their first codes get lists that begin alike. What histories say of the next item
//! ([`Neighbours`](crate::Neighbours), [`CodeShares`](crate::CodeShares)) is another matter than what the model lists.
//!
//! Counted is how many lists had a prefix among their beams, for every first code of the user's last items, and for all
//! users. Whole items tell no more beside first codes, and far less alone (docs/benchmarks.md, "Drafts of lists"). Of a
//! user's previous list, which is at hand where the history, the model or the catalogue has changed since, it counts
//! how many items begin with a prefix.

use std::collections::HashMap;

use crate::beams::{Expected, log_share};
use crate::trie::Trie;

/// Items of a history that say what its list begins with, and what they weigh, the last one first.
const RECENT: [f64; 3] = [1.0, 0.7, 0.5];

/// What the lists of all users weigh beside them.
const EVERYBODY: f64 = 0.05;

/// What an item of the user's previous list weighs. Half of it or twice as much covered as many beams, a fifth of it
/// fewer.
const PREVIOUS: f64 = 1.0;

/// Lists that a first code must have for half its weight, less one.
const FEW: f64 = 2.0;

/// Counts that are kept, at most: about 40 MB.
const COUNTS_MAX: usize = 1 << 21;

/// What lists had so far.
#[derive(Debug, Clone)]
pub struct Listed {
    /// By the node of a first code; by the root for all users.
    contexts: HashMap<u32, Counts>,
    /// How many counts there are, and may be.
    counts: usize,
    most: usize,
}

/// Of the lists with one first code, or of one list.
#[derive(Debug, Clone, Default, PartialEq)]
struct Counts {
    /// How many there were.
    lists: f64,
    /// For a prefix its continuations in order, each with how many lists had it among their beams, or how many items of
    /// the one list begin with it.
    below: HashMap<u32, Vec<(u32, f32)>>,
}

impl Counts {
    /// Counts a prefix, given its parent. Returns whether it is a new one.
    fn add(&mut self, parent: u32, prefix: u32) -> bool {
        let below = self.below.entry(parent).or_default();
        match below.binary_search_by_key(&prefix, |count| count.0) {
            Ok(at) => {
                below[at].1 += 1.0;
                false
            }
            Err(at) => {
                below.insert(at, (prefix, 1.0));
                true
            }
        }
    }
}

/// What is looked up for a user.
#[derive(Debug, Clone, PartialEq)]
pub struct ListContext {
    /// Nodes of first codes with their weights.
    nodes: Vec<(u32, f64)>,
    /// The items of the user's previous list.
    previous: Counts,
}

impl ListContext {
    /// That of a history, oldest item first, and of the user's previous list, empty if there is none: items by their
    /// number in the trie. Those that it does not have are left out.
    #[must_use]
    pub fn new(trie: &Trie, history: &[u32], previous: &[u32]) -> Self {
        let path = |&item: &u32| ((item as usize) < trie.items()).then(|| trie.path(trie.leaf_of_item(item)));
        let mut nodes: Vec<(u32, f64)> = vec![(0, EVERYBODY)];
        let first = |item| path(item)?.first().copied();
        for (node, weight) in history.iter().rev().filter_map(first).zip(RECENT) {
            match nodes.iter_mut().find(|(other, _)| *other == node) {
                Some((_, sum)) => *sum += weight,
                None => nodes.push((node, weight)),
            }
        }
        let mut counts = Counts::default();
        for path in previous.iter().filter_map(path) {
            let parents = [0].into_iter().chain(path.iter().copied());
            for (parent, &prefix) in parents.zip(&path) {
                counts.add(parent, prefix);
            }
        }
        Self { nodes, previous: counts }
    }
}

impl Default for Listed {
    fn default() -> Self {
        Self { contexts: HashMap::new(), counts: 0, most: COUNTS_MAX }
    }
}

impl Listed {
    /// Counts the beams of a list, all of one depth, at least 1.
    pub fn learn(&mut self, trie: &Trie, context: &ListContext, beams: impl Iterator<Item = u32>) {
        let beams: Vec<(u32, u32)> = beams.filter_map(|beam| Some((trie.parent(beam)?, beam))).collect();
        let is_first = beams.iter().any(|(parent, _)| *parent == 0);
        for &(node, _) in &context.nodes {
            let counts = self.contexts.entry(node).or_default();
            for &(parent, beam) in &beams {
                self.counts += usize::from(counts.add(parent, beam));
            }
            counts.lists += f64::from(u8::from(is_first));
        }
        if self.counts > self.most {
            self.age();
        }
    }

    /// Halves all counts and forgets what one list had.
    fn age(&mut self) {
        self.counts = 0;
        for counts in self.contexts.values_mut() {
            counts.lists /= 2.0;
            counts.below.retain(|_, below| {
                below.iter_mut().for_each(|count| count.1 /= 2.0);
                below.retain(|count| count.1 >= 1.0);
                self.counts += below.len();
                !below.is_empty()
            });
        }
    }

    /// What a user's list is expected to be.
    #[must_use]
    pub fn of_user<'a>(&'a self, context: &'a ListContext) -> LikelyLists<'a> {
        let part = |&(node, weight): &(u32, f64)| {
            let counts = self.contexts.get(&node)?;
            Some((counts, weight / (counts.lists + FEW)))
        };
        let alike = context.nodes.iter().filter_map(part);
        LikelyLists { parts: alike.chain([(&context.previous, PREVIOUS)]).collect() }
    }
}

/// The lists of like users, and the user's own previous one.
#[derive(Debug, Clone)]
pub struct LikelyLists<'a> {
    /// Counts, and what one of them weighs.
    parts: Vec<(&'a Counts, f64)>,
}

impl LikelyLists<'_> {
    /// The share of each child of a node; they sum to 1. What no list had shares what one more list would be.
    fn shares(&self, node: u32, children: &[u32]) -> Vec<f64> {
        let (mut weights, mut seen) = (vec![0.0; children.len()], 0.0);
        for (counts, weight) in &self.parts {
            for &(child, count) in counts.below.get(&node).into_iter().flatten() {
                if let Ok(at) = children.binary_search(&child) {
                    weights[at] += weight * f64::from(count);
                    seen += f64::from(count);
                }
            }
        }
        let sum: f64 = weights.iter().sum();
        let trust = if sum > 0.0 { seen / (seen + 1.0) } else { 0.0 };
        let even = (1.0 - trust) / children.len().max(1) as f64;
        let scale = if sum > 0.0 { trust / sum } else { 0.0 };
        weights.into_iter().map(|weight| even + scale * weight).collect()
    }
}

impl Expected for LikelyLists<'_> {
    fn log_shares(&mut self, node: u32, children: &[u32], into: &mut Vec<f32>) {
        into.extend(self.shares(node, children).into_iter().map(log_share));
    }
}

#[cfg(test)]
mod tests;
