//! The items that lists are made of.

use laser_decode::{Allowed, CodeShares, LeafShares, Neighbours, Seen, Stock, Trie};

/// The items of a run.
#[derive(Debug, Clone)]
pub struct Catalogue {
    /// The identifiers.
    pub trie: Trie,
    /// For each level of the trie and each of its codes the token that the model has for it.
    pub tokens: Vec<Vec<u32>>,
    /// Which leaves may be listed.
    pub stock: Stock,
    /// What the histories of all users say of the items, for drafts.
    pub counted: Option<Counted>,
    /// What they say of the codes, for drafts by retrieval.
    pub codes: Option<CodeShares>,
}

/// What the histories of all users say of the items, which are numbered as in the trie.
#[derive(Debug, Clone)]
pub struct Counted {
    pub(crate) neighbours: Neighbours,
    pub(crate) shares: LeafShares,
}

impl Counted {
    /// Of the items of a trie.
    #[must_use]
    pub fn new(trie: Trie, neighbours: Neighbours) -> Self {
        let shares = LeafShares::new(trie, |item| f64::from(neighbours.count(item)));
        Self { neighbours, shares }
    }
}

impl Catalogue {
    /// What may be listed but for what a user has `seen`.
    pub(crate) fn allowed<'a>(&'a self, seen: &'a Seen) -> Allowed<'a> {
        Allowed::new(&self.trie, &self.stock, seen)
    }

    /// The tokens of what is allowed to follow a node, in the order of the codes.
    pub(crate) fn tokens_below(&self, allowed: &Allowed<'_>, node: u32, tokens: &mut Vec<u32>) {
        let of_code = self.tokens.get(self.trie.depth(node)).map_or(&[][..], Vec::as_slice);
        allowed.children_with_codes(node).for_each(|(code, _)| tokens.push(of_code[usize::from(code)]));
    }

    /// The token of a node's last code.
    pub(crate) fn token(&self, node: u32) -> u32 {
        self.tokens[self.trie.depth(node) - 1][usize::from(self.trie.code(node))]
    }
}
