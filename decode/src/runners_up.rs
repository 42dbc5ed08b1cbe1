//! Runners-up: what the target thought probable at the places of a pool's texts, beside what it wrote there.
//!
//! A context that occurs once has one continuation, however close the race was that it won. With the probabilities of
//! those that lost it has a distribution, and a text that is drawn at a temperature runs the race anew. Greedy texts do
//! not: what won once wins again, so their drafts count what was written (docs/research/soft-pools.md).
//!
//! Probabilities are kept where the race was close, in a byte each. The places that have them are bits, with the number
//! of those before every 32 of them, so a look-up is two reads.

use std::cmp::Reverse;

use crate::Token;

/// The most runners-up that a pool keeps of a place.
pub const RUNNERS_UP_MAX: u32 = 8;

/// By how many places runners-up may be off where a text is encoded in more or fewer tokens than it was written in. So
/// are three of four descriptions by `profile-lm` at a temperature of 1.
const SHIFT_MAX: i64 = 4;

/// Places per word of bits.
const WORD: usize = 32;

/// Largest value of a byte of probability, which stands for 1.
const CERTAIN: f32 = 255.0;

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
    /// Per 32 places a bit for each that is known, and how many are known before them.
    pub(crate) known: &'a [[u32; 2]],
    /// For each known place so many tokens, most probable first, with the probability in the highest byte; 0 is none.
    pub(crate) others: &'a [u32],
    pub(crate) most: usize,
    /// For each known place the probability of the token that was written.
    pub(crate) written: &'a [u8],
}

impl<'a> RunnersUp<'a> {
    /// The probability of the token written at a place, and those that it left behind; none if that is not known.
    pub(crate) fn at(&self, place: usize) -> Option<(u8, &'a [u32])> {
        let [bits, before] = *self.known.get(place / WORD)?;
        let bit = 1 << (place % WORD);
        if bits & bit == 0 {
            return None;
        }
        let index = before as usize + (bits & (bit - 1)).count_ones() as usize;
        let others = self.others.get(index.checked_mul(self.most)?..)?.get(..self.most)?;
        Some((*self.written.get(index)?, others))
    }

    /// The races of the places from `from` to `to`, counted from `from`; `tokens` are those of all places.
    pub(crate) fn between(&self, tokens: &[Token], from: usize, to: usize) -> Vec<RunnerUp> {
        let mut found = Vec::new();
        for (&token, place) in tokens[from..=to].iter().zip(0..) {
            let Some((written, others)) = self.at(from + place as usize) else { continue };
            found.push(RunnerUp { place, token, probability: f32::from(written) / CERTAIN });
            found.extend(others.iter().filter(|&&other| other != 0).map(|&other| {
                let (token, probability) = unpacked(other);
                RunnerUp { place, token, probability: f32::from(probability) / CERTAIN }
            }));
        }
        found
    }
}

/// A runner-up's token and probability.
pub(crate) fn unpacked(other: u32) -> (Token, u8) {
    let [.., probability] = other.to_le_bytes();
    (other & 0x00ff_ffff, probability)
}

fn byte(probability: f32) -> u8 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the value is from 0 to 255")]
    let byte = (probability.clamp(0.0, 1.0) * CERTAIN).round() as u8;
    byte
}

/// The runners-up of a pool while it is built.
#[derive(Debug, Default)]
pub(crate) struct RunnersUpBuilder {
    pub(crate) known: Vec<[u32; 2]>,
    pub(crate) others: Vec<u32>,
    pub(crate) most: usize,
    pub(crate) written: Vec<u8>,
}

impl RunnersUpBuilder {
    /// Takes the runners-up of all tokens of a pool, in order of their places among all. None are kept where none is
    /// left whose probability is more than 0 as a byte.
    pub(crate) fn build(tokens: &[Token], runners_up: &[RunnerUp]) -> Self {
        let mut races: Vec<(u32, u8, Vec<u32>)> = Vec::new();
        for race in runners_up.chunk_by(|a, b| a.place == b.place) {
            let place = race[0].place;
            let (written, mut others): (Vec<RunnerUp>, Vec<RunnerUp>) =
                race.iter().partition(|other| other.token == tokens[place as usize]);
            others.retain(|other| byte(other.probability) > 0);
            others.sort_by_key(|other| (Reverse(byte(other.probability)), other.token));
            others.truncate(RUNNERS_UP_MAX as usize);
            if let (Some(written), false) = (written.first(), others.is_empty()) {
                let packed = |other: &RunnerUp| other.token | u32::from(byte(other.probability)) << 24;
                races.push((place, byte(written.probability), others.iter().map(packed).collect()));
            }
        }
        if races.is_empty() {
            return Self::default();
        }
        let most = races.iter().map(|(.., others)| others.len()).max().unwrap_or_default();
        let mut built = Self { known: vec![[0; 2]; tokens.len().div_ceil(WORD)], most, ..Self::default() };
        for (place, written, mut others) in races {
            built.known[place as usize / WORD][0] |= 1 << (place as usize % WORD);
            built.written.push(written);
            others.resize(most, 0);
            built.others.extend(others);
        }
        let mut before = 0;
        for word in &mut built.known {
            word[1] = before;
            before += word[0].count_ones();
        }
        built
    }
}

/// What the probabilities of a race come to at a temperature: p^(1/T), relative to the sum over those that are known
/// and what they leave, which counts as one token.
#[derive(Debug, Clone)]
pub(crate) struct Sharpness([f32; 256]);

impl Sharpness {
    /// Of texts that are drawn at this temperature, which is above 0.
    pub(crate) fn new(temperature: f32) -> Self {
        let mut powers = [0.0; 256];
        for (power, byte) in powers.iter_mut().zip(0_u8..) {
            *power = (f32::from(byte) / CERTAIN).powf(temperature.recip());
        }
        Self(powers)
    }

    /// The share of the token that was written, and the factor by which [`Self::of`] becomes the share of another.
    pub(crate) fn race(&self, written: u8, others: &[u32]) -> (f32, f32) {
        let left = others.iter().fold(u8::MAX - written, |left, &other| left.saturating_sub(unpacked(other).1));
        let sum: f32 = others.iter().map(|&other| self.of(other)).sum();
        let (written, left) = (self.0[usize::from(written)], self.0[usize::from(left)]);
        let factor = (written + sum + left).max(f32::MIN_POSITIVE).recip();
        (written * factor, factor)
    }

    /// The weight of a runner-up, before it is a share.
    pub(crate) fn of(&self, other: u32) -> f32 {
        self.0[usize::from(unpacked(other).1)]
    }
}

#[cfg(test)]
mod tests;
