//! The engine loop: one thread that keeps its batch full across shards.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use laser_decode::Pool;
use laser_schema::Kind;
use laser_schema::job::{Lease, Policy, ShardJob, ShardRow};
use laser_schema::knowledge::Figures;
use tokio::sync::mpsc;

use super::context::{RunContext, Stop};
use super::open_shard::{OpenShard, Place, RowError, with_end};
use super::tonight::Tonight;
use super::{Done, Loaded};
use crate::audit::audit;
use crate::error::WorkerError;
use crate::generate::{Finished, Generated, Request, TextGenerator};
use crate::part::{self, Output, Work};
use crate::telemetry;

/// The engine thread: owns the generator and the shards that are open.
pub(super) struct EngineLoop {
    pub(super) context: Arc<RunContext>,
    pub(super) generator: Box<dyn TextGenerator>,
    pub(super) stop: Stop,
    pub(super) done: mpsc::Sender<Done>,
    pub(super) open: HashMap<u32, OpenShard>,
    /// Texts of open shards that the generator has not been asked for, with the numbers of their shards.
    pub(super) queued: VecDeque<(u32, Place)>,
    pub(super) tonight: Tonight,
    pub(super) faults: Faults,
}

/// What tells a broken device, which fails for every shard, from a shard for which every device fails.
#[derive(Default)]
pub(super) struct Faults {
    /// The shards for which the engine has failed.
    shards: HashSet<u32>,
    /// Whether the engine has finished no text since it failed the last time.
    is_suspect: bool,
    /// Why the worker ends.
    broken: Option<WorkerError>,
}

impl Faults {
    /// Adds a failure for these shards. Returns whether the device is at fault: the engine had just failed, and it has
    /// not failed before for all of these shards. A shard that fails again is the queue's to give up.
    fn add(&mut self, leases: &[Lease]) -> bool {
        let known = self.shards.len();
        self.shards.extend(leases.iter().map(|lease| lease.job.shard));
        std::mem::replace(&mut self.is_suspect, true) && self.shards.len() > known
    }
}

/// An audit that waits until nothing else is open.
type WaitingAudit = (Lease, Vec<ShardRow>);

impl EngineLoop {
    /// Works until no more shards come, and returns the generator.
    ///
    /// # Errors
    /// [`WorkerError::Device`] if the device is at fault.
    pub(super) fn run(mut self, mut load: mpsc::Receiver<Loaded>) -> Result<Box<dyn TextGenerator>, WorkerError> {
        let mut waiting: Option<WaitingAudit> = None;
        loop {
            // More rows are wanted as soon as the batch is not full; an audit wants the engine to itself.
            while waiting.is_none() && self.generator.load() + self.queued.len() < self.generator.batch() {
                let idle = self.open.is_empty();
                let next = match idle {
                    true => load.blocking_recv(),
                    false => load.try_recv().ok(),
                };
                match next {
                    Some(loaded) => waiting = self.take_in(loaded),
                    // Whatever was loaded is done or given back.
                    None if idle => return self.faults.broken.map_or(Ok(self.generator), Err),
                    None => break,
                }
            }
            if self.stop.release.is_cancelled() {
                self.release_all(waiting.take());
            } else if self.open.is_empty()
                && let Some(audit) = waiting.take()
            {
                self.audit(audit);
            }
            self.submit();
            self.step();
        }
    }

    /// Opens a shard; an audit is returned, to be run when nothing else is.
    fn take_in(&mut self, loaded: Loaded) -> Option<WaitingAudit> {
        if self.stop.drain.is_cancelled() {
            self.finish_shard(loaded.lease, Output::Released);
            return None;
        }
        match loaded.work {
            Work::Audit(rows) => Some((loaded.lease, rows)),
            Work::Generate { rows, policy } => {
                let _entered = loaded.span.entered();
                let open = OpenShard::new(loaded.lease, rows, policy, &self.context.run.plan.spec);
                let is_by_tonight = self.is_by_tonight(&open.lease.job);
                self.open_shard(if is_by_tonight { open.by_tonight() } else { open });
                None
            }
        }
    }

