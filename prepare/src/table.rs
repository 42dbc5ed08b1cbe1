//! Rows to Parquet in the entity contract, for every source alike.
//!
//! A row serialises to a struct with the columns' names; what is missing is null. The same rows give the same bytes.
//! The compressed table is built in memory and written whole, so a reader never sees half of one.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use laser_store::table::{TableEncoder, id_type};
use serde::Serialize;

use crate::Result;

/// Rows turned to Arrow at once: the longest MovieLens history has 33,000 interactions, so that the
/// worst batch stays below a gigabyte and a usual one below ten megabytes.
const BATCH_ROWS: usize = 256;

/// A table that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Path or URL.
    pub url: String,
    /// Its rows.
    pub rows: u64,
}

#[derive(Serialize)]
struct Row<I, C> {
    id: I,
    kind: Kind,
    #[serde(flatten)]
    columns: C,
    interactions: u64,
}

/// Writes a table of entities, replacing what was there.
///
/// `columns` stand between the contract's id and kind and its number of interactions; `rows` are ids, those columns,
/// and numbers of interactions.
pub(crate) async fn write_entities<I: Serialize, C: Serialize>(
    location: &Location,
    (kind, id): (Kind, IdType),
    columns: Vec<Field>,
    rows: impl Iterator<Item = (I, C, u64)>,
) -> Result<Written> {
    let mut fields = vec![Field::new("id", id_type(id), false), Field::new("kind", DataType::Utf8, false)];
    fields.extend(columns);
    fields.push(Field::new("interactions", DataType::Int64, false));
    write(location, fields, rows.map(|(id, columns, interactions)| Row { id, kind, columns, interactions })).await
}

/// Writes a table of any columns, replacing what was there.
pub(crate) async fn write<T: Serialize>(
    location: &Location,
    fields: Vec<Field>,
    mut rows: impl Iterator<Item = T>,
) -> Result<Written> {
    let mut encoder = TableEncoder::new(location.url(), Arc::new(Schema::new(fields)), &[])?;
    let mut written = Written { url: location.url().to_owned(), rows: 0 };
    loop {
        let batch: Vec<T> = rows.by_ref().take(BATCH_ROWS).collect();
        if batch.is_empty() {
            break;
        }
        encoder.write(&batch)?;
        written.rows += batch.len() as u64;
    }
    location.write(encoder.finish()?.into()).await?;
    Ok(written)
}

/// Text.
pub(crate) fn text(name: &str) -> Field {
    Field::new(name, DataType::Utf8, true)
}

/// A list of texts.
pub(crate) fn texts(name: &str) -> Field {
    Field::new(name, DataType::new_list(DataType::Utf8, true), true)
}

/// A list of 64-bit integers.
pub(crate) fn int64s(name: &str) -> Field {
    Field::new(name, DataType::new_list(DataType::Int64, true), true)
}

/// A 64-bit integer.
pub(crate) fn int64(name: &str) -> Field {
    Field::new(name, DataType::Int64, true)
}

/// A single-precision number.
pub(crate) fn float32(name: &str) -> Field {
    Field::new(name, DataType::Float32, true)
}

/// The contract's list of interactions with these fields.
pub(crate) fn history(fields: Vec<Field>) -> Field {
    Field::new("history", DataType::new_list(DataType::Struct(fields.into()), true), true)
}

/// A text of nothing but spaces says that nothing is known, which the contract writes as null.
pub(crate) fn filled(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty())
}

/// An empty list says the same.
pub(crate) fn known(names: Vec<String>) -> Option<Vec<String>> {
    Some(names).filter(|names| !names.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{location, read_table};

    #[derive(Serialize)]
    struct Columns {
        name: Option<&'static str>,
    }

    async fn write_rows(path: &Location, rows: i64) {
        let rows = (0..rows).map(|id| (id, Columns { name: (id % 2 == 1).then_some("odd") }, 7));
        write_entities(path, (Kind::Item, IdType::Int64), vec![text("name")], rows).await.unwrap();
    }

    #[tokio::test]
    async fn rows_of_several_batches_come_back_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = location(dir.path()).join("t.parquet");
        let rows = 2 * BATCH_ROWS as i64 + 1;
        write_rows(&path, rows).await;
        let entities = read_table(path.url()).await;
        assert_eq!(entities.len() as i64, rows);
        assert_eq!(entities[1].attributes["name"], "odd");
        assert_eq!(entities[1].interactions, 7);
        assert!(entities[2].attributes.is_empty());
    }

    #[tokio::test]
    async fn the_same_rows_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a.parquet", "b.parquet"].map(|name| location(dir.path()).join(name));
        write_rows(&a, 300).await;
        write_rows(&b, 300).await;
        assert_eq!(a.read().await.unwrap(), b.read().await.unwrap());
    }
}
