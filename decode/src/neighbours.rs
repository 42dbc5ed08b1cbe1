//! What non-neural recommenders know: the popularity of items, a first-order Markov chain and item-kNN, in one
//! immutable file.
//!
//! They are the baselines of every recommendation list, and they draft such lists without a neural network. Items are
//! numbers from 0. For each item the file holds how often it occurs, the items that most often follow it directly, and
//! those that the same users have (Sarwar et al. 2001). The view reads the file's bytes in place (mapped, shared by all
//! threads; a clone is a reference count).
//!
//! Opening checks the header, which has its own checksum, and the file's length, so its cost does not depend on the
//! size. [`Neighbours::verify`] reads everything and compares it with the checksum in the header. Verified or not,
//! scoring from any file that opens neither panics nor yields an item outside the catalogue.
//!
//! The file is little-endian: magic `LASRNEIG`, version and a mark of the byte order in 4 bytes each, the checksums
//! (BLAKE3) of the rest of the header and of the content, then in 4 bytes each: items n, histories, most entries of an
//! item, window, recency (f32), entries s of the chain and k of the neighbours. The content follows:
//!
//! | bytes | section |
//! |---|---|
//! | 4 n | u32 items, the most popular first, ties by number |
//! | 4 n | u32 occurrences of each item |
//! | 8 s | successors: u32 item, f32 probability; an item's strongest first, ties by number |
//! | 4 (n + 1) | u32 index of each item's first successor; the last one is s |
//! | 8 k | neighbours: u32 item, f32 cosine; in the same order |
//! | 4 (n + 1) | u32 index of each item's first neighbour; the last one is k |

mod build;
mod score;

use std::fmt;

use bytes::Bytes;
use thiserror::Error;

pub use self::build::build_neighbours;
pub use self::score::Method;
use crate::sealed::{CHECKED_FROM, Mismatch, Preamble, aligned, check_hash, word_at};

const MAGIC: [u8; 8] = *b"LASRNEIG";
const VERSION: u32 = 1;
/// Length of the header, after which the sections follow.
const HEADER: usize = 108;

/// How much is kept of what the histories say, and how it is weighed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NeighboursOptions {
    /// Most successors, and most neighbours, of an item: the strongest ones.
    pub most: u32,
    /// Number of a history's last items that are counted in pairs. Pairs grow with the square of a history, so this
    /// bounds the time that users with thousands of items take. Popularity and the Markov chain see all of it.
    pub window: u32,
    /// The weight of a history's item relative to the next later one, above 0 and at most 1, when item-kNN scores: 1
    /// sums the cosines, as plain item-kNN does. Of eight decays, 0.7 had the best NDCG@10 on Amazon Beauty's
    /// validation users: .0144 where 1 had .0113 (paired difference .0031, standard error .0009). On its test users the
    /// gain was .0011, which may be chance (standard error .0010).
    pub recency: f32,
}

impl Default for NeighboursOptions {
    fn default() -> Self {
        Self { most: 64, window: 100, recency: 0.7 }
    }
}

/// Why a neighbours file could not be built or opened.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum NeighboursError {
    /// The magic number does not match.
    #[error("not a neighbours file: it starts with {0:02x?}, expected {MAGIC:02x?} (\"LASRNEIG\")")]
    Magic([u8; 8]),
    /// Made by another version of the format.
    #[error("neighbours file has format version {0}, this build reads {VERSION}: rebuild the file")]
    Version(u32),
    /// The file's byte order is not this machine's.
    #[error("neighbours file is little-endian, this machine is not: it needs a little-endian machine")]
    ByteOrder,
    /// The file is cut off or has a tail.
    #[error("neighbours file has {found} bytes, expected {expected}: it is truncated or damaged, rebuild it")]
    Length {
        /// Bytes that the header requires.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The content differs from what was written.
    #[error("neighbours file is damaged: checksum {found}, expected {expected}: rebuild the file")]
    Checksum {
        /// The checksum in the header, in hexadecimal.
        expected: String,
        /// That of the content, in hexadecimal.
        found: String,
    },
    /// The checksum holds but the content does not make a neighbours file.
    #[error("neighbours file is malformed: {0}: it was not written by laser, rebuild it")]
    Malformed(String),
    /// The option is not a weight.
    #[error("neighbours file: recency is {0}, expected a number above 0 and at most 1: 1 weighs all items alike")]
    Recency(f32),
    /// A history has an item that the catalogue lacks.
    #[error(
        "history {history} has item {item} at index {index}, expected less than the catalogue's {items}: number the \
         items from 0 and pass how many there are"
    )]
    Item {
        /// The history's place among all, from 0.
        history: usize,
        /// The item's place in the history, from 0.
        index: usize,
        /// The item.
        item: u32,
        /// Number of items of the catalogue.
        items: u32,
    },
    /// There is more than the file's 32-bit numbers count.
    #[error("over {} {what}, more than a neighbours file can hold: {hint}", u32::MAX)]
    TooLarge {
        /// What there are too many of.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
}

/// An open neighbours file. Cloning shares the bytes.
#[derive(Clone)]
pub struct Neighbours {
    bytes: Bytes,
    digest: [u8; 32],
    header: Header,
}

