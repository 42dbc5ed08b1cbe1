//! The header of a trie file: sizes, names and code tables. What follows from the sizes, such as where sections begin,
//! is computed once.

use std::ops::Range;

use super::{LEVELS_MAX, MAGIC, TrieError, TrieMeta, VERSION};
use crate::sealed::{CHECKED_FROM, Preamble, check_hash, word_at};

/// Offset of the content checksum.
pub(super) const CONTENT_HASH: usize = 48;
/// Length of the fixed part of the header, after which name and levels follow.
pub(super) const HEADER: usize = 108;

/// The sizes that the header states.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) levels: usize,
    /// The first node of every depth, then the number of nodes.
    pub(super) starts: [u32; LEVELS_MAX + 2],
    pub(super) items: u32,
    /// Where the sections begin, and where the last one ends.
    pub(super) sections: [usize; 7],
}

impl Header {
    /// Reads the header from the beginning of a file, with the description and the header's checksum.
    pub(super) fn open(bytes: &[u8]) -> Result<(Self, TrieMeta, [u8; 32]), TrieError> {
        check_preamble(bytes)?;
        let length = u64::from(word_at(bytes, 80)) | u64::from(word_at(bytes, 84)) << 32;
        let content_at = (word_at(bytes, 88) as usize).max(HEADER);
        let wrong_length = || TrieError::Length { expected: length.max(content_at as u64), found: bytes.len() as u64 };
        let head = bytes.get(CHECKED_FROM..content_at).ok_or_else(wrong_length)?;
        let digest = check_hash(head, &bytes[16..CHECKED_FROM])?;
        if length != bytes.len() as u64 {
            return Err(wrong_length());
        }
        let (header, meta) = Self::read(&bytes[..content_at])?;
        if header.sections[6] as u64 != length {
            let sum = header.sections[6];
            return Err(TrieError::Malformed(format!("its sections end at {sum}, its header says at {length}")));
        }
        Ok((header, meta, digest))
    }

    /// Reads a whole header of at least [`HEADER`] bytes, whose checksum holds.
    fn read(head: &[u8]) -> Result<(Self, TrieMeta), TrieError> {
        let [length, levels, integer_ids, items, id_bytes] = [88, 92, 96, 100, 104].map(|at| word_at(head, at));
        if length as usize != head.len() || levels as usize > LEVELS_MAX || integer_ids > 1 {
            let found = format!("a header of {length} bytes, {levels} levels, integer ids {integer_ids}");
            return Err(TrieError::Malformed(found));
        }
        let mut rest = Rest(&head[HEADER..]);
        let name = rest.text()?;
        let (mut codes, mut counts) = (Vec::new(), Vec::new());
        for _ in 0..levels {
            counts.push(rest.word()?);
            let table = rest.word()?;
            codes.push((0..table).map(|_| rest.text()).collect::<Result<_, _>>()?);
        }
        if rest.0.len() > 3 || rest.0.iter().any(|&padding| padding != 0) || !head.len().is_multiple_of(4) {
            return Err(TrieError::Malformed("its header does not end after the code tables".to_owned()));
        }
        let meta = TrieMeta { name, integer_ids: integer_ids == 1, codes };
        meta.check()?;
        let too_large = || TrieError::Malformed(format!("{counts:?} nodes and {items} items"));
        let header = Self::of(&counts, (items, id_bytes), head.len()).ok_or_else(too_large)?;
        Ok((header, meta))
    }

    /// The header of a trie with so many nodes at every depth from 1 on, so many items, so many bytes of ids, and a
    /// content that begins there. None if nodes cannot be numbered, or a level or the items are empty.
    pub(super) fn of(counts: &[u32], (items, id_bytes): (u32, u32), content_at: usize) -> Option<Self> {
        let mut nodes = 1u32;
        let mut starts = [0; LEVELS_MAX + 2];
        for (start, &count) in starts[1..].iter_mut().zip(counts) {
            *start = nodes;
            nodes = nodes.checked_add(count).filter(|_| count > 0)?;
        }
        starts[counts.len() + 1..].fill(nodes);
        let leaves = *counts.last()?;
        let above = nodes - leaves;
        if items < leaves || items == u32::MAX || nodes == u32::MAX {
            return None;
        }
        let mut sections = [content_at; 7];
        let sizes = [(4, above + 1), (4, leaves + 1), (4, items + 1), (4, items), (2, nodes), (1, id_bytes)];
        for (section, (width, count)) in sizes.into_iter().enumerate() {
            sections[section + 1] = sections[section].checked_add(usize::try_from(count).ok()?.checked_mul(width)?)?;
        }
        Some(Self { levels: counts.len(), starts, items, sections })
    }

