//! The queue of one run, as a worker sees it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use laser_schema::job::{Lease, Queue, QueueError};

use super::RunRef;
use super::delivery::Delivery;
use super::worker::Shared;

/// The shards of one run.
///
/// It ends (`lease` returns `None` from then on) when a message of another run arrives, which is kept for
/// [`NatsWorker::next_run`](super::NatsWorker::next_run), or after the worker's idle limit. It cannot know whether the
/// run is done.
///
/// Every delivery counts as an attempt, including one that was released or whose confirmation a server lost. A shard
/// delivered more often than `[queue] attempts` becomes a dead letter without being worked on.
///
/// No method fails: the server finds out what it did not receive when the lease ends.
#[derive(Debug)]
pub struct NatsQueue {
    shared: Arc<Shared>,
    run: RunRef,
    ended: AtomicBool,
    /// Deliveries by shard, then by token: a shard may come again while its lost lease is still held.
    leased: Mutex<BTreeMap<(u32, u64), Arc<Delivery>>>,
}

impl NatsQueue {
    pub(super) fn new(shared: Arc<Shared>, run: RunRef) -> Self {
        Self { shared, run, ended: AtomicBool::new(false), leased: Mutex::new(BTreeMap::new()) }
    }

    async fn next(&self) -> Option<Arc<Delivery>> {
        if let Some(held) = self.shared.take_held() {
            return Some(held);
        }
        self.shared.next().await
    }

    fn leased(&self) -> MutexGuard<'_, BTreeMap<(u32, u64), Arc<Delivery>>> {
        self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a held lease; `None` if it was lost, so that a late acknowledgement does not end another worker's lease.
    fn end(&self, lease: &Lease) -> Option<Arc<Delivery>> {
        let delivery = self.leased().remove(&key(lease))?;
        (!delivery.is_lost()).then_some(delivery)
    }
}

fn key(lease: &Lease) -> (u32, u64) {
    (lease.job.shard, lease.token)
}

impl Queue for NatsQueue {
    /// Waits while a server is unreachable. Cancel safe: a message that was being received is delivered again when its
    /// lease ends, and that delivery counts as an attempt.
    async fn lease(&self) -> Result<Option<Lease>, QueueError> {
        if self.ended.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let delivery = self.next().await;
        match delivery {
            Some(delivery) if *delivery.run() == self.run => {
                let lease = delivery.lease();
                self.leased().insert(key(&lease), delivery);
                return Ok(Some(lease));
            }
            Some(other) => {
                tracing::info!(run = other.run().run, "work of another run");
                self.shared.hold(other);
            }
            None => {}
        }
        self.ended.store(true, Ordering::Relaxed);
        Ok(None)
    }

    fn lease_duration(&self) -> Duration {
        self.shared.lease
    }

    /// Returns `false` once nine tenths of a lease have passed since the last heartbeat that the server confirmed.
    async fn heartbeat(&self, lease: &Lease) -> Result<bool, QueueError> {
        let held = self.leased().get(&key(lease)).cloned();
        let Some(delivery) = held else {
            return Ok(false);
        };
        delivery.extend().await;
        Ok(!delivery.is_lost())
    }

    /// A late acknowledgement also counts, because the output exists.
    async fn committed(&self, lease: &Lease) -> Result<(), QueueError> {
        let shard = lease.job.shard;
        let all: Vec<_> = self.leased().extract_if((shard, 0)..=(shard, u64::MAX), |_, _| true).collect();
        if let Some((_, newest)) = all.last() {
            newest.end(AckKind::Ack).await;
        }
        Ok(())
    }

    async fn failed(&self, lease: &Lease, reason: &str) -> Result<(), QueueError> {
        let Some(delivery) = self.end(lease) else {
            return Ok(());
        };
        let client = &self.shared.client;
        if delivery.attempt >= client.config.attempts {
            client.give_up(delivery.message(), delivery.attempt, reason).await;
        } else {
            let delay = client.config.retry_delay(delivery.attempt);
            delivery.end(AckKind::Nak(Some(delay))).await;
        }
        Ok(())
    }

    async fn released(&self, lease: &Lease) -> Result<(), QueueError> {
        if let Some(delivery) = self.end(lease) {
            delivery.end(AckKind::Nak(None)).await;
        }
        Ok(())
    }
}
