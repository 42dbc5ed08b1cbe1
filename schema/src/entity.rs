//! The input contract: a table of users and items, from Parquet, CSV or JSONL.
//!
//! One row is one entity: an id, a kind, attributes, a history of interactions, how many
//! interactions there are, and optionally an embedding. Column names are mapped by [`Columns`]; every
//! column that is not mapped is an attribute. Rows are read in batches, so memory does not grow with the
//! table (a CSV or JSONL *object* of a remote store is first copied to the local disk). Each row is checked on its own;
//! that ids are unique is checked where all of them come together, in [`join`](crate::join).

use std::fmt;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::location::LocationError;
use crate::rows::RowReader;
use crate::table::{Select, TableError, is_list};

/// Whether an entity is a user or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Somebody who interacts.
    User,
    /// Something that is interacted with.
    Item,
}

impl Kind {
    /// Both kinds, users first.
    pub const ALL: [Self; 2] = [Self::User, Self::Item];

    /// `user` or `item`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Item => "item",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An entity's id, kept in the type that the input has, since feature stores join on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EntityId {
    /// A 64-bit integer.
    Int(i64),
    /// Text.
    Text(String),
}

impl EntityId {
    /// The id in the type asked for, or as it is.
    ///
    /// # Errors
    /// If it is text that is no integer.
    pub fn into_type(self, id_type: Option<IdType>) -> Result<Self, String> {
        match (id_type, self) {
            (Some(IdType::String), Self::Int(id)) => Ok(Self::Text(id.to_string())),
            (Some(IdType::Int64), Self::Text(id)) => {
                id.parse().map(Self::Int).map_err(|_| format!("id {id:?} is not an int64, which id_type asks for"))
            }
            (_, id) => Ok(id),
        }
    }

    /// The type it has.
    pub fn id_type(&self) -> IdType {
        match self {
            Self::Int(_) => IdType::Int64,
            Self::Text(_) => IdType::String,
        }
    }
}

impl fmt::Display for EntityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(id) => write!(f, "{id}"),
            Self::Text(id) => f.write_str(id),
        }
    }
}

/// One interaction of a history: named fields (title, genres, …) with the two that Laser itself reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Interaction {
    /// Everything the input says about it, for prompt templates.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Interaction {
    /// Seconds or any other unit that orders interactions, if the input has a timestamp.
    pub fn timestamp(&self) -> Option<f64> {
        match self.fields.get("timestamp")? {
            Value::Number(n) => n.as_f64(),
            Value::String(s) => seconds(s),
            _ => None,
        }
    }
}

/// ISO 8601 text in seconds, in UTC where it names no zone; or a number as text, as CSV has it.
pub(crate) fn seconds(text: &str) -> Option<f64> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    let zoned = || text.parse::<jiff::Timestamp>().ok();
    let civil = || {
        let civil: jiff::civil::DateTime = text.parse().ok()?;
        Some(civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    number.or_else(|| Some(zoned().or_else(civil)?.as_microsecond() as f64 / 1e6))
}

/// A user or an item as the input describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entity {
    /// Unique within its kind.
    pub id: EntityId,
    /// User or item.
    pub kind: Kind,
    /// Named values: strings, numbers, booleans or lists of them.
    pub attributes: Map<String, Value>,
    /// Oldest first.
    pub history: Vec<Interaction>,
    /// How many interactions there are in all; at least the history's length.
    pub interactions: u64,
    /// A dense vector without NaN, if the table has one.
    pub embedding: Option<Vec<f32>>,
}

/// The type that ids are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdType {
    /// A 64-bit integer.
    Int64,
    /// Text.
    String,
}

impl fmt::Display for IdType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int64 => "int64",
            Self::String => "string",
        })
    }
}

/// The names of the input's columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Columns {
    /// Entity id: string or int64.
    pub id: String,
    /// The type ids are kept in; as stored if not given (CSV stores text).
    pub id_type: Option<IdType>,
    /// `user` or `item`; not needed where the table's kind is configured.
    pub kind: String,
    /// A struct, map or JSON object of attributes; other unmapped columns are attributes too.
    pub attributes: String,
    /// A list of structs (or of titles), or in CSV a JSON array of objects (or of strings).
    pub history: String,
    /// How many interactions the entity has; the history's length if not given.
    pub interactions: String,
    /// A list of floats.
    pub embedding: String,
    /// The field of a history element that orders it.
    pub timestamp: String,
}

