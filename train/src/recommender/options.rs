//! How a recommender is made and learns.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A recommender and how it learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecommenderOptions {
    /// What is minimised.
    pub loss: RecommenderLoss,
    /// Whether probabilities are normalised over the codes of a place's level, not over the whole vocabulary.
    /// Generation has to do the same then, since nothing is learned of other tokens.
    pub constrained: bool,
    /// The most items of a prompt: the newest of the history.
    pub max_items: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub layers: usize,
    /// Heads of the queries; they divide the hidden size into even numbers.
    pub heads: usize,
    /// Heads of keys and values; they divide the others.
    pub kv_heads: usize,
    /// The share of numbers that a step sets to 0, in the embeddings and in what each layer adds to them.
    pub dropout: f64,
    /// The most passes over the histories.
    pub epochs: usize,
    /// Epochs in a row without a smaller held-out loss after which training ends.
    pub patience: usize,
    /// The most tokens of a step; a longer history is a step of its own.
    pub batch_tokens: usize,
    /// The largest learning rate: it rises over the warm-up and falls to 0 as a cosine.
    pub learning_rate: f64,
    /// The share of all steps over which the learning rate rises.
    pub warm_up: f64,
    /// Decay of the matrices, as a share per step of the learning rate.
    pub weight_decay: f64,
    /// Decides initial weights, order, and what is dropped.
    pub seed: u64,
}

/// What is minimised, of the recommender's distribution q at each code of an item, and of a target's p.
///
/// The last five learn on a target's lists: each listed item stands in place of the history's last one. AtSpeed's three
/// (arXiv:2410.05165, section 3) and [`ReverseKl`](Self::ReverseKl) compare q and p among the codes that the catalogue
/// allows behind each prefix. Their lists are the target's alone, where AtSpeed mixes those of both models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecommenderLoss {
    /// −ln q(x) of the item's own code x: learning from the histories alone.
    #[default]
    Sft,
    /// Σ p ln(p / q), the Kullback–Leibler divergence from a target.
    WordKd,
    /// ½ Σ |p − q|, the total variation distance from a target: what speculative sampling rejects.
    TvdKd,
    /// −ln q(x) of the codes of listed items: learning from the lists of a target as from histories.
    SeqKd,
    /// AtSpeed-S as printed ([`strict`](crate::atspeed::strict)), on a target's lists.
    #[serde(rename = "atspeed-s")]
    AtSpeedS,
    /// AtSpeed-S as its authors' code has it ([`strict_with_entropy`](crate::atspeed::strict_with_entropy)).
    #[serde(rename = "atspeed-s-entropy")]
    AtSpeedSEntropy,
    /// AtSpeed-S without its density term ([`reverse_divergence`](crate::atspeed::reverse_divergence)).
    ReverseKl,
    /// AtSpeed-R ([`relaxed`](crate::atspeed::relaxed)), on a target's lists.
    #[serde(rename = "atspeed-r")]
    AtSpeedR,
}

impl RecommenderLoss {
    /// Whether it needs a target.
    #[must_use]
    pub fn has_target(self) -> bool {
        self != Self::Sft
    }

    /// Whether it learns from the lists of a target, beside −ln q(x) on the histories.
    #[must_use]
    pub fn has_lists(self) -> bool {
        self.has_target() && !self.compares_data()
    }

    /// Whether it compares with what a target says of the histories themselves.
    pub(crate) fn compares_data(self) -> bool {
        matches!(self, Self::WordKd | Self::TvdKd)
    }
}

impl fmt::Display for RecommenderLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sft => "sft",
            Self::WordKd => "word-kd",
            Self::TvdKd => "tvd-kd",
            Self::SeqKd => "seq-kd",
            Self::AtSpeedS => "atspeed-s",
            Self::AtSpeedSEntropy => "atspeed-s-entropy",
            Self::ReverseKl => "reverse-kl",
            Self::AtSpeedR => "atspeed-r",
        })
    }
}

/// Those of a recommender of 2 million weights for the 12,000 items and 19,000 users of Amazon Beauty.
impl Default for RecommenderOptions {
    fn default() -> Self {
        Self {
            loss: RecommenderLoss::default(),
            constrained: false,
            max_items: 20,
            hidden_size: 192,
            intermediate_size: 576,
            layers: 4,
            heads: 3,
            kv_heads: 3,
            dropout: 0.1,
            epochs: 10,
            patience: 2,
            batch_tokens: 2048,
            learning_rate: 2e-3,
            warm_up: 0.05,
            weight_decay: 0.1,
            seed: 0,
        }
    }
}

impl RecommenderOptions {
    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("max_items", self.max_items),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("epochs", self.epochs),
            ("patience", self.patience),
            ("batch_tokens", self.batch_tokens),
        ] {
            ensure!(value > 0, "{key} = 0: expected at least 1");
        }
        let Self { hidden_size, heads, kv_heads, learning_rate, .. } = self;
        ensure!(
            hidden_size.is_multiple_of(2 * heads),
            "heads = {heads}: expected a number that divides hidden_size = {hidden_size} into even numbers"
        );
        ensure!(
            heads.is_multiple_of(*kv_heads),
            "kv_heads = {kv_heads}: expected a number that divides heads = {heads}"
        );
        ensure!(
            *learning_rate > 0.0 && *learning_rate <= 1.0,
            "learning_rate = {learning_rate}: expected a number above 0 and up to 1, such as 0.002"
        );
        for (key, share) in [("dropout", self.dropout), ("warm_up", self.warm_up), ("weight_decay", self.weight_decay)]
        {
            ensure!((0.0..1.0).contains(&share), "{key} = {share}: expected a share from 0 to below 1");
        }
        Ok(())
    }
}
