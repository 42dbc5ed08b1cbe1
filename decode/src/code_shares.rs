//! Which code comes next by the histories of all users: drafts by retrieval, like AtSpeed's baseline without a network
//! (DARE in Lin et al., ICLR 2025).
//!
//! Every history is a text of codes, those of its items one behind the other, and a [pool](crate::Pool) holds them all.
//! What came before a beam is the user's own history and the beam's prefix. The codes that followed the longest end of
//! it anywhere share by how often they did; codes that did not back off to the next shorter end, at [`BACK_OFF`] of its
//! share, as in Brants et al. (2007, "stupid backoff"), and what nobody ever chose behind such a prefix shares alike.
//!
//! A code's token is its number in its level's table plus the codes of all levels before, so an end can match only
//! where it is at the same place of an identifier.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use crate::Token;
use crate::beams::{Expected, log_share};
use crate::frequent::Branch;
use crate::pool::{Pool, PoolError, PoolMeta};
use crate::pool_builder::build_pool;
use crate::suffix::{Match, Matches};
use crate::trie::Trie;

/// Codes of the longest end that is looked for: four items of four codes. What pools know of longer ones is cut off.
const ORDER: usize = 16;

/// What a shorter end's share counts where a longer one has none (Brants et al.).
const BACK_OFF: f64 = 0.4;

/// Builds the bytes of the pool file of these histories, each the items of a user by their number in the trie, oldest
/// first. Numbers beyond the items are passed over. The file has 8 bytes per code and the tables of its frequent ends
/// (10.5 in all on Amazon Beauty); building it takes about 25.
///
/// # Errors
/// If there are more codes than a pool holds ([`TOKENS_MAX`](crate::TOKENS_MAX), with one for the end of each history).
pub fn build_code_pool(
    trie: &Trie,
    histories: impl IntoIterator<Item = impl AsRef<[u32]>>,
) -> Result<Vec<u8>, PoolError> {
    let tokens = CodeTokens::new(trie);
    let texts = histories.into_iter().map(|history| tokens.of_items(trie, history.as_ref()));
    build_pool(&tokens.meta(trie), texts)
}

/// What codes came next in all histories. Cloning shares the bytes.
#[derive(Debug, Clone)]
pub struct CodeShares {
    trie: Trie,
    tokens: CodeTokens,
    pool: Pool,
}

impl CodeShares {
    /// Opens the pool file of a trie's histories and verifies all of it.
    ///
    /// # Errors
    /// Damage, and a pool that was [built](build_code_pool) for another trie.
    pub fn open(bytes: Bytes, trie: Trie) -> Result<Self, PoolError> {
        let pool = Pool::open(bytes)?;
        let tokens = CodeTokens::new(&trie);
        let (found, expected) = (pool.meta(), tokens.meta(&trie));
        if *found != expected {
            return Err(expected.refused(format!(
                "{:?} has the codes of another catalogue ({} where this one has {}): build it for this one",
                found.name, found.end_of_text, expected.end_of_text
            )));
        }
        pool.verify()?;
        Ok(Self { trie, tokens, pool })
    }

    /// What comes after a history: items by their number in the trie, oldest first.
    #[must_use]
    pub fn of_user(&self, history: &[u32]) -> UserCodes {
        let first = history.len().saturating_sub(ORDER.div_ceil(self.trie.levels()));
        let codes = self.tokens.of_items(&self.trie, &history[first..]);
        let (suffixes, mut arena) = (self.pool.suffixes(), Vec::new());
        let root =
            codes.iter().fold(Matches::default(), |from, &token| suffixes.advance(&mut arena, &from, token, ORDER));
        UserCodes { shares: self.clone(), arena, nodes: HashMap::from([(0, root)]), read: Vec::new() }
    }
}

/// What codes a user is expected to choose. Memory: about a hundred bytes for each prefix that was asked for.
#[derive(Debug, Clone)]
pub struct UserCodes {
    shares: CodeShares,
    arena: Vec<Match>,
    /// Of prefixes where their ends occur; always that of the root.
    nodes: HashMap<u32, Matches>,
    read: Vec<Branch>,
}

