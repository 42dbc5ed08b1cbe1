//! Runs that are planned, for tests that work on them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::civil::{Date, date};
use laser_coordinator::finalise::{Published, Terms, publish};
use laser_coordinator::ledger::LedgerLimits;
use laser_coordinator::local_queue::LocalQueue;
use laser_coordinator::plan::{PlanRequest, plan};
use laser_coordinator::prompt::{PromptConfig, PromptRenderer};
use laser_decode::{PoolMeta, Verification};
use laser_engine::{EngineError, FakeOptions};
use laser_model::{ModelFiles, Tokenizer};
use laser_schema::audit::Audit;
use laser_schema::job::{Action, Plan, Policy, Queue, ShardJob, ShardRow, Spec};
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord};
use laser_schema::lists::ListRows;
use laser_schema::manifest::Manifest;
use laser_schema::{Columns, Digest, EntityTable, Kind};
use laser_store::join::Join;
use laser_store::part::decode_part;
use laser_store::previous::PreviousSource;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::{Location, table};
use laser_worker::generate::{Finished, GenerateError, GenerateOptions, Request, TextGenerator};
use laser_worker::run::{RunContext, Stop, run_worker};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::*;
use crate::watch::Mischief;

const TEMPLATE: &str = "A profile of the viewer whose number is the following, at some length, and \
    with an eye to what may come: {{ id }}{{ attributes.about | default('') }}";

/// A run that is planned, and what it takes to work on it.
pub(crate) struct Run {
    pub(crate) dir: TempDir,
    pub(crate) output: Location,
    pub(crate) context: Arc<RunContext>,
}

pub(crate) fn model() -> &'static ModelFiles {
    static MODEL: OnceLock<ModelFiles> = OnceLock::new();
    MODEL.get_or_init(|| ModelFiles::open(&fixture()).unwrap())
}

/// The users with the ids 0, 1, 2, …
pub(crate) fn users_to(count: i64) -> Vec<Value> {
    (0..count).map(|id| json!({"id": id})).collect()
}

/// What is published there, if anything is.
async fn past(output: &Location) -> Option<PreviousSource> {
    let listed = output.list().await.unwrap();
    let complete = listed.iter().any(|file| file.name.ends_with("_SUCCESS"));
    complete.then(|| PreviousSource { path: output.url().to_owned(), kind: None, id_type: None })
}

/// Plans a first night for these users.
pub(crate) async fn plan_night(users: &[Value], audit_share: f64) -> Run {
    let wish = |request: &mut PlanRequest<'_>| request.audit_share = audit_share;
    plan_as(tempfile::tempdir().unwrap(), date(2026, 11, 20), users, wish).await
}

/// Plans a night for these users in `dir`, with what is published there as its past.
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
    let config = PromptConfig { user: template.clone(), item: template, max_tokens: Some(100), ..Default::default() };
    let output = Location::parse(dir.path().join("out").to_str().unwrap()).unwrap();
    let previous = past(&output).await;
    let prompts = PromptRenderer::new(&config, model(), 8).unwrap();
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
        catalogue: None,
        list_rows: ListRows::default(),
        runners_up: 0,
        valuation: None,
        memory: 1 << 30,
        canary: None,
        queue: None,
    };
    wish(&mut request);
    let table = EntityTable { path, kind: Some(Kind::User), columns: Columns::default() };
    let entities = Join::new(&[table], 1 << 30).await.unwrap();
    let plan = plan(Some(&output), entities, &request, &mut |_| {}).await.unwrap();
    let context = RunContext {
        catalogue: None,
        run: PlannedRun::new(RunStore::new(&output, &plan.run), plan),
        pools: HashMap::from([("user-all".to_owned(), pool(&[tokens(1, 50)]))]),
        encoder: None,
        worker: "worker-0".into(),
        progress: Arc::default(),
    };
    Run { dir, output, context: Arc::new(context) }
}

