//! What a step says of allowed tokens alone, asked for after it.

use laser_decode::{Candidate, Draw, Noise, ROOT_PARENT, Sampling, TargetScores};
use laser_engine::{Allowed, Engine, EngineError, MaskedNode, Segment};

use crate::{
    hold::{fake, tensors},
    models::{Random, TinyModel},
    support::{TOLERANCE, engine, random_tree},
};

const TOP: usize = 5;

fn engines() -> [(&'static str, Box<dyn Engine>); 3] {
    let model = &TinyModel::all()[0].1;
    [("kernels", engine(model)), ("tensors", tensors(model)), ("fake", fake())]
}

/// Bits of about one token in `one_in`.
fn mask(random: &mut Random, size: usize, one_in: usize) -> Vec<u32> {
    let mut mask = vec![0_u32; size.div_ceil(32)];
    // Not all words of a mask need be there.
    mask.truncate(1 + random.below(mask.len()));
    for word in &mut mask {
        (0..32).filter(|_| random.below(one_in) == 0).for_each(|bit| *word |= 1 << bit);
    }
    mask[0] |= 1 << 3;
    mask
}

fn has(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

#[test]
fn the_choice_among_allowed_tokens_is_that_of_all_scores_without_the_others() {
    for (name, mut engine) in engines() {
        engine.keep_logits();
        let size = engine.info().vocab_size;
        let mut random = Random::new(7);
        for (round, sampling) in [None, Sampling::new(0.8, None, 1.0).ok(), Sampling::new(1.3, Some(9), 1.0).ok()]
            .into_iter()
            .cycle()
            .take(12)
            .enumerate()
        {
            let slots = [0, 1].map(|_| engine.open(60).unwrap());
            let trees = [6, 9].map(|nodes| random_tree(&mut random, nodes));
            let segment = |at: usize, from: usize| Segment {
                slot: slots[at],
                tokens: &trees[at].0,
                parents: &trees[at].1,
                scored_from: from,
                ..Segment::default()
            };
            let scores = engine.step(&[segment(0, 2), segment(1, 0)], size).unwrap();
            // They may be asked about once the sequences have gone on, in any order.
            slots.iter().for_each(|slot| engine.commit(*slot, &[]).unwrap());
            let draw = sampling.map(|sampling| Draw { sampling, noise: Noise::new(round as u64) });
            let one_in = 1 + random.below(40);
            let masks: Vec<Vec<u32>> = (0..4).map(|_| mask(&mut random, size, one_in)).collect();
            let places = [(1, 4), (0, 2), (1, 0), (0, 5)];
            let node = |(mask, (at, node)): (&Vec<u32>, (usize, usize))| (slots[at], node, mask.clone(), draw);
            let asked: Vec<_> = masks.iter().zip(places).map(node).collect();
            let nodes: Vec<MaskedNode<'_>> = asked
                .iter()
                .map(|(slot, node, mask, draw)| MaskedNode { slot: *slot, node: *node, mask, draw: *draw })
                .collect();
            let told = engine.masked(&nodes, TOP).unwrap();
            for ((told, (at, node)), mask) in told.iter().zip(places).zip(&masks) {
                assert_told(told, scores[at].top(node), (mask, draw), name);
            }
            slots.into_iter().for_each(|slot| engine.close(slot));
        }
    }
}

#[track_caller]
fn assert_told(told: &Allowed, all: &[Candidate], (mask, draw): (&[u32], Option<Draw>), name: &str) {
    let mut allowed: Vec<Candidate> = all.iter().copied().filter(|candidate| has(mask, candidate.token)).collect();
    // The fake gives its last tokens no probability at all, in an order of its own.
    allowed.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability).then(a.token.cmp(&b.token)));
    let of = |token: u32| allowed.iter().find(|candidate| candidate.token == token).unwrap().log_probability;
    let close = |a: f32, b: f32| a == b || (a - b).abs() < TOLERANCE;
    assert_eq!(told.candidates.len(), allowed.len().min(TOP), "{name}");
    for (found, expected) in told.candidates.iter().zip(&allowed) {
        // Of near-ties either may be first.
        assert!(close(found.log_probability, expected.log_probability), "{name}: {found:?} {expected:?}");
        assert!(close(found.log_probability, of(found.token)), "{name}: {found:?}");
    }
    assert!(close(told.choice.log_probability, of(told.choice.token)), "{name}");
    match draw {
        None => assert_eq!(told.choice.token, told.candidates[0].token, "{name}"),
        // Of tokens that are all as improbable, more than `top_k` may be drawn.
        Some(_) if allowed[0].log_probability == f32::NEG_INFINITY => {}
        Some(Draw { sampling, noise }) => {
            let drawn = &allowed[..allowed.len().min(sampling.top_k().map_or(usize::MAX, |k| k as usize))];
            let time = |candidate: &Candidate| {
                let weight = (candidate.log_probability - allowed[0].log_probability) / sampling.temperature();
                laser_decode::arrival(noise.word(candidate.token), weight.exp())
            };
            let first = drawn.iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap();
            assert_eq!(told.choice.token, first.token, "{name}");
        }
    }
}

#[test]
fn a_node_that_was_not_scored_and_a_mask_without_tokens_are_errors() {
    for (name, mut engine) in engines() {
        engine.keep_logits();
        let slot = engine.open(20).unwrap();
        let segment =
            Segment { slot, tokens: &[4, 5, 6], parents: &[ROOT_PARENT, 0, 1], scored_from: 1, ..Segment::default() };
        engine.step(&[segment], 1).unwrap();
        let of = |node: usize, mask: &[u32], slot: usize| {
            let told = engine.masked(&[MaskedNode { slot, node, mask, draw: None }], TOP);
            told.map(|told| told[0].choice.token)
        };
        let mut of = of;
        assert_eq!(of(2, &[8], slot).unwrap(), 3, "{name}");
        for (node, mask, slot) in [(0, &[8][..], slot), (3, &[8], slot), (2, &[8], slot + 1), (2, &[0], slot)] {
            let error = of(node, mask, slot).unwrap_err();
            assert!(matches!(error, EngineError::Protocol { .. }), "{name}: {error}");
        }
    }
}
