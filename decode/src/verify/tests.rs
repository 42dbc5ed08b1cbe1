//! Verification, against all root-to-node paths.

use proptest::prelude::*;

use super::*;
use crate::tree::tests::{any_tree, path_of};

const END: Token = 0;
const ALPHABET: Token = 4;

/// For every node its candidates, most probable first.
#[derive(Debug, Clone)]
pub(crate) struct Scores(pub(crate) Vec<Vec<Candidate>>);

impl TargetScores for Scores {
    fn top(&self, node: usize) -> &[Candidate] {
        &self.0[node]
    }
}

/// A distribution for each of 24 nodes: weights of the tokens, normalised.
fn any_scores() -> impl Strategy<Value = Scores> {
    let node = prop::collection::vec(1..100u32, ALPHABET as usize).prop_map(|weights| {
        let total: u32 = weights.iter().sum();
        let log = |weight: u32| (weight as f32 / total as f32).ln();
        let mut top: Vec<_> = (0..ALPHABET)
            .zip(weights)
            .map(|(token, weight)| Candidate { token, log_probability: log(weight) })
            .collect();
        top.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
        top
    });
    prop::collection::vec(node, 24).prop_map(Scores)
}

fn any_policy() -> impl Strategy<Value = Verification> {
    let relaxed = (1..4usize, 0.0..0.6f32).prop_map(|(k, p)| Verification::relaxed(k, p).unwrap());
    prop_oneof![Just(Verification::Strict), relaxed]
}

/// Whether every step of the path is acceptable, by the policy's definition.
fn acceptable(tree: &DraftTree, scores: &Scores, policy: Verification, path: &[usize]) -> bool {
    path.windows(2).all(|step| {
        let token = tree.tokens()[step[1]];
        let ends_before = step[0] != 0 && tree.tokens()[step[0]] == END;
        let top = scores.top(step[0]);
        let (k, p) = match policy {
            Verification::Strict => (1, -1.0),
            Verification::Relaxed { k, p } => (k, p),
        };
        let probable = |c: &Candidate| c.token == token && c.log_probability.exp() > p;
        !ends_before && (top[0].token == token || top.iter().take(k).any(probable))
    })
}

fn product(tree: &DraftTree, scores: &Scores, path: &[usize]) -> f32 {
    let log = |step: &[usize]| {
        let token = tree.tokens()[step[1]];
        scores.top(step[0]).iter().find(|c| c.token == token).unwrap().log_probability
    };
    path.windows(2).map(log).sum()
}

fn candidates(tokens: &[(Token, f32)]) -> Vec<Candidate> {
    let candidate = |&(token, p): &(Token, f32)| Candidate { token, log_probability: p.ln() };
    tokens.iter().map(candidate).collect()
}

#[test]
fn relaxed_options_out_of_range_are_refused() {
    assert_eq!(Verification::relaxed(0, 0.1), Err(PolicyError::K));
    for p in [-0.1, 1.1, f32::NAN] {
        assert!(matches!(Verification::relaxed(2, p), Err(PolicyError::P(_))));
    }
    assert_eq!(Verification::relaxed(2, 0.1).unwrap().top_k(), 2);
    assert_eq!(Verification::Strict.top_k(), 1);
}

#[test]
fn an_accepted_end_of_text_is_the_last_token() {
    let tree = DraftTree::chain(&[END, 1, END, 2]);
    let top = |token| candidates(&[(token, 0.9)]);
    let scores = Scores(vec![top(1), top(END), top(2), top(3)]);
    let verified = verify(&tree, &scores, Verification::Strict, &[END]);
    assert_eq!((verified.path, verified.tokens), (vec![1, 2], vec![1, END]));
    assert!(verified.ended);
    assert_eq!(verified.log_probabilities.len(), 2);
    // The same tree where nothing ends a text: all is accepted, and the bonus follows.
    let verified = verify(&tree, &scores, Verification::Strict, &[]);
    assert_eq!((verified.tokens, verified.ended), (vec![1, END, 2, 3], false));
}

#[test]
fn relaxed_accepts_the_second_choice_only_above_p() {
    let tree = DraftTree::chain(&[1, 2]);
    let scores = Scores(vec![candidates(&[(3, 0.7), (2, 0.2)]), candidates(&[(3, 1.0)])]);
    let tokens = |p| verify(&tree, &scores, Verification::Relaxed { k: 2, p }, &[END]);
    assert_eq!(tokens(0.1).tokens, [2, 3]);
    assert_eq!(tokens(0.1).relaxed, 1);
    assert_eq!(tokens(0.25).tokens, [3]);
    assert_eq!(tokens(0.25).relaxed, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_best_of_all_acceptable_paths_is_taken(
        tree in any_tree(ALPHABET),
        scores in any_scores(),
        policy in any_policy(),
    ) {
        let verified = verify(&tree, &scores, policy, &[END]);
        let mut path = vec![0];
        path.extend(&verified.path);
        prop_assert!(acceptable(&tree, &scores, policy, &path));
        let won = (path.len(), product(&tree, &scores, &path));
        for node in 0..tree.len() {
            let other = path_of(&tree, node);
            if acceptable(&tree, &scores, policy, &other) {
                prop_assert!((other.len(), product(&tree, &scores, &other)) <= won);
            }
        }
        let last = path[path.len() - 1];
        let mut tokens: Vec<Token> = verified.path.iter().map(|&node| tree.tokens()[node]).collect();
        if tokens.last() != Some(&END) {
            tokens.push(scores.top(last)[0].token);
        }
        prop_assert_eq!(verified.ended, tokens.last() == Some(&END));
        prop_assert_eq!(verified.tokens, tokens);
        let relaxed = |step: &&[usize]| scores.top(step[0])[0].token != tree.tokens()[step[1]];
        prop_assert_eq!(verified.relaxed, path.windows(2).filter(relaxed).count());
        let sum: f32 = verified.log_probabilities.iter().take(path.len() - 1).sum();
        prop_assert!((sum - won.1).abs() < 1e-4);
    }

    #[test]
    fn top_1_emits_a_beginning_of_what_strict_emits(
        tree in any_tree(ALPHABET),
        scores in any_scores(),
        p in 0.0..1.0f32,
    ) {
        let strict = verify(&tree, &scores, Verification::Strict, &[END]);
        let top_1 = verify(&tree, &scores, Verification::Relaxed { k: 1, p }, &[END]);
        prop_assert!(strict.tokens.starts_with(&top_1.tokens));
        prop_assert_eq!(top_1.relaxed, 0);
    }
}
