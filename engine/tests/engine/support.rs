//! Driving an engine by hand, and comparing scores.

use std::path::Path;

use laser_decode::{Candidate, ROOT_PARENT, TargetScores};
use laser_engine::{Engine, EngineOptions, Segment, Slot};

use crate::models::{Random, TinyModel};

/// Candidates compared per node: enough to hold most of the probability.
pub(crate) const TOP_K: usize = 64;
/// Largest difference of log-probabilities between two ways to compute the same thing in f32.
pub(crate) const TOLERANCE: f32 = 2e-4;

pub(crate) fn load(path: &Path) -> Box<dyn Engine> {
    laser_engine::load(&EngineOptions::new(path)).unwrap()
}

/// The model, loaded in f32.
pub(crate) fn engine(model: &TinyModel) -> Box<dyn Engine> {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), false);
    load(directory.path())
}

pub(crate) fn chain(length: usize) -> Vec<u32> {
    (0..length).map(|node| if node == 0 { ROOT_PARENT } else { node as u32 - 1 }).collect()
}

/// A tree of `nodes` random tokens whose nodes continue any earlier node or the context.
pub(crate) fn random_tree(random: &mut Random, nodes: usize) -> (Vec<u32>, Vec<u32>) {
    let parent = |random: &mut Random, node: usize| match random.below(node + 1) {
        0 => ROOT_PARENT,
        earlier => earlier as u32 - 1,
    };
    let parents = (0..nodes).map(|node| parent(random, node)).collect();
    (random.tokens(nodes), parents)
}

/// Nodes from the context to `node`.
pub(crate) fn path(parents: &[u32], node: usize) -> Vec<usize> {
    let up = |node: &usize| (parents[*node] != ROOT_PARENT).then(|| parents[*node] as usize);
    let mut path: Vec<usize> = std::iter::successors(Some(node), up).collect();
    path.reverse();
    path
}

/// One step of one segment, uncommitted; the scores of its nodes from `scored_from` on.
pub(crate) fn step(
    engine: &mut dyn Engine,
    slot: Slot,
    tokens: &[u32],
    parents: &[u32],
    scored_from: usize,
) -> Vec<Vec<Candidate>> {
    let segment = Segment { slot, tokens, parents, scored_from, ..Segment::default() };
    let scores = engine.step(&[segment], TOP_K).unwrap();
    (scored_from..tokens.len()).map(|node| scores[0].top(node).to_vec()).collect()
}

/// Appends and commits a chain; the scores of its last token.
pub(crate) fn extend(engine: &mut dyn Engine, slot: Slot, tokens: &[u32]) -> Vec<Candidate> {
    let scores = step(engine, slot, tokens, &chain(tokens.len()), tokens.len() - 1);
    engine.commit(slot, &(0..tokens.len()).collect::<Vec<_>>()).unwrap();
    scores.into_iter().next().unwrap()
}

/// The scores after a context, one token a forward.
pub(crate) fn sequential(engine: &mut dyn Engine, tokens: &[u32]) -> Vec<Candidate> {
    let slot = engine.open(tokens.len()).unwrap();
    let scores = tokens.iter().map(|&token| extend(engine, slot, &[token])).last().unwrap();
    engine.close(slot);
    scores
}

/// Greedy decoding, one token a forward.
pub(crate) fn greedy(engine: &mut dyn Engine, prompt: &[u32], count: usize) -> Vec<u32> {
    let slot = engine.open(prompt.len() + count).unwrap();
    let mut scores = extend(engine, slot, prompt);
    let mut tokens = Vec::with_capacity(count);
    while tokens.len() < count {
        tokens.push(scores[0].token);
        scores = extend(engine, slot, &tokens[tokens.len() - 1..]);
    }
    engine.close(slot);
    tokens
}

/// The same distribution up to rounding.
pub(crate) fn assert_same(got: &[Candidate], expected: &[Candidate], what: &str) {
    assert_within(got, expected, TOLERANCE, what);
}

/// Equal candidates within the tolerance, the same first one unless the first two are closer than it.
pub(crate) fn assert_within(got: &[Candidate], expected: &[Candidate], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for candidate in got {
        let other = expected.iter().find(|other| other.token == candidate.token);
        let floor = expected.last().unwrap().log_probability;
        let log_probability = other.map_or(floor, |other| other.log_probability);
        let difference = (candidate.log_probability - log_probability).abs();
        assert!(difference < tolerance, "{what}: {candidate:?} differs by {difference}");
    }
    let gap = expected[0].log_probability - expected[1].log_probability;
    assert!(got[0].token == expected[0].token || gap < tolerance, "{what}: gap {gap}");
}
