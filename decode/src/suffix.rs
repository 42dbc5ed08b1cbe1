//! Matching in a suffix array: a context is a range of suffixes, a child a sub-range of it.
//!
//! The matches of a context are kept for every length of its end up to an order at once. Lengths that
//! occur at the same places share one range, that of the shortest, so there are few: a text of
//! natural language has three to five. Appending a token costs one binary search per range; nothing
//! is ever searched from the start. All of it is a function of the last `order` tokens alone.

use std::ops::Range;

use crate::Token;

/// A text and the starts of its suffixes in lexicographic order.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Suffixes<'a> {
    pub(crate) tokens: &'a [Token],
    pub(crate) ranks: &'a [u32],
}

/// The suffixes that begin with the last `len` tokens of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) len: usize,
    first: usize,
    end: usize,
}

impl Match {
    /// How often these tokens occur.
    pub(crate) fn count(&self) -> usize {
        self.end - self.first
    }
}

/// The matches of one context: a slice of a shared arena, shortest first, each narrower than the one
/// before it. A match holds for all lengths below the next one's; the last for those up to `longest`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Matches {
    pub(crate) at: Range<usize>,
    pub(crate) longest: usize,
}

impl<'a> Suffixes<'a> {
    /// The match of no token at all: every suffix.
    fn everything(&self) -> Match {
        Match {
            len: 0,
            first: 0,
            end: self.ranks.len(),
        }
    }

    /// The token `offset` after the start of the suffix of this rank.
    fn token(&self, rank: usize, offset: usize) -> Option<Token> {
        self.tokens.get(self.ranks[rank] as usize + offset).copied()
    }

    /// Where among `ranks`, from the first on, the token at `offset` is no longer below `bound`;
    /// searched in steps of rising width, as it is mostly near.
    fn gallop(
        &self,
        ranks: Range<usize>,
        offset: usize,
        below: impl Fn(Option<Token>) -> bool,
    ) -> usize {
        let (mut first, mut step) = (ranks.start, 1);
        let mut end = ranks.end;
        while first < end {
            let probe = (first + step - 1).min(end - 1);
            if below(self.token(probe, offset)) {
                first = probe + 1;
                step *= 2;
            } else {
                end = probe;
                break;
            }
        }
        while first < end {
            let middle = first.midpoint(end);
            if below(self.token(middle, offset)) {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        first
    }

    /// The suffixes of `parent` that go on with `token`.
    pub(crate) fn child(&self, parent: Match, token: Token) -> Match {
        let (mut first, mut end) = (parent.first, parent.end);
        while first < end {
            let middle = first.midpoint(end);
            if self.token(middle, parent.len) < Some(token) {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        let end = self.gallop(first..parent.end, parent.len, |next| next == Some(token));
        Match {
            len: parent.len + 1,
            first,
            end,
        }
    }

    /// Calls `child` with tokens that follow `parent` and how often they do, and returns how many
    /// distinct tokens follow. A match that occurs at most `probes` times is read whole; of a
    /// wider one, evenly spaced probes find every token of more than a `probes`-th of the
    /// mass, and the number of tokens is estimated (each found stands for as many as had its chance).
    pub(crate) fn children(
        &self,
        parent: Match,
        probes: usize,
        mut child: impl FnMut(Token, usize),
    ) -> f32 {
        let step = parent.count().div_ceil(probes).max(1);
        let mut distinct = 0.0;
        let mut searched = parent.first;
        let mut probe = parent.first + step / 2;
        while probe < parent.end {
            let token = self.token(probe, parent.len);
            let same = |next| next == token;
            let first = if step == 1 {
                probe
            } else {
                self.run_start(searched, probe, parent.len)
            };
            searched = self.gallop(probe + 1..parent.end, parent.len, same);
            let count = searched - first;
            distinct += (step as f32 / count as f32).max(1.0);
            if let Some(token) = token {
                child(token, count);
            }
            probe += (searched - probe).next_multiple_of(step);
        }
        distinct
    }

    /// The first rank from `from` on of the run of equal tokens that `probe` is in.
    fn run_start(&self, from: usize, probe: usize, offset: usize) -> usize {
        let token = self.token(probe, offset);
        let (mut first, mut end, mut step) = (from, probe, 1);
        while first < end {
            let back = end.saturating_sub(step).max(first);
            if self.token(back, offset) == token {
                end = back;
                step *= 2;
            } else {
                first = back + 1;
                break;
            }
        }
        while first < end {
            let middle = first.midpoint(end);
            if self.token(middle, offset) == token {
                end = middle;
            } else {
                first = middle + 1;
            }
        }
        end
    }

    /// Appends to `arena` the matches of the context `from` with `token` after it, up to `order`
    /// tokens long.
    pub(crate) fn advance(
        &self,
        arena: &mut Vec<Match>,
        from: &Matches,
        token: Token,
        order: usize,
    ) -> Matches {
        let start = arena.len();
        let (mut longest, mut count) = (0, usize::MAX);
        let mut next = from.at.clone();
        let mut parent = self.everything();
        loop {
            let child = self.child(parent, token);
            if child.count() == 0 {
                break;
            }
            if child.count() != count && child.len <= order {
                arena.push(child);
                count = child.count();
            }
            let Some(longer) = next.next() else {
                longest = from.longest + 1;
                break;
            };
            parent = arena[longer];
            longest = parent.len;
        }
        Matches {
            at: start..arena.len(),
            longest: longest.min(order),
        }
    }
}
