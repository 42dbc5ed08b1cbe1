//! Ids and embeddings of a Parquet table: a part of a published data set, or any other table.
//!
//! Columns are read as they are stored, since embeddings are most of the bytes.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, FieldRef, Float32Type, Int64Type};
use laser_schema::{EntityId, Kind};

use super::{EmbeddingBatch, EmbeddingColumns, EmbeddingError, same_dimension};
use crate::location::{Location, LocationError};
use crate::table::{Select, TableReader};

/// The column that tells users from items, where a table holds both.
const KIND_COLUMN: &str = "kind";

/// A table, read in batches.
#[derive(Debug)]
pub(super) struct ParquetEmbeddings {
    reader: TableReader,
    file: String,
    id: String,
    embedding: String,
    kind: Option<Kind>,
    row: u64,
}

impl ParquetEmbeddings {
    /// Opens the table; nothing but its footer is read yet.
    pub(super) async fn open(location: &Location, columns: &EmbeddingColumns) -> Result<Self, EmbeddingError> {
        let file = location.url().to_owned();
        if !location.exists().await? {
            return Err(LocationError::NotFound { url: file }.into());
        }
        let mut selected: Vec<&str> = columns.id.iter().map(String::as_str).collect();
        selected.extend([columns.embedding.as_str(), KIND_COLUMN]);
        let reader = TableReader::open_columns(location, Select::Only(&selected)).await?;
        let names: Vec<String> = reader.schema().fields().iter().map(|field| field.name().clone()).collect();
        let find = |wanted: &[String]| {
            let found = wanted.iter().find(|name| names.contains(name));
            found.cloned().ok_or_else(|| EmbeddingError::Column {
                file: file.clone(),
                column: wanted.join(" or "),
                available: names.join(", "),
            })
        };
        let id = find(&columns.id)?;
        let embedding = find(std::slice::from_ref(&columns.embedding))?;
        Ok(Self { id, embedding, file, reader, kind: columns.kind, row: 0 })
    }

    /// The next rows, which may be none of the kind that is asked for, or `None` at the end.
    pub(super) async fn next_batch(
        &mut self,
        dimension: &mut Option<usize>,
    ) -> Result<Option<EmbeddingBatch>, EmbeddingError> {
        let Some(batch) = self.reader.next_batch().await? else {
            return Ok(None);
        };
        let read = self.read(&batch, dimension)?;
        self.row += batch.num_rows() as u64;
        Ok(Some(read))
    }

    fn read(&self, batch: &RecordBatch, dimension: &mut Option<usize>) -> Result<EmbeddingBatch, EmbeddingError> {
        let ids = self.ids(batch)?;
        let lists = self.lists(batch)?;
        let kinds = self.kinds(batch)?;
        let mut read = EmbeddingBatch::new(1);
        for (at, (id, embedding)) in ids.into_iter().zip(lists).enumerate() {
            let row = self.row + 1 + at as u64;
            if kinds.as_ref().is_some_and(|is_wanted| !is_wanted[at]) {
                continue;
            }
            let wrong = |reason: String| EmbeddingError::Row { file: self.file.clone(), row, reason };
            let id = id.ok_or_else(|| wrong(format!("column {:?} is empty; every entity needs an id", self.id)))?;
            let embedding =
                embedding.ok_or_else(|| wrong(format!("{id} has no embedding in column {:?}", self.embedding)))?;
            read.dimension = same_dimension(dimension, &id, embedding.len()).map_err(|e| wrong(e.to_string()))?;
            let embedding = embedding.as_primitive::<Float32Type>();
            let is_finite = |at: &usize| embedding.is_valid(*at) && embedding.value(*at).is_finite();
            if let Some(position) = (0..embedding.len()).find(|at| !is_finite(at)) {
                return Err(wrong(format!(
                    "the embedding of {id} holds NaN, infinity or null at position {position}; embeddings must be \
                     finite"
                )));
            }
            read.rows.push(row);
            read.ids.push(id);
            read.values.extend_from_slice(embedding.values());
        }
        Ok(read)
    }

