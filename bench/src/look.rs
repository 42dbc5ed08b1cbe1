//! `laser-bench look`: what the coordinator's look at the store costs in a run of many shards, on the local disk.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use laser_store::Location;
use laser_store::run_store::{Committed, PlannedRun, RunStore};
use laser_terminal::{Style, Table};
use serde::Serialize;

use super::simulated;
use super::stage::cpu_seconds;
use super::{machine, remove_old, write_file};

/// `laser-bench look`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct LookArgs {
    /// Shards of the run; half of them are committed.
    #[arg(long, default_value_t = 390_625)]
    shards: u32,
    /// Shards committed between two looks.
    #[arg(long, default_value_t = 1000)]
    between: u32,
    /// Where the shards' empty outputs and the figures are written.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct LookReport {
    options: LookArgs,
    machine: String,
    looks: Vec<Look>,
}

#[derive(Debug, Serialize)]
struct Look {
    look: &'static str,
    committed: usize,
    seconds: f64,
    cpu_seconds: f64,
}

impl LookReport {
    pub(super) fn render(&self, style: Style) -> String {
        let mut table = Table::new(&["look", "shards", "committed", "s", "CPU s"]);
        for look in &self.looks {
            table.push(vec![
                look.look.to_owned(),
                self.options.shards.to_string(),
                look.committed.to_string(),
                format!("{:.2}", look.seconds),
                format!("{:.2}", look.cpu_seconds),
            ]);
        }
        format!("{}\n{}", self.machine, table.render(style))
    }
}

/// Looks at a store that is half full, twice.
pub(super) async fn run(options: &LookArgs) -> Result<LookReport> {
    let dir = options.output.join("look");
    remove_old(&dir)?;
    let plan = simulated::plan(256 * u64::from(options.shards), options.shards);
    let output = Location::parse(&dir.to_string_lossy())?;
    let run = PlannedRun::new(RunStore::new(&output, &plan.run), plan);
    let mut committed = Committed::new(&run);
    let mut looks = Vec::new();
    let plan = &run.plan;
    let mut end = plan.shards.len() / 2;
    let mut start = 0;
    for look in ["first", "next"] {
        for job in &plan.shards[start..end] {
            write_file(&dir.join(&job.output), b"")?;
        }
        let (started, cpu) = (Instant::now(), cpu_seconds()?);
        committed.poll().await?;
        let found = committed.shards().len();
        ensure!(found == end, "{end} shards are committed, {found} were found");
        looks.push(Look {
            look,
            committed: end,
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: cpu_seconds()? - cpu,
        });
        start = end;
        end = plan.shards.len().min(end + options.between as usize);
    }
    Ok(LookReport { options: options.clone(), machine: machine(), looks })
}
