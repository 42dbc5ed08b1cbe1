//! `[recommender]`: a model that makes lists, and how it learns.

use anyhow::{Context, Result, ensure};
use laser_train::{Alignment, RecommenderLoss, RecommenderOptions};
use serde::{Deserialize, Serialize};

/// `[recommender]`: what `laser train recommender` makes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecommenderConfig {
    /// The folder that the model is written to.
    pub output: String,
    /// A table of sequences (`laser prepare atspeed`) to learn from in place of the input's histories, with its own
    /// division into what is learned and what is only measured on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequences: Option<String>,
    /// The latest items of each history of the input, which are only measured on.
    pub held_out: usize,
    /// The model and how it learns.
    #[serde(rename = "model")]
    pub options: RecommenderOptions,
    /// A smaller model that drafts for it.
    pub draft: RecommenderDraftConfig,
}

impl Default for RecommenderConfig {
    fn default() -> Self {
        Self {
            output: String::new(),
            sequences: None,
            held_out: 1,
            options: RecommenderOptions::default(),
            draft: RecommenderDraftConfig::default(),
        }
    }
}

impl RecommenderConfig {
    /// Checks what every training of a recommender needs.
    ///
    /// # Errors
    /// Naming the key.
    pub(crate) fn check(&self) -> Result<()> {
        check_folder("[recommender] output", &self.output)?;
        ensure!(self.held_out > 0, "[recommender] held_out = 0: expected at least 1 item of a history to measure on");
        self.options.validate().context("[recommender.model]")?;
        let loss = self.options.loss;
        ensure!(
            !loss.has_target(),
            "[recommender.model] loss = \"{loss}\": learns from a target, and this model is one; use \"sft\", or set \
             it in [recommender.draft.model]"
        );
        Ok(())
    }
}

/// `[recommender.draft]`: what `laser train draft --for recommendation` makes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecommenderDraftConfig {
    /// The folder that the draft model is written to; the target is `[recommender] output`.
    pub output: String,
    /// Items of a list that the target makes for each history, for a loss on lists.
    pub lists: usize,
    /// Items of each list that are learned from per epoch, drawn anew each time.
    pub list_items: usize,
    /// The share of the loss on lists; the rest is the cross-entropy on the histories.
    pub alpha: f64,
    /// Whether losses on distributions compare the codes that the catalogue allows behind a prefix, or all tokens.
    pub constrained_alignment: bool,
    /// The draft model and how it learns.
    #[serde(rename = "model")]
    pub options: RecommenderOptions,
}

/// Those of a draft of 0.3 million weights for the 12,000 items of Amazon Beauty. WordKD covers lists of 20 items best,
/// there and on MovieLens-1M, and the target makes no lists for it.
impl Default for RecommenderDraftConfig {
    fn default() -> Self {
        let options = RecommenderOptions {
            loss: RecommenderLoss::WordKd,
            hidden_size: 96,
            intermediate_size: 288,
            layers: 2,
            ..RecommenderOptions::default()
        };
        Self {
            output: String::new(),
            lists: 20,
            list_items: 2,
            alpha: laser_train::atspeed::ALPHA,
            constrained_alignment: true,
            options,
        }
    }
}

impl RecommenderDraftConfig {
    /// How the target's lists are learned from.
    pub(crate) fn alignment(&self) -> Alignment {
        let Self { lists, list_items, alpha, constrained_alignment: constrained, .. } = *self;
        Alignment { lists, list_items, alpha, constrained }
    }

    /// Checks what the types leave open.
    ///
    /// # Errors
    /// Naming the key.
    pub(crate) fn check(&self) -> Result<()> {
        check_folder("[recommender.draft] output", &self.output)?;
        self.alignment().validate().context("[recommender.draft]")?;
        self.options.validate().context("[recommender.draft.model]")
    }
}

/// Refuses a key that names no local folder.
fn check_folder(key: &str, folder: &str) -> Result<()> {
    ensure!(!folder.is_empty(), "{key}: not set; give a folder for the model");
    ensure!(
        !folder.contains("://"),
        "{key} = {folder:?}: expected a local folder; copy it to a store when it is done, [model] path may be a URL"
    );
    Ok(())
}
