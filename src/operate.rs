//! Commands for whoever watches over nights: doctor, status, dead letters, retention.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use laser_coordinator::nats::{self, NatsClient};
use laser_coordinator::retention;
use laser_night::Config;
use laser_night::doctor::{Check, examine};
use laser_night::retention::outdated;
use laser_night::status::{Status, StatusReader};
use laser_terminal::print;

/// `laser doctor`: a line for each thing. `false` if something is wrong.
pub(crate) async fn doctor(config: &Config) -> Result<bool> {
    let (mut well, mut printed) = (true, Ok(()));
    let mut report = |Check { subject, found }: Check| {
        well &= found.is_ok();
        let line = match found {
            Ok(found) => format!("ok    {subject}: {found}\n"),
            Err(error) => format!("WRONG {subject}: {error:#}\n"),
        };
        if printed.is_ok() {
            printed = print(&line);
        }
    };
    examine(config, &mut report).await;
    printed?;
    Ok(well)
}

/// `laser status`: one run, or all that the output holds, newest first.
pub(crate) async fn status(config: &Config, run: Option<&str>, json: bool) -> Result<()> {
    let reader = StatusReader::open(config).await?;
    let runs = match run {
        Some(run) => vec![run.to_owned()],
        None => reader.runs().await?,
    };
    for run in runs {
        match reader.status(&run).await? {
            None => print(&format!("{run}: not planned yet\n"))?,
            Some(status) if json => print(&(serde_json::to_string(&status)? + "\n"))?,
            Some(status) => print(&render(&status)?)?,
        }
    }
    Ok(())
}

fn render(status: &Status) -> Result<String> {
    let mut out = String::new();
    let canary = status.canary.as_ref().map(|canary| format!(" (canary, {canary})")).unwrap_or_default();
    write!(
        out,
        "{}{canary}: {} of {} shards, {} of {} rows committed",
        status.run, status.committed, status.shards, status.committed_rows, status.rows
    )?;
    if let Some(eta) = status.eta_seconds.filter(|_| status.committed < status.shards) {
        write!(out, ", {:.1} rows/s, ETA {:.0} min", status.rows_per_second, eta / 60.0)?;
    }
    for (kind, value) in &status.value {
        write!(out, ", {:.1} % of the {kind}s' value", value * 100.0)?;
    }
    if let Some(dead) = status.dead.filter(|dead| *dead > 0) {
        write!(out, ", {dead} given up")?;
    }
    for kind in &status.published {
        write!(out, ", {kind}s published")?;
        if let Some(cost) = status.cost.get(kind) {
            let (per_1000, currency) = (cost.per_1000_texts, &cost.price.currency);
            write!(out, " at {per_1000:.4} {currency} per 1,000 texts")?;
        }
    }
    out.push('\n');
    Ok(out)
}

/// `laser prune`.
pub(crate) async fn prune(config: &Config, dry_run: bool) -> Result<()> {
    let nights = config.output.keep_nights.context(
        "[output] keep_nights: not set, so all nights are kept; set how many, or give --set output.keep_nights=30",
    )?;
    let output = config.output()?;
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

async fn client(config: &Config) -> Result<NatsClient> {
    Ok(nats::connect(&config.queue()?, "laser-dlq").await?)
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
