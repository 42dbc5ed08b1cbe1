//! Prompts that one coordinator renders for another, while a run is planned.
//!
//! An object holds a range of entities. It is named by the range's number and the digest of what the prompts were made
//! of, so that what an earlier planning has left is either right or not found. Its content:
//!
//! ```text
//! BLAKE3 digest of the rest, 32 bytes
//! lz4 block, its length before it; unpacked, of each entity:
//!     number of tokens, u32; the tokens, u32 each
//!     or 2^32 - 1; length of the reason why there is no prompt, u32; the reason, UTF-8
//! ```
//!
//! All numbers are little-endian.

use std::collections::HashSet;

use bytes::Bytes;
use laser_schema::Digest;

use super::{PROMPTS, RunStore};
use crate::location::{Location, LocationError};

/// In place of the number of tokens where there is no prompt.
const NO_PROMPT: u32 = u32::MAX;

const DIGEST: usize = 32;

/// The tokens of a prompt, or the reason why an entity has none.
pub type Prompt = Result<Vec<u32>, String>;

impl RunStore {
    /// Writes the prompts of a range.
    ///
    /// # Errors
    /// The store's.
    pub async fn write_prompts(&self, range: u64, of: &Digest, prompts: &[Prompt]) -> Result<(), LocationError> {
        self.file(range, of).write(encode(prompts)).await
    }

    /// The prompts of a range of so many entities; `None` if they are not there, or damaged.
    ///
    /// # Errors
    /// The store's.
    pub async fn prompts(&self, range: u64, of: &Digest, count: usize) -> Result<Option<Vec<Prompt>>, LocationError> {
        let bytes = self.file(range, of).read_optional().await?;
        Ok(bytes.and_then(|bytes| decode(&bytes)).filter(|prompts| prompts.len() == count))
    }

    fn file(&self, range: u64, of: &Digest) -> Location {
        self.folder().join(PROMPTS.name).join(&prompts_name(range, of))
    }

    /// The names of all shared prompts.
    ///
    /// # Errors
    /// The store's.
    pub async fn known_prompts(&self) -> Result<HashSet<String>, LocationError> {
        let listed = self.folder().join(PROMPTS.name).list().await?;
        Ok(listed.into_iter().map(|listed| listed.name).collect())
    }

    /// Removes all shared prompts: once there is a plan, nobody needs them.
    ///
    /// # Errors
    /// The store's.
    pub async fn remove_prompts(&self) -> Result<(), LocationError> {
        let names = self.known_prompts().await?.into_iter().collect();
        self.folder().join(PROMPTS.name).remove_below(names).await
    }
}

/// The name of the prompts of a range in their folder.
pub fn prompts_name(range: u64, of: &Digest) -> String {
    format!("{range:08}-{}{}", of.as_str(), PROMPTS.ending)
}

fn encode(prompts: &[Prompt]) -> Bytes {
    let mut raw = Vec::new();
    for prompt in prompts {
        match prompt {
            Ok(tokens) => {
                raw.extend(length(tokens.len()));
                raw.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            }
            Err(reason) => {
                raw.extend(NO_PROMPT.to_le_bytes());
                raw.extend(length(reason.len()));
                raw.extend(reason.as_bytes());
            }
        }
    }
    let packed = lz4_flex::compress_prepend_size(&raw);
    [blake3::hash(&packed).as_bytes(), &*packed].concat().into()
}

fn length(length: usize) -> [u8; 4] {
    u32::try_from(length).unwrap_or(NO_PROMPT).to_le_bytes()
}

fn decode(bytes: &[u8]) -> Option<Vec<Prompt>> {
    let (digest, packed) = bytes.split_at_checked(DIGEST)?;
    if blake3::hash(packed).as_bytes() != digest {
        return None;
    }
    let raw = lz4_flex::decompress_size_prepended(packed).ok()?;
    let mut rest = &raw[..];
    let mut prompts = Vec::new();
    while !rest.is_empty() {
        prompts.push(match number(&mut rest)? {
            NO_PROMPT => {
                let length = number(&mut rest)? as usize;
                let reason = std::str::from_utf8(take(&mut rest, length)?).ok()?;
                Err(reason.to_owned())
            }
            count => {
                let tokens = take(&mut rest, (count as usize).checked_mul(4)?)?;
                Ok(tokens.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect())
            }
        });
    }
    Some(prompts)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_le_bytes(*number))
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(count)?;
    *rest = after;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn prompts() -> impl Strategy<Value = Vec<Prompt>> {
        vec(prop_oneof![vec(any::<u32>(), 0..40).prop_map(Ok), ".{0,20}".prop_map(Err)], 0..20)
    }

    proptest! {
        #[test]
        fn prompts_come_back(prompts in prompts()) {
            prop_assert_eq!(decode(&encode(&prompts)), Some(prompts));
        }

        #[test]
        fn a_damaged_object_is_none(prompts in prompts(), at: prop::sample::Index, bit in 0..8_u8) {
            let mut bytes = encode(&prompts).to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert_eq!(decode(&bytes), None);
            prop_assert_eq!(decode(&bytes[..at]), None);
        }
    }
}
