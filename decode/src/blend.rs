//! Distributions over the token that follows a context, from all sources.
//!
//! There are two rules. [`Rule::Blend`] mixes the continuations of every context length by Witten-Bell smoothing:
//! P_m(w) = (c_m(w) + αD_m·P_{m-1}(w)) / (n_m + αD_m), P_0 = 0, where c are the counts (weighted for temporary
//! branches), n is their sum and D the number of distinct continuations. A length that occurs at the same positions as
//! the next shorter one adds no information and is skipped. Trusting only the longest match loses a quarter of the
//! accepted tokens. [`Rule::Frequency`] counts the continuations of one length, as the paper does.
//!
//! In a text that is drawn, an occurrence in the pool whose [runners-up](crate::runners_up) are known counts as their
//! probabilities, for contexts without a table, whose occurrences are read one by one. D stays the number of those that
//! were written: with the others smoothing grew, which lost 3 to 9 % of the accepted tokens.
//!
//! Cost: one table or a few reads per distinct length, and no allocation.

use crate::Token;
use crate::alignment::Alignment;
use crate::frequent::{Branch, NONE};
use crate::runners_up::Sharpness;
use crate::sources::SourceWeights;
use crate::suffix::{Match, Suffixes};
use crate::temporary::Temporary;
use crate::tree::Source;

/// Share of the smoothing applied at the shortest context. Below it there is nothing to leave probability to except
/// tokens never seen after it. With half, the sum of the estimates is within 2 % of what is accepted.
const SHORTEST: f32 = 0.5;

/// A continuation is not counted at a length where it would get less than this share of the probability needed to enter
/// the tree. In replay, 1.0 loses 1.0 % of the accepted tokens, and 0 doubles the time.
const NEGLIGIBLE: f32 = 0.25;

/// Most distinct continuations of one node: four times the nodes of a usual tree.
const CHILDREN_MAX: usize = 256;

/// Slots of the table of continuations: a power of two, of which at most half are in use.
const SLOT_BITS: u32 = 9;

/// How continuations become probabilities.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    /// Contexts of 1 to `order` tokens, blended.
    Blend { order: usize, alpha: f32, weights: SourceWeights },
    /// The contexts of the root's last `ngram` tokens, counted.
    Frequency { ngram: usize },
}

/// All positions where the last tokens of a context occurred before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evidence<'a> {
    pub(crate) suffixes: &'a Suffixes<'a>,
    /// Of a text that is drawn.
    pub(crate) sharpness: Option<&'a Sharpness>,
    pub(crate) matches: &'a [Match],
    pub(crate) longest: usize,
    pub(crate) temporaries: [&'a Temporary; 2],
    /// Tokens of the context that are the prompt.
    pub(crate) prompt: usize,
    pub(crate) alignment: &'a Alignment,
    pub(crate) recent: &'a [Token],
}

/// A continuation and its probability after the context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Child {
    pub(crate) token: Token,
    pub(crate) probability: f32,
    pub(crate) source: Source,
    /// The continuation's matches in the pool, for [`Distribution::steps`].
    pub(crate) steps: u32,
}

/// An occurrence in a temporary branch.
#[derive(Debug, Clone, Copy)]
struct Occurrence {
    len: usize,
    token: Token,
    weight: f32,
    source: Source,
    /// Whether the token stands in place of the one that occurred: it was not written there.
    is_aligned: bool,
}

impl Occurrence {
    /// What the target ranks above the token at this place of the prompt, each weighed by the probability it had there.
    fn aligned(self, alignment: &Alignment, place: usize) -> impl Iterator<Item = Self> + '_ {
        alignment.above(place, self.token).map(move |better| Self {
            token: better.token,
            weight: self.weight * better.log_probability.exp(),
            is_aligned: true,
            ..self
        })
    }
}

