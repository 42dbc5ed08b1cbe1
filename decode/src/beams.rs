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

use crate::list_sampling::{accept_list_published, list_weights, sample_list};
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
    /// What beams are ordered by: the score, or under noise the perturbed one.
    pub key: f64,
}

impl Beam {
    /// The better one first; of equal ones the one that comes first in the trie.
    pub fn order(&self, other: &Self) -> Ordering {
        other.key.total_cmp(&self.key).then(self.node.cmp(&other.node))
    }
}

/// Which continuations become beams.
#[derive(Debug, Clone)]
enum Selection {
    /// The most probable ones.
    Best,
    /// Those that are best with noise.
    Perturbed(Noise),
    /// As many as there are beams, drawn at each step.
    Sampled(Draws),
}

/// Uniform numbers from a key.
#[derive(Debug, Clone)]
struct Draws {
    noise: Noise,
    drawn: u32,
}

impl Draws {
    /// The next number, in [0, 1).
    fn next(&mut self) -> f64 {
        let word = self.noise.word(self.drawn);
        self.drawn = self.drawn.wrapping_add(1);
        f64::from(word) / (f64::from(u32::MAX) + 1.0)
    }
}

/// The search for one user.
#[derive(Debug, Clone)]
pub struct BeamSearch {
    width: usize,
    normalisation: Normalisation,
    selection: Selection,
    /// Log probabilities are divided by it.
    temperature: f64,
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
        let (selection, temperature) = (Selection::Best, 1.0);
        Self { width: width.max(1), normalisation, selection, temperature, depth: 0, beams, known: HashMap::new() }
    }

    /// Draws a list in place of the most probable one: items without replacement, each by its probability among those
    /// that are allowed ([stochastic beam search](crate::perturbed_children), Kool et al., arXiv:1903.06059). Log
    /// probabilities are divided by the temperature, above 0. Scores are then relative to the allowed codes.
    #[must_use]
    pub fn drawn_under(self, noise: Noise, temperature: f64) -> Self {
        let selection = Selection::Perturbed(noise);
        Self { normalisation: Normalisation::Allowed, selection, temperature, ..self }
    }

    /// Draws the beams of every step from its candidates without replacement, each by its cumulative probability among
    /// them: the sampling-based beam search of AtSpeed (arXiv:2410.05165, section 3.2). Drafts are drawn alike, by what
    /// is expected of the candidates, and [`Self::accept`] verifies them. Other than under
    /// [`Self::drawn_under`] lists depend on what was drafted. Log probabilities are divided by the temperature, above
    /// 0; the numbers that lists are drawn by are those of the noise.
    #[must_use]
    pub fn sampled_under(self, noise: Noise, temperature: f64) -> Self {
        Self { selection: Selection::Sampled(Draws { noise, drawn: 0 }), temperature, ..self }
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
        if self.temperature != 1.0 {
            children.iter_mut().for_each(|child| child.1 = narrow(f64::from(child.1) / self.temperature));
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
            let mut all = self.continued(allowed);
            match &mut self.selection {
                Selection::Sampled(draws) => {
                    let chosen = drawn(&all, self.width, &mut || draws.next());
                    self.beams = chosen.into_iter().map(|at| all[at]).collect();
                    self.beams.sort_unstable_by(Beam::order);
                }
                Selection::Best | Selection::Perturbed(_) => {
                    best(&mut all, self.width);
                    self.beams = all;
                }
            }
            self.depth += 1;
        }
        self.depth - start
    }

    /// Whether a step of the search is judged by [`Self::accept`] where it was drafted for.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        matches!(self.selection, Selection::Sampled(_))
    }

    /// Goes one step by what was drafted for it, where [beams are drawn at each step](Self::sampled_under): accepts a
    /// drafted candidate with the probability min(1, p/q) and draws what is missing
    /// ([`accept_list`](crate::accept_list), or [`accept_list_published`] where more than the beams are drafted).
    /// Returns whether all beams are accepted drafts, so that drafts for the next step can be judged; none if scores
    /// are missing.
    pub fn accept(&mut self, allowed: &Allowed<'_>, drafted: &Ranked) -> Option<bool> {
        if self.missing(allowed).next().is_some() {
            return None;
        }
        let all = self.continued(allowed);
        let expected: HashMap<u32, f64> = drafted.candidates.iter().map(|beam| (beam.node, beam.key)).collect();
        let q: Vec<f32> =
            all.iter().map(|beam| expected.get(&beam.node).map_or(f32::NEG_INFINITY, |key| narrow(*key))).collect();
        let places: HashMap<u32, usize> = all.iter().enumerate().map(|(at, beam)| (beam.node, at)).collect();
        let places: Vec<usize> = drafted.drafted().iter().filter_map(|beam| places.get(&beam.node).copied()).collect();
        let Selection::Sampled(draws) = &mut self.selection else { return None };
        let p = weights(&all);
        let trial = accept_list_published(&p, &list_weights(&q), &places, self.width, &mut || draws.next());
        self.beams = trial.chosen.iter().map(|at| all[*at]).collect();
        self.beams.sort_unstable_by(Beam::order);
        self.depth += 1;
        Some(trial.goes_on())
    }

    /// The continuations of all beams.
    fn continued(&self, allowed: &Allowed<'_>) -> Vec<Beam> {
        let mut all = Vec::new();
        for beam in &self.beams {
            match self.known.get(&beam.node) {
                Some(children) => self.extend(beam, children, &mut all),
                None => all.extend(allowed.only_child(beam.node).map(|node| Beam { node, ..*beam })),
            }
        }
        all
    }

    /// Appends a beam's continuations.
    fn extend(&self, beam: &Beam, children: &[(u32, f32)], into: &mut Vec<Beam>) {
        let Selection::Perturbed(noise) = self.selection else {
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
    /// computed: their scores come with the ones before. Where [beams are drawn at each step](Self::sampled_under),
    /// drafts are drawn too, in place of the best.
    pub fn candidates(
        &mut self,
        allowed: &Allowed<'_>,
        before: Option<&Ranked>,
        width: usize,
        expected: &mut dyn Expected,
    ) -> Ranked {
        let from = before.map_or(&self.beams[..], Ranked::drafted);
        let (mut candidates, mut children, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        allowed.fetch(from.iter().map(|beam| beam.node).filter(|node| !self.known.contains_key(node)));
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
        match &mut self.selection {
            Selection::Sampled(draws) => Ranked::sampled(candidates, width, &mut || draws.next()),
            Selection::Best | Selection::Perturbed(_) => Ranked::new(candidates, width),
        }
    }
}

/// What continuations are expected before the target has spoken.
pub trait Expected {
    /// Appends for each of the children of a node the natural logarithm of its share; shares of the whole vocabulary
    /// need not sum to 1.
    fn log_shares(&mut self, node: u32, children: &[u32], into: &mut Vec<f32>);
}

/// The logarithm of a share, which may be none.
pub(crate) fn log_share(share: f64) -> f32 {
    narrow(share.max(1e-30).ln())
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

    /// Drafts what is drawn without replacement.
    fn sampled(mut candidates: Vec<Beam>, width: usize, uniform: &mut impl FnMut() -> f64) -> Self {
        let drawn = drawn(&candidates, width, uniform);
        let mut is_left = vec![true; candidates.len()];
        drawn.iter().for_each(|at| is_left[*at] = false);
        let left = (0..candidates.len()).filter(|at| is_left[*at]);
        candidates = drawn.iter().copied().chain(left).map(|at| candidates[at]).collect();
        Self { candidates, drafted: drawn.len() }
    }

    /// The drafted candidates, best first; where drafts are drawn, in the order of their being drawn.
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

/// Draws so many candidates without replacement; all if there are no more.
fn drawn(candidates: &[Beam], count: usize, uniform: &mut impl FnMut() -> f64) -> Vec<usize> {
    if candidates.is_empty() { Vec::new() } else { sample_list(&weights(candidates), count, uniform) }
}

/// The weights by which candidates are drawn.
fn weights(candidates: &[Beam]) -> Vec<f32> {
    list_weights(&candidates.iter().map(|beam| narrow(beam.key)).collect::<Vec<_>>())
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
