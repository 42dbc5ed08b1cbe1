//! CTR models that judge knowledge: DIN and DCNv2 on interactions split by time or by item, with and without features
//! of attributes and texts.
//!
//! An impression is a user, an item, a time and a label. A model sees the ids of both, a history of the user's other
//! items with their labels, and the features of a [`Variant`]: vectors through a small learnt projection, ids that are
//! looked up like any categorical feature (LASER 4.4), and an embedding bag for each attribute and for the words of the
//! texts. Training minimises the log loss with AdamW and ends when the AUC on the validation part gets no better; the
//! test part is looked at once, with the weights of the best epoch.
//!
//! # New items
//!
//! All ids that are not trained on share one vector. Training replaces a random share of the ids by it (`id_dropout`),
//! so that a model learns to do without: DropoutNet (Volkovs, Yu and Poutanen 2017), with a learnt vector in place of
//! its zeros. With `content_in_history` an item's vector is the sum of the vectors of its id and its features (as in
//! LightFM, Kula 2015), both as target and in histories (DIN's own items are concatenations of goods, shop and category
//! ids), so that what a user liked tells something about items that nobody has seen. DCNv2 then averages liked and
//! disliked items apart.
//!
//! Tensors are candle's, on the CPU. Each training runs on one thread, so several can run side by side and none depends
//! on their number. A seed decides initial weights, order and dropout.

mod data;
mod fields;
mod knowledge;
mod layers;
mod network;
mod train;

#[cfg(test)]
mod tests;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

pub use data::{Data, Impression, ItemSplit, Part};
pub use knowledge::{Bags, Codes, CodesError, Feature, Variant, Vectors};
pub use train::{GroupQuality, ITEM_GROUPS, ItemGroup, Run, evaluate};

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
    /// The same for item ids alone, where items are new more often than users; `id_dropout` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item_id_dropout: Option<f64>,
    /// Whether items carry their features in histories, too.
    pub content_in_history: bool,
    /// Passes over the impressions at most.
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
            item_id_dropout: None,
            content_in_history: false,
            epochs: 20,
            patience: 2,
        }
    }
}

impl TrainingConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// The first key whose value makes no sense, with what was expected.
    pub fn validate(&self) -> Result<()> {
        let narrowest = self.hidden.iter().min().copied().unwrap_or(0);
        let counts = [
            ("history", self.history),
            ("dimension", self.dimension),
            ("hidden", narrowest),
            ("batch", self.batch),
            ("epochs", self.epochs),
            ("patience", self.patience),
        ];
        for (key, count) in counts {
            ensure!(count > 0, "[eval.training] {key}: expected at least 1");
        }
        let Self { learning_rate, weight_decay, .. } = self;
        ensure!(
            *learning_rate > 0.0 && learning_rate.is_finite(),
            "[eval.training] learning_rate = {learning_rate}: expected a number above 0"
        );
        ensure!(
            *weight_decay >= 0.0 && weight_decay.is_finite(),
            "[eval.training] weight_decay = {weight_decay}: expected 0 or more"
        );
        let shares =
            [("dropout", self.dropout), ("id_dropout", self.id_dropout), ("item_id_dropout", self.item_dropout())];
        for (key, share) in shares {
            ensure!((0.0..1.0).contains(&share), "[eval.training] {key} = {share}: expected a share from 0 to below 1");
        }
        Ok(())
    }

    /// The share of item ids that a step takes for unknown.
    fn item_dropout(&self) -> f64 {
        self.item_id_dropout.unwrap_or(self.id_dropout)
    }
}
