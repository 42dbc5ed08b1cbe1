//! One night of a small data set.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use bytes::Bytes;
use jiff::civil::{Date, date};
use laser_coordinator::catalogue::{Catalogue, CatalogueItem};
use laser_coordinator::finalise::{FinaliseError, Published, Terms, publish};
use laser_coordinator::nats::NatsClient;
use laser_coordinator::plan::{PlanError, PlanRequest, plan};
use laser_coordinator::priority::Valuation;
use laser_coordinator::prompt::{PromptConfig, PromptRenderer};
use laser_model::ModelFiles;
use laser_schema::audit::AuditReport;
use laser_schema::entity::IdType;
use laser_schema::guard::Guards;
use laser_schema::job::{Action, Plan, Policy, Priority, ShardJob, ShardRow, Spec};
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord, PartInfo};
use laser_schema::lists::{ListRows, ListSpec, Normalisation, Ties};
use laser_schema::manifest::Manifest;
use laser_schema::{Columns, Digest, Entity, EntityId, EntityTable, Kind};
use laser_store::join::Join;
use laser_store::part::encode_part;
use laser_store::previous::PreviousSource;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::{Location, table};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const TEMPLATE: &str = "{{ kind }} {{ id }}{% for h in history %}, {{ h.title }}{% endfor %}: profile";

/// The identifiers of a history.
const LIST_TEMPLATE: &str = "{% for h in history %}{{ h.identifier }}{% endfor %}";

fn model() -> &'static ModelFiles {
    static MODEL: OnceLock<ModelFiles> = OnceLock::new();
    let fixture = std::path::absolute("../fixtures/profile-lm").unwrap();
    MODEL.get_or_init(|| ModelFiles::open(&fixture).unwrap())
}

pub(crate) fn spec() -> Spec {
    Spec {
        engine: "tree".into(),
        model: Digest::of(b"model"),
        tokenizer: Digest::of(b"tokenizer"),
        end_of_text: Vec::new(),
        precision: "f32".into(),
        prompts: Kind::ALL.map(|kind| (kind, Digest::of(b"prompt"))).into(),
        verification: Policy::Strict,
        sampling: None,
        max_new_tokens: 20,
        stop: Vec::new(),
        constraint: None,
        lists: None,
    }
}

pub(crate) fn lists() -> ListSpec {
    ListSpec {
        trie: Digest::of(b"trie"),
        out_of_stock: None,
        items: 2,
        items_from: None,
        width: 2,
        normalisation: Normalisation::Vocabulary,
        repeat: false,
        ties: Ties::All,
    }
}

/// The run of a plan.
pub(crate) fn planned(output: &Location, plan: &Plan) -> PlannedRun {
    PlannedRun::new(RunStore::new(output, &plan.run), plan.clone())
}

/// Everything a plan depends on, to be changed by a test.
pub(crate) struct Night {
    pub(crate) dir: TempDir,
    pub(crate) run: String,
    pub(crate) date: Date,
    pub(crate) spec: Spec,
    pub(crate) template: String,
    pub(crate) tables: Vec<EntityTable>,
    pub(crate) previous: Vec<PreviousSource>,
    pub(crate) carry_forward: bool,
    pub(crate) audit_share: f64,
    pub(crate) seed: u64,
    pub(crate) limit: Option<u64>,
    pub(crate) shard_rows: usize,
    pub(crate) guards: Option<Guards>,
    pub(crate) priority: Option<Priority>,
    /// Of lists: the items of the catalogue, by id.
    pub(crate) catalogue: BTreeMap<String, CatalogueItem>,
    /// The field of an interaction that names its item.
    pub(crate) item_field: String,
}

/// `id` even: pool `user-even`, else `user-odd`; all items in `item-all`.
fn route(entity: &Entity) -> String {
    match entity.kind {
        Kind::Item => "item-all".into(),
        Kind::User if entity.id.to_string().ends_with(['0', '2', '4', '6', '8']) => "user-even".into(),
        Kind::User => "user-odd".into(),
    }
}

pub(crate) fn user(id: i64) -> Value {
    json!({"id": id, "history": [{"title": format!("Film {}", id % 7)}, {"title": "Heat"}]})
}

/// A user of lists, whose last item is no more in the catalogue.
pub(crate) fn buyer(id: i64) -> Value {
    json!({"id": id, "history": [{"item": id % 7}, {"item": 5.0}, {"item": 99}]})
}

