//! What every queue promises, on each of them: in process, on an old NATS server and on a new one.
//!
//! Leases are 2 s. Nothing sleeps: a test waits for what it is about, the next lease.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use laser_coordinator::ledger::LedgerLimits;
use laser_coordinator::local_queue::LocalQueue;
use laser_coordinator::nats::{NatsClient, NatsQueue};
use laser_schema::job::{Lease, Queue};
use tokio::sync::mpsc;

use crate::nats_server::{Server, Version, jobs, run_ref};

const LEASE: Duration = Duration::from_secs(2);

/// A queue with shards in it.
trait Harness: Sized {
    type Queue: Queue + 'static;

    fn start(shards: u32, attempts: u32) -> impl Future<Output = Self>;

    /// The queue as another worker sees it.
    fn worker(&self) -> impl Future<Output = Arc<Self::Queue>>;

    /// The queue as a worker sees it that ends when there is nothing more to do.
    fn ending_worker(&self) -> impl Future<Output = Arc<Self::Queue>> {
        self.worker()
    }

    /// How many shards are neither committed nor dead.
    fn open(&self) -> impl Future<Output = usize>;

    /// The dead shards with the reason.
    fn dead(&self) -> impl Future<Output = Vec<(u32, String)>>;
}

struct Local(Arc<LocalQueue>);

impl Harness for Local {
    type Queue = LocalQueue;

    async fn start(shards: u32, attempts: u32) -> Self {
        let limits = LedgerLimits { lease: LEASE, attempts, retry: Duration::ZERO };
        Self(Arc::new(LocalQueue::new(&jobs(shards), &[], limits)))
    }

    async fn worker(&self) -> Arc<LocalQueue> {
        self.0.clone()
    }

    async fn open(&self) -> usize {
        let counts = self.0.counts();
        counts.ready + counts.leased
    }

    async fn dead(&self) -> Vec<(u32, String)> {
        self.0.dead()
    }
}

struct Nats<const NEW: bool> {
    server: Server,
    coordinator: NatsClient,
    attempts: u32,
}

impl<const NEW: bool> Harness for Nats<NEW> {
    type Queue = NatsQueue;

    async fn start(shards: u32, attempts: u32) -> Self {
        let server = Server::start(if NEW { Version::New } else { Version::Old });
        let coordinator = server.coordinator().await;
        let new = coordinator.publish(&run_ref("run"), &jobs(shards)).await;
        assert_eq!(new.unwrap(), u64::from(shards));
        Self { server, coordinator, attempts }
    }

    async fn worker(&self) -> Arc<NatsQueue> {
        let worker = self.server.worker("worker", self.attempts).await;
        Arc::new(worker.queue(&run_ref("run")))
    }

    async fn ending_worker(&self) -> Arc<NatsQueue> {
        let worker = self.server.idle_worker(Duration::from_secs(1)).await;
        Arc::new(worker.queue(&run_ref("run")))
    }

    async fn open(&self) -> usize {
        usize::try_from(self.coordinator.queued("run").await.unwrap()).unwrap()
    }

    async fn dead(&self) -> Vec<(u32, String)> {
        let letters = self.coordinator.dead_letters("run").await.unwrap();
        letters.into_iter().map(|l| (l.shard, l.reason)).collect()
    }
}

pub(crate) async fn take<Q: Queue>(queue: &Q) -> Lease {
    queue.lease().await.unwrap().expect("there is work")
}

async fn every_shard_is_delivered_once<H: Harness>() {
    let harness = H::start(20, 3).await;
    let queue = harness.worker().await;
    for shard in 0..20 {
        let lease = take(&*queue).await;
        assert_eq!((lease.job.shard, lease.attempt), (shard, 1), "in plan order");
        assert_eq!(lease.job, jobs(20)[shard as usize]);
        queue.committed(&lease).await.unwrap();
    }
    assert_eq!(harness.open().await, 0);
    assert_eq!(harness.dead().await, []);
}

async fn a_leased_shard_is_not_given_to_another<H: Harness>() {
    let harness = H::start(1, 3).await;
    let (one, two) = (harness.worker().await, harness.worker().await);
    let lease = take(&*one).await;
    let mut beat = tokio::time::interval(LEASE / 4);
    // Three leases long, so that heartbeats are what keeps it.
    let beats = async {
        for _ in 0..12 {
            beat.tick().await;
            assert!(one.heartbeat(&lease).await.unwrap());
        }
    };
    tokio::select! {
        second = two.lease() => panic!("{second:?} while another worker has it"),
        () = beats => {}
    }
    one.committed(&lease).await.unwrap();
    assert_eq!(harness.open().await, 0);
}