/// One context length.
#[derive(Debug, Clone, Copy)]
struct Level {
    pool: Option<Match>,
    /// Occurrences in the pool, an upper bound on how many of them continue with one token, and a lower bound on the
    /// number of distinct continuations.
    count: f32,
    most: f32,
    distinct: f32,
    /// Weight of a distinct continuation.
    alpha: f32,
    /// Weight and number of the occurrences in temporary branches at this length or a longer one.
    weight: f32,
    taken: usize,
    /// The probability that one occurrence contributes at this length.
    share: f32,
}

impl Level {
    fn new(weight: f32, taken: usize) -> Self {
        Self { pool: None, count: 0.0, most: 0.0, distinct: 1.0, alpha: 0.0, weight, taken, share: 0.0 }
    }

    fn set_pool(&mut self, pool: Match, suffixes: &Suffixes<'_>) {
        let (most, distinct) = suffixes.most(pool);
        self.pool = Some(pool);
        self.count = pool.count as f32;
        (self.most, self.distinct) = (most as f32, distinct as f32);
    }
}

/// A continuation in the pool at one length.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// Its index in the table.
    place: usize,
    /// Its occurrences, less what they leave to their runners-up.
    count: f32,
    /// The first rank and the number of its suffixes.
    suffixes: (u32, u32),
}

/// The buffers that distributions are computed in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Distribution {
    table: Table,
    occurrences: Vec<Occurrence>,
    /// Occurrences at the end of a growing text, which have no continuation yet.
    open_ends: usize,
    /// Continuations in the pool at one length: as read, and those that count.
    read: Vec<Branch>,
    counted: Vec<Counted>,
    /// Runners-up in the pool: the level at which they were found, and their weight there.
    beside: Vec<(usize, Token, f32)>,
    /// The matches of continuations found in the pool, chained from the shortest length to the longest.
    steps: Vec<(Match, u32)>,
    levels: Vec<Level>,
}

impl Distribution {
    /// Forgets all steps.
    pub(crate) fn restart(&mut self) {
        self.steps.clear();
    }

