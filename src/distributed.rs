//! A night over many machines: the coordinator plans, queues and publishes, workers generate. Between them are the
//! output's store and NATS.
//!
//! Every process may be killed and started again at any moment, and started twice. What is done is what the store
//! lists; the queue only says who is at what, and is filled again from the store whenever it holds less than what is
//! missing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use jiff::civil::Date;
use laser_coordinator::finalise::{self, Committed};
use laser_coordinator::gate::Gate;
use laser_coordinator::nats::{self, NatsClient, NatsConfig, NatsWorker, RunRef};
use laser_coordinator::plan::{plan_digest, read_plan};
use laser_features::encoder::Encoder;
use laser_model::ModelFiles;
use laser_pool_builder::OpenPools;
use laser_schema::EncoderInfo;
use laser_schema::job::{Plan, ShardJob, Spec};
use laser_schema::layout::run_folder;
use laser_store::Location;
use laser_worker::run::{RunContext, Stop, run_worker};
use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::config::Config;
use crate::encoder;
use crate::exit;
use crate::generator;
use crate::night::{Deadline, Night, Outcome, Ready, model_spec, open_model, run_context, show_work, without_audits};
use crate::progress::Display;
use crate::telemetry;

/// Between two looks at the store and the queue.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// Looks at many shards take longer, and the pause after one is so many times as long: they take a twentieth of the
/// time, whatever the run's size.
const LOOK_PAUSE: u32 = 19;

/// The longest pause: a look that waited for a store that was away says nothing about its size.
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_secs(30);

/// In a run's folder: somebody has cancelled it.
const CANCELLED: &str = "cancelled";

/// The queue's section, or what to do about its absence.
pub(crate) fn queue_config(config: &Config) -> Result<&NatsConfig> {
    let queue = config.queue.as_ref();
    queue.context("[queue]: not set; give the url of a NATS server, or use `laser run` for one process")
}

/// Plans a night, has workers generate it, and publishes it. `expected` is the run that it must be, if any; that it
/// was cancelled is taken back then.
pub(crate) async fn coordinate(
    config: &Config,
    expected: Option<&str>,
    display: &mut Display,
    drain: &CancellationToken,
) -> Result<Outcome> {
    let client = nats::connect(queue_config(config)?, "laser-coordinator").await?;
    telemetry::watch_nats(client.events().clone());
    client.ensure_streams().await?;
    let night = Night::open(config).await?;
    if let Some(expected) = expected {
        known_run(&night.output, expected).await?;
    }
    let (date, run) = night.choose_run().await?;
    if let Some(expected) = expected {
        ensure!(
            run == expected,
            "run {expected} was begun with another configuration, another --previous or other inputs: these make run {run}"
        );
        let marker = night.output.join(&run_folder(&run)).join(CANCELLED);
        marker.remove().await?;
    }
    if is_cancelled(&night.output, &run).await? {
        return Ok(Outcome::Cancelled { run });
    }
    let span = telemetry::run_span(&run);
    let work = async {
        match night.prepare(date, &run, display, drain).await? {
            Ready::Published(plan) => night.finish(plan, None).await,
            Ready::Drained => Ok(Outcome::Drained { committed: 0, shards: 0 }),
            Ready::Planned(plan, _) => watch(night, &client, plan, display, drain).await,
        }
    };
    work.instrument(span).await
}

