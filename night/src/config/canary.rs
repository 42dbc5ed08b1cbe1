//! `[canary]`: a share of a night's entities, made by this configuration beside the night.

use anyhow::{Result, ensure};
use laser_coordinator::canary::{CanaryEntities, CanaryError};
use laser_schema::EntityTable;
use serde::{Deserialize, Serialize};

/// `[canary]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CanaryConfig {
    /// The share of the entities of each kind.
    pub share: Option<f64>,
    /// Seed of the share.
    pub seed: u64,
    /// A table that names the entities instead, by `id` and, if it has such a column, `kind`.
    pub ids: Option<String>,
}

impl Default for CanaryConfig {
    fn default() -> Self {
        Self { share: None, seed: 1, ids: None }
    }
}

impl CanaryConfig {
    /// Checks the values.
    pub(super) fn validate(&self) -> Result<()> {
        ensure!(
            self.share.is_some() != self.ids.is_some(),
            "[canary]: give share or ids, one of them; without the section the run is the night itself"
        );
        let share = self.share.unwrap_or(1.0);
        ensure!(share > 0.0 && share <= 1.0, "[canary] share = {share}: expected above 0 and at most 1");
        ensure!(self.ids.as_ref().is_none_or(|ids| !ids.is_empty()), "[canary] ids: not set; give a table of ids");
        Ok(())
    }

    /// The entities of `tables` that are chosen.
    pub(crate) async fn entities(&self, tables: &[EntityTable]) -> Result<CanaryEntities, CanaryError> {
        match &self.ids {
            Some(ids) => CanaryEntities::of_ids(ids, tables).await,
            None => CanaryEntities::of_share(self.share.unwrap_or_default(), self.seed, tables).await,
        }
    }
}
