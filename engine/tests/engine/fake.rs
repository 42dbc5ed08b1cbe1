//! The fake engine, and the protocol that it checks for every engine.

use laser_decode::ROOT_PARENT;
use laser_engine::{Engine, FakeEngine, FakeOptions, Segment};

use crate::{
    models::Random,
    support::{chain, extend, greedy, path, random_tree, sequential, step},
};

fn fake(change: impl FnOnce(&mut FakeOptions)) -> FakeEngine {
    let mut options = FakeOptions { vocab_size: 4096, ..FakeOptions::default() };
    change(&mut options);
    FakeEngine::new(options)
}

#[test]
fn tree_scores_and_commits_equal_sequential_ones() {
    let mut engine = fake(|_| ());
    let mut random = Random::new(1);
    let mut context = random.tokens(6);
    let slot = engine.open(100).unwrap();
    extend(&mut engine, slot, &context);
    for _ in 0..5 {
        let (tokens, parents) = random_tree(&mut random, 12);
        let scores = step(&mut engine, slot, &tokens, &parents, 0);
        for (node, scores) in scores.iter().enumerate() {
            let path = path(&parents, node).into_iter().map(|node| tokens[node]);
            let whole: Vec<u32> = context.iter().copied().chain(path).collect();
            assert_eq!(*scores, sequential(&mut engine, &whole));
        }
        let keep = path(&parents, random.below(12));
        engine.commit(slot, &keep).unwrap();
        context.extend(keep.iter().map(|&node| tokens[node]));
        assert_eq!(engine.cached(slot), context.len());
    }
    let fork = engine.fork(slot, 4, 10).unwrap();
    let got = extend(&mut engine, fork, &[9]);
    assert_eq!(got, sequential(&mut engine, &[&context[..4], &[9]].concat()));
}

#[test]
fn candidates_are_distinct_descending_and_at_most_the_vocabulary() {
    let mut engine = fake(|options| options.vocab_size = 40);
    for token in 0..40 {
        let scores = sequential(&mut engine, &[3, token]);
        assert_eq!(scores.len(), 40);
        let mut tokens: Vec<u32> = scores.iter().map(|candidate| candidate.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..40).collect::<Vec<_>>());
        assert!(scores.windows(2).all(|pair| pair[0].log_probability > pair[1].log_probability));
        let total: f32 = scores.iter().map(|candidate| candidate.log_probability.exp()).sum();
        assert!((total - 1.0).abs() < 1e-3, "{total}");
    }
}

#[test]
fn texts_end_differ_by_prompt_and_seed_and_repeat_phrases() {
    let text = |seed: u64, prompt: &[u32]| greedy(&mut fake(|options| options.seed = seed), prompt, 400);
    let (one, two) = (text(0, &[5, 6, 7]), text(0, &[8, 9, 10]));
    assert_ne!(one, two);
    assert_ne!(one, text(1, &[5, 6, 7]));
    assert_eq!(one, text(0, &[5, 6, 7]));
    let mut ended = 0;
    let mut pairs = std::collections::HashMap::<Vec<u32>, usize>::new();
    for prompt in 0..50 {
        let text = text(0, &[prompt, prompt + 100, prompt + 200]);
        let end = text.iter().position(|&token| token == FakeOptions::default().eos);
        ended += usize::from(end.is_some());
        for pair in text[..end.unwrap_or(100)].windows(3) {
            *pairs.entry(pair.to_vec()).or_default() += 1;
        }
    }
    assert!(ended >= 40, "{ended} of 50 texts end within 400 tokens");
    let repeated: usize = pairs.values().filter(|&&count| count > 1).sum();
    let all: usize = pairs.values().sum();
    assert!(repeated * 4 > all, "{repeated} of {all} triples occur more than once");
}

#[test]
fn injected_failures_hit_the_step_and_the_token_asked_for() {
    let mut engine = fake(|options| options.fail_on_step = Some(1));
    let slot = engine.open(10).unwrap();
    extend(&mut engine, slot, &[2]);
    let segment = Segment { slot, tokens: &[3], parents: &[ROOT_PARENT], scored_from: 0, ..Segment::default() };
    let error = engine.step(&[segment], 1).unwrap_err().to_string();
    assert_eq!(error, "tensor operation failed: injected failure of step 1");
    extend(&mut engine, slot, &[3]);
    assert_eq!(engine.cached(slot), 2);

    let mut engine = fake(|options| options.fail_on_token = Some(77));
    let (good, bad) = (engine.open(10).unwrap(), engine.open(10).unwrap());
    extend(&mut engine, good, &[1, 2]);
    let segments = [(good, &[5]), (bad, &[77])].map(|(slot, tokens)| Segment {
        slot,
        tokens,
        parents: &[ROOT_PARENT],
        scored_from: 0,
        ..Segment::default()
    });
    let error = engine.step(&segments, 1).unwrap_err().to_string();
    assert_eq!(error, "tensor operation failed: injected failure of token 77");
    extend(&mut engine, good, &[5]);
}

