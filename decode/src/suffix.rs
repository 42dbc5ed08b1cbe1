//! Matching in a suffix array: a context is a range of suffixes, a child is a sub-range.
//!
//! The matches of a context are kept for every length of its end, up to an order, at once. Lengths that occur at the
//! same positions share one range, that of the shortest, so natural language has only three to five. Appending a token
//! costs one look-up per range; nothing is ever searched from the start. Everything is a function of the last `order`
//! tokens.
//!
//! Frequent contexts are looked up in their tables (see [`Frequent`]); of others all occurrences are read. Every access
//! is checked: damaged content gives a wrong result but no invalid access.

use std::ops::Range;

use crate::Token;
use crate::frequent::{Branch, FREQUENT, Frequent, NONE};
use crate::runners_up::{Race, RunnersUp};

/// Most occurrences that are read one by one where singletons, which no table lists, matter. Above it, one occurrence
/// is below a 128th of the mass.
const READ_MAX: usize = 128;

/// A text, the starts of its suffixes in lexicographic order, and the tables of its frequent contexts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Suffixes<'a> {
    pub(crate) tokens: &'a [Token],
    pub(crate) ranks: &'a [u32],
    pub(crate) frequent: Frequent<'a>,
    pub(crate) runners_up: RunnersUp<'a>,
}

/// The suffixes that begin with the last `len` tokens of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) len: usize,
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// The match's table, or that of the next longer context at the same positions; [`NONE`] if not frequent.
    pub(crate) table: u32,
}

impl Match {
    /// Number of occurrences of these tokens.
    pub(crate) fn count(&self) -> usize {
        self.count as usize
    }

    fn ranks(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count()
    }
}

/// The matches of one context: a slice of a shared arena, shortest first, each narrower than the one before. A match
/// holds for all lengths below the next one's, the last for those up to `longest`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Matches {
    pub(crate) at: Range<usize>,
    pub(crate) longest: usize,
}

/// The children of a match.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Children<'s> {
    pub(crate) branches: &'s [Branch],
    /// The branches with tables, and the table of the first of them.
    frequent: &'s [Branch],
    first_child: u32,
}

impl Children<'_> {
    /// The match of the branch at `index`.
    pub(crate) fn found(&self, parent: Match, index: usize) -> Match {
        let [token, first, count] = self.branches[index];
        let mut table = NONE;
        if count >= FREQUENT {
            let at = match self.frequent.get(index) {
                Some(branch) if branch[0] == token => Some(index),
                _ => self.frequent.iter().position(|branch| branch[0] == token),
            };
            let at = at.and_then(|at| u32::try_from(at).ok());
            table = at.map_or(NONE, |at| self.first_child.saturating_add(at));
        }
        let len = parent.len + 1;
        Match { len, first, count, table }
    }
}

impl<'a> Suffixes<'a> {
    /// Returns the token `offset` after the start of a suffix.
    fn token(&self, suffix: u32, offset: usize) -> Option<Token> {
        self.tokens.get(suffix as usize + offset).copied()
    }

    /// Returns the suffixes that begin with `token`.
    pub(crate) fn single(&self, token: Token) -> Option<Match> {
        let (first, count, table) = self.frequent.first(token)?;
        Some(Match { len: 1, first, count, table })
    }

    /// Returns the suffixes of `parent` that continue with `token`.
    pub(crate) fn child(&self, parent: Match, token: Token) -> Option<Match> {
        let len = parent.len + 1;
        if let Some(table) = self.frequent.table(parent.table) {
            if table.depth > parent.len {
                let suffix = *self.ranks.get(parent.first as usize)?;
                let same = self.token(suffix, parent.len) == Some(token);
                return same.then_some(Match { len, ..parent });
            }
            if let Some(at) = table.branches.iter().position(|branch| branch[0] == token) {
                let [_, first, count] = table.branches[at];
                let table =
                    if count < FREQUENT { NONE } else { table.first_child.saturating_add(u32::try_from(at).ok()?) };
                return Some(Match { len, first, count, table });
            }
        }
        let ranks = self.ranks.get(parent.ranks())?;
        let next = |suffix: &u32| self.token(*suffix, parent.len);
        let before = ranks.partition_point(|suffix| next(suffix) < Some(token));
        let same = ranks[before..].partition_point(|suffix| next(suffix) == Some(token));
        if same == 0 {
            return None;
        }
        Some(Match {
            len,
            first: parent.first + u32::try_from(before).ok()?,
            count: u32::try_from(same).ok()?,
            table: NONE,
        })
    }

    /// Whether `token` follows `parent` anywhere, however rarely. Costs one search.
    pub(crate) fn has_child(&self, parent: Match, token: Token) -> bool {
        let ranks = self.ranks.get(parent.ranks()).unwrap_or_default();
        ranks.binary_search_by_key(&Some(token), |&suffix| self.token(suffix, parent.len)).is_ok()
    }

