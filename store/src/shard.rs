//! The columns of a shard's input.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

/// The columns of a shard file for ids of a type.
pub fn shard_schema(id: DataType) -> SchemaRef {
    let token = Field::new("item", DataType::UInt32, false);
    Arc::new(Schema::new(vec![
        Field::new("entity_id", id, false),
        Field::new("pool", DataType::Utf8, false),
        Field::new("prompt", DataType::List(Arc::new(token)), false),
        Field::new("prompt_digest", DataType::Utf8, false),
        Field::new("previous", DataType::Utf8, true),
        Field::new("error", DataType::Utf8, true),
    ]))
}
