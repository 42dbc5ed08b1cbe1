//! However the nodes reach the model, their scores are those of sequential decoding.

use candle_core::quantized::GgmlDType;
use laser_decode::TargetScores;
use laser_engine::{Engine, Segment};

use crate::{
    models::{Random, TinyModel, fixture},
    support::{TOP_K, assert_same, chain, engine, extend, greedy, load, path, random_tree, sequential, step},
};

#[test]
fn tree_scores_equal_sequential_ones_on_every_path_to_the_bit() {
    for (name, model) in TinyModel::all() {
        let mut engine = engine(&model);
        for (seed, nodes) in [(1, 2), (2, 7), (3, 16), (4, 33)] {
            let mut random = Random::new(seed);
            let context = random.tokens(20);
            let (tokens, parents) = random_tree(&mut random, nodes);
            let slot = engine.open(64).unwrap();
            extend(engine.as_mut(), slot, &context);
            let scores = step(engine.as_mut(), slot, &tokens, &parents, 0);
            engine.close(slot);
            for (node, scores) in scores.iter().enumerate() {
                let path: Vec<u32> = path(&parents, node).into_iter().map(|node| tokens[node]).collect();
                let expected = sequential(engine.as_mut(), &[&context[..], &path].concat());
                assert_eq!(scores, &expected, "{name}, {nodes} nodes, node {node}");
            }
        }
    }
}

#[test]
fn chunked_prefill_equals_whole_prefill() {
    for (name, model) in TinyModel::all() {
        let mut engine = engine(&model);
        let prompt = Random::new(5).tokens(100);
        let whole = engine.open(100).unwrap();
        let expected = extend(engine.as_mut(), whole, &prompt);
        let chunked = engine.open(100).unwrap();
        let mut last = Vec::new();
        for chunk in prompt.chunks(37) {
            last = extend(engine.as_mut(), chunked, chunk);
        }
        assert_eq!(last, expected, "{name}");
    }
}

#[test]
fn a_chunk_without_scored_nodes_still_fills_the_cache() {
    let mut engine = engine(&TinyModel::all()[0].1);
    let prompt = Random::new(5).tokens(30);
    let slot = engine.open(30).unwrap();
    assert!(step(engine.as_mut(), slot, &prompt[..20], &chain(20), 20).is_empty());
    engine.commit(slot, &(0..20).collect::<Vec<_>>()).unwrap();
    let got = extend(engine.as_mut(), slot, &prompt[20..]);
    assert_same(&got, &sequential(engine.as_mut(), &prompt), "after an unscored chunk");
}

#[test]
fn segments_of_one_step_equal_steps_of_their_own() {
    let mut engine = engine(&TinyModel::all()[5].1);
    let mut random = Random::new(9);
    // A tree, the last chunk of a prefill, a single token and an unscored chunk.
    let trees = [(0, 9), (11, 5), (40, 1), (3, 12)];
    let trees = trees.map(|(context, nodes)| {
        let (tokens, parents) = random_tree(&mut random, nodes);
        (random.tokens(context), tokens, parents)
    });
    let scored_from = [0, 4, 0, 12];
    let slots = trees.clone().map(|(context, ..)| {
        let slot = engine.open(64).unwrap();
        if !context.is_empty() {
            extend(engine.as_mut(), slot, &context);
        }
        slot
    });
    let segments: Vec<Segment<'_>> = (0..4)
        .map(|index| Segment {
            slot: slots[index],
            tokens: &trees[index].1,
            parents: &trees[index].2,
            scored_from: scored_from[index],
            ..Segment::default()
        })
        .collect();
    let together = engine.step(&segments, TOP_K).unwrap();
    for (segment, scores) in segments.iter().zip(&together) {
        engine.commit(segment.slot, &[]).unwrap();
        let alone = engine.step(&[*segment], TOP_K).unwrap();
        for node in 0..segment.tokens.len() {
            if node < segment.scored_from {
                assert!(scores.top(node).is_empty());
            } else {
                assert_same(scores.top(node), alone[0].top(node), "batched");
            }
        }
    }
}

