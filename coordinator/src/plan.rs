//! Planning turns tables of entities into shards on the object store.
//!
//! Entities are streamed. Each is routed to its pool, and its prompt is rendered and digested. It is then written into
//! a shard of its kind and pool, or, if neither its prompt nor the specification has changed since its previous text,
//! into a shard of records to carry forward. In a run of lists the histories are looked up in the catalogue first, and
//! prompts are of what it has. The plan itself is written last and as one object: a killed planning leaves no plan, and
//! the next one writes the same files again.
//!
//! Memory is the join's (see [`join`](laser_store::join)), at most three open shards per kind and pool, and the list of
//! shards, which is the plan. It does not grow with rows.

use std::collections::BTreeMap;

use arrow::datatypes::SchemaRef;
use jiff::civil::Date;
use laser_schema::job::{Action, KindCounts, PLAN_VERSION, Plan, Price, ShardJob, ShardRow, Spec};
use laser_schema::lists::ListRows;
use laser_schema::{Digest, EmbeddingSpec, Entity, EntityId, Kind};
use laser_schema::{
    entity::IdType,
    guard::Guards,
    knowledge::{Content, KnowledgeRecord},
};
use laser_store::join::{Join, JoinError, Joined, JoinedEntity, KindIds};
use laser_store::previous::{PreviousError, PreviousReader, PreviousSource, PreviousText};
use laser_store::run_store::{RunStore, RunStoreError, audit_output};
use laser_store::table::{self, TableError};
use laser_store::{Location, location::LocationError, part::record_schema, shard::shard_schema, spill::SpillError};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::catalogue::{Catalogue, CatalogueError, Histories};
use crate::prompt::{PromptError, PromptRenderer};

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
    /// The items of lists, if the specification is one of lists.
    pub catalogue: Option<Catalogue<'a>>,
    /// What a row of the output is, if the specification is one of lists.
    pub list_rows: ListRows,
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
    /// There is nothing to do.
    #[error("{files}: no entities; an empty input would publish an empty night")]
    Empty {
        /// The tables.
        files: String,
    },
    /// An input that no lists can be made of.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A specification of lists without a catalogue, or the other way round.
    #[error("lists need a catalogue, and texts have none; this is a fault of Laser, please report it")]
    NoCatalogue,
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
    if request.spec.lists.is_some() != request.catalogue.is_some() {
        return Err(PlanError::NoCatalogue);
    }
    if let Some(catalogue) = &request.catalogue {
        catalogue.check(entities.kinds())?;
    }
    let joined = join_previous(entities, request).await?;
    let store = output.map(|output| RunStore::new(output, &request.run));
    let item_ids = request.catalogue.map_or(IdType::String, |catalogue| catalogue.ids);
    let mut planner = Planner {
        folder: store.as_ref().map(RunStore::folder),
        request,
        spec_digest: request.spec.digest(),
        content: request.spec.content(item_ids, request.list_rows),
        histories: request.catalogue.map(Histories::new),
        kinds: joined.kinds(),
        open: BTreeMap::new(),
        carried: BTreeMap::new(),
        shards: Vec::new(),
        counts: BTreeMap::new(),
    };
    planner.read(&joined, progress).await?;
    let plan = planner.finish().await?;
    match store {
        // Two coordinators that plan at once write the same shards; the run was planned when the first was done.
        Some(store) => Ok(store.write_plan(plan).await?),
        None => Ok(plan),
    }
}

/// Last night's knowledge of an entity; the join holds it as JSON.
#[derive(Serialize, Deserialize)]
enum Known {
    /// It may be carried forward.
    Record(Box<KnowledgeRecord>),
    /// It may be drafted from.
    Text(String),
}

impl Known {
    fn into_text(self) -> String {
        match self {
            Self::Record(record) => record.text,
            Self::Text(text) => text,
        }
    }
}

