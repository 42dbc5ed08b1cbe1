//! Rows of any table as JSON objects, from Parquet, CSV or JSONL, local or by URL.
//!
//! Rows are read in batches, so memory does not grow with the table (a CSV or JSONL *object* of a remote store is
//! first copied to the local disk).

use std::fmt;
use std::io::{BufRead, BufReader};

use arrow::array::ArrayRef;
use arrow::datatypes::Schema;
use laser_schema::EntityId;
use laser_schema::entity::IdTypeError;
use serde_json::{Map, Value};

use crate::location::{Location, LocationError};
use crate::table::{Select, TableError, TableReader};

/// Why a table's rows could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
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
        /// The reader's message.
        reason: String,
    },
    /// A column that is needed is not there.
    #[error("{file}: no column {column:?}; it has {available}. Set [{section}] {key} to the right name")]
    MissingColumn {
        /// The table.
        file: String,
        /// The column looked for.
        column: String,
        /// The section of the configuration that names it.
        section: &'static str,
        /// The key there.
        key: &'static str,
        /// The columns there are.
        available: String,
    },
    /// A table of interactions without a row.
    #[error("{file}: no interactions")]
    Empty {
        /// The table.
        file: String,
    },
    /// One row is wrong.
    #[error("{file}, row {row}: {reason}")]
    Row {
        /// The table.
        file: String,
        /// Counted from 1, without a header line.
        row: u64,
        /// The fault and what was expected.
        reason: String,
    },
}

/// Why a row is wrong; [`RowReader::error`] adds file and row.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ValueError {
    /// A value is missing or makes no sense.
    #[error("column {column:?} {found}; {expected}")]
    Column { column: String, found: String, expected: String },
    /// An id is of another type than configured.
    #[error(transparent)]
    IdType(#[from] IdTypeError),
    /// Ids are numbered by `u32`.
    #[error("more different ids than {}", u32::MAX)]
    TooManyIds,
}

impl ValueError {
    /// Says what a column `is` or `holds`, and what it is meant for.
    pub(crate) fn new(column: &str, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Column { column: column.to_owned(), found: found.into(), expected: expected.into() }
    }
}

/// Returns the id in `column` of an entity, embedding or whatever `whose` says.
pub(crate) fn id_value(value: Option<Value>, column: &str, whose: &str) -> Result<EntityId, ValueError> {
    match value.unwrap_or_default() {
        Value::Number(n) if n.is_i64() => Ok(EntityId::Int(n.as_i64().unwrap_or_default())),
        Value::String(s) if !s.is_empty() => Ok(EntityId::Text(s)),
        Value::Null | Value::String(_) => {
            Err(ValueError::new(column, "is empty", format!("every {whose} needs an id")))
        }
        other => Err(ValueError::new(column, format!("holds {other}"), "an id is a string or int64")),
    }
}

/// Returns the ids of items in `column`; none in an empty cell. CSV holds JSON. Otherwise the error says what is
/// `expected`.
pub(crate) fn id_list(value: Option<Value>, column: &str, expected: &'static str) -> Result<Vec<EntityId>, ValueError> {
    let wrong = |found: String| ValueError::new(column, found, expected);
    let list = match value.unwrap_or_default() {
        Value::Null => Vec::new(),
        Value::Array(list) => list,
        Value::String(text) => serde_json::from_str(&text).map_err(|_| wrong(format!("holds {text:?}")))?,
        other => return Err(wrong(format!("holds {other}"))),
    };
    list.into_iter().map(|id| id_value(Some(id), column, "item")).collect()
}

/// Rows of a batch: small enough that a batch of long histories stays in the tens of megabytes.
const BATCH_ROWS: usize = 1024;

type Text = Box<dyn BufRead + Send>;

enum Rows {
    Parquet(Box<TableReader>),
    Csv(Box<csv::Reader<Text>>),
    Lines(std::io::Lines<Text>),
}

/// Reads one table in batches of rows.
pub struct RowReader {
    file: String,
    rows: Rows,
    row: u64,
}

impl fmt::Debug for RowReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowReader").field("file", &self.file).field("row", &self.row).finish_non_exhaustive()
    }
}

/// A row by column, with its number from 1 (without a header line).
pub type NumberedRow = (u64, Map<String, Value>);

/// Rows, and a column of theirs that comes as it is stored.
pub(crate) type RowsApart = (Vec<NumberedRow>, Option<ArrayRef>);

