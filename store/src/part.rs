//! Parts of knowledge, texts or lists: the commit of a shard, its columns and footer. `docs/output.md` lists the
//! columns.

use std::iter;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use laser_schema::embedding::{EmbeddingInfo, Embeddings};
use laser_schema::entity::IdType;
use laser_schema::knowledge::{Content, KnowledgeRecord, PartInfo, SCHEMA_VERSION};
use laser_schema::lists::ListRows;
use laser_schema::parsed::ParsedField;
use laser_schema::{Digest, EntityId};

use crate::embedding_column;
use crate::lists;
use crate::parsed_column;
use crate::sealed::{self, SealedTable};
use crate::table::{self, TableError};

/// The footer key of a part's [`PartInfo`].
pub const PART_KEY: &str = "laser.part";

/// The columns of records with ids of a type and this content, a row each. Only runners-up may be null.
pub fn record_schema(id: DataType, content: Content) -> SchemaRef {
    match content {
        Content::Texts { has_samples, has_runners_up } => {
            let samples = has_samples.then(|| Field::new("samples", list_of(DataType::Utf8), false));
            let runners_up = has_runners_up.then(|| Field::new("runners_up", list_of(runner_up()), true));
            schema(text_columns(id), samples.into_iter().chain(runners_up))
        }
        Content::Lists { items, .. } => {
            let lists = [("items", list_of(table::id_type(items))), ("scores", list_of(DataType::Float64))];
            schema(list_columns(id, lists), [])
        }
    }
}

/// The columns of a part: those of its records, but for lists that have [a row for each item](ListRows::Item).
pub fn part_schema(id: DataType, content: Content) -> SchemaRef {
    match content {
        Content::Lists { items, rows: ListRows::Item } => {
            let [item, score] = [("item_id", table::id_type(items)), ("score", DataType::Float64)];
            schema(list_columns(id, [("rank", DataType::Int64), item, score]), [])
        }
        content => record_schema(id, content),
    }
}

fn schema(columns: Vec<Column>, others: impl IntoIterator<Item = Field>) -> SchemaRef {
    let columns = columns.into_iter().map(|(name, data_type)| Field::new(name, data_type, false));
    Arc::new(Schema::new(columns.chain(others).collect::<Vec<_>>()))
}

/// A token that was probable at a place of a text.
fn runner_up() -> DataType {
    let fields = [("place", DataType::Int64), ("token", DataType::Int64), ("probability", DataType::Float32)];
    DataType::Struct(fields.map(|(name, data_type)| Field::new(name, data_type, false)).to_vec().into())
}

type Column = (&'static str, DataType);

fn list_of(item: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("item", item, false)))
}

fn text_columns(id: DataType) -> Vec<Column> {
    vec![
        ("entity_id", id),
        ("text", DataType::Utf8),
        ("prompt_tokens", DataType::Int64),
        ("text_tokens", DataType::Int64),
        ("pool", DataType::Utf8),
        ("policy", DataType::Utf8),
        ("stop_reason", DataType::Utf8),
        ("forwards", DataType::Int64),
        ("drafted_tokens", DataType::Int64),
        ("accepted_tokens", DataType::Int64),
        ("relaxed_tokens", DataType::Int64),
        ("step_accepted", list_of(DataType::Int64)),
        ("mean_log_probability", DataType::Float64),
        ("draft_seconds", DataType::Float64),
        ("engine_seconds", DataType::Float64),
        ("prompt_digest", DataType::Utf8),
        ("spec_digest", DataType::Utf8),
        ("model_digest", DataType::Utf8),
        ("pool_digest", DataType::Utf8),
        ("generated_by", DataType::Utf8),
        ("event_timestamp", table::timestamp()),
        ("created_timestamp", table::timestamp()),
    ]
}

fn list_columns<const N: usize>(id: DataType, items: [Column; N]) -> Vec<Column> {
    let provenance = [
        ("prompt_tokens", DataType::Int64),
        ("policy", DataType::Utf8),
        ("forwards", DataType::Int64),
        ("drafted_tokens", DataType::Int64),
        ("accepted_tokens", DataType::Int64),
        ("step_accepted", list_of(DataType::Int64)),
        ("draft_seconds", DataType::Float64),
        ("engine_seconds", DataType::Float64),
        ("prompt_digest", DataType::Utf8),
        ("spec_digest", DataType::Utf8),
        ("model_digest", DataType::Utf8),
        ("generated_by", DataType::Utf8),
        ("event_timestamp", table::timestamp()),
        ("created_timestamp", table::timestamp()),
    ];
    iter::once(("entity_id", id)).chain(items).chain(provenance).collect()
}

