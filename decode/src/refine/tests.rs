//! Refined trees against one that is grown naively over all paths.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::tree::tests::path_of;

const END: Token = 9;

const TERMS: Terms = Terms { max_nodes: 8, min_probability: 0.0, end_of_text: END, vocab_size: 12, price: 0.0 };

/// A tree of the other sources: below each node up to three tokens with probabilities that sum to at most 1.
fn any_drafted() -> impl Strategy<Value = DraftTree> {
    prop::collection::vec((any::<prop::sample::Index>(), 0..10_u32, 0.05_f32..0.9), 0..20).prop_map(|nodes| {
        let mut tree = DraftTree::new();
        tree.reset(1);
        for (parent, token, share) in nodes {
            let parent = parent.index(tree.len());
            let siblings: Vec<usize> = tree.children(parent).collect();
            let above = tree.probabilities()[parent];
            let left = above - siblings.iter().map(|&s| tree.probabilities()[s]).sum::<f32>();
            let is_new = siblings.iter().all(|&sibling| tree.tokens()[sibling] != token);
            if is_new && (parent == 0 || tree.tokens()[parent] != END) && left > 0.0 {
                tree.push(parent, token, left * share, if token % 2 == 0 { Source::Pool } else { Source::Prompt });
            }
        }
        tree
    })
}

/// What the draft model says after a path: up to four tokens, always the same after the same path.
fn candidates(path: &[Token]) -> Vec<Candidate> {
    let seed = path.iter().fold(7_u32, |seed, token| seed.wrapping_mul(31).wrapping_add(*token));
    let mut left = 1.0_f32;
    let tokens = (0..4).map(|rank| (seed / 3 + 7 * rank) % 12);
    let candidate = |token| {
        let probability = left * 0.6;
        left -= probability;
        Candidate { token, log_probability: probability.ln() }
    };
    tokens.map(candidate).collect()
}

fn tokens_of(tree: &DraftTree, node: usize) -> Vec<Token> {
    path_of(tree, node).into_iter().skip(1).map(|node| tree.tokens()[node]).collect()
}

/// One forward of the draft model.
fn read(refined: &mut Refined, trust: f32) {
    let mut nodes = refined.to_read(END, 0.0);
    nodes.insert(0, 0);
    for node in nodes {
        let path = tokens_of(refined.tree(), node);
        refined.read(node, &candidates(&path), Calibration { trust, sharpness: 1.0 }, &[]);
    }
}

/// Probabilities of all paths of up to `rounds` steps beyond the drafted tree, by the formula of the module.
fn naive(tree: &DraftTree, (terms, trust): (Terms, f32), rounds: usize) -> HashMap<Vec<Token>, f32> {
    let mut estimates: HashMap<Vec<Token>, f32> = HashMap::new();
    for node in 0..tree.len() {
        estimates.insert(tokens_of(tree, node), tree.probabilities()[node]);
    }
    let mut all = HashMap::from([(Vec::new(), 1.0)]);
    let mut paths = vec![(Vec::new(), 0)];
    while let Some((path, beyond)) = paths.pop() {
        if path.last() == Some(&END) {
            continue;
        }
        let above = estimates.get(&path).copied();
        let of = |token: Token| {
            let child = [path.as_slice(), &[token]].concat();
            above.and_then(|above| Some(estimates.get(&child)? / above)).unwrap_or(0.0)
        };
        let left = (1.0 - (0..12).map(of).sum::<f32>()).clamp(0.0, 1.0);
        let proposed = candidates(&path);
        for token in 0..12 {
            let child = [path.as_slice(), &[token]].concat();
            let model = proposed.iter().find(|c| c.token == token).map_or(0.0, |c| c.log_probability.exp());
            let blended = (1.0 - trust) * (of(token) + left * model) + trust * model;
            let is_drafted = estimates.contains_key(&child);
            let beyond = if is_drafted { 0 } else { beyond + 1 };
            let probability = all[&path] * blended.min(1.0);
            let is_allowed = is_drafted || (token as usize) < terms.vocab_size;
            if probability > terms.min_probability && beyond <= rounds && is_allowed {
                all.insert(child.clone(), probability);
                paths.push((child, beyond));
            }
        }
    }
    all.remove(&Vec::new());
    all
}

