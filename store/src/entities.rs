//! Reading entity tables, from Parquet, CSV or JSONL.
//!
//! Rows are read in batches, so memory does not grow with the table (a CSV or JSONL *object* of a remote store is first
//! copied to the local disk). Each row is checked on its own; that ids are unique is checked where all of them come
//! together, in [`join`](crate::join).

use std::sync::Arc;

use laser_schema::history::TIMESTAMP;
use laser_schema::{Columns, Digest, Entity, EntityTable, History, Kind};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::histories::{Histories, in_order};
use crate::location::{Location, LocationError};
use crate::parallel;
use crate::rows::{NumberedRow, RowError, RowReader, ValueError, id_value};
use crate::table::{Select, is_list};

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
    pub async fn open(table: &EntityTable) -> Result<Self, RowError> {
        Self::open_columns(table, Select::All).await
    }

    /// Opens the table for the ids and kinds alone; of Parquet nothing else is read.
    pub async fn open_ids(table: &EntityTable) -> Result<Self, RowError> {
        let columns = [table.columns.id.as_str(), table.columns.kind.as_str()];
        Self::open_columns(table, Select::Only(&columns)).await
    }

    /// Opens the table for all but what histories tell: of Parquet they are counted for [`Entity::interactions`], and
    /// [`Entity::history`] is empty.
    pub async fn open_counting(table: &EntityTable) -> Result<Self, RowError> {
        let history = &table.columns.history;
        let mut reader = Self::open_columns(table, Select::Counting(history)).await?;
        let schema = reader.rows.schema();
        let field = schema.and_then(|schema| schema.field_with_name(history).ok());
        reader.counts = field.is_some_and(|field| is_list(field.data_type()));
        Ok(reader)
    }

    async fn open_columns(table: &EntityTable, columns: Select<'_>) -> Result<Self, RowError> {
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
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Entity>>, RowError> {
        let (table, counts) = (&self.table, self.counts);
        let columns = &table.columns;
        let Some((rows, lists)) = self.rows.next_apart(Some(&columns.history)).await? else {
            return Ok(None);
        };
        let histories = lists.and_then(|lists| Histories::of_column(&lists, &columns.timestamp));
        let history = |at, row: &mut Map<String, Value>| match &histories {
            Some(histories) => histories.of_row(at).map_err(|found| wrong_history(found, columns)),
            None if counts => Ok(History::default()),
            None => to_history(row.remove(&columns.history), columns),
        };
        let entity = |(at, (number, mut row)): (usize, NumberedRow)| {
            let entity = history(at, &mut row).and_then(|history| to_entity(row, history, table));
            entity.map_err(|reason| (number, reason))
        };
        let entities = parallel::try_collect(rows.into_par_iter().enumerate().map(entity));
        entities.map(Some).map_err(|(row, reason)| self.rows.error(row, reason))
    }
}

/// Digests that change whenever their tables do, see [`Location::fingerprint`].
///
/// # Errors
/// A table that is not there, or the store's error.
pub async fn fingerprints(tables: &[EntityTable]) -> Result<Vec<Digest>, LocationError> {
    let mut found = Vec::with_capacity(tables.len());
    for table in tables {
        found.push(Location::parse(&table.path)?.fingerprint().await?);
    }
    Ok(found)
}

/// Reads the entities of tables, in their order.
#[derive(Debug)]
pub struct TablesReader {
    tables: Arc<[EntityTable]>,
    /// Whether histories come as their lengths, see [`EntityReader::open_counting`].
    counting: bool,
    table: usize,
    reader: Option<EntityReader>,
}

impl TablesReader {
    /// A reader of whole entities.
    pub fn new(tables: impl Into<Arc<[EntityTable]>>) -> Self {
        Self { tables: tables.into(), counting: false, table: 0, reader: None }
    }

    /// A reader of all but what histories tell, see [`EntityReader::open_counting`].
    pub fn counting(tables: impl Into<Arc<[EntityTable]>>) -> Self {
        Self { counting: true, ..Self::new(tables) }
    }

    /// The table of the batch that came last.
    pub fn table(&self) -> &str {
        let last = self.tables.len().saturating_sub(1);
        self.tables.get(self.table.min(last)).map_or("", |table| &table.path)
    }

    /// The next entities, or `None` at the end.
    ///
    /// # Errors
    /// The first row that is wrong.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Entity>>, RowError> {
        while let Some(table) = self.tables.get(self.table) {
            let reader = match &mut self.reader {
                Some(reader) => reader,
                none => none.insert(match self.counting {
                    true => EntityReader::open_counting(table).await?,
                    false => EntityReader::open(table).await?,
                }),
            };
            if let Some(entities) = reader.next_batch().await? {
                return Ok(Some(entities));
            }
            self.reader = None;
            self.table += 1;
        }
        Ok(None)
    }
}

fn check_columns(table: &EntityTable, names: &[String]) -> Result<(), RowError> {
    let columns = &table.columns;
    let needed = [(&columns.id, "id", true), (&columns.kind, "kind", table.kind.is_none())];
    for (column, key, needed) in needed {
        if needed && !names.contains(column) {
            return Err(RowError::MissingColumn {
                file: table.path.clone(),
                column: column.clone(),
                section: "input.columns",
                key,
                available: names.join(", "),
            });
        }
    }
    Ok(())
}

