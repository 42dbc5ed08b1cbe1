//! The column of embeddings in a table: its type, and the way from a matrix into it and back.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, FixedSizeListArray, Float32Array, ListArray, RecordBatch};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use laser_schema::embedding::{EMBEDDING_COLUMN, EmbeddingLayout, Embeddings};

/// The column of vectors of `dimensions` values. No nulls.
pub fn field(layout: EmbeddingLayout, dimensions: usize) -> Field {
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    let list = match layout {
        EmbeddingLayout::Fixed => DataType::FixedSizeList(item, i32::try_from(dimensions).unwrap_or(i32::MAX)),
        EmbeddingLayout::List => DataType::List(item),
    };
    Field::new(EMBEDDING_COLUMN, list, false)
}

/// `schema` with the column of embeddings at its end.
pub fn append_to(layout: EmbeddingLayout, schema: &Schema, dimensions: usize) -> SchemaRef {
    let fields = schema.fields().iter().cloned();
    let embedding = Arc::new(field(layout, dimensions));
    Arc::new(Schema::new(fields.chain([embedding]).collect::<Vec<_>>()))
}

/// Rows of `embeddings` as the column's array.
pub(crate) fn array(
    layout: EmbeddingLayout,
    embeddings: &Embeddings,
    rows: std::ops::Range<usize>,
) -> Result<ArrayRef, String> {
    let dimensions = embeddings.dimensions();
    let values = &embeddings.values()[rows.start * dimensions..rows.end * dimensions];
    let values: ArrayRef = Arc::new(Float32Array::from(values.to_vec()));
    let array: Result<ArrayRef, _> = match field(layout, dimensions).data_type() {
        DataType::FixedSizeList(item, size) => {
            FixedSizeListArray::try_new(item.clone(), *size, values, None).map(|array| Arc::new(array) as ArrayRef)
        }
        DataType::List(item) => {
            let lengths = std::iter::repeat_n(dimensions, rows.len());
            let offsets = OffsetBuffer::from_lengths(lengths);
            ListArray::try_new(item.clone(), offsets, values, None).map(|array| Arc::new(array) as ArrayRef)
        }
        other => return Err(format!("{other} is no list")),
    };
    array.map_err(|e| e.to_string())
}
/// The embeddings of a batch, appended to `embeddings`, and the batch without them.
pub(crate) fn split(batch: &RecordBatch, embeddings: &mut Embeddings) -> Result<RecordBatch, String> {
    let index = batch.schema().index_of(EMBEDDING_COLUMN).map_err(|e| e.to_string())?;
    let mut rest = batch.clone();
    let column = rest.remove_column(index);
    let dimensions = embeddings.dimensions();
    let wrong = || format!("column {EMBEDDING_COLUMN:?}: expected lists of {dimensions} float32 values");
    for row in 0..column.len() {
        let values = match column.data_type() {
            _ if column.is_null(row) => return Err(wrong()),
            DataType::FixedSizeList(..) => {
                column.as_any().downcast_ref::<FixedSizeListArray>().map(|list| list.value(row))
            }
            DataType::List(_) => column.as_any().downcast_ref::<ListArray>().map(|list| list.value(row)),
            _ => None,
        };
        let values = values.ok_or_else(wrong)?;
        let values = values.as_any().downcast_ref::<Float32Array>();
        let values = values.filter(|values| values.len() == dimensions && values.null_count() == 0);
        embeddings.push(values.ok_or_else(wrong)?.values());
    }
    Ok(rest)
}
