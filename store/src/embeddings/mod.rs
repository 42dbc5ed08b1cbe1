//! Embeddings of entities, from any source: tables (Parquet, CSV, JSONL), the parts of a published data set, or an
//! `.npy` matrix beside a list of ids.
//!
//! Every embedding is finite and all of a source have one dimension, or the source is refused. Memory is a thousand
//! rows.

mod npy;
mod table;

use laser_schema::embedding::{EMBEDDING_COLUMN, EmbeddingSource};
use laser_schema::entity::IdType;
use laser_schema::{EntityId, Kind};

use crate::data_set::{self, ManifestError};
use crate::entities::parse_embedding;
use crate::location::{Location, LocationError};
use crate::rows::{RowError, RowReader, id_value};
use crate::table::{Select, TableError};
use npy::NpyReader;
use table::ParquetEmbeddings;

/// Rows of a batch.
const BATCH_ROWS: usize = 1024;

/// Why embeddings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// The place itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The manifest of a published folder.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A Parquet file.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A table of another format, or one of its rows.
    #[error(transparent)]
    Rows(#[from] RowError),
    /// A folder that is none of a published data set.
    #[error(
        "{folder}: neither a table (.parquet, .csv, .jsonl) nor a published folder of embeddings (with a _SUCCESS), \
         such as OUTPUT/embeddings/kind=user/dt=DATE/run=RUN"
    )]
    NotPublished {
        /// The folder.
        folder: String,
    },
    /// A column that is needed is not there.
    #[error("{file}: no column {column}; it has {available}. An id and an embedding are needed")]
    Column {
        /// The table.
        file: String,
        /// The column looked for.
        column: String,
        /// The columns there are.
        available: String,
    },
    /// A column of a type that is not read.
    #[error("{file}: column {column:?} is {found}; expected {expected}")]
    Type {
        /// The table.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
        /// The types that are read.
        expected: &'static str,
    },
    /// One row is wrong.
    #[error("{file}, row {row}: {reason}")]
    Row {
        /// The table or matrix.
        file: String,
        /// Counted from 1; the rows of a matrix from 0, as numpy does, padding included.
        row: u64,
        /// The fault and what was expected.
        reason: String,
    },
    /// Not a matrix.
    #[error("{file}: expected an .npy file of float32 or float64 of shape [rows, dimension]: {reason}")]
    Npy {
        /// The file.
        file: String,
        /// The reader's own message.
        reason: String,
    },
    /// The list of ids cannot be read, or one of its lines is wrong.
    #[error("{file}, line {line}: {reason}")]
    Ids {
        /// The list.
        file: String,
        /// Counted from 1.
        line: u64,
        /// The fault and what was expected.
        reason: String,
    },
    /// The list of ids does not belong to the matrix.
    #[error(
        "{npy} has {rows} rows, {left} of them after skip_rows = {skip_rows}, but {ids} has {found} ids; \
         there must be one id for each row"
    )]
    Count {
        /// The matrix.
        npy: String,
        /// All its rows.
        rows: usize,
        /// The padding.
        skip_rows: usize,
        /// The rows without the padding.
        left: usize,
        /// The list.
        ids: String,
        /// How many ids it has.
        found: usize,
    },
}

/// Where embeddings are.
#[derive(Debug, Clone)]
pub enum EmbeddingFiles {
    /// Tables with the same columns, one after the other.
    Tables(Vec<Location>, EmbeddingColumns),
    /// A matrix and the ids of its rows.
    Npy(NpyFiles),
}

impl EmbeddingFiles {
    /// The files of a configured source. A folder stands for the parts of the data set that is published there.
    ///
    /// # Errors
    /// [`EmbeddingError::NotPublished`], or the store's.
    pub async fn find(source: &EmbeddingSource, kind: Kind) -> Result<Self, EmbeddingError> {
        let (table, id, embedding) = match source {
            EmbeddingSource::Npy { npy, ids, skip_rows } => {
                let (npy, ids) = (Location::parse(npy)?, Location::parse(ids)?);
                return Ok(Self::Npy(NpyFiles { npy, ids, skip_rows: *skip_rows, id_type: None }));
            }
            EmbeddingSource::Table { table, id, embedding } => (table, id, embedding),
        };
        let place = Location::parse(table)?;
        let tables = match place.extension().is_empty() {
            true => {
                data_set::parts(&place).await?.ok_or_else(|| EmbeddingError::NotPublished { folder: table.clone() })?
            }
            false => vec![place],
        };
        Ok(Self::Tables(
            tables,
            EmbeddingColumns { id: vec![id.clone()], embedding: embedding.clone(), kind: Some(kind) },
        ))
    }
}

/// The columns of a table of embeddings.
#[derive(Debug, Clone)]
pub struct EmbeddingColumns {
    /// The column of ids; the first of several that is there.
    pub id: Vec<String>,
    /// The column of embeddings.
    pub embedding: String,
    /// Where there is a column `kind`, rows of another kind are left out.
    pub kind: Option<Kind>,
}

impl Default for EmbeddingColumns {
    /// The columns of Laser's own data sets.
    fn default() -> Self {
        Self { id: vec!["entity_id".into(), "id".into()], embedding: EMBEDDING_COLUMN.into(), kind: None }
    }
}

/// A matrix and the list of its rows' ids.
#[derive(Debug, Clone)]
pub struct NpyFiles {
    /// A `.npy` file of float32 or float64, shape [rows, dimension].
    pub npy: Location,
    /// A text file of one entity id per line, in the order of the rows.
    pub ids: Location,
    /// Rows of padding before the first entity's.
    pub skip_rows: usize,
    /// The type of the ids; text if none is given.
    pub id_type: Option<IdType>,
}

