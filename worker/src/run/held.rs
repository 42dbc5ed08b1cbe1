//! The leases in hand, and the heartbeats that keep them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use laser_schema::job::{Lease, Queue};
use tracing::{Instrument, Span};

use crate::telemetry;

/// The leases in hand, for heartbeats.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<BTreeMap<u32, InHand>>);

#[derive(Debug)]
struct InHand {
    lease: Lease,
    since: Instant,
    /// From the lease to the queue's last word.
    span: Span,
}

impl Held {
    /// Adds the lease of a shard that the current span is about. `false`: the shard is in hand already, under a lease
    /// that was lost; the new one is kept in its place.
    pub(super) fn add(&self, lease: &Lease) -> bool {
        let held = InHand { lease: lease.clone(), since: Instant::now(), span: Span::current() };
        self.lock().insert(lease.job.shard, held).is_none()
    }

    pub(super) fn remove(&self, lease: &Lease) {
        self.lock().remove(&lease.job.shard);
    }

    pub(super) fn span(&self, lease: &Lease) -> Span {
        let held = self.lock();
        let held = held.get(&lease.job.shard);
        held.map_or_else(Span::current, |held| held.span.clone())
    }

    fn all(&self) -> Vec<(Lease, Span)> {
        let held = self.lock();
        let oldest = held.values().map(|held| held.since.elapsed()).max();
        telemetry::in_hand(held.len(), oldest.unwrap_or_default().as_secs_f64());
        let leases = held.values().map(|h| (h.lease.clone(), h.span.clone()));
        leases.collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, InHand>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Three beats a lease, so that one may be lost.
pub(super) async fn heartbeats<Q: Queue>(queue: Arc<Q>, held: Arc<Held>) {
    let mut interval = tokio::time::interval(queue.lease_duration() / 3);
    loop {
        interval.tick().await;
        for (lease, span) in held.all() {
            let beat = async {
                match queue.heartbeat(&lease).await {
                    Ok(true) => {}
                    Ok(false) => tracing::warn!("lease lost, finishing anyway"),
                    Err(error) => tracing::warn!(%error, "heartbeat failed"),
                }
            };
            beat.instrument(span).await;
        }
    }
}
