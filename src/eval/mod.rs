//! `laser eval`: what embeddings and texts are worth to recommender models, on the user's own interactions.

mod ctr;
mod embed;
mod knowledge;
mod leak;
mod report;

use anyhow::{Result, anyhow, ensure};
use laser_recommender::ctr::{ModelKind, TrainingConfig};
use laser_schema::EntityTable;
use laser_schema::embedding::EmbeddingSource;
use laser_schema::interactions::{SplitBy, Until};
use serde::{Deserialize, Serialize};

use crate::bench::report::Style;

pub(crate) use ctr::ctr;
pub(crate) use embed::embed;

/// How findings are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Tables.
    Tables(Style),
    /// JSON.
    Json,
}

/// `[eval]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EvalConfig {
    pub(crate) models: Vec<ModelKind>,
    pub(crate) positive_rating: f32,
    pub(crate) split_by: SplitBy,
    pub(crate) train_until: Until,
    pub(crate) validation_until: Until,
    pub(crate) seeds: u64,
    pub(crate) margin: f64,
    pub(crate) training: TrainingConfig,
    pub(crate) knowledge: Vec<KnowledgeConfig>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            models: vec![ModelKind::Din, ModelKind::DcnV2],
            positive_rating: 4.0,
            split_by: SplitBy::Time,
            train_until: Until::Share(0.8),
            validation_until: Until::Share(0.9),
            seeds: 5,
            margin: 0.001,
            training: TrainingConfig::default(),
            knowledge: Vec::new(),
        }
    }
}

/// `[[eval.knowledge]]`: texts of one origin, as vectors, as ids, or both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KnowledgeConfig {
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user_embeddings: Option<EmbeddingSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) item_embeddings: Option<EmbeddingSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user_ids: Option<IdsSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) item_ids: Option<IdsSource>,
    #[serde(default)]
    pub(crate) entities: Vec<EntityTable>,
}

/// A table of knowledge ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IdsSource {
    pub(crate) table: String,
    #[serde(default = "entity_id_column")]
    pub(crate) id: String,
    #[serde(default = "ids_column")]
    pub(crate) ids: String,
}

fn entity_id_column() -> String {
    "entity_id".to_owned()
}

fn ids_column() -> String {
    "knowledge_ids".to_owned()
}

impl EvalConfig {
    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub(crate) fn validate(&self) -> Result<()> {
        ensure!(!self.models.is_empty(), "[eval] models: expected \"din\", \"dcnv2\" or both");
        ensure!(
            self.positive_rating.is_finite(),
            "[eval] positive_rating = {}: expected a number",
            self.positive_rating
        );
        if let (Until::Share(train), Until::Share(validation)) = (self.train_until, self.validation_until) {
            ensure!(
                train < validation,
                "[eval] validation_until = {validation}: expected more than train_until = {train}"
            );
        }
        ensure!(
            self.seeds >= 2,
            "[eval] seeds = {}: expected at least 2, since chance is told from how seeds differ",
            self.seeds
        );
        ensure!(
            self.margin > 0.0 && self.margin < 0.5,
            "[eval] margin = {}: expected a difference of AUC, such as 0.001",
            self.margin
        );
        self.training.validate().map_err(|reason| anyhow!(reason))?;
        for (place, knowledge) in self.knowledge.iter().enumerate() {
            knowledge.validate()?;
            let before = &self.knowledge[..place];
            ensure!(
                before.iter().all(|other| other.name != knowledge.name),
                "[[eval.knowledge]] name = {:?} is there twice",
                knowledge.name
            );
        }
        Ok(())
    }
}

impl KnowledgeConfig {
    fn validate(&self) -> Result<()> {
        let name = &self.name;
        ensure!(!name.is_empty(), "[[eval.knowledge]] name: empty");
        let of_users = self.user_embeddings.is_some() || self.user_ids.is_some();
        let of_items = self.item_embeddings.is_some() || self.item_ids.is_some();
        ensure!(
            of_users || of_items,
            "[[eval.knowledge]] {name:?}: set at least one of user_embeddings, item_embeddings, user_ids and item_ids"
        );
        ensure!(
            !of_users || !self.entities.is_empty(),
            "[[eval.knowledge]] {name:?}: set entities to the tables that the texts of users were written from, which shows \
             that they know only what is before train_until"
        );
        Ok(())
    }
}
