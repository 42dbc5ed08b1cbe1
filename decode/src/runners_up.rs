//! Runners-up: what the target thought probable at the places of a pool's texts, beside what it wrote there.
//!
//! A context that occurs once has one continuation, however close the race was that it won. With the probabilities of
//! those that lost it has a distribution, and a text that is drawn at a temperature runs the race anew. Greedy texts do
//! not: what won once wins again, so their drafts count what was written (docs/research/soft-pools.md).
//!
//! Probabilities are kept where the race was close, in 5 bits each, and tokens in as many bits as the vocabulary needs.
//! The places that have them are bits, with the numbers before every 32 of them, so that a look-up reads three places.
//! A pool keeps the most probable runners-up for which it has room, which is as much as the rest of it leaves of 16
//! bytes per token.

use std::ops::Range;

use crate::Token;

/// The most runners-up that a pool keeps of a place.
pub const RUNNERS_UP_MAX: u32 = 8;

/// By how many places runners-up may be off where a text is encoded in more or fewer tokens than it was written in. So
/// are three of four descriptions by `profile-lm` at a temperature of 1.
const SHIFT_MAX: i64 = 4;

/// Places per word of bits.
const WORD: usize = 32;

/// Bits per token of a pool with runners-up. Without them one of real texts takes 10 to 11.3 bytes.
const POOL_BITS: usize = 16 * 8;

/// Bits of races and runners-up per token in any pool, on average: with the 3 that find them they are 4 bytes. Small
/// pools, whose tables outweigh their tokens, take more than [`POOL_BITS`].
const LEAST_ROOM: usize = 29;

/// Bits of a [`Level`].
const LEVEL_BITS: u32 = 5;

/// Bits of the number of runners-up of a place, less one.
const COUNT_BITS: u32 = 3;

/// A probability above 2^-8: the exponent and the two upper bits of the mantissa of an f32, counted down from those of
/// 1, which is level 0. An eighth off at most.
type Level = u8;

/// Lower bits of the mantissa of an f32, which a level leaves out.
const LEFT_OUT: u32 = 21;

/// One of the most probable tokens at a place of a text: the one that was written there, or one that it left behind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunnerUp {
    /// The place, counted in tokens from the text's beginning; that of its end is its length.
    pub place: u32,
    /// The token.
    pub token: Token,
    /// Its probability there, at temperature 1.
    pub probability: f32,
}

/// A text of a pool, and what is known of the races that its tokens won.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PoolText {
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// In order of their places; of a place that has some, the token written there is the first. Where the text is
    /// encoded in other tokens than it was written in, they find their places by the tokens around, or are left out.
    pub runners_up: Vec<RunnerUp>,
}

impl From<Vec<Token>> for PoolText {
    fn from(tokens: Vec<Token>) -> Self {
        Self { tokens, runners_up: Vec::new() }
    }
}

impl PoolText {
    /// The text without what comes after its first end, and its runners-up at the places of these tokens. A model may
    /// know more tokens than its tokenizer; those are left out.
    pub(crate) fn ended(mut self, (vocab_size, end_of_text): (u32, Token)) -> Self {
        let length = self.tokens.iter().position(|&token| token == end_of_text).unwrap_or(self.tokens.len());
        self.tokens.truncate(length);
        let races: Vec<&[RunnerUp]> = self.runners_up.chunk_by(|a, b| a.place == b.place).collect();
        let written = |place: i64| match usize::try_from(place).ok()? {
            place if place == length => Some(end_of_text),
            place => self.tokens.get(place).copied(),
        };
        let fits = |race: &[RunnerUp], shift: i64| written(i64::from(race[0].place) + shift) == Some(race[0].token);
        let (mut placed, mut shift, mut from) = (Vec::new(), 0, 0);
        for (at, race) in races.iter().enumerate() {
            let of_both = |shift: &i64| fits(race, *shift) && races.get(at + 1).is_none_or(|next| fits(next, *shift));
            if !fits(race, shift) {
                let shifts = (1..=SHIFT_MAX).flat_map(|by| [shift - by, shift + by]);
                let Some(found) = shifts.into_iter().find(of_both) else { continue };
                shift = found;
            }
            let Some(place) = u32::try_from(i64::from(race[0].place) + shift).ok().filter(|place| *place >= from)
            else {
                continue;
            };
            from = place + 1;
            let known = race.iter().filter(|other| other.token < vocab_size);
            placed.extend(known.map(|other| RunnerUp { place, ..*other }));
        }
        self.runners_up = placed;
        self
    }
}

/// What is known of the places of all texts, read in place.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunnersUp<'a> {
    /// Per 32 places a bit for each that is known, how many are known before them, and how many runners-up those have.
    pub(crate) known: &'a [[u32; 3]],
    /// For each known place the level of the token that was written, and below it the number of runners-up less one.
    pub(crate) races: &'a [u8],
    /// All runners-up without gaps, those of a place by their probability: the token, and below it its level.
    pub(crate) others: &'a [u32],
    /// Bits of a token.
    pub(crate) token_bits: u32,
}

