//! Generating a run's shards in this process.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use laser_coordinator::gate::Gate;
use laser_coordinator::ledger::LedgerLimits;
use laser_coordinator::local_queue::LocalQueue;
use laser_features::encoder::Encoder;
use laser_pool_builder::OpenPools;
use laser_schema::Progress;
use laser_schema::job::{Action, Plan};
use laser_store::run_store::PlannedRun;
use laser_worker::generate::TextGenerator;
use laser_worker::lists::Catalogue;
use laser_worker::progress::Progress as WorkerProgress;
use laser_worker::run::{RunContext, Stop, run_worker};
use tokio_util::sync::CancellationToken;
use tracing::instrument;

use super::{Night, Outcome};
use crate::config::ListsConfig;
use crate::lists::catalogue_of_run;
use crate::model::DraftFiles;
use crate::progress::show_work;
use crate::{encoder, generator};

impl Night<'_> {
    /// Generates what is not committed yet, then publishes. At the deadline the shards in hand are given back.
    #[instrument(name = "generate", target = "laser::trace", skip_all)]
    pub(super) async fn generate(
        self,
        run: PlannedRun,
        pools: &OpenPools,
        drafts: Vec<DraftFiles>,
        progress: &mut dyn Progress,
        drain: &CancellationToken,
    ) -> Result<Outcome> {
        let started = Instant::now();
        let deadline = self.deadline(&run).await?;
        let stop = deadline.stop(drain);
        let committed = run.committed().await?;
        let mut dead = Vec::new();
        if committed.len() < run.plan.shards.len() {
            let worker = self.worker(&run, pools, drafts, progress).await?;
            dead = self.work(&run, committed, worker, progress, &stop).await?;
        }
        let seconds = started.elapsed().as_secs_f64();
        if drain.is_cancelled() {
            let (committed, shards) = (run.committed().await?.len(), run.plan.shards.len());
            if committed + dead.len() < shards {
                return Ok(Outcome::Drained { committed, shards });
            }
        }
        let dead = without_audits(&run.plan, dead);
        self.conclude(run, dead, deadline.has_passed(), Some(seconds)).await
    }

    /// Loads the model, its draft models and, if the run has embeddings, the encoder.
    pub(super) async fn worker(
        &self,
        run: &PlannedRun,
        pools: &OpenPools,
        drafts: Vec<DraftFiles>,
        progress: &mut dyn Progress,
    ) -> Result<Worker> {
        progress.stage("loading the model");
        let encoder = match self.encoder.clone() {
            Some(files) => Some(encoder::load(files).await?),
            None => None,
        };
        let name = format!("local-{}", std::process::id());
        let files = self.config.lists.as_ref().map(ListsConfig::history_files).unwrap_or_default();
        let catalogue = catalogue_of_run(run, None, files, &self.model.tokenizer).await?;
        let (context, generator) = tokio::try_join!(
            run_context(run.clone(), (pools, catalogue), encoder, name),
            generator::load(self.config, &self.model, drafts)
        )?;
        Ok(Worker { context, generator })
    }

    /// Works on every shard that is not committed, first on those that the gate of the guards admits at once. Returns
    /// those that were given up.
    async fn work(
        &self,
        run: &PlannedRun,
        mut done: Vec<u32>,
        mut worker: Worker,
        progress: &mut dyn Progress,
        stop: &Stop,
    ) -> Result<Vec<(u32, String)>> {
        let limits = LedgerLimits { attempts: self.config.run.attempts, ..LedgerLimits::default() };
        let mut gate = Gate::new(&run.plan);
        let mut dead = Vec::new();
        loop {
            let settled: HashSet<u32> = done.iter().copied().collect();
            gate.poll(run, |shard| settled.contains(&shard)).await?;
            let held = run.plan.shards.iter().filter(|job| !gate.admits(job));
            let held: Vec<u32> = held.map(|job| job.shard).collect();
            let not_now = [done.as_slice(), held.as_slice()].concat();
            let queue = Arc::new(LocalQueue::new(&run.plan.shards, &not_now, limits));
            worker = worker.empty(&queue, held.len(), progress, stop).await?;
            dead.extend(queue.dead());
            if held.is_empty() || !queue.is_done() {
                return Ok(dead);
            }
            done = run.committed().await?;
            done.extend(dead.iter().map(|(shard, _)| *shard));
        }
    }
}

/// The worker of this process.
pub(super) struct Worker {
    context: Arc<RunContext>,
    generator: Box<dyn TextGenerator>,
}

impl Worker {
    /// Empties the in-process queue, in which `held` shards only seem committed: they are held back.
    pub(super) async fn empty(
        self,
        queue: &Arc<LocalQueue>,
        held: usize,
        progress: &mut dyn Progress,
        stop: &Stop,
    ) -> Result<Self> {
        progress.stage("generating");
        let Self { context, generator } = self;
        let plan = &context.run.plan;
        let others = u64::from(plan.spec.samples()) - 1;
        let texts = plan.counts.values().map(|c| c.entities + others * c.generate).sum();
        let worker = run_worker(queue.clone(), context.clone(), generator, stop.clone());
        let detail = || {
            let ending = match (stop.drain.is_cancelled(), stop.release.is_cancelled()) {
                (_, true) => "; the deadline has passed",
                (true, false) => "; finishing the shards in hand",
                (false, false) => "",
            };
            let committed = queue.counts().committed - held;
            format!("{committed} of {} shards{ending}", plan.shards.len())
        };
        let generator = show_work(worker, (&context, Some(texts)), progress, &detail).await?;
        Ok(Self { context, generator })
    }
}

/// What a worker needs of a run. Nothing is drafted from a pool that was not read whole and found undamaged; that
/// takes a thread of its own, so that a model can be loaded meanwhile.
pub(crate) async fn run_context(
    run: PlannedRun,
    (pools, catalogue): (&OpenPools, Option<Arc<Catalogue>>),
    encoder: Option<Arc<Encoder>>,
    worker: String,
) -> Result<Arc<RunContext>> {
    let unverified = pools.clone();
    tokio::task::spawn_blocking(move || unverified.verify()).await??;
    let names = pools.set().pools.iter().map(|p| p.name.clone());
    let pools: HashMap<_, _> = names.filter_map(|name| pools.pool(&name).map(|pool| (name, pool))).collect();
    Ok(Arc::new(RunContext { run, pools, catalogue, encoder, worker, progress: Arc::new(WorkerProgress::default()) }))
}

/// The shards that were given up and whose output is missed. An audit's is not: without it a pool has no measured
/// speedup, and that is all.
pub(crate) fn without_audits(plan: &Plan, dead: Vec<(u32, String)>) -> Vec<(u32, String)> {
    let is_audit = |shard: u32| {
        let job = plan.shards.get(shard as usize);
        job.is_some_and(|job| job.action == Action::Audit)
    };
    let (audits, dead) = dead.into_iter().partition::<Vec<_>, _>(|(s, _)| is_audit(*s));
    for (shard, reason) in audits {
        tracing::warn!(shard, reason, "an audit failed: its pool has no measured speedup");
    }
    dead
}