/// Keeps the queue filled until nothing is missing, the deadline has come or the run is cancelled.
#[tracing::instrument(name = "watch", target = "laser::trace", skip_all)]
async fn watch(
    night: Night<'_>,
    client: &NatsClient,
    plan: Plan,
    display: &mut Display,
    drain: &CancellationToken,
) -> Result<Outcome> {
    let deadline = night.deadline(&plan).await?;
    let end = deadline.end(drain);
    let mut watch = Watch::new(client, &night.output, &plan, deadline.clone())?;
    display.stage("generating");
    let dead = loop {
        let started = Instant::now();
        let look = tokio::select! {
            look = watch.look(display) => look,
            () = end.cancelled() => break Vec::new(),
        };
        let pause = (LOOK_PAUSE * started.elapsed()).clamp(LOOK_EVERY, LOOK_AT_LEAST_EVERY);
        match look {
            Ok(look) if look.cancelled => return Ok(Outcome::Cancelled { run: plan.run }),
            // With a deadline there is time to replay what was given up.
            Ok(look) if look.open == 0 && (look.dead.is_empty() || deadline.seconds_left().is_none()) => {
                break look.dead;
            }
            Ok(_) => {}
            Err(error) if exit::is_refused(&error) || exit::is_damage(&error) => return Err(error),
            Err(error) => tracing::warn!("{error:#}; looking again"),
        }
        tokio::select! {
            () = end.cancelled() => break Vec::new(),
            () = tokio::time::sleep(pause) => {}
        }
    };
    if drain.is_cancelled() {
        let committed = finalise::committed(&night.output, &plan).await?.len();
        let shards = plan.shards.len();
        return Ok(Outcome::Drained { committed, shards });
    }
    let seconds = watch.started.elapsed().as_secs_f64();
    if deadline.has_passed() {
        client.purge(&plan.run).await?;
    }
    display.finish_with(&format!("{} shards", plan.shards.len()));
    night.conclude(plan, dead, deadline.has_passed(), Some(seconds)).await
}

/// What a look found.
struct Look {
    cancelled: bool,
    /// Shards that are neither committed nor given up.
    open: usize,
    /// Shards that were given up and whose output is missed, with the reason.
    dead: Vec<(u32, String)>,
}

struct Watch<'a> {
    client: &'a NatsClient,
    output: &'a Location,
    plan: &'a Plan,
    run: RunRef,
    deadline: Deadline,
    started: Instant,
    /// Rows that were committed when the watch began.
    rows_before: Option<u64>,
    warned: bool,
    committed: Committed,
    gate: Gate,
}

impl<'a> Watch<'a> {
    fn new(client: &'a NatsClient, output: &'a Location, plan: &'a Plan, deadline: Deadline) -> Result<Self> {
        Ok(Self {
            client,
            output,
            plan,
            run: run_ref(output, plan),
            deadline,
            started: Instant::now(),
            rows_before: None,
            warned: false,
            committed: Committed::new(plan),
            gate: Gate::new(plan),
        })
    }

    /// Compares queue and store, in this order: a shard that left the queue before it was counted is listed after.
    async fn look(&mut self, display: &mut Display) -> Result<Look> {
        let queued = self.client.queued(&self.plan.run).await?;
        let letters = self.client.dead_letters(&self.plan.run).await?;
        self.committed.look(self.output).await?;
        let committed = self.committed.shards();
        let is_committed = |shard: &u32| committed.binary_search(shard).is_ok();
        let dead: Vec<(u32, String)> = letters
            .into_iter()
            .map(|letter| (letter.shard, letter.reason))
            .filter(|(shard, _)| !is_committed(shard))
            .collect();
        let is_dead = |shard: &u32| dead.iter().any(|(s, _)| s == shard);
        let open: Vec<&ShardJob> =
            (self.plan.shards.iter()).filter(|job| !is_committed(&job.shard) && !is_dead(&job.shard)).collect();
        let settled = |shard: u32| is_committed(&shard) || is_dead(&shard);
        self.gate.look(self.output, self.plan, settled).await?;
        let admitted: Vec<&ShardJob> = (open.iter().copied()).filter(|job| self.gate.admits(job)).collect();
        if queued < admitted.len() as u64 {
            let new = self.client.publish(&self.run, admitted).await?;
            tracing::info!(new, open = open.len(), "queued shards");
            counter!("laser_republished_shards_total").increment(new);
        }
        self.show(&committed, (open.len(), dead.len()), display);
        Ok(Look {
            cancelled: is_cancelled(self.output, &self.plan.run).await?,
            open: open.len(),
            dead: without_audits(self.plan, dead),
        })
    }

