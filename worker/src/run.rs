//! The worker's life: lease, load, generate, commit, until nothing is left or it is told to drain.
//!
//! Three parts, joined by bounded channels: an intake that leases shards and reads their inputs, one engine
//! thread that keeps its batch full across shards, and a committer. A worker holds at most the shards of its
//! batch, one more that is loaded and one that is being written, so its memory is bounded whatever the run's size.
//!
//! The commit is the creation of the shard's one output object; whoever creates it first has made the shard,
//! and everybody else drops their copy.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use laser_decode::Pool;
use laser_features::encoder::{Encoded, Encoder};
use laser_schema::Digest;
use laser_schema::audit::{Audit, AuditedText};
use laser_schema::job::{Action, Lease, Policy, Queue, QueueError, ShardJob, ShardRow};
use laser_schema::knowledge::{ErrorRecord, Figures, KnowledgeRecord, ratio};
use laser_store::Location;
use laser_store::location::{Created, LocationError};
use laser_store::run_store::{PlannedRun, RunStoreError};
use laser_store::table::TableError;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span, error_span, info_span, instrument};

use crate::audit::audit;
use crate::generate::{Finished, Generated, Request, StopReason, TextGenerator};
use crate::part::{self, Output, Work};
use crate::progress::Progress;
use crate::telemetry;

/// What a worker that must end gives the store to answer: less than a pod's grace goes beyond `[worker] grace_seconds`.
const LAST_COMMIT: Duration = Duration::from_secs(2);

/// What every shard of a run needs.
#[derive(Debug)]
pub struct RunContext {
    /// The run.
    pub run: PlannedRun,
    /// The pools by name.
    pub pools: HashMap<String, Pool>,
    /// What makes the embeddings that the plan asks for; of no use without them.
    pub encoder: Option<Arc<Encoder>>,
    /// The worker's name, unique among those that may work on the run.
    pub worker: String,
    /// Counters for whoever shows progress.
    pub progress: Arc<Progress>,
}

/// Why a worker stopped before the work did.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The queue failed.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The store does not let the worker in: every shard would fail, and none is to blame.
    #[error(
        "{0}; check the credentials of this worker and what they allow. Its shards are given to others when their leases \
         end"
    )]
    Refused(#[source] LocationError),
    /// A task of the worker was lost.
    #[error("the worker's {0} ended unexpectedly; its shards are given to others when their leases end")]
    Lost(&'static str),
}

impl RunContext {
    /// What log and trace say of everything that is done for a shard. Spans are errors, so that no level is without
    /// them.
    fn span(&self, job: &ShardJob) -> Span {
        error_span!("shard", run = self.run.name(), shard = job.shard, pool = job.pool)
    }
}

#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Location(#[from] LocationError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(transparent)]
    Run(#[from] RunStoreError),
    #[error("{file}: its bytes do not match the plan's digest: plan again")]
    Changed { file: String },
    #[error("the guards have not judged pool {pool:?} yet: this shard was queued too early")]
    NotJudged { pool: String },
}

/// What becomes of a leased shard.
enum Input {
    /// To the engine.
    Work(Work),
    /// To the committer.
    Done(Output),
}

struct Loaded {
    lease: Lease,
    work: Work,
    span: Span,
}

struct Done {
    lease: Lease,
    output: Output,
}

/// How a worker is told to end before the work does.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// Nothing more is leased; the shards that were begun are finished, the others given back.
    pub drain: CancellationToken,
    /// The shards that were begun are given back too, after the step in hand.
    pub release: CancellationToken,
}

/// Works on shards of one run until the queue has none left, or until it is told to [`Stop`]. Returns the generator
/// for further use. The current span is the run's.
///
/// # Errors
/// [`WorkerError`]; a failed shard is not one, the queue is told of it.
pub async fn run_worker<Q: Queue + 'static, G: TextGenerator + 'static>(
    queue: Arc<Q>,
    context: Arc<RunContext>,
    generator: G,
    stop: Stop,
) -> Result<G, WorkerError> {
    let (load_tx, load_rx) = mpsc::channel(1);
    let (done_tx, done_rx) = mpsc::channel(1);
    let held = Arc::new(Held::default());
    let engine = {
        let (context, done_tx, stop) = (context.clone(), done_tx.clone(), stop.clone());
        let run = Span::current();
        tokio::task::spawn_blocking(move || {
            let _entered = run.entered();
            let mut engine = EngineLoop::new(context, generator, stop);
            engine.run(load_rx, &done_tx);
            engine.generator
        })
    };
    let beat = tokio::spawn(heartbeats(queue.clone(), held.clone()));
    let committer = commit_all(queue.as_ref(), &context, &held, done_rx, &stop);
    let intake = intake(queue.as_ref(), &context, &held, (load_tx, done_tx), &stop);
    let (intake, committer) = tokio::join!(intake, committer);
    beat.abort();
    let generator = engine.await.map_err(|_| WorkerError::Lost("engine thread"))?;
    committer.and(intake)?;
    Ok(generator)
}

