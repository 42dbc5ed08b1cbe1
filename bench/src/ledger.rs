//! `laser-bench ledger`: a night of any size on the ledger, in simulated time.
//!
//! Workers lease shards, send heartbeats, commit, fail, die, and pause past their lease to commit late, at random but
//! by a seed; one that dies is replaced, and its shard comes back when the lease ends. What is measured is the
//! processor's time for all of it, the simulation itself included, so it bounds the ledger's from above.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use laser_coordinator::ledger::{Leasing, Ledger, LedgerLimits};
use laser_night::config::RunConfig;
use laser_terminal::{Style, Table};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::machine;
use super::stage::{cpu_seconds, status_mb};

/// `laser-bench ledger`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct LedgerArgs {
    /// How many texts there are to generate.
    #[arg(long, default_value_t = 100_000_000)]
    entities: u64,
    /// How many workers there are.
    #[arg(long, default_value_t = 1000)]
    workers: u32,
    /// Mean seconds of a worker for a shard.
    #[arg(long, default_value_t = 60.0)]
    shard_seconds: f64,
    /// Share of the attempts in which the worker dies without a word.
    #[arg(long, default_value_t = 0.01)]
    deaths: f64,
    /// Share of the attempts in which the worker pauses for two leases before it commits.
    #[arg(long, default_value_t = 0.01)]
    pauses: f64,
    /// Share of the attempts that fail.
    #[arg(long, default_value_t = 0.01)]
    failures: f64,
    /// Seed of all that is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the figures are written.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct LedgerReport {
    options: LedgerArgs,
    machine: String,
    shards: u32,
    figures: Figures,
    /// Simulated hours of the night.
    hours: f64,
    cpu_seconds: f64,
    /// Processor seconds over simulated seconds.
    cores: f64,
    /// What the ledger and its workers added to the resident set.
    memory_mb: f64,
}

/// What happened.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Figures {
    leases: u64,
    heartbeats: u64,
    commits: u64,
    /// Creates that another worker's came before.
    lost: u64,
    failures: u64,
    deaths: u64,
    waits: u64,
}

impl Figures {
    fn events(&self) -> u64 {
        self.leases + self.heartbeats + self.commits + self.lost + self.failures + self.deaths + self.waits
    }
}

impl LedgerReport {
    pub(super) fn render(&self, style: Style) -> String {
        let Figures { leases, heartbeats, commits, lost, failures, deaths, .. } = self.figures;
        let events = self.figures.events();
        let counts = [leases, heartbeats, commits, lost, failures, deaths, events];
        let header = [
            "shards",
            "leases",
            "heartbeats",
            "commits",
            "lost creates",
            "failures",
            "deaths",
            "events",
            "hours",
            "CPU s",
            "cores",
            "MB",
        ];
        let mut row = vec![self.shards.to_string()];
        row.extend(counts.map(|count| count.to_string()));
        row.push(format!("{:.2}", self.hours));
        row.push(format!("{:.1}", self.cpu_seconds));
        row.push(format!("{:.5}", self.cores));
        row.push(format!("{:.0}", self.memory_mb));
        let mut table = Table::new(&header);
        table.push(row);
        format!("{}\n{}", self.machine, table.render(style))
    }
}

/// Runs the night until every shard is committed, each exactly once.
pub(super) fn run(options: &LedgerArgs) -> Result<LedgerReport> {
    let rows = RunConfig::default().shard_rows as u64;
    let shards = u32::try_from(options.entities.div_ceil(rows))?;
    let (memory, cpu) = (status_mb("VmRSS")?, cpu_seconds()?);
    let mut night = Simulation::new(options, shards);
    while night.step()? {}
    let seconds = night.now.as_secs_f64();
    let cpu_seconds = cpu_seconds()? - cpu;
    let counts = night.ledger.counts();
    ensure!(
        night.figures.commits == u64::from(shards) && counts.committed == shards as usize,
        "{} of {shards} shards were created, the ledger has {counts:?}",
        night.figures.commits
    );
    Ok(LedgerReport {
        options: options.clone(),
        machine: machine(),
        shards,
        figures: night.figures,
        hours: seconds / 3600.0,
        cpu_seconds,
        cores: cpu_seconds / seconds,
        memory_mb: status_mb("VmHWM")? - memory,
    })
}

/// A worker's next deed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Deed {
    Lease,
    Heartbeat { shard: u32, token: u64 },
    Commit { shard: u32 },
    Fail { shard: u32, token: u64 },
}

/// How an attempt ends.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    ends: Duration,
    last: Option<Deed>,
    /// Sends no heartbeat.
    silent: bool,
}

