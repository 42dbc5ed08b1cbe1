//! The worker's life: lease, load, generate, commit, until nothing is left or it is told to drain.
//!
//! Three parts, joined by bounded channels: an intake that leases shards and reads their inputs, one engine
//! thread that keeps its batch full across shards, and a committer. A worker holds at most the shards of its
//! batch, one more that is loaded and one that is being written, and up to 10,000 texts of each kind to draft from. So
//! its memory is bounded whatever the run's size.
//!
//! The commit is the creation of the shard's one output object; whoever creates it first has made the shard,
//! and everybody else drops their copy.

mod commit;
mod context;
mod embed;
mod engine_loop;
mod held;
mod intake;
mod open_shard;
mod tonight;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use laser_schema::job::{Lease, Queue};
use tokio::sync::mpsc;
use tracing::Span;

pub use context::{RunContext, Stop};

use crate::error::WorkerError;
use crate::generate::TextGenerator;
use crate::part::{Output, Work};
use commit::Committer;
use engine_loop::{EngineLoop, Faults};
use held::{Held, heartbeats};
use intake::Intake;
use tonight::Tonight;

/// A leased shard whose input was read.
struct Loaded {
    lease: Lease,
    work: Work,
    span: Span,
}

/// A leased shard and what it came to.
struct Done {
    lease: Lease,
    output: Output,
}

/// Works on shards of one run until the queue has none left, or until it is told to [`Stop`]. Returns the generator
/// for further use. The current span is the run's.
///
/// # Errors
/// [`WorkerError`] if no other shard can succeed either. A failed shard is no error, the queue is told of it.
pub async fn run_worker<Q: Queue + 'static>(
    queue: Arc<Q>,
    context: Arc<RunContext>,
    generator: Box<dyn TextGenerator>,
    stop: Stop,
) -> Result<Box<dyn TextGenerator>, WorkerError> {
    // The engine and the committer may end this worker; the caller's tokens are its own.
    let stop = stop.child();
    let (load_tx, load_rx) = mpsc::channel(1);
    let (done_tx, done_rx) = mpsc::channel(1);
    let held = Arc::new(Held::default());
    let engine = {
        let (context, done_tx, stop) = (context.clone(), done_tx.clone(), stop.clone());
        let run = Span::current();
        tokio::task::spawn_blocking(move || {
            let _entered = run.entered();
            let may_replace = generator.adapts() && context.run.plan.guards.is_none();
            let tonight = Tonight::new(generator.pool_meta(), may_replace, context.pools.values());
            let (open, queued, faults) = (HashMap::new(), VecDeque::new(), Faults::default());
            EngineLoop { context, generator, stop, done: done_tx, open, queued, tonight, faults }.run(load_rx)
        })
    };
    let beat = tokio::spawn(heartbeats(queue.clone(), held.clone()));
    let committer = Committer { queue: queue.as_ref(), context: &context, held: &held, stop: &stop }.run(done_rx);
    let intake =
        Intake { queue: queue.as_ref(), context: &context, held: &held, stop: &stop, load: load_tx, done: done_tx };
    let (intake, committer) = tokio::join!(intake.run(), committer);
    beat.abort();
    let generator = engine.await.map_err(|_| WorkerError::Lost("engine thread"))?;
    committer.and(intake)?;
    generator
}
