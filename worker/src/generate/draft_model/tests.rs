//! Which texts a draft model reads, and whom it trusts.

use laser_decode::{Candidate, DraftTree, Source};
use laser_engine::{FakeEngine, FakeOptions};

use super::worth::TRIAL_FORWARDS;
use super::*;

/// Its forwards take a millisecond and these seconds per token.
fn model(token_seconds: f64) -> DraftModel {
    let cost = StepCost::new(vec![(0.0, 1e-3), (1e4, 1e-3 + 1e4 * token_seconds)], 0.0);
    let mut model = DraftModel::new(Box::new(FakeEngine::new(FakeOptions::default())), 2, Some(cost));
    // A thousand tokens a second: a forward of a millisecond costs a token. A text gets five per step.
    model.stepped((5, 1), 5e-3);
    model
}

/// Readers that have just emitted a token, with prompts of these lengths to read before it.
fn readers(model: &mut DraftModel, prompts: &[usize]) -> Vec<Reader> {
    let mut open = |&length: &usize| {
        let mut reader = model.open(&vec![1; length], 0, None, length + 8).unwrap();
        reader.emitted(&[2]);
        reader
    };
    prompts.iter().map(&mut open).collect()
}

/// Which of the readers, whose texts may get so many more tokens, the forward of this place reads.
fn paying(model: &mut DraftModel, place: usize, readers: &mut [Reader], left: usize) -> Vec<usize> {
    let readable: Vec<_> = readers.iter_mut().map(|reader| Readable { reader, nodes: 8, left }).collect();
    let all: Vec<usize> = (0..readable.len()).collect();
    let wanted = model.wanted(place, &readable, &all, 0);
    model.paying(place, &readable, &all, wanted)
}

/// Forwards that gain so many tokens per unit of probability.
fn learnt(mut model: DraftModel, gain: f64) -> DraftModel {
    (0..TRIAL_FORWARDS).for_each(|_| model.learn(0, (2.0 * gain, 2.0), (StepLoad::default(), None)));
    model
}

#[test]
fn a_forward_is_run_if_it_gains_more_than_its_time_and_tried_again_later() {
    let mut model = learnt(model(0.0), 0.6);
    let mut readers = readers(&mut model, &[0, 0, 0]);
    // 0.6 tokens for each of two sequences pay for one token; for one sequence they do not.
    assert_eq!(paying(&mut model, 0, &mut readers[..2], 50), [0, 1]);
    assert!(paying(&mut model, 0, &mut readers[..1], 50).is_empty());
    // After 32 steps, then 64, 128 and so on.
    let tried: Vec<usize> = (2..1001).filter(|_| !paying(&mut model, 0, &mut readers[..1], 50).is_empty()).collect();
    assert_eq!(tried, [32, 97, 226, 483, 996]);
    // What is learned of one forward says nothing of the next, which is tried with two.
    assert_eq!(paying(&mut model, 1, &mut readers, 50), [0, 1]);
}

#[test]
fn a_forward_that_takes_longer_than_when_it_was_measured_has_to_gain_more() {
    let mut model = learnt(model(0.0), 0.6);
    let mut readers = readers(&mut model, &[0, 0]);
    assert_eq!(paying(&mut model, 0, &mut readers, 50), [0, 1]);
    // 1.2 tokens for a forward of a millisecond, and not for one of two.
    (0..100).for_each(|_| model.learn(0, (1.2, 2.0), (StepLoad::default(), Some(2e-3))));
    assert!(paying(&mut model, 0, &mut readers, 50).is_empty());
}

#[test]
fn forwards_are_tried_with_the_two_texts_that_have_the_least_to_read() {
    let mut model = model(0.0);
    let mut readers = readers(&mut model, &[300, 20, 100, 0]);
    for _ in 0..TRIAL_FORWARDS {
        assert_eq!(paying(&mut model, 0, &mut readers, 50), [3, 1]);
        model.learn(0, (2.0, 2.0), (StepLoad::default(), None));
    }
    assert_eq!(paying(&mut model, 0, &mut readers, 50), [3, 1, 2, 0], "a token a text pays for any prompt");
}

#[test]
fn a_gain_that_is_known_from_few_texts_is_taken_for_twice_as_many() {
    let mut model = model(0.0);
    let mut readers = readers(&mut model, &[0; 20]);
    for expected in [2, 4, 8, 16, 20, 20] {
        assert_eq!(paying(&mut model, 0, &mut readers, 50).len(), expected);
        (0..TRIAL_FORWARDS).for_each(|_| model.learn(0, (2.0, 2.0), (StepLoad::default(), None)));
    }
}