struct Simulation<'a> {
    options: &'a LedgerArgs,
    limits: LedgerLimits,
    ledger: Ledger,
    now: Duration,
    random: Xoshiro256PlusPlus,
    /// Of all workers, by time.
    deeds: BinaryHeap<Reverse<(Duration, u32, Deed)>>,
    attempts: Vec<Option<Attempt>>,
    /// The store: whether the output of each shard is there.
    created: Vec<bool>,
    figures: Figures,
}

impl<'a> Simulation<'a> {
    fn new(options: &'a LedgerArgs, shards: u32) -> Self {
        let limits = LedgerLimits {
            // A shard that is unlucky three times in 400,000 is to be expected.
            attempts: 20,
            ..LedgerLimits::default()
        };
        let workers = 0..options.workers;
        Self {
            options,
            limits,
            ledger: Ledger::new(shards, [], limits),
            now: Duration::ZERO,
            random: Xoshiro256PlusPlus::seed_from_u64(options.seed),
            deeds: workers.map(|worker| Reverse((Duration::ZERO, worker, Deed::Lease))).collect(),
            attempts: vec![None; options.workers as usize],
            created: vec![false; shards as usize],
            figures: Figures::default(),
        }
    }

    /// The next deed of any worker; `false` once there is none.
    fn step(&mut self) -> Result<bool> {
        let Some(Reverse((at, worker, deed))) = self.deeds.pop() else {
            return Ok(false);
        };
        self.now = at;
        match deed {
            Deed::Lease => self.lease(worker)?,
            Deed::Heartbeat { shard, token } => {
                self.figures.heartbeats += 1;
                self.ledger.heartbeat(shard, token, self.now);
                self.go_on(worker, shard, token);
            }
            Deed::Commit { shard } => {
                let lost = std::mem::replace(&mut self.created[shard as usize], true);
                self.figures.commits += u64::from(!lost);
                self.figures.lost += u64::from(lost);
                self.ledger.commit(shard);
                self.then(worker, self.now, Deed::Lease);
            }
            Deed::Fail { shard, token } => {
                self.figures.failures += 1;
                self.ledger.fail(shard, token, "simulated", self.now);
                self.then(worker, self.now, Deed::Lease);
            }
        }
        Ok(true)
    }

    fn then(&mut self, worker: u32, at: Duration, deed: Deed) {
        self.deeds.push(Reverse((at, worker, deed)));
    }

    fn lease(&mut self, worker: u32) -> Result<()> {
        match self.ledger.lease(self.now) {
            Leasing::Finished => {}
            Leasing::Wait { until } => {
                self.figures.waits += 1;
                self.then(worker, until.max(self.now + self.limits.retry), Deed::Lease);
            }
            Leasing::Shard { shard, token, .. } => {
                ensure!(!self.created[shard as usize], "shard {shard} was leased though it is committed");
                self.figures.leases += 1;
                self.attempts[worker as usize] = Some(self.draw(shard, token));
                self.go_on(worker, shard, token);
            }
        }
        Ok(())
    }

    /// Between half and one and a half of the mean; then a commit, a failure or silence.
    fn draw(&mut self, shard: u32, token: u64) -> Attempt {
        let seconds = self.options.shard_seconds * self.random.gen_range(0.5..1.5);
        let ends = self.now + Duration::from_secs_f64(seconds);
        let LedgerArgs { deaths, failures, pauses, .. } = *self.options;
        let chance: f64 = self.random.r#gen();
        let (last, silent) = if chance < deaths {
            (None, false)
        } else if chance < deaths + failures {
            (Some(Deed::Fail { shard, token }), false)
        } else {
            (Some(Deed::Commit { shard }), chance < deaths + failures + pauses)
        };
        let pause = if silent { 2 * self.limits.lease } else { Duration::ZERO };
        Attempt { ends: ends + pause, last, silent }
    }

    /// A heartbeat every third of a lease until the attempt ends.
    fn go_on(&mut self, worker: u32, shard: u32, token: u64) {
        let Some(Attempt { ends, last, silent }) = self.attempts[worker as usize] else {
            return;
        };
        let beat = self.now + self.limits.lease / 3;
        if beat < ends && !silent {
            return self.then(worker, beat, Deed::Heartbeat { shard, token });
        }
        match last {
            Some(deed) => self.then(worker, ends, deed),
            None => {
                self.figures.deaths += 1;
                // Another is started in its place.
                self.then(worker, ends + self.limits.lease, Deed::Lease);
            }
        }
    }
}