    /// The matches of a child in the pool as far as they were found together with it, shortest first.
    pub(crate) fn steps(&self, mut at: u32) -> impl Iterator<Item = Match> + '_ {
        std::iter::from_fn(move || {
            let &(found, next) = self.steps.get(at as usize)?;
            at = next;
            Some(found)
        })
    }

    /// Tokens that may follow, in the order they were found. Tokens with a conditional probability up to `threshold`
    /// may be missing.
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
                self.find_levels(evidence, alpha);
                if self.bound() > threshold {
                    self.blend(evidence, threshold);
                }
            }
            Rule::Frequency { .. } => {
                self.collect(evidence, evidence.recent.len(), &SourceWeights::EQUAL);
                self.count(evidence);
            }
        }
        // Rounding here must not decide what the caller decides.
        let least = 0.999 * threshold;
        let likely = move |entry: &&Entry| entry.by_source.iter().sum::<f32>() >= least;
        self.table.entries.iter().filter(likely).map(Entry::child)
    }

    /// Gathers the occurrences in temporary branches that agree in `least` tokens, longest first.
    fn collect(&mut self, evidence: &Evidence<'_>, least: usize, weights: &SourceWeights) {
        for temporary in evidence.temporaries {
            let tokens = temporary.tokens();
            let weight = weights.of(temporary.source);
            temporary.matches(evidence.recent, |next, len| {
                let source = match temporary.source {
                    Source::Context if next < evidence.prompt => Source::Prompt,
                    source => source,
                };
                match tokens.get(next) {
                    _ if len < least => {}
                    Some(&token) => {
                        let occurred = Occurrence { len, token, weight, source, is_aligned: false };
                        self.occurrences.push(occurred);
                        if source == Source::Prompt {
                            self.occurrences.extend(occurred.aligned(evidence.alignment, next));
                        }
                    }
                    None => self.open_ends += 1,
                }
            });
        }
        self.occurrences.sort_unstable_by_key(|occurrence| std::cmp::Reverse(occurrence.len));
    }

    /// Uses one length: a token's probability is its share of the occurrences. Occurrences without a continuation take
    /// a share too, so that probabilities along a path stay proportional to counts.
    fn count(&mut self, evidence: &Evidence<'_>) {
        let pool = evidence.matches.first();
        let total = pool.map_or(0, Match::count) + self.occurrences.len() + self.open_ends;
        let share = 1.0 / total as f32;
        if let Some(pool) = pool {
            let children = evidence.suffixes.children(*pool, 0.0, &mut self.read);
            for &[token, _, count] in children.branches {
                self.table.add(token, Source::Pool, count as f32 * share);
            }
        }
        for occurrence in &self.occurrences {
            self.table.add(occurrence.token, occurrence.source, share);
        }
    }

    /// Finds the context lengths to blend, longest first. The shortest of all lengths that occur at the same positions
    /// stands for them: there a match or an occurrence ends or begins.
    fn find_levels(&mut self, evidence: &Evidence<'_>, alpha: f32) {
        let (longest, occurrences) = (evidence.longest, &self.occurrences);
        let (mut weight, mut taken, mut pools) = (0.0, 0, evidence.matches.len());
        self.levels.clear();
        let mut length = occurrences.first().map_or(0, |o| o.len).max(longest);
        while length > 0 {
            while let Some(occurrence) = occurrences.get(taken).filter(|o| o.len >= length) {
                weight += occurrence.weight;
                taken += 1;
            }
            let shorter = occurrences.get(taken).map_or(1, |o| o.len + 1);
            let mut next = shorter;
            let mut level = Level::new(weight, taken);
            if length > longest {
                next = next.max(longest + 1);
            } else if pools > 0 {
                let pool = evidence.matches[pools - 1];
                next = next.max(pool.len);
                pools -= usize::from(next == pool.len);
                level.set_pool(pool, evidence.suffixes);
            }
            level.alpha = if next == 1 { alpha * SHORTEST } else { alpha };
            self.levels.push(level);
            length = next - 1;
        }
    }

    /// Approximate upper bound on the probability of a continuation. On real texts a third of all expansions end here.
    fn bound(&self) -> f32 {
        let shortest_first = self.levels.iter().rev();
        shortest_first.fold(0.0, |shorter, level| {
            let smoothing = level.alpha * level.distinct;
            let most = level.most + level.weight + smoothing * shorter;
            (most / (level.count + level.weight + smoothing)).max(shorter)
        })
    }

    /// Goes from the longest length down. Each length takes its share of the probability that the longer ones left, so
    /// the sum equals the recursion from the shortest length up.
    fn blend(&mut self, evidence: &Evidence<'_>, threshold: f32) {
        let (mut left, mut taken) = (1.0, 0);
        self.beside.clear();
        for at in 0..self.levels.len() {
            let level = self.levels[at];
            // Only what was written is a continuation of its own.
            for o in self.occurrences[taken..level.taken].iter().filter(|o| !o.is_aligned) {
                self.table.add(o.token, o.source, 0.0);
            }
            taken = level.taken;
            self.counted.clear();
            let mut distinct = 0.0;
            if let Some(pool) = level.pool {
                let total = level.count + level.weight + level.alpha * level.distinct;
                let least = NEGLIGIBLE * threshold * total / left;
                let read = self.add_children(evidence.suffixes, pool, least);
                distinct = level.distinct.max(read as f32);
                if let Some(sharpness) = evidence.sharpness {
                    self.share_out(evidence.suffixes, pool, (at, sharpness));
                }
            }
            let smoothing = level.alpha * distinct.max(self.table.entries.len() as f32);
            let total = level.count + level.weight + smoothing;
            let share = left / total;
            for &Counted { place, count, .. } in &self.counted {
                self.table.entries[place].add(Source::Pool, count * share);
            }
            self.levels[at].share = share;
            left *= smoothing / total;
        }
        self.add_occurrences();
        for &(level, token, weight) in &self.beside {
            self.table.add(token, Source::Pool, weight * self.levels[level].share);
        }
    }

    /// Divides each occurrence just counted between what was written and its runners-up.
    fn share_out(&mut self, suffixes: &Suffixes<'_>, pool: Match, (level, sharpness): (usize, &Sharpness)) {
        if pool.table != NONE || suffixes.runners_up.known.is_empty() {
            return;
        }
        for counted in &mut self.counted {
            for race in suffixes.races(pool, counted.suffixes) {
                let (written, others) = sharpness.shares(&race);
                counted.count -= 1.0 - written;
                let weighed = others.filter(|(_, weight)| *weight > 0.0);
                self.beside.extend(weighed.map(|(token, weight)| (level, token, weight)));
            }
        }
    }

    /// Counts the continuations in the pool, at least those that occur `least` times, and returns their number.
    fn add_children(&mut self, suffixes: &Suffixes<'_>, pool: Match, least: f32) -> usize {
        let children = suffixes.children(pool, least, &mut self.read);
        for (index, &[token, first, count]) in children.branches.iter().enumerate() {
            if (count as f32) < least {
                continue;
            }
            let Some(place) = self.table.add(token, Source::Pool, 0.0) else {
                break;
            };
            self.counted.push(Counted { place, count: count as f32, suffixes: (first, count) });
            let entry = &mut self.table.entries[place];
            self.steps.push((children.found(pool, index), entry.steps));
            entry.steps = u32::try_from(self.steps.len() - 1).unwrap_or(NONE);
        }
        children.branches.len()
    }

    /// An occurrence counts at its length and at all shorter ones.
    fn add_occurrences(&mut self) {
        let (mut share, mut rest) = (0.0, self.occurrences.as_slice());
        for level in (0..self.levels.len()).rev() {
            share += self.levels[level].share;
            let longer = level.checked_sub(1).map_or(0, |longer| self.levels[longer].taken);
            let (before, at_level) = rest.split_at(longer);
            for o in at_level {
                self.table.add(o.token, o.source, o.weight * share);
            }
            rest = before;
        }
    }
}

