//! Beam search over the identifiers of a trie: the K best items of a user.
//!
//! A beam is a prefix of identifiers with the sum of its log probabilities. A step continues every beam by the codes
//! that the trie and its filters allow, and keeps the best. Which prefixes the target has scored is none of the
//! search's business: it advances as far as scores are known, so whatever was drafted, beams, order and scores are
//! those of the plain search. That is AtSpeed's strict verification (Lin et al., ICLR 2025, section 3.1), which accepts
//! a step if all of the target's K prefixes are among the drafted ones. It goes one step further: if some of them are,
//! only the others have to be computed.

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::sampling::Noise;
use crate::stochastic_beam::{Perturbed, perturbed_children};
use crate::trie::Allowed;

/// What a code's log probability is relative to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Normalisation {
    /// The whole vocabulary; codes that are not allowed keep their share (Hugging Face's constrained beam search,
    /// AtSpeed).
    #[default]
    Vocabulary,
    /// The codes that are allowed (GRID). A code without alternatives has probability 1 and costs no forward.
    Allowed,
}

/// A prefix of identifiers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beam {
    /// Its node in the trie.
    pub node: u32,
    /// Sum of the natural-log probabilities of its codes.
    pub score: f64,
    /// What beams are ordered by: the score, or where lists are drawn the perturbed one.
    pub key: f64,
}

impl Beam {
    /// The better one first; of equal ones the one that comes first in the trie.
    pub fn order(&self, other: &Self) -> Ordering {
        other.key.total_cmp(&self.key).then(self.node.cmp(&other.node))
    }
}

/// The search for one user.
#[derive(Debug, Clone)]
pub struct BeamSearch {
    width: usize,
    normalisation: Normalisation,
    /// By which lists are drawn, and at what temperature; the most probable ones are searched for if absent.
    noise: Option<(Noise, f64)>,
    depth: usize,
    /// Best first.
    beams: Vec<Beam>,
    /// The children of the scored nodes with their log probabilities.
    known: HashMap<u32, Vec<(u32, f32)>>,
}

impl BeamSearch {
    /// A search that keeps `width` beams, at least 1, and begins at the root.
    #[must_use]
    pub fn new(width: usize, normalisation: Normalisation) -> Self {
        let beams = vec![Beam { node: 0, score: 0.0, key: 0.0 }];
        Self { width: width.max(1), normalisation, noise: None, depth: 0, beams, known: HashMap::new() }
    }

    /// Draws a list in place of the most probable one: items without replacement, each by its probability among those
    /// that are allowed ([stochastic beam search](crate::perturbed_children), Kool et al., arXiv:1903.06059). Log
    /// probabilities are divided by the temperature, above 0. Scores are then relative to the allowed codes.
    #[must_use]
    pub fn drawn_under(self, noise: Noise, temperature: f64) -> Self {
        Self { normalisation: Normalisation::Allowed, noise: Some((noise, temperature)), ..self }
    }

    /// Codes of the beams.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The beams, best first.
    #[must_use]
    pub fn beams(&self) -> &[Beam] {
        &self.beams
    }

    /// Takes in what the target says of a node: the natural-log probabilities, over the whole vocabulary, of its
    /// [allowed children](Allowed::children), in their order.
    pub fn learn(&mut self, allowed: &Allowed<'_>, node: u32, log_probabilities: &[f32]) {
        let mut children: Vec<_> = allowed.children(node).zip(log_probabilities.iter().copied()).collect();
        if let Some((_, temperature)) = self.noise {
            children.iter_mut().for_each(|child| child.1 = narrow(f64::from(child.1) / temperature));
        }
        if self.normalisation == Normalisation::Allowed {
            normalise(&mut children);
        }
        self.known.insert(node, children);
    }

    /// Whether the children of a node have scores.
    #[must_use]
    pub fn knows(&self, allowed: &Allowed<'_>, node: u32) -> bool {
        self.known.contains_key(&node) || self.is_forced(allowed, node)
    }

    /// Whether a node has one child that is allowed, and this needs no forward.
    fn is_forced(&self, allowed: &Allowed<'_>, node: u32) -> bool {
        self.normalisation == Normalisation::Allowed && allowed.only_child(node).is_some()
    }