async fn a_lost_lease_is_given_again_and_its_late_words_are_void<H: Harness>() {
    let harness = H::start(1, 3).await;
    let (one, two) = (harness.worker().await, harness.worker().await);
    let old = take(&*one).await;
    let new = take(&*two).await;
    assert_eq!((new.job.shard, new.attempt), (0, 2));
    assert_ne!(old.token, new.token);
    assert!(!one.heartbeat(&old).await.unwrap());
    one.failed(&old, "late").await.unwrap();
    one.released(&old).await.unwrap();
    assert!(two.heartbeat(&new).await.unwrap(), "still the new holder's");
    two.committed(&new).await.unwrap();
    assert_eq!(harness.open().await, 0);
    assert_eq!(harness.dead().await, []);
}

async fn the_commit_of_a_lost_lease_counts<H: Harness>() {
    let harness = H::start(1, 3).await;
    let (one, two) = (harness.worker().await, harness.worker().await);
    let old = take(&*one).await;
    let new = take(&*two).await;
    one.committed(&old).await.unwrap();
    assert_eq!(harness.open().await, 0);
    two.committed(&new).await.unwrap();
    assert_eq!(harness.open().await, 0);
}

async fn a_failed_shard_comes_back_until_it_is_dead<H: Harness>() {
    let harness = H::start(1, 2).await;
    let queue = harness.worker().await;
    for (attempt, reason) in [(1, "out of memory"), (2, "still out\nof memory")] {
        assert_eq!(harness.dead().await, []);
        let lease = take(&*queue).await;
        assert_eq!(lease.attempt, attempt);
        queue.failed(&lease, reason).await.unwrap();
    }
    assert_eq!(harness.dead().await, [(0, "still out\nof memory".to_owned())]);
    assert_eq!(harness.open().await, 0);
}

async fn a_released_shard_comes_back<H: Harness>() {
    let harness = H::start(1, 3).await;
    let (one, two) = (harness.worker().await, harness.worker().await);
    let lease = take(&*one).await;
    one.released(&lease).await.unwrap();
    let again = take(&*two).await;
    assert_eq!(again.job.shard, 0);
    assert_ne!(lease.token, again.token);
    two.committed(&again).await.unwrap();
    assert_eq!(harness.open().await, 0);
}

async fn two_workers_share<H: Harness>() {
    let harness = H::start(20, 3).await;
    let slow = harness.worker().await;
    let held = take(&*slow).await;
    let (sender, mut receiver) = mpsc::channel(20);
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (queue, sender) = (harness.worker().await, sender.clone());
        workers.spawn(async move {
            while let Some(lease) = queue.lease().await.unwrap() {
                queue.committed(&lease).await.unwrap();
                if sender.send(lease.job.shard).await.is_err() {
                    return;
                }
            }
        });
    }
    let mut seen = BTreeSet::from([held.job.shard]);
    for _ in 0..19 {
        let shard = receiver.recv().await.unwrap();
        assert!(seen.insert(shard), "shard {shard} twice");
    }
    slow.committed(&held).await.unwrap();
    assert_eq!(seen, (0..20).collect());
    assert_eq!(harness.open().await, 0);
}

async fn a_worker_ends_when_nothing_is_left<H: Harness>() {
    let harness = H::start(2, 3).await;
    let queue = harness.ending_worker().await;
    for _ in 0..2 {
        let lease = take(&*queue).await;
        queue.committed(&lease).await.unwrap();
    }
    assert_eq!(queue.lease().await.unwrap(), None);
    assert_eq!(queue.lease().await.unwrap(), None);
}

async fn the_lease_lasts_as_configured<H: Harness>() {
    let harness = H::start(0, 3).await;
    assert_eq!(harness.worker().await.lease_duration(), LEASE);
}

macro_rules! suite {
    ($($name:ident: $harness:ty),*: $tests:tt) => {
        $(suite!(@ $name $harness, $tests);)*
    };
    (@ $name:ident $harness:ty, [$($test:ident),* $(,)?]) => {
        mod $name {
            use super::*;
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test::<$harness>().await;
                }
            )*
        }
    };
}

// tests/run.sh --quick leaves out the two modules that need a server.
suite!(local: Local, old_nats: Nats<false>, new_nats: Nats<true>: [
    every_shard_is_delivered_once,
    a_leased_shard_is_not_given_to_another,
    a_lost_lease_is_given_again_and_its_late_words_are_void,
    the_commit_of_a_lost_lease_counts,
    a_failed_shard_comes_back_until_it_is_dead,
    a_released_shard_comes_back,
    two_workers_share,
    a_worker_ends_when_nothing_is_left,
    the_lease_lasts_as_configured,
]);
