//! Parts of knowledge ids: columns and footer. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use laser_schema::ids::IdRecord;
use serde::Serialize;

use crate::sealed;
use crate::table::{self, TableError};

/// The footer key of how a part was made.
const PART_KEY: &str = "laser.ids";

/// The columns of a part for ids of a type. No nulls anywhere.
pub fn ids_schema(id: DataType) -> SchemaRef {
    let item = Arc::new(Field::new("item", DataType::Int64, false));
    Arc::new(Schema::new(vec![
        Field::new("entity_id", id, false),
        Field::new("knowledge_ids", DataType::List(item), false),
        Field::new("event_timestamp", table::timestamp(), false),
        Field::new("created_timestamp", table::timestamp(), false),
    ]))
}

/// Encodes a part with how it was made in its footer. Equal rows give equal bytes.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types.
pub fn encode_ids(name: &str, rows: &[IdRecord], footer: &impl Serialize) -> Result<Bytes, TableError> {
    let id = rows.first().map_or(DataType::Int64, |row| table::id_type(row.entity_id.id_type()));
    sealed::encode(name, ids_schema(id), rows, None, (PART_KEY, footer))
}
