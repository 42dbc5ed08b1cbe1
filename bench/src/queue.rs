//! `laser-bench queue`: the queue of a distributed night on a real NATS server, with many leases in flight.
//!
//! The plan of a night is published, then workers lease its shards, hold each for a while with a heartbeat every third
//! of a lease, and commit it. Each worker has a connection of its own, as in production; all of them run in this
//! process, so its processor time bounds the coordinator's from above.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::future::try_join_all;
use laser_coordinator::nats::{NatsClient, NatsConfig, NatsWorker, RunRef, connect};
use laser_schema::Digest;
use laser_schema::job::{Lease, Queue};
use laser_terminal::{Style, Table};
use serde::Serialize;
use tokio::time::{interval_at, sleep};

use super::machine;
use super::simulated;
use super::stage::{cpu_seconds, cpu_seconds_of};

/// A worker ends after this time without a shard.
const IDLE: Duration = Duration::from_secs(3);

/// `laser-bench queue`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct QueueArgs {
    /// A NATS server with JetStream that holds no other night.
    #[arg(long, default_value = "nats://127.0.0.1:4222")]
    url: String,
    /// The server's process on this machine, to report its processor time.
    #[arg(long)]
    server_pid: Option<u32>,
    /// Shards of the night.
    #[arg(long, default_value_t = 5000)]
    shards: u32,
    /// Workers, each with one lease at a time.
    #[arg(long, default_value_t = 1000)]
    workers: u32,
    /// Seconds for which a worker holds a shard.
    #[arg(long, default_value_t = 30)]
    shard_seconds: u64,
    /// Seconds of a lease; workers send a heartbeat every third of them.
    #[arg(long, default_value_t = 15)]
    lease_seconds: u64,
    /// Where the figures are written.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// The measurements.
#[derive(Debug, Serialize)]
pub(super) struct QueueReport {
    options: QueueArgs,
    machine: String,
    server: String,
    /// Shards published per second.
    published_per_second: f64,
    /// Milliseconds in which the coordinator counts the queued shards.
    count_ms: f64,
    /// Most leases held at the same time.
    in_flight: u64,
    heartbeats: u64,
    /// Milliseconds from asking for a shard to having it, while shards were left.
    lease_ms_p50: f64,
    lease_ms_p99: f64,
    /// Shards that were delivered more than once.
    delivered_again: usize,
    seconds: f64,
    /// Processor seconds of this process, coordinator and workers together.
    cpu_seconds: f64,
    /// Processor seconds of the server.
    server_cpu_seconds: Option<f64>,
}

impl QueueReport {
    pub(super) fn render(&self, style: Style) -> String {
        let server_cpu = self.server_cpu_seconds.map_or("–".to_owned(), |seconds| format!("{seconds:.1}"));
        let mut table = Table::new(&["figure", "value"]);
        for (figure, value) in [
            ("shards", self.options.shards.to_string()),
            ("most leases in flight", self.in_flight.to_string()),
            ("shards published per second", format!("{:.0}", self.published_per_second)),
            ("counting the queued shards, ms", format!("{:.1}", self.count_ms)),
            ("a lease, p50 / p99, ms", format!("{:.1} / {:.1}", self.lease_ms_p50, self.lease_ms_p99)),
            ("heartbeats", self.heartbeats.to_string()),
            ("delivered again", self.delivered_again.to_string()),
            ("seconds", format!("{:.1}", self.seconds)),
            ("CPU seconds, coordinator and workers", format!("{:.1}", self.cpu_seconds)),
            ("CPU seconds, server", server_cpu),
        ] {
            table.push(vec![figure.to_owned(), value]);
        }
        format!("{}, nats-server {}\n{}", self.machine, self.server, table.render(style))
    }
}

/// The counts that all workers share.
#[derive(Debug, Default)]
struct Counts {
    held: AtomicU64,
    in_flight: AtomicU64,
    heartbeats: AtomicU64,
    /// Deliveries by shard.
    deliveries: Vec<AtomicU32>,
}

