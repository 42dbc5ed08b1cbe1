//! Content digests: BLAKE3, 32 bytes, shown as hexadecimal.
//!
//! A digest names what a text depended on (model, tokenizer, prompt, specification, pool), so that a
//! later night can tell whether anything changed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The BLAKE3 digest of some bytes, as 64 lower-case hexadecimal characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).to_hex().to_string())
    }

    /// The digest of a value's JSON form. Struct fields keep their declared order, so equal values have equal digests.
    pub fn of_json(value: &impl Serialize) -> Self {
        // Serialising plain data into memory fails only on maps whose keys are not strings, which
        // no type of this crate has.
        Self::of(&serde_json::to_vec(value).unwrap_or_default())
    }

    /// The digest of several parts, each framed by its length.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finalize().to_hex().to_string())
    }

    /// A digest from raw bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(bytes).to_hex().to_string())
    }

    /// Whether a text has the form of a digest.
    #[must_use]
    pub fn is_shown(text: &str) -> bool {
        text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }

    /// All 64 hexadecimal characters.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The length of [`Self::short`].
    pub const SHORT: usize = 12;

    /// The first 12 characters: enough to tell apart everything one deployment will ever hold.
    pub fn short(&self) -> &str {
        self.0.get(..Self::SHORT).unwrap_or(&self.0)
    }
}

impl From<String> for Digest {
    /// A digest as it is shown. A text that is none equals no digest of anything.
    fn from(shown: String) -> Self {
        Self(shown)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_framed() {
        let ab_c = Digest::of_parts([b"ab".as_slice(), b"c"]);
        let a_bc = Digest::of_parts([b"a".as_slice(), b"bc"]);
        assert_ne!(ab_c, a_bc);
    }
}