/// A wrong column type is told once for the file, not for its first row.
fn check_types(table: &EntityTable, schema: &arrow::datatypes::Schema) -> Result<(), RowError> {
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
    Err(RowError::File {
        file: table.path.clone(),
        reason: format!(
            "column {:?} is {}; a history must be a list of structs, a list of titles or JSON text",
            table.columns.history,
            field.data_type()
        ),
    })
}

fn to_entity(mut row: Map<String, Value>, history: History, table: &EntityTable) -> Result<Entity, ValueError> {
    let columns = &table.columns;
    let id = id_value(row.remove(&columns.id), &columns.id, "entity")?.into_type(columns.id_type)?;
    let kind = to_kind(row.remove(&columns.kind), table)?;
    // What is left of a history here is its length.
    let counted = row.remove(&columns.history).and_then(|length| length.as_u64()).unwrap_or(0);
    let length = counted.max(history.len() as u64);
    let interactions = to_count(row.remove(&columns.interactions), columns)?;
    let embedding = parse_embedding(row.remove(&columns.embedding), &columns.embedding)?;
    let mut attributes = to_attributes(row.remove(&columns.attributes), columns)?;
    attributes.extend(row.into_iter().filter(|(_, value)| !value.is_null()));
    attributes.sort_keys();
    Ok(Entity { id, kind, interactions: interactions.unwrap_or(0).max(length), attributes, history, embedding })
}

fn to_kind(value: Option<Value>, table: &EntityTable) -> Result<Kind, ValueError> {
    let wrong = |found| ValueError::new(&table.columns.kind, found, "expected user or item");
    match value.unwrap_or_default() {
        Value::Null => table.kind.ok_or_else(|| wrong("is empty".to_owned())),
        found => serde_json::from_value(found.clone()).map_err(|_| wrong(format!("is {found}"))),
    }
}

/// Reads a cell that holds JSON text (CSV, or a string column) as what the text says; a missing one is null.
fn parse_json_text(value: Option<Value>) -> Result<Value, String> {
    match value.unwrap_or_default() {
        Value::String(text) => serde_json::from_str(&text).map_err(|e| format!("text that is not JSON ({e})")),
        value => Ok(value),
    }
}

fn wrong_history(found: String, columns: &Columns) -> ValueError {
    ValueError::new(&columns.history, format!("holds {found}"), "a history is a list of objects or of titles")
}

fn to_history(value: Option<Value>, columns: &Columns) -> Result<History, ValueError> {
    let wrong = |found: String| wrong_history(found, columns);
    let elements = match parse_json_text(value).map_err(wrong)? {
        Value::Null => return Ok(History::default()),
        Value::Array(elements) => elements,
        other => return Err(wrong(other.to_string())),
    };
    let fields = elements.into_iter().map(|element| to_fields(element, columns).map_err(wrong));
    let fields: Vec<Map<String, Value>> = fields.collect::<Result<_, _>>()?;
    let all = 0..fields.len();
    in_order(Arc::new(fields), all).map_err(wrong)
}

fn to_fields(element: Value, columns: &Columns) -> Result<Map<String, Value>, String> {
    let mut fields = match element {
        Value::Object(fields) => fields,
        Value::String(title) => return Ok(Map::from_iter([("title".to_owned(), Value::String(title))])),
        other => return Err(format!("the element {other}")),
    };
    if columns.timestamp != TIMESTAMP
        && let Some(timestamp) = fields.remove(&columns.timestamp).filter(|timestamp| !timestamp.is_null())
    {
        fields.insert(TIMESTAMP.to_owned(), timestamp);
    }
    Ok(fields)
}

fn to_count(value: Option<Value>, columns: &Columns) -> Result<Option<u64>, ValueError> {
    let value = value.unwrap_or_default();
    let count = match &value {
        Value::Null => return Ok(None),
        Value::String(text) => text.parse().ok(),
        value => value.as_u64(),
    };
    let expected = "a number of interactions is an integer from 0";
    count.map(Some).ok_or_else(|| ValueError::new(&columns.interactions, format!("is {value}"), expected))
}

/// Returns the embedding in `column`: a list, or JSON text of one.
pub(crate) fn parse_embedding(value: Option<Value>, column: &str) -> Result<Option<Vec<f32>>, ValueError> {
    let expected = "an embedding is a list of finite floats";
    let wrong = |found: String| ValueError::new(column, format!("holds {found}"), expected);
    let values = match parse_json_text(value).map_err(wrong)? {
        Value::Null => return Ok(None),
        Value::Array(values) => values,
        other => return Err(wrong(other.to_string())),
    };
    let mut embedding = Vec::with_capacity(values.len());
    for (position, value) in values.iter().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
        let number = value.as_f64().map(|v| v as f32).filter(|v| v.is_finite());
        embedding.push(number.ok_or_else(|| wrong(format!("NaN or {value} at position {position}")))?);
    }
    Ok(Some(embedding))
}

fn to_attributes(value: Option<Value>, columns: &Columns) -> Result<Map<String, Value>, ValueError> {
    let expected = "attributes are a struct or a JSON object";
    let wrong = |found: String| ValueError::new(&columns.attributes, format!("holds {found}"), expected);
    match parse_json_text(value).map_err(wrong)? {
        Value::Null => Ok(Map::new()),
        Value::Object(fields) => Ok(fields.into_iter().filter(|(_, v)| !v.is_null()).collect()),
        other => Err(wrong(other.to_string())),
    }
}