impl RowReader {
    /// Opens the table at a path or URL; of Parquet only `columns` are read.
    ///
    /// # Errors
    /// [`RowError::Format`], or that it is not there or not readable.
    pub async fn open(path: &str, columns: Select<'_>) -> Result<Self, RowError> {
        let location = Location::parse(path)?;
        let rows = match location.extension().as_str() {
            "parquet" => {
                if !location.exists().await? {
                    return Err(LocationError::NotFound { url: path.to_owned() }.into());
                }
                Rows::Parquet(Box::new(TableReader::open_columns(&location, columns).await?))
            }
            "csv" => {
                let text = open_text(&location).await?;
                Rows::Csv(Box::new(csv::ReaderBuilder::new().from_reader(text)))
            }
            "jsonl" | "ndjson" => Rows::Lines(open_text(&location).await?.lines()),
            _ => {
                return Err(RowError::Format { file: path.to_owned() });
            }
        };
        Ok(Self { file: path.to_owned(), rows, row: 0 })
    }

    /// The names of the columns, read or not; JSONL has none for all rows.
    ///
    /// # Errors
    /// If a CSV's header cannot be read.
    pub fn columns(&mut self) -> Result<Option<Vec<String>>, RowError> {
        match &mut self.rows {
            Rows::Parquet(reader) => {
                let fields = reader.schema().fields().iter();
                Ok(Some(fields.map(|field| field.name().clone()).collect()))
            }
            Rows::Csv(reader) => {
                let header =
                    reader.headers().map_err(|e| RowError::File { file: self.file.clone(), reason: e.to_string() })?;
                Ok(Some(header.iter().map(str::to_owned).collect()))
            }
            Rows::Lines(_) => Ok(None),
        }
    }

    /// The types of the columns, of Parquet.
    pub fn schema(&self) -> Option<&Schema> {
        match &self.rows {
            Rows::Parquet(reader) => Some(reader.schema()),
            Rows::Csv(_) | Rows::Lines(_) => None,
        }
    }

    /// The next rows, or `None` at the end. An empty cell of a CSV is no value.
    ///
    /// # Errors
    /// The first row that cannot be read.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<NumberedRow>>, RowError> {
        Ok(self.next_apart(None).await?.map(|(rows, _)| rows))
    }

    /// The next rows as [`Self::next_batch`] returns them. If `apart` is a column of lists in a Parquet table, it comes
    /// as it is stored, and rows do not have it.
    ///
    /// # Errors
    /// The first row that cannot be read.
    pub(crate) async fn next_apart(&mut self, apart: Option<&str>) -> Result<Option<RowsApart>, RowError> {
        let alone = |rows: Option<_>| rows.map(|rows| (rows, None));
        let rows = match &mut self.rows {
            Rows::Parquet(reader) => reader.next_objects(apart).await.map_err(|e| (1, e.to_string())),
            Rows::Csv(reader) => next_csv(reader).map(alone),
            Rows::Lines(lines) => next_lines(lines).map(alone),
        };
        let rows = rows.map_err(|(offset, reason)| self.error(self.row + offset, reason))?;
        Ok(rows.map(|(rows, lists)| {
            let first = self.row + 1;
            self.row += rows.len() as u64;
            ((first..).zip(rows).collect(), lists)
        }))
    }

    /// Returns the error of a row of this table.
    pub fn error(&self, row: u64, reason: impl ToString) -> RowError {
        RowError::Row { file: self.file.clone(), row, reason: reason.to_string() }
    }
}

async fn open_text(location: &Location) -> Result<Text, RowError> {
    let file = location.open().await?;
    Ok(Box::new(BufReader::with_capacity(1 << 20, file)))
}

/// Some rows; or which one of them, from 1, is wrong and how.
type RowsResult = Result<Option<Vec<Map<String, Value>>>, (u64, String)>;

fn next_csv(reader: &mut csv::Reader<Text>) -> RowsResult {
    let header = reader.headers().map_err(|e| (1, e.to_string()))?.clone();
    let mut rows = Vec::new();
    for (record, offset) in reader.records().take(BATCH_ROWS).zip(1..) {
        let record = record.map_err(|e| (offset, e.to_string()))?;
        let cells = header.iter().zip(record.iter()).filter(|(_, cell)| !cell.is_empty());
        rows.push(cells.map(|(name, cell)| (name.to_owned(), Value::from(cell))).collect());
    }
    Ok(if rows.is_empty() { None } else { Some(rows) })
}

fn next_lines(lines: &mut std::io::Lines<Text>) -> RowsResult {
    let mut rows = Vec::new();
    for (line, offset) in lines.take(BATCH_ROWS).zip(1..) {
        let line = line.map_err(|e| (offset, e.to_string()))?;
        let row = serde_json::from_str(&line).map_err(|e| (offset, format!("not a JSON object: {e}")))?;
        rows.push(row);
    }
    Ok(if rows.is_empty() { None } else { Some(rows) })
}
