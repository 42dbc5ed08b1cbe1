//! Pages that list what is in the code list just that.

use std::fs;
use std::process::Command;

use arrow::datatypes::{DataType, FieldRef, Schema, TimeUnit};
use laser_schema::EmbeddingLayout;
use laser_schema::entity::IdType;
use laser_schema::knowledge::Content;
use laser_schema::lists::ListRows;
use laser_store::embedding_set::embedded_schema;
use laser_store::id_set::ids_schema;
use laser_store::part::{part_schema, record_schema};

/// As the page writes it.
fn type_name(name: &str, data_type: &DataType) -> String {
    match data_type {
        _ if ["entity_id", "item_id"].contains(&name) => "string or int64".to_owned(),
        _ if name == "items" => "list<string> or list<int64>".to_owned(),
        DataType::Utf8 => "string".to_owned(),
        DataType::Int64 => "int64".to_owned(),
        DataType::Float32 => "float".to_owned(),
        DataType::Float64 => "double".to_owned(),
        DataType::Struct(fields) => {
            let fields = fields.iter().map(|field| format!("{}: {}", field.name(), type_name("", field.data_type())));
            format!("struct<{}>", fields.collect::<Vec<_>>().join(", "))
        }
        DataType::List(item) => format!("list<{}>", type_name("", item.data_type())),
        DataType::FixedSizeList(item, _) => {
            format!("fixed_size_list<{}>", type_name("", item.data_type()))
        }
        DataType::Timestamp(TimeUnit::Microsecond, Some(zone)) => format!("timestamp[us, {zone}]"),
        other => panic!("output.md has no name for {other}"),
    }
}

/// Names and types of the table of columns below a heading.
fn listed(page: &str, heading: &str) -> Vec<(String, String)> {
    let is_of = |section: &&str| section.trim_start_matches('#').trim_start().starts_with(heading);
    let section = page.split("\n#").find(is_of).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let row = |row: &str| {
        let mut cells = row.split('|').map(|cell| cell.trim().replace('`', ""));
        cells.next();
        cells.next().zip(cells.next()).unwrap()
    };
    rows.map(row).collect()
}

fn columns(schema: &Schema) -> Vec<(String, String)> {
    let column = |field: &FieldRef| {
        assert_eq!(field.is_nullable(), field.name() == "runners_up", "{}", field.name());
        (field.name().clone(), type_name(field.name(), field.data_type()))
    };
    schema.fields().iter().map(column).collect()
}

/// The columns with an embedding, whose type is one of two.
fn embedded(schema: &Schema) -> Vec<(String, String)> {
    let [mut fixed, list] = [EmbeddingLayout::Fixed, EmbeddingLayout::List]
        .map(|layout| columns(&laser_store::embedding_column::append_to(layout, schema, 384)));
    let (last, other) = (fixed.last_mut().unwrap(), list.last().unwrap());
    last.1 = format!("{} or {}", last.1, other.1);
    fixed
}

#[test]
fn output_md_lists_the_columns_that_are_written() {
    let page = std::path::absolute("docs/output.md").unwrap();
    let page = fs::read_to_string(page).unwrap();
    for id in [DataType::Int64, DataType::Utf8] {
        let embeddings = embedded_schema(id.clone(), true);
        let texts = record_schema(id.clone(), Content::Texts { has_samples: true, has_runners_up: true });
        assert_eq!(listed(&page, "Texts"), embedded(&texts));
        for items in [IdType::Int64, IdType::String] {
            let lists = |rows| columns(&part_schema(id.clone(), Content::Lists { items, rows }));
            assert_eq!(listed(&page, "Lists"), lists(ListRows::User));
            // The other columns are those of lists, behind these.
            let by_item = listed(&page, "A row for each item");
            assert_eq!(by_item, lists(ListRows::Item)[..by_item.len()]);
            assert_eq!(lists(ListRows::Item)[by_item.len()..], lists(ListRows::User)[3..]);
        }
        assert_eq!(listed(&page, "Embeddings"), embedded(&embeddings));
        assert_eq!(listed(&page, "Knowledge ids"), columns(&ids_schema(id)));
    }
}

#[test]
fn third_party_md_lists_the_crates_that_are_built() {
    let made = Command::new("python3").arg("tests/third_party.py").output().unwrap();
    let (page, error) = (String::from_utf8(made.stdout).unwrap(), String::from_utf8_lossy(&made.stderr));
    assert!(made.status.success(), "{error}");
    assert!(page.contains("| tokio | "), "{page}");
    let committed = fs::read_to_string("THIRD_PARTY.md").unwrap();
    assert!(page == committed, "run: python3 tests/third_party.py > THIRD_PARTY.md");
}
