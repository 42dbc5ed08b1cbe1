//! The frequent contexts of a pool: the top of its suffix tree, each with its children by frequency.
//!
//! Where many suffixes agree, finding the continuations takes searches all over memory. So every context that occurs
//! [`FREQUENT`] times or more has a list of the children that occur more than once, most frequent first, with their
//! ranges. Contexts at the same positions share the table of the longest, as in a suffix tree. On natural language this
//! takes 2.3 bytes per token.

use std::cmp::Reverse;

use crate::Token;

/// Least number of occurrences of a context with a table: fewer are read one by one just as quickly.
pub(crate) const FREQUENT: u32 = 16;

/// A child is listed if it has at least this share (one part in `SHARE`) of its parent's mass.
const SHARE: u64 = 128;

/// Longest context with a table of its own, in tokens: the longest that is matched, plus the depth to which its
/// branches are followed. A longer context counts as having one child.
const DEPTH_MAX: usize = 28;

/// No table.
pub(crate) const NONE: u32 = u32::MAX;

/// A child: its token, the rank of the first suffix that continues with it, and the number of such suffixes.
pub(crate) type Branch = [u32; 3];

/// The tables, read in place. Frequent children come first in their parent's list and have consecutive tables, so a
/// table locates those of its children.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Frequent<'a> {
    /// Every token that occurs except the end of text, in ascending order: token, first rank, table.
    pub(crate) tokens: &'a [[u32; 3]],
    /// The index in `tokens` of the first entry per 2^shift tokens.
    pub(crate) buckets: &'a [u32],
    pub(crate) shift: u32,
    /// Length in tokens, number of distinct children, first branch, table of the first child. The last entry only marks
    /// the end of the branches.
    pub(crate) tables: &'a [[u32; 4]],
    pub(crate) branches: &'a [Branch],
}

/// One table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table<'a> {
    pub(crate) depth: usize,
    pub(crate) distinct: u32,
    pub(crate) first_child: u32,
    pub(crate) branches: &'a [Branch],
}

impl<'a> Frequent<'a> {
    /// First rank, number and table of the suffixes that begin with `token`.
    pub(crate) fn first(&self, token: Token) -> Option<(u32, u32, u32)> {
        let bucket = *self.buckets.get((token >> self.shift) as usize)? as usize;
        let from = self.tokens.get(bucket..)?;
        let at = bucket + from.iter().position(|entry| entry[0] >= token)?;
        let ([found, first, table], [_, end, _]) = (self.tokens[at], *self.tokens.get(at + 1)?);
        (found == token).then_some((first, end.saturating_sub(first), table))
    }

    /// Returns a table, unless `table` is [`NONE`].
    pub(crate) fn table(&self, table: u32) -> Option<Table<'a>> {
        let table = table as usize;
        let [depth, distinct, first, first_child] = *self.tables.get(table)?;
        let [_, _, end, _] = *self.tables.get(table + 1)?;
        Some(Table {
            depth: depth as usize,
            distinct,
            first_child,
            branches: self.branches.get(first as usize..end as usize)?,
        })
    }
}

/// The tables of a pool while they are built, in breadth-first order.
#[derive(Debug, Default)]
pub(crate) struct FrequentBuilder {
    pub(crate) tokens: Vec<[u32; 3]>,
    pub(crate) buckets: Vec<u32>,
    pub(crate) shift: u32,
    pub(crate) tables: Vec<[u32; 4]>,
    pub(crate) branches: Vec<Branch>,
}

/// Suffixes that agree in at least `depth` tokens.
struct Interval {
    first: u32,
    end: u32,
    depth: usize,
}

/// Builds the tables of a text with this suffix array, over a vocabulary of at least one token and fewer than 2^31
/// tokens of text. Costs a few searches per frequent context, a seventh of the sorting.
pub(crate) fn build_frequent(
    tokens: &[Token],
    ranks: &[u32],
    (vocab_size, end_of_text): (u32, Token),
) -> FrequentBuilder {
    let mut built = FrequentBuilder::default();
    let mut queue = built.add_tokens(tokens, (vocab_size, end_of_text));
    let mut next = 0;
    while next < queue.len() {
        let found = built.add_table(tokens, ranks, end_of_text, &queue, next);
        queue.extend(found);
        next += 1;
    }
    let branches = index(built.branches.len());
    built.tables.push([0, 0, branches, 0]);
    built
}