    /// Whether the texts of a shard draft from those of the night in place of a pool.
    fn is_by_tonight(&self, job: &ShardJob) -> bool {
        self.tonight.replaces(self.context.pools.contains_key(&job.pool), job.kind)
    }

    fn open_shard(&mut self, open: OpenShard) {
        let shard = open.lease.job.shard;
        let shared = self.share_prefix(&open.rows);
        self.queued.extend(open.places().map(|place| (shard, place)));
        self.open.insert(shard, open);
        match shared {
            Ok(()) => self.close_if_done(shard),
            Err(error) => self.fail_all(&error),
        }
    }

    /// That there is no shared prefix costs time only; a panic leaves nothing to rely on.
    fn share_prefix(&mut self, rows: &[ShardRow]) -> Result<(), WorkerError> {
        let planned = rows.iter().filter(|r| r.error.is_none());
        let prompts: Vec<&[u32]> = planned.map(|r| r.prompt.as_slice()).collect();
        if let Err(error) = catch(|| self.generator.share_prefix(&prompts))? {
            tracing::warn!(%error, "no shared prefix: every prompt is prefilled whole");
        }
        Ok(())
    }

    /// Asks the generator for queued texts as far as its batch has room: each drafts from what has been written until
    /// it begins.
    fn submit(&mut self) {
        while self.generator.load() < self.generator.batch()
            && let Some((shard, place)) = self.queued.pop_front()
        {
            let Some(mut open) = self.open.remove(&shard) else { continue };
            let (job, policy) = (&open.lease.job, open.policy);
            let pool = match open.is_by_tonight {
                true => self.tonight.pool(job.kind),
                false => self.context.pools.get(&job.pool).cloned(),
            };
            match self.request(&open.rows[place.0], (open.id(place), place.1), (job.kind, policy), pool) {
                Ok(request) => {
                    open.previous[place.0] = request.previous.len() as u64;
                    self.generator.submit(request);
                }
                Err(error) => open.fail(place, error),
            }
            self.open.insert(shard, open);
            self.close_if_done(shard);
        }
    }

    fn request(
        &self,
        row: &ShardRow,
        (id, sample): (u64, u32),
        (kind, policy): (Kind, Policy),
        pool: Option<Pool>,
    ) -> Result<Request, RowError> {
        if let Some(reason) = &row.error {
            return Err(RowError::new("plan", reason.clone()));
        }
        let previous = row.previous.as_deref().unwrap_or_default();
        let tokens = self.generator.tokenizer().encode(previous, false);
        Ok(Request {
            id,
            prompt: row.prompt.clone(),
            previous: tokens.map_err(|error| RowError::new("generate", error.to_string()))?,
            pool,
            plain: false,
            strict: policy == Policy::Strict,
            key: self.context.run.plan.spec.sampling.map_or(0, |sampling| sampling.key(kind, &row.entity_id, sample)),
            // Of a row's texts the first one is a text of its own.
            runners_up: if sample == 0 { self.context.run.plan.runners_up as usize } else { 0 },
            history: row.history.clone(),
            previous_items: row.previous_items.clone(),
            items: row.items.map(|items| items as usize),
            catalogue: self.context.catalogue.clone(),
        })
    }

    fn step(&mut self) {
        if self.generator.load() == 0 {
            return;
        }
        telemetry::occupancy(self.generator.load(), self.generator.batch());
        match catch(|| self.generator.step()) {
            Ok(Ok(finished)) => finished.into_iter().for_each(|f| self.finish(f)),
            Ok(Err(error)) => self.fail_all(&error.into()),
            Err(error) => self.fail_all(&error),
        }
    }

    fn finish(&mut self, Finished { id, result }: Finished) {
        let (Ok(shard), Ok(place)) = (u32::try_from(id >> 32), u32::try_from(id & 0xffff_ffff)) else {
            return;
        };
        let Some(open) = self.open.get_mut(&shard) else {
            return;
        };
        let place = open.place(place);
        if result.is_ok() {
            self.faults.is_suspect = false;
        }
        match result {
            Ok(text) if text.text.trim().is_empty() && text.items.is_empty() => {
                open.fail(place, RowError::new("generate", "the model's text is empty"));
            }
            Ok(text) => {
                open.add(place, &text, &self.context);
                let (job, row) = (&open.lease.job, &open.rows[place.0]);
                let has_pool = self.context.pools.contains_key(&job.pool);
                self.tonight.add(has_pool, (job.kind, &row.entity_id), &text.tokens);
            }
            Err(error) => open.fail(place, RowError::new("generate", error.to_string())),
        }
        self.close_if_done(shard);
    }