    /// Writes the header, with zeros for the checksums.
    pub(super) fn write(meta: &TrieMeta, counts: &[u32], items: u32, id_bytes: u32) -> Option<(Self, Vec<u8>)> {
        let mut bytes = Vec::new();
        Preamble::write(&mut bytes, MAGIC, VERSION);
        bytes.resize(92, 0);
        for word in [u32::try_from(meta.codes.len()).ok()?, meta.integer_ids.into(), items, id_bytes] {
            bytes.extend(word.to_le_bytes());
        }
        write_text(&mut bytes, &meta.name)?;
        for (nodes, table) in counts.iter().zip(&meta.codes) {
            bytes.extend(nodes.to_le_bytes());
            bytes.extend(u32::try_from(table.len()).ok()?.to_le_bytes());
            for code in table {
                write_text(&mut bytes, code)?;
            }
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let header = Self::of(counts, (items, id_bytes), bytes.len())?;
        bytes[80..88].copy_from_slice(&u64::try_from(header.sections[6]).ok()?.to_le_bytes());
        let content_at = u32::try_from(bytes.len()).ok()?;
        bytes[88..92].copy_from_slice(&content_at.to_le_bytes());
        Some((header, bytes))
    }

    /// Number of nodes.
    #[inline]
    pub(super) fn nodes(&self) -> u32 {
        self.starts[self.levels + 1]
    }

    /// The nodes of a depth; none below the leaves.
    #[inline]
    pub(super) fn level(&self, depth: usize) -> Range<u32> {
        let depth = depth.min(LEVELS_MAX);
        let start = self.starts[depth];
        start..self.starts[depth + 1].max(start)
    }

    /// The depth of a node. Always compares with as many levels as there can be: a loop of known length is faster.
    #[inline]
    pub(super) fn depth(&self, node: u32) -> usize {
        let before = self.starts[1..=LEVELS_MAX].iter().map(|&start| u32::from(start <= node)).sum::<u32>();
        self.levels.min(before as usize)
    }

    /// The first child of a node of this depth, in the section `firsts`. For the node behind a level, that is where the
    /// children of the level's last node end.
    #[inline]
    fn first_child(&self, firsts: &[u32], node: u32, depth: usize) -> u32 {
        let level = self.level(depth + 1);
        firsts.get(node as usize).map_or(level.end, |&first| first.max(level.start).min(level.end))
    }

    /// The children of a node of this depth.
    #[inline]
    pub(super) fn children(&self, firsts: &[u32], node: u32, depth: usize) -> Range<u32> {
        if depth >= self.levels {
            return 0..0;
        }
        let first = self.first_child(firsts, node, depth);
        first..self.first_child(firsts, node + 1, depth).max(first)
    }

    /// The number of leaves before those of a node of this depth, or before those of the node behind its level.
    #[inline]
    pub(super) fn leaves_before(&self, firsts: &[u32], node: u32, depth: usize) -> u32 {
        let leaf = (depth..self.levels).fold(node, |node, depth| self.first_child(firsts, node, depth));
        leaf - self.starts[self.levels]
    }

    /// The leaves below a node of this depth, by number.
    #[inline]
    pub(super) fn leaves_below(&self, firsts: &[u32], node: u32, depth: usize) -> Range<u32> {
        if node >= self.nodes() {
            return 0..0;
        }
        let first = self.leaves_before(firsts, node, depth);
        first..self.leaves_before(firsts, node + 1, depth).max(first)
    }

    /// Where the header ends.
    pub(super) fn content_at(&self) -> usize {
        self.sections[0]
    }

    /// The length of the file.
    pub(super) fn file_bytes(&self) -> usize {
        self.sections[6]
    }

    /// The bytes of a section: first children, first items, starts of ids, items by id, codes, ids.
    #[inline]
    pub(super) fn section<'a>(&self, bytes: &'a [u8], section: usize) -> &'a [u8] {
        &bytes[self.sections[section]..self.sections[section + 1]]
    }
}

/// Checks magic, byte order, version and the length of the header's fixed part.
fn check_preamble(bytes: &[u8]) -> Result<(), TrieError> {
    match Preamble::of(bytes, MAGIC, HEADER) {
        Preamble::Magic(found) => Err(TrieError::Magic(found)),
        Preamble::Short => Err(TrieError::Length { expected: HEADER as u64, found: bytes.len() as u64 }),
        Preamble::ByteOrder => Err(TrieError::ByteOrder),
        Preamble::Version(VERSION) => Ok(()),
        Preamble::Version(found) => Err(TrieError::Version(found)),
    }
}

fn write_text(bytes: &mut Vec<u8>, text: &str) -> Option<()> {
    bytes.extend(u32::try_from(text.len()).ok()?.to_le_bytes());
    bytes.extend(text.as_bytes());
    Some(())
}

/// What of a header was not read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], TrieError> {
        let cut = || TrieError::Malformed("its header ends within the code tables".to_owned());
        let (taken, rest) = self.0.split_at_checked(length).ok_or_else(cut)?;
        self.0 = rest;
        Ok(taken)
    }

    fn word(&mut self) -> Result<u32, TrieError> {
        Ok(word_at(self.take(4)?, 0))
    }

    /// A length and so many bytes of UTF-8.
    fn text(&mut self) -> Result<String, TrieError> {
        let length = self.word()? as usize;
        let text = std::str::from_utf8(self.take(length)?);
        text.map(str::to_owned).map_err(|_| TrieError::Malformed("its name or a code is not UTF-8".to_owned()))
    }
}
