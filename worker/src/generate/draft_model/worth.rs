//! What a draft model's forwards are worth, learnt from what they gained and what came of it.

use std::ops::RangeInclusive;

/// Rate of the averages of gains and of tokens per second: about the last thirty steps count.
pub(super) const RATE: f64 = 0.03;

/// Texts that a forward reads as long as it is not known to pay: those of which the fewest tokens are left to read.
pub(super) const TRIAL_TEXTS: usize = 2;

/// Forwards after which their gain counts as known, and after as many more each twice as many texts may be read.
pub(super) const TRIAL_FORWARDS: u32 = 8;

/// Times that the texts of a trial are doubled, at most: beyond any batch.
const TRIAL_DOUBLINGS: u32 = 20;

/// A forward that did not pay is tried again after so many steps, and then ever more rarely up to so many: it may pay
/// on other texts.
const RETRY_STEPS: RangeInclusive<u32> = 32..=4096;

/// Tokens that are taken to be gained as expected before any were.
const TRUSTED: f64 = 4.0;

/// What a forward of a step is worth, by its place among them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Worth {
    /// Sums over the last forwards: the expected tokens that they gained, and the path probabilities of the nodes that
    /// they read. None before the first.
    gain: f64,
    reached: f64,
    /// How many there were.
    forwards: u32,
    /// Steps since the last one, and after how many it is tried again.
    idle: u32,
    wait: u32,
}

impl Worth {
    /// Expected tokens per unit of path probability, once they are known.
    pub(super) fn rate(&self) -> Option<f64> {
        (self.forwards >= TRIAL_FORWARDS && self.reached > 0.0).then(|| self.gain / self.reached)
    }

    /// Texts that may be read, as far as is known from fewer what that gains.
    pub(super) fn texts(&self) -> usize {
        TRIAL_TEXTS << (self.forwards / TRIAL_FORWARDS).min(TRIAL_DOUBLINGS)
    }

    /// Takes note of whether the forward pays. If not, whether it is tried all the same.
    pub(super) fn tries(&mut self, pays: bool) -> bool {
        if pays {
            (self.idle, self.wait) = (0, *RETRY_STEPS.start());
        }
        self.idle += 1;
        let tries = self.idle > self.wait.max(*RETRY_STEPS.start());
        if tries {
            (self.idle, self.wait) = (0, (2 * self.wait).clamp(2 * RETRY_STEPS.start(), *RETRY_STEPS.end()));
        }
        tries
    }

    /// Learns what a forward gained of how much that it read.
    pub(super) fn learn(&mut self, gain: f64, reached: f64) {
        self.forwards = self.forwards.saturating_add(1);
        self.gain += gain - RATE * self.gain;
        self.reached += reached - RATE * self.reached;
    }
}

/// What refined trees were to gain over the last steps, and what they did, in tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Promise {
    expected: f64,
    kept: f64,
}

impl Promise {
    /// The share of what is expected that comes.
    pub(super) fn share(self) -> f64 {
        ((self.kept + TRUSTED) / (self.expected + TRUSTED)).max(0.0)
    }

    /// Learns of one text of a step, of so many that were drafted.
    pub(super) fn learn(&mut self, expected: f64, kept: f64, texts: usize) {
        let rate = RATE / texts.max(1) as f64;
        self.expected += expected - rate * self.expected;
        self.kept += kept - rate * self.kept;
    }
}