pub(crate) async fn first_night(users: i64) -> Run {
    plan_night(&users_to(users), 0.0).await
}

pub(crate) fn spec() -> Spec {
    Spec {
        engine: "tree".into(),
        model: Digest::of(b"model"),
        tokenizer: Digest::of(b"tokenizer"),
        end_of_text: Vec::new(),
        precision: "f32".into(),
        prompts: BTreeMap::new(),
        verification: Policy::Strict,
        sampling: None,
        max_new_tokens: 40,
        stop: Vec::new(),
        constraint: None,
        lists: None,
    }
}

pub(crate) fn limits() -> LedgerLimits {
    let hour = Duration::from_secs(3600);
    LedgerLimits { lease: hour, attempts: 3, retry: Duration::ZERO }
}

pub(crate) fn generator(fake: FakeOptions, mischief: Mischief) -> Box<dyn TextGenerator> {
    let options = GenerateOptions { step_tokens: 128, ..options() };
    Box::new(watched(fake, mischief, options).0)
}

pub(crate) fn good() -> Box<dyn TextGenerator> {
    generator(fake_options(), Mischief::default())
}

/// The rule of [`relaxed`].
pub(crate) const RELAXED: Policy = Policy::Relaxed { k: 4, p: 0.0 };

pub(crate) fn relaxed() -> Box<dyn TextGenerator> {
    let verification = Verification::relaxed(4, 0.0).unwrap();
    let options = GenerateOptions { verification, step_tokens: 128, ..options() };
    Box::new(watched(fake_options(), Mischief::default(), options).0)
}

/// That of [`relaxed`], which says that its drafts adapt. They do not, so no text depends on measured times.
pub(crate) fn adapting() -> Box<dyn TextGenerator> {
    Box::new(Adapting(relaxed()))
}

struct Adapting(Box<dyn TextGenerator>);

impl TextGenerator for Adapting {
    fn tokenizer(&self) -> &Tokenizer {
        self.0.tokenizer()
    }

    fn device(&self) -> &str {
        self.0.device()
    }

    fn pool_meta(&self) -> Option<PoolMeta> {
        self.0.pool_meta()
    }

    fn adapts(&self) -> bool {
        true
    }

    fn batch(&self) -> usize {
        self.0.batch()
    }

    fn load(&self) -> usize {
        self.0.load()
    }

    fn submit(&mut self, request: Request) {
        self.0.submit(request);
    }

    fn share_prefix(&mut self, prompts: &[&[u32]]) -> Result<(), EngineError> {
        self.0.share_prefix(prompts)
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        self.0.step()
    }

    fn reset(&mut self) {
        self.0.reset();
    }
}

impl Run {
    pub(crate) fn plan(&self) -> &Plan {
        &self.context.run.plan
    }

    pub(crate) fn queue(&self) -> Arc<LocalQueue> {
        Arc::new(LocalQueue::new(&self.plan().shards, &[], limits()))
    }

    pub(crate) fn jobs(&self, action: Action) -> impl Iterator<Item = &ShardJob> {
        self.plan().shards.iter().filter(move |job| job.action == action)
    }

    pub(crate) async fn work<Q: Queue + 'static>(
        &self,
        queue: &Arc<Q>,
        generator: Box<dyn TextGenerator>,
    ) -> Box<dyn TextGenerator> {
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

    pub(crate) async fn audit(&self, job: &ShardJob) -> Audit {
        let bytes = self.output.join(&job.output).read().await.unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    /// Every shard is committed, and every text is what plain greedy decoding gives.
    pub(crate) async fn assert_whole(&self) {
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

    pub(crate) async fn publish(&self) -> Manifest {
        match publish(&self.context.run, Kind::User, &Terms::coverage(0.0)).await.unwrap() {
            Published::Complete(manifest) => *manifest,
            other => panic!("{other:?}"),
        }
    }
}
