//! Which items may be listed for one user. A search that asks here for children meets no dead end: below every node
//! that it is given, there is a leaf that may be listed.

use std::ops::Range;

use super::{Stock, Trie};

/// What a user may be shown: leaves in stock that were not seen. Nodes without any such leaf below do not exist here.
#[derive(Debug, Clone)]
pub struct Allowed<'a> {
    trie: &'a Trie,
    stock: &'a Stock,
    /// Those in stock, ascending.
    seen: Vec<u32>,
}

impl<'a> Allowed<'a> {
    /// All leaves of a stock but those that a user has seen, given in any order. `stock` must be the trie's own.
    #[must_use]
    pub fn new(trie: &'a Trie, stock: &'a Stock, seen: &[u32]) -> Self {
        let known = |leaf: &u32| (*leaf as usize) < trie.leaves() && stock.contains(*leaf);
        let mut seen: Vec<u32> = seen.iter().copied().filter(known).collect();
        seen.sort_unstable();
        seen.dedup();
        Self { trie, stock, seen }
    }

    /// The trie.
    #[must_use]
    pub fn trie(&self) -> &'a Trie {
        self.trie
    }

    /// The stock.
    #[must_use]
    pub fn stock(&self) -> &'a Stock {
        self.stock
    }

    /// Whether this leaf may be listed.
    #[must_use]
    pub fn contains(&self, leaf: u32) -> bool {
        let known = (leaf as usize) < self.trie.leaves() && self.stock.contains(leaf);
        known && self.seen.binary_search(&leaf).is_err()
    }

    /// How many leaves below a node may be listed; of the root, how long a list can be.
    #[inline]
    #[must_use]
    pub fn count_below(&self, node: u32) -> u32 {
        let leaves = self.trie.leaves_below(node);
        let seen = self.seen_of(leaves.clone()).len();
        self.stock.count(leaves).saturating_sub(super::index(seen))
    }

    /// The children of a node with a leaf below that may be listed, in the order of their codes. Where none below the
    /// node is out of stock or seen, which is looked up once, these are all its children.
    #[inline]
    #[must_use]
    pub fn children(&self, node: u32) -> AllowedChildren<'_> {
        let Trie { header, .. } = self.trie;
        let (firsts, depth) = (self.trie.firsts(), header.depth(node));
        let children = header.children(firsts, node, depth);
        let mut all =
            AllowedChildren { allowed: self, firsts, children, depth: depth + 1, is_all: true, rank: 0, seen: &[] };
        if self.stock.is_all() && self.seen.is_empty() {
            return all;
        }
        let leaves = header.leaves_below(firsts, node, depth);
        all.seen = self.seen_of(leaves.clone());
        all.rank = self.stock.rank(leaves.start);
        all.is_all = all.seen.is_empty() && self.stock.rank(leaves.end) - all.rank == leaves.end - leaves.start;
        all
    }

    /// The child of a node, if exactly one may follow: its code is certain.
    #[must_use]
    pub fn only_child(&self, node: u32) -> Option<u32> {
        let mut children = self.children(node);
        let first = children.next()?;
        children.next().is_none().then_some(first)
    }

    /// The seen ones of these leaves.
    #[inline]
    fn seen_of(&self, leaves: Range<u32>) -> &[u32] {
        let [start, end] = [leaves.start, leaves.end].map(|leaf| self.seen.partition_point(|&seen| seen < leaf));
        self.seen.get(start..end).unwrap_or_default()
    }
}

/// An iterator over the children of a node that [`Allowed::children`] gives.
#[derive(Debug, Clone)]
pub struct AllowedChildren<'a> {
    allowed: &'a Allowed<'a>,
    firsts: &'a [u32],
    /// Those not looked at yet, and their depth.
    children: Range<u32>,
    depth: usize,
    /// Whether none of them needs to be looked at.
    is_all: bool,
    /// How many leaves before theirs are in stock.
    rank: u32,
    /// The seen ones among their leaves.
    seen: &'a [u32],
}

impl<'a> AllowedChildren<'a> {
    /// The same with the children's codes. Faster than looking up every code.
    #[inline]
    pub fn with_codes(self) -> impl Iterator<Item = (u16, u32)> + 'a {
        let (first, codes) = (self.children.start, self.allowed.trie.codes_of(self.children.clone()));
        self.map(move |child| (codes.get((child - first) as usize).copied().unwrap_or(0), child))
    }

    /// Moves over the leaves of a child, and returns whether any of them may be listed.
    #[inline]
    fn pass(&mut self, child: u32) -> bool {
        let end = self.allowed.trie.header.leaves_before(self.firsts, child + 1, self.depth);
        let rank = self.allowed.stock.rank(end);
        let in_stock = rank.saturating_sub(self.rank) as usize;
        self.rank = rank;
        if self.seen.first().is_none_or(|&leaf| leaf >= end) {
            return in_stock > 0;
        }
        let seen = self.seen.partition_point(|&leaf| leaf < end);
        self.seen = &self.seen[seen..];
        in_stock > seen
    }
}

impl Iterator for AllowedChildren<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        loop {
            let child = self.children.next()?;
            if self.is_all || self.pass(child) {
                return Some(child);
            }
        }
    }
}
