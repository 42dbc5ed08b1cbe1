//! A worker against a queue and a store: what is committed, and what a fault costs.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use jiff::civil::{Date, date};
use laser_coordinator::finalise::{Published, Terms, publish};
use laser_coordinator::ledger::{LedgerCounts, LedgerLimits};
use laser_coordinator::local_queue::LocalQueue;
use laser_coordinator::plan::{PlanRequest, plan};
use laser_coordinator::prompt::{PromptConfig, PromptRenderer};
use laser_model::{ModelFiles, Tokenizer};
use laser_schema::audit::AuditReport;
use laser_schema::job::{Action, Lease, Plan, Policy, Queue, QueueError, ShardJob, ShardRow, Spec};
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord};
use laser_schema::manifest::Manifest;
use laser_schema::{Columns, Digest, EntityTable, Kind};
use laser_store::data_set::verify;
use laser_store::join::Join;
use laser_store::part::decode_part;
use laser_store::previous::PreviousSource;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::{Location, table};
use laser_worker::engine::{EngineError, FakeOptions};
use laser_worker::generate::{Finished, GenerateError, GenerateOptions, Generator, Request, TextGenerator};
use laser_worker::run::{RunContext, Stop, WorkerError, run_worker};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::support::*;
use crate::watch::Mischief;

const TEMPLATE: &str = "A profile of the viewer whose number is the following, at some length, and \
    with an eye to what may come: {{ id }}{{ attributes.about | default('') }}";

/// A run that is planned, and what it takes to work on it.
pub(crate) struct Run {
    dir: TempDir,
    pub(crate) output: Location,
    pub(crate) context: Arc<RunContext>,
}

fn model() -> &'static ModelFiles {
    static MODEL: OnceLock<ModelFiles> = OnceLock::new();
    MODEL.get_or_init(|| ModelFiles::open(&fixture()).unwrap())
}

pub(crate) fn user(id: i64) -> Value {
    json!({"id": id})
}

/// What is published there, if anything is.
async fn past(output: &Location) -> Option<PreviousSource> {
    let listed = output.list().await.unwrap();
    let complete = listed.iter().any(|file| file.name.ends_with("_SUCCESS"));
    complete.then(|| PreviousSource { path: output.url().to_owned(), kind: None, id_type: None })
}

/// Plans a night for these users in `dir`, with what is published there as its past.
async fn plan_night(dir: TempDir, night: Date, users: &[Value], audit_share: f64) -> Run {
    let wish = |request: &mut PlanRequest<'_>| request.audit_share = audit_share;
    plan_as(dir, night, users, wish).await
}

/// The same, with what else is wished for.
pub(crate) async fn plan_as(
    dir: TempDir,
    night: Date,
    users: &[Value],
    wish: impl FnOnce(&mut PlanRequest<'_>),
) -> Run {
    let write = |name: &str, text: String| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).to_str().unwrap().to_owned()
    };
    let path = write("users.jsonl", users.iter().map(|row| format!("{row}\n")).collect());
    let template = write("mine.j2", TEMPLATE.into());
    let config = PromptConfig { user: template.clone(), item: template, max_tokens: 100, ..Default::default() };
    let output = Location::parse(dir.path().join("out").to_str().unwrap()).unwrap();
    let previous = past(&output).await;
    let prompts = PromptRenderer::new(&config, model()).unwrap();
    let mut request = PlanRequest {
        run: format!("run-{night}"),
        date: night,
        spec: spec(),
        previous: previous.as_slice(),
        carry_forward: true,
        shard_rows: 5,
        audit_share: 0.0,
        seed: 1,
        limit: None,
        pools: ("pools".into(), Digest::of(b"pools")),
        price: None,
        guards: None,
        embedding: None,
        prompts: &prompts,
        route: &|_| "user-all".to_owned(),
    };
    wish(&mut request);
    let table = EntityTable { path, kind: Some(Kind::User), columns: Columns::default() };
    let entities = Join::new(&[table], 1 << 30).await.unwrap();
    let plan = plan(Some(&output), entities, &request, &mut |_| {}).await.unwrap();
    let context = RunContext {
        run: PlannedRun::new(RunStore::new(&output, &plan.run), plan),
        pools: HashMap::from([("user-all".to_owned(), pool(&[tokens(1, 50)]))]),
        encoder: None,
        worker: "worker-0".into(),
        progress: Arc::default(),
    };
    Run { dir, output, context: Arc::new(context) }
}

async fn first_night(users: i64) -> Run {
    let users: Vec<Value> = (0..users).map(user).collect();
    plan_night(tempfile::tempdir().unwrap(), date(2026, 11, 20), &users, 0.0).await
}

