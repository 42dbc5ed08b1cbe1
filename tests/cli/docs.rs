//! Pages that list what is in the code list just that.

use std::fs;
use std::path::Path;

use arrow::datatypes::{DataType, Schema};
use laser_schema::EmbeddingLayout;
use laser_schema::embedding_set::embedded_schema;
use laser_schema::ids::ids_schema;
use laser_schema::knowledge::record_schema;

/// As the page writes it.
fn type_name(name: &str, data_type: &DataType) -> String {
    match data_type {
        _ if name == "entity_id" => "string or int64".to_owned(),
        DataType::Utf8 => "string".to_owned(),
        DataType::Int64 => "int64".to_owned(),
        DataType::Float64 => "double".to_owned(),
        DataType::List(item) => format!("list<{}>", type_name("", item.data_type())),
        DataType::FixedSizeList(..) => "fixed_size_list<float>` or `list<float>".to_owned(),
        DataType::Timestamp(unit, Some(zone)) => format!("timestamp[{unit}, {zone}]"),
        other => panic!("output.md has no name for {other}"),
    }
}

/// Names and types of the table of columns below a heading.
fn listed(page: &str, heading: &str) -> Vec<(String, String)> {
    let section = page
        .split("\n## ")
        .find(|s| s.starts_with(heading))
        .unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split(" | ").map(str::trim).collect::<Vec<_>>());
    let cell = |cell: &str| cell.trim_start_matches("| ").trim_matches('`').to_owned();
    cells
        .map(|cells| (cell(cells[0]), cell(cells[1])))
        .collect()
}

fn columns(schema: &Schema) -> Vec<(String, String)> {
    let column = |field: &arrow::datatypes::FieldRef| {
        assert!(!field.is_nullable(), "{} is nullable", field.name());
        (
            field.name().clone(),
            type_name(field.name(), field.data_type()),
        )
    };
    schema.fields().iter().map(column).collect()
}

#[test]
fn output_md_lists_the_columns_that_are_written() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/output.md");
    let page = fs::read_to_string(page).unwrap();
    for id in [DataType::Int64, DataType::Utf8] {
        let embedded = |schema: &Schema| columns(&EmbeddingLayout::Fixed.append_to(schema, 8));
        assert_eq!(listed(&page, "Texts"), embedded(&record_schema(id.clone())));
        let texts_left_out = embedded_schema(id.clone(), true);
        assert_eq!(listed(&page, "Embeddings"), embedded(&texts_left_out));
        assert_eq!(listed(&page, "Knowledge ids"), columns(&ids_schema(id)));
    }
}
