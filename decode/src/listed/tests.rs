//! Counts against lists that are counted as the definition has it.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::beams::tests::catalogue;

/// A user's last items and the beams of the list.
type User = (Vec<u32>, Vec<u32>);

fn first(trie: &Trie, item: u32) -> u32 {
    trie.path(trie.leaf_of_item(item))[0]
}

/// The share of each child by going through all lists, and through the user's previous one.
fn naive(
    trie: &Trie,
    users: &[User],
    (history, previous): (&[u32], &[u32]),
    (node, children): (u32, &[u32]),
) -> Vec<f64> {
    let mut contexts: HashMap<Option<u32>, f64> = HashMap::from([(None, EVERYBODY)]);
    for (item, weight) in history.iter().rev().zip(RECENT) {
        *contexts.entry(Some(first(trie, *item))).or_default() += weight;
    }
    let (mut weights, mut seen) = (vec![0.0; children.len()], 0.0);
    for (code, weight) in contexts {
        let is_alike = |had: &[u32]| {
            code.is_none_or(|code| had.iter().rev().take(RECENT.len()).any(|item| first(trie, *item) == code))
        };
        let alike: Vec<&User> = users.iter().filter(|(had, _)| is_alike(had)).collect();
        for (sum, child) in weights.iter_mut().zip(children) {
            let count = alike.iter().filter(|(_, beams)| beams.contains(child)).count() as f64;
            assert!(count == 0.0 || trie.parent(*child) == Some(node));
            *sum += weight * count / (alike.len() as f64 + FEW);
            seen += count;
        }
    }
    for (sum, child) in weights.iter_mut().zip(children) {
        let begins = |item: &&u32| trie.path(trie.leaf_of_item(**item)).contains(child);
        let count = previous.iter().filter(begins).count() as f64;
        *sum += PREVIOUS * count;
        seen += count;
    }
    let sum: f64 = weights.iter().sum();
    let even = 1.0 / children.len() as f64;
    let trust = seen / (seen + 1.0);
    weights.iter().map(|weight| if sum > 0.0 { trust * weight / sum + (1.0 - trust) * even } else { even }).collect()
}

fn learnt(trie: &Trie, users: &[User], most: usize) -> Listed {
    let mut listed = Listed { most, ..Listed::default() };
    for (history, beams) in users {
        let context = ListContext::new(trie, history, &[]);
        for depth in 1..=trie.levels() {
            listed.learn(trie, &context, beams.iter().copied().filter(|beam| trie.depth(*beam) == depth));
        }
    }
    listed
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 300, ..Default::default() })]

    #[test]
    fn shares_equal_naive_counts(
        levels in 1..4usize,
        seed in any::<u64>(),
        users in prop::collection::vec(
            (prop::collection::vec(0..12u32, 0..6), prop::collection::hash_set(0..12u32, 1..5)), 0..12),
        history in prop::collection::vec(0..12u32, 0..6),
        previous in prop::collection::vec(0..12u32, 0..4),
        left_out in 2..9u32,
    ) {
        let trie = catalogue(levels, 3, 12, seed);
        // The beams of a list are the prefixes of its items.
        let beams = |items: HashSet<u32>| {
            let all: HashSet<u32> = items.iter().flat_map(|&item| trie.path(trie.leaf_of_item(item))).collect();
            all.into_iter().collect::<Vec<u32>>()
        };
        let users: Vec<User> = users.into_iter().map(|(had, items)| (had, beams(items))).collect();
        let listed = learnt(&trie, &users, COUNTS_MAX);
        let context = ListContext::new(&trie, &history, &previous);
        let mut user = listed.of_user(&context);
        for node in 0..u32::try_from(trie.nodes()).unwrap() {
            let children: Vec<u32> = trie.children(node).filter(|child| child % left_out != 0).collect();
            if children.is_empty() {
                continue;
            }
            let mut found = Vec::new();
            user.log_shares(node, &children, &mut found);
            let expected = naive(&trie, &users, (&history, &previous), (node, &children));
            for (found, expected) in found.iter().zip(expected) {
                prop_assert!((f64::from(found.exp()) - expected).abs() < 1e-5, "{node}: {found}, not {expected}");
            }
        }
    }

    #[test]
    fn counts_are_bounded_and_what_is_frequent_stays(seed in any::<u64>(), most in 8..40usize) {
        let trie = catalogue(3, 8, 200, seed);
        // Two lists of three have item 0; the others have each another item.
        let beams = |item: u32| trie.path(trie.leaf_of_item(item));
        let users: Vec<User> =
            (0..600).map(|user| (vec![], beams(if user % 3 == 0 { 1 + user % 199 } else { 0 }))).collect();
        let listed = learnt(&trie, &users, most);
        prop_assert!(listed.counts <= most);
        let counts = |counts: &Counts| counts.below.values().map(Vec::len).sum::<usize>();
        prop_assert_eq!(listed.counts, listed.contexts.values().map(counts).sum::<usize>());
        let context = ListContext::new(&trie, &[], &[]);
        let user = listed.of_user(&context);
        let children: Vec<u32> = trie.children(0).collect();
        let shares = user.shares(0, &children);
        let frequent = children.binary_search(&first(&trie, 0)).unwrap();
        prop_assert!(shares.iter().all(|share| *share <= shares[frequent]), "{shares:?}");
    }
}

#[test]
fn before_the_first_list_all_continuations_are_alike() {
    let trie = catalogue(3, 4, 40, 8);
    let children: Vec<u32> = trie.children(0).collect();
    let listed = Listed::default();
    let context = ListContext::new(&trie, &[1, 2, 9999], &[]);
    let shares = listed.of_user(&context).shares(0, &children);
    assert!(shares.iter().all(|share| (share * children.len() as f64 - 1.0).abs() < 1e-9), "{shares:?}");
}

#[test]
fn the_last_items_weigh_most_and_an_equal_first_code_counts_once() {
    let trie = catalogue(2, 5, 60, 3);
    let item = |code: u32| (0..60).find(|&item| first(&trie, item) == code).unwrap();
    let codes: Vec<u32> = trie.children(0).collect();
    let history = [item(codes[3]), item(codes[0]), item(codes[1]), item(codes[0])];
    let context = ListContext::new(&trie, &history, &[]);
    let nodes = [(0, EVERYBODY), (codes[0], RECENT[0] + RECENT[2]), (codes[1], RECENT[1])];
    assert_eq!(context.nodes, nodes);
}

#[test]
fn what_the_previous_list_had_comes_before_what_others_had() {
    let trie = catalogue(3, 4, 40, 8);
    let ranks_first = |listed: &Listed, item: u32| {
        // The catalogue has forty items, so the last one is gone.
        let context = ListContext::new(&trie, &[], &[item, 40]);
        assert_eq!(context, ListContext::new(&trie, &[], &[item]));
        let (user, mut parent) = (listed.of_user(&context), 0);
        for prefix in trie.path(trie.leaf_of_item(item)) {
            let children: Vec<u32> = trie.children(parent).collect();
            let shares = user.shares(parent, &children);
            let own = shares[children.binary_search(&prefix).unwrap()];
            assert!(shares.iter().all(|share| *share <= own), "{item}: {shares:?}");
            assert!(children.len() == 1 || own > 1.0 / children.len() as f64, "{item}: {shares:?}");
            parent = prefix;
        }
    };
    let others = learnt(&trie, &[(vec![], trie.path(trie.leaf_of_item(0)))], COUNTS_MAX);
    for item in 0..40 {
        ranks_first(&Listed::default(), item);
        ranks_first(&others, item);
    }
}
