//! Temporary branches: texts that are drafted from while one text is generated, and dropped with it.
//!
//! Every token is chained to its previous occurrence, so a context is matched by following the chain of its last token
//! and comparing backwards. Appending costs a hash look-up; matching costs the occurrences of one token, at most
//! [`OCCURRENCES_MAX`]. Takes about 20 bytes per token.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::Token;
use crate::tree::Source;

/// Most occurrences of a token that are followed, most recent first. The most frequent token of a prompt of 2,000
/// occurs about 100 times; only a text that loops exceeds this.
const OCCURRENCES_MAX: usize = 256;

const NONE: u32 = u32::MAX;

/// Fibonacci hashing. A token is looked up at every node, and the default hasher would take a tenth of the time of a
/// draft.
#[derive(Debug, Clone, Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(byte.into());
        }
    }

    fn write_u32(&mut self, token: u32) {
        self.0 = (self.0 ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A growing text with the chains of its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Temporary {
    pub(crate) source: Source,
    tokens: Vec<Token>,
    previous: Vec<u32>,
    latest: HashMap<Token, u32, BuildHasherDefault<TokenHasher>>,
}

impl Temporary {
    pub(crate) fn new(source: Source) -> Self {
        let (tokens, previous, latest) = (Vec::new(), Vec::new(), HashMap::default());
        Self { source, tokens, previous, latest }
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Appends a token.
    ///
    /// # Panics
    /// If the text already has 2^32 - 1 tokens.
    pub(crate) fn push(&mut self, token: Token) {
        let at = u32::try_from(self.tokens.len()).expect("a text has fewer than 2^32 tokens");
        self.tokens.push(token);
        self.previous.push(self.latest.insert(token, at).unwrap_or(NONE));
    }

    /// Calls `occurrence` with every position (most recent first) that follows the end of a context, and the number of
    /// tokens that agree there. `recent` holds the last tokens of the context, newest first. The position after the
    /// last token is included, although nothing follows there yet.
    pub(crate) fn matches(&self, recent: &[Token], mut occurrence: impl FnMut(usize, usize)) {
        let Some(newest) = recent.first() else { return };
        let mut at = self.latest.get(newest).copied().unwrap_or(NONE);
        for _ in 0..OCCURRENCES_MAX {
            if at == NONE {
                return;
            }
            let next = at as usize + 1;
            let before = self.tokens[..next].iter().rev();
            let agree = before.zip(recent).take_while(|(a, b)| a == b).count();
            occurrence(next, agree);
            at = self.previous[at as usize];
        }
    }
}
