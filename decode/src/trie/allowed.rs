//! Which items may be listed for one user. A search that asks here for children meets no dead end: below every node
//! that it is given, there is a leaf that may be listed.

use std::ops::Range;

use super::{Stock, Trie, index};

/// The leaves that a user has seen.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Those in stock, ascending.
    leaves: Vec<u32>,
    /// The nodes with leaves in stock all of which were seen, ascending: as many as leaves, and few more.
    nodes: Vec<u32>,
}

impl Seen {
    /// Leaves that a user has seen, in any order; others than the trie's count for nothing. `stock` must be the trie's
    /// own.
    #[must_use]
    pub fn new(trie: &Trie, stock: &Stock, leaves: &[u32]) -> Self {
        let known = |leaf: &u32| (*leaf as usize) < trie.leaves() && stock.contains(*leaf);
        let mut leaves: Vec<u32> = leaves.iter().copied().filter(known).collect();
        leaves.sort_unstable();
        leaves.dedup();
        let mut seen = Self { leaves, nodes: Vec::new() };
        let mut nodes: Vec<u32> = seen.leaves.iter().map(|leaf| trie.leaf_node(*leaf)).collect();
        while !nodes.is_empty() {
            seen.nodes.extend(&nodes);
            // Nodes are numbered breadth first, so those above are in order, too.
            nodes = nodes.iter().filter_map(|node| trie.parent(*node)).collect();
            nodes.dedup();
            nodes.retain(|node| {
                let leaves = trie.leaves_below(*node);
                stock.count(leaves.clone()) == index(within(&seen.leaves, leaves).len())
            });
        }
        seen.nodes.sort_unstable();
        seen
    }
}

/// Those of ascending numbers that are in a range.
#[inline]
fn within(numbers: &[u32], range: Range<u32>) -> &[u32] {
    let [start, end] = [range.start, range.end].map(|bound| numbers.partition_point(|&number| number < bound));
    numbers.get(start..end).unwrap_or_default()
}

/// What a user may be shown: leaves in stock that were not seen. Nodes without any such leaf below do not exist here.
#[derive(Debug, Clone, Copy)]
pub struct Allowed<'a> {
    trie: &'a Trie,
    stock: &'a Stock,
    seen: &'a Seen,
}

impl<'a> Allowed<'a> {
    /// All leaves of a stock but those that a user has seen. Both must be the trie's own.
    #[must_use]
    pub fn new(trie: &'a Trie, stock: &'a Stock, seen: &'a Seen) -> Self {
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
        known && self.seen.leaves.binary_search(&leaf).is_err()
    }

    /// How many leaves below a node may be listed; of the root, how long a list can be.
    #[inline]
    #[must_use]
    pub fn count_below(&self, node: u32) -> u32 {
        let leaves = self.trie.leaves_below(node);
        let seen = within(&self.seen.leaves, leaves.clone()).len();
        self.stock.count(leaves).saturating_sub(index(seen))
    }

    /// The children of a node with a leaf below that may be listed, in the order of their codes.
    #[inline]
    #[must_use]
    pub fn children(&self, node: u32) -> AllowedChildren<'a> {
        let children = self.trie.children(node);
        let seen = within(&self.seen.nodes, children.clone());
        AllowedChildren { trie: self.trie, stock: self.stock, children, seen }
    }

    /// The child of a node, if exactly one may follow: its code is certain.
    #[must_use]
    pub fn only_child(&self, node: u32) -> Option<u32> {
        let mut children = self.children(node);
        let first = children.next()?;
        children.next().is_none().then_some(first)
    }
}

/// An iterator over the children of a node that [`Allowed::children`] gives.
#[derive(Debug, Clone)]
pub struct AllowedChildren<'a> {
    trie: &'a Trie,
    stock: &'a Stock,
    /// Those not looked at yet.
    children: Range<u32>,
    /// The seen ones among them.
    seen: &'a [u32],
}

impl<'a> AllowedChildren<'a> {
    /// The same with the children's codes. Faster than looking up every code.
    #[inline]
    pub fn with_codes(self) -> impl Iterator<Item = (u16, u32)> + 'a {
        let (first, codes) = (self.children.start, self.trie.codes_of(self.children.clone()));
        self.map(move |child| (codes.get((child - first) as usize).copied().unwrap_or(0), child))
    }
}

impl Iterator for AllowedChildren<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        loop {
            let child = self.children.next()?;
            if self.seen.first() == Some(&child) {
                self.seen = &self.seen[1..];
                continue;
            }
            if self.stock.has(child) {
                return Some(child);
            }
        }
    }
}
