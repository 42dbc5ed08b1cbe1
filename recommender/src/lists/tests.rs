//! Measures of lists against their definitions, comparisons in pairs, and the baselines on real data.

use laser_decode::{Method, Neighbours, NeighboursOptions, build_neighbours};
use proptest::prelude::*;

use super::*;
use crate::statistics::{Mean, Verdict};

mod beauty;

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-12
}

#[test]
fn measures_are_those_of_the_definitions() {
    // Hits at ranks 2 and 7 of three true items; item 30 is missed.
    let list: Vec<u32> = (0..20).collect();
    let found = Judged::new(&[list], &[[1, 30, 6, 1]], 40).unwrap().quality();
    let gain = |rank: f64| 1.0 / (rank + 1.0).log2();
    let ideal = gain(1.0) + gain(2.0) + gain(3.0);
    assert_eq!(found.users, 1);
    assert_eq!(found.measures.recall, [1.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0]);
    assert!(close(found.measures.ndcg[0], gain(2.0) / ideal), "{found:?}");
    assert!(close(found.measures.ndcg[1], (gain(2.0) + gain(7.0)) / ideal), "{found:?}");
    assert_eq!(found.measures.hit, [1.0; 3]);
    assert_eq!(found.coverage, [5.0 / 40.0, 10.0 / 40.0, 0.5]);
}

#[test]
fn recall_is_a_share_of_all_true_items_even_of_those_that_no_list_could_hold() {
    let truth: Vec<u32> = (0..10).collect();
    let found = Judged::new(&[[0, 1, 2, 3, 4]], &[truth], 10).unwrap().quality();
    assert_eq!(found.measures.recall, [0.5; 3]);
    // The ideal of five ranks is reached; behind them the list is too short.
    assert!(close(found.measures.ndcg[0], 1.0) && found.measures.ndcg[1] < 1.0);
}

#[test]
fn users_without_true_items_count_for_coverage_only() {
    let found = Judged::new(&[vec![0], vec![1], vec![]], &[vec![0], vec![], vec![2]], 4).unwrap().quality();
    assert_eq!((found.users, found.measures.hit[0], found.coverage[0]), (2, 0.5, 0.5));
}

#[test]
fn what_cannot_be_judged_is_refused() {
    let error = |lists: &[&[u32]], truths: &[&[u32]]| Judged::new(lists, truths, 5).unwrap_err();
    assert_eq!(error(&[&[0]], &[]), ListsError::Users { lists: 1, truths: 0 });
    assert_eq!(error(&[&[0], &[5]], &[&[0], &[]]), ListsError::Item { user: 1, item: 5, place: "its list", items: 5 });
    let place = "its true items";
    assert_eq!(error(&[&[0]], &[&[1, 7]]), ListsError::Item { user: 0, item: 7, place, items: 5 });
    assert_eq!(error(&[&[2, 1, 2]], &[&[1]]), ListsError::Repeated { user: 0, item: 2 });
    assert_eq!(error(&[&[2], &[1]], &[&[], &[]]), ListsError::NoTruth(2));
}

#[test]
fn pairs_are_compared_user_by_user() {
    let truths = [[0], [1], [2], [3]];
    let judged = |lists: [[u32; 1]; 4]| Judged::new(&lists, &truths, 5).unwrap();
    let (good, bad) = (judged([[0], [1], [2], [4]]), judged([[0], [4], [4], [3]]));
    let paired = good.compare(&bad, 0.1).unwrap().recall[1];
    // Differences 0, 1, 1, -1.
    let differences = [0.0, 1.0, 1.0, -1.0];
    assert_eq!(paired.comparison.difference, Mean::of(&differences));
    let squares: f64 = differences.iter().map(|difference| (difference - 0.25f64).powi(2)).sum();
    assert!(close(paired.error.unwrap(), (squares / 3.0 / 4.0).sqrt()));
    assert_eq!(paired.comparison.verdict, Verdict::NotShown);
    let same = good.compare(&good, 0.1).unwrap();
    assert!(same.ndcg.iter().all(|paired| paired.comparison.verdict == Verdict::Equivalent));
    for truths in [[[0], [1], [2], [4]].map(Vec::from), [vec![0], vec![1], vec![2], vec![]]] {
        let other = Judged::new(&[[0], [1], [2], [4]], &truths, 5).unwrap();
        assert_eq!(good.compare(&other, 0.1), Err(ListsError::Unpaired));
    }
}

