//! Held-out interactions, and how well scores find them: recall and NDCG at a cut-off.
//!
//! Recall@k is the share of a user's held-out items among the k best unseen items. NDCG@k weighs each hit by `1 /
//! log2(rank + 1)`, relative to the best possible within k ranks. Both are means over users with held-out items, as in
//! LightGCN's evaluation. All items that the user has not interacted with are ranked; none are sampled.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use crate::{Edge, Embeddings};

/// A user, an item, and the time of the interaction, if known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    /// Index of the user.
    pub user: u32,
    /// Index of the item.
    pub item: u32,
    /// Seconds, or any unit that orders a user's events.
    pub time: Option<f64>,
}

/// Interactions of each user in three parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdout {
    /// Number of users.
    pub users: usize,
    /// Number of items.
    pub items: usize,
    /// Interactions for training: at least one per user.
    pub train: Vec<Edge>,
    /// Interactions that decide when training ends.
    pub validation: Vec<Edge>,
    /// Interactions for the reported result.
    pub test: Vec<Edge>,
    /// Whether a user's later interactions are held out; otherwise a random choice.
    pub by_time: bool,
}

impl Holdout {
    /// Holds out the last `test` share of each user's distinct items, and before them the `validation` share, both
    /// rounded down. If an event has no time, users' items are shuffled by `seed` instead.
    pub fn new(users: usize, items: usize, events: &[Event], (validation, test): (f64, f64), seed: u64) -> Self {
        let by_time = events.iter().all(|event| event.time.is_some());
        let mut of_user: Vec<BTreeMap<u32, f64>> = vec![BTreeMap::new(); users];
        for event in events {
            let time = event.time.unwrap_or(0.0);
            // An item counts from its first time on.
            let first = of_user[event.user as usize].entry(event.item).or_insert(time);
            *first = first.min(time);
        }
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut parts = [Vec::new(), Vec::new(), Vec::new()];
        for (user, items) in (0u32..).zip(of_user) {
            let mut items: Vec<(u32, f64)> = items.into_iter().collect();
            // Shuffle also before sorting by time: events within one second have no order.
            items.shuffle(&mut rng);
            items.sort_by(|a, b| a.1.total_cmp(&b.1));
            let mut edges: Vec<Edge> = items.into_iter().map(|(item, _)| (user, item)).collect();
            let tests = share(test, edges.len());
            let validations = share(validation, edges.len());
            parts[2].extend(edges.drain(edges.len() - tests..));
            parts[1].extend(edges.drain(edges.len() - validations..));
            parts[0].extend(edges);
        }
        let [train, validation, test] = parts;
        Self { users, items, train, validation, test, by_time }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share from 0 to 1 of a length")]
fn share(share: f64, of: usize) -> usize {
    (share * of as f64) as usize
}

/// How well the best k unseen items match the held-out ones.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RankingQuality {
    /// Share of a user's held-out items that were found, as a mean over users.
    pub recall: f64,
    /// Normalised discounted cumulative gain, as a mean over users.
    pub ndcg: f64,
    /// Number of users with held-out items.
    pub users: usize,
}

/// Ranks all items for each user with `wanted` items, by the scores that `score` writes for a user.
///
/// Items of `seen` are left out of the ranking; ties go to the lower index.
pub fn evaluate(
    (users, items): (usize, usize),
    seen: &[&[Edge]],
    wanted: &[Edge],
    k: usize,
    score: impl Fn(u32, &mut [f32]) + Sync,
) -> RankingQuality {
    let seen = by_user(users, seen.iter().copied().flatten());
    let wanted = by_user(users, wanted.iter());
    let of_user = |user: u32| {
        let wanted = &wanted[user as usize];
        if wanted.is_empty() {
            return None;
        }
        let mut scores = vec![0.0; items];
        score(user, &mut scores);
        for &item in &seen[user as usize] {
            scores[item as usize] = f32::NEG_INFINITY;
        }
        Some(quality(&best(&scores, k), wanted, k))
    };
    let count = u32::try_from(users).unwrap_or(u32::MAX);
    let found: Vec<(f64, f64)> = (0..count).into_par_iter().filter_map(of_user).collect();
    let mean = |value: fn(&(f64, f64)) -> f64| found.iter().map(value).sum::<f64>() / found.len().max(1) as f64;
    RankingQuality { recall: mean(|found| found.0), ndcg: mean(|found| found.1), users: found.len() }
}

/// Does the same as [`evaluate`] with the dot product of embeddings, row-major of `dimension`.
pub fn evaluate_embeddings(
    data: &Holdout,
    seen: &[&[Edge]],
    wanted: &[Edge],
    k: usize,
    embeddings: &Embeddings,
) -> RankingQuality {
    let dimension = embeddings.dimension;
    // The order is by dimension, so that the sums of all items advance side by side in vector registers.
    let mut columns = vec![0.0; embeddings.items.len()];
    for (item, row) in embeddings.items.chunks(dimension).enumerate() {
        for (position, &value) in row.iter().enumerate() {
            columns[position * data.items + item] = value;
        }
    }
    evaluate((data.users, data.items), seen, wanted, k, |user, scores| {
        let start = user as usize * dimension;
        let row = &embeddings.users[start..start + dimension];
        for (&weight, column) in row.iter().zip(columns.chunks(data.items)) {
            for (score, value) in scores.iter_mut().zip(column) {
                *score += weight * value;
            }
        }
    })
}

/// Does the same as [`evaluate`] with the number of users of `train` that have the item.
pub fn evaluate_popularity(data: &Holdout, seen: &[&[Edge]], wanted: &[Edge], k: usize) -> RankingQuality {
    let mut counts = vec![0.0; data.items];
    for &(_, item) in &data.train {
        counts[item as usize] += 1.0;
    }
    evaluate((data.users, data.items), seen, wanted, k, |_, scores| {
        scores.copy_from_slice(&counts);
    })
}

fn by_user<'a>(users: usize, edges: impl Iterator<Item = &'a Edge>) -> Vec<Vec<u32>> {
    let mut of_user = vec![Vec::new(); users];
    for &(user, item) in edges {
        of_user[user as usize].push(item);
    }
    of_user
}