proptest! {
    #[test]
    fn a_refined_tree_has_the_most_probable_paths_of_both_opinions(
        drafted in any_drafted(), trust in 0.0_f32..=1.0, rounds in 1_usize..4,
    ) {
        // Room for all: what is grown round by round is then what one would grow at once.
        let terms = Terms { max_nodes: 10_000, min_probability: 0.02, vocab_size: 11, ..TERMS };
        let mut refined = Refined::default();
        refined.begin(&drafted, None);
        for _ in 0..rounds {
            read(&mut refined, trust);
            refined.grow(terms);
        }
        let tree = refined.tree();
        let expected = naive(&drafted, (terms, trust), rounds);
        prop_assert_eq!(tree.drafted(), expected.len());
        for node in 1..tree.len() {
            let expected = expected.get(&tokens_of(tree, node)).copied();
            prop_assert!((tree.probabilities()[node] - expected.unwrap_or(0.0)).abs() < 1e-4, "{:?}", expected);
        }
    }

    #[test]
    fn a_small_tree_is_the_beginning_of_the_large_one(
        drafted in any_drafted(), trust in 0.0_f32..=1.0, most in 0_usize..30,
    ) {
        let terms = Terms { max_nodes: 1_000, min_probability: 0.001, ..TERMS };
        let mut whole = Refined::default();
        whole.begin(&drafted, None);
        read(&mut whole, trust);
        let mut small = whole.clone();
        let gains = (whole.grow(terms), small.grow(Terms { max_nodes: most, ..terms }));
        let mut expected = whole.tree().clone();
        expected.truncate(most);
        prop_assert_eq!(small.tree(), &expected);
        prop_assert!(gains.0 >= gains.1 && gains.0 > -1e-3);
        let probabilities = expected.probabilities();
        prop_assert!(probabilities.is_sorted_by(|a, b| a >= b), "{:?}", probabilities);
        for node in 0..expected.len() {
            let children: Vec<usize> = expected.children(node).collect();
            let sum: f32 = children.iter().map(|&child| probabilities[child]).sum();
            prop_assert!(sum <= probabilities[node] * 1.001, "node {}", node);
            let tokens: std::collections::BTreeSet<Token> = children.iter().map(|&c| expected.tokens()[c]).collect();
            prop_assert_eq!(tokens.len(), children.len());
        }
    }
}

#[test]
fn nothing_that_was_read_is_read_again_but_ancestors_are_given() {
    let mut tree = DraftTree::new();
    tree.reset(1);
    let one = tree.push(0, 2, 0.9, Source::Pool);
    tree.push(one, END, 0.5, Source::Pool);
    let mut refined = Refined::default();
    refined.begin(&tree, None);
    assert_eq!(refined.to_read(END, 0.0), [1]);
    assert_eq!(refined.to_read(END, 0.91), [0; 0], "too improbable");
    refined.read(0, &[], Calibration::default(), &[0.5]);
    refined.read(1, &[Candidate { token: 3, log_probability: -1.0 }], Calibration::default(), &[1.5]);
    assert_eq!(refined.to_read(END, 0.0), [0; 0]);
    refined.grow(TERMS);
    // 3 is new below 2, which has to be given again.
    let new = (1..refined.tree().len()).find(|&node| refined.tree().tokens()[node] == 3).unwrap();
    assert_eq!(refined.to_read(END, 0.0), [1, new]);
    assert_eq!(refined.tree().sources()[new], Source::Model);
    // The end of text has five ninths of what follows 2.
    let (others, model) = refined.opinions(new).unwrap();
    assert!((others - 4.0 / 9.0 * model).abs() < 1e-6 && (model - (-1.0_f32).exp()).abs() < 1e-6, "{others} {model}");
}

#[test]
fn a_token_of_the_prompt_that_the_draft_model_proposes_too_is_not_the_prompts_alone() {
    let mut tree = DraftTree::new();
    tree.reset(1);
    tree.push(0, 2, 0.5, Source::Prompt);
    tree.push(0, 3, 0.3, Source::Prompt);
    tree.push(0, 4, 0.1, Source::Pool);
    tree.push(0, 5, 0.1, Source::Prompt);
    let mut refined = Refined::default();
    refined.begin(&tree, None);
    // The probability of the last one rounds to 0.
    let candidates = [(2, 0.2_f32.ln()), (4, 0.7_f32.ln()), (5, -200.0)]
        .map(|(token, log_probability)| Candidate { token, log_probability });
    refined.read(0, &candidates, Calibration::default(), &[]);
    refined.grow(TERMS);
    let sources: HashMap<Token, Source> =
        (1..5).map(|node| (refined.tree().tokens()[node], refined.tree().sources()[node])).collect();
    let expected = [(2, Source::Context), (3, Source::Prompt), (4, Source::Model), (5, Source::Context)];
    assert_eq!(sources, HashMap::from(expected));
}