/// What is known of one place.
#[derive(Debug, Clone)]
pub(crate) struct Race<'a> {
    written: Level,
    runners_up: RunnersUp<'a>,
    /// Which of all runners-up are those of this place.
    others: Range<usize>,
}

impl<'a> RunnersUp<'a> {
    /// What is known of a place, if anything is.
    pub(crate) fn at(&self, place: usize) -> Option<Race<'a>> {
        let [bits, known, others] = *self.known.get(place / WORD)?;
        let bit = 1 << (place % WORD);
        if bits & bit == 0 {
            return None;
        }
        let before = (bits & (bit - 1)).count_ones() as usize;
        let (&race, before) = self.races.get(known as usize..)?.get(..=before)?.split_last()?;
        let first = others as usize + before.iter().map(|&race| unpacked(race).1 as usize).sum::<usize>();
        let (written, count) = unpacked(race);
        Some(Race { written, runners_up: *self, others: first..first + count as usize })
    }

    /// The races of the places from `from` to `to`, counted from `from`; `tokens` are those of all places.
    pub(crate) fn between(&self, tokens: &[Token], from: usize, to: usize) -> Vec<RunnerUp> {
        let mut found = Vec::new();
        for (&token, place) in tokens[from..=to].iter().zip(0..) {
            let Some(race) = self.at(from + place as usize) else { continue };
            let all = std::iter::once((token, race.written)).chain(race.others());
            found.extend(all.map(|(token, level)| RunnerUp { place, token, probability: probability(level) }));
        }
        found
    }

    /// The tokens of all runners-up.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = Token> {
        (0..32 * self.others.len() / other_bits(self.token_bits)).map(|index| self.other(index).0)
    }

    /// The runner-up at an index among all.
    fn other(&self, index: usize) -> (Token, Level) {
        let first = index * other_bits(self.token_bits);
        let word = |at: usize| u64::from(self.others.get(at).copied().unwrap_or_default());
        let bits = (word(first / 32) | word(first / 32 + 1) << 32) >> (first % 32);
        #[expect(clippy::cast_possible_truncation, reason = "a mask follows; a token has at most 24 bits")]
        let (token, level) = ((bits >> LEVEL_BITS) as u32, bits as u8);
        (token & ((1 << self.token_bits) - 1), level & ((1 << LEVEL_BITS) - 1))
    }
}

impl Race<'_> {
    /// The runners-up, most probable first.
    fn others(&self) -> impl Iterator<Item = (Token, Level)> {
        self.others.clone().map(|index| self.runners_up.other(index))
    }
}

/// Bits of a token of a vocabulary.
pub(crate) fn token_bits(vocab_size: u32) -> u32 {
    u32::BITS - vocab_size.saturating_sub(1).leading_zeros()
}

/// Bits of a runner-up.
pub(crate) fn other_bits(token_bits: u32) -> usize {
    (token_bits + LEVEL_BITS) as usize
}

/// The level of the token that was written, and the number of runners-up.
fn unpacked(race: u8) -> (Level, u32) {
    (race >> COUNT_BITS, u32::from(race & ((1 << COUNT_BITS) - 1)) + 1)
}

/// The level nearest to a probability; none if that is nearly 0.
fn level(probability: f32) -> Option<Level> {
    let coded = (probability.clamp(0.0, 1.0).to_bits() + (1 << (LEFT_OUT - 1))) >> LEFT_OUT;
    let level = u8::try_from((1.0_f32.to_bits() >> LEFT_OUT).checked_sub(coded)?).ok()?;
    (level < 1 << LEVEL_BITS).then_some(level)
}

fn probability(level: Level) -> f32 {
    f32::from_bits(1.0_f32.to_bits() - (u32::from(level) << LEFT_OUT))
}

/// The runners-up of a pool while it is built.
#[derive(Debug, Default)]
pub(crate) struct RunnersUpBuilder {
    pub(crate) known: Vec<[u32; 3]>,
    pub(crate) races: Vec<u8>,
    /// Number of runners-up.
    pub(crate) count: usize,
    pub(crate) others: Vec<u32>,
}

/// A place, the level of the token that was written there, and the runners-up, most probable first.
type Contested = (u32, Level, Vec<(Level, Token)>);

