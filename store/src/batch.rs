//! Rows as record batches and back, by arrow's JSON codec.

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use laser_schema::embedding::EMBEDDING_COLUMN;
use serde::Serialize;
use serde::de::DeserializeOwned;

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

/// Returns the rows of one record batch.
///
/// # Errors
/// [`BatchError`] if one does not fit the row type.
pub(crate) fn from_batch<T: DeserializeOwned>(batch: &RecordBatch) -> Result<Vec<T>, BatchError> {
    let mut writer = arrow::json::LineDelimitedWriter::new(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let lines = writer.into_inner();
    let rows = serde_json::Deserializer::from_slice(&lines).into_iter();
    Ok(rows.collect::<Result<_, _>>()?)
}