#[test]
fn a_fork_equals_recomputing_its_prefix() {
    let mut engine = engine(&TinyModel::all()[0].1);
    let mut random = Random::new(13);
    let (prefix, own) = (random.tokens(50), random.tokens(30));
    let shared = engine.open(60).unwrap();
    extend(engine.as_mut(), shared, &prefix);
    let fork = engine.fork(shared, 40, 200).unwrap();
    assert_eq!(engine.cached(fork), 40);
    let got = extend(engine.as_mut(), fork, &own);
    let expected = sequential(engine.as_mut(), &[&prefix[..40], &own].concat());
    assert_same(&got, &expected, "fork");
    let after = extend(engine.as_mut(), shared, &own[..5]);
    let expected = sequential(engine.as_mut(), &[&prefix[..], &own[..5]].concat());
    assert_same(&after, &expected, "the forked slot itself");
}

#[test]
fn decoding_goes_on_after_a_commit_with_gaps() {
    for (name, model) in TinyModel::all() {
        let mut engine = engine(&model);
        let mut random = Random::new(17);
        let mut context = random.tokens(15);
        let slot = engine.open(200).unwrap();
        extend(engine.as_mut(), slot, &context);
        for round in 0..6 {
            let (tokens, parents) = random_tree(&mut random, 17);
            step(engine.as_mut(), slot, &tokens, &parents, 0);
            let keep = path(&parents, random.below(17));
            engine.commit(slot, &keep).unwrap();
            context.extend(keep.iter().map(|&node| tokens[node]));
            assert_eq!(engine.cached(slot), context.len());
            let next = random.tokens(1);
            let got = extend(engine.as_mut(), slot, &next);
            context.extend(next);
            let expected = sequential(engine.as_mut(), &context);
            assert_same(&got, &expected, &format!("{name}, round {round}"));
        }
    }
}

#[test]
fn greedy_decoding_through_trees_equals_plain_decoding_on_the_fixture() {
    let mut engine = load(&fixture());
    let mut random = Random::new(21);
    let prompt = random.tokens(24);
    let plain = greedy(engine.as_mut(), &prompt, 60);
    let slot = engine.open(200).unwrap();
    let mut next = extend(engine.as_mut(), slot, &prompt)[0].token;
    let mut got: Vec<u32> = Vec::new();
    while got.len() < 40 {
        // The right continuation of four tokens, scattered between distractors.
        let right = &plain[got.len()..got.len() + 5];
        assert_eq!(next, right[0]);
        let wrong = random.tokens(4);
        let tokens: Vec<u32> = (0..4).flat_map(|depth| [right[depth], wrong[depth]]).chain([right[4]]).collect();
        let parents = [u32::MAX, 0, 0, 2, 2, 4, 4, 6, 6];
        let scores = step(engine.as_mut(), slot, &tokens, &parents, 0);
        engine.commit(slot, &[0, 2, 4, 6, 8]).unwrap();
        for node in [0, 2, 4, 6] {
            assert_eq!(scores[node][0].token, right[node / 2 + 1]);
        }
        got.extend(right);
        next = scores[8][0].token;
    }
    assert_eq!(got, plain[..got.len()]);
}

#[test]
fn log_probabilities_are_those_of_the_whole_vocabulary() {
    let mut engine = engine(&TinyModel::all()[1].1);
    let slot = engine.open(8).unwrap();
    let tokens = Random::new(2).tokens(8);
    let vocab_size = engine.info().vocab_size;
    let segment = Segment { slot, tokens: &tokens, parents: &chain(8), scored_from: 7, ..Segment::default() };
    let scores = engine.step(&[segment], vocab_size + 10).unwrap();
    let top = scores[0].top(7);
    assert_eq!(top.len(), vocab_size);
    let total: f64 = top.iter().map(|candidate| f64::from(candidate.log_probability).exp()).sum();
    assert!((total - 1.0).abs() < 1e-5, "{total}");
    assert!(top.windows(2).all(|pair| pair[0].log_probability >= pair[1].log_probability));
}

