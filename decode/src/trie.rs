//! The trie of item identifiers, in one immutable file: which codes may follow a prefix, and which items an identifier
//! stands for.
//!
//! An identifier is one code per level. The nodes are the prefixes of all identifiers, numbered breadth first: level by
//! level, siblings by code. So the children of a node are a range of nodes, the leaves below it are a range of leaves,
//! and a node takes 6 bytes: its first child (of a leaf: its first item) and its code. Items are numbered by leaf,
//! those of one leaf in the order in which they were given.
//!
//! The view reads the file's bytes in place, as [`Pool`](crate::Pool) does: opening reads the header, [`Trie::verify`]
//! reads everything. Verified or not, no function panics on a trie that opens: what is out of bounds is moved to the
//! nearest bound, and a child is one level below its parent in any case. The layout is in docs/formats.md.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use thiserror::Error;

use crate::sealed::{Mismatch, check_hash};
use header::{CONTENT_HASH, Header};

mod allowed;
mod build;
mod check;
mod header;
mod stock;

pub use allowed::{Allowed, AllowedChildren, Seen};
pub use build::build_trie;
pub use stock::Stock;

pub(crate) const MAGIC: [u8; 8] = *b"LASRTRIE";
pub(crate) const VERSION: u32 = 1;

/// Most codes of an identifier.
pub const LEVELS_MAX: usize = 16;
/// Most codes of one level: a node has 16 bits for its code.
pub const CODES_MAX: usize = 1 << 16;

/// One item: an input row of [`build_trie`]. Items that share an identifier are listed in the order of their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrieItem<'a> {
    /// The item's id, unique among all.
    pub id: &'a str,
    /// The identifier: for every level the number of a code in its table.
    pub codes: &'a [u16],
}

/// The description stored in a trie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrieMeta {
    /// The trie's name in errors.
    pub name: String,
    /// Whether the item ids are integers (of 64 bits, in decimal).
    pub integer_ids: bool,
    /// For every level the codes as the model writes them; a node's code is an index of its level's table.
    pub codes: Vec<Vec<String>>,
}

/// Why a trie could not be built or opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TrieError {
    /// The magic number does not match.
    #[error("not a trie file: it starts with {0:02x?}, expected {MAGIC:02x?} (\"LASRTRIE\")")]
    Magic([u8; 8]),
    /// Made by another version of the format.
    #[error("trie file has format version {0}, this build reads {VERSION}: rebuild the trie")]
    Version(u32),
    /// The file's byte order is not this machine's.
    #[error("trie file is little-endian, this machine is not: tries need a little-endian machine")]
    ByteOrder,
    /// The file is cut off or has a tail.
    #[error("trie file has {found} bytes, expected {expected}: it is truncated or damaged, rebuild it")]
    Length {
        /// Bytes that the header requires.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The content differs from what was written.
    #[error("trie file is damaged: checksum {found}, expected {expected}: rebuild the trie")]
    Checksum {
        /// The checksum in the header, in hexadecimal.
        expected: String,
        /// That of the content, in hexadecimal.
        found: String,
    },
    /// The checksum holds but the content does not make a trie.
    #[error("trie file is malformed: {0}: it was not written by laser, rebuild it")]
    Malformed(String),
    /// Code tables or items are not what the trie needs.
    #[error("trie {trie}: {reason}")]
    Refused {
        /// The trie's name.
        trie: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}

impl From<Mismatch> for TrieError {
    fn from(Mismatch { expected, found }: Mismatch) -> Self {
        Self::Checksum { expected, found }
    }
}

/// An open trie. Cloning shares the bytes.
///
/// Node 0 is the root, at depth 0; leaves are at depth [`levels`](Self::levels). Leaves have numbers of their own, in
/// the order of their nodes. A number out of range stands for nothing: it has no children, no leaves and no items.
#[derive(Clone)]
pub struct Trie {
    bytes: Bytes,
    meta: Arc<TrieMeta>,
    digest: [u8; 32],
    header: Header,
}

impl fmt::Debug for Trie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Trie");
        f.field("name", &self.meta.name).field("levels", &self.levels()).field("nodes", &self.nodes());
        f.field("items", &self.items()).finish_non_exhaustive()
    }
}

impl Trie {
    /// Opens the bytes of a trie file. Bytes that start at a multiple of 4, as those of a mapping do, are read in
    /// place; others are copied once. Only the header is read.
    ///
    /// # Errors
    /// If the header is damaged, incomplete or of another format, or the file does not have the length that it states.
    /// Never panics.
    pub fn open(bytes: Bytes) -> Result<Self, TrieError> {
        let bytes = crate::sealed::aligned(bytes);
        let (header, meta, digest) = Header::open(&bytes)?;
        Ok(Self { bytes, meta: meta.into(), digest, header })
    }

