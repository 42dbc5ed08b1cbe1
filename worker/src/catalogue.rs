//! The items that lists are made of.

use laser_decode::{Allowed, Stock, Trie};

/// The items of a run.
#[derive(Debug, Clone)]
pub struct Catalogue {
    /// The identifiers.
    pub trie: Trie,
    /// For each level of the trie and each of its codes the token that the model has for it.
    pub tokens: Vec<Vec<u32>>,
    /// Which leaves may be listed.
    pub stock: Stock,
}

impl Catalogue {
    /// What may be listed but for the leaves that a user has `seen`.
    pub(crate) fn allowed(&self, seen: &[u32]) -> Allowed<'_> {
        Allowed::new(&self.trie, &self.stock, seen)
    }

    /// The token of a node's last code.
    pub(crate) fn token(&self, node: u32) -> u32 {
        self.tokens[self.trie.depth(node) - 1][usize::from(self.trie.code(node))]
    }
}
