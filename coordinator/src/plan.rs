//! Planning turns tables of entities into shards on the object store.
//!
//! Entities are streamed. Each is routed to its pool, and its prompt is rendered and digested. It is then written into
//! a shard of its kind and pool, or, if neither its prompt nor the specification has changed since its previous text,
//! into a shard of records to carry forward. In a run of lists the histories are looked up in the catalogue first, and
//! prompts are of what it has. The plan itself is written last and as one object: a killed planning leaves no plan, and
//! the next one writes the same files again.
//!
//! Coordinators of one run share the rendering.
//!
//! Memory is the join's (see [`join`](laser_store::join)), at most three open shards per kind and pool, a batch of
//! entities or, while another coordinator's prompts are waited for, sixteen, and the list of shards, which is the plan.
//! It does not grow with rows.

mod earlier;
mod known;
mod ranges;
mod sample;
mod together;

use std::collections::BTreeMap;

use arrow::datatypes::SchemaRef;
use jiff::civil::Date;
use laser_schema::job::{Action, KindCounts, PLAN_VERSION, Plan, Price, ShardJob, ShardRow, Spec};
use laser_schema::lists::{ITEMS_MAX, ListRows};
use laser_schema::{Digest, EmbeddingSpec, Entity, EntityId, Kind};
use laser_schema::{
    entity::IdType,
    guard::Guards,
    knowledge::{Content, KnowledgeRecord},
};
use laser_store::data_set::parts_in_flight;
use laser_store::join::{Join, JoinError, Joined, JoinedEntity, KindIds};
use laser_store::previous::{PreviousError, PreviousReader, PreviousSource, PreviousText};
use laser_store::run_store::{Prompt, RunStore, RunStoreError, SHARDS, audit_output};
use laser_store::table::{self, TableError};
use laser_store::{
    Location, location::LocationError, part::record_schema, shard::shard_schema, spill::PARTITIONS, spill::SpillError,
};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use tokio::task::JoinSet;

pub use sample::{SampleRequest, plan_sample};

use crate::canary::CanaryEntities;
use crate::catalogue::{Catalogue, CatalogueError, KnownItems};
use crate::nats::NatsClient;
use crate::order::{ByValue, OrderError};
use crate::priority::{PriorityError, Valuation};
use crate::prompt::{PromptError, PromptRenderer};
use known::Known;
use ranges::Range;
use sample::Samples;
use together::{Prompts, Shared};

/// The inputs of planning a run.
pub struct PlanRequest<'a> {
    /// The run's name.
    pub run: String,
    /// The night.
    pub date: Date,
    /// The specification of acceptable texts.
    pub spec: Spec,
    /// Last night's knowledge.
    pub previous: &'a [PreviousSource],
    /// Whether unchanged entities keep their texts.
    pub carry_forward: bool,
    /// Most rows per shard.
    pub shard_rows: usize,
    /// The share of all entities, from 0 to 1, that is also generated plainly to measure the speedup.
    pub audit_share: f64,
    /// Seed for choosing the audited entities.
    pub seed: u64,
    /// Most entities per kind; all if not given.
    pub limit: Option<u64>,
    /// The location of the pools and their digest.
    pub pools: (String, Digest),
    /// The cost of engine time.
    pub price: Option<Price>,
    /// Bounds that gate the generation of pools.
    pub guards: Option<Guards>,
    /// The embeddings of the output.
    pub embedding: Option<EmbeddingSpec>,
    /// Renders the prompts.
    pub prompts: &'a PromptRenderer,
    /// Returns the name of an entity's pool; the entity has its embedding. Lists have no pools.
    pub route: &'a (dyn Fn(&Entity) -> String + Sync),
    /// Gives entities their value, if shards are ordered by it.
    pub valuation: Option<&'a Valuation>,
    /// Bytes that rows in order of value may take before they spill.
    pub memory: usize,
    /// The items of lists, if the specification is one of lists.
    pub catalogue: Option<Catalogue<'a>>,
    /// What a row of the output is, if the specification is one of lists.
    pub list_rows: ListRows,
    /// The tokens that each place of a text keeps beside the one that was written there; none if 0.
    pub runners_up: u32,
    /// The entities to plan, if the run is a canary; others are passed over.
    pub canary: Option<&'a CanaryEntities>,
    /// Where coordinators that plan the same run meet to share the work, if others may.
    pub queue: Option<&'a NatsClient>,
}

