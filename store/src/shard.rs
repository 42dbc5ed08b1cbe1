//! The columns of a shard's input.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use laser_schema::knowledge::Content;

/// The columns of a shard file for ids of a type, of which lists or texts are generated.
pub fn shard_schema(id: DataType, content: Content) -> SchemaRef {
    let numbers = || DataType::List(Arc::new(Field::new("item", DataType::UInt32, false)));
    let mut fields = vec![
        Field::new("entity_id", id, false),
        Field::new("pool", DataType::Utf8, false),
        Field::new("prompt", numbers(), false),
        Field::new("prompt_digest", DataType::Utf8, false),
        Field::new("previous", DataType::Utf8, true),
        Field::new("error", DataType::Utf8, true),
        Field::new("value", DataType::Float64, true),
    ];
    if let Content::Lists { .. } = content {
        // An empty history is no value.
        fields.push(Field::new("history", numbers(), true));
        fields.push(Field::new("items", DataType::UInt32, true));
    }
    Arc::new(Schema::new(fields))
}
