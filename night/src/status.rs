//! How far runs are: by their store alone, and by the queue, if there is one, what was given up.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use jiff::Timestamp;
use laser_coordinator::nats::{self, NatsClient};
use laser_schema::Kind;
use laser_schema::canary::Canary;
use laser_schema::layout::CANARIES;
use laser_schema::manifest::{Cost, Profiles};
use laser_store::Location;
use laser_store::data_set;
use laser_store::run_store::{PlannedRun, RunStore};
use serde::Serialize;

use crate::config::Config;

/// How far a run is.
#[derive(Debug, Serialize)]
pub struct Status {
    /// The run's name.
    pub run: String,
    /// The entities of a canary, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
    /// Shards of the plan.
    pub shards: usize,
    /// Shards whose output is there.
    pub committed: usize,
    /// Rows of the plan.
    pub rows: u64,
    /// Rows of committed shards.
    pub committed_rows: u64,
    /// The share of each kind's value whose shards are committed, if the run has a priority.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub value: BTreeMap<Kind, f64>,
    /// From planning to the newest commit.
    pub rows_per_second: f64,
    /// Seconds until all rows are committed at this rate; none without a rate.
    pub eta_seconds: Option<f64>,
    /// Shards given up; none without the queue that the run is in.
    pub dead: Option<usize>,
    /// The kinds whose `_SUCCESS` is there.
    pub published: Vec<Kind>,
    /// The costs of the texts, by kind, if the run was planned with a price.
    pub cost: BTreeMap<Kind, Cost>,
}

/// Reads how far the runs of an output are.
#[derive(Debug)]
pub struct StatusReader {
    /// That of canaries, and that of nights.
    outputs: [Location; 2],
    /// That of the configuration's own runs: of canaries or of nights.
    client: Option<NatsClient>,
    is_canary: bool,
}

impl StatusReader {
    /// Opens the output and connects to the queue, if one is configured.
    ///
    /// # Errors
    /// If either is not there.
    pub async fn open(config: &Config) -> Result<Self> {
        let client = match &config.queue {
            Some(_) => Some(nats::connect(&config.queue()?, "laser-status").await?),
            None => None,
        };
        let output = config.output()?;
        Ok(Self { outputs: [output.join(CANARIES), output], client, is_canary: config.canary.is_some() })
    }

    /// The names of all runs, canaries included, newest first.
    ///
    /// # Errors
    /// If there are none.
    pub async fn runs(&self) -> Result<Vec<String>> {
        let [canaries, output] = &self.outputs;
        let mut runs = [RunStore::names(canaries).await?, RunStore::names(output).await?].concat();
        ensure!(!runs.is_empty(), "{}: no runs here", output.url());
        runs.sort_unstable_by(|a, b| b.cmp(a));
        Ok(runs)
    }

    /// How far a run is; `None` if it is not planned yet.
    ///
    /// # Errors
    /// The store's and the queue's.
    pub async fn status(&self, run: &str) -> Result<Option<Status>> {
        for output in &self.outputs {
            if let Some(run) = RunStore::new(output, run).planned().await? {
                let client = self.client.as_ref().filter(|_| run.plan.canary.is_some() == self.is_canary);
                return Ok(Some(Status::of(&run, client).await?));
            }
        }
        Ok(None)
    }
}

impl Status {
    async fn of(run: &PlannedRun, client: Option<&NatsClient>) -> Result<Self> {
        let shards = &run.plan.shards;
        let published = run.published().await?;
        let cost = costs(run, &published).await?;
        let times = run.commit_times().await?;
        let committed: Vec<_> = shards.iter().filter_map(|shard| Some((shard, *times.get(&shard.output)?))).collect();
        let rows = shards.iter().map(|s| s.rows).sum();
        let committed_rows: u64 = committed.iter().map(|(s, _)| s.rows).sum();
        let began = run.store.planned_at().await?;
        let newest = committed.iter().map(|(_, time)| *time).max().unwrap_or(began);
        let seconds = newest.duration_since(began).as_secs_f64();
        let rate = if seconds > 0.0 { committed_rows as f64 / seconds } else { 0.0 };
        let dead = match client {
            Some(client) => Some(dead_letters(client, run, &times).await?),
            None => None,
        };
        Ok(Self {
            run: run.name().to_owned(),
            canary: run.plan.canary.clone(),
            shards: shards.len(),
            committed: committed.len(),
            rows,
            committed_rows,
            value: run.plan.value_of(committed.iter().map(|(shard, _)| *shard)),
            rows_per_second: rate,
            eta_seconds: (rate > 0.0).then(|| (rows - committed_rows) as f64 / rate),
            dead,
            published,
            cost,
        })
    }
}

async fn costs(run: &PlannedRun, published: &[Kind]) -> Result<BTreeMap<Kind, Cost>> {
    let mut costs = BTreeMap::new();
    if run.plan.price.is_some() {
        for &kind in published {
            let manifest = data_set::read::<Profiles>(&run.partition(kind)).await?;
            costs.extend(manifest.and_then(|m| Some((kind, m.details.cost?))));
        }
    }
    Ok(costs)
}

/// Dead letters of shards without an output.
async fn dead_letters(client: &NatsClient, run: &PlannedRun, times: &HashMap<String, Timestamp>) -> Result<usize> {
    let letters = client.dead_letters(run.name()).await?;
    let is_missing = |shard: u32| {
        let job = run.plan.shards.get(shard as usize);
        job.is_some_and(|job| !times.contains_key(&job.output))
    };
    Ok(letters.iter().filter(|l| is_missing(l.shard)).count())
}
