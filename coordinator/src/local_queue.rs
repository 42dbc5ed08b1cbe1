//! The in-process queue: the ledger behind a lock, for runs of one process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laser_schema::job::{Lease, Queue, QueueError, ShardJob};
use tokio::sync::Notify;

use crate::ledger::{Leasing, Ledger, LedgerCounts, LedgerLimits};

/// A queue over the shards of one plan, shared by reference.
#[derive(Debug)]
pub struct LocalQueue {
    state: Mutex<State>,
    jobs: Vec<ShardJob>,
    limits: LedgerLimits,
    start: Instant,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    closed: bool,
}

impl LocalQueue {
    /// Creates a queue of a plan's shards except the committed ones.
    pub fn new(jobs: &[ShardJob], committed: &[u32], limits: LedgerLimits) -> Self {
        let shards = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
        let ledger = Ledger::new(shards, committed.iter().copied(), limits);
        Self {
            state: Mutex::new(State { ledger, closed: false }),
            jobs: jobs.to_vec(),
            limits,
            start: Instant::now(),
            changed: Notify::new(),
        }
    }

    /// Leases nothing more: workers that ask learn that the work has ended.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_waiters();
    }

    /// Whether every shard is committed or given up.
    pub fn is_done(&self) -> bool {
        let counts = self.counts();
        counts.ready + counts.leased == 0
    }

    /// Returns the number of shards in each state.
    pub fn counts(&self) -> LedgerCounts {
        self.state().ledger.counts()
    }

    /// Returns the shards that were given up, with the reason.
    pub fn dead(&self) -> Vec<(u32, String)> {
        self.state().ledger.dead()
    }

    /// Locks the state. A panic elsewhere cannot leave the ledger half-changed, because every transition is one
    /// assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Changes the ledger and notifies everyone who waits for a change.
    fn change(&self, change: impl FnOnce(&mut Ledger, Duration)) {
        change(&mut self.state().ledger, self.now());
        self.changed.notify_waiters();
    }
}

impl Queue for LocalQueue {
    async fn lease(&self) -> Result<Option<Lease>, QueueError> {
        loop {
            // Register before asking the ledger, so that no change falls in between.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let leasing = {
                let mut state = self.state();
                if state.closed { Leasing::Finished } else { state.ledger.lease(self.now()) }
            };
            match leasing {
                Leasing::Finished => return Ok(None),
                Leasing::Shard { shard, attempt, token } => {
                    let job = self.jobs[shard as usize].clone();
                    return Ok(Some(Lease { job, attempt, token }));
                }
                Leasing::Wait { until } => {
                    let wait = until.saturating_sub(self.now());
                    // This ends early when something changes; either way the ledger is asked again.
                    let _ = tokio::time::timeout(wait, changed).await;
                }
            }
        }
    }

    fn lease_duration(&self) -> Duration {
        self.limits.lease
    }

    async fn heartbeat(&self, lease: &Lease) -> Result<bool, QueueError> {
        let now = self.now();
        Ok(self.state().ledger.heartbeat(lease.job.shard, lease.token, now))
    }

    async fn committed(&self, lease: &Lease) -> Result<(), QueueError> {
        self.change(|ledger, _| ledger.commit(lease.job.shard));
        Ok(())
    }

    async fn failed(&self, lease: &Lease, reason: &str) -> Result<(), QueueError> {
        self.change(|ledger, now| ledger.fail(lease.job.shard, lease.token, reason, now));
        Ok(())
    }

    async fn released(&self, lease: &Lease) -> Result<(), QueueError> {
        self.change(|ledger, now| ledger.release(lease.job.shard, lease.token, now));
        Ok(())
    }
}