/// Some rows of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingBatch {
    /// Numbers of the rows in their table, from 1; of a matrix, the lines of its ids.
    pub rows: Vec<u64>,
    /// The entities.
    pub ids: Vec<EntityId>,
    /// Their embeddings, one after the other, each of [`Self::dimension`] values.
    pub values: Vec<f32>,
    /// Values of an embedding, at least 1.
    pub dimension: usize,
}

impl EmbeddingBatch {
    fn new(dimension: usize) -> Self {
        Self { rows: Vec::new(), ids: Vec::new(), values: Vec::new(), dimension }
    }

    /// Each entity with its embedding.
    pub fn iter(&self) -> impl Iterator<Item = (&EntityId, &[f32])> {
        self.ids.iter().zip(self.values.chunks(self.dimension))
    }
}

/// Reads a source in batches, in its order. An id that is there twice is the caller's to find.
#[derive(Debug)]
pub struct EmbeddingReader {
    /// Tables that are not opened yet, last first.
    tables: Vec<Location>,
    columns: EmbeddingColumns,
    source: Option<Source>,
    /// The dimension of the first embedding.
    dimension: Option<usize>,
}

#[derive(Debug)]
enum Source {
    Parquet(ParquetEmbeddings),
    Rows(RowReader),
    Npy(NpyReader),
}

impl EmbeddingReader {
    /// Opens a source; of tables nothing is read yet.
    pub async fn open(files: EmbeddingFiles) -> Result<Self, EmbeddingError> {
        let (tables, columns, source) = match files {
            EmbeddingFiles::Tables(mut tables, columns) => {
                tables.reverse();
                (tables, columns, None)
            }
            EmbeddingFiles::Npy(files) => {
                (Vec::new(), EmbeddingColumns::default(), Some(Source::Npy(NpyReader::open(files).await?)))
            }
        };
        Ok(Self { tables, columns, source, dimension: None })
    }

    /// The next rows, or `None` at the end.
    ///
    /// # Errors
    /// [`EmbeddingError`], naming the first row that is wrong and its entity.
    pub async fn next_batch(&mut self) -> Result<Option<EmbeddingBatch>, EmbeddingError> {
        loop {
            let batch = match &mut self.source {
                Some(Source::Parquet(table)) => table.next_batch(&mut self.dimension).await?,
                Some(Source::Rows(rows)) => next_rows(rows, &self.columns, &mut self.dimension).await?,
                Some(Source::Npy(npy)) => npy.next_batch()?,
                None => None,
            };
            match batch {
                Some(batch) if batch.ids.is_empty() => {}
                Some(batch) => return Ok(Some(batch)),
                None => match self.tables.pop() {
                    Some(table) => self.source = Some(open_table(&table, &self.columns).await?),
                    None => return Ok(None),
                },
            }
        }
    }
}

async fn open_table(table: &Location, columns: &EmbeddingColumns) -> Result<Source, EmbeddingError> {
    if table.extension() == "parquet" {
        return Ok(Source::Parquet(ParquetEmbeddings::open(table, columns).await?));
    }
    let mut rows = RowReader::open(table.url(), Select::All).await?;
    if let Some(available) = rows.columns()? {
        for names in [columns.id.as_slice(), std::slice::from_ref(&columns.embedding)] {
            if !names.iter().any(|name| available.contains(name)) {
                return Err(EmbeddingError::Column {
                    file: table.url().to_owned(),
                    column: names.join(" or "),
                    available: available.join(", "),
                });
            }
        }
    }
    Ok(Source::Rows(rows))
}

/// The next rows of a CSV or JSONL table.
async fn next_rows(
    reader: &mut RowReader,
    columns: &EmbeddingColumns,
    dimension: &mut Option<usize>,
) -> Result<Option<EmbeddingBatch>, EmbeddingError> {
    let Some(rows) = reader.next_batch().await? else {
        return Ok(None);
    };
    let mut batch = EmbeddingBatch::new(1);
    for (number, mut row) in rows {
        let kind = row.remove("kind").and_then(|kind| serde_json::from_value(kind).ok());
        if columns.kind.is_some_and(|wanted| kind.is_some_and(|kind: Kind| kind != wanted)) {
            continue;
        }
        let column = columns.id.iter().find(|name| row.contains_key(*name)).unwrap_or(&columns.id[0]);
        let id = id_value(row.remove(column), column, "embedding").map_err(|e| reader.error(number, e))?;
        let embedding =
            parse_embedding(row.remove(&columns.embedding), &columns.embedding).map_err(|e| reader.error(number, e))?;
        let embedding = embedding
            .ok_or_else(|| reader.error(number, format!("{id} has no embedding in column {:?}", columns.embedding)))?;
        batch.dimension = same_dimension(dimension, &id, embedding.len()).map_err(|e| reader.error(number, e))?;
        batch.rows.push(number);
        batch.ids.push(id);
        batch.values.extend(embedding);
    }
    Ok(Some(batch))
}

/// An embedding that does not fit those before.
#[derive(Debug, thiserror::Error)]
enum DimensionError {
    #[error("embedding of {0} has no values")]
    Empty(EntityId),
    #[error("embedding of {id} has {found} values, those before have {expected}")]
    Other { id: EntityId, found: usize, expected: usize },
}

/// Returns the dimension of a source, if an embedding of `found` values fits it.
fn same_dimension(dimension: &mut Option<usize>, id: &EntityId, found: usize) -> Result<usize, DimensionError> {
    match *dimension.get_or_insert(found) {
        _ if found == 0 => Err(DimensionError::Empty(id.clone())),
        expected if expected != found => Err(DimensionError::Other { id: id.clone(), found, expected }),
        _ => Ok(found),
    }
}
