//! The pool: earlier texts of a group with a suffix array over them, in one immutable file.
//!
//! A suffix array is the trie of all suffixes at any depth, in 4 bytes per token beside the 4 of the token itself. A
//! context is a range of it, a child is a sub-range, and the width is the frequency. The view reads the file's bytes in
//! place (mapped, shared by all threads; a clone is a reference count).
//!
//! Opening checks the header, which has its own checksum, and the file's length, so its cost does not depend on the
//! size. [`Pool::verify`] reads everything (about 1 GB/s) and compares it with the checksum in the header. Verified or
//! not, drafting from any pool that opens neither panics nor yields a token outside the vocabulary. The layout is in
//! docs/formats.md.

use std::fmt;

use bytes::Bytes;
use thiserror::Error;

use crate::Token;
use crate::frequent::Frequent;
use crate::runners_up::{PoolText, RunnersUp, other_bits, token_bits};
use crate::sealed::{CHECKED_FROM, Mismatch, Preamble, aligned, check_hash, word_at};
use crate::suffix::Suffixes;

pub(crate) const MAGIC: [u8; 8] = *b"LASRPOOL";
pub(crate) const VERSION: u32 = 4;
/// Length of the fixed part of the header, after which the name follows.
pub(crate) const HEADER: usize = 156;

/// Most tokens a pool can hold, including ends of texts: suffix array construction indexes with i32.
pub const TOKENS_MAX: usize = i32::MAX as usize;
/// Largest vocabulary: 60 times today's largest. Construction takes memory proportional to it.
pub const VOCABULARY_MAX: u32 = 1 << 24;

/// The description stored in a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolMeta {
    /// The pool's name in routing and errors.
    pub name: String,
    /// Fingerprint of the tokenizer that made the tokens.
    pub tokenizer: [u8; 32],
    /// Size of the tokenizer's vocabulary; every token is below it.
    pub vocab_size: u32,
    /// The token that ends every text.
    pub end_of_text: Token,
}

/// Why a pool could not be built, opened or used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PoolError {
    /// The magic number does not match.
    #[error("not a pool file: it starts with {0:02x?}, expected {MAGIC:02x?} (\"LASRPOOL\")")]
    Magic([u8; 8]),
    /// Made by another version of the format.
    #[error("pool file has format version {0}, this build reads {VERSION}: rebuild the pool")]
    Version(u32),
    /// The file's byte order is not this machine's.
    #[error("pool file is little-endian, this machine is not: pools need a little-endian machine")]
    ByteOrder,
    /// The file is cut off or has a tail.
    #[error("pool file has {found} bytes, expected {expected}: it is truncated or damaged, rebuild it")]
    Length {
        /// Bytes that the header requires.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The content differs from what was written.
    #[error("pool file is damaged: checksum {found}, expected {expected}: rebuild the pool")]
    Checksum {
        /// The checksum in the header, in hexadecimal.
        expected: String,
        /// That of the content, in hexadecimal.
        found: String,
    },
    /// The checksum holds but the content does not make a pool.
    #[error("pool file is malformed: {0}: it was not written by laser, rebuild it")]
    Malformed(String),
    /// Vocabulary, tokenizer or texts are not what the pool needs.
    #[error("pool {pool}: {reason}")]
    Refused {
        /// The pool's name.
        pool: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}

/// An open pool. Cloning shares the bytes.
#[derive(Clone)]
pub struct Pool {
    bytes: Bytes,
    meta: std::sync::Arc<PoolMeta>,
    digest: [u8; 32],
    header: Header,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Pool");
        f.field("meta", &self.meta).field("texts", &self.texts()).field("tokens", &self.tokens());
        f.finish_non_exhaustive()
    }
}

impl Pool {
    /// Opens the bytes of a pool file. Bytes that start at a multiple of 4, as those of a mapping do, are read in
    /// place; others are copied once. Only the header is read.
    ///
    /// # Errors
    /// If the header is damaged, incomplete or of another format, or the file does not have the length that it states.
    /// Never panics.
    pub fn open(bytes: Bytes) -> Result<Self, PoolError> {
        let bytes = aligned(bytes);
        check_preamble(&bytes)?;
        let header = Header::read(&bytes);
        let length = |expected: u64| PoolError::Length { expected, found: bytes.len() as u64 };
        let head = bytes.get(CHECKED_FROM..header.sections_at());
        let head = head.ok_or_else(|| length(header.file_bytes()))?;
        let digest = check_hash(head, &bytes[16..CHECKED_FROM])?;
        if header.file_bytes() != bytes.len() as u64 {
            return Err(length(header.file_bytes()));
        }
        let meta = header.meta(&bytes)?.into();
        Ok(Self { bytes, meta, digest, header })
    }

    /// Compares the whole content with the checksum in the header and checks that everything is in bounds. Before that,
    /// damage to the file only makes drafts worse.
    ///
    /// # Errors
    /// [`PoolError::Checksum`], or [`PoolError::Malformed`] if the file was written that way.
    pub fn verify(&self) -> Result<(), PoolError> {
        let content = &self.bytes[self.header.sections_at()..];
        check_hash(content, &self.bytes[CONTENT_HASH..CONTENT_HASH + 32])?;
        self.check_content()
    }