fn spec() -> Spec {
    Spec {
        engine: "tree".into(),
        model: Digest::of(b"model"),
        tokenizer: Digest::of(b"tokenizer"),
        precision: "f32".into(),
        prompts: BTreeMap::new(),
        verification: Policy::Strict,
        max_new_tokens: 40,
        stop: Vec::new(),
    }
}

pub(crate) fn limits() -> LedgerLimits {
    let hour = Duration::from_secs(3600);
    LedgerLimits { lease: hour, attempts: 3, retry: Duration::ZERO }
}

pub(crate) fn generator(fake: FakeOptions, mischief: Mischief) -> Generator {
    let options = GenerateOptions { step_tokens: 128, ..options() };
    watched(fake, mischief, options).0
}

fn good() -> Generator {
    generator(fake_options(), Mischief::default())
}

impl Run {
    pub(crate) fn plan(&self) -> &Plan {
        &self.context.run.plan
    }

    fn queue(&self) -> Arc<LocalQueue> {
        Arc::new(LocalQueue::new(self.plan(), &[], limits()))
    }

    pub(crate) async fn work<Q: Queue + 'static>(&self, queue: &Arc<Q>, generator: Generator) -> Generator {
        run_worker(queue.clone(), self.context.clone(), generator, Stop::default()).await.unwrap()
    }

    pub(crate) async fn rows(&self, job: &ShardJob) -> Vec<ShardRow> {
        let bytes = self.context.run.input(job).read().await.unwrap();
        table::decode(&job.input, bytes).unwrap()
    }

    pub(crate) async fn part(&self, job: &ShardJob) -> (Vec<KnowledgeRecord>, Vec<ErrorRecord>) {
        let bytes = self.output.join(&job.output).read().await.unwrap();
        let (rows, info) = decode_part(&job.output, bytes).unwrap();
        assert_eq!((info.shard, &info.run), (job.shard, &self.plan().run));
        assert_eq!((rows.len() + info.errors.len()) as u64, job.rows);
        (rows, info.errors)
    }

    /// Every shard is committed, and every text is what plain greedy decoding gives.
    async fn assert_whole(&self) {
        for job in &self.plan().shards {
            let (records, errors) = self.part(job).await;
            assert!(errors.is_empty());
            for (row, record) in self.rows(job).await.iter().zip(&records) {
                let expected = naive(&mut fake(), &row.prompt, &options());
                assert_eq!((&record.entity_id, &record.text), (&row.entity_id, &expected.text));
                assert_eq!(record.text_tokens, expected.tokens.len() as i64);
                assert_eq!(record.accepted_tokens, record.step_accepted.iter().sum::<i64>());
                assert_eq!(record.forwards, record.step_accepted.len() as i64);
            }
        }
    }

    async fn publish(&self) -> Manifest {
        match publish(&self.context.run, Kind::User, &Terms::coverage(0.0)).await.unwrap() {
            Published::Complete(manifest) => *manifest,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn every_shard_is_committed_once_and_holds_its_texts() {
    let run = first_night(23).await;
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!(queue.counts().committed, run.plan().shards.len());
    run.assert_whole().await;
    let progress = run.context.progress.snapshot();
    assert_eq!((progress.shards, progress.figures.texts, progress.failed_attempts), (5, 23, 0));
    let manifest = run.publish().await;
    assert_eq!((manifest.rows, manifest.errors), (23, 0));
    assert_eq!(manifest.figures["user-all"].texts, 23);
    assert_eq!(manifest.figures["user-all"].tokens, progress.figures.tokens);
    let folder = run.output.join(&run.plan().partition(Kind::User));
    assert!(verify(&folder).await.unwrap().faults.is_empty());
}

#[tokio::test]
async fn carried_rows_stand_for_the_new_night_with_their_old_text() {
    let first = first_night(12).await;
    first.work(&first.queue(), good()).await;
    first.publish().await;
    let mut old = BTreeMap::new();
    for job in &first.plan().shards {
        for record in first.part(job).await.0 {
            old.insert(record.entity_id.to_string(), record);
        }
    }
    let mut users: Vec<Value> = (0..12).map(user).collect();
    users[4]["about"] = json!(" who likes to laugh");
    let second = plan_night(first.dir, date(2026, 11, 21), &users, 0.0).await;
    second.work(&second.queue(), good()).await;
    assert_eq!(second.context.progress.snapshot().carried, 11);
    assert_eq!(second.context.progress.snapshot().figures.texts, 1);
    for job in &second.plan().shards {
        for record in second.part(job).await.0 {
            let old = old[&record.entity_id.to_string()].clone();
            assert_eq!(record.event_timestamp.to_string(), "2026-11-21T00:00:00Z");
            if job.action == Action::Carry {
                let event_timestamp = record.event_timestamp;
                assert_eq!(record, KnowledgeRecord { event_timestamp, ..old });
            } else {
                assert_ne!(record.prompt_digest, old.prompt_digest);
                assert_eq!(record.generated_by, second.plan().run);
            }
        }
    }
    let manifest = second.publish().await;
    assert_eq!((manifest.rows, manifest.carried), (12, 11));
    assert_eq!(manifest.figures["user-all"].texts, 1);
}

#[tokio::test]
async fn an_audit_of_strict_texts_finds_them_identical() {
    let users: Vec<Value> = (0..20).map(user).collect();
    let run = plan_night(tempfile::tempdir().unwrap(), date(2026, 11, 20), &users, 0.5).await;
    run.work(&run.queue(), good()).await;
    let (mut report, mut rows) = (AuditReport::default(), 0);
    let shards = run.plan().shards.iter();
    for job in shards.filter(|job| job.action == Action::Audit) {
        let bytes = run.output.join(&job.output).read().await.unwrap();
        report.add(&serde_json::from_slice(&bytes).unwrap());
        rows += job.rows;
    }
    assert!(report.texts > 2);
    assert_eq!((report.texts, report.identical), (rows, rows));
    assert_eq!(report.tokens, report.plain_tokens);
    assert_eq!((report.identical_share(), report.length_ratio()), (1.0, 1.0));
    assert!(report.speedup() > 0.0);
    let manifest = run.publish().await;
    assert_eq!(manifest.audit["user-all"], report);
}

#[tokio::test]
async fn rows_that_fail_become_error_records() {
    let mut users: Vec<Value> = (0..10).map(user).collect();
    users[2]["about"] = json!(" word".repeat(200));
    users[7]["about"] = json!(" and then".repeat(12));
    let run = plan_night(tempfile::tempdir().unwrap(), date(2026, 11, 20), &users, 0.0).await;
    let small = FakeOptions { max_positions: 70, ..fake_options() };
    run.work(&run.queue(), generator(small, Mischief::default())).await;
    let mut errors = Vec::new();
    for job in &run.plan().shards {
        errors.extend(run.part(job).await.1);
    }
    let errors: Vec<_> =
        errors.iter().map(|e| (e.entity_id.to_string(), e.stage.as_str(), e.reason.as_str())).collect();
    assert_eq!(errors.len(), 2);
    assert_eq!((errors[0].0.as_str(), errors[0].1), ("2", "plan"));
    assert!(errors[0].2.contains("more than max_tokens = 100"));
    assert_eq!((errors[1].0.as_str(), errors[1].1), ("7", "generate"));
    assert!(errors[1].2.contains("but the model's context is 70"));
    assert_eq!(run.context.progress.snapshot().errors, 2);
    let manifest = run.publish().await;
    assert_eq!((manifest.rows, manifest.errors, manifest.entities), (8, 2, 10));
}

#[tokio::test]
async fn an_empty_text_is_a_failed_row() {
    let run = first_night(3).await;
    let only_ends = FakeOptions { eos_probability: 1.0, ..fake_options() };
    run.work(&run.queue(), generator(only_ends, Mischief::default())).await;
    let (rows, errors) = run.part(&run.plan().shards[0]).await;
    assert!(rows.is_empty());
    assert!(errors.iter().all(|e| e.reason == "the model's text is empty"));
}

#[tokio::test]
async fn a_shard_whose_input_changed_is_given_up_and_the_others_are_not() {
    let run = first_night(15).await;
    let changed = &run.plan().shards[1];
    let input = run.context.run.input(changed);
    input.write(run.context.run.store.folder().join("plan.json").read().await.unwrap()).await.unwrap();
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!((queue.counts().committed, queue.counts().dead), (2, 1));
    let (shard, reason) = &queue.dead()[0];
    assert_eq!(*shard, 1);
    assert!(reason.contains(&changed.input) && reason.contains("plan again"), "{reason}");
    assert_eq!(run.context.progress.snapshot().failed_attempts, 3);
}

#[tokio::test]
async fn two_workers_share_the_shards_of_one_queue() {
    let run = first_night(60).await;
    let queue = run.queue();
    tokio::join!(run.work(&queue, good()), run.work(&queue, good()));
    assert_eq!(queue.counts().committed, 12);
    run.assert_whole().await;
    assert_eq!(run.context.progress.snapshot().figures.texts, 60, "a text was generated twice");
    run.publish().await;
}

#[tokio::test]
async fn an_output_that_exists_is_kept() {
    let run = first_night(10).await;
    let other = run.output.join(&run.plan().shards[0].output);
    other.create(Bytes::from("another writer's")).await.unwrap();
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!(queue.counts().committed, 2);
    assert_eq!(other.read().await.unwrap(), "another writer's");
    assert_eq!(run.context.run.committed().await.unwrap(), [0, 1]);
}

#[tokio::test]
async fn a_panicking_engine_costs_an_attempt() {
    // The first steps are the shared prefix's, then come those of the texts.
    for step in [0, 1, 5, 30] {
        let run = first_night(15).await;
        let mischief = Mischief { panic_on_step: Some(step), ..Mischief::default() };
        let queue = run.queue();
        let generator = run.work(&queue, generator(fake_options(), mischief)).await;
        assert_eq!(generator.load(), 0);
        assert_eq!(queue.counts().committed, 3, "step {step}");
        assert!(run.context.progress.snapshot().failed_attempts > 0, "step {step}");
        run.assert_whole().await;
    }
}

#[tokio::test]
async fn an_engine_that_only_fails_gives_up_its_shards_but_not_the_worker() {
    let run = first_night(25).await;
    let mischief = Mischief { fail_from_step: Some(0), ..Mischief::default() };
    let queue = run.queue();
    let generator = run.work(&queue, generator(fake_options(), mischief)).await;
    assert_eq!(queue.counts().committed + queue.counts().dead, 5);
    assert!(queue.dead().iter().any(|(_, reason)| reason.contains("8 sequences in a row")));
    assert_eq!(generator.load(), 0);
}

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
            inner: LocalQueue::new(run.plan(), &[], limits()),
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

/// A generator that cancels tokens at its first step, when shards are begun.
struct CancelsAtFirstStep {
    inner: Generator,
    tokens: Vec<CancellationToken>,
}

impl TextGenerator for CancelsAtFirstStep {
    fn tokenizer(&self) -> &Tokenizer {
        self.inner.tokenizer()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn load(&self) -> usize {
        self.inner.load()
    }

    fn submit(&mut self, request: Request) {
        self.inner.submit(request);
    }

    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError> {
        self.inner.share_prefix(prompts)
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        self.tokens.iter().for_each(CancellationToken::cancel);
        self.inner.step()
    }

    fn reset(&mut self) {
        self.inner.reset();
    }
}

/// Works on a run of six shards until `stop`, of which `tokens` are cancelled at the first step.
async fn stopped_at_first_step(stop: Stop, tokens: Vec<CancellationToken>) -> LedgerCounts {
    let run = first_night(30).await;
    let (queue, inner) = (run.queue(), good());
    let generator = CancelsAtFirstStep { inner, tokens };
    run_worker(queue.clone(), run.context.clone(), generator, stop).await.unwrap();
    queue.counts()
}

#[tokio::test]
async fn a_draining_worker_finishes_what_it_began_and_gives_the_rest_back() {
    let stop = Stop::default();
    let counts = stopped_at_first_step(stop.clone(), vec![stop.drain]).await;
    assert!((1..6).contains(&counts.committed), "{} committed", counts.committed);
    assert_eq!((counts.committed + counts.ready, counts.leased, counts.dead), (6, 0, 0));
}

#[tokio::test]
async fn a_released_worker_gives_everything_back_at_once() {
    let stop = Stop::default();
    let counts = stopped_at_first_step(stop.clone(), vec![stop.drain, stop.release]).await;
    assert_eq!((counts.committed, counts.ready, counts.leased, counts.dead), (0, 6, 0, 0));
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
    let error = run_worker(queue, run.context.clone(), good(), Stop::default()).await.unwrap_err();
    assert!(matches!(error, WorkerError::Queue(_)), "{error}");
}

/// A generator that is lost for good at its first step.
struct Lost;

impl TextGenerator for Lost {
    fn tokenizer(&self) -> &Tokenizer {
        &model().tokenizer
    }

    fn batch(&self) -> usize {
        1
    }

    fn load(&self) -> usize {
        0
    }

    fn submit(&mut self, _request: Request) {}

    fn share_prefix(&mut self, _prompts: &[&[u32]]) -> Result<(), EngineError> {
        panic!("injected panic of the engine")
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        Ok(Vec::new())
    }

    fn reset(&mut self) {
        panic!("injected panic of the reset")
    }
}

#[tokio::test]
async fn a_lost_engine_thread_ends_the_worker_instead_of_hanging_it() {
    let run = first_night(30).await;
    let result = run_worker(run.queue(), run.context.clone(), Lost, Stop::default()).await;
    assert!(matches!(result.err(), Some(WorkerError::Lost(_))));
}