impl fmt::Debug for Neighbours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Neighbours").field("header", &self.header).finish_non_exhaustive()
    }
}

impl Neighbours {
    /// Opens the bytes of a neighbours file. Bytes that start at a multiple of 4, as those of a mapping do, are read in
    /// place; others are copied once. Only the header is read.
    ///
    /// # Errors
    /// If the header is damaged, incomplete or of another format, or the file does not have the length that it states.
    /// Never panics.
    pub fn open(bytes: Bytes) -> Result<Self, NeighboursError> {
        let bytes = aligned(bytes);
        check_preamble(&bytes)?;
        let digest = check_hash(&bytes[CHECKED_FROM..HEADER], &bytes[16..CHECKED_FROM])?;
        let header = Header::read(&bytes);
        let (expected, found) = (header.file_bytes(), bytes.len() as u64);
        if expected != found {
            return Err(NeighboursError::Length { expected, found });
        }
        check_recency(header.recency)?;
        Ok(Self { bytes, digest, header })
    }

    /// Compares the whole content with the checksum in the header and checks that it is a neighbours file's. Before
    /// that, damage to the file only makes scores worse.
    ///
    /// # Errors
    /// [`NeighboursError::Checksum`], or [`NeighboursError::Malformed`] if the file was written that way.
    pub fn verify(&self) -> Result<(), NeighboursError> {
        check_hash(&self.bytes[HEADER..], &self.bytes[CHECKED_FROM..CHECKED_FROM + 32])?;
        self.check_content().map_err(NeighboursError::Malformed)
    }

    fn check_content(&self) -> Result<(), String> {
        let Sections { popular, counts, successors, neighbours } = self.sections();
        let rank = |item: &u32| counts.get(*item as usize).map(|&count| (std::cmp::Reverse(count), *item));
        if popular.iter().any(|&item| item >= self.items()) {
            return Err(format!("a popular item is not below the catalogue's {}", self.items()));
        }
        // As many items as there are, in an order without ties, are all items.
        if !popular.is_sorted_by(|a, b| rank(a) < rank(b)) {
            return Err("the popular items are not in descending order".to_owned());
        }
        for (what, rows) in [("successor", successors), ("neighbour", neighbours)] {
            rows.check(&self.header).map_err(|rule| format!("{what}s: {rule}"))?;
        }
        Ok(())
    }

    /// BLAKE3 of the header, which contains the checksum of everything else: equal digests give equal scores.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Number of items of the catalogue; every item is below it.
    #[must_use]
    pub fn items(&self) -> u32 {
        self.header.items
    }

    /// Number of histories that were counted.
    #[must_use]
    pub fn histories(&self) -> u32 {
        self.header.histories
    }

    /// What the file was built with.
    #[must_use]
    pub fn options(&self) -> NeighboursOptions {
        let Header { most, window, recency, .. } = self.header;
        NeighboursOptions { most, window, recency }
    }

    /// Size of the file in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns all items of the catalogue, the most popular first, ties by number. Items without any interaction are
    /// the last ones.
    pub fn popular(&self) -> impl Iterator<Item = u32> + '_ {
        self.sections().popular.iter().copied().filter(|&item| item < self.items())
    }

    /// How often the item occurs in all histories; 0 for an item outside the catalogue.
    #[must_use]
    pub fn count(&self, item: u32) -> u32 {
        self.sections().counts.get(item as usize).copied().unwrap_or(0)
    }

    /// Returns the items that follow this one directly, with their share of all that follow it, the largest first. It
    /// is in the share, but not among them, that an item follows itself.
    pub fn successors(&self, item: u32) -> impl Iterator<Item = (u32, f32)> + '_ {
        self.sections().successors.row(item, self.header)
    }

    /// Returns the items that users of this one have, with the cosine of both items' sets of users, the largest first.
    pub fn neighbours(&self, item: u32) -> impl Iterator<Item = (u32, f32)> + '_ {
        self.sections().neighbours.row(item, self.header)
    }

    /// Returns the content in place.
    fn sections(&self) -> Sections<'_> {
        let mut rest = &self.bytes[HEADER..];
        let mut take = |bytes: u64| {
            let length = usize::try_from(bytes).map_or(rest.len(), |length| length.min(rest.len()));
            let (section, after) = rest.split_at(length);
            rest = after;
            section
        };
        let sections = self.header.sections().map(&mut take);
        let [popular, counts, successors, successor_starts, neighbours, neighbour_starts] = sections;
        let rows =
            |entries, starts| Rows { entries: bytemuck::cast_slice(entries), starts: bytemuck::cast_slice(starts) };
        Sections {
            popular: bytemuck::cast_slice(popular),
            counts: bytemuck::cast_slice(counts),
            successors: rows(successors, successor_starts),
            neighbours: rows(neighbours, neighbour_starts),
        }
    }
}

/// The content, in place.
#[derive(Clone, Copy)]
struct Sections<'a> {
    /// Items, the most popular first.
    popular: &'a [u32],
    /// Occurrences by item.
    counts: &'a [u32],
    successors: Rows<'a>,
    neighbours: Rows<'a>,
}