/// The part of a token's probability that each source contributes.
#[derive(Debug, Clone, Copy)]
struct Entry {
    token: Token,
    steps: u32,
    by_source: [f32; 3],
    /// Whether only the prompt has it, of what was counted.
    in_prompt_alone: bool,
}

impl Entry {
    fn child(&self) -> Child {
        let [pool, previous, context] = self.by_source;
        let source = if self.in_prompt_alone {
            Source::Prompt
        } else if previous >= pool && previous >= context {
            Source::Previous
        } else if context >= pool {
            Source::Context
        } else {
            Source::Pool
        };
        Child { token: self.token, probability: pool + previous + context, source, steps: self.steps }
    }

    fn add(&mut self, source: Source, probability: f32) {
        let place = match source {
            Source::Pool | Source::Model => 0,
            Source::Previous => 1,
            Source::Context | Source::Prompt => 2,
        };
        self.by_source[place] += probability;
        self.in_prompt_alone &= source == Source::Prompt;
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
        Self { entries, slots: vec![(0, 0); 1 << SLOT_BITS], epoch: 0 }
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
                self.entries[entry].add(source, probability);
                return Some(entry);
            }
            at = (at + 1) & mask;
        }
        if self.entries.len() == CHILDREN_MAX {
            return None;
        }
        let mut entry = Entry { token, steps: NONE, by_source: [0.0; 3], in_prompt_alone: true };
        entry.add(source, probability);
        self.slots[at] = (self.epoch, u32::try_from(self.entries.len()).ok()?);
        self.entries.push(entry);
        Some(self.entries.len() - 1)
    }
}