/// Joins last night's knowledge to the entities and checks that it belongs to them.
async fn join_previous(mut entities: Join, request: &PlanRequest<'_>) -> Result<Joined, PlanError> {
    if entities.kinds().is_empty() || request.limit == Some(0) {
        let files = entities.tables().iter().map(|table| table.path.as_str());
        let files = files.collect::<Vec<_>>().join(", ");
        return Err(PlanError::Empty { files });
    }
    let spec_digest = request.spec.digest();
    let mut texts: BTreeMap<Kind, u64> = BTreeMap::new();
    let mut reader = PreviousReader::open(request.previous, request.spec.data_set(), request.date).await?;
    while let Some(batch) = reader.next_batch().await? {
        for PreviousText { kind, id, text, record } in batch {
            *texts.entry(kind).or_default() += 1;
            // Of a record that cannot be carried forward, the text is enough.
            let known = match record {
                Some(record) if request.carry_forward && record.spec_digest == spec_digest => Known::Record(record),
                _ => Known::Text(text),
            };
            entities.push_text(kind, &id, &serde_json::to_vec(&known).unwrap_or_default())?;
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
    /// Of lists.
    histories: Option<Histories<'a>>,
    kinds: &'a BTreeMap<Kind, KindIds>,
    /// Rows to generate and rows to audit, by kind and pool.
    open: BTreeMap<(Action, Kind, String), OpenShard<ShardRow>>,
    carried: BTreeMap<Kind, OpenShard<KnowledgeRecord>>,
    shards: Vec<ShardJob>,
    counts: BTreeMap<Kind, KindCounts>,
}

#[derive(Debug)]
struct OpenShard<T> {
    rows: Vec<T>,
    written: u32,
}

impl<T> Default for OpenShard<T> {
    fn default() -> Self {
        Self { rows: Vec::new(), written: 0 }
    }
}

impl<T> OpenShard<T> {
    /// The rows and the number of the next shard, if there are any.
    fn take(&mut self) -> Option<(Vec<T>, u32)> {
        if self.rows.is_empty() {
            return None;
        }
        self.written += 1;
        Some((std::mem::take(&mut self.rows), self.written - 1))
    }
}

/// What became of one entity.
enum Planned {
    Carry(Box<KnowledgeRecord>),
    Generate(ShardRow),
}

impl Planner<'_> {
    async fn read(&mut self, joined: &Joined, progress: &mut (dyn FnMut(u64) + Send)) -> Result<(), PlanError> {
        let mut reader = joined.reader();
        while let Some(mut entities) = reader.next_batch().await? {
            entities.retain(|joined| self.within_limit(joined.entity.kind));
            let items = self.known_items(&mut entities)?;
            let planned = entities.par_iter().zip(items).map(|(joined, items)| self.plan_entity(joined, items));
            let planned: Result<Vec<_>, PromptError> = planned.collect();
            for (joined, planned) in entities.iter().zip(planned?) {
                self.add(&joined.entity, planned).await?;
            }
            progress(self.counts.values().map(|c| c.entities).sum());
        }
        Ok(())
    }

    /// Counts the entity if the limit leaves room for it.
    fn within_limit(&mut self, kind: Kind) -> bool {
        let counts = self.counts.entry(kind).or_default();
        let room = self.request.limit.is_none_or(|limit| counts.entities < limit);
        counts.entities += u64::from(room);
        room
    }

    /// Leaves in the histories what the catalogue has, and returns it of each; of texts nothing.
    fn known_items(&mut self, entities: &mut [JoinedEntity]) -> Result<Vec<Vec<u32>>, CatalogueError> {
        let Some(histories) = &mut self.histories else {
            return Ok(vec![Vec::new(); entities.len()]);
        };
        let known = histories.keep_known(entities.iter_mut().map(|joined| &mut joined.entity.history).collect())?;
        for (joined, known) in entities.iter().zip(&known) {
            self.counts.entry(joined.entity.kind).or_default().unknown_items += known.unknown;
        }
        Ok(known.into_iter().map(|known| known.numbers).collect())
    }

    /// Plans an entity; of lists with the items of its history.
    fn plan_entity(&self, joined: &JoinedEntity, history: Vec<u32>) -> Result<Planned, PromptError> {
        let entity = &joined.entity;
        let is_list = self.histories.is_some();
        let pool = if is_list { String::new() } else { (self.request.route)(entity) };
        // Of several sources the last counts.
        let previous = joined.texts.last().and_then(|json| serde_json::from_slice(json).ok());
        let (prompt, error) = match self.request.prompts.render(entity) {
            Ok(rendered) => (rendered.tokens, None),
            Err(error @ PromptError::TooLong { .. }) => (Vec::new(), Some(error.to_string())),
            Err(error) => return Err(error),
        };
        let prompt_digest = if is_list { list_digest(&prompt, &history) } else { prompt_digest(&prompt) };
        if let Some(Known::Record(record)) = &previous
            && error.is_none()
            && record.prompt_digest == prompt_digest
            && record.spec_digest == self.spec_digest
        {
            return Ok(Planned::Carry(record.clone()));
        }
        Ok(Planned::Generate(ShardRow {
            entity_id: entity.id.clone(),
            pool,
            prompt,
            prompt_digest,
            // A list is nothing to draft from.
            previous: previous.filter(|_| !is_list).map(Known::into_text),
            error,
            history,
        }))
    }

    async fn add(&mut self, entity: &Entity, planned: Planned) -> Result<(), PlanError> {
        let kind = entity.kind;
        let counts = self.counts.entry(kind).or_default();
        match planned {
            Planned::Carry(record) => {
                counts.carried += 1;
                let open = self.carried.entry(kind).or_default();
                open.rows.push(*record);
                if open.rows.len() >= self.request.shard_rows {
                    self.close_carried(kind).await?;
                }
            }
            Planned::Generate(row) => {
                counts.generate += u64::from(row.error.is_none());
                counts.failed += u64::from(row.error.is_some());
                counts.prompt_tokens += row.prompt.len() as u64;
                if row.error.is_none() && self.is_audited(kind, &row.entity_id) {
                    self.push(Action::Audit, kind, row.clone()).await?;
                }
                self.push(Action::Generate, kind, row).await?;
            }
        }
        Ok(())
    }

    async fn push(&mut self, action: Action, kind: Kind, row: ShardRow) -> Result<(), PlanError> {
        let key = (action, kind, row.pool.clone());
        let open = self.open.entry(key.clone()).or_default();
        open.rows.push(row);
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
        let Some((rows, number)) = self.open.get_mut(&key).and_then(OpenShard::take) else {
            return Ok(());
        };
        let (action, kind, pool) = &key;
        let prefix = if *action == Action::Audit { "audit-" } else { "" };
        let pool = if pool.is_empty() { String::new() } else { format!("-{pool}") };
        let input = format!("shards/{prefix}{kind}{pool}-{number:05}.parquet");
        let prompt_tokens = rows.iter().map(|r| r.prompt.len() as u64).sum();
        let schema = shard_schema(self.id_type(*kind), self.content);
        self.write(key, input, prompt_tokens, schema, &rows).await
    }

    async fn close_carried(&mut self, kind: Kind) -> Result<(), PlanError> {
        let Some((rows, number)) = self.carried.get_mut(&kind).and_then(OpenShard::take) else {
            return Ok(());
        };
        let input = format!("shards/carry-{kind}-{number:05}.parquet");
        let schema = record_schema(self.id_type(kind), self.content);
        self.write((Action::Carry, kind, String::new()), input, 0, schema, &rows).await
    }

    fn id_type(&self, kind: Kind) -> arrow::datatypes::DataType {
        let ids = self.kinds.get(&kind);
        table::id_type(ids.map_or(IdType::String, |ids| ids.first.id_type()))
    }

    /// Writes a shard; its number and its output are given once all shards are known.
    async fn write<T: Serialize>(
        &mut self,
        (action, kind, pool): (Action, Kind, String),
        input: String,
        prompt_tokens: u64,
        schema: SchemaRef,
        rows: &[T],
    ) -> Result<(), PlanError> {
        let bytes = table::encode(&input, schema, rows, &[])?;
        let (rows, input_digest) = (rows.len() as u64, Digest::of(&bytes));
        if let Some(folder) = &self.folder {
            folder.join(&input).write(bytes).await?;
        }
        let (shard, output) = (0, String::new());
        self.shards.push(ShardJob { shard, action, kind, pool, rows, prompt_tokens, input, input_digest, output });
        Ok(())
    }

    async fn finish(mut self) -> Result<Plan, PlanError> {
        for key in self.open.keys().cloned().collect::<Vec<_>>() {
            self.close(key).await?;
        }
        for kind in Kind::ALL {
            self.close_carried(kind).await?;
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
            ids: (self.kinds.iter().map(|(kind, ids)| (*kind, ids.first.id_type())))
                .chain(self.request.catalogue.map(|catalogue| (Kind::Item, catalogue.ids)))
                .collect(),
            counts: self.counts,
            shards: self.shards,
        };
        number_shards(&mut plan);
        Ok(plan)
    }
}

/// Carried shards first (they cost nothing), then by kind and pool, audits last of all; but first where pools are
/// judged by them.
fn number_shards(plan: &mut Plan) {
    let audit = if plan.guards.is_some() { 1 } else { 3 };
    let rank = |job: &ShardJob| match job.action {
        Action::Carry => 0,
        Action::Generate => 2,
        Action::Audit => audit,
    };
    plan.shards.sort_by(|a, b| (rank(a), &a.input).cmp(&(rank(b), &b.input)));
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

/// The digest of what a list depends on beside the specification: the prompt's tokens behind their number, and the
/// history's items, all of 32 bits and little-endian.
pub fn list_digest(tokens: &[u32], history: &[u32]) -> Digest {
    let number = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    Digest::of(&little_endian(&[&[number], tokens, history].concat()))
}

fn little_endian(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