impl Night {
    /// 30 users and 5 items, without a past.
    pub(crate) fn new() -> Self {
        let mut night = Self {
            dir: tempfile::tempdir().unwrap(),
            run: "night-1".into(),
            date: date(2026, 11, 20),
            spec: spec(),
            template: TEMPLATE.into(),
            tables: Vec::new(),
            previous: Vec::new(),
            carry_forward: true,
            audit_share: 0.0,
            seed: 7,
            limit: None,
            shard_rows: 4,
            guards: None,
            priority: None,
            catalogue: BTreeMap::new(),
            item_field: "item".into(),
        };
        night.write_table("users.jsonl", Kind::User, (0..30).map(user));
        night.write_table("items.jsonl", Kind::Item, (0..5).map(|id| json!({"id": format!("i{id}")})));
        night
    }

    /// A night of lists for 30 users, from a catalogue of the items 0 to 6.
    pub(crate) fn of_lists() -> Self {
        let mut night = Self { template: LIST_TEMPLATE.into(), ..Self::new() };
        night.spec.lists = Some(lists());
        night.tables.retain(|table| table.kind == Some(Kind::User));
        night.write_table("users.jsonl", Kind::User, (0..30).map(buyer));
        for number in 0..7 {
            let item = CatalogueItem { number, identifier: format!("<{number}>") };
            night.catalogue.insert(number.to_string(), item);
        }
        night
    }

    /// Writes a table and adds it, if it is new.
    pub(crate) fn write_table(&mut self, name: &str, kind: Kind, rows: impl IntoIterator<Item = Value>) {
        let path = self.write(name, rows);
        if self.tables.iter().all(|table| table.path != path) {
            self.tables.push(EntityTable { path, kind: Some(kind), columns: Columns::default() });
        }
    }

