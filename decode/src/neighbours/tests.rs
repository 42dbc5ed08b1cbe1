//! Neighbours files and their scores, against naive counts; damage is refused.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::build::write_header;
use super::*;
use crate::sealed::BYTE_ORDER;

/// Histories of items below `items`.
pub(super) fn any_histories(items: u32, histories: usize, len: usize) -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(0..items, 0..len), 0..histories)
}

pub(super) fn file_of(items: u32, histories: &[Vec<u32>]) -> Vec<u8> {
    build_neighbours(NeighboursOptions::default(), items, histories.iter()).unwrap()
}

pub(super) fn built(items: u32, histories: &[Vec<u32>]) -> Neighbours {
    checked(file_of(items, histories)).unwrap()
}

/// Opens and verifies.
fn checked(bytes: Vec<u8>) -> Result<Neighbours, NeighboursError> {
    let neighbours = Neighbours::open(bytes.into())?;
    neighbours.verify().map(|()| neighbours)
}

/// Returns the file with its checksums corrected after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let header = Header::read(&bytes);
    write_header(&mut bytes, &header);
    bytes
}

/// Three users: item 1 is followed by 2, 2 and 3; item 4 has none.
fn histories() -> Vec<Vec<u32>> {
    vec![vec![0, 1, 2], vec![1, 2], vec![1, 3]]
}

fn small_file() -> Vec<u8> {
    file_of(5, &histories())
}

/// Weighted items by item.
type Weights = BTreeMap<u32, Vec<(u32, f32)>>;

/// What the histories say, counted as the definitions have it.
struct Naive {
    options: NeighboursOptions,
    counts: Vec<u32>,
    successors: Weights,
    neighbours: Weights,
}

impl Naive {
    #[expect(clippy::cast_possible_truncation, reason = "small counts, and weights rounded as the file rounds them")]
    fn new(options: NeighboursOptions, items: u32, histories: &[Vec<u32>]) -> Self {
        let all = || histories.iter().flatten();
        let counts = (0..items).map(|item| all().filter(|&&other| other == item).count() as u32).collect();
        let window = |history: &Vec<u32>| -> BTreeSet<u32> {
            history.iter().rev().take(options.window as usize).copied().collect()
        };
        let sets: Vec<BTreeSet<u32>> = histories.iter().map(window).collect();
        let having =
            |wanted: &[u32]| sets.iter().filter(|set| wanted.iter().all(|item| set.contains(item))).count() as f64;
        let followed = |item: u32| -> Vec<u32> {
            let pairs = histories.iter().flat_map(|history| history.windows(2));
            pairs.filter(|pair| pair[0] == item).map(|pair| pair[1]).collect()
        };
        let markov = |item: u32, other: u32| {
            let followed = followed(item);
            followed.iter().filter(|&&next| next == other).count() as f64 / followed.len() as f64
        };
        let cosine = |item: u32, other: u32| having(&[item, other]) / (having(&[item]) * having(&[other])).sqrt();
        let rows = |weight: &dyn Fn(u32, u32) -> f64| {
            (0..items)
                .map(|item| {
                    let others = (0..items).filter(|&other| other != item);
                    let mut row: Vec<(u32, f32)> = others.map(|other| (other, weight(item, other) as f32)).collect();
                    row.retain(|&(_, weight)| weight > 0.0);
                    row.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                    row.truncate(options.most as usize);
                    (item, row)
                })
                .collect()
        };
        Self { options, counts, successors: rows(&markov), neighbours: rows(&cosine) }
    }