impl std::fmt::Debug for PlanRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanRequest").field("run", &self.run).finish_non_exhaustive()
    }
}

/// The reasons why planning failed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The entity tables, and what belongs to their rows.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// Previous knowledge.
    #[error(transparent)]
    Previous(#[from] PreviousError),
    /// A store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The run's own files.
    #[error(transparent)]
    Run(#[from] RunStoreError),
    /// A shard file.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A template that does not fit the data.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// A task that reads ahead or writes a shard.
    #[error("a task of planning ended: {0}")]
    Ended(#[from] tokio::task::JoinError),
    /// There is nothing to do.
    #[error("{files}: no entities; an empty input would publish an empty night")]
    Empty {
        /// The tables.
        files: String,
    },
    /// The priority.
    #[error(transparent)]
    Priority(#[from] PriorityError),
    /// The order of values.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// An input that no lists can be made of.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A specification of lists without a catalogue, or the other way round.
    #[error("lists need a catalogue, and texts have none; this is a fault of Laser, please report it")]
    NoCatalogue,
    /// The run was begun anew, and an earlier plan of it has left parts.
    #[error(
        "{folder}: has parts of an earlier plan of this run; end its workers and remove this folder, too, to begin the \
         run anew, or change [run] seed, which makes another run"
    )]
    EarlierParts {
        /// The folder of the parts.
        folder: String,
    },
    /// No previous text belongs to any entity.
    #[error(
        "previous {kind} knowledge: none of its {texts} texts belongs to a {kind} of the input (ids such as the {} \
         {previous}, the input has the {} {input}); is it another data set's, or another kind's, or does it want an \
         id_type?",
        previous.id_type(),
        input.id_type()
    )]
    ForeignPrevious {
        /// Users or items.
        kind: Kind,
        /// Number of previous texts.
        texts: u64,
        /// One of the previous texts' ids.
        previous: EntityId,
        /// One of the input's ids.
        input: EntityId,
    },
}

/// Plans a run of `entities`, to which their embeddings have been given, and writes its shards and its plan below
/// `output`; with no `output` only tells what it would do. `progress` hears how many entities are planned.
///
/// # Errors
/// [`PlanError`]; nothing is planned then.
pub async fn plan(
    output: Option<&Location>,
    entities: Join,
    request: &PlanRequest<'_>,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Plan, PlanError> {
    check(&entities, request)?;
    let Some(store) = output.map(|output| RunStore::new(output, &request.run)) else {
        let joined = joined(entities, request).await?;
        return Ok(made(None, &joined, request, (None, None), progress).await?.0);
    };
    if let Some(client) = request.queue {
        return together::plan(&store, entities, request, client, progress).await;
    }
    let joined = joined(entities, request).await?;
    let (plan, _) = made(Some(&store), &joined, request, (None, None), progress).await?;
    // Two coordinators that plan at once write the same shards; the run was planned when the first was done.
    earlier::write_plan(&store, plan).await
}

/// Whether the request fits the entities.
fn check(entities: &Join, request: &PlanRequest<'_>) -> Result<(), PlanError> {
    if request.spec.lists.is_some() != request.catalogue.is_some() {
        return Err(PlanError::NoCatalogue);
    }
    if let Some(catalogue) = &request.catalogue {
        catalogue.check(entities.kinds())?;
    }
    if entities.kinds().is_empty() || request.limit == Some(0) {
        let files = entities.tables().iter().map(|table| table.path.as_str());
        let files = files.collect::<Vec<_>>().join(", ");
        return Err(PlanError::Empty { files });
    }
    Ok(())
}

