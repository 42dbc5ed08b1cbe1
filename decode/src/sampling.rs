//! Keyed sampling: texts at a temperature above 0 that are as reproducible as greedy ones.
//!
//! A sample of p is the token x with the largest log p(x) + g(x), where g is Gumbel noise; or the first to arrive if x
//! takes the time E(x) / p(x) with exponential E. Here the noise is no stream but a function of the text, the place in
//! it and the token. So the target's own sample at a place depends on what stands before it and on nothing else: not on
//! the drafts, the tree, the batch or the order of work, and [`Verification::Strict`](crate::Verification::Strict)
//! accepts a drafted token if it is that sample. For drafts without a distribution of their own this accepts as often
//! as any rule that keeps the target's distribution. The idea of shared noise is that of arXiv:2408.07978.

use thiserror::Error;

use crate::Token;

/// Tokens whose noise is computed at once.
pub const NOISE_BLOCK: u32 = 4 * LANES;

/// Counters of a block: as many as a vector of 512 bits has words.
const LANES: u32 = 16;

/// Rounds of Philox, which passes BigCrush from 7 on (Salmon et al., SC 2011, table 2).
const ROUNDS: usize = 7;

/// The temperature below which texts are greedy in all but name: at 0.01 a token of 0.95 times the best one's
/// probability has 0.006 times its chance.
const TEMPERATURE_MIN: f32 = 0.01;

/// How a distribution is changed before a token is drawn from it: temperature, then `top_k`, then `top_p`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    temperature: f32,
    top_k: Option<u32>,
    top_p: f32,
}

/// A setting is out of its range.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum SamplingError {
    /// The temperature.
    #[error("temperature must be in {TEMPERATURE_MIN}..=100, got {0} (leave it out for greedy texts)")]
    Temperature(f32),
    /// `top_k` was 0.
    #[error("top_k must be at least 1 (leave it out to draw from all tokens)")]
    TopK,
    /// `top_p` was not a probability above 0.
    #[error("top_p must be above 0 and at most 1, got {0}")]
    TopP(f32),
}

impl Sampling {
    /// Draws from p^(1/`temperature`), of which only the `top_k` most probable tokens are left, and of these the most
    /// probable ones that together have at least `top_p` of the probability. Tokens as probable as the last of them
    /// stay too.
    ///
    /// # Errors
    /// [`SamplingError`].
    pub fn new(temperature: f32, top_k: Option<u32>, top_p: f32) -> Result<Self, SamplingError> {
        if !(TEMPERATURE_MIN..=100.0).contains(&temperature) {
            return Err(SamplingError::Temperature(temperature));
        }
        if top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(SamplingError::TopP(top_p));
        }
        Ok(Self { temperature, top_k, top_p })
    }

    /// The temperature.
    #[must_use]
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// The most probable tokens that may be drawn; all if absent.
    #[must_use]
    pub fn top_k(&self) -> Option<u32> {
        self.top_k
    }

    /// The probability that the tokens which may be drawn have at least; 1 keeps all.
    #[must_use]
    pub fn top_p(&self) -> f32 {
        self.top_p
    }
}

/// How the token at one place of a text is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// From which distribution.
    pub sampling: Sampling,
    /// What decides.
    pub noise: Noise,
}

impl Draw {
    /// The same so many tokens on.
    #[must_use]
    pub fn after(self, tokens: usize) -> Self {
        Self { noise: self.noise.after(tokens), ..self }
    }
}

/// The noise of a text, at one place of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Noise {
    key: u64,
    place: u32,
}

impl Noise {
    /// The noise at the first token of the text of this key.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { key, place: 0 }
    }

    /// The noise so many tokens on.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "sequences are shorter than 2^32 tokens")]
    pub fn after(self, tokens: usize) -> Self {
        Self { place: self.place.wrapping_add(tokens as u32), ..self }
    }

    /// The noise so many tokens before, which stands for a prompt: a text has the same noise behind any.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "sequences are shorter than 2^32 tokens")]
    pub fn before(self, tokens: usize) -> Self {
        Self { place: self.place.wrapping_sub(tokens as u32), ..self }
    }

    /// The key's words and the place, as kernels take them.
    #[must_use]
    pub fn words(self) -> [u32; 3] {
        let [low, high] = halves(self.key);
        [low, high, self.place]
    }

    /// Uniform words for the tokens from `block` times [`NOISE_BLOCK`] on: of Philox4x32 whose key is the text's and
    /// whose counter is place and block. Word j of a counter is that of token 16 j + its lane, so that blocks of
    /// counters are computed as vectors.
    #[inline(always)]
    #[must_use]
    pub fn block(self, block: u32) -> [u32; NOISE_BLOCK as usize] {
        let mut noise = [0; NOISE_BLOCK as usize];
        let words = self.words_of::<{ LANES as usize }>(block * LANES);
        for (part, words) in noise.chunks_exact_mut(LANES as usize).zip(words) {
            part.copy_from_slice(&words);
        }
        noise
    }

    /// The word of one token: that of its [`block`](Self::block).
    #[must_use]
    pub fn word(self, token: Token) -> u32 {
        let (block, within) = (token / NOISE_BLOCK, token % NOISE_BLOCK);
        let [word] = self.words_of(block * LANES + within % LANES)[(within / LANES) as usize];
        word
    }

    /// The four words of each of N counters from `first` on.
    #[inline(always)]
    fn words_of<const N: usize>(self, first: u32) -> [[u32; N]; 4] {
        let mut key = halves(self.key);
        let mut words = [[0; N], [self.place; N], [0; N], [0; N]];
        for (word, counter) in words[0].iter_mut().zip(first..) {
            *word = counter;
        }
        for _ in 0..ROUNDS {
            words = round(words, key);
            key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        }
        words
    }
}

/// The time that a token of this weight takes under a word of noise. The smaller the word, the earlier.
#[must_use]
pub fn arrival(word: u32, weight: f32) -> f64 {
    // 1 - u is exact.
    -(1.0 - unit(word)).ln() / f64::from(weight)
}

/// A word as a number in (0, 1).
fn unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// One round of Philox4x32 in every lane.
#[inline(always)]
fn round<const N: usize>([a, b, c, d]: [[u32; N]; 4], key: [u32; 2]) -> [[u32; N]; 4] {
    let mut out = [[0; N]; 4];
    for lane in 0..N {
        let [low_a, high_a] = halves(u64::from(a[lane]) * 0xd251_1f53);
        let [low_c, high_c] = halves(u64::from(c[lane]) * 0xcd9e_8d57);
        out[0][lane] = high_c ^ b[lane] ^ key[0];
        out[1][lane] = low_c;
        out[2][lane] = high_a ^ d[lane] ^ key[1];
        out[3][lane] = low_a;
    }
    out
}

/// Low and high word.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[cfg(test)]
pub(crate) mod tests;
