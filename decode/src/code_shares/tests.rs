//! Shares against counts that are made as the definition has them; damage is refused.

use proptest::prelude::*;

use super::*;
use crate::beams::tests::catalogue;
use crate::beams::{BeamSearch, Normalisation};
use crate::trie::{Allowed, Seen, Stock};

fn shares_of(trie: &Trie, histories: &[Vec<u32>]) -> CodeShares {
    CodeShares::open(build_code_pool(trie, histories).unwrap().into(), trie.clone()).unwrap()
}

/// A node's codes, each with its level.
fn prefix(trie: &Trie, node: u32) -> Vec<(usize, u16)> {
    let up = std::iter::successors(Some(node), |&node| trie.parent(node).filter(|&parent| parent > 0));
    let mut codes: Vec<(usize, u16)> = up.take_while(|&node| node > 0).map(|node| code(trie, node)).collect();
    codes.reverse();
    codes
}

fn code(trie: &Trie, node: u32) -> (usize, u16) {
    (trie.depth(node), trie.code(node))
}

fn codes(trie: &Trie, history: &[u32]) -> Vec<(usize, u16)> {
    history.iter().flat_map(|&item| prefix(trie, trie.leaf_node(trie.leaf_of_item(item)))).collect()
}

/// The share of each child by counting every end of the context, without any index.
fn naive(trie: &Trie, histories: &[Vec<u32>], context: &[(usize, u16)], children: &[u32]) -> Vec<f64> {
    let texts: Vec<Vec<(usize, u16)>> = histories.iter().map(|history| codes(trie, history)).collect();
    let (mut shares, mut weight, mut before) = (vec![0.0; children.len()], 1.0, 0);
    for len in (1..=context.len().min(ORDER)).rev() {
        let end = &context[context.len() - len..];
        let places =
            texts.iter().flat_map(|text| text.windows(len).enumerate().map(move |(at, found)| (text, at, found)));
        let places: Vec<_> = places.filter(|(_, _, found)| *found == end).collect();
        // An end at the same places as a longer one says nothing else.
        if places.len() == before {
            continue;
        }
        before = places.len();
        let next = || places.iter().filter_map(|(text, at, _)| text.get(at + len));
        let count = |child: u32| next().filter(|&&next| next == code(trie, child)).count() as f64;
        let all: f64 = children.iter().map(|&child| count(child)).sum();
        if all > 0.0 {
            for (share, &child) in shares.iter_mut().zip(children).filter(|(share, _)| **share == 0.0) {
                *share = weight * count(child) / all;
            }
            weight *= BACK_OFF;
        }
    }
    shares.iter_mut().filter(|share| **share == 0.0).for_each(|share| *share = weight / children.len() as f64);
    let sum: f64 = shares.iter().sum();
    shares.into_iter().map(|share| share / sum).collect()
}

