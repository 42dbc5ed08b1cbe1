//! A tree that grows over several steps: what is held, what is dropped, and what is asked for.

use std::collections::BTreeMap;

use laser_decode::{Candidate, ROOT_PARENT, TargetScores};
use laser_engine::{Asked, Engine, EngineOptions, FakeEngine, FakeOptions, Segment, Slot};

use crate::{
    models::{Random, TinyModel, VOCAB},
    support::{TOP_K, assert_same, chain, engine, extend, path, random_tree, sequential},
};

/// The nodes of a tree that a slot has, in the order of its cache.
#[derive(Default)]
struct Held(Vec<usize>);

impl Held {
    fn place(&self, node: usize) -> Option<usize> {
        self.0.iter().position(|&held| held == node)
    }

    /// Feeds those of `nodes` whose parents are there; their scores, and which they are.
    fn grow(
        &mut self,
        (engine, slot): (&mut dyn Engine, Slot),
        (tokens, parents): (&[u32], &[u32]),
        nodes: impl Iterator<Item = usize>,
    ) -> BTreeMap<usize, Vec<Candidate>> {
        let (mut new, mut new_parents) = (Vec::new(), Vec::new());
        for node in nodes {
            let parent = match parents[node] {
                ROOT_PARENT => Some(ROOT_PARENT),
                parent => self.place(parent as usize).map(|place| place as u32),
            };
            if let Some(parent) = parent {
                new.push(node);
                new_parents.push(parent);
                self.0.push(node);
            }
        }
        if new.is_empty() {
            return BTreeMap::new();
        }
        let new_tokens: Vec<u32> = new.iter().map(|&node| tokens[node]).collect();
        let segment = Segment { slot, tokens: &new_tokens, parents: &new_parents, ..Segment::default() };
        let scores = engine.step(&[segment], TOP_K).unwrap();
        new.iter().enumerate().map(|(at, &node)| (node, scores[0].top(at).to_vec())).collect()
    }

    /// Keeps a random part of the tree in which every node has its parent.
    fn prune(&mut self, (engine, slot): (&mut dyn Engine, Slot), parents: &[u32], random: &mut Random) {
        let (mut keep, mut kept): (Vec<usize>, Vec<usize>) = Default::default();
        for (place, &node) in self.0.iter().enumerate() {
            let parent = parents[node];
            if random.below(4) > 0 && (parent == ROOT_PARENT || kept.contains(&(parent as usize))) {
                keep.push(place);
                kept.push(node);
            }
        }
        engine.hold(slot, &keep).unwrap();
        self.0 = kept;
    }
}

/// Mistralrs' layers on the CPU, by weights that our own kernels do not know.
pub(crate) fn tensors(model: &TinyModel) -> Box<dyn Engine> {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), false);
    laser_engine::load(&EngineOptions { isq: Some("q3k".into()), ..EngineOptions::new(directory.path()) }).unwrap()
}

pub(crate) fn fake() -> Box<dyn Engine> {
    Box::new(FakeEngine::new(FakeOptions { vocab_size: VOCAB as u32, ..FakeOptions::default() }))
}

#[test]
fn a_tree_that_grows_and_is_pruned_scores_as_sequential_decoding_does() {
    let mut engines: Vec<(String, Box<dyn Engine>)> =
        TinyModel::all().into_iter().map(|(name, model)| (name.to_owned(), engine(&model))).collect();
    let exact = engines.len();
    engines.push(("tensors".into(), tensors(&TinyModel::all()[0].1)));
    engines.push(("fake".into(), fake()));
    for (at, (name, engine)) in engines.iter_mut().enumerate() {
        for (seed, nodes) in [(1, 9), (2, 40), (3, 90)] {
            let mut random = Random::new(seed);
            let context = random.tokens(20);
            let tree = random_tree(&mut random, nodes);
            let (tokens, parents) = (&tree.0[..], &tree.1[..]);
            let slot = engine.open(120).unwrap();
            extend(engine.as_mut(), slot, &context);
            let (mut held, mut compared) = (Held::default(), 0);
            for stage in 0..3 {
                let found =
                    held.grow((engine.as_mut(), slot), (tokens, parents), stage * nodes / 3..(stage + 1) * nodes / 3);
                for (node, scores) in found {
                    let path: Vec<u32> = path(parents, node).into_iter().map(|node| tokens[node]).collect();
                    let expected = sequential(engine.as_mut(), &[&context[..], &path].concat());
                    match at < exact {
                        true => assert_eq!(scores, expected, "{name}, {nodes} nodes, node {node}"),
                        false => assert_same(&scores, &expected, name),
                    }
                    compared += 1;
                }
                held.prune((engine.as_mut(), slot), parents, &mut random);
            }
            assert!(compared > nodes / 4, "{compared} of {nodes}");
            // The sequence goes on along a path of what is held.
            let path = held.0.last().map_or_else(Vec::new, |&last| path(parents, last));
            if !path.is_empty() {
                let kept: Vec<usize> = path.iter().map(|&node| held.place(node).unwrap()).collect();
                engine.commit(slot, &kept).unwrap();
            }
            let text: Vec<u32> = path.into_iter().map(|node| tokens[node]).collect();
            assert_eq!(engine.cached(slot), context.len() + text.len());
            let after = extend(engine.as_mut(), slot, &[5]);
            assert_same(&after, &sequential(engine.as_mut(), &[&context[..], &text, &[5]].concat()), name);
            engine.close(slot);
        }
    }
}

