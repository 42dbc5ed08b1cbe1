//! Commands for whoever watches over nights: status, dead letters, retention.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use anyhow::{Context, Result};
use jiff::Timestamp;
use laser_coordinator::nats::{self, NatsClient};
use laser_coordinator::plan::{plan_time, read_plan};
use laser_coordinator::retention::{self, Keep, Outdated};
use laser_schema::Kind;
use laser_schema::job::Plan;
use laser_schema::manifest::{Cost, Manifest, SUCCESS};
use laser_store::Location;
use laser_store::data_set::read_manifest;
use serde::Serialize;

use crate::commands::print;
use crate::config::Config;
use crate::distributed::queue_config;
use crate::pool_sets;

/// How far a run is, by its store alone; the dead letters by the queue, if there is one.
#[derive(Debug, Serialize)]
struct Status {
    run: String,
    shards: usize,
    committed: usize,
    rows: u64,
    committed_rows: u64,
    /// From planning to the newest commit.
    rows_per_second: f64,
    /// Seconds until all rows are committed at this rate; none without a rate.
    eta_seconds: Option<f64>,
    /// Shards given up; none without a queue.
    dead: Option<usize>,
    /// The kinds whose `_SUCCESS` is there.
    published: Vec<Kind>,
    /// What their texts cost, by kind; of those that were planned with a price.
    cost: BTreeMap<Kind, Cost>,
}