impl Default for Columns {
    fn default() -> Self {
        Self {
            id: "id".into(),
            id_type: None,
            kind: "kind".into(),
            attributes: "attributes".into(),
            history: "history".into(),
            interactions: "interactions".into(),
            embedding: "embedding".into(),
            timestamp: "timestamp".into(),
        }
    }
}

/// One table of the input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntityTable {
    /// A local path or object-store URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    pub path: String,
    /// The kind of all rows, for a table without a kind column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// The table's column names, where they differ from the contract's.
    #[serde(default)]
    pub columns: Columns,
}

/// Why an entity table could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EntityError {
    /// The place itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A Parquet table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The name has no known extension.
    #[error("{file}: the format is told by the extension: expected .parquet, .csv, .jsonl or .ndjson")]
    Format {
        /// The table.
        file: String,
    },
    /// The file as a whole is not readable in its format.
    #[error("{file}: cannot be read: {reason}")]
    File {
        /// The table.
        file: String,
        /// What the reader said.
        reason: String,
    },
    /// A column that is needed is not there.
    #[error("{file}: no column {column:?}; it has {available}. Set [input.columns] {key} to the right name")]
    MissingColumn {
        /// The table.
        file: String,
        /// The column looked for.
        column: String,
        /// The configuration key that names it.
        key: &'static str,
        /// The columns there are.
        available: String,
    },
    /// One row is wrong.
    #[error("{file}, row {row}: {reason}")]
    Row {
        /// The table.
        file: String,
        /// Counted from 1, without a header line.
        row: u64,
        /// What is wrong and what was expected.
        reason: String,
    },
}

/// Reads one table in batches of entities, checking each row.
#[derive(Debug)]
pub struct EntityReader {
    table: EntityTable,
    rows: RowReader,
    /// Whether histories come as their lengths.
    counts: bool,
}

impl EntityReader {
    /// Opens the table and checks that its columns are there and of the right type.
    ///
    /// # Errors
    /// See [`EntityError`].
    pub async fn open(table: &EntityTable) -> Result<Self, EntityError> {
        Self::open_columns(table, Select::All).await
    }

    /// Opens the table for the ids and kinds alone; of Parquet nothing else is read.
    ///
    /// # Errors
    /// See [`EntityError`].
    pub async fn open_ids(table: &EntityTable) -> Result<Self, EntityError> {
        let columns = [table.columns.id.as_str(), table.columns.kind.as_str()];
        Self::open_columns(table, Select::Only(&columns)).await
    }

    /// Opens the table for all but what histories tell: of Parquet they are counted for [`Entity::interactions`], and
    /// [`Entity::history`] is empty.
    ///
    /// # Errors
    /// See [`EntityError`].
    pub async fn open_counting(table: &EntityTable) -> Result<Self, EntityError> {
        let history = &table.columns.history;
        let mut reader = Self::open_columns(table, Select::Counting(history)).await?;
        let schema = reader.rows.schema();
        let field = schema.and_then(|schema| schema.field_with_name(history).ok());
        reader.counts = field.is_some_and(|field| is_list(field.data_type()));
        Ok(reader)
    }

    /// Opens the table for ids, kinds and embeddings; of Parquet nothing else is read.
    ///
    /// # Errors
    /// See [`EntityError`].
    pub async fn open_embeddings(table: &EntityTable) -> Result<Self, EntityError> {
        let names = &table.columns;
        let columns = [&names.id, &names.kind, &names.embedding].map(String::as_str);
        Self::open_columns(table, Select::Only(&columns)).await
    }

    async fn open_columns(table: &EntityTable, columns: Select<'_>) -> Result<Self, EntityError> {
        let mut rows = RowReader::open(&table.path, columns).await?;
        if let Some(names) = rows.columns()? {
            check_columns(table, &names)?;
        }
        if let Some(schema) = rows.schema() {
            check_types(table, schema)?;
        }
        Ok(Self { table: table.clone(), rows, counts: false })
    }