/// Everything counted here is at most the number of tokens.
fn index(index: usize) -> u32 {
    u32::try_from(index).expect("a pool has fewer than 2^31 tokens")
}

impl FrequentBuilder {
    /// Lists the tokens that occur, with a bucket per four of them, and returns the intervals of the frequent ones.
    fn add_tokens(&mut self, tokens: &[Token], (vocab_size, end_of_text): (u32, Token)) -> Vec<Interval> {
        let mut counts = vec![0; vocab_size as usize];
        for &token in tokens {
            counts[token as usize] += 1;
        }
        let (mut queue, mut first) = (Vec::new(), 0);
        for (token, &count) in (0..).zip(&counts).filter(|&(_, &count)| count > 0) {
            let frequent = count >= FREQUENT && token != end_of_text;
            let table = if frequent { index(queue.len()) } else { NONE };
            self.tokens.push([token, first, table]);
            if frequent {
                queue.push(Interval { first, end: first + count, depth: 1 });
            }
            first += count;
        }
        let found = index(self.tokens.len());
        self.tokens.push([NONE, first, NONE]);
        while (vocab_size - 1) >> self.shift >= found.div_ceil(4).max(1) {
            self.shift += 1;
        }
        let mut at = 0;
        for bucket in 0..=(vocab_size - 1) >> self.shift {
            while self.tokens[at][0] >> self.shift < bucket {
                at += 1;
            }
            self.buckets.push(index(at));
        }
        queue
    }

    /// Adds the table of the interval `queue[at]` and returns the intervals of its frequent children.
    fn add_table(
        &mut self,
        tokens: &[Token],
        ranks: &[u32],
        end_of_text: Token,
        queue: &[Interval],
        at: usize,
    ) -> Vec<Interval> {
        let Interval { first, end, mut depth } = queue[at];
        let token = |rank: u32, depth: usize| {
            let at = ranks[rank as usize] as usize + depth;
            tokens.get(at).copied()
        };
        let ended = token(first, depth - 1) == Some(end_of_text);
        while depth <= DEPTH_MAX
            && token(first, depth) == token(end - 1, depth)
            && token(first, depth) != Some(end_of_text)
        {
            depth += 1;
        }
        let mut children: Vec<Branch> = Vec::new();
        let mut distinct = 0;
        let mut from = first;
        while from < end && depth <= DEPTH_MAX && !ended {
            let next = token(from, depth);
            let until = gallop(from + 1, end, |rank| token(rank, depth) == next);
            let (count, of) = (u64::from(until - from), u64::from(end - first));
            if let Some(next) = next {
                distinct += 1;
                if count > 1 && (count * SHARE >= of || until - from >= FREQUENT) {
                    children.push([next, from, until - from]);
                }
            }
            from = until;
        }
        children.sort_by_key(|&[token, _, count]| (Reverse(count), token));
        let depth_word = if ended { 0 } else { index(depth) };
        let table = [depth_word, distinct, index(self.branches.len()), index(queue.len())];
        self.tables.push(table);
        self.branches.extend(&children);
        let frequent = children.iter().filter(|child| child[2] >= FREQUENT);
        let interval = |&[_, first, count]: &Branch| Interval { first, end: first + count, depth: depth + 1 };
        frequent.map(interval).collect()
    }
}

/// Finds the first rank from `first` on that is not `below`, in steps of growing width, because it is usually near.
fn gallop(mut first: u32, mut end: u32, below: impl Fn(u32) -> bool) -> u32 {
    let mut step = 1;
    while first < end {
        let probe = (first + step - 1).min(end - 1);
        if below(probe) {
            first = probe + 1;
            step *= 2;
        } else {
            end = probe;
            break;
        }
    }
    while first < end {
        let middle = first.midpoint(end);
        if below(middle) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    first
}
