//! Which items may be listed for one user. A search that asks here for children meets no dead end: below every node
//! that it is given, there is a leaf that may be listed.

use std::hint::black_box;
use std::ops::Range;

use super::{Stock, Trie, index};

/// The leaves that a user has seen.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Those in stock, ascending.
    leaves: Vec<u32>,
    /// The nodes with leaves in stock all of which were seen, ascending: as many as leaves, and few more.
    nodes: Vec<u32>,
    /// Of each node's parent the bit of its number modulo [`PARENTS`]: most nodes have no child that was seen, and are
    /// told so by one look in place of two binary searches.
    parents: [u64; PARENTS as usize / 64],
}

/// Bits by which parents are told apart. 50 leaves of different parents set a twentieth of them.
const PARENTS: u32 = 1024;

impl Seen {
    /// Leaves that a user has seen, in any order; others than the trie's count for nothing. `stock` must be the trie's
    /// own.
    #[must_use]
    pub fn new(trie: &Trie, stock: &Stock, leaves: &[u32]) -> Self {
        let known = |leaf: &u32| (*leaf as usize) < trie.leaves() && stock.contains(*leaf);
        let mut leaves: Vec<u32> = leaves.iter().copied().filter(known).collect();
        leaves.sort_unstable();
        leaves.dedup();
        let mut seen = Self { leaves, ..Self::default() };
        let mut nodes: Vec<u32> = seen.leaves.iter().map(|leaf| trie.leaf_node(*leaf)).collect();
        while !nodes.is_empty() {
            seen.nodes.extend(&nodes);
            // Nodes are numbered breadth first, so those above are in order, too.
            nodes = nodes.iter().filter_map(|node| trie.parent(*node)).collect();
            nodes.dedup();
            nodes.iter().for_each(|parent| seen.parents[parent_word(*parent)] |= 1 << (parent % 64));
            nodes.retain(|node| {
                let leaves = trie.leaves_below(*node);
                stock.count(leaves.clone()) == index(within(&seen.leaves, leaves).len())
            });
        }
        seen.nodes.sort_unstable();
        seen
    }

    /// The children of a node, given as a range, whose leaves in stock were all seen.
    #[inline]
    fn among(&self, children: Range<u32>, parent: u32) -> &[u32] {
        if self.parents[parent_word(parent)] >> (parent % 64) & 1 == 0 {
            return &[];
        }
        within(&self.nodes, children)
    }
}

#[inline]
fn parent_word(parent: u32) -> usize {
    (parent % PARENTS) as usize / 64
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

    /// Reads what the [children](Self::children) of these nodes begin with. Those of each node are in places of their
    /// own, which in a large trie are in no cache; here a processor waits for all of them at once. At depth 3 of 10
    /// million items the children of 20 nodes take half as long with it.
    pub fn fetch(&self, nodes: impl IntoIterator<Item = u32>) {
        let firsts: Vec<u32> = nodes.into_iter().map(|node| self.trie.children(node).start).collect();
        let read = |first: u32| self.stock.word(first) ^ u64::from(self.trie.code(first));
        black_box(firsts.into_iter().map(read).fold(0, |all, word| all ^ word));
    }

    /// The children of a node with a leaf below that may be listed, in the order of their codes.
    #[inline]
    pub fn children(&self, node: u32) -> impl Iterator<Item = u32> + 'a {
        self.children_with_codes(node).map(|(_, child)| child)
    }

    /// The same children behind their codes.
    #[inline]
    #[must_use]
    pub fn children_with_codes(&self, node: u32) -> AllowedChildren<'a> {
        let children = self.trie.children(node);
        let seen = self.seen.among(children.clone(), node);
        let codes = self.trie.codes_of(children.clone());
        AllowedChildren { stock: self.stock, children, codes, seen }
    }

    /// The child of a node, if exactly one may follow: its code is certain.
    #[must_use]
    pub fn only_child(&self, node: u32) -> Option<u32> {
        let mut children = self.children(node);
        let first = children.next()?;
        children.next().is_none().then_some(first)
    }
}

/// An iterator over the children of a node that [`Allowed::children_with_codes`] gives, and their codes. `fold`, with
/// `sum`, `for_each` and the like, takes up to 64 at once, which is several times as fast.
#[derive(Debug, Clone)]
pub struct AllowedChildren<'a> {
    stock: &'a Stock,
    /// Those not looked at yet.
    children: Range<u32>,
    /// Their codes.
    codes: &'a [u16],
    /// The seen ones among them.
    seen: &'a [u32],
}

impl<'a> AllowedChildren<'a> {
    /// Takes the next children, at most to the end of a word of the stock: the first one, the codes of all, and a bit
    /// for each that is allowed.
    #[inline]
    fn word(&mut self) -> (u32, &'a [u16], u64) {
        let first = self.children.start;
        let count = (64 - first % 64).min(self.children.end.saturating_sub(first));
        let mut bits = self.stock.word(first) & ones(count);
        while let Some((&seen, rest)) = self.seen.split_first().filter(|(seen, _)| **seen - first < count) {
            bits &= !(1 << (seen - first));
            self.seen = rest;
        }
        let (codes, rest) = self.codes.split_at_checked(count as usize).unwrap_or_default();
        self.codes = rest;
        self.children.start += count;
        (first, codes, bits)
    }
}

/// So many bits, at most 64.
#[inline]
fn ones(count: u32) -> u64 {
    u64::MAX.checked_shr(64 - count).unwrap_or(0)
}

impl Iterator for AllowedChildren<'_> {
    type Item = (u16, u32);

    #[inline]
    fn next(&mut self) -> Option<(u16, u32)> {
        loop {
            let child = self.children.next()?;
            let (&code, rest) = self.codes.split_first()?;
            self.codes = rest;
            if self.seen.first() == Some(&child) {
                self.seen = &self.seen[1..];
            } else if self.stock.has(child) {
                return Some((code, child));
            }
        }
    }

    #[inline]
    fn fold<B, F: FnMut(B, (u16, u32)) -> B>(mut self, init: B, mut with: F) -> B {
        let mut folded = init;
        if self.stock.is_all() && self.seen.is_empty() {
            return self.codes.iter().copied().zip(self.children).fold(folded, with);
        }
        while !self.children.is_empty() {
            let (first, codes, bits) = self.word();
            if bits == ones(index(codes.len())) {
                for (&code, child) in codes.iter().zip(first..self.children.start) {
                    folded = with(folded, (code, child));
                }
                continue;
            }
            // In order: codes are then on their way from memory while the stock's bits still are.
            for (at, &code) in (0..).zip(codes) {
                if bits >> at & 1 == 1 {
                    folded = with(folded, (code, first + at));
                }
            }
        }
        folded
    }
}