    pub(crate) fn write(&self, name: &str, rows: impl IntoIterator<Item = Value>) -> String {
        let path = self.dir.path().join(name);
        let lines: String = rows.into_iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(&path, lines).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub(crate) fn set_previous(&mut self, path: &str, kind: Option<Kind>, id_type: Option<IdType>) {
        self.previous = vec![PreviousSource { path: path.to_owned(), kind, id_type }];
    }

    /// A place for output.
    pub(crate) fn output(&self, name: &str) -> Location {
        Location::parse(self.dir.path().join(name).to_str().unwrap()).unwrap()
    }

    pub(crate) async fn try_plan(&self, output: Option<&Location>) -> Result<Plan, PlanError> {
        self.plan_within(1 << 30, output).await
    }

    /// With so many bytes before anything is spilled.
    pub(crate) async fn plan_within(&self, memory: usize, output: Option<&Location>) -> Result<Plan, PlanError> {
        self.plan_with(memory, output, None, &mut |_| {}).await
    }

    /// With coordinators that are met at a queue.
    pub(crate) async fn plan_with(
        &self,
        memory: usize,
        output: Option<&Location>,
        queue: Option<&NatsClient>,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Plan, PlanError> {
        let path = self.dir.path().join("mine.j2");
        // Coordinators that plan at once read it.
        if std::fs::read_to_string(&path).ok().as_ref() != Some(&self.template) {
            std::fs::write(&path, &self.template).unwrap();
        }
        let path = path.to_str().unwrap().to_owned();
        let config = PromptConfig { user: path.clone(), item: path, max_tokens: Some(60), ..Default::default() };
        let find = |id: &str| self.catalogue.get(id).cloned();
        let catalogue = Catalogue { ids: IdType::Int64, field: &self.item_field, find: &find };
        let valuation = self.priority.clone().map(Valuation::new).transpose()?;
        let request = PlanRequest {
            run: self.run.clone(),
            date: self.date,
            spec: self.spec.clone(),
            previous: &self.previous,
            carry_forward: self.carry_forward,
            shard_rows: self.shard_rows,
            audit_share: self.audit_share,
            seed: self.seed,
            limit: self.limit,
            pools: ("pools".into(), Digest::of(b"pools")),
            price: None,
            guards: self.guards,
            embedding: None,
            prompts: &PromptRenderer::new(&config, model(), 8).unwrap(),
            route: &route,
            list_rows: ListRows::default(),
            runners_up: 0,
            valuation: valuation.as_ref(),
            memory,
            canary: None,
            queue,
            catalogue: self.spec.lists.is_some().then_some(catalogue),
        };
        let entities = Join::new(&self.tables, memory).await?;
        plan(output, entities, &request, progress).await
    }

    pub(crate) async fn plan(&self, output: &Location) -> Plan {
        self.try_plan(Some(output)).await.unwrap()
    }

    /// Planning is refused with these words.
    pub(crate) async fn assert_refused(&self, words: &[&str]) {
        let error = self.try_plan(None).await.unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
    }
}

pub(crate) async fn rows(output: &Location, plan: &Plan, job: &ShardJob) -> Vec<ShardRow> {
    let input = planned(output, plan).input(job);
    let bytes = input.read().await.unwrap();
    assert_eq!(Digest::of(&bytes), job.input_digest);
    table::decode(&job.input, bytes).unwrap()
}

/// All rows to be generated.
pub(crate) async fn all_rows(output: &Location, plan: &Plan, action: Action) -> Vec<ShardRow> {
    let mut all = Vec::new();
    for job in plan.shards.iter().filter(|job| job.action == action) {
        all.extend(rows(output, plan, job).await);
    }
    all
}

/// What is generated for a row: a text, or a list of the items 6 and 3.
fn record(plan: &Plan, row: &ShardRow) -> KnowledgeRecord {
    let text = text_record(plan, row);
    match plan.spec.lists {
        None => text,
        Some(_) => KnowledgeRecord {
            text: String::new(),
            items: [6, 3].map(EntityId::Int).to_vec(),
            scores: vec![-0.5, -1.25],
            text_tokens: 0,
            stop_reason: String::new(),
            forwards: 3,
            accepted_tokens: 1,
            step_accepted: vec![1, 0, 0],
            mean_log_probability: 0.0,
            ..text
        },
    }
}

fn text_record(plan: &Plan, row: &ShardRow) -> KnowledgeRecord {
    KnowledgeRecord {
        entity_id: row.entity_id.clone(),
        text: format!("Text of {}", row.entity_id),
        items: Vec::new(),
        scores: Vec::new(),
        prompt_tokens: 9,
        text_tokens: 7,
        pool: row.pool.clone(),
        policy: "strict".into(),
        stop_reason: "end".into(),
        forwards: 3,
        drafted_tokens: 12,
        accepted_tokens: 4,
        relaxed_tokens: 0,
        step_accepted: vec![1, 3, 0],
        mean_log_probability: -0.5,
        draft_seconds: 0.25,
        engine_seconds: 0.5,
        prompt_digest: row.prompt_digest.clone(),
        spec_digest: plan.spec.digest(),
        model_digest: plan.spec.model.clone(),
        pool_digest: String::new(),
        generated_by: plan.run.clone(),
        event_timestamp: "2026-11-20T00:00:00Z".parse().unwrap(),
        created_timestamp: "2026-11-20T03:00:00Z".parse().unwrap(),
        samples: Vec::new(),
        runners_up: None,
    }
}

/// What a worker would write for a shard.
async fn part(output: &Location, plan: &Plan, job: &ShardJob) -> Bytes {
    let (mut done, mut errors, mut carried) = (Vec::new(), Vec::new(), 0);
    if job.action == Action::Carry {
        let input = planned(output, plan).input(job);
        done = table::decode(&job.input, input.read().await.unwrap()).unwrap();
        carried = job.rows;
    } else {
        for row in rows(output, plan, job).await {
            match &row.error {
                None => done.push(record(plan, &row)),
                Some(reason) => {
                    let (stage, reason) = ("plan".into(), reason.clone());
                    errors.push(ErrorRecord { entity_id: row.entity_id, stage, reason, value: row.value });
                }
            }
        }
    }
    encode(plan, job, &done, errors, carried)
}

pub(crate) fn encode(
    plan: &Plan,
    job: &ShardJob,
    rows: &[KnowledgeRecord],
    errors: Vec<ErrorRecord>,
    carried: u64,
) -> Bytes {
    let mut figures = BTreeMap::<_, laser_schema::knowledge::Figures>::new();
    for row in rows.iter().filter(|_| carried == 0) {
        figures.entry(row.pool.clone()).or_default().add_record(row);
    }
    let new = PartInfo::new(&plan.run, job.shard, job.kind, "a", rows).with_content(plan.content());
    let info = PartInfo { carried, errors, figures, input: Some(job.input_digest.clone()), ..new };
    encode_part(&job.output, plan.ids[&job.kind], rows, None, &info).unwrap()
}

/// Commits every shard.
pub(crate) async fn work(output: &Location, plan: &Plan) {
    for job in &plan.shards {
        let bytes = match job.action {
            Action::Audit => {
                let texts = job.rows;
                let report = AuditReport { texts, identical: texts, ..Default::default() };
                Bytes::from(serde_json::to_vec(&report).unwrap())
            }
            _ => part(output, plan, job).await,
        };
        output.join(&job.output).create(bytes).await.unwrap();
    }
}

/// Commits every shard and publishes every kind.
pub(crate) async fn finish(output: &Location, plan: &Plan) {
    work(output, plan).await;
    for &kind in plan.counts.keys() {
        complete(publish(&planned(output, plan), kind, &Terms::coverage(1.0)).await.unwrap());
    }
}

/// Publishes the users, of whom a share must have a text.
pub(crate) async fn publish_users(output: &Location, plan: &Plan, share: f64) -> Result<Published, FinaliseError> {
    publish(&planned(output, plan), Kind::User, &Terms::coverage(share)).await
}

#[track_caller]
pub(crate) fn complete(published: Published) -> Manifest {
    match published {
        Published::Complete(manifest) => *manifest,
        other => panic!("{other:?}"),
    }
}