    /// Compares the whole content with the checksum in the header and checks that it makes a trie: levels, siblings and
    /// ids in order, everything in bounds. Before that, damage to the file only makes answers wrong.
    ///
    /// # Errors
    /// [`TrieError::Checksum`], or [`TrieError::Malformed`] if the file was written that way.
    pub fn verify(&self) -> Result<(), TrieError> {
        check_hash(&self.bytes[self.header.content_at()..], &self.bytes[CONTENT_HASH..CONTENT_HASH + 32])?;
        self.check_content()
    }

    /// Returns the description stored in the trie.
    #[must_use]
    pub fn meta(&self) -> &TrieMeta {
        &self.meta
    }

    /// BLAKE3 of the header, which contains the checksum of everything else: equal digests give equal lists.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Number of codes of an identifier, at least 1.
    #[must_use]
    pub fn levels(&self) -> usize {
        self.header.levels
    }

    /// Number of nodes, root and leaves included.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.header.nodes() as usize
    }

    /// Number of items, at least 1.
    #[must_use]
    pub fn items(&self) -> usize {
        self.header.items as usize
    }

    /// Number of leaves: of distinct identifiers.
    #[must_use]
    pub fn leaves(&self) -> usize {
        self.level(self.levels()).len()
    }

    /// Size of the file in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The nodes at this depth, in the order of their prefixes; none below the leaves.
    #[must_use]
    pub fn level(&self, depth: usize) -> Range<u32> {
        self.header.level(depth)
    }

    /// The depth of a node: the number of codes of its prefix.
    #[inline]
    #[must_use]
    pub fn depth(&self, node: u32) -> usize {
        self.header.depth(node)
    }

    /// The children of a node, in the order of their codes; none of a leaf.
    #[inline]
    #[must_use]
    pub fn children(&self, node: u32) -> Range<u32> {
        self.header.children(self.firsts(), node, self.depth(node))
    }

    /// The last code of a node's prefix; 0 of the root.
    #[inline]
    #[must_use]
    pub fn code(&self, node: u32) -> u16 {
        self.codes().get(node as usize).copied().unwrap_or(0)
    }

    /// The codes of a range of nodes, such as [`children`](Self::children).
    #[inline]
    #[must_use]
    pub fn codes_of(&self, nodes: Range<u32>) -> &[u16] {
        self.codes().get(nodes.start as usize..nodes.end as usize).unwrap_or_default()
    }

    /// The child of a node by this code.
    #[must_use]
    pub fn child(&self, node: u32, code: u16) -> Option<u32> {
        let children = self.children(node);
        let at = self.codes_of(children.clone()).binary_search(&code).ok()?;
        Some(children.start + index(at))
    }

    /// The node whose child this is; none of the root. A binary search of the level above.
    #[must_use]
    pub fn parent(&self, node: u32) -> Option<u32> {
        if node >= self.header.nodes() {
            return None;
        }
        let above = self.level(self.depth(node).checked_sub(1)?);
        let firsts = &self.firsts()[above.start as usize..above.end as usize];
        let up_to = firsts.partition_point(|&first| first <= node);
        Some(above.start + index(up_to.saturating_sub(1)))
    }

    /// The nodes of a leaf's identifier, from depth 1 to the leaf itself.
    #[must_use]
    pub fn path(&self, leaf: u32) -> Vec<u32> {
        let mut path = vec![0; self.levels()];
        let mut node = Some(self.leaf_node(leaf));
        for place in path.iter_mut().rev() {
            *place = node.unwrap_or(0);
            node = self.parent(*place);
        }
        path
    }

    /// The leaves below a node, by number; of a leaf itself alone.
    #[inline]
    #[must_use]
    pub fn leaves_below(&self, node: u32) -> Range<u32> {
        self.header.leaves_below(self.firsts(), node, self.depth(node))
    }

    /// The node of a leaf; of a number beyond the leaves the last one.
    #[must_use]
    pub fn leaf_node(&self, leaf: u32) -> u32 {
        let leaves = self.level(self.levels());
        leaves.start.saturating_add(leaf).min(leaves.end - 1)
    }

    /// The number of the leaf that a node is, if it is one.
    #[must_use]
    pub fn leaf_of_node(&self, node: u32) -> Option<u32> {
        let leaves = self.level(self.levels());
        leaves.contains(&node).then(|| node - leaves.start)
    }

    /// The items that a leaf's identifier stands for, at least one.
    #[must_use]
    pub fn items_of(&self, leaf: u32) -> Range<u32> {
        let bound = |leaf: usize| self.first_items().get(leaf).map_or(self.header.items, |&i| i.min(self.header.items));
        let first = bound(leaf as usize);
        first..bound(leaf as usize + 1).max(first)
    }

    /// The id of an item; empty for a number beyond the items.
    #[must_use]
    pub fn item_id(&self, item: u32) -> &str {
        std::str::from_utf8(self.id_bytes(item)).unwrap_or_default()
    }

    /// The item of this id, if there is one. A binary search.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<u32> {
        let found = self.by_id().binary_search_by(|&item| self.id_bytes(item).cmp(id.as_bytes())).ok()?;
        self.by_id().get(found).copied()
    }

    /// The leaf whose identifier stands for an item; of a number beyond the items the last one.
    #[must_use]
    pub fn leaf_of_item(&self, item: u32) -> u32 {
        let firsts = &self.first_items()[..self.leaves()];
        index(firsts.partition_point(|&first| first <= item).saturating_sub(1))
    }

    /// The leaves of these items, each once and in order: what [`Allowed`] leaves out of a user's list.
    #[must_use]
    pub fn leaves_of(&self, items: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut leaves: Vec<u32> = items.into_iter().map(|item| self.leaf_of_item(item)).collect();
        leaves.sort_unstable();
        leaves.dedup();
        leaves
    }

    /// The node of a prefix, if an identifier begins with it: the root of none, a leaf of a whole identifier.
    #[must_use]
    pub fn find_path(&self, codes: &[u16]) -> Option<u32> {
        codes.iter().try_fold(0, |node, &code| self.child(node, code))
    }

    /// Of every node above the leaves the first child, and behind them the number of nodes.
    #[inline]
    fn firsts(&self) -> &[u32] {
        bytemuck::cast_slice(self.header.section(&self.bytes, 0))
    }

    /// Of every leaf the first item, and behind them the number of items.
    fn first_items(&self) -> &[u32] {
        bytemuck::cast_slice(self.header.section(&self.bytes, 1))
    }

    /// Where the ids start, and behind them where the last one ends.
    fn id_starts(&self) -> &[u32] {
        bytemuck::cast_slice(self.header.section(&self.bytes, 2))
    }

    /// All items in the order of their ids' bytes.
    fn by_id(&self) -> &[u32] {
        bytemuck::cast_slice(self.header.section(&self.bytes, 3))
    }

    /// Of every node its code.
    #[inline]
    fn codes(&self) -> &[u16] {
        bytemuck::cast_slice(self.header.section(&self.bytes, 4))
    }

    /// The bytes of an item's id.
    fn id_bytes(&self, item: u32) -> &[u8] {
        let bound = |item: usize| self.id_starts().get(item).map(|&at| at as usize);
        let bytes = || self.header.section(&self.bytes, 5).get(bound(item as usize)?..bound(item as usize + 1)?);
        bytes().unwrap_or_default()
    }
}

