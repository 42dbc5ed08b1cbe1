//! Which items may be listed for everybody.

use std::ops::Range;

use super::Trie;

/// The leaves of a trie that may be listed, as bits with ranks: how many there are in a range is two look-ups.
#[derive(Debug, Clone, Default)]
pub struct Stock {
    /// 64 leaves each, and one word more for the number of all; empty if all may be listed.
    words: Vec<Word>,
    /// 64 nodes each: whether a leaf below may be listed; empty if all may be.
    nodes: Vec<u64>,
    /// Items that are out of stock although their leaf is not, ascending: others share its identifier.
    out: Vec<u32>,
}

/// The bits of 64 leaves, and the number of bits set before them.
#[derive(Debug, Clone, Copy, Default)]
struct Word {
    bits: u64,
    before: u32,
}

impl Stock {
    /// Every item may be listed. Takes no memory.
    #[must_use]
    pub fn all(_: &Trie) -> Self {
        Self::default()
    }

    /// All items but these, given by number in any order. A leaf is out of stock when all its items are. Takes 2 bits
    /// per leaf and one per node. Numbers beyond the items count for nothing.
    #[must_use]
    pub fn without(trie: &Trie, out: impl IntoIterator<Item = u32>) -> Self {
        let mut out: Vec<u32> = out.into_iter().filter(|&item| (item as usize) < trie.items()).collect();
        if out.is_empty() {
            return Self::default();
        }
        out.sort_unstable();
        out.dedup();
        let mut words = vec![Word { bits: u64::MAX, before: 0 }; trie.leaves() / 64 + 1];
        let mut partly = Vec::new();
        let mut rest = out.as_slice();
        while let Some(&item) = rest.first() {
            let leaf = trie.leaf_of_item(item);
            let items = trie.items_of(leaf);
            // At least one, so that a damaged trie ends the loop, too.
            let (those, others) = rest.split_at(rest.partition_point(|&item| item < items.end).max(1));
            rest = others;
            if those.len() < items.len() {
                partly.extend(those);
            } else if let Some(word) = words.get_mut(leaf as usize / 64) {
                word.bits &= !(1 << (leaf % 64));
            }
        }
        count(&mut words);
        let mut stock = Self { words, nodes: vec![0; trie.nodes() / 64 + 1], out: partly };
        stock.mark(trie);
        stock
    }

    /// Marks the nodes with a leaf that may be listed, from the leaves up.
    fn mark(&mut self, trie: &Trie) {
        for (node, leaf) in trie.level(trie.levels()).zip(0..) {
            if self.contains(leaf) {
                self.nodes[node as usize / 64] |= 1 << (node % 64);
            }
        }
        for node in (0..trie.levels()).rev().flat_map(|depth| trie.level(depth)) {
            if trie.children(node).any(|child| self.has(child)) {
                self.nodes[node as usize / 64] |= 1 << (node % 64);
            }
        }
    }

    /// Whether a leaf below a node may be listed.
    #[inline]
    pub(super) fn has(&self, node: u32) -> bool {
        self.word(node) & 1 == 1
    }

    /// The nodes from this one on to the end of its word, lowest bit first: whether a leaf below may be listed.
    #[inline]
    pub(super) fn word(&self, node: u32) -> u64 {
        let all = || if self.is_all() { u64::MAX } else { 0 };
        self.nodes.get(node as usize / 64).copied().unwrap_or_else(all) >> (node % 64)
    }

    /// Whether every item may be listed.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.words.is_empty()
    }

    /// Whether the identifier of a leaf may be listed.
    #[inline]
    #[must_use]
    pub fn contains(&self, leaf: u32) -> bool {
        let bit = |word: &Word| word.bits >> (leaf % 64) & 1 == 1;
        self.is_all() || self.words.get(leaf as usize / 64).is_some_and(bit)
    }

    /// Whether an item itself may be listed: its leaf may be as soon as another item of the identifier is in stock.
    #[must_use]
    pub fn contains_item(&self, trie: &Trie, item: u32) -> bool {
        self.contains(trie.leaf_of_item(item)) && self.out.binary_search(&item).is_err()
    }

    /// Bytes of memory.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        size_of_val(self.words.as_slice()) + size_of_val(self.nodes.as_slice()) + size_of_val(self.out.as_slice())
    }

    /// How many of these leaves may be listed.
    #[inline]
    #[must_use]
    pub fn count(&self, leaves: Range<u32>) -> u32 {
        self.rank(leaves.end).saturating_sub(self.rank(leaves.start))
    }

    /// How many of the leaves before this one may be listed.
    #[inline]
    fn rank(&self, leaf: u32) -> u32 {
        match self.words.get(leaf as usize / 64) {
            Some(word) => word.before + (word.bits & !(u64::MAX << (leaf % 64))).count_ones(),
            None if self.is_all() => leaf,
            None => self.words.last().map_or(0, |word| word.before + word.bits.count_ones()),
        }
    }
}

/// Counts the bits before every word.
fn count(words: &mut [Word]) {
    let mut before = 0;
    for word in words {
        word.before = before;
        before += word.bits.count_ones();
    }
}
