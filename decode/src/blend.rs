//! What may follow a context: distributions over the next token, from all sources.
//!
//! Two rules. [`Rule::Blend`] mixes the continuations of every length of context by Witten-Bell
//! smoothing: P_m(w) = (c_m(w) + αD_m·P_{m-1}(w)) / (n_m + αD_m), P_0 = 0, with c the counts (those of
//! temporary branches weighted), n their sum and D the number of distinct continuations. A length
//! that occurs at the same places as the next shorter one tells nothing new and is left out.
//! Trusting the longest match alone costs a quarter of the accepted tokens. [`Rule::Frequency`]
//! counts the continuations of one length, as the paper does.
//!
//! Costs at most [`PROBES_MAX`] steps of search per distinct length, and no allocation.

use crate::Token;
use crate::draft::SourceWeights;
use crate::suffix::{Match, Suffixes};
use crate::temporary::Temporary;
use crate::tree::Source;

/// Most places of a wide match that are looked at: finds every child above 1/128 of the mass. A rarer
/// one is drafted only where longer contexts, whose matches are narrow, find it. In replay 128 probes
/// accept 1.6 % more than 32, and 1,000 no more than 128.
const PROBES_MAX: usize = 128;

/// Most distinct continuations of one node: beyond what the probes of 7 lengths can find, and four
/// times the nodes of a usual tree.
const CHILDREN_MAX: usize = 256;

/// Slots of the table of continuations: a power of two, at most half of them in use.
const SLOT_BITS: u32 = 9;

/// How continuations become probabilities.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    /// Contexts of 1 to `order` tokens, blended.
    Blend {
        order: usize,
        alpha: f32,
        weights: SourceWeights,
    },
    /// The contexts of the root's last `ngram` tokens, counted.
    Frequency { ngram: usize },
}

/// All places where the last tokens of a context occurred before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evidence<'a> {
    pub(crate) suffixes: Suffixes<'a>,
    pub(crate) matches: &'a [Match],
    pub(crate) longest: usize,
    pub(crate) temporaries: [&'a Temporary; 2],
    pub(crate) recent: &'a [Token],
}

/// A continuation and its probability after the context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Child {
    pub(crate) token: Token,
    pub(crate) probability: f32,
    pub(crate) source: Source,
}

/// An occurrence in a temporary branch.
#[derive(Debug, Clone, Copy)]
struct Occurrence {
    len: usize,
    token: Token,
    weight: f32,
    source: Source,
}

/// The buffers that distributions are computed in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Distribution {
    table: Table,
    occurrences: Vec<Occurrence>,
    /// Occurrences at the end of a growing text, which nothing follows yet.
    open_ends: usize,
    /// Continuations in the pool at one length: place in the table and count.
    counted: Vec<(usize, f32)>,
    /// For every length of context the share of probability that one occurrence there has.
    shares: Vec<f32>,
}

