//! The committer: writes what shards came to, and tells the queue.

use bytes::Bytes;
use laser_schema::job::{Lease, Queue};
use laser_store::Location;
use laser_store::location::{Created, LocationError};
use tokio::sync::mpsc;
use tracing::{Instrument, instrument};

use super::Done;
use super::context::{RunContext, Stop};
use super::embed;
use super::held::Held;
use crate::error::WorkerError;
use crate::part::{self, Output};
use crate::telemetry;

/// Commits finished shards, one after another.
pub(super) struct Committer<'a, Q> {
    pub(super) queue: &'a Q,
    pub(super) context: &'a RunContext,
    pub(super) held: &'a Held,
    pub(super) stop: &'a Stop,
}

impl<Q: Queue> Committer<'_, Q> {
    /// Commits until everybody who sends shards is gone. On an error nobody commits what the engine would still
    /// generate, so the worker gives up its shards.
    pub(super) async fn run(self, mut done: mpsc::Receiver<Done>) -> Result<(), WorkerError> {
        while let Some(done) = done.recv().await {
            let span = self.held.span(&done.lease);
            self.settle(done).instrument(span).await.inspect_err(|_| self.stop.give_back())?;
        }
        Ok(())
    }

    /// Commits a shard and tells the queue, or tells it why not.
    async fn settle(&self, Done { lease, output }: Done) -> Result<(), WorkerError> {
        if matches!(output, Output::Released) {
            self.held.remove(&lease);
            return Ok(self.queue.released(&lease).await?);
        }
        let outcome = match output {
            Output::Failed(reason) => Err(reason),
            output => {
                let created = tokio::select! {
                    biased;
                    () = self.stop.abandon.cancelled() => Err(WorkerError::TooLate),
                    created = commit(self.context, &lease, output) => created,
                };
                match created {
                    Err(error) if error.ends_the_worker() => return Err(error),
                    created => created.map_err(|error| error.to_string()),
                }
            }
        };
        // Before the queue is told, which may hand out the shard again at once.
        self.held.remove(&lease);
        match outcome {
            Ok(created) => {
                self.context.progress.update(|s| s.shards += 1);
                telemetry::commit(created);
                tracing::debug!(?created, "committed");
                self.queue.committed(&lease).await?;
                tracing::debug!("acknowledged");
            }
            Err(reason) => {
                self.context.progress.update(|s| s.failed_attempts += 1);
                telemetry::failed_attempt();
                tracing::warn!(attempt = lease.attempt, reason, "attempt failed");
                self.queue.failed(&lease, &reason).await?;
            }
        }
        Ok(())
    }
}

/// Writes the shard's output. After an error nothing was committed.
#[instrument(name = "commit", target = "laser::trace", skip_all)]
async fn commit(context: &RunContext, lease: &Lease, output: Output) -> Result<Created, WorkerError> {
    let (bytes, failed, carried) = match output {
        Output::Audit(audit) => {
            let audit = embed::compare(context, audit).await?;
            (Bytes::from(serde_json::to_vec(&audit)?), 0, 0)
        }
        Output::Part(rows) => {
            let (failed, carried) = (rows.errors.len() as u64, rows.carried);
            let attempt = format!("{}/{}/{}", context.worker, lease.attempt, lease.token);
            let (rows, encoded) = embed::embed(context, rows).await?;
            (part::encode(&context.run.plan, lease, &attempt, rows, encoded.as_ref())?, failed, carried)
        }
        // Settled before, but for an output that exists.
        Output::Exists | Output::Failed(_) | Output::Released => return Ok(Created::Exists),
    };
    tracing::debug!(bytes = bytes.len(), "writing");
    let created = create(&context.run.part(&lease.job), bytes).await?;
    if created == Created::Won {
        telemetry::rows(carried, failed);
        context.progress.update(|s| {
            s.errors += failed;
            s.carried += carried;
        });
    }
    Ok(created)
}

/// Creates the object. A store may have written it and lost the answer; whoever wrote it, the shard is committed then.
async fn create(target: &Location, bytes: Bytes) -> Result<Created, LocationError> {
    match target.create(bytes).await {
        Err(error) if !error.is_refusal() => match target.exists().await {
            Ok(true) => Ok(Created::Exists),
            _ => Err(error),
        },
        created => created,
    }
}
