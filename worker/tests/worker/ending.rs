//! How a worker ends before the work does, and queues that misbehave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::civil::date;
use laser_coordinator::ledger::LedgerCounts;
use laser_coordinator::local_queue::LocalQueue;
use laser_schema::job::{Action, Lease, Queue, QueueError};
use laser_worker::error::WorkerError;
use laser_worker::generate::{GenerateOptions, TextGenerator};
use laser_worker::run::{Stop, run_worker};
use tokio_util::sync::CancellationToken;

use crate::planned::{Run, first_night, generator, good, limits, plan_as, plan_night, users_to};
use crate::support::{fake_options, options, watched};
use crate::watch::Mischief;

/// A queue that does something else with some leases.
struct Tampered {
    inner: LocalQueue,
    leases: AtomicUsize,
    /// Cancelled with the lease of this number.
    drain: Option<(usize, CancellationToken)>,
    /// Every shard is handed out again at once.
    twice: bool,
    /// The word of a commit is refused.
    refuse: bool,
    last: std::sync::Mutex<Option<Lease>>,
}

impl Tampered {
    fn new(run: &Run) -> Self {
        Self {
            inner: LocalQueue::new(&run.plan().shards, &[], limits()),
            leases: AtomicUsize::new(0),
            drain: None,
            twice: false,
            refuse: false,
            last: std::sync::Mutex::new(None),
        }
    }
}

impl Queue for Tampered {
    async fn lease(&self) -> Result<Option<Lease>, QueueError> {
        let again = self.last.lock().unwrap().take();
        if let (true, Some(lease)) = (self.twice, again) {
            return Ok(Some(Lease { token: lease.token + 1000, attempt: 2, ..lease }));
        }
        let lease = self.inner.lease().await?;
        self.last.lock().unwrap().clone_from(&lease);
        let count = self.leases.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some((at, drain)) = &self.drain
            && *at == count
        {
            drain.cancel();
        }
        Ok(lease)
    }

    fn lease_duration(&self) -> Duration {
        self.inner.lease_duration()
    }

    async fn heartbeat(&self, lease: &Lease) -> Result<bool, QueueError> {
        self.inner.heartbeat(lease).await
    }

    async fn committed(&self, lease: &Lease) -> Result<(), QueueError> {
        if self.refuse {
            return Err(QueueError("refused".into()));
        }
        self.inner.committed(lease).await
    }

    async fn failed(&self, lease: &Lease, reason: &str) -> Result<(), QueueError> {
        self.inner.failed(lease, reason).await
    }

    async fn released(&self, lease: &Lease) -> Result<(), QueueError> {
        self.inner.released(lease).await
    }
}

/// Works on a run, of which some shards are `done`, until `stop`, of which `tokens` are cancelled at the first step.
async fn stopped_at_first_step(run: &Run, done: &[u32], stop: Stop, tokens: Vec<CancellationToken>) -> LedgerCounts {
    let queue = Arc::new(LocalQueue::new(&run.plan().shards, done, limits()));
    let generator = generator(fake_options(), Mischief { cancel: tokens, ..Mischief::default() });
    run_worker(queue.clone(), run.context.clone(), generator, stop).await.unwrap();
    queue.counts()
}

#[tokio::test]
async fn a_draining_worker_finishes_what_it_began_and_gives_the_rest_back() {
    let (run, stop) = (first_night(30).await, Stop::default());
    let counts = stopped_at_first_step(&run, &[], stop.clone(), vec![stop.drain]).await;
    assert!((1..6).contains(&counts.committed), "{} committed", counts.committed);
    assert_eq!((counts.committed + counts.ready, counts.leased, counts.dead), (6, 0, 0));
}

#[tokio::test]
async fn a_released_worker_gives_everything_back_at_once() {
    let (run, stop) = (first_night(30).await, Stop::default());
    let counts = stopped_at_first_step(&run, &[], stop.clone(), vec![stop.drain, stop.release]).await;
    assert_eq!((counts.committed, counts.ready, counts.leased, counts.dead), (0, 6, 0, 0));
}

#[tokio::test]
async fn a_released_worker_gives_an_audit_back_after_the_step_in_hand() {
    let run = plan_night(&users_to(20), 0.5).await;
    let texts: Vec<u32> = run.jobs(Action::Generate).map(|job| job.shard).collect();
    let shards = run.plan().shards.len();
    let queue = Arc::new(LocalQueue::new(&run.plan().shards, &texts, limits()));
    let stop = Stop::default();
    let cancel = vec![stop.drain.clone(), stop.release.clone()];
    let options = GenerateOptions { step_tokens: 128, ..options() };
    let (generator, log) = watched(fake_options(), Mischief { cancel, ..Mischief::default() }, options);
    let generator = run_worker(queue.clone(), run.context.clone(), Box::new(generator), stop).await.unwrap();
    let counts = queue.counts();
    assert!(texts.len() < shards, "there are audits");
    assert_eq!((counts.committed, counts.ready), (texts.len(), shards - texts.len()));
    assert_eq!((counts.leased, counts.dead, run.context.progress.snapshot().failed_attempts), (0, 0, 0));
    assert!(run.context.run.committed().await.unwrap().is_empty());
    assert_eq!(log.lock().unwrap().steps.len(), 1);
    assert!(log.lock().unwrap().open.is_empty());
    assert_eq!(generator.load(), 0);
    // It is as good as new.
    run.work(&queue, generator).await;
    assert_eq!(queue.counts().committed, shards);
}

