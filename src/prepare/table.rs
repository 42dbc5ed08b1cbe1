//! Rows to Parquet in the entity contract, for every source alike.
//!
//! A row is anything that serialises to a struct with the columns' names; what has no column is an
//! error, what is missing is null. The same rows give the same bytes (zstd, no clock, no randomness). The compressed
//! table is built in memory and written whole, so a reader never sees half of one.

use std::sync::Arc;

use anyhow::{Context, Result};
use arrow::datatypes::{DataType, Field, Schema};
use arrow::json::ReaderBuilder;
use arrow::json::reader::Decoder;
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::Serialize;

/// Rows turned to Arrow at once: the longest MovieLens history has 33,000 interactions, so that the
/// worst batch stays below a gigabyte and a usual one below ten megabytes.
const BATCH_ROWS: usize = 256;

/// A row group is closed at this size: what one reader has to hold at least.
const ROW_GROUP_BYTES: usize = 32 << 20;

/// Writes one table of one kind of entities.
pub(super) struct TableWriter {
    kind: Kind,
    rows: RowWriter,
}

#[derive(Serialize)]
struct Row<'a, I, A> {
    id: I,
    kind: Kind,
    #[serde(flatten)]
    columns: &'a A,
    interactions: u64,
}

impl TableWriter {
    /// A table of `columns` between the contract's id and kind and its number of interactions.
    pub(super) fn new(kind: Kind, id: IdType, columns: Vec<Field>) -> Result<Self> {
        let id = match id {
            IdType::Int64 => DataType::Int64,
            IdType::String => DataType::Utf8,
        };
        let mut fields = vec![Field::new("id", id, false), Field::new("kind", DataType::Utf8, false)];
        fields.extend(columns);
        fields.push(Field::new("interactions", DataType::Int64, false));
        let rows = RowWriter::new(kind.as_str(), fields)?;
        Ok(Self { kind, rows })
    }

    /// Appends one entity.
    pub(super) fn push(&mut self, id: impl Serialize, columns: &impl Serialize, interactions: u64) -> Result<()> {
        self.rows.push(&Row { id, kind: self.kind, columns, interactions })
    }

    /// Writes the table, replacing what was there, and tells its place.
    pub(super) async fn finish(self, location: &Location) -> Result<String> {
        self.rows.finish(location).await
    }
}

/// Writes one table of any columns.
pub(super) struct RowWriter {
    /// What its rows are, for messages.
    name: &'static str,
    decoder: Decoder,
    writer: ArrowWriter<Vec<u8>>,
    rows: u64,
}

impl RowWriter {
    /// A table of these columns.
    pub(super) fn new(name: &'static str, fields: Vec<Field>) -> Result<Self> {
        let schema = Arc::new(Schema::new(fields));
        let decoder = ReaderBuilder::new(schema.clone()).with_strict_mode(true).build_decoder()?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
            .build();
        let writer = ArrowWriter::try_new(Vec::new(), schema, Some(properties))?;
        Ok(Self { name, decoder, writer, rows: 0 })
    }

    /// Appends one row.
    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<()> {
        self.rows += 1;
        self.decoder.serialize(&[row]).with_context(|| self.row())?;
        if self.decoder.len() >= BATCH_ROWS {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the table, replacing what was there, and tells its place.
    pub(super) async fn finish(mut self, location: &Location) -> Result<String> {
        self.flush()?;
        location.write(self.writer.into_inner()?.into()).await?;
        Ok(location.url().to_owned())
    }

    fn flush(&mut self) -> Result<()> {
        if let Some(batch) = self.decoder.flush().with_context(|| self.row())? {
            self.writer.write(&batch)?;
        }
        Ok(())
    }

    fn row(&self) -> String {
        format!("{} table, up to row {}", self.name, self.rows)
    }
}

/// Text.
pub(super) fn text(name: &str) -> Field {
    Field::new(name, DataType::Utf8, true)
}

/// A list of texts.
pub(super) fn texts(name: &str) -> Field {
    Field::new(name, DataType::new_list(DataType::Utf8, true), true)
}

/// A 64-bit integer.
pub(super) fn int64(name: &str) -> Field {
    Field::new(name, DataType::Int64, true)
}

/// A single-precision number.
pub(super) fn float32(name: &str) -> Field {
    Field::new(name, DataType::Float32, true)
}

/// The contract's list of interactions with these fields.
pub(super) fn history(fields: Vec<Field>) -> Field {
    Field::new("history", DataType::new_list(DataType::Struct(fields.into()), true), true)
}

/// The contract's embedding.
pub(super) fn embedding() -> Field {
    Field::new("embedding", DataType::new_list(DataType::Float32, true), true)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{location, read_table};
    use super::*;

    #[derive(Serialize)]
    struct Columns {
        name: Option<&'static str>,
        embedding: Option<[f32; 2]>,
    }

    async fn write(path: &Location, rows: i64) {
        let mut table = TableWriter::new(Kind::Item, IdType::Int64, vec![text("name"), embedding()]).unwrap();
        for id in 0..rows {
            let odd = id % 2 == 1;
            let columns = Columns { name: odd.then_some("odd"), embedding: odd.then_some([0.1, -2.5]) };
            table.push(id, &columns, 7).unwrap();
        }
        table.finish(path).await.unwrap();
    }

    #[tokio::test]
    async fn rows_of_several_batches_come_back_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = location(dir.path()).join("t.parquet");
        let rows = 2 * BATCH_ROWS as i64 + 1;
        write(&path, rows).await;
        let entities = read_table(path.url()).await;
        assert_eq!(entities.len() as i64, rows);
        assert_eq!(entities[1].embedding, Some(vec![0.1, -2.5]));
        assert_eq!(entities[1].attributes["name"], "odd");
        assert_eq!(entities[1].interactions, 7);
        assert!(entities[2].attributes.is_empty() && entities[2].embedding.is_none());
    }

    #[tokio::test]
    async fn the_same_rows_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a.parquet", "b.parquet"].map(|name| location(dir.path()).join(name));
        write(&a, 300).await;
        write(&b, 300).await;
        assert_eq!(a.read().await.unwrap(), b.read().await.unwrap());
    }

    #[test]
    fn a_value_without_a_column_is_refused() {
        let mut table = TableWriter::new(Kind::User, IdType::Int64, vec![text("name")]).unwrap();
        table.push(1, &Columns { name: None, embedding: Some([0.0, 1.0]) }, 0).unwrap();
        let error = format!("{:#}", table.rows.flush().unwrap_err());
        assert!(error.contains("user table") && error.contains("embedding"), "{error}");
    }
}
