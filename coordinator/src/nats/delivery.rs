//! One delivery of a shard's message, and the acknowledgements that end or extend it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::{AckKind, Message};
use jiff::Timestamp;
use laser_schema::job::Lease;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::message::{encode, parse_subject, subject, value};
use super::{DeadLetter, JobMessage, MESSAGE_VERSION, NatsClient, RunRef};

/// How long to wait for a confirmation, except for heartbeats, which must not delay each other.
const CONFIRM: Duration = Duration::from_secs(5);

/// A message that this worker holds.
#[derive(Debug)]
pub(super) struct Delivery {
    message: Message,
    job: JobMessage,
    /// Number of deliveries of the message, including this one.
    pub(super) attempt: u32,
    /// The number of this delivery, counted by the consumer.
    token: u64,
    lease: Duration,
    /// The time at which the last acknowledgement that the server confirmed was sent.
    heard: Mutex<Instant>,
}

impl Delivery {
    pub(super) fn new(message: Message, job: JobMessage, (attempt, token): (u32, u64), lease: Duration) -> Self {
        Self { message, job, attempt, token, lease, heard: Mutex::new(Instant::now()) }
    }

    pub(super) fn run(&self) -> &RunRef {
        &self.job.run
    }

    pub(super) fn message(&self) -> &Message {
        &self.message
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { job: self.job.job.clone(), attempt: self.attempt, token: self.token }
    }

    /// Whether the server may have given the shard to another worker. This becomes true a tenth of the lease early,
    /// because the server's clock started before the message arrived here.
    pub(super) fn is_lost(&self) -> bool {
        self.heard().elapsed() > self.lease * 9 / 10
    }

    /// Extends the lease unless it has ended, because otherwise another worker's would be extended. Only an extension
    /// that the server confirms counts.
    pub(super) async fn extend(&self) {
        // While the connection is down the client stores what it is given and would send it much too late.
        let connected = self.message.context.client().connection_state() == State::Connected;
        if self.is_lost() || !connected {
            return;
        }
        let sent = Instant::now();
        if confirm(&self.message, AckKind::Progress, self.lease / 3).await.is_ok() {
            *self.heard() = sent;
        }
    }

    /// Ends the delivery. If the server may not have received it, that is logged but is no error: either the server
    /// receives it when the connection is back, or it delivers the message again, and then the store decides.
    pub(super) async fn end(&self, word: AckKind) {
        let said = format!("{word:?}");
        if let Err(reason) = confirm(&self.message, word, CONFIRM).await {
            let (run, shard, pool) = (&self.job.run.run, self.job.job.shard, &self.job.job.pool);
            tracing::warn!(run, shard, pool, said, reason, "no confirmation; it may be delivered again");
        }
    }

    fn heard(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn confirm(message: &Message, word: AckKind, wait: Duration) -> Result<(), String> {
    match timeout(wait, message.double_ack_with(word)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(elapsed) => Err(elapsed.to_string()),
    }
}

impl NatsClient {
    /// Copies a message to the dead letters and then removes it. If the copy is not confirmed, the message stays and is
    /// delivered again when its lease ends; its next delivery comes here too.
    pub(super) async fn give_up(&self, message: &Message, attempt: u32, reason: &str) {
        let Some((run, shard)) = parse_subject(&message.subject) else {
            // The message names no shard, so no subject fits it; only a coordinator may publish here.
            tracing::error!(subject = %message.subject, "removed a message that is not one of Laser's");
            let _ = confirm(message, AckKind::Term, CONFIRM).await;
            return;
        };
        let letter = DeadLetter {
            version: MESSAGE_VERSION,
            run: run.to_owned(),
            shard,
            reason: reason.to_owned(),
            worker: self.name.clone(),
            attempt,
            time: Timestamp::now(),
            message: value(&message.payload),
        };
        let target = subject(&self.config.dead_letter_subjects(), run, shard);
        if let Err(error) = self.publish_confirmed(&target, &encode(&letter)).await {
            tracing::error!(run, shard, attempt, %error, "no dead letter yet");
            return;
        }
        tracing::error!(run, shard, attempt, reason, "given up");
        if let Err(reason) = confirm(message, AckKind::Term, CONFIRM).await {
            tracing::warn!(run, shard, reason, "given up, but it may be delivered again");
        }
    }
}

/// A delivery of another run, kept alive until it is taken. A task of its own does this, because loading that run's
/// pools may take longer than a lease.
#[derive(Debug)]
pub(super) struct Held {
    delivery: Arc<Delivery>,
    heartbeat: AbortHandle,
}

impl Held {
    pub(super) fn new(delivery: Arc<Delivery>) -> Self {
        let beating = delivery.clone();
        let heartbeat = tokio::spawn(async move {
            while !beating.is_lost() {
                tokio::time::sleep(beating.lease / 3).await;
                beating.extend().await;
            }
        });
        Self { delivery, heartbeat: heartbeat.abort_handle() }
    }

    pub(super) fn delivery(&self) -> &Arc<Delivery> {
        &self.delivery
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.heartbeat.abort();
    }
}