#[tokio::test]
async fn an_abandoned_commit_fails_the_attempt_and_writes_nothing() {
    let (run, stop) = (first_night(10).await, Stop::default());
    let queue = run.queue();
    stop.abandon.cancel();
    run_worker(queue.clone(), run.context.clone(), good(), stop).await.unwrap();
    let dead = queue.dead();
    assert_eq!((queue.counts().committed, dead.len()), (0, 2));
    assert!(dead[0].1.contains("while the store did not answer"), "{}", dead[0].1);
    assert!(run.context.run.committed().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_draining_worker_leases_nothing_more() {
    for at in [1, 2, 3] {
        let (run, drain) = (first_night(30).await, CancellationToken::new());
        let queue = Arc::new(Tampered { drain: Some((at, drain.clone())), ..Tampered::new(&run) });
        let stop = Stop { drain, ..Stop::default() };
        run_worker(queue.clone(), run.context.clone(), good(), stop).await.unwrap();
        let counts = queue.inner.counts();
        assert_eq!(queue.leases.load(Ordering::SeqCst), at);
        assert!(counts.committed <= at);
        assert_eq!((counts.committed + counts.ready, counts.leased), (6, 0));
    }
}

#[tokio::test]
async fn a_closed_queue_ends_the_worker() {
    let run = first_night(10).await;
    let queue = run.queue();
    queue.close();
    run.work(&queue, good()).await;
    assert_eq!(queue.counts().ready, 2);
}

#[tokio::test]
async fn a_shard_that_is_leased_again_while_in_hand_is_worked_on_once() {
    let run = first_night(15).await;
    let queue = Arc::new(Tampered { twice: true, ..Tampered::new(&run) });
    run.work(&queue, good()).await;
    assert_eq!(queue.inner.counts().committed, 3);
    run.assert_whole().await;
}

#[tokio::test]
async fn a_failing_queue_ends_the_worker_instead_of_hanging_it() {
    let run = first_night(30).await;
    let queue = Arc::new(Tampered { refuse: true, ..Tampered::new(&run) });
    let result = run_worker(queue, run.context.clone(), good(), Stop::default()).await;
    assert!(matches!(result.err(), Some(WorkerError::Queue(_))));
}

#[tokio::test]
async fn a_lost_engine_thread_ends_the_worker_instead_of_hanging_it() {
    let run = first_night(30).await;
    let mischief = Mischief { panic_on_step: Some(0), panic_on_close: true, ..Mischief::default() };
    let lost = generator(fake_options(), mischief);
    let result = run_worker(run.queue(), run.context.clone(), lost, Stop::default()).await;
    assert!(matches!(result.err(), Some(WorkerError::Lost(_))));
}

/// The steps of a worker over 20 shards, whose first commit the queue may refuse.
async fn steps(refuse: bool) -> usize {
    let run = first_night(100).await;
    let queue = Arc::new(Tampered { refuse, ..Tampered::new(&run) });
    let options = GenerateOptions { step_tokens: 128, ..options() };
    let (generator, log) = watched(fake_options(), Mischief::default(), options);
    let ended = run_worker(queue, run.context.clone(), Box::new(generator), Stop::default()).await;
    assert_eq!(ended.is_err(), refuse);
    log.lock().unwrap().steps.len()
}

#[tokio::test]
async fn the_engine_generates_nothing_that_nobody_would_commit() {
    let (whole, refused) = (steps(false).await, steps(true).await);
    // A shard that is being committed, one that waits for it, and those of the batch.
    assert!(refused * 2 < whole, "{refused} of {whole} steps");
}

fn failing() -> Box<dyn TextGenerator> {
    generator(fake_options(), Mischief { fail_from_step: Some(0), ..Mischief::default() })
}

#[tokio::test]
async fn a_device_that_fails_for_every_shard_ends_the_worker_and_not_the_shards() {
    let run = first_night(40).await;
    let queue = run.queue();
    let ended = run_worker(queue.clone(), run.context.clone(), failing(), Stop::default()).await;
    let error = ended.err().unwrap();
    assert!(matches!(&error, WorkerError::Device { device, .. } if device == "none"), "{error}");
    assert!(error.to_string().contains("8 sequences in a row"), "{error}");
    let counts = queue.counts();
    assert_eq!((counts.committed + counts.ready, counts.leased, counts.dead), (8, 0, 0));
    // Those that were open when it failed for the first time.
    let failed = run.context.progress.snapshot().failed_attempts;
    assert!((1..=2).contains(&failed), "{failed}");
}

#[tokio::test]
async fn a_shard_for_which_every_engine_fails_is_given_up_and_the_worker_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let run = plan_as(dir, date(2026, 11, 20), &users_to(10), |request| request.shard_rows = 10).await;
    let queue = run.queue();
    let generator = run.work(&queue, failing()).await;
    let dead = queue.dead();
    assert_eq!((dead.len(), run.context.progress.snapshot().failed_attempts), (1, 3));
    assert!(dead[0].1.contains("8 sequences in a row"), "{}", dead[0].1);
    assert_eq!(generator.load(), 0);
}