impl UserCodes {
    /// Where the ends of the history and a node's prefix occur. Goes up to a prefix that is known, at most a level at a
    /// time.
    fn matches(&mut self, node: u32) -> Matches {
        if let Some(known) = self.nodes.get(&node) {
            return known.clone();
        }
        let Some(parent) = self.shares.trie.parent(node) else { return Matches::default() };
        let from = self.matches(parent);
        let CodeShares { trie, tokens, pool } = &self.shares;
        let found = pool.suffixes().advance(&mut self.arena, &from, tokens.of_node(trie, node), ORDER);
        self.nodes.insert(node, found.clone());
        found
    }

    /// The share of each child of a node; they sum to 1.
    fn shares(&mut self, node: u32, children: &[u32]) -> Vec<f64> {
        let matches = self.matches(node);
        let CodeShares { trie, tokens, pool } = &self.shares;
        let (suffixes, mut shares, mut weight) = (pool.suffixes(), vec![0.0; children.len()], 1.0);
        let place = |token: Token| children.binary_search_by_key(&token, |&child| tokens.of_node(trie, child)).ok();
        for &end in self.arena[matches.at].iter().rev() {
            let found = suffixes.children(end, 0.0, &mut self.read).branches;
            let chosen = || found.iter().filter_map(|&[token, _, count]| Some((place(token)?, f64::from(count))));
            let all: f64 = chosen().map(|(_, count)| count).sum();
            for (at, count) in chosen().filter(|_| all > 0.0) {
                if shares[at] == 0.0 {
                    shares[at] = weight * count / all;
                }
            }
            weight *= if all > 0.0 { BACK_OFF } else { 1.0 };
        }
        let even = weight / children.len().max(1) as f64;
        shares.iter_mut().filter(|share| **share == 0.0).for_each(|share| *share = even);
        let sum: f64 = shares.iter().sum();
        shares.iter_mut().for_each(|share| *share /= sum);
        shares
    }
}

impl Expected for UserCodes {
    fn log_shares(&mut self, node: u32, children: &[u32], into: &mut Vec<f32>) {
        into.extend(self.shares(node, children).into_iter().map(log_share));
    }
}

/// The tokens that stand for codes.
#[derive(Debug, Clone)]
struct CodeTokens {
    /// For each level the codes of those before; behind them the codes of all.
    firsts: Arc<[Token]>,
}

impl CodeTokens {
    fn new(trie: &Trie) -> Self {
        let sums = trie.meta().codes.iter().scan(0, |sum, codes| {
            // 16 levels of at most 65,536 codes.
            *sum += Token::try_from(codes.len()).unwrap_or(Token::MAX);
            Some(*sum)
        });
        Self { firsts: std::iter::once(0).chain(sums).collect() }
    }

    /// The description of a trie's pool: its token for the end of a history is behind those of all codes.
    fn meta(&self, trie: &Trie) -> PoolMeta {
        let end_of_text = self.firsts.last().copied().unwrap_or(0);
        PoolMeta { name: "histories".to_owned(), tokenizer: trie.digest(), vocab_size: end_of_text + 1, end_of_text }
    }

    /// The token of a node's last code.
    fn of_node(&self, trie: &Trie, node: u32) -> Token {
        let level = trie.depth(node).saturating_sub(1);
        self.firsts.get(level).map_or(0, |first| first + Token::from(trie.code(node)))
    }

    /// The tokens of the items of a history.
    fn of_items(&self, trie: &Trie, items: &[u32]) -> Vec<Token> {
        let known = items.iter().filter(|&&item| (item as usize) < trie.items());
        let nodes = known.flat_map(|&item| trie.path(trie.leaf_of_item(item)));
        nodes.map(|node| self.of_node(trie, node)).collect()
    }
}

#[cfg(test)]
mod tests;