impl Distribution {
    /// The tokens that may follow, in the order they were found. Those of a conditional probability
    /// up to `threshold` need not be among them.
    pub(crate) fn children(
        &mut self,
        evidence: &Evidence<'_>,
        rule: Rule,
        threshold: f32,
    ) -> impl Iterator<Item = Child> + '_ {
        self.table.clear();
        self.occurrences.clear();
        self.open_ends = 0;
        match rule {
            Rule::Blend { alpha, weights, .. } => {
                self.collect(evidence, 1, &weights);
                self.blend(evidence, alpha, threshold);
            }
            Rule::Frequency { .. } => {
                self.collect(evidence, evidence.recent.len(), &SourceWeights::EQUAL);
                self.count(evidence);
            }
        }
        self.table.entries.iter().map(Entry::child)
    }

    /// Gathers the occurrences in temporary branches that agree in `least` tokens, longest first.
    fn collect(&mut self, evidence: &Evidence<'_>, least: usize, weights: &SourceWeights) {
        for temporary in evidence.temporaries {
            let (source, tokens) = (temporary.source, temporary.tokens());
            let weight = weights.of(source);
            temporary.matches(evidence.recent, |next, len| match tokens.get(next) {
                _ if len < least => {}
                Some(&token) => self.occurrences.push(Occurrence {
                    len,
                    token,
                    weight,
                    source,
                }),
                None => self.open_ends += 1,
            });
        }
        self.occurrences
            .sort_unstable_by_key(|occurrence| std::cmp::Reverse(occurrence.len));
    }

    /// One length: a token's probability is its share of the occurrences. Those that nothing follows
    /// share too, so that along a path probabilities stay proportional to counts.
    fn count(&mut self, evidence: &Evidence<'_>) {
        let pool = evidence.matches.first();
        let total = pool.map_or(0, Match::count) + self.occurrences.len() + self.open_ends;
        let share = 1.0 / total as f32;
        if let Some(pool) = pool {
            evidence
                .suffixes
                .children(*pool, PROBES_MAX, |token, count| {
                    self.table.add(token, Source::Pool, count as f32 * share);
                });
        }
        for occurrence in &self.occurrences {
            self.table.add(occurrence.token, occurrence.source, share);
        }
    }

    /// From the longest length down: each takes its part of the probability that the longer ones left
    /// over, so that the sum equals the recursion from the shortest up.
    fn blend(&mut self, evidence: &Evidence<'_>, alpha: f32, threshold: f32) {
        let Evidence {
            suffixes,
            matches,
            longest,
            ..
        } = *evidence;
        let order = self
            .occurrences
            .first()
            .map_or(0, |first| first.len)
            .max(longest);
        self.shares.clear();
        self.shares.resize(order + 1, 0.0);
        let (mut left, mut weight, mut taken) = (1.0, 0.0, 0);
        for length in (1..=order).rev() {
            while let Some(occurrence) = self.occurrences.get(taken).filter(|o| o.len == length) {
                self.table.add(occurrence.token, occurrence.source, 0.0);
                weight += occurrence.weight;
                taken += 1;
            }
            let pool = matches
                .iter()
                .rev()
                .find(|m| m.len <= length && length <= longest);
            let first_of_its_places = length == 1
                || length == longest + 1
                || pool.is_some_and(|pool| pool.len == length)
                || self
                    .occurrences
                    .get(taken)
                    .is_some_and(|o| o.len == length - 1);
            if !first_of_its_places {
                continue;
            }
            self.counted.clear();
            let mut distinct = 0.0;
            if let Some(pool) = pool {
                distinct = suffixes.children(*pool, probes(left, threshold), |token, count| {
                    let place = self.table.add(token, Source::Pool, 0.0);
                    self.counted
                        .extend(place.map(|place| (place, count as f32)));
                });
            }
            let smoothing = alpha * distinct.max(self.table.entries.len() as f32);
            let total = pool.map_or(0, Match::count) as f32 + weight + smoothing;
            let share = left / total;
            for &(place, count) in &self.counted {
                self.table.entries[place].by_source[Source::Pool as usize] += count * share;
            }
            self.shares[length] = share;
            left *= smoothing / total;
        }
        self.add_occurrences();
    }

    /// An occurrence counts at its length and at all shorter ones.
    fn add_occurrences(&mut self) {
        for length in 1..self.shares.len() {
            self.shares[length] += self.shares[length - 1];
        }
        for o in &self.occurrences {
            self.table
                .add(o.token, o.source, o.weight * self.shares[o.len]);
        }
    }
}

/// How closely to look at a wide match: a token of less than `threshold` of what is `left` cannot enter
/// the tree on this match alone, so fewer and fewer probes do as the tree fills.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a cast from float saturates"
)]
fn probes(left: f32, threshold: f32) -> usize {
    ((left / threshold).ceil() as usize).clamp(1, PROBES_MAX)
}

/// A token's probability by the source that gives it.
#[derive(Debug, Clone, Copy)]
struct Entry {
    token: Token,
    by_source: [f32; 3],
}

impl Entry {
    fn child(&self) -> Child {
        let [pool, previous, context] = self.by_source;
        let source = if previous >= pool && previous >= context {
            Source::Previous
        } else if context >= pool {
            Source::Context
        } else {
            Source::Pool
        };
        Child {
            token: self.token,
            probability: pool + previous + context,
            source,
        }
    }
}

/// A hash table of tokens to entries with a constant-time clear: slots of an older epoch are free.
#[derive(Debug, Clone)]
struct Table {
    entries: Vec<Entry>,
    slots: Vec<(u32, u32)>,
    epoch: u32,
}

impl Default for Table {
    fn default() -> Self {
        let entries = Vec::with_capacity(CHILDREN_MAX);
        Self {
            entries,
            slots: vec![(0, 0); 1 << SLOT_BITS],
            epoch: 0,
        }
    }
}

impl Table {
    fn clear(&mut self) {
        self.entries.clear();
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            self.slots.fill((0, 0));
            self.epoch = 1;
        }
    }

    /// Adds to a token's probability and returns its entry; `None` if there is no room for it.
    fn add(&mut self, token: Token, source: Source, probability: f32) -> Option<usize> {
        let mask = self.slots.len() - 1;
        // Fibonacci hashing: the top bits of a product with 2^32 / φ.
        let mut at = (token.wrapping_mul(0x9E37_79B9) >> (32 - SLOT_BITS)) as usize;
        loop {
            let (epoch, entry) = self.slots[at];
            let entry = entry as usize;
            if epoch != self.epoch {
                break;
            }
            if self.entries[entry].token == token {
                self.entries[entry].by_source[source as usize] += probability;
                return Some(entry);
            }
            at = (at + 1) & mask;
        }
        if self.entries.len() == CHILDREN_MAX {
            return None;
        }
        let mut by_source = [0.0; 3];
        by_source[source as usize] = probability;
        self.slots[at] = (self.epoch, u32::try_from(self.entries.len()).ok()?);
        self.entries.push(Entry { token, by_source });
        Some(self.entries.len() - 1)
    }
}
