//! `[recommender]`: a model that makes lists, and how it learns.

use laser_train::RecommenderOptions;
use serde::{Deserialize, Serialize};

/// `[recommender]`: what `laser train recommender` makes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecommenderConfig {
    /// The folder that the model is written to.
    pub output: String,
    /// The latest items of each history, which are only measured on.
    pub held_out: usize,
    /// The model and how it learns.
    #[serde(rename = "model")]
    pub options: RecommenderOptions,
}

impl Default for RecommenderConfig {
    fn default() -> Self {
        Self { output: String::new(), held_out: 1, options: RecommenderOptions::default() }
    }
}
