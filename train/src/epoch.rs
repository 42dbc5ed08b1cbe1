//! What an epoch of a training has come to.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The weight of each pass relative to the one before: deeper places are not to be learned at the expense of the first.
pub(crate) const PASS_WEIGHT: f64 = 0.5;

/// An epoch of any training, measured.
pub(crate) trait Report: Clone + Serialize + DeserializeOwned {
    /// What the best epoch has most of.
    fn score(&self) -> f64;

    /// For whoever waits.
    fn line(&self) -> String;
}

/// An epoch's steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    /// From 1.
    pub(crate) epoch: usize,
    /// Their mean loss, in nats.
    pub(crate) loss: f64,
    pub(crate) seconds: f64,
}

/// An epoch of a draft model, measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochReport {
    /// From 1.
    pub epoch: usize,
    /// Mean loss of its steps, in nats.
    pub loss: f64,
    /// Mean loss on the held-out texts, in nats.
    pub held_out_loss: f64,
    /// Mean Σ min(p, q) on the held-out texts: the share that speculative sampling accepts at temperature 1.
    pub overlap: f64,
    /// The share of held-out places where target and draft model put the same token first.
    pub first: f64,
    /// The same share of what works on features by depth, from 2 on: of EAGLE's layer from its own features of so many
    /// places before, of Medusa by its further heads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deeper: Vec<f64>,
    /// Of an acceptance head: the least held-out loss that the draft model's own probabilities of the same tokens
    /// reach, whatever their scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_loss: Option<f64>,
    /// Seconds.
    pub seconds: f64,
}

impl Report for EpochReport {
    /// The overlap, with that of each greater depth counting half as much. Of an acceptance head, whose probabilities
    /// are what it is for, the likelihood.
    fn score(&self) -> f64 {
        if self.own_loss.is_some() {
            return -self.held_out_loss;
        }
        let deeper = self.deeper.iter().zip(1..).map(|(first, depth)| first * PASS_WEIGHT.powi(depth));
        self.overlap + deeper.sum::<f64>()
    }

    fn line(&self) -> String {
        format!(
            "loss {:.3}, held out {:.3}; overlap {:.1} %, first {:.1} %",
            self.loss,
            self.held_out_loss,
            100.0 * self.overlap,
            100.0 * self.first
        )
    }
}
