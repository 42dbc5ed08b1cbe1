//! The `[eval]` section.

use anyhow::{Result, ensure};
use laser_schema::EntityTable;
use laser_schema::embedding::EmbeddingSource;
use laser_schema::interactions::{SplitBy, Until};
use serde::{Deserialize, Serialize};

use super::ListsEvalConfig;
use crate::ctr::{ModelKind, TrainingConfig};

/// The `[eval]` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// The models that are trained.
    pub models: Vec<ModelKind>,
    /// An interaction is positive from this rating on.
    pub positive_rating: f32,
    /// The way interactions are held out.
    pub split_by: Split,
    /// The end of training: a share or an instant; by item a share.
    pub train_until: Until,
    /// The end of validation; the rest tests.
    pub validation_until: Until,
    /// By item: the share of the items that have no training interaction and are tested on.
    pub item_share: f64,
    /// Trainings of each model and variant.
    pub seeds: u64,
    /// A smaller difference of AUC does not matter.
    pub margin: f64,
    /// The `[eval.training]` section.
    pub training: TrainingConfig,
    /// The `[eval.attributes]` section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<AttributesConfig>,
    /// The `[[eval.knowledge]]` sections.
    pub knowledge: Vec<KnowledgeConfig>,
    /// The `[eval.lists]` section, of `laser eval lists` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lists: Option<ListsEvalConfig>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            models: vec![ModelKind::Din, ModelKind::DcnV2],
            positive_rating: 4.0,
            split_by: Split::Time,
            train_until: Until::Share(0.8),
            validation_until: Until::Share(0.9),
            item_share: 0.2,
            seeds: 5,
            margin: 0.001,
            training: TrainingConfig::default(),
            attributes: None,
            knowledge: Vec::new(),
            lists: None,
        }
    }
}

/// The way interactions are held out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// The latest ones, after one instant for all.
    Time,
    /// Each user's latest ones.
    User,
    /// All of some items, which are new then, and a random choice of the others'.
    Item,
}

impl Split {
    /// The order of time that divides, if time does.
    pub(super) fn by_time(self) -> Option<SplitBy> {
        match self {
            Self::Time => Some(SplitBy::Time),
            Self::User => Some(SplitBy::User),
            Self::Item => None,
        }
    }
}

/// `[eval.attributes]`: attributes of the entity tables as features.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttributesConfig {
    /// The tables of items, users or both.
    pub entities: Vec<EntityTable>,
    /// The attributes that are used.
    pub names: Vec<String>,
}

/// `[[eval.knowledge]]`: texts of one origin, as words, as vectors or as ids; any of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnowledgeConfig {
    /// The origin, as reports name it.
    pub name: String,
    /// Texts of users, of which the words are features: published profiles, or `.jsonl` or `.parquet` with id and text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_texts: Option<String>,
    /// Texts of items, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_texts: Option<String>,
    /// Vectors of users' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_embeddings: Option<EmbeddingSource>,
    /// Vectors of items' texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_embeddings: Option<EmbeddingSource>,
    /// Knowledge ids of users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_ids: Option<IdsSource>,
    /// Knowledge ids of items.
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
    /// The table, a published folder, or the output that it is in.
    pub table: String,
    /// The column of the entity's id.
    #[serde(default = "entity_id_column")]
    pub id: String,
    /// The column of its knowledge ids.
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
    /// Checks what the types leave open; [`ListsEvalConfig::validate`] checks that section.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn validate(&self) -> Result<()> {
        let Self { positive_rating, seeds, margin, .. } = self;
        ensure!(!self.models.is_empty(), "[eval] models: expected \"din\", \"dcnv2\" or both");
        ensure!(positive_rating.is_finite(), "[eval] positive_rating = {positive_rating}: expected a number");
        if let (Until::Share(train), Until::Share(validation)) = (self.train_until, self.validation_until) {
            ensure!(
                train < validation,
                "[eval] validation_until = {validation}: expected more than train_until = {train}"
            );
        }
        if self.split_by == Split::Item {
            self.validate_item_split()?;
        }
        ensure!(*seeds >= 2, "[eval] seeds = {seeds}: expected at least 2, since chance is told from how seeds differ");
        ensure!(
            *margin > 0.0 && *margin < 0.5,
            "[eval] margin = {margin}: expected a difference of AUC, such as 0.001"
        );
        self.training.validate()?;
        if let Some(attributes) = &self.attributes {
            ensure!(
                !attributes.entities.is_empty() && !attributes.names.is_empty(),
                "[eval.attributes]: set entities to at least one table and names to at least one of its attributes"
            );
        }
        for (place, knowledge) in self.knowledge.iter().enumerate() {
            knowledge.validate(self.split_by)?;
            let (name, before) = (&knowledge.name, &self.knowledge[..place]);
            ensure!(
                before.iter().all(|other| other.name != *name),
                "[[eval.knowledge]] name = {name:?} is there twice"
            );
        }
        Ok(())
    }

    fn validate_item_split(&self) -> Result<()> {
        for (key, until) in [("train_until", self.train_until), ("validation_until", self.validation_until)] {
            ensure!(
                matches!(until, Until::Share(_)),
                "[eval] {key} = {until}: expected a share such as 0.8, since split_by = \"item\" knows no time"
            );
        }
        let share = self.item_share;
        ensure!(share > 0.0 && share <= 0.5, "[eval] item_share = {share}: expected a share above 0 and up to 0.5");
        Ok(())
    }
}

impl KnowledgeConfig {
    fn validate(&self, split: Split) -> Result<()> {
        let name = &self.name;
        ensure!(!name.is_empty(), "[[eval.knowledge]] name: empty");
        let of_users = self.user_texts.is_some() || self.user_embeddings.is_some() || self.user_ids.is_some();
        let of_items = self.item_texts.is_some() || self.item_embeddings.is_some() || self.item_ids.is_some();
        ensure!(
            of_users || of_items,
            "[[eval.knowledge]] {name:?}: set at least one of texts, embeddings and ids: item_texts, item_embeddings, \
             item_ids, user_texts, user_embeddings, user_ids"
        );
        ensure!(
            !of_users || split != Split::Item,
            "[[eval.knowledge]] {name:?}: texts of users tell about the items that split_by = \"item\" holds out; \
             remove user_texts, user_embeddings and user_ids, or set another split_by"
        );
        ensure!(
            !of_users || !self.entities.is_empty(),
            "[[eval.knowledge]] {name:?}: set entities to the tables that the texts of users were written from, which \
             shows that they know only what is before train_until"
        );
        Ok(())
    }
}
