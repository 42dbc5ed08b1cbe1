//! The `[train]` section.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// `[train]`: a draft model and how it learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// The folder that the draft model is written to.
    pub output: String,
    /// Texts at most, the newest nights' first.
    pub texts: usize,
    /// The share of the entities whose texts are only measured on.
    pub held_out: f64,
    /// What is trained.
    pub kind: DraftKind,
    /// What is minimised.
    pub loss: Loss,
    /// Of EAGLE's layer: passes over a text, each from the features of the one before; 1 is EAGLE, more is HASS.
    pub passes: usize,
    /// Of Medusa: heads, each of which tells one token further ahead.
    pub medusa_heads: usize,
    /// Of an acceptance head: the draft model that it is for.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub draft: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers; of an acceptance head, residual blocks.
    pub layers: usize,
    /// Attention heads; they divide the hidden size into even numbers.
    pub heads: usize,
    /// Passes over the texts.
    pub epochs: usize,
    /// Tokens of a step at most, prompts included; a longer text is a step of its own.
    pub batch_tokens: usize,
    /// The largest learning rate: it rises over the first twentieth of the training and falls to 0 as a cosine.
    pub learning_rate: f64,
    /// Decay of the matrices, as a share per step of the learning rate.
    pub weight_decay: f64,
    /// Decides initial weights, order, and which entities are held out.
    pub seed: u64,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftKind {
    /// A small Llama model of its own.
    #[default]
    Model,
    /// One layer over the target's features, of the shape of the target's layers (EAGLE).
    Eagle,
    /// Heads over the target's features, one for each token ahead (Medusa).
    Medusa,
    /// A head over a draft model's features that tells whether the target is going to accept a token (SpecDec++).
    Acceptance,
}

/// What is minimised, of the target's distribution p and the draft model's q at each place of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loss {
    /// −ln q(x) of the text's own token x: learning from the texts alone.
    CrossEntropy,
    /// Σ p ln(p / q), the Kullback–Leibler divergence: distillation.
    #[default]
    Kl,
    /// −ln Σ min(p, q), the acceptance of speculative sampling itself. Where the distributions hardly overlap it says
    /// nothing of the direction, so the first epoch is [`Self::Kl`]'s.
    Overlap,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            output: String::new(),
            texts: 20_000,
            held_out: 0.05,
            kind: DraftKind::default(),
            loss: Loss::default(),
            passes: 3,
            medusa_heads: 4,
            draft: String::new(),
            hidden_size: 128,
            intermediate_size: 384,
            layers: 2,
            heads: 4,
            epochs: 10,
            batch_tokens: 8192,
            learning_rate: 3e-3,
            weight_decay: 0.01,
            seed: 0,
        }
    }
}

impl DraftKind {
    /// Whether it works on the target's features.
    #[must_use]
    pub fn reads_features(self) -> bool {
        matches!(self, Self::Eagle | Self::Medusa)
    }
}

impl TrainConfig {
    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("texts", self.texts),
            ("passes", self.passes),
            ("medusa_heads", self.medusa_heads),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("epochs", self.epochs),
            ("batch_tokens", self.batch_tokens),
        ] {
            ensure!(value > 0, "[train] {key} = 0: expected at least 1");
        }
        let Self { hidden_size, heads, held_out, learning_rate, weight_decay, .. } = self;
        ensure!(
            hidden_size.is_multiple_of(2 * heads),
            "[train] heads = {heads}: expected a number that divides hidden_size = {hidden_size} into even numbers"
        );
        ensure!(*held_out > 0.0 && *held_out <= 0.5, "[train] held_out = {held_out}: expected a share up to 0.5");
        ensure!(
            *learning_rate > 0.0 && *learning_rate <= 1.0,
            "[train] learning_rate = {learning_rate}: expected a number above 0 and up to 1, such as 0.003"
        );
        ensure!(
            (0.0..1.0).contains(weight_decay),
            "[train] weight_decay = {weight_decay}: expected a share from 0 to below 1"
        );
        Ok(())
    }
}
