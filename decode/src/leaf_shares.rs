//! How much of what a user may choose lies below a node of the trie: the expectation of drafts without a network.
//!
//! Two measures are mixed: what everybody chooses (popularity) and what a user's last items are followed by (a Markov
//! chain, nearest neighbours). Both are sums over leaves, and leaves below a node are consecutive, so that the share of
//! a node is a difference of two sums.

use std::sync::Arc;

use crate::beams::{Expected, log_share};
use crate::trie::Trie;

/// Of the weight of everybody's choices every leaf has at least so much of an even share, so that an item which nobody
/// has chosen yet is not ruled out.
const EVEN: f64 = 0.1;

/// What everybody chooses.
#[derive(Debug, Clone)]
pub struct LeafShares {
    trie: Trie,
    /// Sums of the weights of the leaves before each; the last one is 1.
    sums: Arc<[f64]>,
}

impl LeafShares {
    /// Shares by weights of items, at least 0, by their number in the trie.
    pub fn new(trie: Trie, weight: impl Fn(u32) -> f64) -> Self {
        let leaves = u32::try_from(trie.leaves()).unwrap_or(u32::MAX);
        let of_leaf = |leaf: u32| trie.items_of(leaf).map(&weight).sum::<f64>();
        let total: f64 = (0..leaves).map(of_leaf).sum();
        let even = 1.0 / f64::from(leaves.max(1));
        let share = |leaf: u32| match total > 0.0 {
            true => EVEN * even + (1.0 - EVEN) * of_leaf(leaf) / total,
            false => even,
        };
        let running = (0..leaves).scan(0.0, |sum, leaf| {
            *sum += share(leaf);
            Some(*sum)
        });
        let sums = std::iter::once(0.0).chain(running).collect();
        Self { trie, sums }
    }

    /// Shares of a user, of whose choices `own` (items by their number in the trie, and weights) make up `part`.
    pub fn of_user(&self, own: &[(u32, f32)], part: f64) -> UserShares<'_> {
        let mut leaves: Vec<(u32, f64)> =
            own.iter().map(|&(item, weight)| (self.trie.leaf_of_item(item), f64::from(weight))).collect();
        leaves.sort_unstable_by_key(|leaf| leaf.0);
        let total: f64 = leaves.iter().map(|leaf| leaf.1).sum();
        let mut sum = 0.0;
        for leaf in &mut leaves {
            sum += leaf.1 / total;
            leaf.1 = sum;
        }
        UserShares { everybody: self, leaves, part: if total > 0.0 { part } else { 0.0 } }
    }
}

/// What a user is expected to choose.
#[derive(Debug, Clone)]
pub struct UserShares<'a> {
    everybody: &'a LeafShares,
    /// The user's own leaves, ascending, with the sum of their shares and of those before.
    leaves: Vec<(u32, f64)>,
    part: f64,
}

impl UserShares<'_> {
    /// The share of all leaves below a node.
    fn below(&self, node: u32) -> f64 {
        let LeafShares { trie, sums } = self.everybody;
        let range = trie.leaves_below(node);
        let sum = |leaf: u32| sums.get(leaf as usize).copied().unwrap_or(1.0);
        let own = |leaf: u32| {
            let before = self.leaves.partition_point(|own| own.0 < leaf);
            before.checked_sub(1).map_or(0.0, |last| self.leaves[last].1)
        };
        let popular = sum(range.end) - sum(range.start);
        self.part * (own(range.end) - own(range.start)) + (1.0 - self.part) * popular
    }
}

impl Expected for UserShares<'_> {
    fn log_shares(&mut self, _: u32, children: &[u32], into: &mut Vec<f32>) {
        let start = into.len();
        into.extend(children.iter().map(|&child| narrow(self.below(child).max(f64::MIN_POSITIVE))));
        let sum: f64 = into[start..].iter().map(|&share| f64::from(share)).sum();
        into[start..].iter_mut().for_each(|share| *share = log_share(f64::from(*share) / sum));
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an expectation needs no more")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beams::tests::{catalogue, leaf_of};

    #[test]
    fn shares_of_children_are_sums_over_their_leaves() {
        let trie = catalogue(3, 5, 60, 2);
        let weight = |item: u32| f64::from(item % 7);
        let everybody = LeafShares::new(trie.clone(), weight);
        let own = [(3, 2.0), (40, 1.0), (5, 1.0)];
        let mut shares = everybody.of_user(&own, 0.6);
        let total: f64 = (0..60).map(weight).sum();
        let leaves = trie.leaves() as f64;
        let expected = |leaf: u32| {
            let popular: f64 = trie.items_of(leaf).map(weight).sum::<f64>() / total;
            let own: f64 = own.iter().filter(|own| leaf_of(&trie, own.0) == leaf).map(|own| f64::from(own.1)).sum();
            0.6 * own / 4.0 + 0.4 * (EVEN / leaves + (1.0 - EVEN) * popular)
        };
        let below = |node: u32| trie.leaves_below(node).map(expected).sum::<f64>();
        for node in 0..u32::try_from(trie.nodes()).unwrap() {
            let children: Vec<u32> = trie.children(node).collect();
            let mut found = Vec::new();
            shares.log_shares(node, &children, &mut found);
            let sum: f64 = children.iter().map(|&child| below(child)).sum();
            for (&child, share) in children.iter().zip(found) {
                assert!((f64::from(share.exp()) - below(child) / sum).abs() < 1e-5, "{node} {child}");
            }
        }
    }

    #[test]
    fn without_choices_all_leaves_are_alike() {
        let trie = catalogue(2, 4, 12, 9);
        let everybody = LeafShares::new(trie.clone(), |_| 0.0);
        let mut found = Vec::new();
        let children: Vec<u32> = trie.children(0).collect();
        everybody.of_user(&[], 0.5).log_shares(0, &children, &mut found);
        for (&child, share) in children.iter().zip(found) {
            let expected = trie.leaves_below(child).len() as f32 / trie.leaves() as f32;
            assert!((share.exp() - expected).abs() < 1e-5);
        }
    }
}
