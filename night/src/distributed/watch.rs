//! The coordinator's watch over a run: the queue stays filled until nothing is missing.

use std::time::{Duration, Instant};

use anyhow::Result;
use laser_coordinator::gate::Gate;
use laser_coordinator::nats::{DeadLetter, NatsClient, RunRef};
use laser_schema::Progress;
use laser_schema::job::ShardJob;
use laser_store::run_store::{Committed, PlannedRun};
use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;
use tracing::instrument;

use super::purge_if_cancelled;
use crate::deadline::Deadline;
use crate::failure;
use crate::night::{Night, Outcome, without_audits};

/// Between two polls of store and queue.
const POLL_EVERY: Duration = Duration::from_secs(3);

/// Polls of many shards take longer, and the pause after one is so many times as long: they take a twentieth of the
/// time, whatever the run's size.
const POLL_PAUSE: u32 = 19;

/// The longest pause: a poll that waited for a store that was away says nothing about its size.
const POLL_AT_LEAST_EVERY: Duration = Duration::from_secs(30);

/// Keeps the queue filled until nothing is missing, the deadline has come or the run is cancelled.
#[instrument(name = "watch", target = "laser::trace", skip_all)]
pub(super) async fn watch(
    night: Night<'_>,
    client: &NatsClient,
    run: PlannedRun,
    progress: &mut dyn Progress,
    drain: &CancellationToken,
) -> Result<Outcome> {
    let deadline = night.deadline(&run).await?;
    let end = deadline.end(drain);
    let mut watch = Watch::new(client, &run, deadline.clone());
    progress.stage("generating");
    let dead = loop {
        let started = Instant::now();
        let polled = tokio::select! {
            polled = watch.poll(progress) => polled,
            () = end.cancelled() => break Vec::new(),
        };
        let pause = (POLL_PAUSE * started.elapsed()).clamp(POLL_EVERY, POLL_AT_LEAST_EVERY);
        match polled {
            Ok(None) => return Ok(Outcome::Cancelled { run: run.name().to_owned() }),
            // With a deadline there is time to replay what was given up.
            Ok(Some(state)) if state.open == 0 && (state.dead.is_empty() || deadline.seconds_left().is_none()) => {
                break state.dead;
            }
            Ok(Some(_)) => {}
            Err(error) if failure::is_refused(&error) || failure::is_damage(&error) => return Err(error),
            Err(error) => tracing::warn!("{error:#}; looking again"),
        }
        tokio::select! {
            () = end.cancelled() => break Vec::new(),
            () = tokio::time::sleep(pause) => {}
        }
    };
    let shards = run.plan.shards.len();
    if drain.is_cancelled() {
        return Ok(Outcome::Drained { committed: run.committed().await?.len(), shards });
    }
    let seconds = watch.started.elapsed().as_secs_f64();
    if deadline.has_passed() {
        client.purge(run.name()).await?;
    }
    progress.finish_with(&format!("{shards} shards"));
    night.conclude(run, dead, deadline.has_passed(), Some(seconds)).await
}

/// Whether a dead letter is of a run's plan. Those of an earlier plan, whose folder was removed, say nothing of it.
fn is_of(letter: &DeadLetter, run: &RunRef) -> bool {
    let plan = letter.message.get("plan_digest").and_then(|digest| digest.as_str());
    plan.is_none_or(|plan| plan == run.plan_digest.as_str())
}

/// What a poll found.
struct State {
    /// Shards that are neither committed nor given up.
    open: usize,
    /// Shards that were given up and whose output is missed, with the reason.
    dead: Vec<(u32, String)>,
}

/// How many shards are in which state.
struct Counts {
    committed: usize,
    open: usize,
    dead: usize,
}

struct Watch<'a> {
    client: &'a NatsClient,
    run: PlannedRun,
    reference: RunRef,
    deadline: Deadline,
    started: Instant,
    /// Rows that were committed when the watch began.
    rows_before: Option<u64>,
    warned: bool,
    committed: Committed,
    gate: Gate,
}

impl<'a> Watch<'a> {
    fn new(client: &'a NatsClient, run: &PlannedRun, deadline: Deadline) -> Self {
        let output = run.store.output().absolute_url();
        Self {
            client,
            run: run.clone(),
            reference: RunRef { run: run.name().to_owned(), output, plan_digest: run.plan_digest() },
            deadline,
            started: Instant::now(),
            rows_before: None,
            warned: false,
            committed: Committed::new(run),
            gate: Gate::new(&run.plan),
        }
    }

    /// Compares queue and store, in this order: a shard that left the queue before it was counted is listed after.
    /// `None`: the run was cancelled, and none of its shards is queued.
    async fn poll(&mut self, progress: &mut dyn Progress) -> Result<Option<State>> {
        if purge_if_cancelled(self.client, &self.run.store).await? {
            return Ok(None);
        }
        let queued = self.client.queued(self.run.name()).await?;
        let letters = self.client.dead_letters(self.run.name()).await?;
        self.committed.poll().await?;
        let committed = self.committed.shards();
        let is_committed = |shard: &u32| committed.binary_search(shard).is_ok();
        let dead: Vec<(u32, String)> = letters
            .into_iter()
            .filter(|letter| is_of(letter, &self.reference))
            .map(|letter| (letter.shard, letter.reason))
            .filter(|(shard, _)| !is_committed(shard))
            .collect();
        let is_dead = |shard: &u32| dead.iter().any(|(s, _)| s == shard);
        let plan = self.run.plan.clone();
        let open: Vec<&ShardJob> =
            plan.shards.iter().filter(|job| !is_committed(&job.shard) && !is_dead(&job.shard)).collect();
        let settled = |shard: u32| is_committed(&shard) || is_dead(&shard);
        self.gate.poll(&self.run, settled).await?;
        let admitted: Vec<&ShardJob> = open.iter().copied().filter(|job| self.gate.admits(job)).collect();
        if queued < admitted.len() as u64 {
            let new = self.client.publish(&self.reference, admitted).await?;
            tracing::info!(new, open = open.len(), "queued shards");
            counter!("laser_republished_shards_total").increment(new);
            // A `cancel` since the question above may have emptied the queue before these shards were in it.
            if purge_if_cancelled(self.client, &self.run.store).await? {
                return Ok(None);
            }
        }
        let counts = Counts { committed: committed.len(), open: open.len(), dead: dead.len() };
        self.show(&committed, &counts, progress);
        Ok(Some(State { open: open.len(), dead: without_audits(&plan, dead) }))
    }

    fn show(&mut self, committed: &[u32], counts: &Counts, progress: &mut dyn Progress) {
        let shards = &self.run.plan.shards;
        let total = shards.iter().map(|s| s.rows).sum();
        let done = committed.iter().map(|s| shards[*s as usize].rows).sum();
        let before = *self.rows_before.get_or_insert(done);
        let rate = (done - before) as f64 / self.started.elapsed().as_secs_f64();
        let eta = (rate > 0.0).then(|| (total - done) as f64 / rate);
        self.measure(counts, (done, total), eta);
        let mut detail = format!("rows, {} of {} shards", counts.committed, shards.len());
        if counts.dead > 0 {
            detail += &format!(", {} given up (`laser dlq list`)", counts.dead);
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
        progress.update(done, Some(total), &detail);
    }

    /// The gauges of the run.
    fn measure(&self, counts: &Counts, (done, total): (u64, u64), eta: Option<f64>) {
        let run = || self.run.name().to_owned();
        for (state, shards) in [("committed", counts.committed), ("open", counts.open), ("dead", counts.dead)] {
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