    fn score(&self, method: Method, history: &[u32]) -> Vec<(u32, f32)> {
        let weight = |rows: &Weights, from: u32, to: u32| {
            rows.get(&from).and_then(|row| row.iter().find(|(item, _)| *item == to)).map_or(0.0, |(_, weight)| *weight)
        };
        let score = |item: u32| match method {
            Method::Popularity => self.counts[item as usize] as f32,
            Method::Markov => history.last().map_or(0.0, |&last| weight(&self.successors, last, item)),
            Method::Knn => {
                let weights = std::iter::successors(Some(1.0), |weight| Some(weight * self.options.recency));
                let seen = history.iter().rev().zip(weights);
                let mut terms: Vec<f32> =
                    seen.map(|(&seen, share)| share * weight(&self.neighbours, seen, item)).collect();
                terms.sort_by(|a, b| b.total_cmp(a));
                terms.iter().sum()
            }
        };
        let items = (0u32..).zip(&self.counts).filter(|(item, _)| !history.contains(item));
        let mut scores: Vec<(u32, u32, f32)> = items.map(|(item, &count)| (item, count, score(item))).collect();
        scores.sort_by(|a, b| b.2.total_cmp(&a.2).then(b.1.cmp(&a.1)).then(a.0.cmp(&b.0)));
        scores.into_iter().map(|(item, _, score)| (item, score)).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1000, ..Default::default() })]

    #[test]
    fn rows_and_scores_equal_naive_counts(
        histories in any_histories(8, 10, 12),
        most in 0..6u32,
        window in 0..14u32,
        recency in prop_oneof![Just(1.0f32), 0.01..1.0f32, Just(1e-20)],
        // Item 8 is not in the catalogue.
        history in prop::collection::vec(0..=8u32, 0..6),
        left_out in prop::collection::vec(0..8u32, 0..4),
        limit in 0..10usize,
    ) {
        let options = NeighboursOptions { most, window, recency };
        let neighbours = checked(build_neighbours(options, 8, histories.iter()).unwrap()).unwrap();
        let naive = Naive::new(options, 8, &histories);
        for item in 0..8 {
            prop_assert_eq!(neighbours.count(item), naive.counts[item as usize]);
            prop_assert_eq!(&neighbours.successors(item).collect::<Vec<_>>(), &naive.successors[&item]);
            prop_assert_eq!(&neighbours.neighbours(item).collect::<Vec<_>>(), &naive.neighbours[&item]);
        }
        let mut popular: Vec<u32> = (0..8).collect();
        popular.sort_by_key(|&item| (Reverse(naive.counts[item as usize]), item));
        prop_assert_eq!(neighbours.popular().collect::<Vec<_>>(), popular);
        let (mut scores, mut best) = (Vec::new(), Vec::new());
        for method in Method::ALL {
            neighbours.score(method, &history, &mut scores);
            prop_assert_eq!(&scores, &naive.score(method, &history), "{:?}", method);
            neighbours.best(method, &history, &history, limit, &mut best);
            prop_assert_eq!(&best[..], &scores[..limit.min(scores.len())]);
            neighbours.best(method, &history, &left_out, usize::MAX, &mut best);
            let kept = (0..8).filter(|item| !left_out.contains(item)).count();
            prop_assert_eq!(best.len(), kept, "everything but what is left out, the history included");
        }
    }

    #[test]
    fn the_order_of_histories_changes_no_content(histories in any_histories(6, 8, 6), seed in any::<u64>()) {
        let mut other = histories.clone();
        let half = usize::try_from(seed % 8).unwrap().min(other.len());
        other.rotate_left(half);
        prop_assert_eq!(file_of(6, &other), file_of(6, &histories));
    }
}

#[test]
fn what_was_built_is_what_opens() {
    let neighbours = built(5, &histories());
    assert_eq!((neighbours.items(), neighbours.histories()), (5, 3));
    assert_eq!(neighbours.options(), NeighboursOptions { most: 64, window: 100, recency: 0.7 });
    // Three transitions between distinct items, four pairs in both directions.
    assert_eq!(neighbours.size_bytes(), HEADER + 4 * (5 + 5 + 6 + 6) + 8 * (4 - 1 + 2 * 4));
    assert_eq!(neighbours.popular().collect::<Vec<_>>(), [1, 2, 0, 3, 4]);
    let (third, two_thirds) = (1.0 / 3.0, 2.0 / 3.0);
    assert_eq!(neighbours.successors(1).collect::<Vec<_>>(), [(2, two_thirds), (3, third)]);
    assert_eq!(neighbours.neighbours(3).collect::<Vec<_>>(), [(1, third.sqrt())]);
    assert_eq!(neighbours.successors(5).count() + neighbours.neighbours(u32::MAX).count(), 0);
    assert_eq!(neighbours.count(5), 0);
    assert_eq!(small_file(), small_file());
    assert_eq!(neighbours.digest(), built(5, &histories()).digest());
    assert_ne!(neighbours.digest(), built(6, &histories()).digest());
}

#[test]
fn unknown_histories_get_the_popular_items() {
    let neighbours = built(5, &histories());
    let mut scores = Vec::new();
    for history in [&[][..], &[4], &[5], &[u32::MAX, 4]] {
        for method in [Method::Markov, Method::Knn] {
            neighbours.best(method, history, &[], 3, &mut scores);
            assert_eq!(scores, [(1, 0.0), (2, 0.0), (0, 0.0)], "{method:?} {history:?}");
        }
    }
    neighbours.score(Method::Popularity, &[1], &mut scores);
    assert_eq!(scores, [(2, 2.0), (0, 1.0), (3, 1.0), (4, 0.0)]);
}

#[test]
fn an_item_that_follows_itself_counts_in_the_share_only() {
    let neighbours = built(3, &[vec![0, 0, 0, 1]]);
    assert_eq!(neighbours.successors(0).collect::<Vec<_>>(), [(1, 1.0 / 3.0)]);
}

#[test]
fn empty_catalogues_and_histories_build_open_and_score() {
    for (items, histories) in [(0, vec![]), (0, vec![vec![]]), (3, vec![]), (3, vec![vec![], vec![2]])] {
        let neighbours = built(items, &histories);
        assert_eq!(neighbours.histories() as usize, histories.len());
        assert_eq!(neighbours.popular().count(), items as usize);
        fuzz::score(&neighbours);
    }
}

#[test]
fn an_item_outside_of_the_catalogue_is_not_built() {
    let error = build_neighbours(NeighboursOptions::default(), 3, [vec![2], vec![0, 3]].iter()).unwrap_err();
    assert_eq!(error, NeighboursError::Item { history: 1, index: 1, item: 3, items: 3 });
    assert!(error.to_string().contains("history 1 has item 3 at index 1, expected less than the catalogue's 3"));
}