/// The leases in hand, for heartbeats.
#[derive(Debug, Default)]
struct Held(Mutex<BTreeMap<u32, InHand>>);

#[derive(Debug)]
struct InHand {
    lease: Lease,
    since: Instant,
    /// From the lease to the queue's last word.
    span: Span,
}

impl Held {
    /// Of a shard that the current span is about. `false`: it is in hand already, under a lease that was lost; the
    /// new one is kept in its place.
    fn add(&self, lease: &Lease) -> bool {
        let held = InHand { lease: lease.clone(), since: Instant::now(), span: Span::current() };
        self.lock().insert(lease.job.shard, held).is_none()
    }

    fn remove(&self, lease: &Lease) {
        self.lock().remove(&lease.job.shard);
    }

    fn span(&self, lease: &Lease) -> Span {
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
async fn heartbeats<Q: Queue>(queue: Arc<Q>, held: Arc<Held>) {
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

async fn intake<Q: Queue>(
    queue: &Q,
    context: &RunContext,
    held: &Held,
    (load, done): (mpsc::Sender<Loaded>, mpsc::Sender<Done>),
    stop: &Stop,
) -> Result<(), WorkerError> {
    loop {
        let Ok(room) = load.reserve().await else {
            return Err(WorkerError::Lost("engine thread"));
        };
        let lease = tokio::select! {
            biased;
            () = stop.drain.cancelled() => return Ok(()),
            // Without these two the wait for a lease would never end: the leases in hand are kept alive.
            () = load.closed() => return Err(WorkerError::Lost("engine thread")),
            () = done.closed() => return Err(WorkerError::Lost("committer")),
            lease = queue.lease() => lease?,
        };
        let Some(lease) = lease else { return Ok(()) };
        let span = context.span(&lease.job);
        take(context, held, lease, (room, &done), stop).instrument(span).await?;
    }
}

/// Loads a leased shard and passes it on.
async fn take(
    context: &RunContext,
    held: &Held,
    lease: Lease,
    (room, done): (mpsc::Permit<'_, Loaded>, &mpsc::Sender<Done>),
    stop: &Stop,
) -> Result<(), WorkerError> {
    if !held.add(&lease) {
        tracing::warn!("leased again while in hand");
        return Ok(());
    }
    tracing::debug!(attempt = lease.attempt, "leased");
    telemetry::leased(lease.attempt);
    // A store that is away is asked for minutes; a drain may not last that long.
    let input = tokio::select! {
        input = read_input(context, &lease.job) => input?,
        () = stop.release.cancelled() => Input::Done(Output::Released),
    };
    match input {
        Input::Work(work) => room.send(Loaded { lease, work, span: Span::current() }),
        Input::Done(output) => send(done, Done { lease, output }).await?,
    }
    Ok(())
}

async fn send(done: &mpsc::Sender<Done>, message: Done) -> Result<(), WorkerError> {
    done.send(message).await.map_err(|_| WorkerError::Lost("committer"))
}

/// What there is to do for a shard. A failure is the attempt's, unless the store does not let us in.
#[instrument(name = "read", target = "laser::trace", skip_all)]
async fn read_input(context: &RunContext, job: &ShardJob) -> Result<Input, WorkerError> {
    Ok(match load(context, job).await {
        Ok(None) => Input::Done(Output::Exists),
        Ok(Some(Work::Carry(rows))) => {
            let carried = rows.len() as u64;
            let rows = rows.into_iter().map(|r| part::carry(&context.run.plan, r));
            Input::Done(Output::Part { rows: rows.collect(), errors: Vec::new(), carried, figures: BTreeMap::new() })
        }
        Ok(Some(work)) => Input::Work(work),
        Err(LoadError::Location(error)) if error.is_refusal() => {
            return Err(WorkerError::Refused(error));
        }
        Err(error) => Input::Done(Output::Failed(error.to_string())),
    })
}

/// The shard's input; `None` if its output exists: a lost acknowledgement is no reason to do the work again.
async fn load(context: &RunContext, job: &ShardJob) -> Result<Option<Work>, LoadError> {
    if context.run.part(job).exists().await? {
        return Ok(None);
    }
    let input = context.run.input(job);
    let bytes = input.read().await?;
    if Digest::of(&bytes) != job.input_digest {
        return Err(LoadError::Changed { file: input.url().to_owned() });
    }
    let policy = policy(context, job).await?;
    Ok(Some(Work::decode(job.action, policy, input.url(), bytes)?))
}

/// How a shard's texts are verified: as the specification says, but strictly where the pool's audit breached a guard.
async fn policy(context: &RunContext, job: &ShardJob) -> Result<Policy, LoadError> {
    let plan = &context.run.plan;
    if plan.guards.is_none() || job.action != Action::Generate {
        return Ok(plan.spec.verification);
    }
    let verdict = context.run.store.verdict(job.kind, &job.pool).await?;
    match verdict {
        None => Err(LoadError::NotJudged { pool: job.pool.clone() }),
        Some(verdict) if verdict.strict => Ok(Policy::Strict),
        Some(_) => Ok(plan.spec.verification),
    }
}

async fn commit_all<Q: Queue>(
    queue: &Q,
    context: &RunContext,
    held: &Held,
    mut done: mpsc::Receiver<Done>,
    stop: &Stop,
) -> Result<(), WorkerError> {
    while let Some(done) = done.recv().await {
        let span = held.span(&done.lease);
        settle(queue, context, held, done, stop).instrument(span).await?;
    }
    Ok(())
}

/// Commits a shard and tells the queue, or tells it why not.
async fn settle<Q: Queue>(
    queue: &Q,
    context: &RunContext,
    held: &Held,
    Done { lease, output }: Done,
    stop: &Stop,
) -> Result<(), WorkerError> {
    if matches!(output, Output::Released) {
        held.remove(&lease);
        return Ok(queue.released(&lease).await?);
    }
    let created = tokio::select! {
        created = commit(context, &lease, output) => created?,
        () = too_late(stop) => Err("the worker ended while the store did not answer".to_owned()),
    };
    // Before the queue is told, which may hand out the shard again at once.
    held.remove(&lease);
    match created {
        Ok(created) => {
            context.progress.update(|s| s.shards += 1);
            telemetry::commit(created);
            tracing::debug!(?created, "committed");
            queue.committed(&lease).await?;
            tracing::debug!("acknowledged");
        }
        Err(reason) => {
            context.progress.update(|s| s.failed_attempts += 1);
            telemetry::failed_attempt();
            tracing::warn!(attempt = lease.attempt, reason, "attempt failed");
            queue.failed(&lease, &reason).await?;
        }
    }
    Ok(())
}

/// Returns a little after the release, so that a finished shard is still committed to a store that answers.
async fn too_late(stop: &Stop) {
    stop.release.cancelled().await;
    tokio::time::sleep(LAST_COMMIT).await;
}

/// Writes the shard's output. The inner error is a reason for the queue: nothing was committed.
#[instrument(name = "commit", target = "laser::trace", skip_all)]
async fn commit(context: &RunContext, lease: &Lease, output: Output) -> Result<Result<Created, String>, WorkerError> {
    let encoded = match output {
        Output::Failed(reason) => return Ok(Err(reason)),
        Output::Exists => return Ok(Ok(Created::Exists)),
        Output::Released => return Ok(Err("given back".to_owned())),
        Output::Audit(audit) => match compare(context, audit).await {
            Err(reason) => return Ok(Err(reason)),
            Ok(audit) => serde_json::to_vec(&audit).map(|bytes| (Bytes::from(bytes), 0, 0)).map_err(|e| e.to_string()),
        },
        Output::Part { rows, errors, carried, figures } => {
            let attempt = format!("{}/{}/{}", context.worker, lease.attempt, lease.token);
            let failed = errors.len() as u64;
            let (rows, encoded) = match embed(context, rows).await {
                Ok(embedded) => embedded,
                Err(reason) => return Ok(Err(reason)),
            };
            let rows = (rows.as_slice(), errors, carried);
            part::encode(&context.run.plan, lease, &attempt, rows, figures, encoded.as_ref())
                .map(|bytes| (bytes, failed, carried))
                .map_err(|e| e.to_string())
        }
    };
    let (bytes, failed, carried) = match encoded {
        Ok(encoded) => encoded,
        Err(reason) => return Ok(Err(reason)),
    };
    tracing::debug!(bytes = bytes.len(), "writing");
    let created = match create(&context.run.part(&lease.job), bytes).await {
        Err(error) if error.is_refusal() => return Err(WorkerError::Refused(error)),
        Err(error) => return Ok(Err(error.to_string())),
        Ok(created) => created,
    };
    if created == Created::Won {
        telemetry::rows(carried, failed);
        context.progress.update(|s| {
            s.errors += failed;
            s.carried += carried;
        });
    }
    Ok(Ok(created))
}

/// What makes embeddings, where the plan asks for them.
fn encoder(context: &RunContext) -> Result<Option<Arc<Encoder>>, String> {
    match (&context.run.plan.embedding, &context.encoder) {
        (None, _) => Ok(None),
        (Some(_), Some(encoder)) => Ok(Some(encoder.clone())),
        (Some(_), None) => Err("the run's output has embeddings, and this worker has no [encoder]".to_owned()),
    }
}

/// An audit with how alike its pairs of texts are, where the plan asks for embeddings.
async fn compare(context: &RunContext, mut audit: Audit) -> Result<Audit, String> {
    let Some(encoder) = encoder(context)? else {
        return Ok(audit);
    };
    let compare = move || {
        let plain = audit.pairs.iter().map(|pair| pair.plain.clone());
        let texts = plain.chain(audit.pairs.iter().map(AuditedText::text));
        let encoded = encoder.encode(&texts.collect::<Vec<_>>());
        let embeddings = encoded.map_err(|e| e.to_string())?.embeddings;
        let count = audit.pairs.len();
        for index in 0..count {
            let cosine = cosine(embeddings.row(index), embeddings.row(count + index));
            audit.add_similarity(index, cosine);
        }
        Ok(audit)
    };
    let compared = tokio::task::spawn_blocking(compare).await;
    compared.map_err(|_| "the encoder panicked; its message is in the log".to_owned())?
}

/// Of the angle between two vectors; 0 where one of them is zero.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    ratio(dot(a, b), (dot(a, a) * dot(b, b)).sqrt())
}

/// The embeddings of the rows' texts, where the plan asks for them. Rows that were carried forward are encoded as all
/// others are: an embedding depends on the text alone, and takes a thousandth of the time that the text took.
async fn embed(
    context: &RunContext,
    rows: Vec<KnowledgeRecord>,
) -> Result<(Vec<KnowledgeRecord>, Option<Encoded>), String> {
    let Some(encoder) = encoder(context)? else {
        return Ok((rows, None));
    };
    let encode = move || {
        let texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
        let encoded = encoder.encode(&texts).map_err(|e| e.to_string())?;
        Ok((rows, Some(encoded)))
    };
    let encoded = tokio::task::spawn_blocking(encode).await;
    encoded.map_err(|_| "the encoder panicked; its message is in the log".to_owned())?
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

/// A shard whose rows are being generated.
struct OpenShard {
    lease: Lease,
    rows: Vec<ShardRow>,
    policy: Policy,
    results: Vec<Option<Result<KnowledgeRecord, ErrorRecord>>>,
    left: usize,
    /// Tokens of each row's earlier text.
    previous: Vec<u64>,
    figures: BTreeMap<String, Figures>,
    /// Open as long as the shard is.
    _generating: Span,
}

/// The engine thread: owns the generator and the shards that are open.
struct EngineLoop<G> {
    context: Arc<RunContext>,
    generator: G,
    stop: Stop,
    open: HashMap<u32, OpenShard>,
}

impl<G: TextGenerator> EngineLoop<G> {
    fn new(context: Arc<RunContext>, generator: G, stop: Stop) -> Self {
        Self { context, generator, stop, open: HashMap::new() }
    }

    fn run(&mut self, mut load: mpsc::Receiver<Loaded>, done: &mpsc::Sender<Done>) {
        let mut waiting = None;
        loop {
            // More rows are wanted as soon as the batch is not full; an audit wants the engine to itself.
            while waiting.is_none() && self.generator.load() < self.generator.batch() {
                let idle = self.open.is_empty();
                let next = match idle {
                    true => load.blocking_recv(),
                    false => load.try_recv().ok(),
                };
                match next {
                    Some(loaded) => waiting = self.take_in(loaded, done),
                    // Whatever was loaded is done or given back.
                    None if idle => return,
                    None => break,
                }
            }
            if self.stop.release.is_cancelled() {
                self.release_all(waiting.take(), done);
            } else if self.open.is_empty()
                && let Some((lease, rows)) = waiting.take()
            {
                self.audit(lease, &rows, done);
            }
            self.step(done);
        }
    }

    /// Opens a shard; an audit is returned, to be run when nothing else is.
    fn take_in(&mut self, loaded: Loaded, done: &mpsc::Sender<Done>) -> Option<(Lease, Vec<ShardRow>)> {
        if self.stop.drain.is_cancelled() {
            finish_shard(done, loaded.lease, Output::Released);
            return None;
        }
        match loaded.work {
            Work::Audit(rows) => return Some((loaded.lease, rows)),
            Work::Generate { rows, policy } => {
                let _entered = loaded.span.entered();
                self.open_shard(loaded.lease, (rows, policy), done);
            }
            Work::Carry(_) => {}
        }
        None
    }

    fn open_shard(&mut self, lease: Lease, (rows, policy): (Vec<ShardRow>, Policy), done: &mpsc::Sender<Done>) {
        let shard = lease.job.shard;
        let mut open = OpenShard {
            _generating: info_span!(target: "laser::trace", "generate", rows = rows.len()),
            lease,
            left: rows.len(),
            results: vec![None; rows.len()],
            previous: vec![0; rows.len()],
            figures: BTreeMap::new(),
            policy,
            rows,
        };
        let shared = self.share_prefix(&open.rows);
        for index in 0..open.rows.len() {
            let id = (u64::from(shard) << 32) | index as u64;
            match self.request(&open.rows[index], id, policy) {
                Ok(request) => {
                    open.previous[index] = request.previous.len() as u64;
                    self.generator.submit(request);
                }
                Err((stage, reason)) => open.fail(index, stage, &reason),
            }
        }
        self.open.insert(shard, open);
        match shared {
            Ok(()) => self.close_if_done(shard, done),
            Err(reason) => self.fail_all(&reason, done),
        }
    }

    /// That there is no shared prefix costs time only; a panic leaves nothing to rely on.
    fn share_prefix(&mut self, rows: &[ShardRow]) -> Result<(), String> {
        let planned = rows.iter().filter(|r| r.error.is_none());
        let prompts: Vec<&[u32]> = planned.map(|r| r.prompt.as_slice()).collect();
        if let Err(error) = catch(|| self.generator.share_prefix(&prompts))? {
            tracing::warn!(%error, "no shared prefix: every prompt is prefilled whole");
        }
        Ok(())
    }

    fn request(&self, row: &ShardRow, id: u64, policy: Policy) -> Result<Request, (&'static str, String)> {
        if let Some(reason) = &row.error {
            return Err(("plan", reason.clone()));
        }
        let previous = row.previous.as_deref().unwrap_or_default();
        let tokens = self.generator.tokenizer().encode(previous, false);
        Ok(Request {
            id,
            prompt: row.prompt.clone(),
            previous: tokens.map_err(|e| ("generate", e.to_string()))?,
            pool: self.context.pools.get(&row.pool).cloned(),
            plain: false,
            strict: policy == Policy::Strict,
        })
    }

    fn step(&mut self, done: &mpsc::Sender<Done>) {
        if self.generator.load() == 0 {
            return;
        }
        telemetry::occupancy(self.generator.load(), self.generator.batch());
        match catch(|| self.generator.step()) {
            Ok(Ok(finished)) => finished.into_iter().for_each(|f| self.finish(f, done)),
            Ok(Err(error)) => self.fail_all(&error.to_string(), done),
            Err(reason) => self.fail_all(&reason, done),
        }
    }

    fn finish(&mut self, Finished { id, result }: Finished, done: &mpsc::Sender<Done>) {
        let (Ok(shard), Ok(index)) = (u32::try_from(id >> 32), usize::try_from(id & 0xffff_ffff)) else {
            return;
        };
        let Some(open) = self.open.get_mut(&shard) else {
            return;
        };
        match result {
            Ok(text) if text.text.trim().is_empty() => {
                open.fail(index, "generate", "the model's text is empty");
            }
            Ok(text) => {
                let row = &open.rows[index];
                let pool = self.context.pools.get(&row.pool);
                let plan = &self.context.run.plan;
                let record = part::record(plan, (row, open.policy), pool, &text);
                let previous = with_end(open.previous[index], text.stop);
                let figures = Figures::of(&record, &text.tokens, previous);
                let progress = &self.context.progress;
                let fallback = open.policy != plan.spec.verification;
                progress.text(open.lease.job.kind, &record.pool, &figures, fallback);
                let of_pool = open.figures.entry(record.pool.clone()).or_default();
                of_pool.add(&figures);
                open.results[index] = Some(Ok(record));
                open.left -= 1;
            }
            Err(reason) => open.fail(index, "generate", &reason),
        }
        self.close_if_done(shard, done);
    }

    fn close_if_done(&mut self, shard: u32, done: &mpsc::Sender<Done>) {
        if self.open.get(&shard).is_none_or(|open| open.left > 0) {
            return;
        }
        let Some(open) = self.open.remove(&shard) else {
            return;
        };
        let (mut rows, mut errors) = (Vec::new(), Vec::new());
        for result in open.results.into_iter().flatten() {
            match result {
                Ok(record) => rows.push(record),
                Err(error) => errors.push(error),
            }
        }
        finish_shard(done, open.lease, Output::Part { rows, errors, carried: 0, figures: open.figures });
    }

    fn fail_all(&mut self, reason: &str, done: &mpsc::Sender<Done>) {
        self.generator.reset();
        for (_, open) in self.open.drain() {
            finish_shard(done, open.lease, Output::Failed(reason.to_owned()));
        }
    }

    fn release_all(&mut self, audit: Option<(Lease, Vec<ShardRow>)>, done: &mpsc::Sender<Done>) {
        self.generator.reset();
        let open = self.open.drain().map(|(_, open)| open.lease);
        for lease in open.chain(audit.map(|(lease, _)| lease)) {
            finish_shard(done, lease, Output::Released);
        }
    }

    fn audit(&mut self, lease: Lease, rows: &[ShardRow], done: &mpsc::Sender<Done>) {
        let policy = self.context.run.plan.spec.verification;
        let requests: Vec<(&ShardRow, Request)> =
            rows.iter().filter_map(|row| Some((row, self.request(row, 0, policy).ok()?))).collect();
        let context = &self.context;
        let figures = |row: &ShardRow, request: &Request, text: &Generated| {
            let (plan, pool) = (&context.run.plan, request.pool.as_ref());
            let record = part::record(plan, (row, plan.spec.verification), pool, text);
            let previous = with_end(request.previous.len() as u64, text.stop);
            Figures::of(&record, &text.tokens, previous)
        };
        let generator = &mut self.generator;
        let failed = match catch(|| audit(generator, &requests, figures)) {
            Ok(Ok(audit)) => return finish_shard(done, lease, Output::Audit(audit)),
            Ok(Err(error)) => error.to_string(),
            Err(reason) => reason,
        };
        self.generator.reset();
        finish_shard(done, lease, Output::Failed(failed));
    }
}

/// Tokens of a row's earlier text, 0 if it has none. Its end-of-text token is no part of it, and counts where
/// tonight's does.
fn with_end(previous: u64, stop: StopReason) -> u64 {
    match previous {
        0 => 0,
        tokens => tokens + u64::from(stop == StopReason::End),
    }
}

/// A panic of the engine fails the shards in hand, not the worker.
fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| "the engine panicked; its message is in the log".to_owned())
}

/// The committer outlives the engine thread; if it is gone, so is the worker, and the lease will end.
fn finish_shard(done: &mpsc::Sender<Done>, lease: Lease, output: Output) {
    if done.blocking_send(Done { lease, output }).is_err() {
        tracing::error!("the committer is gone; the shard will be leased again");
    }
}

impl OpenShard {
    fn fail(&mut self, index: usize, stage: &str, reason: &str) {
        let error = ErrorRecord {
            entity_id: self.rows[index].entity_id.clone(),
            stage: stage.to_owned(),
            reason: reason.to_owned(),
        };
        self.results[index] = Some(Err(error));
        self.left -= 1;
    }
}
