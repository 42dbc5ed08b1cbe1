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
        // An empty history is no value, and so is an empty list.
        fields.push(Field::new("history", numbers(), true));
        fields.push(Field::new("previous_items", numbers(), true));
        fields.push(Field::new("items", DataType::UInt32, true));
    }
    Arc::new(Schema::new(fields))
}

#[cfg(test)]
mod tests {
    use laser_schema::entity::IdType;
    use laser_schema::job::ShardRow;
    use laser_schema::lists::ListRows;
    use laser_schema::{Digest, EntityId};

    use super::*;
    use crate::batch::{from_batch, to_batch};

    #[test]
    fn every_field_of_a_row_has_a_column() {
        let row = ShardRow {
            entity_id: EntityId::Int(1),
            pool: "user-all".to_owned(),
            prompt: vec![2, 3],
            prompt_digest: Digest::of(b"prompt"),
            previous: Some("earlier".to_owned()),
            error: Some("none".to_owned()),
            history: vec![4],
            previous_items: vec![7, 8],
            items: Some(5),
            value: Some(6.0),
        };
        let lists = Content::Lists { items: IdType::Int64, rows: ListRows::User };
        let batch = to_batch(&shard_schema(DataType::Int64, lists), std::slice::from_ref(&row)).unwrap();
        assert_eq!(from_batch::<ShardRow>(&batch).unwrap(), [row]);
    }
}