/// Publishes a night and works it off.
///
/// # Errors
/// If the server cannot be used, or a shard was never delivered.
pub(super) async fn run(options: &QueueArgs) -> Result<QueueReport> {
    let client = client(options, "laser-bench").await?;
    client.ensure_streams().await?;
    let plan = simulated::plan(256 * u64::from(options.shards), options.shards);
    let run = RunRef { run: plan.run.clone(), output: "memory:///".into(), plan_digest: Digest::of(b"") };
    client.purge(&run.run).await?;
    let connected = (0..options.workers).map(|worker| self::client(options, format!("bench-{worker}")));
    let workers = try_join_all(connected).await?;

    let (started, cpu) = (Instant::now(), cpu_seconds()?);
    let server_cpu = options.server_pid.map(cpu_seconds_of).transpose()?;
    client.publish(&run, &plan.shards).await?;
    let published = started.elapsed();
    let counting = Instant::now();
    let queued = client.queued(&run.run).await?;
    ensure!(queued == u64::from(options.shards), "{queued} of {} shards are queued", options.shards);
    let count_ms = counting.elapsed().as_secs_f64() * 1e3;

    let deliveries = plan.shards.iter().map(|_| AtomicU32::default()).collect();
    let counts = Arc::new(Counts { deliveries, ..Counts::default() });
    let working = workers.into_iter().map(|client| tokio::spawn(work(client, options.clone(), counts.clone())));
    let waits = try_join_all(working).await?.into_iter().collect::<Result<Vec<_>>>()?;
    let mut waits: Vec<Duration> = waits.into_iter().flatten().collect();
    waits.sort_unstable();
    let delivered: Vec<u32> = counts.deliveries.iter().map(|n| n.load(Ordering::Relaxed)).collect();
    let missing = delivered.iter().filter(|&&n| n == 0).count();
    ensure!(missing == 0, "{missing} of {} shards were never delivered", options.shards);
    let left = client.queued(&run.run).await?;
    ensure!(left == 0, "{left} shards are queued though all were acknowledged");
    let server_cpu_seconds = match options.server_pid.zip(server_cpu) {
        Some((pid, before)) => Some(cpu_seconds_of(pid)? - before),
        None => None,
    };
    Ok(QueueReport {
        options: options.clone(),
        machine: machine(),
        server: client.server_version(),
        published_per_second: f64::from(options.shards) / published.as_secs_f64(),
        count_ms,
        in_flight: counts.in_flight.load(Ordering::Relaxed),
        heartbeats: counts.heartbeats.load(Ordering::Relaxed),
        lease_ms_p50: percentile_ms(&waits, 50),
        lease_ms_p99: percentile_ms(&waits, 99),
        delivered_again: delivered.iter().filter(|&&n| n > 1).count(),
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: cpu_seconds()? - cpu,
        server_cpu_seconds,
    })
}

/// A connection with streams of its own names.
async fn client(options: &QueueArgs, name: impl Into<String>) -> Result<NatsClient> {
    let config = NatsConfig {
        url: options.url.clone(),
        stream: "LASER_BENCH".into(),
        consumer: "laser-bench".into(),
        dead_letters: "LASER_BENCH_DLQ".into(),
        planning: "LASER_BENCH_PLANNING".into(),
        lease_seconds: options.lease_seconds,
        ..NatsConfig::default()
    };
    let name = name.into();
    connect(&config, &name).await.with_context(|| format!("--url {}", options.url))
}

/// Leases, holds and commits shards until none is left; returns how long each lease took.
async fn work(client: NatsClient, options: QueueArgs, counts: Arc<Counts>) -> Result<Vec<Duration>> {
    let worker = NatsWorker::bind(client, Some(IDLE)).await?;
    let mut waits = Vec::new();
    let mut asked = Instant::now();
    while let Some(run) = worker.next_run().await {
        let queue = worker.queue(&run);
        while let Some(lease) = queue.lease().await? {
            waits.push(asked.elapsed());
            counts.deliveries[lease.job.shard as usize].fetch_add(1, Ordering::Relaxed);
            let held = counts.held.fetch_add(1, Ordering::Relaxed) + 1;
            counts.in_flight.fetch_max(held, Ordering::Relaxed);
            hold(&queue, &lease, Duration::from_secs(options.shard_seconds), &counts).await?;
            queue.committed(&lease).await?;
            counts.held.fetch_sub(1, Ordering::Relaxed);
            asked = Instant::now();
        }
    }
    Ok(waits)
}

async fn hold(queue: &impl Queue, lease: &Lease, time: Duration, counts: &Counts) -> Result<()> {
    let pause = queue.lease_duration() / 3;
    let mut beat = interval_at(tokio::time::Instant::now() + pause, pause);
    let done = sleep(time);
    tokio::pin!(done);
    loop {
        tokio::select! {
            () = &mut done => return Ok(()),
            _ = beat.tick() => {
                queue.heartbeat(lease).await?;
                counts.heartbeats.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// A percentile of sorted times; 0 without any.
fn percentile_ms(sorted: &[Duration], percent: usize) -> f64 {
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
}
