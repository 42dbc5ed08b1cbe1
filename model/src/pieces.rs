//! Texts that are tokenised piece by piece, with the ids of pieces kept: prompts repeat the lines of a template and
//! those of an item, and every try of a history repeats those of the last. Texts of a tokenizer that is not known to
//! allow it (see [`cuts`](super::cuts)) are tokenised whole.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cuts::{cuts, pieces};
use super::{ModelError, Tokenizer};

/// A tokenizer that remembers the pieces of texts. Threads may share it, and clones share what is remembered.
#[derive(Debug, Clone)]
pub struct PieceTokenizer {
    tokenizer: Tokenizer,
    kept: Arc<KeptPieces>,
}

impl PieceTokenizer {
    /// A tokenizer that remembers nothing yet.
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, kept: Arc::default() }
    }

    /// The ids of a text: those of [`Tokenizer::encode`].
    ///
    /// # Errors
    /// [`ModelError::Tokenize`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        let Some(ends) = self.tokenizer.ends() else {
            return self.tokenizer.encode(text, add_special_tokens);
        };
        let (before, after): (&[u32], &[u32]) =
            if add_special_tokens { (&ends.before, &ends.after) } else { (&[], &[]) };
        // A token has about four bytes.
        let mut ids = Vec::with_capacity(text.len() / 3 + before.len() + after.len());
        ids.extend(before);
        for piece in pieces(text, cuts(text)) {
            self.kept.extend(&mut ids, piece, || self.tokenizer.encode(piece, false))?;
        }
        ids.extend(after);
        Ok(ids)
    }
}

/// Parts that are locked one by one: of 16 threads two rarely meet in one.
const PARTS: usize = 64;

/// Bytes of a generation of a part. Two generations of all parts are 32 MiB: 150,000 lines of 60 bytes, more items than
/// most catalogues have, and a sixteenth of the default of `[run] memory_mb`.
const GENERATION_BYTES: usize = 256 << 10;

/// What a piece takes beside its text and ids: two fat pointers in a table that is at least half full, and two
/// allocations.
const ENTRY_BYTES: usize = 96;

/// The ids of pieces.
#[derive(Debug)]
struct KeptPieces {
    hasher: RandomState,
    parts: [Mutex<Generations>; PARTS],
}

impl Default for KeptPieces {
    fn default() -> Self {
        Self { hasher: RandomState::new(), parts: std::array::from_fn(|_| Mutex::default()) }
    }
}

type Pieces = HashMap<Box<str>, Box<[u32]>>;

/// Pieces that were used lately: if the new ones are too many they become the old ones, and the old ones go.
#[derive(Debug, Default)]
struct Generations {
    new: Pieces,
    old: Pieces,
    /// Of the new ones.
    bytes: usize,
}

impl KeptPieces {
    /// Appends the ids of a piece, which are made if they are not known. Threads that make them at once make the same.
    fn extend<E>(&self, ids: &mut Vec<u32>, piece: &str, make: impl FnOnce() -> Result<Vec<u32>, E>) -> Result<(), E> {
        if let Some(known) = self.part(piece).find(piece) {
            ids.extend(known);
            return Ok(());
        }
        let made = make()?;
        ids.extend(&made);
        self.part(piece).keep(piece.into(), made.into());
        Ok(())
    }

    fn part(&self, piece: &str) -> MutexGuard<'_, Generations> {
        let part = self.hasher.hash_one(piece) % PARTS as u64;
        let part = &self.parts[usize::try_from(part).unwrap_or_default()];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    fn find(&mut self, piece: &str) -> Option<&[u32]> {
        if let Some((piece, ids)) = self.old.remove_entry(piece) {
            self.keep(piece, ids);
        }
        self.new.get(piece).map(|ids| &**ids)
    }

    fn keep(&mut self, piece: Box<str>, ids: Box<[u32]>) {
        let bytes = piece.len() + size_of_val(&*ids) + ENTRY_BYTES;
        if bytes > GENERATION_BYTES / 4 {
            return;
        }
        if self.bytes + bytes > GENERATION_BYTES {
            self.old = std::mem::take(&mut self.new);
            self.bytes = 0;
        }
        if self.new.insert(piece, ids).is_none() {
            self.bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As bytes, so that every text has ids of its own.
    fn ids_of(piece: &str) -> Vec<u32> {
        piece.bytes().map(u32::from).collect()
    }

    fn asked(kept: &KeptPieces, piece: &str) -> bool {
        let (mut ids, mut made) = (vec![7], false);
        let make = || -> Result<_, ()> {
            made = true;
            Ok(ids_of(piece))
        };
        kept.extend(&mut ids, piece, make).unwrap();
        assert_eq!(ids, [vec![7], ids_of(piece)].concat());
        made
    }

    #[test]
    fn a_piece_is_made_once_and_one_in_use_stays_while_others_come_and_go() {
        let kept = KeptPieces::default();
        assert!(asked(&kept, "- Heat | 4 stars\n") && !asked(&kept, "- Heat | 4 stars\n"));
        for number in 0..200_000 {
            assert!(asked(&kept, &format!("- Film {number} | 4 stars\n")));
            assert!(!asked(&kept, "- Heat | 4 stars\n"), "gone at {number}");
        }
        assert!(asked(&kept, "- Film 0 | 4 stars\n"));
        for part in &kept.parts {
            let part = part.lock().unwrap();
            let sizes = [&part.new, &part.old].map(|pieces| {
                pieces.iter().map(|(piece, ids)| piece.len() + 4 * ids.len() + ENTRY_BYTES).sum::<usize>()
            });
            assert!(sizes[0] == part.bytes && sizes.iter().all(|size| *size <= GENERATION_BYTES), "{sizes:?}");
        }
    }

    #[test]
    fn a_piece_as_large_as_a_part_is_not_kept() {
        let (kept, large) = (KeptPieces::default(), "x".repeat(GENERATION_BYTES));
        assert!(asked(&kept, &large) && asked(&kept, &large));
    }
}