    /// Checks that tokens are within the vocabulary and suffixes within the tokens. It does not check that the suffixes
    /// are sorted or that the tables match: a pool where they do not only drafts badly.
    fn check_content(&self) -> Result<(), PoolError> {
        let Suffixes { tokens, ranks, runners_up, .. } = self.suffixes();
        let PoolMeta { vocab_size, end_of_text, .. } = *self.meta;
        let texts = tokens.iter().filter(|&&token| token == end_of_text).count();
        let rule = if tokens.iter().copied().chain(runners_up.tokens()).any(|token| token >= vocab_size) {
            format!("a token is not below the vocabulary's {vocab_size}")
        } else if ranks.iter().any(|&suffix| suffix as usize >= tokens.len()) {
            format!("a suffix starts at or beyond the {} tokens", tokens.len())
        } else if texts != self.texts() {
            format!("{texts} end-of-text tokens for {} texts", self.texts())
        } else if tokens.last().is_some_and(|&token| token != end_of_text) {
            "the last token does not end a text".to_owned()
        } else {
            return Ok(());
        };
        Err(PoolError::Malformed(rule))
    }

    /// Refuses the pool if it was built with another tokenizer than the model's.
    ///
    /// # Errors
    /// [`PoolError::Refused`], naming the pool and both fingerprints.
    pub fn expect_tokenizer(&self, tokenizer: &[u8; 32]) -> Result<(), PoolError> {
        if self.meta.tokenizer == *tokenizer {
            return Ok(());
        }
        Err(self.meta.refused(format!(
            "built with tokenizer {}, the model's is {}: rebuild the pool with the model's tokenizer",
            hex(&self.meta.tokenizer),
            hex(tokenizer)
        )))
    }

    /// Returns the description stored in the pool.
    #[must_use]
    pub fn meta(&self) -> &PoolMeta {
        &self.meta
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.meta.name
    }

    /// BLAKE3 of the header, which contains the checksum of everything else: equal digests give equal drafts.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Number of texts in the pool.
    #[must_use]
    pub fn texts(&self) -> usize {
        self.header.texts as usize
    }

    /// Number of tokens in the pool, including the end of each text.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.header.tokens as usize
    }

    /// How many of its tokens have runners-up.
    #[must_use]
    pub fn contested(&self) -> usize {
        self.header.contested as usize
    }

    /// The texts without their ends, in the order in which they were given.
    pub fn contents(&self) -> impl Iterator<Item = PoolText> {
        let Suffixes { tokens, runners_up, .. } = self.suffixes();
        let end = self.meta.end_of_text;
        let ends = tokens.iter().enumerate().filter(move |(_, token)| **token == end).map(|(place, _)| place);
        ends.scan(0, move |from, to| {
            let (tokens, runners_up) = (&tokens[*from..to], runners_up.between(tokens, *from, to));
            *from = to + 1;
            Some(PoolText { tokens: tokens.to_vec(), runners_up })
        })
    }

    /// Size of the file in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the `limit` most frequent branches of `length` tokens with their counts, most frequent first, ties by
    /// token. No branch crosses the end of a text. Costs a pass over the pool, so it is for inspection, not for
    /// drafting.
    #[must_use]
    pub fn top_branches(&self, length: usize, limit: usize) -> Vec<(Vec<Token>, u32)> {
        let Suffixes { tokens, ranks, .. } = self.suffixes();
        let branch = |suffix: &u32| {
            let branch = tokens.get(*suffix as usize..)?.get(..length)?;
            let inner = &branch[..length.saturating_sub(1)];
            (!inner.contains(&self.meta.end_of_text)).then_some(branch)
        };
        let branches: Vec<&[Token]> = ranks.iter().filter_map(branch).collect();
        let mut top: Vec<(Vec<Token>, u32)> = branches
            .chunk_by(|a, b| a == b)
            .map(|same| (same[0].to_vec(), u32::try_from(same.len()).unwrap_or(u32::MAX)))
            .collect();
        top.sort_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| a.cmp(b)));
        top.truncate(limit);
        top
    }

    /// Returns the tokens, their suffix array, its tables and the runners-up, in place.
    pub(crate) fn suffixes(&self) -> Suffixes<'_> {
        let [tokens, ranks, firsts, buckets, tables, branches, known, others, races] = self.header.sections();
        let mut rest = &self.bytes[self.header.sections_at()..];
        let mut take = |bytes: u64| {
            let length = usize::try_from(bytes).map_or(rest.len(), |len| len.min(rest.len()));
            let (section, after) = rest.split_at(length);
            rest = after;
            section
        };
        Suffixes {
            tokens: bytemuck::cast_slice(take(tokens)),
            ranks: bytemuck::cast_slice(take(ranks)),
            frequent: Frequent {
                tokens: bytemuck::cast_slice(take(firsts)),
                buckets: bytemuck::cast_slice(take(buckets)),
                shift: self.header.shift,
                tables: bytemuck::cast_slice(take(tables)),
                branches: bytemuck::cast_slice(take(branches)),
            },
            runners_up: RunnersUp {
                known: bytemuck::cast_slice(take(known)),
                others: bytemuck::cast_slice(take(others)),
                races: take(races),
                token_bits: token_bits(self.header.vocab_size),
            },
        }
    }
}