#[test]
fn what_is_asked_for_are_the_log_probabilities_of_the_whole_vocabulary() {
    let model = &TinyModel::all()[0].1;
    for (name, mut engine) in [("kernels", engine(model)), ("tensors", tensors(model)), ("fake", fake())] {
        let size = engine.info().vocab_size;
        let mut random = Random::new(4);
        let slots = [0, 1].map(|_| engine.open(40).unwrap());
        let asked: Vec<u32> = (0..50).map(|_| random.below(size) as u32).collect();
        // Of the first segment's second node nothing is asked, and of the second segment's first nothing is scored.
        let (first, second) = (random.tokens(3), random.tokens(4));
        let parents = [chain(3), chain(4)];
        let segments = [
            Segment {
                slot: slots[0],
                tokens: &first,
                parents: &parents[0],
                asked: Asked { tokens: &asked[..20], ends: &[5, 5, 20] },
                ..Segment::default()
            },
            Segment {
                slot: slots[1],
                tokens: &second,
                parents: &parents[1],
                scored_from: 2,
                asked: Asked { tokens: &asked[20..], ends: &[29, 30] },
                ..Segment::default()
            },
        ];
        let scores = engine.step(&segments, size).unwrap();
        let expected = [(0, 0, 0..5), (0, 1, 5..5), (0, 2, 5..20), (1, 0, 0..0), (1, 2, 20..49), (1, 3, 49..50)];
        for (segment, node, range) in expected {
            let found = scores[segment].asked(node);
            assert_eq!(found.len(), range.len(), "{name}");
            for (token, log_probability) in asked[range].iter().zip(found) {
                let known = scores[segment].top(node).iter().find(|candidate| candidate.token == *token);
                let known = known.unwrap().log_probability;
                assert!(
                    known == *log_probability || (known - log_probability).abs() < 1e-5,
                    "{name}: {known} {log_probability}"
                );
            }
        }
    }
}

#[test]
fn a_tree_without_its_parents_and_questions_without_a_node_are_refused() {
    let mut engine: Box<dyn Engine> = Box::new(FakeEngine::new(FakeOptions::default()));
    let slot = engine.open(8).unwrap();
    let tokens = [1, 2, 3];
    let root = ROOT_PARENT;
    let segment = Segment { slot, tokens: &tokens, parents: &[root, 0, root], ..Segment::default() };
    engine.step(&[segment], 1).unwrap();
    let refused = |engine: &mut dyn Engine, keep: &[usize]| engine.hold(slot, keep).unwrap_err().to_string();
    assert!(refused(engine.as_mut(), &[1, 2]).contains("node 1 without its parent, node 0"));
    assert!(refused(engine.as_mut(), &[2, 0]).contains("node 0 after node 2"));
    assert!(refused(engine.as_mut(), &[3]).contains("node 3 of 3 nodes"));
    engine.hold(slot, &[0, 1]).unwrap();
    let too_many = Segment { slot, tokens: &[4; 7], parents: &[0; 7], ..Segment::default() };
    assert!(engine.step(&[too_many], 1).unwrap_err().to_string().contains("9 nodes exceed the capacity of 8"));
    let ask = |tokens, ends| Segment { asked: Asked { tokens, ends }, ..segment };
    for (asked, expected) in [
        (ask(&[7], &[1]), "1 tokens are asked for at 1 of 3 scored nodes"),
        (ask(&[7], &[1, 0, 1]), "end before they begin"),
        (ask(&[5000], &[0, 0, 1]), "token 5000 is asked for, vocabulary is 1000"),
    ] {
        let error = engine.step(&[asked], 1).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