impl TrieMeta {
    /// Checks that there are codes, that nodes have room for them, and that none has two numbers.
    pub(crate) fn check(&self) -> Result<(), TrieError> {
        if !(1..=LEVELS_MAX).contains(&self.codes.len()) {
            let levels = self.codes.len();
            return Err(self.refused(format!("{levels} levels of codes, expected 1 to {LEVELS_MAX}")));
        }
        for (level, table) in (1..).zip(&self.codes) {
            if !(1..=CODES_MAX).contains(&table.len()) {
                let codes = table.len();
                return Err(self.refused(format!("level {level} has {codes} codes, expected 1 to {CODES_MAX}")));
            }
            let mut sorted: Vec<&str> = table.iter().map(String::as_str).collect();
            sorted.sort_unstable();
            if let Some(code) = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]) {
                return Err(self.refused(format!("level {level} has the code {code:?} twice: number it once")));
            }
            if sorted.first() == Some(&"") {
                return Err(self.refused(format!("level {level} has an empty code: no model can write it")));
            }
        }
        Ok(())
    }

    pub(crate) fn refused(&self, reason: String) -> TrieError {
        TrieError::Refused { trie: self.name.clone(), reason }
    }
}

/// Whether this is the one decimal text of an integer of 64 bits.
fn is_integer(id: &str) -> bool {
    let digits = id.strip_prefix('-').unwrap_or(id);
    let canonical = id == "0" || !digits.starts_with(['0', '+']);
    canonical && id.parse::<i64>().is_ok()
}

/// A count or place, which tries hold in 32 bits.
fn index(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