    /// Returns an upper bound on how often a single token follows `parent`, and the number of distinct ones: a lower
    /// bound, exact if `parent` is frequent. Reads at most the head of a table.
    pub(crate) fn most(&self, parent: Match) -> (u32, u32) {
        match self.frequent.table(parent.table) {
            Some(table) if table.depth == parent.len => {
                let most = table.branches.first().map_or(1, |branch| branch[2]);
                (most, table.distinct)
            }
            _ => (parent.count, 1),
        }
    }

    /// Returns the tokens that follow `parent` with their counts: all that do so `least` times or more, and possibly
    /// others. Tokens with less than a 128th of the mass may be missing.
    pub(crate) fn children<'s>(&self, parent: Match, least: f32, read: &'s mut Vec<Branch>) -> Children<'s>
    where
        'a: 's,
    {
        read.clear();
        let table = self.frequent.table(parent.table);
        let (mut frequent, mut first_child) = (&[][..], NONE);
        match table {
            Some(table) if table.depth > parent.len => {
                let suffix = self.ranks.get(parent.first as usize);
                let token = suffix.and_then(|&suffix| self.token(suffix, parent.len));
                read.extend(token.map(|token| [token, parent.first, parent.count]));
                return Children { branches: read, frequent: read, first_child: parent.table };
            }
            Some(table) => (frequent, first_child) = (table.branches, table.first_child),
            None => {}
        }
        if table.is_some() && (least > 1.0 || parent.count() > READ_MAX) {
            let enough = |branch: &&Branch| branch[2] as f32 >= least;
            let listed = frequent.iter().take_while(enough).count();
            return Children { branches: &frequent[..listed], frequent, first_child };
        }
        // All loads come before the first comparison, so that their cache misses overlap.
        let suffixes = self.ranks.get(parent.ranks()).unwrap_or_default();
        let next = |suffix: &u32| self.token(*suffix, parent.len).unwrap_or(NONE);
        let occurrences = (parent.first..).zip(suffixes);
        read.extend(occurrences.map(|(rank, suffix)| [next(suffix), rank, 1]));
        read.dedup_by(|next, run| {
            let same = next[0] == run[0];
            run[2] += u32::from(same);
            same
        });
        Children { branches: read, frequent, first_child }
    }

    /// What is known of the places at which `parent` goes on with a child, given by its first rank and its count.
    pub(crate) fn races(&self, parent: Match, (first, count): (u32, u32)) -> impl Iterator<Item = Race<'a>> {
        let suffixes = self.ranks.get(first as usize..).and_then(|ranks| ranks.get(..count as usize));
        let places = suffixes.unwrap_or_default().iter().map(move |&suffix| suffix as usize + parent.len);
        places.filter_map(|place| self.runners_up.at(place))
    }

    /// Appends to `arena` the matches of the context `from` followed by `token`, up to `order` tokens long.
    pub(crate) fn advance(&self, arena: &mut Vec<Match>, from: &Matches, token: Token, order: usize) -> Matches {
        let start = arena.len();
        let mut longest = 0;
        let mut next = from.at.clone();
        let mut child = self.single(token);
        while let Some(found) = child {
            push(arena, start, found, order);
            let Some(longer) = next.next() else {
                longest = from.longest + 1;
                break;
            };
            let parent = arena[longer];
            longest = parent.len;
            child = self.child(parent, token);
        }
        Matches { at: start..arena.len(), longest: longest.min(order) }
    }

    /// Does the same without a search, from the children of `from` that were found, shortest first. Children that were
    /// not found are too rare to matter and are left out.
    pub(crate) fn follow(
        &self,
        arena: &mut Vec<Match>,
        from: &Matches,
        (token, order): (Token, usize),
        children: impl Iterator<Item = Match>,
    ) -> Matches {
        let start = arena.len();
        let mut last = 0;
        for child in self.single(token).into_iter().chain(children) {
            push(arena, start, child, order);
            last = child.len;
        }
        // The last child holds for as long as its parent did.
        let mut longer = arena[from.at.clone()].iter().map(|parent| parent.len);
        let longest = match last {
            0 => 0,
            _ => longer.find(|&len| len >= last).unwrap_or(from.longest + 1),
        };
        Matches { at: start..arena.len(), longest: longest.min(order) }
    }
}

/// Appends a match to those from `start` on, unless it is too long or occurs at the same positions as the last.
fn push(arena: &mut Vec<Match>, start: usize, found: Match, order: usize) {
    let last = arena[start..].last();
    if found.len <= order && last.is_none_or(|last| last.count != found.count) {
        arena.push(found);
    }
}