    /// The next entities, or `None` at the end.
    ///
    /// # Errors
    /// The first row that is wrong.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Entity>>, EntityError> {
        let Some(rows) = self.rows.next_batch().await? else {
            return Ok(None);
        };
        let (table, counts) = (&self.table, self.counts);
        let entity = |(row, values)| (row, to_entity(values, table, counts));
        let entities: Vec<_> = rows.into_par_iter().map(entity).collect();
        let entities = entities.into_iter();
        let told = |(row, entity): (u64, Result<_, _>)| entity.map_err(|r| self.rows.error(row, r));
        entities.map(told).collect::<Result<_, _>>().map(Some)
    }
}

fn check_columns(table: &EntityTable, names: &[String]) -> Result<(), EntityError> {
    let columns = &table.columns;
    let needed = [(&columns.id, "id", true), (&columns.kind, "kind", table.kind.is_none())];
    for (column, key, needed) in needed {
        if needed && !names.contains(column) {
            return Err(EntityError::MissingColumn {
                file: table.path.clone(),
                column: column.clone(),
                key,
                available: names.join(", "),
            });
        }
    }
    Ok(())
}

/// A wrong column type is told once for the file, not for its first row.
fn check_types(table: &EntityTable, schema: &arrow::datatypes::Schema) -> Result<(), EntityError> {
    use arrow::datatypes::DataType as T;
    let Ok(field) = schema.field_with_name(&table.columns.history) else {
        return Ok(());
    };
    let element_ok = |t: &T| matches!(t, T::Struct(_) | T::Utf8 | T::LargeUtf8 | T::Utf8View);
    let ok = match field.data_type() {
        T::List(e) | T::LargeList(e) => element_ok(e.data_type()),
        T::Utf8 | T::LargeUtf8 | T::Utf8View => true,
        _ => false,
    };
    if ok {
        return Ok(());
    }
    Err(EntityError::File {
        file: table.path.clone(),
        reason: format!(
            "column {:?} is {}; a history must be a list of structs, a list of titles or JSON text",
            table.columns.history,
            field.data_type()
        ),
    })
}

fn to_entity(mut row: Map<String, Value>, table: &EntityTable, counts: bool) -> Result<Entity, String> {
    let columns = &table.columns;
    let id = to_id(row.remove(&columns.id), columns)?;
    let kind = to_kind(row.remove(&columns.kind), table)?;
    let history = row.remove(&columns.history);
    let (history, length) = if counts {
        (Vec::new(), history.and_then(|length| length.as_u64()).unwrap_or(0))
    } else {
        let history = to_history(history, columns)?;
        let length = history.len() as u64;
        (history, length)
    };
    let interactions = to_count(row.remove(&columns.interactions), columns)?;
    let embedding = to_embedding(row.remove(&columns.embedding), columns)?;
    let mut attributes = to_attributes(row.remove(&columns.attributes), columns)?;
    attributes.extend(row.into_iter().filter(|(_, value)| !value.is_null()));
    attributes.sort_keys();
    Ok(Entity { id, kind, interactions: interactions.unwrap_or(0).max(length), attributes, history, embedding })
}

fn to_id(value: Option<Value>, columns: &Columns) -> Result<EntityId, String> {
    id_value(value, &columns.id, "entity")?.into_type(columns.id_type)
}

/// The id in `column` of a row of what is called `whose`.
pub(crate) fn id_value(value: Option<Value>, column: &str, whose: &str) -> Result<EntityId, String> {
    match value {
        Some(Value::Number(n)) if n.is_i64() => Ok(EntityId::Int(n.as_i64().unwrap_or_default())),
        Some(Value::String(s)) if !s.is_empty() => Ok(EntityId::Text(s)),
        None | Some(Value::Null | Value::String(_)) => {
            Err(format!("column {column:?} is empty; every {whose} needs an id"))
        }
        Some(other) => Err(format!("column {column:?} holds {other}; an id is a string or int64")),
    }
}