/// Encodes a part of the rows' [`content`](PartInfo::content); with parsed texts if `info` names their fields, and with
/// embeddings if it says how they were made.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types, a text does not parse, not every row has an embedding, or a list is
/// none.
pub fn encode_part(
    name: &str,
    id: IdType,
    rows: &[KnowledgeRecord],
    embeddings: Option<&Embeddings>,
    info: &PartInfo,
) -> Result<Bytes, TableError> {
    let embedded = embeddings.zip(info.embedding.as_ref().map(|e| e.spec.layout));
    if info.lists.is_some()
        && let Some(reason) = rows.iter().find_map(lists::fault_of)
    {
        return Err(TableError::Row { file: name.to_owned(), reason });
    }
    let (schema, footer) = (part_schema(table::id_type(id), info.content()), (PART_KEY, info));
    if let Some(fields) = &info.parsed {
        let rows = parsed_column::rows(rows, fields);
        let rows = rows.map_err(|reason| TableError::Row { file: name.to_owned(), reason })?;
        return sealed::encode(name, parsed_column::append_to(&schema, fields), &rows, embedded, footer);
    }
    match info.list_rows {
        ListRows::User => sealed::encode(name, schema, rows, embedded, footer),
        ListRows::Item => sealed::encode(name, schema, &lists::by_item(rows), embedded, footer),
    }
}

/// Decodes a part, which must be as it was written.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are no part of Laser's or were changed.
pub fn decode_part(name: &str, bytes: Bytes) -> Result<(Vec<KnowledgeRecord>, PartInfo), TableError> {
    decode_embedded_part(name, bytes).map(|(rows, _, info)| (rows, info))
}

/// Reads a part as [`decode_part`] does, with the embeddings of its rows, if it has some.
///
/// # Errors
/// Those of [`decode_part`].
pub fn decode_embedded_part(
    name: &str,
    bytes: Bytes,
) -> Result<(Vec<KnowledgeRecord>, Option<Embeddings>, PartInfo), TableError> {
    let (table, info) = open_part(name, bytes)?;
    let (rows, embeddings) = match &info.embedding {
        _ if info.list_rows == ListRows::Item => (lists::by_user(table::decode(name, table.bytes())?), None),
        None => (table::decode(name, table.bytes())?, None),
        Some(embedding) => {
            let dimensions = embedding.spec.encoder.dimensions;
            let (rows, embeddings) = table::decode_embedded(name, table.bytes(), dimensions)?;
            (rows, Some(embeddings))
        }
    };
    Ok((rows, embeddings, info))
}

fn open_part(name: &str, bytes: Bytes) -> Result<(SealedTable, PartInfo), TableError> {
    let table = SealedTable::open(name, bytes)?;
    let info: PartInfo = table.footer(PART_KEY)?;
    match info.version {
        SCHEMA_VERSION => Ok((table, info)),
        version => Err(table.unreadable(format!("schema version {version}, this Laser reads {SCHEMA_VERSION}"))),
    }
}

/// All that publishing needs of a part.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedPart {
    /// Its footer.
    pub info: PartInfo,
    /// The ids of its entities.
    pub ids: Vec<EntityId>,
    /// The rows of the file.
    pub table_rows: u64,
    /// Its size.
    pub bytes: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// Checks every byte of a part, its columns, the number of its rows, and its lists if it has any. Of the rows only the
/// ids are decoded.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are not those that a worker wrote, [`TableError::Row`] if a list is none.
pub fn check_part(name: &str, id: IdType, bytes: Bytes) -> Result<CheckedPart, TableError> {
    let (size, digest) = (bytes.len() as u64, Digest::of(&bytes));
    let (table, info) = open_part(name, bytes)?;
    let further = (info.parsed.as_deref(), info.embedding.as_ref());
    let ids = part_ids(&table, table::id_type(id), info.content(), further)?;
    if ids.len() as u64 != info.rows {
        return Err(table.unreadable(format!("{} rows, its footer says {}", ids.len(), info.rows)));
    }
    if info.lists.is_some()
        && let Some(reason) = lists::faults(&table, info.list_rows, &ids)?.into_iter().next()
    {
        return Err(TableError::Row { file: name.to_owned(), reason });
    }
    Ok(CheckedPart { table_rows: table.rows(), info, ids, bytes: size, digest })
}

/// The ids of the entities of a part whose columns are those of the output.
pub(crate) fn part_ids(
    table: &SealedTable,
    id: DataType,
    content: Content,
    (parsed, embedding): (Option<&[ParsedField]>, Option<&EmbeddingInfo>),
) -> Result<Vec<EntityId>, TableError> {
    let schema = part_schema(id, content);
    let schema = parsed.map_or(schema.clone(), |fields| parsed_column::append_to(&schema, fields));
    let schema = match embedding.map(|e| &e.spec) {
        Some(spec) => embedding_column::append_to(spec.layout, &schema, spec.encoder.dimensions),
        None => schema,
    };
    table.check_columns(&schema)?;
    let mut ids = table.ids()?;
    if matches!(content, Content::Lists { rows: ListRows::Item, .. }) {
        ids.dedup();
    }
    Ok(ids)
}