    /// The beams whose children have no scores yet, best first: what the target has to compute.
    pub fn missing<'a>(&'a self, allowed: &'a Allowed<'_>) -> impl Iterator<Item = u32> + 'a {
        let nodes = self.beams.iter().map(|beam| beam.node);
        nodes.filter(|&node| !self.knows(allowed, node))
    }

    /// Goes as far as scores are known, up to `levels` codes. Returns the number of steps.
    pub fn advance(&mut self, allowed: &Allowed<'_>, levels: usize) -> usize {
        let start = self.depth;
        while self.depth < levels && self.missing(allowed).next().is_none() {
            self.beams = self.continued(allowed);
            self.depth += 1;
        }
        self.depth - start
    }

    /// The best continuations of all beams.
    fn continued(&self, allowed: &Allowed<'_>) -> Vec<Beam> {
        let mut all = Vec::new();
        for beam in &self.beams {
            match self.known.get(&beam.node) {
                Some(children) => self.extend(beam, children, &mut all),
                None => all.extend(allowed.only_child(beam.node).map(|node| Beam { node, ..*beam })),
            }
        }
        best(&mut all, self.width);
        all
    }

    /// Appends a beam's continuations.
    fn extend(&self, beam: &Beam, children: &[(u32, f32)], into: &mut Vec<Beam>) {
        let Some((noise, _)) = self.noise else {
            into.extend(children.iter().map(|&(node, log_probability)| {
                let score = beam.score + f64::from(log_probability);
                Beam { node, score, key: score }
            }));
            return;
        };
        let parent = Perturbed { log_probability: beam.score, score: beam.key };
        let perturbed = perturbed_children(noise, parent, children);
        let beams = children.iter().zip(perturbed);
        into.extend(beams.map(|(&(node, _), of)| Beam { node, score: of.log_probability, key: of.score }));
    }

    /// What the beams may be one step further, as `expected` has it, and which of these prefixes, at most `width`, the
    /// target should compute along with this step's.
    ///
    /// Candidates continue the beams, or behind them the drafted candidates `before`. The last codes are never to be
    /// computed: their scores come with the ones before.
    pub fn candidates(
        &self,
        allowed: &Allowed<'_>,
        before: Option<&Ranked>,
        width: usize,
        expected: &mut dyn Expected,
    ) -> Ranked {
        let from = before.map_or(&self.beams[..], Ranked::drafted);
        let (mut candidates, mut children, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        for beam in from {
            if let Some(known) = self.known.get(&beam.node) {
                self.extend(beam, known, &mut candidates);
                continue;
            }
            children.clear();
            children.extend(allowed.children(beam.node));
            shares.clear();
            expected.log_shares(beam.node, &children, &mut shares);
            let mut children: Vec<(u32, f32)> = children.iter().copied().zip(shares.iter().copied()).collect();
            if self.normalisation == Normalisation::Allowed {
                normalise(&mut children);
            }
            self.extend(beam, &children, &mut candidates);
        }
        Ranked::new(candidates, width)
    }
}

/// What continuations are expected before the target has spoken.
pub trait Expected {
    /// Appends for each of the children of a node the natural logarithm of its share; shares of the whole vocabulary
    /// need not sum to 1.
    fn log_shares(&mut self, node: u32, children: &[u32], into: &mut Vec<f32>);
}

/// All children alike: what is left is to complete the trie.
#[derive(Debug, Clone, Copy, Default)]
pub struct Uniform;

impl Expected for Uniform {
    fn log_shares(&mut self, _: u32, children: &[u32], into: &mut Vec<f32>) {
        let share = -narrow((children.len().max(1) as f64).ln());
        into.extend(std::iter::repeat_n(share, children.len()));
    }
}

/// The candidates of one step ahead.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ranked {
    /// The drafted ones best first, then the others in no order.
    candidates: Vec<Beam>,
    drafted: usize,
}

impl Ranked {
    fn new(mut candidates: Vec<Beam>, width: usize) -> Self {
        let drafted = width.min(candidates.len());
        if drafted > 0 && drafted < candidates.len() {
            candidates.select_nth_unstable_by(drafted, Beam::order);
        }
        candidates[..drafted].sort_unstable_by(Beam::order);
        Self { candidates, drafted }
    }

    /// The drafted candidates, best first.
    #[must_use]
    pub fn drafted(&self) -> &[Beam] {
        &self.candidates[..self.drafted]
    }

    /// Number of candidates.
    #[must_use]
    pub fn len(&self) -> usize {
        self.candidates.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.candidates.is_empty()
    }

    /// How many candidates must be drafted for all `beams` to be among them; none if one is no candidate.
    #[must_use]
    pub fn width_for(&self, beams: &[Beam]) -> Option<usize> {
        let place = |beam: &Beam| self.candidates.iter().find(|candidate| candidate.node == beam.node);
        let mut worst: Option<&Beam> = None;
        for beam in beams {
            let found = place(beam)?;
            worst = worst.filter(|worst| worst.order(found).is_gt()).or(Some(found));
        }
        let worst = worst?;
        Some(self.candidates.iter().filter(|candidate| candidate.order(worst).is_le()).count())
    }
}

/// Keeps the best `count`, sorted.
fn best(all: &mut Vec<Beam>, count: usize) {
    if all.len() > count {
        all.select_nth_unstable_by(count, Beam::order);
        all.truncate(count);
    }
    all.sort_unstable_by(Beam::order);
}

/// Log probabilities relative to those that are there; the sum is taken in f64.
fn normalise(children: &mut [(u32, f32)]) {
    let most = children.iter().map(|child| child.1).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = children.iter().map(|child| f64::from(child.1 - most).exp()).sum();
    let log_sum = f64::from(most) + sum.ln();
    children.iter_mut().for_each(|child| child.1 = narrow(f64::from(child.1) - log_sum));
}

#[expect(clippy::cast_possible_truncation, reason = "log probabilities are single precision")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
pub(crate) mod tests;
