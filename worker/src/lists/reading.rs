//! What a draft model has read of a list, and expects of it.

use std::collections::HashMap;

use laser_decode::{Expected, Uniform};
use laser_engine::{Scores, Slot};

use super::prefixes::PrefixTree;

/// A log probability below that of any drafted prefix: what a draft model rules out, or says that is no number.
const IMPROBABLE: f32 = -1000.0;

/// What the draft model has read of a list.
pub(super) struct Reading {
    pub(super) tree: PrefixTree,
    /// The log probabilities of the allowed children of prefixes, in their order.
    known: HashMap<u32, Vec<f32>>,
}

impl Reading {
    /// Nothing yet, of a prompt.
    pub(super) fn new(slot: Slot, prompt: &[u32]) -> Self {
        Self { tree: PrefixTree::new(slot, prompt), known: HashMap::new() }
    }

    pub(super) fn knows(&self, node: u32) -> bool {
        self.known.contains_key(&node)
    }

    /// Takes in what the draft model says, divided by the temperature at which the list is drawn.
    pub(super) fn learn(&mut self, scores: &Scores, temperature: f32) {
        let Self { tree, known } = self;
        let scaled = |logs: &[f32]| logs.iter().map(|log| log.max(IMPROBABLE) / temperature).collect();
        known.extend(tree.scored(scores).map(|(node, log_probabilities)| (node, scaled(log_probabilities))));
    }
}

impl Expected for Reading {
    fn log_shares(&mut self, node: u32, children: &[u32], into: &mut Vec<f32>) {
        match self.known.get(&node) {
            Some(log_probabilities) => into.extend(log_probabilities),
            None => Uniform.log_shares(node, children, into),
        }
    }
}
