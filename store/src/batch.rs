//! Rows as record batches, by arrow's JSON codec, and back, by the values of [`cells`].

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use laser_schema::embedding::EMBEDDING_COLUMN;
use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{cells, parallel};

/// Rows that one thread decodes at a time: with histories of hundreds, some milliseconds.
const DECODED_ROWS: usize = 64;

/// Why rows do not become a record batch, or the other way round.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// A value does not fit its column.
    #[error(transparent)]
    Column(#[from] ArrowError),
    /// A row does not fit the row type.
    #[error(transparent)]
    Row(#[from] serde_json::Error),
    /// The column of embeddings does not hold lists of this length.
    #[error("column {EMBEDDING_COLUMN:?}: expected lists of {0} float32 values")]
    Embedding(usize),
}

/// Returns rows as one record batch.
///
/// # Errors
/// [`BatchError`] if a row does not fit the schema.
pub fn to_batch<T: Serialize>(schema: &SchemaRef, rows: &[T]) -> Result<RecordBatch, BatchError> {
    let builder = arrow::json::ReaderBuilder::new(schema.clone()).with_batch_size(rows.len().max(1));
    let mut decoder = builder.build_decoder()?;
    decoder.serialize(rows)?;
    Ok(decoder.flush()?.unwrap_or_else(|| RecordBatch::new_empty(schema.clone())))
}

/// Returns the rows of one record batch, decoded on all of rayon's threads.
///
/// # Errors
/// [`BatchError`] of the first that does not fit the row type.
pub(crate) fn from_batch<T: DeserializeOwned + Send>(batch: &RecordBatch) -> Result<Vec<T>, BatchError> {
    on_all_threads(batch, |rows| match cells::objects(rows) {
        Some(objects) => {
            let rows = objects.into_iter().map(|object| serde_json::from_value(Value::Object(object)));
            Ok(rows.collect::<Result<_, _>>()?)
        }
        None => by_codec(rows),
    })
}

/// Returns the rows of one record batch by column, as [`from_batch`] does, without a second pass over their values.
///
/// # Errors
/// [`BatchError`] if a column's type has no JSON form.
pub(crate) fn objects_of(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, BatchError> {
    on_all_threads(batch, |rows| cells::objects(rows).map_or_else(|| by_codec(rows), Ok))
}

fn on_all_threads<T: Send>(
    batch: &RecordBatch,
    decode: impl Fn(&RecordBatch) -> Result<Vec<T>, BatchError> + Sync,
) -> Result<Vec<T>, BatchError> {
    let rows = batch.num_rows();
    let starts = (0..rows).into_par_iter().step_by(DECODED_ROWS);
    let decoded = starts.map(|start| decode(&batch.slice(start, DECODED_ROWS.min(rows - start))));
    Ok(parallel::try_collect(decoded)?.into_iter().flatten().collect())
}

fn by_codec<T: DeserializeOwned>(batch: &RecordBatch) -> Result<Vec<T>, BatchError> {
    let mut writer = arrow::json::LineDelimitedWriter::new(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let lines = writer.into_inner();
    let rows = serde_json::Deserializer::from_slice(&lines).into_iter();
    Ok(rows.collect::<Result<_, _>>()?)
}