/// Weighted items of every item.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// Item and bits of its weight.
    entries: &'a [[u32; 2]],
    /// Index of each item's first entry; the last one is the number of entries.
    starts: &'a [u32],
}

impl<'a> Rows<'a> {
    /// The entries of an item; none where the file is damaged.
    fn entries(self, item: u32) -> &'a [[u32; 2]] {
        let start = |at: usize| self.starts.get(at).map(|&start| start as usize);
        let at = item as usize;
        let range = start(at).zip(start(at + 1)).and_then(|(start, end)| self.entries.get(start..end));
        range.unwrap_or_default()
    }

    /// Items and weights of an item. What damage may have written is left out.
    fn row(self, item: u32, header: Header) -> impl Iterator<Item = (u32, f32)> + 'a {
        let entries = self.entries(item).iter().take(header.most as usize);
        let entries = entries.map(|&[item, weight]| (item, f32::from_bits(weight)));
        entries.filter(move |&(item, weight)| item < header.items && is_weight(weight))
    }

    /// Checks bounds and order.
    fn check(self, header: &Header) -> Result<(), String> {
        let ends = (self.starts.first().copied(), self.starts.last().map(|&end| end as usize));
        if ends != (Some(0), Some(self.entries.len())) || !self.starts.is_sorted() {
            return Err(format!("their starts do not ascend from 0 to {}", self.entries.len()));
        }
        for item in 0..header.items {
            let row = self.entries(item);
            let rule = if row.len() > header.most as usize {
                format!("has {} entries, at most {} are allowed", row.len(), header.most)
            } else if row.iter().any(|&[other, _]| other >= header.items || other == item) {
                format!("has an entry that is itself or not below the catalogue's {}", header.items)
            } else if !row.iter().all(|&[_, weight]| is_weight(f32::from_bits(weight))) {
                "has a weight that is not above 0 and at most 1".to_owned()
            } else if !row.is_sorted_by(stronger) {
                "has entries that are not in descending order".to_owned()
            } else {
                continue;
            };
            return Err(format!("item {item} {rule}"));
        }
        Ok(())
    }
}

/// Whether an entry stands before another: by weight, ties by number. Bits of positive numbers are in their order.
fn stronger(a: &[u32; 2], b: &[u32; 2]) -> bool {
    strongest_first(a, b).is_lt()
}

fn strongest_first(a: &[u32; 2], b: &[u32; 2]) -> std::cmp::Ordering {
    b[1].cmp(&a[1]).then(a[0].cmp(&b[0]))
}

/// The numbers of the header, after the checksums.
#[derive(Debug, Clone, Copy, Default)]
struct Header {
    items: u32,
    histories: u32,
    most: u32,
    window: u32,
    recency: f32,
    successors: u32,
    neighbours: u32,
}

impl Header {
    /// Offset of the first number.
    const WORDS: usize = CHECKED_FROM + 32;

    /// Reads the header from at least [`HEADER`] bytes.
    fn read(bytes: &[u8]) -> Self {
        let word = |place: usize| word_at(bytes, Self::WORDS + 4 * place);
        Self {
            items: word(0),
            histories: word(1),
            most: word(2),
            window: word(3),
            recency: f32::from_bits(word(4)),
            successors: word(5),
            neighbours: word(6),
        }
    }

    /// The numbers in the order of the file.
    fn words(&self) -> [u32; 7] {
        let recency = self.recency.to_bits();
        [self.items, self.histories, self.most, self.window, recency, self.successors, self.neighbours]
    }

    /// Bytes of popular items, counts, successors and their starts, neighbours and their starts.
    fn sections(&self) -> [u64; 6] {
        let [items, successors, neighbours] = [self.items, self.successors, self.neighbours].map(u64::from);
        [4 * items, 4 * items, 8 * successors, 4 * (items + 1), 8 * neighbours, 4 * (items + 1)]
    }

    fn file_bytes(&self) -> u64 {
        HEADER as u64 + self.sections().iter().sum::<u64>()
    }
}

/// Checks magic, byte order, version and the length of the header.
fn check_preamble(bytes: &[u8]) -> Result<(), NeighboursError> {
    match Preamble::of(bytes, MAGIC, HEADER) {
        Preamble::Magic(found) => Err(NeighboursError::Magic(found)),
        Preamble::Short => Err(NeighboursError::Length { expected: HEADER as u64, found: bytes.len() as u64 }),
        Preamble::ByteOrder => Err(NeighboursError::ByteOrder),
        Preamble::Version(VERSION) => Ok(()),
        Preamble::Version(found) => Err(NeighboursError::Version(found)),
    }
}

impl From<Mismatch> for NeighboursError {
    fn from(Mismatch { expected, found }: Mismatch) -> Self {
        Self::Checksum { expected, found }
    }
}

/// Refuses what is not above 0 and at most 1.
fn check_recency(recency: f32) -> Result<(), NeighboursError> {
    if is_weight(recency) { Ok(()) } else { Err(NeighboursError::Recency(recency)) }
}

fn is_weight(value: f32) -> bool {
    value > 0.0 && value <= 1.0
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