    fn show(&mut self, committed: &[u32], (open, dead): (usize, usize), display: &mut Display) {
        let rows = |shards: &mut dyn Iterator<Item = &ShardJob>| shards.map(|s| s.rows).sum::<u64>();
        let total = rows(&mut self.plan.shards.iter());
        let done = rows(&mut committed.iter().map(|s| &self.plan.shards[*s as usize]));
        let before = *self.rows_before.get_or_insert(done);
        let rate = (done - before) as f64 / self.started.elapsed().as_secs_f64();
        let eta = (rate > 0.0).then(|| (total - done) as f64 / rate);
        self.tell((committed.len(), open, dead), (done, total), eta);
        let mut detail = format!("rows, {} of {} shards", committed.len(), self.plan.shards.len());
        if dead > 0 {
            detail += &format!(", {dead} given up (`laser dlq list`)");
        }
        if let (Some(left), Some(eta)) = (self.deadline.seconds_left(), eta)
            && eta > left
        {
            detail += &format!(", {:.0} min too slow for the deadline", (eta - left) / 60.0);
            if !self.warned {
                tracing::warn!(eta_s = eta, left_s = left, "at this rate the deadline will be missed");
            }
            self.warned = true;
        }
        display.update(done, Some(total), &detail);
    }
}

impl Watch<'_> {
    /// The gauges of the run.
    fn tell(&self, (committed, open, dead): (usize, usize, usize), (done, total): (u64, u64), eta: Option<f64>) {
        let run = || self.plan.run.clone();
        for (state, shards) in [("committed", committed), ("open", open), ("dead", dead)] {
            gauge!("laser_run_shards", "run" => run(), "state" => state).set(shards as f64);
        }
        for (state, rows) in [("committed", done), ("total", total)] {
            gauge!("laser_run_rows", "run" => run(), "state" => state).set(rows as f64);
        }
        if let Some(eta) = eta {
            gauge!("laser_run_eta_seconds", "run" => run()).set(eta);
        }
        if let Some(left) = self.deadline.seconds_left() {
            gauge!("laser_run_deadline_seconds", "run" => run()).set(left);
        }
    }
}

fn run_ref(output: &Location, plan: &Plan) -> RunRef {
    RunRef { run: plan.run.clone(), output: output.absolute_url(), plan_digest: plan_digest(plan) }
}

async fn is_cancelled(output: &Location, run: &str) -> Result<bool> {
    Ok(output.join(&run_folder(run)).join(CANCELLED).exists().await?)
}

/// Ends a run: its coordinator stops, its shards leave the queue. What is committed stays.
pub(crate) async fn cancel(config: &Config, run: &str) -> Result<u64> {
    let output = Location::parse(&config.output.path)?;
    known_run(&output, run).await?;
    let client = nats::connect(queue_config(config)?, "laser-cancel").await?;
    let marker = output.join(&run_folder(run)).join(CANCELLED);
    marker.write(bytes::Bytes::new()).await?;
    Ok(client.purge(run).await?)
}

/// The night of a run, which its name begins with.
pub(crate) fn date_of(run: &str) -> Option<Date> {
    run.get(..10)?.parse().ok()
}

async fn known_run(output: &Location, run: &str) -> Result<Plan> {
    let plan = read_plan(output, run).await?;
    plan.with_context(|| format!("{}: no run {run:?} here; `laser status` lists those that there are", output.url()))
}

