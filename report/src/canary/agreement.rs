//! How alike the rows are that a canary and the night have of the same entity.

use std::collections::HashMap;

use laser_schema::EntityId;
use laser_schema::knowledge::{KnowledgeRecord, ratio};
use serde::Serialize;

use crate::chart::Histogram;

/// Bins of the histogram of similarities, and the least width of one.
const BINS: (usize, f64) = (24, 0.002);

/// A figure of how alike rows are, 1 where they are the same.
#[derive(Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// What it is.
    pub name: &'static str,
    /// From 0, or from -1 for similarities and rank correlations, to 1.
    pub value: f64,
}

/// Sums over pairs of rows.
#[derive(Debug, Default)]
pub(super) struct Tally {
    rows: u64,
    identical: u64,
    /// Of texts with embeddings.
    cosines: Vec<f64>,
    lists: u64,
    same_best: u64,
    shared: f64,
    /// Rank correlations, of so many lists.
    correlations: (f64, u64),
}

impl Tally {
    pub(super) fn add(&mut self, canary: &KnowledgeRecord, night: &KnowledgeRecord, similarity: Option<f64>) {
        self.rows += 1;
        self.identical += u64::from(canary.text == night.text && canary.items == night.items);
        self.cosines.extend(similarity);
        if !canary.items.is_empty() && !night.items.is_empty() {
            self.lists += 1;
            self.same_best += u64::from(canary.items[0] == night.items[0]);
            let shared = shared_ranks(&canary.items, &night.items);
            self.shared += ratio(shared.len() as f64, canary.items.len().max(night.items.len()) as f64);
            if let Some(correlation) = rank_correlation(&shared) {
                self.correlations.0 += correlation;
                self.correlations.1 += 1;
            }
        }
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    pub(super) fn similarities(&self) -> Option<Histogram> {
        let counts = self.cosines.iter().map(|cosine| (*cosine, 1)).collect();
        Histogram::of(&[counts], BINS.0, BINS.1)
    }

    pub(super) fn agreement(mut self) -> Vec<Agreement> {
        let share = |count: u64, of: u64| ratio(count as f64, of as f64);
        let identical = share(self.identical, self.rows);
        if self.lists > 0 {
            let mut agreement = vec![
                Agreement { name: "lists that are the same", value: identical },
                Agreement { name: "items that both lists have", value: self.shared / self.lists as f64 },
                Agreement { name: "lists with the same first item", value: share(self.same_best, self.lists) },
            ];
            let (sum, lists) = self.correlations;
            let correlation = (lists > 0).then(|| sum / lists as f64);
            agreement.extend(correlation.map(|value| Agreement { name: "rank correlation of shared items", value }));
            return agreement;
        }
        let mut agreement = vec![Agreement { name: "texts that are the same", value: identical }];
        if !self.cosines.is_empty() {
            self.cosines.sort_by(f64::total_cmp);
            let mean = self.cosines.iter().sum::<f64>() / self.cosines.len() as f64;
            agreement.push(Agreement { name: "mean similarity", value: mean });
            agreement.push(Agreement {
                name: "similarity at the 5th percentile",
                value: self.cosines[self.cosines.len() / 20],
            });
        }
        agreement
    }
}

/// The places that the items of both lists have in each, by the first list.
fn shared_ranks(one: &[EntityId], other: &[EntityId]) -> Vec<(usize, usize)> {
    let ranks: HashMap<&EntityId, usize> = other.iter().zip(0..).collect();
    one.iter().zip(0..).filter_map(|(item, rank)| Some((rank, *ranks.get(item)?))).collect()
}

/// Spearman's rank correlation of items by their order in both lists, which come by the first; none of fewer than two.
fn rank_correlation(shared: &[(usize, usize)]) -> Option<f64> {
    let count = shared.len();
    if count < 2 {
        return None;
    }
    let mut by_other: Vec<usize> = (0..count).collect();
    by_other.sort_by_key(|&at| shared[at].1);
    let squares: f64 = by_other.iter().zip(0..count).map(|(&at, rank)| (at.abs_diff(rank) as f64).powi(2)).sum();
    let count = count as f64;
    Some(1.0 - 6.0 * squares / (count * (count * count - 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(ids: &[i64]) -> Vec<EntityId> {
        ids.iter().map(|&id| EntityId::Int(id)).collect()
    }

    fn correlation(one: &[i64], other: &[i64]) -> Option<f64> {
        rank_correlation(&shared_ranks(&items(one), &items(other)))
    }

    #[test]
    fn ranks_are_those_among_shared_items() {
        assert_eq!(correlation(&[1, 2, 3, 4], &[1, 2, 3, 4]), Some(1.0));
        assert_eq!(correlation(&[1, 2, 3, 4], &[4, 3, 2, 1]), Some(-1.0));
        // Items of one list alone are passed over.
        assert_eq!(correlation(&[1, 9, 2, 3], &[8, 1, 2, 7, 3]), Some(1.0));
        // By the sum of squared differences: 1 - 6 * 2 / (3 * 8).
        assert_eq!(correlation(&[1, 2, 3], &[2, 1, 3]), Some(0.5));
        assert_eq!((correlation(&[1, 2], &[1, 3]), correlation(&[1], &[2])), (None, None));
    }
}