#[test]
fn a_failed_step_leaves_the_slot_usable() {
    let mut engine = engine(&TinyModel::all()[0].1);
    let slot = engine.open(20).unwrap();
    let tokens = Random::new(3).tokens(21);
    extend(engine.as_mut(), slot, &tokens[..10]);
    let (parents, tokens_left) = (chain(11), &tokens[10..]);
    let too_many = Segment { slot, tokens: tokens_left, parents: &parents, scored_from: 0, ..Segment::default() };
    let error = engine.step(&[too_many], 1).unwrap_err().to_string();
    assert!(error.contains("exceed the capacity of 20"), "{error}");
    let got = extend(engine.as_mut(), slot, &tokens[10..20]);
    assert_same(&got, &sequential(engine.as_mut(), &tokens[..20]), "after a refused step");
}

/// A sequence in both engines: their slots, its committed tokens and what it may grow to.
struct Both {
    slots: [usize; 2],
    cached: usize,
    capacity: usize,
}

/// Opens, forks, closes and steps of all sequences at once, with trees and chunks of which a random path is kept, on
/// the kernels for CPUs and on tensors (which lay sequences side by side, and move them when rows run out).
#[test]
fn kernels_and_tensors_agree_on_any_schedule() {
    let (_, model) = &TinyModel::all()[5];
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    model.write_gguf(&file, GgmlDType::F32);
    let mut engines = [engine(model), load(&file)];
    let mut random = Random::new(31);
    let mut open: Vec<Both> = Vec::new();
    for round in 0..120 {
        match random.below(4) {
            0 | 1 if open.len() < 7 => {
                let capacity = 8 + random.below(150);
                let slots = [0, 1].map(|at: usize| engines[at].open(capacity).unwrap());
                open.push(Both { slots, cached: 0, capacity });
            }
            2 if !open.is_empty() => {
                let from = &open[random.below(open.len())];
                let cached = random.below(from.cached + 1);
                let capacity = cached + 1 + random.below(100);
                let slots = [0, 1].map(|at: usize| engines[at].fork(from.slots[at], cached, capacity).unwrap());
                open.push(Both { slots, cached, capacity });
            }
            3 if open.len() > 3 => {
                let closed = open.swap_remove(random.below(open.len()));
                (0..2).for_each(|at| engines[at].close(closed.slots[at]));
            }
            _ => {}
        }
        step_both(&mut engines, &mut open, &mut random, round);
    }
}

fn step_both(engines: &mut [Box<dyn Engine>; 2], open: &mut [Both], random: &mut Random, round: usize) {
    let mut trees = Vec::new();
    for (at, both) in open.iter().enumerate() {
        let room = (both.capacity - both.cached).min([6, 14, 70][random.below(3)]);
        if room > 0 && random.below(4) > 0 {
            let nodes = 1 + random.below(room);
            let (tokens, parents) = random_tree(random, nodes);
            trees.push((at, tokens, parents));
        }
    }
    let scores = [0, 1].map(|engine: usize| {
        let segments = trees.iter().map(|(at, tokens, parents)| Segment {
            slot: open[*at].slots[engine],
            tokens,
            parents,
            scored_from: 0,
            ..Segment::default()
        });
        let segments: Vec<_> = segments.collect();
        engines[engine].step(&segments, TOP_K).unwrap()
    });
    for (index, (at, tokens, parents)) in trees.iter().enumerate() {
        for node in 0..tokens.len() {
            let [kernels, tensors] = [0, 1].map(|engine: usize| scores[engine][index].top(node));
            assert_same(tensors, kernels, &format!("round {round}, node {node}"));
        }
        let keep = match random.below(tokens.len() + 1) {
            0 => Vec::new(),
            node => path(parents, node - 1),
        };
        let both = &mut open[*at];
        for (engine, slot) in engines.iter_mut().zip(both.slots) {
            engine.commit(slot, &keep).unwrap();
        }
        both.cached += keep.len();
    }
}