/// Makes the plan of a run and writes its shards, but not the plan, with the help of `shared`. Returns the samples with
/// what they were offered.
async fn made<'a>(
    store: Option<&RunStore>,
    joined: &'a Joined,
    request: &'a PlanRequest<'a>,
    (shared, samples): (Option<Shared<'a>>, Option<Samples>),
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<(Plan, Option<Samples>), PlanError> {
    let mut planner = Planner::new(store.map(RunStore::folder), joined.kinds(), request);
    planner.samples = samples;
    if let Some(valuation) = request.valuation {
        let rows = joined.kinds().iter().map(|(kind, ids)| (*kind, ids.entities)).collect();
        planner.order = Some(ByValue::new(valuation, joined.tables(), &rows, request.memory).await?);
    }
    planner.read(joined, shared, progress).await?;
    let samples = planner.samples.take();
    Ok((planner.finish().await?, samples))
}

/// Joins last night's knowledge to the entities and checks that it belongs to them.
async fn joined(mut entities: Join, request: &PlanRequest<'_>) -> Result<Joined, PlanError> {
    let spec_digest = request.spec.digest();
    let mut texts: BTreeMap<Kind, u64> = BTreeMap::new();
    let mut reader = PreviousReader::open(request.previous, request.spec.data_set(), request.date).await?;
    while let Some(batch) = reader.next_batch().await? {
        for PreviousText { kind, id, text, record, .. } in batch {
            *texts.entry(kind).or_default() += 1;
            // Of a record that cannot be carried forward, the text or the list is enough.
            let known = match record {
                Some(record) if request.carry_forward && record.spec_digest == spec_digest => Known::of_record(&record),
                Some(record) if !record.items.is_empty() => Known::of_list(&record.items),
                _ => Known::of_text(&text),
            };
            entities.push_text(kind, &id, &known)?;
        }
    }
    let mut strangers: BTreeMap<Kind, (u64, EntityId)> = BTreeMap::new();
    let joined = entities.finish(&mut |kind, id, _| {
        let (count, _) = strangers.entry(kind).or_insert((0, id));
        *count += 1;
    })?;
    for (kind, (count, previous)) in strangers {
        if let Some(ids) = joined.kinds().get(&kind)
            && texts.get(&kind) == Some(&count)
        {
            return Err(PlanError::ForeignPrevious { kind, texts: count, previous, input: ids.first.clone() });
        }
    }
    Ok(joined)
}

struct Planner<'a> {
    folder: Option<Location>,
    request: &'a PlanRequest<'a>,
    spec_digest: Digest,
    content: Content,
    kinds: &'a BTreeMap<Kind, KindIds>,
    /// Rows to generate in the order of their value, if they have one.
    order: Option<ByValue>,
    /// The band of the rows that come next.
    band: usize,
    /// A sample of the rows to generate, if one is wanted.
    samples: Option<Samples>,
    /// Rows to generate and rows to audit, by kind and pool.
    open: BTreeMap<(Action, Kind, String), OpenShard<ShardRow>>,
    carried: BTreeMap<Kind, OpenShard<KnowledgeRecord>>,
    /// Shards that are being written.
    writing: JoinSet<Result<(usize, ShardJob), PlanError>>,
    /// Shards with the band of their first row.
    shards: Vec<(usize, ShardJob)>,
    counts: BTreeMap<Kind, KindCounts>,
}

#[derive(Debug)]
struct OpenShard<T> {
    rows: Vec<T>,
    value: Option<f64>,
    band: usize,
    written: u32,
}

impl<T> Default for OpenShard<T> {
    fn default() -> Self {
        Self { rows: Vec::new(), value: None, band: 0, written: 0 }
    }
}

impl<T> OpenShard<T> {
    fn push(&mut self, row: T, value: Option<f64>, band: usize) {
        if self.rows.is_empty() {
            (self.value, self.band) = (None, band);
        }
        add_value(&mut self.value, value);
        self.rows.push(row);
    }

    /// The rows of the next shard, its number, value and band, if there are any rows.
    fn take(&mut self) -> Option<Taken<T>> {
        if self.rows.is_empty() {
            return None;
        }
        self.written += 1;
        let rows = std::mem::take(&mut self.rows);
        Some(Taken { rows, number: self.written - 1, value: self.value, band: self.band })
    }
}

/// The content of a shard.
struct Taken<T> {
    rows: Vec<T>,
    number: u32,
    value: Option<f64>,
    band: usize,
}

fn add_value(sum: &mut Option<f64>, value: Option<f64>) {
    if let Some(value) = value {
        *sum.get_or_insert_default() += value;
    }
}

/// What becomes of one entity.
enum Next {
    Carry(Box<KnowledgeRecord>),
    Generate(Box<ShardRow>),
}

/// An entity's place in the plan.
struct Planned {
    what: Next,
    /// Interactions with items that the catalogue does not have.
    unknown: u64,
}

