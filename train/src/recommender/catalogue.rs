//! Items by their identifiers, and histories of items as prompts.

use anyhow::{Result, ensure};
use laser_decode::Token;
use laser_schema::Digest;

use crate::recommender::vocabulary::{CodeVocabulary, START};

/// The items that can be recommended, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalogue {
    vocabulary: CodeVocabulary,
    /// Of each item the tokens of its codes; empty: it has no identifier.
    identifiers: Vec<Vec<Token>>,
}

impl Catalogue {
    /// Takes the identifiers of all items by number, one token per level; an empty one says that the item has none.
    ///
    /// # Errors
    /// The first item whose tokens are not codes of their levels.
    pub fn new(vocabulary: CodeVocabulary, identifiers: Vec<Vec<Token>>) -> Result<Self> {
        let depth = vocabulary.depth();
        for (item, codes) in identifiers.iter().enumerate().filter(|(_, codes)| !codes.is_empty()) {
            ensure!(codes.len() == depth, "item {item}: {} codes, expected {depth}", codes.len());
            for (level, &token) in codes.iter().enumerate() {
                let allowed = vocabulary.level(level);
                ensure!(
                    allowed.contains(&(token as usize)),
                    "item {item}: token {token} is not among the {} of level {}, which begin at {}",
                    allowed.len(),
                    level + 1,
                    allowed.start
                );
            }
        }
        Ok(Self { vocabulary, identifiers })
    }

    /// The codes of its identifiers.
    #[must_use]
    pub fn vocabulary(&self) -> &CodeVocabulary {
        &self.vocabulary
    }

    /// The tokens of all items that have an identifier.
    pub(crate) fn identifiers(&self) -> impl Iterator<Item = &[Token]> {
        self.identifiers.iter().map(Vec::as_slice).filter(|codes| !codes.is_empty())
    }

    /// The tokens of an item's codes.
    ///
    /// # Errors
    /// An item that there is not, or that has no identifier.
    pub fn identifier(&self, item: u32) -> Result<&[Token]> {
        let known = self.identifiers.get(item as usize);
        let codes = known.map(Vec::as_slice).unwrap_or_default();
        ensure!(
            !codes.is_empty(),
            "item {item}: {}; leave it out of the histories, or give it one",
            if known.is_some() { "has no identifier" } else { "is not in the catalogue" }
        );
        Ok(codes)
    }

    /// The prompt that asks for the item after a history, oldest item first: the start `<s>`, then the codes of its
    /// last `max_items` items, level by level and nothing between, as in `<s><a_47><b_103><c_234><d_99><a_130>…`. What
    /// is generated are the codes of the next item. An empty history is asked with the start alone.
    ///
    /// In training, every item is preceded by such a prompt, of at most `max_items` items.
    ///
    /// # Errors
    /// Those of [`identifier`](Self::identifier).
    pub fn prompt(&self, history: &[u32], max_items: usize) -> Result<Vec<Token>> {
        let items = &history[history.len().saturating_sub(max_items)..];
        let mut tokens = Vec::with_capacity(positions(items.len(), self.vocabulary.depth()));
        tokens.push(START);
        for &item in items {
            tokens.extend_from_slice(self.identifier(item)?);
        }
        Ok(tokens)
    }

    /// The digest of codes and identifiers.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of_json(&(self.vocabulary.levels(), &self.identifiers))
    }
}

/// The number of tokens in a prompt of so many items.
pub(crate) fn positions(items: usize, depth: usize) -> usize {
    1 + items * depth
}
