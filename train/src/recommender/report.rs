//! What an epoch of a recommender's training has come to.

use serde::{Deserialize, Serialize};

use crate::epoch::Report;

/// An epoch of a recommender, measured. Means are over codes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RecommenderEpoch {
    /// From 1.
    pub epoch: usize,
    /// Mean loss of its steps, in nats a code.
    pub loss: f64,
    /// The same loss on the held-out items.
    pub held_out_loss: f64,
    /// The share of held-out items whose first code is the most probable one of its level.
    pub first: f64,
    /// The share of held-out items of which every code is, so that greedy decoding writes the item.
    pub all: f64,
    /// With a target: mean Σ min(p, q) on the held-out items, the share of codes that speculative sampling accepts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<f64>,
    /// Seconds.
    pub seconds: f64,
}

impl Report for RecommenderEpoch {
    fn score(&self) -> f64 {
        -self.held_out_loss
    }

    fn line(&self) -> String {
        let overlap = self.overlap.map(|overlap| format!(", overlap {:.1} %", 100.0 * overlap));
        format!(
            "loss {:.3}, held out {:.3}; first code {:.1} %, all codes {:.1} %{}",
            self.loss,
            self.held_out_loss,
            100.0 * self.first,
            100.0 * self.all,
            overlap.unwrap_or_default()
        )
    }
}
