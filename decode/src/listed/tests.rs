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

/// The share of each child by going through all lists.
fn naive(trie: &Trie, users: &[User], history: &[u32], node: u32, children: &[u32]) -> Vec<f64> {
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
    let sum: f64 = weights.iter().sum();
    let even = 1.0 / children.len() as f64;
    let trust = seen / (seen + 1.0);
    weights.iter().map(|weight| if sum > 0.0 { trust * weight / sum + (1.0 - trust) * even } else { even }).collect()
}

fn learnt(trie: &Trie, users: &[User], most: usize) -> Listed {
    let mut listed = Listed { most, ..Listed::default() };
    for (history, beams) in users {
        let context = ListContext::new(trie, history);
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
        let mut user = listed.of_user(&ListContext::new(&trie, &history));
        for node in 0..u32::try_from(trie.nodes()).unwrap() {
            let children: Vec<u32> = trie.children(node).filter(|child| child % left_out != 0).collect();
            if children.is_empty() {
                continue;
            }
            let mut found = Vec::new();
            user.log_shares(node, &children, &mut found);
            for (found, expected) in found.iter().zip(naive(&trie, &users, &history, node, &children)) {
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
        let user = listed.of_user(&ListContext::new(&trie, &[]));
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
    let shares = listed.of_user(&ListContext::new(&trie, &[1, 2, 9999])).shares(0, &children);
    assert!(shares.iter().all(|share| (share * children.len() as f64 - 1.0).abs() < 1e-9), "{shares:?}");
}

#[test]
fn the_last_items_weigh_most_and_an_equal_first_code_counts_once() {
    let trie = catalogue(2, 5, 60, 3);
    let item = |code: u32| (0..60).find(|&item| first(&trie, item) == code).unwrap();
    let codes: Vec<u32> = trie.children(0).collect();
    let history = [item(codes[3]), item(codes[0]), item(codes[1]), item(codes[0])];
    let context = ListContext::new(&trie, &history);
    assert_eq!(context, ListContext(vec![(0, EVERYBODY), (codes[0], RECENT[0] + RECENT[2]), (codes[1], RECENT[1])]));
}