/// Returns the items with the k highest scores, best first.
fn best(scores: &[f32], k: usize) -> Vec<u32> {
    let order = |a: &u32, b: &u32| {
        let (a_score, b_score) = (scores[*a as usize], scores[*b as usize]);
        b_score.total_cmp(&a_score).then(a.cmp(b))
    };
    let mut items: Vec<u32> = (0u32..).zip(scores).map(|(item, _)| item).collect();
    if items.len() > k {
        items.select_nth_unstable_by(k, order);
        items.truncate(k);
    }
    items.sort_unstable_by(order);
    items.retain(|&item| scores[item as usize] > f32::NEG_INFINITY);
    items
}

fn quality(ranked: &[u32], wanted: &[u32], k: usize) -> (f64, f64) {
    let gain = |rank: usize| 1.0 / ((rank + 2) as f64).log2();
    let hits: Vec<usize> = (0..ranked.len()).filter(|&rank| wanted.contains(&ranked[rank])).collect();
    let found: f64 = hits.iter().map(|&rank| gain(rank)).sum();
    let ideal: f64 = (0..wanted.len().min(k)).map(gain).sum();
    (hits.len() as f64 / wanted.len() as f64, found / ideal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(count: u32, time: impl Fn(u32) -> Option<f64>) -> Vec<Event> {
        (0..count).map(|item| Event { user: 0, item, time: time(item) }).collect()
    }

    #[test]
    fn the_latest_items_are_held_out() {
        let events = events(10, |item| Some(f64::from(100 - item)));
        let data = Holdout::new(1, 10, &events, (0.1, 0.2), 1);
        assert!(data.by_time);
        assert_eq!(data.test, [(0, 1), (0, 0)]);
        assert_eq!(data.validation, [(0, 2)]);
        assert_eq!(data.train.len(), 7);
    }

    #[test]
    fn without_times_the_seed_chooses() {
        let events = events(20, |item| (item != 3).then_some(1.0));
        let split = |seed| Holdout::new(1, 20, &events, (0.1, 0.2), seed);
        assert!(!split(1).by_time);
        assert_eq!(split(1), split(1));
        assert_ne!(split(1).test, split(2).test);
    }

    #[test]
    fn a_user_with_one_interaction_is_trained_on() {
        let data = Holdout::new(1, 1, &events(1, in_order), (0.4, 0.4), 1);
        assert_eq!(data.train, [(0, 0)]);
    }

    fn in_order(item: u32) -> Option<f64> {
        Some(f64::from(item))
    }

    #[test]
    fn repeated_items_are_one_edge() {
        let twice = [events(4, in_order), events(4, |_| Some(9.0))].concat();
        let data = Holdout::new(1, 4, &twice, (0.0, 0.25), 1);
        assert_eq!(data.train, [(0, 0), (0, 1), (0, 2)]);
        assert_eq!(data.test, [(0, 3)]);
    }

    #[test]
    fn quality_is_that_of_the_definition() {
        // Items 3, 1, 0, 2 by score; 3 was seen, 1 and 2 are wanted: hits at ranks 1 and 3 of 1, 0, 2.
        let score = |_: u32, scores: &mut [f32]| scores.copy_from_slice(&[0.5, 0.7, 0.1, 0.9]);
        let seen = [(0, 3)];
        let wanted = [(0, 1), (0, 2)];
        let found = evaluate((2, 4), &[&seen], &wanted, 3, score);
        let ideal = 1.0 + 1.0 / 3f64.log2();
        assert!((found.recall - 1.0).abs() < 1e-12 && found.users == 1);
        assert!((found.ndcg - 1.5 / ideal).abs() < 1e-12, "{found:?}");
        let found = evaluate((2, 4), &[&seen], &wanted, 1, score);
        assert_eq!((found.recall, found.ndcg), (0.5, 1.0));
    }
}