/// Offset of the content checksum.
pub(crate) const CONTENT_HASH: usize = 80;

/// The numbers of the header, after the checksums.
#[derive(Debug, Clone, Copy)]
struct Header {
    vocab_size: u32,
    end_of_text: Token,
    texts: u32,
    tokens: u32,
    firsts: u32,
    shift: u32,
    tables: u32,
    branches: u32,
    contested: u32,
    runners_up: u32,
    name_bytes: u32,
}

impl Header {
    /// Reads the header from at least [`HEADER`] bytes.
    fn read(bytes: &[u8]) -> Self {
        let word = |at: usize| word_at(bytes, at);
        Self {
            vocab_size: word(112),
            end_of_text: word(116),
            texts: word(120),
            tokens: word(124),
            firsts: word(128),
            shift: word(132).min(31),
            tables: word(136),
            branches: word(140),
            contested: word(144),
            runners_up: word(148),
            name_bytes: word(152),
        }
    }

    /// The sections follow the name at the next multiple of 4.
    fn sections_at(&self) -> usize {
        (HEADER + self.name_bytes as usize).next_multiple_of(4)
    }

    /// Bytes of tokens, suffix array, first tokens, buckets, tables, branches, and of runners-up the known places, the
    /// tokens and the races.
    fn sections(&self) -> [u64; 9] {
        let buckets = (self.vocab_size.saturating_sub(1) >> self.shift) + 1;
        let words = if self.contested == 0 { 0 } else { self.tokens.div_ceil(32) };
        let others = (u64::from(self.runners_up) * other_bits(token_bits(self.vocab_size)) as u64).div_ceil(32);
        [
            (4, self.tokens.into()),
            (4, self.tokens.into()),
            (12, self.firsts.into()),
            (4, buckets.into()),
            (16, self.tables.into()),
            (12, self.branches.into()),
            (12, words.into()),
            (4, others),
            (4, self.contested.div_ceil(4).into()),
        ]
        .map(|(width, count): (u64, u64)| width * count)
    }

    fn file_bytes(&self) -> u64 {
        self.sections_at() as u64 + self.sections().iter().sum::<u64>()
    }

    fn meta(&self, bytes: &[u8]) -> Result<PoolMeta, PoolError> {
        let name_end = HEADER + self.name_bytes as usize;
        let name = std::str::from_utf8(&bytes[HEADER..name_end])
            .map_err(|_| PoolError::Malformed("its name is not UTF-8".to_owned()))?;
        if bytes[name_end..self.sections_at()].iter().any(|&padding| padding != 0) {
            return Err(PoolError::Malformed("the padding after its name is not zero".to_owned()));
        }
        let mut tokenizer = [0; 32];
        tokenizer.copy_from_slice(&bytes[CHECKED_FROM..CHECKED_FROM + 32]);
        let meta =
            PoolMeta { name: name.to_owned(), tokenizer, vocab_size: self.vocab_size, end_of_text: self.end_of_text };
        meta.check()?;
        Ok(meta)
    }
}

impl PoolMeta {
    /// Checks that the vocabulary has a valid size and holds the end-of-text token.
    pub(crate) fn check(&self) -> Result<(), PoolError> {
        if self.vocab_size <= VOCABULARY_MAX && self.end_of_text < self.vocab_size {
            return Ok(());
        }
        Err(self.refused(format!(
            "vocabulary of {} tokens with end-of-text token {}: expected 1 to {VOCABULARY_MAX} tokens, the end-of-text \
             token among them",
            self.vocab_size, self.end_of_text
        )))
    }

    pub(crate) fn refused(&self, reason: String) -> PoolError {
        PoolError::Refused { pool: self.name.clone(), reason }
    }
}

/// Checks magic, byte order, version and the length of the header.
fn check_preamble(bytes: &[u8]) -> Result<(), PoolError> {
    match Preamble::of(bytes, MAGIC, HEADER) {
        Preamble::Magic(found) => Err(PoolError::Magic(found)),
        Preamble::Short => Err(PoolError::Length { expected: HEADER as u64, found: bytes.len() as u64 }),
        Preamble::ByteOrder => Err(PoolError::ByteOrder),
        Preamble::Version(VERSION) => Ok(()),
        Preamble::Version(found) => Err(PoolError::Version(found)),
    }
}

impl From<Mismatch> for PoolError {
    fn from(Mismatch { expected, found }: Mismatch) -> Self {
        Self::Checksum { expected, found }
    }
}

fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
pub(crate) mod tests;