impl Status {
    async fn of(output: &Location, plan: &Plan, client: Option<&NatsClient>) -> Result<Self> {
        let mut times = HashMap::new();
        let mut folders = vec![plan.folder()];
        folders.extend(plan.counts.keys().map(|&kind| plan.partition(kind)));
        let (published, cost) = published(output, plan).await?;
        for folder in folders {
            let listed = output.join(&folder).list().await?;
            times.extend(listed.into_iter().map(|l| (format!("{folder}/{}", l.name), l.modified)));
        }
        let committed: Vec<_> =
            (plan.shards.iter()).filter_map(|shard| Some((shard, *times.get(&shard.output)?))).collect();
        let rows = plan.shards.iter().map(|s| s.rows).sum();
        let committed_rows: u64 = committed.iter().map(|(s, _)| s.rows).sum();
        let began = plan_time(output, &plan.run).await?;
        let newest = committed.iter().map(|(_, time)| *time).max().unwrap_or(began);
        let seconds = newest.duration_since(began).as_secs_f64();
        let rate = if seconds > 0.0 { committed_rows as f64 / seconds } else { 0.0 };
        let dead = match client {
            Some(client) => Some(dead_letters(client, plan, &times).await?),
            None => None,
        };
        Ok(Self {
            run: plan.run.clone(),
            shards: plan.shards.len(),
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

    fn render(&self) -> Result<String> {
        let mut out = String::new();
        write!(
            out,
            "{}: {} of {} shards, {} of {} rows committed",
            self.run, self.committed, self.shards, self.committed_rows, self.rows
        )?;
        if let Some(eta) = self.eta_seconds.filter(|_| self.committed < self.shards) {
            write!(out, ", {:.1} rows/s, ETA {:.0} min", self.rows_per_second, eta / 60.0)?;
        }
        if let Some(dead) = self.dead.filter(|dead| *dead > 0) {
            write!(out, ", {dead} given up")?;
        }
        for kind in &self.published {
            write!(out, ", {kind}s published")?;
            if let Some(cost) = self.cost.get(kind) {
                let (per_1000, currency) = (cost.per_1000_texts, &cost.price.currency);
                write!(out, " at {per_1000:.4} {currency} per 1,000 texts")?;
            }
        }
        out.push('\n');
        Ok(out)
    }
}

/// The kinds that are published, and what they cost.
async fn published(output: &Location, plan: &Plan) -> Result<(Vec<Kind>, BTreeMap<Kind, Cost>)> {
    let (mut published, mut costs) = (Vec::new(), BTreeMap::new());
    for &kind in plan.counts.keys() {
        let folder = output.join(&plan.partition(kind));
        if !folder.join(SUCCESS).exists().await? {
            continue;
        }
        published.push(kind);
        if plan.price.is_some() {
            let manifest = read_manifest::<Manifest>(&folder).await?;
            costs.extend(manifest.and_then(|m| Some((kind, m.cost?))));
        }
    }
    Ok((published, costs))
}

/// Dead letters of shards without an output.
async fn dead_letters(client: &NatsClient, plan: &Plan, there: &HashMap<String, Timestamp>) -> Result<usize> {
    let letters = client.dead_letters(&plan.run).await?;
    let is_missing = |shard: u32| {
        let job = plan.shards.get(shard as usize);
        job.is_some_and(|job| !there.contains_key(&job.output))
    };
    Ok(letters.iter().filter(|l| is_missing(l.shard)).count())
}

/// `laser status`: one run, or all that the output holds, newest first.
pub(crate) async fn status(config: &Config, run: Option<&str>, json: bool) -> Result<()> {
    let output = Location::parse(&config.output.path)?;
    let client = match &config.queue {
        Some(queue) => Some(nats::connect(queue, "laser-status").await?),
        None => None,
    };
    let runs = match run {
        Some(run) => vec![run.to_owned()],
        None => newest_first(&output).await?,
    };
    for run in runs {
        let plan = read_plan(&output, &run).await?;
        let plan = match plan {
            Some(plan) => plan,
            None => {
                print(&format!("{run}: not planned yet\n"))?;
                continue;
            }
        };
        let status = Status::of(&output, &plan, client.as_ref()).await?;
        match json {
            true => print(&(serde_json::to_string(&status)? + "\n"))?,
            false => print(&status.render()?)?,
        }
    }
    Ok(())
}

async fn newest_first(output: &Location) -> Result<Vec<String>> {
    let mut runs = output.join("runs").folders().await?;
    anyhow::ensure!(!runs.is_empty(), "{}: no runs here", output.url());
    runs.sort_unstable_by(|a, b| b.cmp(a));
    Ok(runs)
}

/// `laser prune`.
pub(crate) async fn prune(config: &Config, dry_run: bool) -> Result<()> {
    let nights = config.output.keep_nights.context(
        "[output] keep_nights: not set, so all nights are kept; set how many, or give --set output.keep_nights=30",
    )?;
    let output = Location::parse(&config.output.path)?;
    let outdated = outdated(&output, nights).await?;
    if !dry_run {
        retention::withdraw(&output, &outdated).await?;
    }
    for outdated in &outdated {
        for folder in &outdated.folders {
            let what = if dry_run { "would remove" } else { "removing" };
            print(&format!("{what} {}\n", output.join(folder).url()))?;
        }
        if !dry_run {
            retention::remove(&output, outdated).await?;
        }
    }
    print(&format!("{} outdated runs\n", outdated.len()))
}

async fn outdated(output: &Location, nights: usize) -> Result<Vec<Outdated>> {
    let keep = Keep { nights, pools: pool_sets::kept(output).await?, now: Timestamp::now() };
    Ok(retention::outdated(output, &keep).await?)
}

/// Removes what is older than the newest `nights`, and returns of how many runs.
pub(crate) async fn remove_outdated(output: &Location, nights: usize) -> Result<usize> {
    let outdated = outdated(output, nights).await?;
    retention::withdraw(output, &outdated).await?;
    for outdated in &outdated {
        retention::remove(output, outdated).await?;
    }
    Ok(outdated.len())
}

async fn client(config: &Config) -> Result<NatsClient> {
    Ok(nats::connect(queue_config(config)?, "laser-dlq").await?)
}

/// `laser dlq list`.
pub(crate) async fn dlq_list(config: &Config, run: &str) -> Result<()> {
    let letters = client(config).await?.dead_letters(run).await?;
    for letter in &letters {
        print(&format!(
            "shard {} after {} attempts, {} by {}: {}\n",
            letter.shard, letter.attempt, letter.time, letter.worker, letter.reason
        ))?;
    }
    print(&format!("{} dead letters\n", letters.len()))
}

/// `laser dlq show`.
pub(crate) async fn dlq_show(config: &Config, run: &str, shard: u32) -> Result<()> {
    let letter = client(config).await?.dead_letter(run, shard).await?;
    print(&(serde_json::to_string_pretty(&letter).context("dead letter")? + "\n"))
}

/// `laser dlq replay`: the given shards, or all.
pub(crate) async fn dlq_replay(config: &Config, run: &str, shards: &[u32]) -> Result<()> {
    let client = client(config).await?;
    let shards = match shards {
        [] => {
            let letters = client.dead_letters(run).await?;
            letters.into_iter().map(|letter| letter.shard).collect()
        }
        shards => shards.to_vec(),
    };
    let new = client.replay(run, &shards).await?;
    print(&format!("{new} shards queued again\n"))
}
