//! The worker's side: fetching messages of any run, one at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::{AckKind, Message};
use futures::StreamExt;
use tokio::time::Instant;

use super::delivery::{Delivery, Held};
use super::message::{JobMessage, parse_subject, value};
use super::{NatsClient, NatsError, NatsQueue, RunRef, failed};

/// How long the server holds a request for a message before the worker asks again.
const FETCH: Duration = Duration::from_secs(5);
/// The first and the longest wait between requests while the server is unreachable; each wait doubles.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A worker of all runs: it reports which run has work and leases that run's shards. Clones share everything.
///
/// It may not publish jobs or change streams; it needs the permissions in `deploy/nats/laser.conf`.
#[derive(Debug, Clone)]
pub struct NatsWorker {
    shared: Arc<Shared>,
}

/// The state that a worker and its queues share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) client: NatsClient,
    consumer: PullConsumer,
    pub(super) lease: Duration,
    idle: Option<Duration>,
    held: Mutex<Option<Held>>,
    /// Whether an outage has been logged.
    away: AtomicBool,
}

impl NatsWorker {
    /// Creates a worker under the client's name. With an `idle` limit it ends after that time without any message while
    /// the server answers; without one it waits for ever.
    ///
    /// # Errors
    /// [`NatsError::Request`] if there is no consumer (start the coordinator first) or no permission.
    pub async fn bind(client: NatsClient, idle: Option<Duration>) -> Result<Self, NatsError> {
        let (stream, consumer) = (&client.config.stream, &client.config.consumer);
        let action = format!("bind to consumer {consumer} of stream {stream}, which the coordinator makes");
        let bound = client.jetstream.get_consumer_from_stream(consumer, stream);
        let consumer: PullConsumer = bound.await.map_err(failed(action))?;
        let lease = consumer.cached_info().config.ack_wait;
        let shared = Shared { client, consumer, lease, idle, held: Mutex::new(None), away: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Waits for a message and returns its run; `None` after the idle limit. The message is kept and kept alive until
    /// the [`NatsQueue`] of that run leases it or [`NatsWorker::release`] gives it back.
    ///
    /// Cancel safe: a message that was being received is delivered again when its lease ends, and that delivery
    /// counts as an attempt.
    pub async fn next_run(&self) -> Option<RunRef> {
        if let Some(run) = self.shared.held_run() {
            return Some(run);
        }
        let delivery = self.shared.next().await?;
        let run = delivery.run().clone();
        self.shared.hold(delivery);
        Some(run)
    }

    /// Returns the queue of one run.
    pub fn queue(&self, run: &RunRef) -> NatsQueue {
        NatsQueue::new(self.shared.clone(), run.clone())
    }

    /// Gives back the message that is kept for the next run, if there is one; for a worker that ends.
    pub async fn release(&self) {
        if let Some(delivery) = self.shared.take_held() {
            delivery.end(AckKind::Nak(None)).await;
        }
    }
}

impl Shared {
    /// Returns the next message that is a job with attempts left, waiting while the server has problems; `None` after
    /// the idle limit.
    pub(super) async fn next(&self) -> Option<Arc<Delivery>> {
        let mut quiet = Instant::now();
        let mut pause = PAUSE.0;
        loop {
            let wait = self.idle.map_or(FETCH, |idle| FETCH.min(idle.saturating_sub(quiet.elapsed())));
            if wait.is_zero() {
                return None;
            }
            match self.fetch(wait).await {
                Ok(message) => {
                    self.note_back();
                    pause = PAUSE.0;
                    let Some(message) = message else { continue };
                    if let Some(delivery) = self.receive(message).await {
                        return Some(Arc::new(delivery));
                    }
                    quiet = Instant::now();
                }
                Err(reason) => {
                    self.note_away(&reason);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                    quiet = Instant::now();
                }
            }
        }
    }

    async fn fetch(&self, wait: Duration) -> Result<Option<Message>, String> {
        let fetched = self.client.while_connected(async {
            let request = self.consumer.batch().max_messages(1).expires(wait);
            let mut batch = request.messages().await.map_err(|e| e.to_string())?;
            batch.next().await.transpose().map_err(|e| e.to_string())
        });
        fetched.await.unwrap_or_else(|| Err("not connected".to_owned()))
    }

    /// Returns a job that can be worked on; any other message becomes a dead letter.
    async fn receive(&self, message: Message) -> Option<Delivery> {
        let (attempt, token) = match message.info() {
            Ok(info) => (u32::try_from(info.delivered).unwrap_or(1), info.consumer_sequence),
            Err(error) => {
                tracing::error!(%error, "not a message of a stream");
                return None;
            }
        };
        let attempts = self.client.config.attempts;
        let reason = match decode(&message) {
            Ok(job) if attempt <= attempts => {
                return Some(Delivery::new(message, job, (attempt, token), self.lease));
            }
            Ok(_) => format!(
                "delivered {attempts} times without an outcome: its workers died, stopped sending heartbeats or gave \
                 it back"
            ),
            Err(error) => error.to_string(),
        };
        self.client.give_up(&message, attempt, &reason).await;
        None
    }

    pub(super) fn hold(&self, delivery: Arc<Delivery>) {
        *self.held() = Some(Held::new(delivery));
    }

    /// Returns the message that is kept, unless its lease was lost: then it is delivered again.
    pub(super) fn take_held(&self) -> Option<Arc<Delivery>> {
        let held = self.held().take()?;
        (!held.delivery().is_lost()).then(|| held.delivery().clone())
    }

    fn held_run(&self) -> Option<RunRef> {
        let held = self.held();
        let delivery = held.as_ref()?.delivery();
        (!delivery.is_lost()).then(|| delivery.run().clone())
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs an outage once.
    fn note_away(&self, reason: &str) {
        if !self.away.swap(true, Ordering::Relaxed) {
            tracing::warn!(reason, "nats does not answer; waiting for it");
        }
    }

    fn note_back(&self) {
        if self.away.swap(false, Ordering::Relaxed) {
            tracing::info!("nats answers again");
        }
    }
}

fn decode(message: &Message) -> Result<JobMessage, NatsError> {
    let job = JobMessage::decode(value(&message.payload))?;
    match parse_subject(&message.subject) {
        Some((run, shard)) if run == job.run.run && shard == job.job.shard => Ok(job),
        _ => {
            let (subject, shard, run) = (&message.subject, job.job.shard, job.run.run);
            Err(NatsError::Message(format!("subject {subject} for shard {shard} of run {run}")))
        }
    }
}