fn assert_naive(trie: &Trie, histories: &[Vec<u32>], history: &[u32], is_left: impl Fn(u32) -> bool) {
    let mut user = shares_of(trie, histories).of_user(history);
    // From the leaves up: what is known of a parent or not must not matter.
    for node in (0..u32::try_from(trie.nodes()).unwrap()).rev() {
        let children: Vec<u32> = trie.children(node).filter(|&child| is_left(child)).collect();
        let context = [codes(trie, history), prefix(trie, node)].concat();
        let expected = naive(trie, histories, &context, &children);
        let mut found = Vec::new();
        user.log_shares(node, &children, &mut found);
        assert_eq!(found.len(), children.len());
        for ((found, expected), child) in found.iter().zip(expected).zip(children) {
            assert!((f64::from(found.exp()) - expected).abs() < 1e-5, "{node} {child}: {found}, expected {expected}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 300, ..Default::default() })]

    // Fewer than 128 places, all of which are read.
    #[test]
    fn shares_equal_naive_counts(
        levels in 1..5usize,
        seed in any::<u64>(),
        histories in prop::collection::vec(prop::collection::vec(0..12u32, 0..8), 0..10),
        history in prop::collection::vec(0..12u32, 0..6),
        own in any::<bool>(),
        left_out in 2..9u32,
    ) {
        let trie = catalogue(levels, 3, 12, seed);
        let histories = if own { [histories, vec![history.clone()]].concat() } else { histories };
        assert_naive(&trie, &histories, &history, |child| child % left_out != 0);
    }
}

#[test]
fn ends_that_are_frequent_are_counted_too() {
    let trie = catalogue(2, 3, 9, 4);
    // 400 histories, and no continuation is rarer than a tenth of its end.
    let histories: Vec<Vec<u32>> = (0..400).map(|user| vec![user % 3, 3 + user % 2, user % 4 / 2]).collect();
    for history in [vec![0], vec![1, 3], vec![2, 4, 0], vec![]] {
        assert_naive(&trie, &histories, &history, |_| true);
    }
}

#[test]
fn what_followed_the_longest_end_comes_first_and_then_what_followed_shorter_ones() {
    let trie = catalogue(1, 6, 200, 1);
    let leaf = |item: u32| trie.leaf_of_item(item);
    let first = |leaf: u32| (0..200).find(|&item| trie.leaf_of_item(item) == leaf).unwrap();
    assert_eq!(trie.leaves(), 6);
    let item: Vec<u32> = (0..6).map(first).collect();
    // Behind 0 and 1 comes 2; behind 1 alone mostly 3.
    let histories = [vec![item[0], item[1], item[2]], vec![item[4], item[1], item[3]], vec![item[5], item[1], item[3]]];
    let mut user = shares_of(&trie, &histories).of_user(&[item[0], item[1]]);
    let children: Vec<u32> = trie.children(0).collect();
    let shares = user.shares(0, &children);
    let share = |item: u32| shares[leaf(item) as usize];
    assert!(share(item[2]) > share(item[3]) && share(item[3]) > share(item[4]));
    assert!((share(item[3]) / share(item[2]) - BACK_OFF * 2.0 / 3.0).abs() < 1e-9);
    assert!((share(item[0]) / share(item[2]) - BACK_OFF * BACK_OFF / 6.0).abs() < 1e-9);
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
}

#[test]
fn without_histories_or_a_history_all_are_alike() {
    let trie = catalogue(3, 4, 40, 8);
    let children: Vec<u32> = trie.children(0).collect();
    for histories in [vec![], vec![vec![1, 2, 3]], vec![vec![]]] {
        let shares = shares_of(&trie, &histories).of_user(&[]).shares(0, &children);
        assert!(shares.iter().all(|share| (share * children.len() as f64 - 1.0).abs() < 1e-9), "{shares:?}");
    }
    // Nothing is known of numbers beyond items and nodes.
    let mut user = shares_of(&trie, &[vec![1, 2, 40, u32::MAX]]).of_user(&[40, u32::MAX]);
    assert_eq!(user.shares(u32::MAX, &[]), Vec::<f64>::new());
    assert_eq!(user.shares(u32::MAX, &[u32::MAX]), [1.0]);
}

#[test]
fn drafts_that_follow_a_history_lead_to_what_followed_it() {
    let trie = catalogue(3, 5, 60, 2);
    let histories: Vec<Vec<u32>> = (0..20).map(|user| vec![user, 30 + user, 7]).collect();
    let shares = shares_of(&trie, &histories);
    let (stock, seen) = (Stock::all(&trie), Seen::default());
    let allowed = Allowed::new(&trie, &stock, &seen);
    for user in 0..20 {
        let mut search = BeamSearch::new(1, Normalisation::Vocabulary);
        let mut expected = shares.of_user(&[user]);
        let mut drafted = None;
        for _ in 0..trie.levels() {
            drafted = Some(search.candidates(&allowed, drafted.as_ref(), 1, &mut expected));
        }
        let leaf = trie.leaf_of_node(drafted.unwrap().drafted()[0].node).unwrap();
        // Others may have taken an item of the same identifier.
        let next = histories.iter().filter(|history| trie.leaf_of_item(history[0]) == trie.leaf_of_item(user));
        assert!(next.map(|history| trie.leaf_of_item(history[1])).any(|next| next == leaf), "{user}");
    }
}

#[test]
fn damage_and_the_histories_of_another_catalogue_are_refused() {
    let (trie, other) = (catalogue(3, 5, 60, 2), catalogue(3, 5, 60, 3));
    let bytes = build_code_pool(&trie, [vec![1, 2, 3], vec![4]]).unwrap();
    let open = |bytes: Vec<u8>, trie: &Trie| CodeShares::open(bytes.into(), trie.clone()).unwrap_err().to_string();
    assert!(open(bytes.clone(), &other).contains("has the codes of another catalogue"));
    for at in [170, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(open(damaged, &trie).contains("damaged"), "{at}");
    }
    assert!(open(bytes[..bytes.len() - 4].to_vec(), &trie).contains("truncated or damaged"));
    assert!(open(b"LASRTRIE".to_vec(), &trie).contains("not a pool file"));
    assert!(CodeShares::open(bytes.into(), trie).is_ok());
}