    fn close_if_done(&mut self, shard: u32) {
        if self.open.get(&shard).is_none_or(|open| open.left > 0) {
            return;
        }
        let Some(open) = self.open.remove(&shard) else {
            return;
        };
        let (lease, rows) = open.close();
        self.finish_shard(lease, Output::Part(rows));
    }

    /// The engine failed for every shard that is open.
    fn fail_all(&mut self, error: &WorkerError) {
        self.queued.clear();
        let leases = std::mem::take(&mut self.open).into_values().map(|open| open.lease).collect();
        self.fail(leases, error);
    }

    /// Starts the engine anew after it failed for these shards. Their attempts have failed, unless the device is at
    /// fault: then they are given back and the worker ends, or it would use up the attempts of every shard.
    fn fail(&mut self, leases: Vec<Lease>, error: &WorkerError) {
        self.generator.reset();
        let is_broken = self.faults.add(&leases);
        if is_broken {
            let (device, reason) = (self.generator.device().to_owned(), error.to_string());
            self.faults.broken = Some(WorkerError::Device { device, reason });
            self.stop.give_back();
        }
        for lease in leases {
            let output = if is_broken { Output::Released } else { Output::Failed(error.to_string()) };
            self.finish_shard(lease, output);
        }
    }

    fn release_all(&mut self, audit: Option<WaitingAudit>) {
        self.generator.reset();
        self.queued.clear();
        let open = std::mem::take(&mut self.open).into_values().map(|open| open.lease);
        for lease in open.chain(audit.map(|(lease, _)| lease)) {
            self.finish_shard(lease, Output::Released);
        }
    }

    fn audit(&mut self, (lease, rows): WaitingAudit) {
        let job = &lease.job;
        let (policy, pool) = match self.is_by_tonight(job) {
            true => (Policy::Strict, self.tonight.without(job.kind, rows.iter().map(|row| &row.entity_id))),
            false => (self.context.run.plan.spec.verification, self.context.pools.get(&job.pool).cloned()),
        };
        let request = |row| self.request(row, (0, 0), (job.kind, policy), pool.clone()).ok();
        let requests: Vec<(&ShardRow, Request)> = rows.iter().filter_map(|row| Some((row, request(row)?))).collect();
        let (plan, trie) = (&self.context.run.plan, self.context.trie());
        let figures = |row: &ShardRow, request: &Request, text: &Generated| {
            let record = part::record(plan, row, policy, (request.pool.as_ref(), trie), text);
            let previous = with_end(request.previous.len() as u64, text.stop);
            Figures { forced: text.forced, ..Figures::of(&record, &text.tokens, previous) }
        };
        let (generator, release) = (self.generator.as_mut(), &self.stop.release);
        let outcome = catch(|| audit(generator, &requests, release, figures)).and_then(|audit| Ok(audit?));
        match outcome {
            Ok(Some(audit)) => {
                self.faults.is_suspect &= audit.report.texts == 0;
                self.finish_shard(lease, Output::Audit(audit));
            }
            Ok(None) => {
                self.generator.reset();
                self.finish_shard(lease, Output::Released);
            }
            Err(error) => self.fail(vec![lease], &error),
        }
    }

    /// The committer outlives the engine thread; if it is gone, so is the worker, and the lease will end.
    fn finish_shard(&self, lease: Lease, output: Output) {
        if self.done.blocking_send(Done { lease, output }).is_err() {
            tracing::error!("the committer is gone; the shard will be leased again");
        }
    }
}

/// A panic of the engine fails the shards in hand, not the worker.
fn catch<T>(work: impl FnOnce() -> T) -> Result<T, WorkerError> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| WorkerError::Panicked("engine"))
}
