//! `[run]`, `[output]`, `[demo]`, `[worker]` and `[metrics]`: how the work is done, and where its results go.

use std::net::SocketAddr;
use std::path::PathBuf;

use jiff::civil::{Date, Time};
use laser_coordinator::priority::{PriorityError, Valuation};
use laser_schema::job::Priority;
use laser_store::Cache;
use serde::{Deserialize, Serialize};

/// Bands of value where `[run] priority_bands` says nothing.
const BANDS: usize = 20;

/// `[run]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The night; today in UTC if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<Date>,
    /// Which pools the run drafts from.
    pub pools: PoolChoice,
    /// Whether unchanged entities keep their texts.
    pub carry_forward: bool,
    /// Rows of a shard.
    pub shard_rows: usize,
    /// Attempts at a shard before it is given up.
    pub attempts: u32,
    /// Memory that planning and pool building hold before they spill.
    pub memory_mb: usize,
    /// Share of the entities that are also generated plainly.
    pub audit_share: f64,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Bound on the entities of each kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Gives entities their value: an expression over their columns. Shards are ordered by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Bands of equal size of value; within a band shards are ordered by kind and pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_bands: Option<usize>,
    /// The time of day at which the run is published whatever is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
}

impl RunConfig {
    /// Bytes that planning and pool building hold before they spill.
    pub fn memory(&self) -> usize {
        self.memory_mb.saturating_mul(1 << 20)
    }

    /// What gives entities their value, if anything does.
    ///
    /// # Errors
    /// If the expression is none.
    pub fn valuation(&self) -> Result<Option<Valuation>, PriorityError> {
        let bands = self.priority_bands.unwrap_or(BANDS);
        let priority = self.priority.clone().map(|expression| Priority { expression, bands });
        priority.map(Valuation::new).transpose()
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            date: None,
            pools: PoolChoice::Nightly,
            carry_forward: true,
            shard_rows: 256,
            attempts: 3,
            memory_mb: 512,
            audit_share: 0.01,
            seed: 1,
            limit: None,
            priority: None,
            priority_bands: None,
            deadline: None,
        }
    }
}

/// Which pools a run drafts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolChoice {
    /// Its own, built from previous knowledge when it begins.
    Nightly,
    /// The set that is promoted when it begins.
    Promoted,
    /// A version of the output, or a folder or URL.
    #[serde(untagged)]
    Set(String),
}

/// `[output]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OutputConfig {
    /// A directory or an object-store URL.
    pub path: String,
    /// The share of the entities that must have a text.
    pub min_coverage: f64,
    /// How many nights stay; all if not given.
    pub keep_nights: Option<usize>,
    /// A table format in which data sets are published besides the folders of parts; none if not given.
    pub table: Option<TableFormat>,
    /// Tokens of each place of a text that are kept beside the one written there; none if 0.
    pub runners_up: u32,
}

/// `[output] table`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableFormat {
    /// Delta Lake tables, one per data set and kind.
    Delta,
}

impl OutputConfig {
    /// Whether each data set and kind is also a Delta table.
    pub fn is_delta(&self) -> bool {
        self.table == Some(TableFormat::Delta)
    }
}

impl Default for OutputConfig {
    fn default() -> Self {
        Self { path: "output".into(), min_coverage: 0.98, keep_nights: None, table: None, runners_up: 0 }
    }
}

/// `[demo]`: `laser run` first runs the night before tonight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DemoConfig {
    /// The entities of that night, as `[[input]]` holds tonight's. The tables have a column `kind`.
    pub last_night: Vec<String>,
}

/// `[worker]`: of `laser worker`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerConfig {
    /// Seconds without work after which the worker ends; never if not given.
    pub idle_seconds: Option<u64>,
    /// Seconds that a draining worker has for the shards in hand.
    pub grace_seconds: u64,
    /// Where files of remote stores are kept on this machine.
    pub cache: PathBuf,
    /// Bound on the cache's size.
    pub cache_gb: u64,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { idle_seconds: None, grace_seconds: 25, cache: std::env::temp_dir().join("laser-cache"), cache_gb: 50 }
    }
}

impl WorkerConfig {
    /// Where files of remote stores are kept on this machine.
    pub fn cache(&self) -> Cache {
        Cache::new(self.cache.clone(), self.cache_gb * 1_000_000_000)
    }
}

/// `[metrics]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// The address that serves `/metrics`; none if not given.
    pub listen: Option<SocketAddr>,
}
