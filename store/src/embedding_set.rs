//! Parts of embeddings without their texts: columns and footer. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use laser_schema::embedding::Embeddings;
use laser_schema::embedding_set::{EmbeddedEntity, EmbeddingPart};

use crate::batch::from_batch;
use crate::embedding_column;
use crate::sealed::{self, SealedTable};
use crate::table::{self, TableError};

/// The footer key of a part's [`EmbeddingPart`].
pub(crate) const PART_KEY: &str = "laser.embeddings";

/// The columns of a part but for the embeddings, which come last. No nulls anywhere.
pub fn embedded_schema(id: DataType, has_created: bool) -> SchemaRef {
    let mut fields = vec![Field::new("entity_id", id, false), Field::new("event_timestamp", table::timestamp(), false)];
    if has_created {
        fields.push(Field::new("created_timestamp", table::timestamp(), false));
    }
    Arc::new(Schema::new(fields))
}

/// Encodes a part.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types, or not every row has an embedding.
pub fn encode_embeddings(
    name: &str,
    rows: &[EmbeddedEntity],
    embeddings: &Embeddings,
    part: &EmbeddingPart,
) -> Result<Bytes, TableError> {
    let id = rows.first().map_or(DataType::Int64, |row| table::id_type(row.entity_id.id_type()));
    let has_created = rows.iter().any(|row| row.created_timestamp.is_some());
    let embedded = Some((embeddings, part.embedding.spec.layout));
    sealed::encode(name, embedded_schema(id, has_created), rows, embedded, (PART_KEY, part))
}

/// Decodes a part but for its embeddings; it must be as it was written.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are no such part or were changed.
pub fn decode_embeddings(name: &str, bytes: Bytes) -> Result<(Vec<EmbeddedEntity>, EmbeddingPart), TableError> {
    let table = SealedTable::open(name, bytes)?;
    let part = check_embeddings(&table)?;
    let mut rows = Vec::new();
    for batch in table.batches(&["entity_id", "event_timestamp", "created_timestamp"])? {
        let batch = from_batch(&batch?);
        rows.extend(batch.map_err(|e| table.unreadable(e.to_string()))?);
    }
    Ok((rows, part))
}

/// The footer of a part whose columns are those that it names.
pub(crate) fn check_embeddings(table: &SealedTable) -> Result<EmbeddingPart, TableError> {
    let part: EmbeddingPart = table.footer(PART_KEY)?;
    let spec = &part.embedding.spec;
    let has_created = table.has_column("created_timestamp");
    let schema = embedded_schema(table.id_type()?, has_created);
    table.check_columns(&embedding_column::append_to(spec.layout, &schema, spec.encoder.dimensions))?;
    Ok(part)
}