#[test]
fn sharpness_makes_the_first_candidate_surer_and_its_slope_is_that_of_the_log_likelihood() {
    let mut tree = DraftTree::new();
    tree.reset(1);
    let mut refined = Refined::default();
    refined.begin(&tree, None);
    let candidates = [(2, 0.5_f32), (3, 0.3)].map(|(token, p)| Candidate { token, log_probability: p.ln() });
    let mut grown = |sharpness: f32| {
        refined.begin(&tree, None);
        refined.read(0, &candidates, Calibration { trust: 0.5, sharpness }, &[]);
        let slopes = [2, 3, 4].map(|token| refined.slope(0, token).unwrap());
        refined.grow(TERMS);
        (refined.tree().probabilities()[1..].to_vec(), slopes)
    };
    let (plain, slopes) = grown(1.0);
    assert!((plain[0] - 0.5).abs() < 1e-6 && (plain[1] - 0.3).abs() < 1e-6, "{plain:?}");
    let (sharp, _) = grown(4.0);
    // The others, a fifth, count as two thirds of a token of 0.3.
    let sum = 0.5_f32.powi(4) + (1.0 + 2.0 / 3.0) * 0.3_f32.powi(4);
    assert!((sharp[0] - 0.5_f32.powi(4) / sum).abs() < 1e-5, "{sharp:?}");
    let (next, _) = grown(1.001);
    for token in 0..2 {
        let measured = (next[token].ln() - plain[token].ln()) / 0.001;
        assert!((slopes[token] - measured).abs() < 0.01, "{slopes:?} {measured}");
    }
    assert!(slopes[0] > 0.0 && slopes[2] < 0.0);
    refined.begin(&tree, None);
    assert_eq!(refined.rank(0, 2), None);
    refined.read(0, &candidates, Calibration::default(), &[]);
    assert_eq!([2, 3, 4].map(|token| refined.rank(0, token)), [Some(0), Some(1), Some(2)]);
}

#[test]
fn what_the_acceptance_head_says_of_a_node_takes_the_place_of_the_models_probability() {
    let mut drafted = DraftTree::new();
    drafted.reset(1);
    let pooled = drafted.push(0, 4, 0.5, Source::Pool);
    drafted.push(pooled, 5, 0.25, Source::Pool);
    let mut refined = Refined::default();
    refined.begin(&drafted, None);
    let certain = [Candidate { token: 4, log_probability: 0.9_f32.ln() }];
    for node in 0..3 {
        refined.read(node, &certain, Calibration { trust: 1.0, sharpness: 1.0 }, &[]);
    }
    // Odds of 9 to 1, to the power of 1/2, times 1/12: 1 to 4.
    refined.judge(1, Verdict { scale: 0.5, shift: -(12_f32.ln()) });
    let terms = Terms { max_nodes: 8, ..TERMS };
    // Node 1 was worth 0.9 by the model's probability and is worth 0.2 now; so is all below it.
    refined.grow(terms);
    let tree = refined.tree();
    let of = |path: &[Token]| (1..tree.len()).find(|&node| tokens_of(tree, node) == path);
    assert!((tree.probabilities()[of(&[4]).unwrap()] - 0.2).abs() < 1e-5, "{tree:?}");
    assert!((tree.probabilities()[of(&[4, 4]).unwrap()] - 0.18).abs() < 1e-5, "{tree:?}");
    let opinion = refined.opinions(of(&[4]).unwrap()).map(|(_, model)| model);
    assert!(opinion.is_some_and(|model| (model - 0.2).abs() < 1e-5), "{opinion:?}");
    // What was judged stays so until the tree begins anew.
    assert_eq!(refined.grow(terms), 0.0);
    refined.begin(&drafted, None);
    refined.read(0, &certain, Calibration { trust: 1.0, sharpness: 1.0 }, &[]);
    refined.grow(terms);
    assert!((refined.tree().probabilities()[1] - 0.9).abs() < 1e-6);
}

#[test]
fn verdicts_are_probabilities_however_sure_the_model_is() {
    let verdict = |scale, shift| Verdict { scale, shift };
    for own in [0.0, 1e-30, 0.1, 0.9, 1.0] {
        for (scale, shift) in [(1.0, 0.0), (3.0, -50.0), (0.2, 90.0)] {
            let found = verdict(scale, shift).probability(own);
            assert!((0.0..=1.0).contains(&found), "{own} {scale} {shift}: {found}");
        }
    }
    assert!((verdict(1.0, 0.0).probability(0.3) - 0.3).abs() < 1e-6);
}

#[test]
fn a_sharpened_distribution_is_its_power() {
    let candidates = [0.5_f32, 0.3, 0.1].map(|p| Candidate { token: 0, log_probability: p.ln() });
    // What is left counts as one token like the last.
    let powers = [0.25, 0.09, 0.01];
    let sum = powers.iter().sum::<f32>() + 0.01;
    for (found, power) in sharpened(&candidates, 2.0).iter().zip(powers) {
        assert!((found - power / sum).abs() < 1e-5, "{found} {power}");
    }
}