#[test]
fn a_recency_that_is_no_weight_is_neither_built_nor_opened() {
    for recency in [0.0, -0.5, 1.1, f32::INFINITY, f32::NAN] {
        let options = NeighboursOptions { recency, ..NeighboursOptions::default() };
        let error = build_neighbours(options, 1, std::iter::empty::<Vec<u32>>()).unwrap_err();
        assert!(error.to_string().contains(&format!("recency is {recency}, expected a number above 0")), "{error}");
        let mut bytes = small_file();
        bytes[Header::WORDS + 16..][..4].copy_from_slice(&recency.to_le_bytes());
        assert!(matches!(Neighbours::open(sealed(bytes).into()), Err(NeighboursError::Recency(_))));
    }
}

#[test]
fn later_items_weigh_more() {
    // Item 2 is a neighbour of 0 alone, item 3 of 1 alone, with the same cosine.
    let neighbours = built(4, &[vec![0, 2], vec![1, 3]]);
    let mut scores = Vec::new();
    for (history, expected) in [([0, 1], [(3, 1.0), (2, 0.7)]), ([1, 0], [(2, 1.0), (3, 0.7)])] {
        neighbours.score(Method::Knn, &history, &mut scores);
        assert_eq!(scores, expected);
    }
}

#[test]
fn unaligned_bytes_are_read_as_well() {
    let file = small_file();
    for shift in 0..4 {
        let mut bytes = vec![0; shift];
        bytes.extend(&file);
        let neighbours = Neighbours::open(Bytes::from(bytes).slice(shift..)).unwrap();
        assert_eq!(neighbours.popular().collect::<Vec<_>>(), [1, 2, 0, 3, 4]);
    }
}

#[test]
fn every_flipped_byte_is_refused_and_scores_safely_until_then() {
    let file = small_file();
    for at in 0..file.len() {
        let mut bytes = file.clone();
        bytes[at] ^= 0x10;
        let opened = Neighbours::open(bytes.into());
        assert_eq!(opened.is_ok(), at >= HEADER, "byte {at}");
        if let Ok(neighbours) = opened {
            assert!(matches!(neighbours.verify(), Err(NeighboursError::Checksum { .. })), "byte {at}");
            fuzz::score(&neighbours);
        }
    }
}

#[test]
fn every_truncation_and_a_tail_are_refused() {
    let file = small_file();
    let whole = file.len() as u64;
    for len in 0..file.len() {
        let error = Neighbours::open(file[..len].to_vec().into()).unwrap_err();
        if len >= HEADER {
            assert_eq!(error, NeighboursError::Length { expected: whole, found: len as u64 });
        }
    }
    let long = Neighbours::open([file, vec![0; 4]].concat().into()).unwrap_err();
    assert_eq!(long, NeighboursError::Length { expected: whole, found: whole + 4 });
}

#[test]
fn foreign_files_are_refused_for_what_they_are() {
    let with = |at: usize, new: &[u8]| {
        let mut bytes = small_file();
        bytes[at..at + new.len()].copy_from_slice(new);
        Neighbours::open(bytes.into()).unwrap_err()
    };
    assert_eq!(with(0, b"PAR1"), NeighboursError::Magic(*b"PAR1NEIG"));
    assert_eq!(with(8, &[9]), NeighboursError::Version(9));
    assert_eq!(with(12, &BYTE_ORDER.to_be_bytes()), NeighboursError::ByteOrder);
    assert_eq!(Neighbours::open(Bytes::new()).unwrap_err(), NeighboursError::Magic([0; 8]));
}

#[test]
fn hostile_content_under_a_right_checksum_is_refused() {
    let words = Header::WORDS;
    // The sections of 5 items: popular, counts, 3 successors in 24 bytes and their starts, 8 neighbours.
    let successors = HEADER + 40;
    let neighbours = successors + 24 + 24;
    let cases: [(usize, u32, &str); 12] = [
        (words, 4, "expected 268"),
        (words + 8, 1, "successors: item 1 has 2 entries, at most 1"),
        (words + 20, 4, "expected 292"),
        (HEADER, 5, "a popular item is not below the catalogue's 5"),
        (HEADER, 2, "the popular items are not in descending order"),
        (HEADER + 20, 3, "the popular items are not in descending order"),
        (successors, 5, "successors: item 0 has an entry that is itself or not below the catalogue's 5"),
        (successors, 0, "successors: item 0 has an entry that is itself"),
        (successors + 4, 0x7fc0_0000, "successors: item 0 has a weight that is not above 0"),
        (successors + 12, 1, "successors: item 1 has entries that are not in descending order"),
        (successors + 28, 9, "successors: their starts do not ascend from 0 to 3"),
        (neighbours + 4, 1.5f32.to_bits(), "neighbours: item 0 has a weight"),
    ];
    for (at, word, expected) in cases {
        let mut bytes = small_file();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let error = checked(sealed(bytes)).unwrap_err().to_string();
        assert!(error.contains(expected), "{at}: {error}");
    }
}
