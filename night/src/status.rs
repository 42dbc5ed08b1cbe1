//! How far runs are: by their store alone, and by the queue, if there is one, what was given up.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use jiff::Timestamp;
use laser_coordinator::nats::{self, NatsClient};
use laser_schema::Kind;
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
    /// Shards of the plan.
    pub shards: usize,
    /// Shards whose output is there.
    pub committed: usize,
    /// Rows of the plan.
    pub rows: u64,
    /// Rows of committed shards.
    pub committed_rows: u64,
    /// From planning to the newest commit.
    pub rows_per_second: f64,
    /// Seconds until all rows are committed at this rate; none without a rate.
    pub eta_seconds: Option<f64>,
    /// Shards given up; none without a queue.
    pub dead: Option<usize>,
    /// The kinds whose `_SUCCESS` is there.
    pub published: Vec<Kind>,
    /// The costs of the texts, by kind, if the run was planned with a price.
    pub cost: BTreeMap<Kind, Cost>,
}

/// Reads how far the runs of an output are.
#[derive(Debug)]
pub struct StatusReader {
    output: Location,
    client: Option<NatsClient>,
}

impl StatusReader {
    /// Opens the output and connects to the queue, if one is configured.
    ///
    /// # Errors
    /// If either is not there.
    pub async fn open(config: &Config) -> Result<Self> {
        let client = match &config.queue {
            Some(queue) => Some(nats::connect(queue, "laser-status").await?),
            None => None,
        };
        Ok(Self { output: Location::parse(&config.output.path)?, client })
    }

    /// The names of all runs, newest first.
    ///
    /// # Errors
    /// If there are none.
    pub async fn runs(&self) -> Result<Vec<String>> {
        let runs = RunStore::names(&self.output).await?;
        ensure!(!runs.is_empty(), "{}: no runs here", self.output.url());
        Ok(runs)
    }

    /// How far a run is; `None` if it is not planned yet.
    ///
    /// # Errors
    /// The store's and the queue's.
    pub async fn status(&self, run: &str) -> Result<Option<Status>> {
        match RunStore::new(&self.output, run).planned().await? {
            Some(run) => Ok(Some(Status::of(&run, self.client.as_ref()).await?)),
            None => Ok(None),
        }
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
            shards: shards.len(),
            committed: committed.len(),
            rows,
            committed_rows,
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