impl<'a> Planner<'a> {
    /// A planner that writes to a run's folder, or nowhere.
    fn new(folder: Option<Location>, kinds: &'a BTreeMap<Kind, KindIds>, request: &'a PlanRequest<'a>) -> Self {
        let item_ids = request.catalogue.map_or(IdType::String, |catalogue| catalogue.ids);
        Self {
            folder,
            request,
            spec_digest: request.spec.digest(),
            content: request.spec.content((item_ids, request.list_rows), request.runners_up > 0),
            kinds,
            order: None,
            band: 0,
            samples: None,
            open: BTreeMap::new(),
            carried: BTreeMap::new(),
            writing: JoinSet::new(),
            shards: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Plans all ranges, with the prompts that `shared` brings where others help.
    async fn read(
        &mut self,
        joined: &Joined,
        shared: Option<Shared<'a>>,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), PlanError> {
        let mut prompts = Prompts::new(joined, self.request, shared);
        while let Some((Range { entities, items, .. }, prompts)) = prompts.next().await? {
            let of_each = entities.par_iter().zip(prompts).zip(items);
            let planned: Vec<_> = of_each.map(|((j, prompt), items)| self.plan_entity(j, prompt, items)).collect();
            let values = self.values(&entities)?;
            for ((joined, planned), value) in entities.iter().zip(planned).zip(values) {
                self.add(&joined.entity, planned, value).await?;
            }
            progress(self.counts.values().map(|c| c.entities).sum());
        }
        self.read_ordered().await
    }

    /// What the entities are worth, if anything says so.
    fn values(&self, entities: &[JoinedEntity]) -> Result<Vec<Option<f64>>, PriorityError> {
        let Some(valuation) = self.request.valuation else {
            return Ok(vec![None; entities.len()]);
        };
        let entities: Vec<&Entity> = entities.iter().map(|joined| &joined.entity).collect();
        Ok(valuation.values(&entities)?.into_iter().map(Some).collect())
    }

    /// Brings the rows that were put in order of their value into shards.
    async fn read_ordered(&mut self) -> Result<(), PlanError> {
        let Some(mut order) = self.order.take() else {
            return Ok(());
        };
        let bands = self.request.valuation.map_or(1, |valuation| valuation.priority().bands);
        order.finish()?;
        for part in 0..PARTITIONS {
            self.band = part * bands / PARTITIONS;
            for (kind, row) in order.take(part)? {
                self.push_generate(kind, row).await?;
            }
        }
        Ok(())
    }

    /// Plans an entity with its prompt; of lists with the items of its history.
    fn plan_entity(&self, joined: &JoinedEntity, prompt: Prompt, items: KnownItems) -> Planned {
        let entity = &joined.entity;
        let is_list = self.request.catalogue.is_some();
        let pool = if is_list { String::new() } else { (self.request.route)(entity) };
        // Of several sources the last counts.
        let previous = joined.texts.last().map(|bytes| Known::new(bytes));
        let listed = prompt.and_then(|prompt| Ok((prompt, self.own_items(entity)?)));
        let ((prompt, items_of_list), error) = match listed {
            Ok(listed) => (listed, None),
            Err(reason) => (Default::default(), Some(reason)),
        };
        let KnownItems { numbers: history, unknown } = items;
        let prompt_digest = match is_list {
            true => list_digest(&prompt, &history, items_of_list),
            false => prompt_digest(&prompt),
        };
        let digests = (&prompt_digest, &self.spec_digest);
        let unchanged = previous.filter(|_| error.is_none()).and_then(|known| known.record(&entity.id, digests));
        let what = match unchanged {
            Some(record) => Next::Carry(Box::new(record)),
            None => Next::Generate(Box::new(ShardRow {
                entity_id: entity.id.clone(),
                pool,
                prompt,
                prompt_digest,
                previous: previous.filter(|_| !is_list).and_then(Known::text),
                error,
                history,
                previous_items: previous.and_then(|known| self.previous_items(known)).unwrap_or_default(),
                items: items_of_list,
                value: None,
            })),
        };
        Planned { what, unknown }
    }

    /// What the catalogue has of a user's previous list, by number.
    fn previous_items(&self, known: Known<'_>) -> Option<Vec<u32>> {
        Some(self.request.catalogue?.numbers(&known.items()?))
    }

    /// The number of items of a user's list, if the specification names a column for it and the user has one.
    fn own_items(&self, entity: &Entity) -> Result<Option<u32>, String> {
        let column = self.request.spec.lists.as_ref().and_then(|lists| lists.items_from.as_deref());
        column.map_or(Ok(None), |column| items_in(column, entity))
    }

    async fn add(&mut self, entity: &Entity, planned: Planned, value: Option<f64>) -> Result<(), PlanError> {
        let kind = entity.kind;
        let counts = self.counts.entry(kind).or_default();
        counts.entities += 1;
        counts.unknown_items += planned.unknown;
        add_value(&mut counts.value, value);
        let row = match planned.what {
            Next::Carry(record) => {
                counts.carried += 1;
                let open = self.carried.entry(kind).or_default();
                open.push(*record, value, 0);
                if open.rows.len() >= self.request.shard_rows {
                    self.close_carried(kind).await?;
                }
                None
            }
            Next::Generate(row) => {
                counts.generate += u64::from(row.error.is_none());
                counts.failed += u64::from(row.error.is_some());
                counts.prompt_tokens += row.prompt.len() as u64;
                Some(ShardRow { value, ..*row })
            }
        };
        match (&mut self.order, row) {
            (Some(order), row) => Ok(order.push(entity, value.unwrap_or(0.0), row.as_ref())?),
            (None, Some(row)) => self.push_generate(kind, row).await,
            (None, None) => Ok(()),
        }
    }

    /// Adds a row to the shard that is open for it, and to that of audits if it is audited.
    async fn push_generate(&mut self, kind: Kind, row: ShardRow) -> Result<(), PlanError> {
        if let Some(samples) = self.samples.as_mut().filter(|_| row.error.is_none()) {
            samples.offer(kind, &row);
        }
        if row.error.is_none() && self.is_audited(kind, &row.entity_id) {
            self.push(Action::Audit, kind, row.clone()).await?;
        }
        self.push(Action::Generate, kind, row).await
    }

    async fn push(&mut self, action: Action, kind: Kind, row: ShardRow) -> Result<(), PlanError> {
        let key = (action, kind, row.pool.clone());
        let open = self.open.entry(key.clone()).or_default();
        let value = row.value;
        open.push(row, value, self.band);
        if open.rows.len() >= self.request.shard_rows {
            self.close(key).await?;
        }
        Ok(())
    }

    /// A seeded choice that needs no count of the entities.
    fn is_audited(&self, kind: Kind, id: &EntityId) -> bool {
        let name = format!("{}/{kind}/{id}", self.request.seed);
        let digest = blake3::hash(name.as_bytes());
        let mut first = [0; 4];
        first.copy_from_slice(&digest.as_bytes()[..4]);
        f64::from(u32::from_le_bytes(first)) < self.request.audit_share * f64::from(u32::MAX)
    }

    async fn close(&mut self, key: (Action, Kind, String)) -> Result<(), PlanError> {
        let Some(taken) = self.open.get_mut(&key).and_then(OpenShard::take) else {
            return Ok(());
        };
        let (action, kind, pool) = &key;
        let prefix = if *action == Action::Audit { "audit-" } else { "" };
        let pool = if pool.is_empty() { String::new() } else { format!("-{pool}") };
        let input = SHARDS.file(&format!("{prefix}{kind}{pool}-{:05}", taken.number));
        let prompt_tokens = taken.rows.iter().map(|r| r.prompt.len() as u64).sum();
        let schema = shard_schema(self.id_type(*kind), self.content);
        self.write(key, input, prompt_tokens, schema, taken).await
    }

    async fn close_carried(&mut self, kind: Kind) -> Result<(), PlanError> {
        let Some(taken) = self.carried.get_mut(&kind).and_then(OpenShard::take) else {
            return Ok(());
        };
        let input = SHARDS.file(&format!("carry-{kind}-{:05}", taken.number));
        let schema = record_schema(self.id_type(kind), self.content);
        self.write((Action::Carry, kind, String::new()), input, 0, schema, taken).await
    }

    fn id_type(&self, kind: Kind) -> arrow::datatypes::DataType {
        let ids = self.kinds.get(&kind);
        table::id_type(ids.map_or(IdType::String, |ids| ids.first.id_type()))
    }

    /// Writes a shard on a task of its own; its number and its output are given once all shards are known.
    async fn write<T: Serialize + Send + 'static>(
        &mut self,
        (action, kind, pool): (Action, Kind, String),
        input: String,
        prompt_tokens: u64,
        schema: SchemaRef,
        Taken { rows, value, band, .. }: Taken<T>,
    ) -> Result<(), PlanError> {
        if self.writing.len() >= parts_in_flight()
            && let Some(written) = self.writing.join_next().await
        {
            self.shards.push(written??);
        }
        let file = self.folder.as_ref().map(|folder| folder.join(&input));
        self.writing.spawn(async move {
            let (name, count) = (input.clone(), rows.len() as u64);
            let encoded = tokio::task::spawn_blocking(move || table::encode(&name, schema, &rows, &[]));
            let bytes = encoded.await??;
            let (rows, input_digest) = (count, Digest::of(&bytes));
            if let Some(file) = file {
                file.write(bytes).await?;
            }
            let (shard, output) = (0, String::new());
            let job = ShardJob { shard, action, kind, pool, rows, prompt_tokens, value, input, input_digest, output };
            Ok((band, job))
        });
        Ok(())
    }

    async fn finish(mut self) -> Result<Plan, PlanError> {
        for key in self.open.keys().cloned().collect::<Vec<_>>() {
            self.close(key).await?;
        }
        for kind in Kind::ALL {
            self.close_carried(kind).await?;
        }
        while let Some(written) = self.writing.join_next().await {
            self.shards.push(written??);
        }
        let mut plan = Plan {
            version: PLAN_VERSION,
            run: self.request.run.clone(),
            date: self.request.date,
            spec: self.request.spec.clone(),
            pools: self.request.pools.0.clone(),
            pool_digest: self.request.pools.1.clone(),
            price: self.request.price.clone(),
            guards: self.request.guards,
            embedding: self.request.embedding.clone(),
            list_rows: self.request.list_rows,
            runners_up: self.request.runners_up,
            priority: self.request.valuation.map(|valuation| valuation.priority().clone()),
            canary: self.request.canary.map(|entities| entities.canary().clone()),
            ids: (self.kinds.iter().map(|(kind, ids)| (*kind, ids.first.id_type())))
                .chain(self.request.catalogue.map(|catalogue| (Kind::Item, catalogue.ids)))
                .collect(),
            counts: self.counts,
            shards: Vec::new(),
        };
        number_shards(&mut plan, self.shards);
        Ok(plan)
    }
}

/// Carried shards first (they cost nothing), then by band of value, kind and pool, audits last of all; but first where
/// pools are judged by them.
fn number_shards(plan: &mut Plan, mut shards: Vec<(usize, ShardJob)>) {
    let audit = if plan.guards.is_some() { 1 } else { 3 };
    let rank = |job: &ShardJob| match job.action {
        Action::Carry => 0,
        Action::Generate => 2,
        Action::Audit => audit,
    };
    shards.sort_by(|(a_band, a), (b_band, b)| (rank(a), a_band, &a.input).cmp(&(rank(b), b_band, &b.input)));
    plan.shards = shards.into_iter().map(|(_, job)| job).collect();
    let folders: BTreeMap<Kind, String> = Kind::ALL.into_iter().map(|kind| (kind, plan.partition(kind))).collect();
    // As many digits as the last one has: names sort as numbers do.
    let width = plan.shards.len().to_string().len().max(5);
    for (job, shard) in plan.shards.iter_mut().zip(0..) {
        job.shard = shard;
        job.output = match job.action {
            Action::Audit => audit_output(&plan.run, &format!("{shard:0width$}")),
            _ => format!("{}/part-{shard:0width$}.parquet", folders[&job.kind]),
        };
    }
}

/// The digest of a prompt: of its tokens, little-endian.
pub fn prompt_digest(tokens: &[u32]) -> Digest {
    Digest::of(&little_endian(tokens))
}

/// The digest of what a list depends on beside the specification: the prompt's tokens behind their number, the
/// history's items, and the list's length behind a number that no item has if the user has its own. All are of 32 bits
/// and little-endian.
pub fn list_digest(tokens: &[u32], history: &[u32], items: Option<u32>) -> Digest {
    let number = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let own: Vec<u32> = items.iter().flat_map(|&items| [u32::MAX, items]).collect();
    Digest::of(&little_endian(&[&[number], tokens, history, &own].concat()))
}

/// The number of items in a user's column; none if there is nothing.
fn items_in(column: &str, entity: &Entity) -> Result<Option<u32>, String> {
    let value = match entity.attributes.get(column) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    // Text of a CSV file is a number if it reads as one, and so is a whole one of a column of floats.
    let number = value.as_str().map_or_else(|| value.as_f64(), |text| text.trim().parse().ok());
    let whole = number.filter(|number| number.fract() == 0.0 && (1.0..=ITEMS_MAX as f64).contains(number));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number up to 1000")]
    let items = whole.map(|number| Some(number as u32));
    items.ok_or_else(|| format!("{column} = {value}: expected a whole number of items from 1 to {ITEMS_MAX}"))
}

fn little_endian(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
