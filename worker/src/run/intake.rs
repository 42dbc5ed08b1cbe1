//! The intake: leases shards and reads their inputs.

use std::collections::BTreeMap;

use laser_schema::Digest;
use laser_schema::job::{Action, Lease, Policy, Queue, ShardJob};
use laser_schema::knowledge::KnowledgeRecord;
use laser_store::table;
use tokio::sync::mpsc;
use tracing::{Instrument, Span, instrument};

use super::context::{RunContext, Stop};
use super::held::Held;
use super::{Done, Loaded};
use crate::error::WorkerError;
use crate::part::{self, Output, Rows, Work};
use crate::telemetry;

/// Leases shards for the engine; those that need none go to the committer.
pub(super) struct Intake<'a, Q> {
    pub(super) queue: &'a Q,
    pub(super) context: &'a RunContext,
    pub(super) held: &'a Held,
    pub(super) stop: &'a Stop,
    pub(super) load: mpsc::Sender<Loaded>,
    pub(super) done: mpsc::Sender<Done>,
}

/// The next hand of a leased shard.
enum Input {
    /// The engine's.
    Work(Work),
    /// The committer's.
    Done(Output),
}

impl<Q: Queue> Intake<'_, Q> {
    /// Leases until the queue has nothing left, or until the worker is told to drain.
    pub(super) async fn run(self) -> Result<(), WorkerError> {
        loop {
            let Ok(room) = self.load.reserve().await else {
                return Err(WorkerError::Lost("engine thread"));
            };
            let lease = tokio::select! {
                biased;
                () = self.stop.drain.cancelled() => return Ok(()),
                // Without these two the wait for a lease would never end: the leases in hand are kept alive.
                () = self.load.closed() => return Err(WorkerError::Lost("engine thread")),
                () = self.done.closed() => return Err(WorkerError::Lost("committer")),
                lease = self.queue.lease() => lease?,
            };
            let Some(lease) = lease else { return Ok(()) };
            let span = self.context.span(&lease.job);
            self.take(lease, room).instrument(span).await?;
        }
    }

    /// Loads a leased shard and passes it on.
    async fn take(&self, lease: Lease, room: mpsc::Permit<'_, Loaded>) -> Result<(), WorkerError> {
        if !self.held.add(&lease) {
            tracing::warn!("leased again while in hand");
            return Ok(());
        }
        tracing::debug!(attempt = lease.attempt, "leased");
        telemetry::leased(lease.attempt);
        // A store that is away is asked for minutes; a drain may not last that long.
        let input = tokio::select! {
            input = read_input(self.context, &lease.job) => input?,
            () = self.stop.release.cancelled() => Input::Done(Output::Released),
        };
        match input {
            Input::Work(work) => room.send(Loaded { lease, work, span: Span::current() }),
            Input::Done(output) => {
                let sent = self.done.send(Done { lease, output }).await;
                sent.map_err(|_| WorkerError::Lost("committer"))?;
            }
        }
        Ok(())
    }
}

/// Reads a shard's input. A failure is the attempt's, unless it ends the worker.
#[instrument(name = "read", target = "laser::trace", skip_all)]
async fn read_input(context: &RunContext, job: &ShardJob) -> Result<Input, WorkerError> {
    match load(context, job).await {
        Err(error) if !error.ends_the_worker() => Ok(Input::Done(Output::Failed(error.to_string()))),
        input => input,
    }
}

async fn load(context: &RunContext, job: &ShardJob) -> Result<Input, WorkerError> {
    // A lost acknowledgement is no reason to do the work again.
    if context.run.part(job).exists().await? {
        return Ok(Input::Done(Output::Exists));
    }
    let input = context.run.input(job);
    let bytes = input.read().await?;
    if Digest::of(&bytes) != job.input_digest {
        return Err(WorkerError::Changed { file: input.url().to_owned() });
    }
    let file = input.url();
    Ok(match job.action {
        Action::Generate => {
            Input::Work(Work::Generate { policy: policy(context, job).await?, rows: table::decode(file, bytes)? })
        }
        Action::Audit => Input::Work(Work::Audit(table::decode(file, bytes)?)),
        Action::Carry => {
            let records: Vec<KnowledgeRecord> = table::decode(file, bytes)?;
            let carried = records.len() as u64;
            let rows = records.into_iter().map(|record| part::carry(&context.run.plan, record)).collect();
            Input::Done(Output::Part(Rows { rows, errors: Vec::new(), carried, figures: BTreeMap::new() }))
        }
    })
}

/// How a shard's texts are verified: as the specification says, but strictly where the pool's audit breached a guard.
async fn policy(context: &RunContext, job: &ShardJob) -> Result<Policy, WorkerError> {
    let plan = &context.run.plan;
    if plan.guards.is_none() {
        return Ok(plan.spec.verification);
    }
    let verdict = context.run.store.verdict(job.kind, &job.pool).await?;
    match verdict {
        None => Err(WorkerError::NotJudged { pool: job.pool.clone() }),
        Some(verdict) if verdict.strict => Ok(Policy::Strict),
        Some(_) => Ok(plan.spec.verification),
    }
}
