//! What an epoch of a training has come to.

use serde::{Deserialize, Serialize};

/// The weight of each pass relative to the one before: deeper places are not to be learned at the expense of the first.
pub(crate) const PASS_WEIGHT: f64 = 0.5;

/// The share of tokens that speculative sampling accepts at temperature 1: mean Σ min(p, q).
pub(crate) const OVERLAP: &str = "overlap";

/// An epoch of a training, measured on what was held out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Epoch {
    /// From 1.
    pub epoch: usize,
    /// Mean loss of its steps, in nats a token.
    pub loss: f64,
    /// The same loss on what was held out.
    pub held_out_loss: f64,
    /// Shares of what was held out, by name:
    /// - `overlap`: mean Σ min(p, q) of target and draft, the share that speculative sampling accepts at temperature 1;
    /// - `first`: places where target and draft put the same token first, and `at depth N`, the same of what works on
    ///   features: of EAGLE's layer from its own features of so many places before, of Medusa by its further heads;
    /// - of a recommender `first code`: items whose first code is the most probable one of its level, and `all codes`:
    ///   items of which every code is, so that greedy decoding writes them.
    pub shares: Vec<(String, f64)>,
    /// Of an acceptance head: the least held-out loss that the draft model's own probabilities of the same tokens
    /// reach, whatever their scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_loss: Option<f64>,
    /// What the epoch that is kept has most of.
    pub score: f64,
    /// Seconds.
    pub seconds: f64,
}

impl Epoch {
    /// A share by its name.
    #[must_use]
    pub fn share(&self, name: &str) -> Option<f64> {
        self.shares.iter().find(|(known, _)| known == name).map(|(_, share)| *share)
    }

    /// For whoever waits.
    pub(crate) fn line(&self) -> String {
        let shares = self.shares.iter().map(|(name, share)| format!("{name} {:.1} %", 100.0 * share));
        let shares = shares.collect::<Vec<_>>().join(", ");
        format!("loss {:.3}, held out {:.3}; {shares}", self.loss, self.held_out_loss)
    }
}
