//! The column of parsed texts: a struct by the fields of a JSON schema, made of the texts whenever a part is written.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::parsed::{PARSED_COLUMN, ParsedField, ParsedType, parse};
use serde::Serialize;
use serde_json::Value;

/// A record with its parsed text.
#[derive(Debug, Serialize)]
pub(crate) struct ParsedRow<'a> {
    parsed: Value,
    #[serde(flatten)]
    record: &'a KnowledgeRecord,
}

/// Returns the column of structs of these fields. It is never null, as some of its fields may be.
pub fn field(fields: &[ParsedField]) -> Field {
    Field::new(PARSED_COLUMN, DataType::Struct(structure(fields)), false)
}

/// Returns `schema` with the column at its end.
pub fn append_to(schema: &Schema, fields: &[ParsedField]) -> SchemaRef {
    let parsed = Arc::new(field(fields));
    Arc::new(Schema::new(schema.fields().iter().cloned().chain([parsed]).collect::<Vec<_>>()))
}

fn structure(fields: &[ParsedField]) -> Fields {
    fields.iter().map(|field| Field::new(&field.name, data_type(&field.data_type), field.nullable)).collect()
}

fn data_type(parsed: &ParsedType) -> DataType {
    match parsed {
        ParsedType::String | ParsedType::Json => DataType::Utf8,
        ParsedType::Integer => DataType::Int64,
        ParsedType::Number => DataType::Float64,
        ParsedType::Boolean => DataType::Boolean,
        ParsedType::List { items, nullable } => {
            DataType::List(Arc::new(Field::new("item", data_type(items), *nullable)))
        }
        ParsedType::Object(fields) => DataType::Struct(structure(fields)),
    }
}

/// The records with their parsed texts.
///
/// # Errors
/// The first entity whose text does not fit the fields, and how.
pub(crate) fn rows<'a>(records: &'a [KnowledgeRecord], fields: &[ParsedField]) -> Result<Vec<ParsedRow<'a>>, String> {
    let row = |record: &'a KnowledgeRecord| match parse(&record.text, fields) {
        Ok(parsed) => Ok(ParsedRow { parsed, record }),
        Err(reason) => Err(format!("entity {}: {reason}", record.entity_id)),
    };
    records.iter().map(row).collect()
}