impl RunnersUpBuilder {
    /// Takes the runners-up of all tokens of a pool, in order of their places among all. The rest of the pool has so
    /// many bytes.
    pub(crate) fn build(tokens: &[Token], runners_up: &[RunnerUp], (vocab_size, rest): (u32, usize)) -> Self {
        let token_bits = token_bits(vocab_size);
        let mut races = contested(tokens, runners_up);
        let least = least_probable(&races, room(tokens.len(), rest), other_bits(token_bits));
        for (.., others) in &mut races {
            others.retain(|(level, _)| Some(*level) <= least);
        }
        races.retain(|(.., others)| !others.is_empty());
        if races.is_empty() {
            return Self::default();
        }
        let mut built = Self { known: vec![[0; 3]; tokens.len().div_ceil(WORD)], ..Self::default() };
        for (place, written, others) in &races {
            built.push(*place as usize, *written, others, token_bits);
        }
        let mut before = [0, 0];
        let mut counts = built.races.iter().map(|&race| unpacked(race).1);
        for [bits, known, others] in &mut built.known {
            [*known, *others] = before;
            before[0] += bits.count_ones();
            before[1] += counts.by_ref().take(bits.count_ones() as usize).sum::<u32>();
        }
        built.others.truncate((built.count * other_bits(token_bits)).div_ceil(32));
        built
    }

    #[expect(clippy::cast_possible_truncation, reason = "there are 1 to 8 others, and words are halved")]
    fn push(&mut self, place: usize, written: Level, others: &[(Level, Token)], token_bits: u32) {
        self.known[place / WORD][0] |= 1 << (place % WORD);
        self.races.push(written << COUNT_BITS | (others.len() - 1) as u8);
        for &(level, token) in others {
            let first = self.count * other_bits(token_bits);
            let bits = u64::from(token << LEVEL_BITS | u32::from(level)) << (first % 32);
            self.others.resize(first / 32 + 2, 0);
            self.others[first / 32] |= bits as u32;
            self.others[first / 32 + 1] = (bits >> 32) as u32;
            self.count += 1;
        }
    }
}

/// Bits for the races and runners-up of so many tokens, beside the bits that find them.
fn room(tokens: usize, rest: usize) -> usize {
    let known = tokens.div_ceil(WORD) * 8 * size_of::<[u32; 3]>();
    (tokens * POOL_BITS).saturating_sub(8 * rest + known).max(tokens * LEAST_ROOM)
}

/// The races whose tokens are known, with at most [`RUNNERS_UP_MAX`] others each.
fn contested(tokens: &[Token], runners_up: &[RunnerUp]) -> Vec<Contested> {
    let races = runners_up.chunk_by(|a, b| a.place == b.place).filter_map(|race| {
        let place = race[0].place;
        let (written, others): (Vec<RunnerUp>, Vec<RunnerUp>) =
            race.iter().partition(|other| other.token == tokens[place as usize]);
        let known = others.iter().filter_map(|other| Some((level(other.probability)?, other.token)));
        let mut others: Vec<(Level, Token)> = known.collect();
        others.sort_unstable();
        others.truncate(RUNNERS_UP_MAX as usize);
        let written = level(written.first()?.probability).unwrap_or((1 << LEVEL_BITS) - 1);
        Some((place, written, others))
    });
    races.collect()
}

/// The last level for which there are enough bits, with all before it; none if there are too few for the first.
fn least_probable(races: &[Contested], mut room: usize, other_bits: usize) -> Option<Level> {
    let mut bits = [0; 1 << LEVEL_BITS];
    for (.., others) in races {
        for (index, (level, _)) in others.iter().enumerate() {
            bits[usize::from(*level)] += other_bits + if index == 0 { u8::BITS as usize } else { 0 };
        }
    }
    let enough = (0..).zip(bits).take_while(|(_, bits)| {
        room.checked_sub(*bits).is_some_and(|left| {
            room = left;
            true
        })
    });
    enough.last().map(|(level, _)| level)
}

/// What the probabilities of a race come to at a temperature: p^(1/T), relative to the sum over those that are known
/// and what they leave, which counts as one token.
#[derive(Debug, Clone)]
pub(crate) struct Sharpness([f32; 1 << LEVEL_BITS]);

impl Sharpness {
    /// Of texts that are drawn at this temperature, which is above 0.
    pub(crate) fn new(temperature: f32) -> Self {
        let mut powers = [0.0; 1 << LEVEL_BITS];
        for (power, level) in powers.iter_mut().zip(0..) {
            *power = probability(level).powf(temperature.recip());
        }
        Self(powers)
    }

    /// The share of the token that was written, and each runner-up with its own.
    pub(crate) fn shares<'r>(&'r self, race: &'r Race<'_>) -> (f32, impl Iterator<Item = (Token, f32)>) {
        let power = |level: Level| self.0[usize::from(level)];
        let (mut sum, mut left) = (power(race.written), 1.0 - probability(race.written));
        for (_, level) in race.others() {
            sum += power(level);
            left -= probability(level);
        }
        let factor = (sum + level(left).map_or(0.0, power)).max(f32::MIN_POSITIVE).recip();
        (power(race.written) * factor, race.others().map(move |(token, level)| (token, power(level) * factor)))
    }
}

#[cfg(test)]
mod tests;
