//! What a recommender's config.json says of it.

use std::path::Path;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::epoch::Epoch;
use crate::output::entry;

/// The key of [`RecommenderBelongs`] in config.json.
pub(crate) const BELONGS: &str = "laser_recommender";

/// What a recommender was trained on, and the format of its prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecommenderBelongs {
    /// Codes of each level; their tokens follow each other.
    pub levels: Vec<usize>,
    /// The most items of a prompt: the newest of the history.
    pub max_items: usize,
    /// Whether probabilities are normalised over the codes of a level, not over the whole vocabulary.
    pub constrained: bool,
    /// Digest of codes and identifiers.
    pub identifiers: String,
    /// Digest of the sequences that were learned from and measured on.
    pub sequences: String,
    /// Digest of the target's weights, if it was trained to draft for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// What the training was a function of.
    pub training: String,
    /// The epoch that was kept.
    pub kept: Epoch,
}

impl RecommenderBelongs {
    /// What the config.json in a folder says; none if Laser did not train a recommender there.
    ///
    /// # Errors
    /// A config.json that cannot be read, or whose entry is another version's.
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        entry(folder, BELONGS)
    }
}