#[test]
fn seeds_are_compared_in_pairs() {
    let quality = |recall: f64| Quality {
        users: 9,
        measures: Measures { recall: [recall; 3], ndcg: [recall / 2.0; 3], hit: [0.5; 3] },
        coverage: [1.0; 3],
    };
    let (first, second) = ([0.30, 0.40, 0.50].map(quality), [0.20, 0.31, 0.39].map(quality));
    let found = over_seeds(&first, &second, 0.001).unwrap();
    assert!(close(found.recall[0].difference.mean, 0.1) && close(found.ndcg[2].difference.mean, 0.05));
    assert_eq!(found.recall[0].verdict, Verdict::Different);
    assert_eq!(found.hit[0].verdict, Verdict::Equivalent);
    assert_eq!(over_seeds(&first, &second[..2], 0.001), Err(ListsError::Seeds { first: 3, second: 2 }));
    assert_eq!(over_seeds(&[], &[], 0.001), Err(ListsError::Seeds { first: 0, second: 0 }));
}

#[test]
fn the_mean_of_seeds_is_that_of_every_user() {
    let truths = [[0], [1], [2]];
    let judged = |lists: [[u32; 1]; 3]| Judged::new(&lists, &truths, 4).unwrap();
    let (first, second) = (judged([[0], [1], [3]]), judged([[0], [3], [3]]));
    let mean = Judged::mean(&[first.clone(), second.clone()]).unwrap();
    assert!(close(mean.quality().measures.recall[0], 0.5) && close(mean.quality().coverage[0], 0.625));
    // Of the users 1, 1/2 and 0.
    let differences = mean.compare(&judged([[3], [3], [3]]), 0.1).unwrap().hit[2].comparison.difference;
    assert_eq!(differences, Mean::of(&[1.0, 0.5, 0.0]));
    assert_eq!(Judged::mean(std::slice::from_ref(&first)).unwrap(), first);
    let other = Judged::new(&[[0], [1], [2]], &[[0], [1], [3]], 4).unwrap();
    assert_eq!(Judged::mean(&[first, other]), Err(ListsError::Unpaired));
    assert_eq!(Judged::mean(&[]), Err(ListsError::Seeds { first: 0, second: 0 }));
}

#[test]
fn quality_is_one_flat_object() {
    let quality = Judged::new(&[[0]], &[[0]], 2).unwrap().quality();
    let json = serde_json::to_value(quality).unwrap();
    let (ones, halves) = ([1.0; 3], [0.5; 3]);
    let expected = serde_json::json!({"users": 1, "recall": ones, "ndcg": ones, "hit": ones, "coverage": halves});
    assert_eq!(json, expected);
}

#[test]
fn baselines_list_by_their_scores() {
    let histories = [vec![0, 1, 2], vec![3, 1, 4], vec![1, 2]];
    let file = build_neighbours(NeighboursOptions::default(), 6, histories.iter()).unwrap();
    let neighbours = Neighbours::open(file.into()).unwrap();
    let lists = |method, seen| baseline(&neighbours, method, &[vec![1], vec![5], vec![]], seen, 3);
    let popular = lists(Method::Popularity, Seen::LeftOut);
    assert_eq!(popular, [vec![2, 0, 3], vec![1, 2, 0], vec![1, 2, 0]]);
    assert_eq!(lists(Method::Popularity, Seen::Listed), [[1, 2, 0]; 3]);
    assert_eq!(lists(Method::Markov, Seen::LeftOut)[0], [2, 4, 0]);
    assert_eq!(lists(Method::Knn, Seen::LeftOut)[0], [2, 0, 3]);
    assert_eq!(lists(Method::Knn, Seen::LeftOut)[1..], popular[1..], "nothing is known of items 5 and none");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn longer_lists_are_no_worse_and_all_figures_are_shares(
        list in Just((0..40u32).collect::<Vec<_>>()).prop_shuffle(),
        length in 0..40usize,
        truth in prop::collection::btree_set(0..40u32, 1..30),
    ) {
        let truth: Vec<u32> = truth.into_iter().collect();
        let found = Judged::new(&[&list[..length]], &[&truth], 40).unwrap().quality();
        let Measures { recall, ndcg, hit } = found.measures;
        prop_assert!(recall.is_sorted() && hit.is_sorted() && found.coverage.is_sorted());
        prop_assert!([recall, ndcg, hit].iter().flatten().all(|share| (0.0..=1.0 + 1e-12).contains(share)));
        for (cut, cutoff) in CUTOFFS.into_iter().enumerate() {
            let hits = list[..length.min(cutoff)].iter().filter(|item| truth.contains(item)).count();
            prop_assert!(close(recall[cut] * truth.len() as f64, hits as f64));
            prop_assert_eq!((hit[cut] > 0.0, ndcg[cut] > 0.0), (hits > 0, hits > 0));
            prop_assert_eq!(close(ndcg[cut], 1.0), hits == truth.len().min(cutoff)
                && list[..hits].iter().all(|item| truth.contains(item)));
        }
    }
}