    fn ids(&self, batch: &RecordBatch) -> Result<Vec<Option<EntityId>>, EmbeddingError> {
        let column = self.column(batch, &self.id)?;
        if column.data_type().is_integer() {
            let column = self.cast(column, &self.id, &DataType::Int64)?;
            return Ok(column.as_primitive::<Int64Type>().iter().map(|id| id.map(EntityId::Int)).collect());
        }
        let texts = match column.data_type() {
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
                self.cast(column, &self.id, &DataType::Utf8)?
            }
            other => return Err(self.wrong_type(&self.id, other, "an integer or string")),
        };
        Ok(texts.as_string::<i32>().iter().map(|id| id.map(|id| EntityId::Text(id.to_owned()))).collect())
    }

    /// Which rows are of the kind that is asked for, where the table tells.
    fn kinds(&self, batch: &RecordBatch) -> Result<Option<Vec<bool>>, EmbeddingError> {
        let (Some(wanted), Some(column)) = (self.kind, batch.column_by_name(KIND_COLUMN)) else {
            return Ok(None);
        };
        let kinds = self.cast(column, KIND_COLUMN, &DataType::Utf8)?;
        Ok(Some(kinds.as_string::<i32>().iter().map(|kind| kind.is_none_or(|kind| kind == wanted.as_str())).collect()))
    }

    /// The lists of the column of embeddings, each of single-precision values; none where there is no list.
    fn lists(&self, batch: &RecordBatch) -> Result<Vec<Option<ArrayRef>>, EmbeddingError> {
        let column = self.column(batch, &self.embedding)?;
        let is_float = |item: &FieldRef| item.data_type().is_floating();
        let single = |item: &FieldRef| Arc::new(item.as_ref().clone().with_data_type(DataType::Float32));
        let target = match column.data_type() {
            DataType::FixedSizeList(item, size) if is_float(item) => DataType::FixedSizeList(single(item), *size),
            DataType::List(item) if is_float(item) => DataType::List(single(item)),
            DataType::LargeList(item) if is_float(item) => DataType::LargeList(single(item)),
            other => {
                return Err(self.wrong_type(&self.embedding, other, "a list of float or double, of fixed size or not"));
            }
        };
        let lists = self.cast(column, &self.embedding, &target)?;
        Ok(match target {
            DataType::FixedSizeList(..) => lists.as_fixed_size_list().iter().collect(),
            DataType::List(_) => lists.as_list::<i32>().iter().collect(),
            _ => lists.as_list::<i64>().iter().collect(),
        })
    }

    fn column<'a>(&self, batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, EmbeddingError> {
        batch.column_by_name(name).ok_or_else(|| self.wrong_type(name, &DataType::Null, "a column"))
    }

    fn cast(&self, column: &ArrayRef, name: &str, target: &DataType) -> Result<ArrayRef, EmbeddingError> {
        cast(column, target).map_err(|_| self.wrong_type(name, column.data_type(), "a type that can be converted"))
    }

    fn wrong_type(&self, column: &str, found: &DataType, expected: &'static str) -> EmbeddingError {
        EmbeddingError::Type { file: self.file.clone(), column: column.to_owned(), found: found.to_string(), expected }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use arrow::array::{
        FixedSizeListArray, Float64Array, Int32Array, Int64Array, LargeListArray, ListArray, StringArray,
    };
    use arrow::datatypes::{Float64Type, Schema};
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::embeddings::{EMBEDDING_COLUMN, EmbeddingFiles, EmbeddingReader};

    fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) -> Location {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let file = std::fs::File::create(path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        Location::parse(path.to_str().unwrap()).unwrap()
    }

    async fn read(location: &Location) -> Result<Vec<(EntityId, Vec<f32>)>, EmbeddingError> {
        let mut reader =
            EmbeddingReader::open(EmbeddingFiles::Tables(vec![location.clone()], EmbeddingColumns::default())).await?;
        let mut rows = Vec::new();
        while let Some(batch) = reader.next_batch().await? {
            rows.extend(batch.iter().map(|(id, e)| (id.clone(), e.to_vec())));
        }
        Ok(rows)
    }

    fn ids() -> (&'static str, ArrayRef) {
        ("entity_id", Arc::new(Int64Array::from(vec![7, 8])))
    }

    fn list(rows: Vec<Option<Vec<Option<f32>>>>) -> ArrayRef {
        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
    }

    #[tokio::test]
    async fn every_usual_type_of_list_and_id_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let rows = || vec![Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0), Some(4.0)])];
        let fixed = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(rows(), 2);
        let double =
            rows().into_iter().map(|row| row.map(|row| row.into_iter().map(|v| v.map(f64::from)).collect::<Vec<_>>()));
        let large = LargeListArray::from_iter_primitive::<Float64Type, _, _>(double);
        let lists: [ArrayRef; 3] = [Arc::new(fixed), list(rows()), Arc::new(large)];
        for (number, lists) in lists.into_iter().enumerate() {
            let path = dir.path().join(format!("{number}.parquet"));
            let location = write(&path, vec![ids(), (EMBEDDING_COLUMN, lists)]);
            let expected = vec![(EntityId::Int(7), vec![1.0, 2.0]), (EntityId::Int(8), vec![3.0, 4.0])];
            assert_eq!(read(&location).await.unwrap(), expected, "list type {number}");
        }
        let text: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let location = write(&dir.path().join("t.parquet"), vec![("id", text), (EMBEDDING_COLUMN, list(rows()))]);
        let rows = read(&location).await.unwrap();
        assert_eq!(rows[1], (EntityId::Text("b".into()), vec![3.0, 4.0]));
    }

    #[tokio::test]
    async fn unusable_tables_are_refused_with_column_row_and_entity() {
        let dir = tempfile::tempdir().unwrap();
        let good = || Some(vec![Some(1.0), Some(2.0)]);
        let flat: ArrayRef = Arc::new(Float64Array::from(vec![1.0, 2.0]));
        let real: ArrayRef = Arc::new(Float64Array::from(vec![1.0, 2.0]));
        let no_id: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None]));
        let embedding = |row| (EMBEDDING_COLUMN, list(vec![good(), row]));
        let cases = [
            (vec![ids()], "no column embedding; it has entity_id"),
            (vec![embedding(good())], "no column entity_id or id; it has embedding"),
            (vec![ids(), (EMBEDDING_COLUMN, flat)], "column \"embedding\" is Float64; expected a list"),
            (vec![("id", real), embedding(good())], "column \"id\" is Float64; expected an integer or string"),
            (vec![("id", no_id), embedding(good())], "row 2: column \"id\" is empty"),
            (vec![ids(), embedding(None)], "row 2: 8 has no embedding"),
            (vec![ids(), embedding(Some(vec![Some(1.0)]))], "row 2: embedding of 8 has 1 values, those before have 2"),
            (
                vec![ids(), embedding(Some(vec![Some(1.0), Some(f32::NAN)]))],
                "row 2: the embedding of 8 holds NaN, infinity or null at position 1",
            ),
            (
                vec![ids(), embedding(Some(vec![None, Some(1.0)]))],
                "row 2: the embedding of 8 holds NaN, infinity or null at position 0",
            ),
        ];
        for (columns, expected) in cases {
            let location = write(&dir.path().join("x.parquet"), columns);
            let error = read(&location).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}: expected {expected}");
        }
        let missing = Location::parse(dir.path().join("none.parquet").to_str().unwrap()).unwrap();
        let error = read(&missing).await.unwrap_err().to_string();
        assert!(error.contains("no such file"), "{error}");
    }

    #[tokio::test]
    async fn narrow_ids_are_widened_and_rows_of_another_kind_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let narrow: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
        let kinds: ArrayRef = Arc::new(StringArray::from(vec!["user", "item", "user"]));
        let vectors = list((0..3).map(|_| Some(vec![Some(1.0)])).collect());
        let path = dir.path().join("k.parquet");
        let location = write(&path, vec![("id", narrow), ("kind", kinds), (EMBEDDING_COLUMN, vectors)]);
        let columns = EmbeddingColumns { kind: Some(Kind::Item), ..EmbeddingColumns::default() };
        let mut reader = EmbeddingReader::open(EmbeddingFiles::Tables(vec![location], columns)).await.unwrap();
        let batch = reader.next_batch().await.unwrap().unwrap();
        assert_eq!((batch.ids, batch.rows), (vec![EntityId::Int(2)], vec![2]));
        assert!(reader.next_batch().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn an_empty_table_has_no_rows() {
        let dir = tempfile::tempdir().unwrap();
        let (_, ids) = ids();
        let schema = Schema::new(vec![
            arrow::datatypes::Field::new("entity_id", ids.data_type().clone(), false),
            arrow::datatypes::Field::new(EMBEDDING_COLUMN, list(vec![]).data_type().clone(), false),
        ]);
        let path = dir.path().join("e.parquet");
        let file = std::fs::File::create(&path).unwrap();
        ArrowWriter::try_new(file, Arc::new(schema), None).unwrap().close().unwrap();
        let location = Location::parse(path.to_str().unwrap()).unwrap();
        assert!(read(&location).await.unwrap().is_empty());
    }
}
