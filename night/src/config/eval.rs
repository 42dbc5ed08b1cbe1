//! `[eval]`: which recommender models are trained on which interactions, with which knowledge.

use anyhow::{Result, anyhow, ensure};
use laser_recommender::ctr::{ModelKind, TrainingConfig};
use laser_schema::EntityTable;
use laser_schema::embedding::EmbeddingSource;
use laser_schema::interactions::{SplitBy, Until};
use serde::{Deserialize, Serialize};

/// `[eval]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// The models to train.
    pub models: Vec<ModelKind>,
    /// The rating from which an interaction counts as positive.
    pub positive_rating: f32,
    /// Whether one instant ends training for all, or a share of each user's interactions.
    pub split_by: SplitBy,
    /// Where training ends.
    pub train_until: Until,
    /// Where validation ends and the test begins.
    pub validation_until: Until,
    /// How many times each model is trained.
    pub seeds: u64,
    /// The difference of AUC that counts as equivalent.
    pub margin: f64,
    /// How the models are trained.
    pub training: TrainingConfig,
    /// The knowledge to compare.
    pub knowledge: Vec<KnowledgeConfig>,
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
pub struct KnowledgeConfig {
    /// What tables call it.
    pub name: String,
    /// Embeddings of the users' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_embeddings: Option<EmbeddingSource>,
    /// Embeddings of the items' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_embeddings: Option<EmbeddingSource>,
    /// Knowledge ids of the users' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_ids: Option<IdsSource>,
    /// Knowledge ids of the items' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_ids: Option<IdsSource>,
    /// The tables that the texts were written from.
    #[serde(default)]
    pub entities: Vec<EntityTable>,
}

/// A table of knowledge ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdsSource {
    /// The table.
    pub table: String,
    /// The column of entity ids.
    #[serde(default = "entity_id_column")]
    pub id: String,
    /// The column of knowledge ids.
    #[serde(default = "ids_column")]
    pub ids: String,
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
    pub fn validate(&self) -> Result<()> {
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
