//! A night of any size: users with attributes, histories and embeddings, and the texts of the night before, of which
//! a share is still good. A function of the number of users; made in chunks, so that memory does not grow with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_coordinator::plan::prompt_digest;
use laser_coordinator::prompt::PromptRenderer;
use laser_schema::embedding::EmbeddingSource;
use laser_schema::entity::IdType;
use laser_schema::job::Spec;
use laser_schema::knowledge::{KnowledgeRecord, PartInfo};
use laser_schema::manifest::{Manifest, PartEntry, Profiles};
use laser_schema::{Columns, Digest, Entity, EntityId, EntityTable, Kind};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter};
use laser_store::part::encode_part;
use laser_store::previous::PreviousSource;
use laser_store::table::to_batch;
use parquet::arrow::ArrowWriter;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

/// Users of a part, and of what is held at a time.
const CHUNK: u64 = 4096;

/// Its files.
const USERS: &str = "users.parquet";
const EMBEDDINGS: &str = "embeddings.parquet";
const LAST: &str = "last";

/// Values of an embedding.
const DIMENSION: u64 = 16;

/// One in so many users has another history than last night.
const CHANGED: u64 = 2;

/// How many there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    pub(super) users: u64,
    /// Films of each history.
    pub(super) films: u64,
    /// Different titles of all histories.
    pub(super) titles: u64,
}

/// A night's input.
#[derive(Debug)]
pub(super) struct Synthetic {
    pub(super) tables: Vec<EntityTable>,
    pub(super) previous: Vec<PreviousSource>,
    pub(super) embeddings: EmbeddingSource,
    /// Users whose text is still good.
    pub(super) unchanged: u64,
}

