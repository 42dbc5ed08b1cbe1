//! The column of embeddings in a table: its type, and the way from a matrix into it and back.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, ListArray, RecordBatch};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, FieldRef, Float32Type, Schema, SchemaRef};
use laser_schema::embedding::{EMBEDDING_COLUMN, EmbeddingLayout, Embeddings};

use crate::batch::BatchError;

/// Returns the column of vectors of `dimensions` values. No nulls.
pub fn field(layout: EmbeddingLayout, dimensions: usize) -> Field {
    let list = match layout {
        EmbeddingLayout::Fixed => DataType::FixedSizeList(item(), size(dimensions)),
        EmbeddingLayout::List => DataType::List(item()),
    };
    Field::new(EMBEDDING_COLUMN, list, false)
}

fn item() -> FieldRef {
    Arc::new(Field::new("item", DataType::Float32, false))
}

fn size(dimensions: usize) -> i32 {
    i32::try_from(dimensions).unwrap_or(i32::MAX)
}

/// Returns `schema` with the column of embeddings at its end.
pub fn append_to(layout: EmbeddingLayout, schema: &Schema, dimensions: usize) -> SchemaRef {
    let fields = schema.fields().iter().cloned();
    let embedding = Arc::new(field(layout, dimensions));
    Arc::new(Schema::new(fields.chain([embedding]).collect::<Vec<_>>()))
}

/// Returns rows of `embeddings` as the column's array.
pub(crate) fn array(
    layout: EmbeddingLayout,
    embeddings: &Embeddings,
    rows: std::ops::Range<usize>,
) -> Result<ArrayRef, BatchError> {
    let dimensions = embeddings.dimensions();
    let values = &embeddings.values()[rows.start * dimensions..rows.end * dimensions];
    let values = Arc::new(Float32Array::from(values.to_vec()));
    Ok(match layout {
        EmbeddingLayout::Fixed => Arc::new(FixedSizeListArray::try_new(item(), size(dimensions), values, None)?),
        EmbeddingLayout::List => {
            let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(dimensions, rows.len()));
            Arc::new(ListArray::try_new(item(), offsets, values, None)?)
        }
    })
}

/// Appends the embeddings of a batch to `embeddings` and returns the batch without them.
pub(crate) fn split(batch: &RecordBatch, embeddings: &mut Embeddings) -> Result<RecordBatch, BatchError> {
    let mut rest = batch.clone();
    let column = rest.remove_column(batch.schema().index_of(EMBEDDING_COLUMN)?);
    let dimensions = embeddings.dimensions();
    let wrong = || BatchError::Embedding(dimensions);
    for row in 0..column.len() {
        let values = match column.data_type() {
            _ if column.is_null(row) => None,
            DataType::FixedSizeList(..) => column.as_fixed_size_list_opt().map(|list| list.value(row)),
            DataType::List(_) => column.as_list_opt::<i32>().map(|list| list.value(row)),
            _ => None,
        };
        let values = values.ok_or_else(wrong)?;
        let values = values.as_primitive_opt::<Float32Type>();
        let values = values.filter(|values| values.len() == dimensions && values.null_count() == 0);
        embeddings.push(values.ok_or_else(wrong)?.values());
    }
    Ok(rest)
}