/// The reason why a step of one segment is refused.
fn refusal(engine: &mut FakeEngine, slot: usize, tokens: &[u32], parents: &[u32], scored_from: usize) -> String {
    let segment = Segment { slot, tokens, parents, scored_from, ..Segment::default() };
    engine.step(&[segment], 1).unwrap_err().to_string()
}

#[test]
fn a_segment_that_is_no_tree_over_the_vocabulary_is_refused() {
    let mut engine = fake(|options| options.vocab_size = 100);
    let slot = engine.open(10).unwrap();
    let root = ROOT_PARENT;
    assert_eq!(refusal(&mut engine, 7, &[1], &[root], 0), "slot 7 is not open");
    let mut check = |tokens: &[u32], parents: &[u32], scored_from: usize, expected: &str| {
        let got = refusal(&mut engine, slot, tokens, parents, scored_from);
        assert_eq!(got, format!("slot 0: invalid segment: {expected}"));
    };
    check(&[], &[], 0, "0 tokens, 0 parents, scored from 0");
    check(&[1], &[root, 0], 0, "1 tokens, 2 parents, scored from 0");
    check(&[1], &[root], 2, "1 tokens, 1 parents, scored from 2");
    check(&[1, 100], &[root, 0], 0, "node 1 has token 100, vocabulary is 100");
    check(&[1, 2], &[1, root], 0, "node 0 has parent 1 after itself");
    check(&[1, 2], &[root, 1], 0, "node 1 has parent 1 after itself");
    let one = Segment { slot, tokens: &[1], parents: &[root], scored_from: 0, ..Segment::default() };
    assert_eq!(
        engine.step(&[one, one], 1).unwrap_err().to_string(),
        "slot 0: invalid segment: the slot has two segments in one step"
    );
}

#[test]
fn capacity_bounds_rows_and_the_context_bounds_positions() {
    let mut engine = fake(|options| options.max_positions = 12);
    let (short, long) = (engine.open(10).unwrap(), engine.open(50).unwrap());
    extend(&mut engine, short, &[1, 2, 3]);
    assert_eq!(
        refusal(&mut engine, short, &[1; 8], &[ROOT_PARENT; 8], 0),
        "slot 0: 3 cached tokens and 8 nodes exceed the capacity of 10"
    );
    assert_eq!(
        refusal(&mut engine, long, &[1; 13], &chain(13), 0),
        "slot 1: position 12 is beyond the model's 12 positions"
    );
    // Thirteen siblings share one position.
    assert_eq!(step(&mut engine, long, &[1; 13], &[ROOT_PARENT; 13], 0).len(), 13);
}

#[test]
fn a_wrong_commit_is_refused_with_its_reason() {
    let mut engine = fake(|_| ());
    let slot = engine.open(10).unwrap();
    let error = |engine: &mut FakeEngine, keep: &[usize]| engine.commit(slot, keep).unwrap_err().to_string();
    assert_eq!(error(&mut engine, &[]), "slot 0: invalid commit: no step since the last commit");
    step(&mut engine, slot, &[1, 2, 3, 4], &[ROOT_PARENT, 0, 0, 2], 0);
    for (keep, expected) in [
        (&[4][..], "node 4 of 4 nodes"),
        (&[1], "node 1 continues node 0, not the context"),
        (&[0, 1, 2], "node 2 continues node 0, not node 1"),
        (&[0, 0], "node 0 continues the context, not node 0"),
    ] {
        assert_eq!(error(&mut engine, keep), format!("slot 0: invalid commit: {expected}"));
    }
    let again = Segment { slot, tokens: &[1], parents: &[ROOT_PARENT], scored_from: 0, ..Segment::default() };
    assert_eq!(engine.step(&[again], 1).unwrap_err().to_string(), "slot 0: 4 nodes of the last step are not committed");
    engine.commit(slot, &[0, 2, 3]).unwrap();
    assert_eq!(engine.cached(slot), 3);
}

#[test]
fn slots_are_reused_and_forks_checked() {
    let mut engine = fake(|_| ());
    assert_eq!(engine.open(0).unwrap_err().to_string(), "capacity must be at least 1 token, got 0");
    let (first, second) = (engine.open(5).unwrap(), engine.open(5).unwrap());
    extend(&mut engine, first, &[1, 2]);
    for (length, capacity) in [(3, 9), (2, 1)] {
        assert_eq!(
            engine.fork(first, length, capacity).unwrap_err().to_string(),
            format!("slot 0: cannot fork {length} tokens of 2 cached ones into a capacity of {capacity}")
        );
    }
    engine.close(first);
    engine.close(first);
    assert_eq!(engine.cached(first), 0);
    assert_eq!(engine.fork(first, 0, 5).unwrap_err().to_string(), "slot 0 is not open");
    assert_eq!(engine.open(5).unwrap(), first);
    assert_ne!(first, second);
}