/// Numbers that look like chance: SplitMix64's finaliser.
pub(super) fn mix(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn id(user: u64) -> EntityId {
    EntityId::Int(user.cast_signed())
}

fn history(user: u64, Counts { films, titles, .. }: Counts) -> impl Iterator<Item = Value> {
    (0..films).map(move |i| {
        let film = mix(user * films + i);
        json!({"title": format!("Film {}", film % titles), "rating": 1 + film % 5})
    })
}

fn row(user: u64, counts: Counts) -> Value {
    json!({
        "id": user,
        "age": 10 * (1 + mix(user) % 7),
        "genre": format!("Genre {}", mix(user ^ 1) % 18),
        "interactions": 3 + mix(user ^ 2) % 20,
        "history": history(user, counts).collect::<Vec<_>>(),
    })
}

fn embedding(user: u64) -> Value {
    let centre = mix(user ^ 3) % 5;
    let values = (0..DIMENSION).map(|i| {
        let noise = mix(user * DIMENSION + i) % 1000;
        (mix(centre * DIMENSION + i) % 10) as f64 + noise as f64 / 1000.0
    });
    json!({"id": user, "embedding": values.collect::<Vec<_>>()})
}

/// The user of [`row`], as it is read.
fn entity(user: u64, counts: Counts) -> Entity {
    let row = row(user, counts);
    let fields = |value: Value| match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    let attributes = ["age", "genre"].map(|name| (name.to_owned(), row[name].clone()));
    Entity {
        id: id(user),
        kind: Kind::User,
        attributes: Map::from_iter(attributes),
        history: history(user, counts).map(fields).collect::<Vec<_>>().into(),
        interactions: row["interactions"].as_u64().unwrap_or_default(),
        embedding: None,
    }
}

/// So many words of a few hundred.
pub(super) fn words(user: u64, count: u64) -> String {
    let words = (0..count).map(|i| format!("word{}", mix(user * count + i) % 400));
    words.collect::<Vec<_>>().join(" ")
}

fn record(
    (user, counts): (u64, Counts),
    prompts: &PromptRenderer,
    spec: &Spec,
    (run, at): (&str, Timestamp),
) -> Result<KnowledgeRecord> {
    let prompt = match user.is_multiple_of(CHANGED) {
        true => Vec::new(),
        false => prompts.render(&entity(user, counts))?.tokens,
    };
    Ok(KnowledgeRecord {
        entity_id: id(user),
        text: words(user, 60),
        items: Vec::new(),
        scores: Vec::new(),
        prompt_tokens: 60,
        text_tokens: 90,
        pool: "user-all".into(),
        policy: "strict".into(),
        stop_reason: "end".into(),
        forwards: 30,
        drafted_tokens: 200,
        accepted_tokens: 60,
        relaxed_tokens: 0,
        step_accepted: vec![2; 30],
        mean_log_probability: -0.5,
        draft_seconds: 0.001,
        engine_seconds: 0.5,
        prompt_digest: prompt_digest(&prompt),
        spec_digest: spec.digest(),
        model_digest: spec.model.clone(),
        pool_digest: String::new(),
        generated_by: run.to_owned(),
        event_timestamp: at,
        created_timestamp: at,
        samples: Vec::new(),
        runners_up: None,
    })
}

impl Synthetic {
    /// The night of so many users that was written below `dir`.
    pub(super) fn below(dir: &Path, users: u64) -> Self {
        let path = |name| dir.join(name).to_string_lossy().into_owned();
        let users_table = EntityTable { path: path(USERS), kind: Some(Kind::User), columns: Columns::default() };
        Self {
            tables: vec![users_table],
            previous: vec![PreviousSource { path: path(LAST), kind: None, id_type: None }],
            embeddings: EmbeddingSource::Table {
                table: path(EMBEDDINGS),
                id: "id".into(),
                embedding: "embedding".into(),
            },
            unchanged: users - users.div_ceil(CHANGED),
        }
    }
}

/// Writes the night of so many users below `dir`; the night before was on `date`.
pub(super) async fn write(
    dir: &Path,
    counts: Counts,
    date: Date,
    prompts: &PromptRenderer,
    spec: &Spec,
) -> Result<Synthetic> {
    let users = counts.users;
    let folder = Location::parse(&dir.join(LAST).to_string_lossy())?;
    let mut entities = TableWriter::new(dir.join(USERS), user_schema())?;
    let mut embeddings = TableWriter::new(dir.join(EMBEDDINGS), embedding_schema())?;
    let mut parts = PartWriter::new(&folder);
    let at = date.to_zoned(jiff::tz::TimeZone::UTC)?.timestamp();
    for (shard, start) in (0..).zip((0..users).step_by(usize::try_from(CHUNK)?)) {
        let chunk = start..users.min(start + CHUNK);
        entities.write(&chunk.clone().into_par_iter().map(|user| row(user, counts)).collect::<Vec<_>>())?;
        embeddings.write(&chunk.clone().into_par_iter().map(embedding).collect::<Vec<_>>())?;
        let record = |user| record((user, counts), prompts, spec, ("last", at));
        let rows: Result<Vec<_>> = chunk.into_par_iter().map(record).collect();
        write_part(&mut parts, shard, &rows?).await?;
    }
    data_set::publish(&folder, &manifest(spec, (date, at), users, parts.finish())).await?;
    entities.finish()?;
    embeddings.finish()?;
    Ok(Synthetic::below(dir, users))
}

async fn write_part(parts: &mut PartWriter<'_>, shard: u32, rows: &[KnowledgeRecord]) -> Result<()> {
    let info = PartInfo::new("last", shard, Kind::User, "synthetic", rows);
    let bytes = encode_part(&parts.name(), IdType::Int64, rows, None, &info)?;
    let bytes = parts.create(bytes).await?;
    parts.add(info.rows, &bytes);
    Ok(())
}

fn manifest(spec: &Spec, (date, at): (Date, Timestamp), users: u64, parts: Vec<PartEntry>) -> Manifest {
    let details = Profiles {
        spec: spec.clone(),
        spec_digest: spec.digest(),
        pool_digest: Digest::of(b""),
        entities: users,
        carried: 0,
        errors: 0,
        value: None,
        figures: BTreeMap::new(),
        audit: BTreeMap::new(),
        guards: None,
        cost: None,
        embedding: None,
        canary: None,
    };
    Manifest::new("last", (Kind::User, date), at, parts, details)
}

fn user_schema() -> SchemaRef {
    let title = Field::new("title", DataType::Utf8, false);
    let rating = Field::new("rating", DataType::Int64, false);
    let film = Field::new("item", DataType::Struct(vec![title, rating].into()), false);
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("age", DataType::Int64, false),
        Field::new("genre", DataType::Utf8, false),
        Field::new("interactions", DataType::Int64, false),
        Field::new("history", DataType::List(Arc::new(film)), false),
    ]))
}

fn embedding_schema() -> SchemaRef {
    let value = Field::new("item", DataType::Float32, false);
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("embedding", DataType::List(Arc::new(value)), false),
    ]))
}

/// A Parquet file that grows by rows.
struct TableWriter {
    schema: SchemaRef,
    writer: ArrowWriter<File>,
}

impl TableWriter {
    fn new(path: PathBuf, schema: SchemaRef) -> Result<Self> {
        let parent = path.parent().unwrap_or(&path);
        std::fs::create_dir_all(parent).with_context(|| format!("{}: cannot be made", parent.display()))?;
        let file = File::create(&path).with_context(|| format!("{}: not writable", path.display()))?;
        let properties =
            parquet::file::properties::WriterProperties::builder().set_max_row_group_row_count(Some(64 * 1024)).build();
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties))?;
        Ok(Self { schema, writer })
    }

    fn write(&mut self, rows: &[Value]) -> Result<()> {
        let batch = to_batch(&self.schema, rows).map_err(anyhow::Error::msg)?;
        Ok(self.writer.write(&batch)?)
    }

    fn finish(self) -> Result<()> {
        self.writer.close()?;
        Ok(())
    }
}
