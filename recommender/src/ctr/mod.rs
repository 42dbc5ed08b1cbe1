//! CTR models that measure knowledge: DIN and DCNv2 on interactions split by time, with and without features from
//! texts.
//!
//! An impression is a user, an item, a time and a label. A model sees the ids of both, the user's items *before* that
//! time with their labels and, if a [`Variant`] has any, knowledge of the user and of the item: vectors through a small
//! learnt projection, or ids that are looked up like any categorical feature (LASER 4.4). Training minimises the log
//! loss with AdamW and ends when the validation AUC no longer improves. The test part is evaluated once, with the
//! weights of the best epoch.
//!
//! Tensors are candle's, on the CPU. Each training runs on one thread, so several can run side by side and none depends
//! on their number. A seed decides initial weights, order and dropout.

mod data;
mod knowledge;
mod layers;
mod network;
mod train;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use data::{Data, DataError, Impression, Part};
pub use knowledge::{Codes, CodesError, Feature, Variant, Vectors};
pub use train::{CtrError, Run, evaluate};

/// A CTR model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Deep Interest Network (Zhou et al. 2018): the history is summed with weights that depend on the item.
    Din,
    /// Deep & Cross Network V2 (Wang et al. 2021), cross and deep side by side; the history is averaged.
    DcnV2,
}

impl ModelKind {
    /// The name in papers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Din => "DIN",
            Self::DcnV2 => "DCNv2",
        }
    }
}

/// The `[eval.training]` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// Number of latest items of the history that a model sees.
    pub history: usize,
    /// Values of an embedding.
    pub dimension: usize,
    /// Widths of the deep layers.
    pub hidden: Vec<usize>,
    /// Layers of DCNv2's cross network.
    pub cross_layers: usize,
    /// Impressions per step.
    pub batch: usize,
    /// AdamW's step size.
    pub learning_rate: f64,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// Share of the deep layers' values that a step leaves out.
    pub dropout: f64,
    /// Share of the user and item ids that a step treats as unknown, which teaches a model to handle new ones.
    pub id_dropout: f64,
    /// Most passes over the impressions.
    pub epochs: usize,
    /// Epochs without a better validation AUC that end training.
    pub patience: usize,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            history: 20,
            dimension: 16,
            hidden: vec![64, 32],
            cross_layers: 2,
            batch: 512,
            learning_rate: 0.001,
            weight_decay: 0.1,
            dropout: 0.2,
            id_dropout: 0.1,
            epochs: 20,
            patience: 2,
        }
    }
}

impl TrainingConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// The first key with an invalid value, and what was expected.
    pub fn validate(&self) -> Result<(), String> {
        let narrowest = self.hidden.iter().min().copied().unwrap_or(0);
        let counts = [
            ("history", self.history),
            ("dimension", self.dimension),
            ("hidden", narrowest),
            ("batch", self.batch),
            ("epochs", self.epochs),
            ("patience", self.patience),
        ];
        if let Some((key, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(format!("[eval.training] {key}: expected at least 1"));
        }
        if !(self.learning_rate > 0.0 && self.learning_rate.is_finite()) {
            return Err(format!("[eval.training] learning_rate = {}: expected a number above 0", self.learning_rate));
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return Err(format!("[eval.training] weight_decay = {}: expected 0 or more", self.weight_decay));
        }
        for (key, share) in [("dropout", self.dropout), ("id_dropout", self.id_dropout)] {
            if !(0.0..1.0).contains(&share) {
                return Err(format!("[eval.training] {key} = {share}: expected a share from 0 to below 1"));
            }
        }
        Ok(())
    }
}