/// Generates shards of whatever run has some, until told to stop or idle for `[worker] idle_seconds`. `false`: told
/// to stop.
pub(crate) async fn work(config: &Config, display: &mut Display, drain: &CancellationToken) -> Result<bool> {
    let name = worker_name();
    let client = nats::connect(queue_config(config)?, &name).await?;
    telemetry::watch_nats(client.events().clone());
    let idle = config.worker.idle_seconds.map(Duration::from_secs);
    let queue = NatsWorker::bind(client, idle).await?;
    display.stage("loading the model");
    let model = open_model(config).await?;
    let encoder = match encoder::open(config).await? {
        Some(files) => Some(encoder::load(files).await?),
        None => None,
    };
    let mut generator = generator::load(config, &model).await?;
    let stop = Stop { drain: drain.clone(), ..Stop::default() };
    release_after(Duration::from_secs(config.worker.grace_seconds), &stop);
    loop {
        display.stage("waiting for work");
        let run = tokio::select! {
            () = drain.cancelled() => return Ok(false),
            run = queue.next_run() => run,
        };
        let Some(run) = run else { return Ok(true) };
        let span = telemetry::run_span(&run.run);
        let opened = open_run(config, (&model, encoder.as_ref()), &run, &name).instrument(span.clone()).await;
        let context = match opened {
            Ok(context) => context,
            Err(error) => {
                queue.release().await;
                return Err(error.context(format!("run {}", run.run)));
            }
        };
        display.stage("generating");
        let work = run_worker(Arc::new(queue.queue(&run)), context.clone(), generator, stop.clone());
        generator =
            show_work(work, &context.progress, None, display, &|| format!("run {}", run.run)).instrument(span).await?;
        if drain.is_cancelled() {
            queue.release().await;
            return Ok(false);
        }
    }
}

/// What a draining worker has not finished by then it gives back.
fn release_after(grace: Duration, stop: &Stop) {
    let Stop { drain, release } = stop.clone();
    tokio::spawn(async move {
        drain.cancelled().await;
        tokio::time::sleep(grace).await;
        release.cancel();
    });
}

/// Reads a run's plan and opens its pools, and makes sure that this worker may generate for it.
async fn open_run(
    config: &Config,
    (model, encoder): (&ModelFiles, Option<&Arc<Encoder>>),
    run: &RunRef,
    worker: &str,
) -> Result<Arc<RunContext>> {
    let output = Location::parse(&run.output)?;
    let plan = known_run(&output, &run.run).await?;
    ensure!(
        plan_digest(&plan) == run.plan_digest,
        "{}: plan.json is not the plan that was queued",
        output.join(&plan.folder()).url()
    );
    let info = encoder.map(|encoder| encoder.info());
    let pools = check_run(config, (model, info), &output, &plan).await?;
    run_context(plan, output, &pools, encoder.cloned(), worker.to_owned()).await
}

/// Makes sure that this configuration may generate for a run, and opens the run's pools.
pub(crate) async fn check_run(
    config: &Config,
    (model, encoder): (&ModelFiles, Option<&EncoderInfo>),
    output: &Location,
    plan: &Plan,
) -> Result<OpenPools> {
    check_spec(&plan.spec, &model_spec(config, model, plan.spec.prompts.clone())?)?;
    encoder::check(plan.embedding.as_ref(), encoder)?;
    let dir = output.resolve(&plan.pools)?;
    let pools = OpenPools::open_cached(&dir, &model.tokenizer.fingerprint(), &config.worker.cache()).await?;
    ensure!(
        *pools.digest() == plan.pool_digest,
        "{}: these are not the pools that the run was planned with",
        dir.url()
    );
    Ok(pools)
}

/// Prompts come rendered; all else that decides a text must be the coordinator's.
fn check_spec(run: &Spec, worker: &Spec) -> Result<()> {
    let (run, worker) = (serde_json::to_value(run)?, serde_json::to_value(worker)?);
    let (Some(run), Some(worker)) = (run.as_object(), worker.as_object()) else {
        return Ok(());
    };
    for (key, expected) in run {
        let found = worker.get(key).unwrap_or(&serde_json::Value::Null);
        if found != expected {
            bail!(
                "it wants {key} = {expected}, but this configuration gives {found}; work with the coordinator's [model], \
                 [generate] and [verification]"
            );
        }
    }
    Ok(())
}

/// Unique among the workers of a cluster: the host's name is the pod's.
fn worker_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "worker",
        host => host,
    };
    format!("{host}-{}", std::process::id())
}