#[test]
fn a_forward_is_run_as_long_as_what_it_promises_comes() {
    let mut model = learnt(model(0.0), 0.6);
    let mut readers = readers(&mut model, &[0, 0]);
    (model.texts, model.price) = (2, 0.9);
    // A node that is certain gains 0.1 tokens, and one that comes nine times in ten gains nothing.
    for (accepted_of_ten, expected) in [(10, 2), (9, 0), (10, 2)] {
        for step in 0..300 {
            for reader in &mut readers {
                reader.promised = Some(0.1);
                model.kept(reader, 1, usize::from(step % 10 < accepted_of_ten));
            }
        }
        assert_eq!(paying(&mut model, 0, &mut readers, 50).len(), expected, "{:?}", model.promise());
    }
    // With another number of texts a node may cost little.
    model.texts = 1;
    assert_eq!(model.promise().share(), 1.0);
}

#[test]
fn of_a_tree_the_nodes_are_read_that_are_worth_their_part_of_a_forward() {
    let mut tree = DraftTree::new();
    tree.reset(2);
    for (parent, token, probability) in [(0, 3, 0.5), (1, 4, 0.3), (1, 5, 0.1), (3, 6, 0.05)] {
        tree.push(parent, token, probability, Source::Pool);
    }
    // A token read costs a tenth of one emitted, and a node gains 0.6 or 0.3 tokens per unit of its probability.
    for (token_seconds, gain, price, expected) in [
        (1e-4, 0.6, 0.0, vec![1, 2]),
        (1e-4, 0.3, 0.0, vec![1]),
        (0.0, 0.3, 0.0, vec![1, 2, 3, 4]),
        // What follows a node has to pay for its own place in the target's forward.
        (0.0, 0.3, 0.2, vec![1, 2]),
        (1e-4, 0.6, 0.2, vec![1]),
    ] {
        let mut model = learnt(model(token_seconds), gain);
        model.price = price;
        let mut readers = readers(&mut model, &[0]);
        readers[0].refined.begin(&tree, None);
        let readable = [Readable { reader: &mut readers[0], nodes: 8, left: 50 }];
        let wanted = model.wanted(0, &readable, &[0], 0);
        assert_eq!(
            model.nodes_to_read(readable[0].reader, wanted),
            expected,
            "{token_seconds} {gain} {price}: {wanted:?}"
        );
    }
}

#[test]
fn a_prompt_is_read_if_the_steps_that_are_left_pay_for_it() {
    // A token read costs a hundredth of one emitted.
    let mut model = learnt(model(1e-5), 0.6);
    let mut readers = readers(&mut model, &[0, 0, 300]);
    // Fifty tokens are ten steps, each of which has 30 tokens of the prompt to pay for; five are one step.
    assert_eq!(paying(&mut model, 0, &mut readers, 50), [0, 1, 2]);
    assert_eq!(paying(&mut model, 0, &mut readers, 5), [0, 1]);
}

#[test]
fn without_costs_every_forward_is_run() {
    let mut model = DraftModel { cost: None, ..learnt(model(0.0), 0.0) };
    let mut readers = readers(&mut model, &[0, 300]);
    assert!((0..50).all(|_| paying(&mut model, 0, &mut readers, 50) == [0, 1]));
}

#[test]
fn trust_goes_to_who_is_right() {
    for (opinions, low, high) in [((0.9, 0.1), 0.0, 0.05), ((0.1, 0.9), 0.95, 1.0), ((0.3, 0.3), 0.5, 0.5)] {
        let mut model = model(0.0);
        let mut reader = model.open(&[1], 0, None, 8).unwrap();
        reader.opinions = vec![(3, opinions); 2000];
        model.learn_from(&mut reader);
        let trust = model.learnt.calibration(0).trust;
        assert!((low..=high).contains(&trust), "{opinions:?}: {trust}");
        assert!(reader.opinions.is_empty());
    }
}

#[test]
fn a_measured_tree_follows_how_often_candidates_were_right_and_not_what_the_heads_say() {
    let engine = FakeEngine::new(FakeOptions { heads: Some(2), ..FakeOptions::default() });
    let mut model = DraftModel::new(Box::new(engine), 1, None).with_measured_tree();
    let mut reader = model.open(&[1], 0, None, 8).unwrap();
    let candidates = [(3, 0.9_f32), (4, 0.1)].map(|(token, p)| Candidate { token, log_probability: p.ln() });
    // The second candidate of the first head is always right, and of the second head nothing is known.
    reader.outcomes = vec![Outcome { depth: 0, slope: 1.0, rank: 1 }; 10_000];
    model.learn_from(&mut reader);
    for (depth, expected) in [(0, [0.0, 1.0]), (1, [0.9, 0.1])] {
        let (taken, calibration) = model.learnt.taken(depth, &candidates);
        assert_eq!(calibration.sharpness, 1.0);
        for (candidate, expected) in taken.iter().zip(expected) {
            assert!((candidate.log_probability.exp() - expected).abs() < 0.01, "{depth}: {taken:?}");
        }
    }
    assert!(reader.outcomes.is_empty());
}