fn to_kind(value: Option<Value>, table: &EntityTable) -> Result<Kind, String> {
    let kind = match value.unwrap_or_default() {
        Value::Null => None,
        Value::String(kind) if kind == "user" => Some(Kind::User),
        Value::String(kind) if kind == "item" => Some(Kind::Item),
        found => {
            return Err(format!("column {:?} is {found}; expected user or item", table.columns.kind));
        }
    };
    kind.or(table.kind).ok_or_else(|| format!("column {:?} is empty; expected user or item", table.columns.kind))
}

/// A cell that holds JSON text (CSV, or a string column) is read as what the text says.
fn parse_json_text(value: Value) -> Result<Value, String> {
    match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|e| format!("text that is not JSON ({e})")),
        value => Ok(value),
    }
}

fn to_history(value: Option<Value>, columns: &Columns) -> Result<Vec<Interaction>, String> {
    let wrong = |found: String| {
        format!("column {:?} holds {found}; a history is a list of objects or of titles", columns.history)
    };
    let elements = match value.map(parse_json_text).transpose().map_err(wrong)? {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(elements)) => elements,
        Some(other) => return Err(wrong(other.to_string())),
    };
    let mut history = Vec::with_capacity(elements.len());
    for element in elements {
        history.push(to_interaction(element, columns).map_err(wrong)?);
    }
    if history.iter().all(|i| i.timestamp().is_some()) {
        // Stable: what happened at the same time stays in the table's order.
        history.sort_by(|a, b| a.timestamp().partial_cmp(&b.timestamp()).unwrap_or(std::cmp::Ordering::Equal));
    }
    Ok(history)
}

fn to_interaction(element: Value, columns: &Columns) -> Result<Interaction, String> {
    let mut fields = match element {
        Value::Object(fields) => fields,
        Value::String(title) => Map::from_iter([("title".to_owned(), Value::String(title))]),
        other => return Err(format!("the element {other}")),
    };
    // Parquet has no value where JSON has null.
    fields.retain(|_, value| !value.is_null());
    if columns.timestamp != "timestamp"
        && let Some(timestamp) = fields.remove(&columns.timestamp)
    {
        fields.insert("timestamp".to_owned(), timestamp);
    }
    let interaction = Interaction { fields };
    match interaction.fields.get("timestamp") {
        Some(unreadable) if interaction.timestamp().is_none() => {
            Err(format!("the timestamp {unreadable}, which is neither a number nor ISO 8601"))
        }
        _ => Ok(interaction),
    }
}

fn to_count(value: Option<Value>, columns: &Columns) -> Result<Option<u64>, String> {
    let wrong = |found: &Value| {
        format!("column {:?} is {found}; a number of interactions is an integer from 0", columns.interactions)
    };
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => text.parse().map(Some).map_err(|_| wrong(&Value::String(text))),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| wrong(&value)),
    }
}

fn to_embedding(value: Option<Value>, columns: &Columns) -> Result<Option<Vec<f32>>, String> {
    let wrong = |found: String| {
        format!("column {:?} holds {found}; an embedding is a list of finite floats", columns.embedding)
    };
    let values = match value.map(parse_json_text).transpose().map_err(wrong)? {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(wrong(other.to_string())),
    };
    let mut embedding = Vec::with_capacity(values.len());
    for (position, value) in values.iter().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
        let number = value.as_f64().map(|v| v as f32).filter(|v| v.is_finite());
        embedding.push(number.ok_or_else(|| wrong(format!("NaN or {value} at position {position}")))?);
    }
    Ok(Some(embedding))
}

fn to_attributes(value: Option<Value>, columns: &Columns) -> Result<Map<String, Value>, String> {
    let wrong = |found: String| {
        format!("column {:?} holds {found}; attributes are a struct or a JSON object", columns.attributes)
    };
    match value.map(parse_json_text).transpose().map_err(wrong)? {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(fields)) => Ok(fields.into_iter().filter(|(_, v)| !v.is_null()).collect()),
        Some(other) => Err(wrong(other.to_string())),
    }
}
