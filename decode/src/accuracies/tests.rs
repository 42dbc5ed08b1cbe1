//! Accuracies against planted ones, and trees of them against Medusa's construction.

use proptest::prelude::*;

use super::*;
use crate::Token;
use crate::refine::{Calibration, Refined, Terms};
use crate::tree::DraftTree;
use crate::tree::tests::path_of;

const RANKS: usize = 4;

/// Which tells its head and its rank.
fn token(head: usize, rank: usize) -> Token {
    Token::try_from(10 * head + rank + 1).unwrap()
}

/// What every head says: all ranks with the same probability.
fn candidates(head: usize) -> Vec<Candidate> {
    (0..RANKS).map(|rank| Candidate { token: token(head, rank), log_probability: 0.25_f32.ln() }).collect()
}

/// Numbers in 0..1 without a pattern.
fn random() -> impl FnMut() -> f32 {
    let mut state = 5_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 24) as f32
    }
}

/// Those learnt from so many tokens after each head, of which these shares are its candidates of each rank.
fn learnt(planted: &[[f32; RANKS]], tokens: usize) -> Accuracies {
    let (mut accuracies, mut random) = (Accuracies::new(planted.len(), RANKS), random());
    for (head, shares) in planted.iter().enumerate() {
        for _ in 0..tokens {
            let mut left = random();
            let is_reached = |share: &&f32| {
                left -= **share;
                left >= 0.0
            };
            let rank = shares.iter().take_while(is_reached).count();
            accuracies.learn(head, rank);
        }
    }
    accuracies
}

fn numbers(accuracies: &Accuracies, head: usize) -> Vec<f32> {
    accuracies.of(head, &candidates(head)).iter().map(|candidate| candidate.log_probability.exp()).collect()
}

/// The tree of heads that say what `candidates` has, as a draft model grows it.
fn grown(accuracies: &Accuracies, nodes: usize) -> DraftTree {
    let terms = Terms { max_nodes: nodes, min_probability: 0.0, end_of_text: 0, vocab_size: 1000, price: 0.0 };
    let mut root = DraftTree::new();
    root.reset(1);
    let mut refined = Refined::default();
    refined.begin(&root, None);
    for head in 0..accuracies.heads.len() {
        for node in refined.unread_at(head, terms.end_of_text) {
            refined.read(node, &accuracies.of(head, &candidates(head)), Calibration::default(), &[]);
        }
        refined.grow(terms);
    }
    refined.tree().clone()
}

/// Medusa's construction: the path with the greatest product of accuracies, of all whose parent is there, until there
/// are so many. Paths are ranks by depth; with each its product.
fn greedy(accuracies: &[Vec<f32>], nodes: usize) -> Vec<(Vec<usize>, f32)> {
    let product = |path: &[usize]| path.iter().zip(accuracies).map(|(&rank, of_head)| of_head[rank]).product::<f32>();
    let mut tree: Vec<(Vec<usize>, f32)> = Vec::new();
    while tree.len() < nodes {
        let parents = tree.iter().map(|(path, _)| path.clone()).chain([Vec::new()]);
        let children = parents.filter(|path| path.len() < accuracies.len());
        let children = children.flat_map(|path| (0..RANKS).map(move |rank| [path.as_slice(), &[rank]].concat()));
        let new = children.filter(|child| tree.iter().all(|(path, _)| path != child));
        let Some(best) = new.max_by(|a, b| product(a).total_cmp(&product(b))) else { break };
        let gain = product(&best);
        tree.push((best, gain));
    }
    tree
}

#[test]
fn accuracies_come_to_be_the_shares_of_tokens_and_begin_as_the_heads_own_probabilities() {
    let planted = [[0.6, 0.2, 0.05, 0.05], [0.1, 0.3, 0.2, 0.1]];
    let accuracies = learnt(&planted, 20_000);
    for (head, shares) in planted.iter().enumerate() {
        for (found, share) in numbers(&accuracies, head).iter().zip(shares) {
            assert!((found - share).abs() < 0.02, "head {head}: {found} for {share}");
        }
    }
    let none = Accuracies::new(2, RANKS);
    assert!(numbers(&none, 0).iter().all(|number| (number - 0.25).abs() < 1e-6));
    // The head's own probabilities count for 16 tokens, so after these they are halfway.
    let certain = learnt(&[[1.1, 0.0, 0.0, 0.0]], 16);
    assert!((numbers(&certain, 0)[0] - 0.625).abs() < 1e-6, "{certain:?}");
    // Nothing is known of a head that there is not.
    assert_eq!(certain.of(1, &candidates(1)), candidates(1));
}

#[test]
fn accuracies_follow_other_texts() {
    let mut accuracies = learnt(&[[0.9, 0.1, 0.0, 0.0]], 50_000);
    (0..20_000).for_each(|_| accuracies.learn(0, RANKS));
    assert!(numbers(&accuracies, 0).iter().all(|&number| number < 0.01), "{accuracies:?}");
}

#[test]
fn the_tree_is_that_of_medusas_paper() {
    let accuracies = learnt(&[[0.6, 0.2, 0.07, 0.05], [0.5, 0.15, 0.11, 0.03], [0.35, 0.24, 0.08, 0.02]], 3000);
    let measured: Vec<Vec<f32>> = (0..3).map(|head| numbers(&accuracies, head)).collect();
    for nodes in [1, 2, 5, 20, 63, 200] {
        let tree = grown(&accuracies, nodes);
        let rank = |head: usize, of: Token| (0..RANKS).find(|&rank| token(head, rank) == of).unwrap();
        let path = |node| {
            let path = path_of(&tree, node).into_iter().skip(1).enumerate();
            path.map(|(head, node)| rank(head, tree.tokens()[node])).collect::<Vec<usize>>()
        };
        let mut found: Vec<Vec<usize>> = (1..tree.len()).map(path).collect();
        let mut expected: Vec<Vec<usize>> = greedy(&measured, nodes).into_iter().map(|(path, _)| path).collect();
        found.sort();
        expected.sort();
        // All paths there are: 4 + 16 + 64.
        assert_eq!(found.len(), nodes.min(84));
        assert_eq!(found, expected, "{nodes} nodes");
    }
}

proptest! {
    #[test]
    fn no_tree_of_so_many_nodes_is_expected_to_accept_more_than_medusas(
        planted in prop::collection::vec(prop::array::uniform4(0.0_f32..0.25), 1..4), nodes in 1_usize..40,
    ) {
        let accuracies = learnt(&planted, 500);
        let measured: Vec<Vec<f32>> = (0..planted.len()).map(|head| numbers(&accuracies, head)).collect();
        let tree = grown(&accuracies, nodes);
        let expected = greedy(&measured, nodes);
        prop_assert_eq!(tree.drafted(), expected.len());
        let found: f32 = tree.probabilities()[1..].iter().sum();
        let gain: f32 = expected.iter().map(|(_, gain)| gain).sum();
        prop_assert!((found - gain).abs() < 1e-4, "{} for {}", found, gain);
    }
}
