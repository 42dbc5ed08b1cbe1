//! Ids and embeddings of a Parquet table: a part of a published night, or anybody's table.
//!
//! Columns are read as they are stored, since embeddings are most of the bytes: memory is a thousand rows. Every
//! embedding is finite and all of a table have one dimension, or the table is refused.

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Int64Type};

use crate::location::{Location, LocationError};
use crate::table::{Select, TableError, TableReader};
use laser_schema::embedding::EMBEDDING_COLUMN;
use laser_schema::entity::EntityId;

/// The columns that hold ids, in the order in which they are looked for.
const ID_COLUMNS: [&str; 2] = ["entity_id", "id"];

/// Why a table of embeddings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingTableError {
    /// The place itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The Parquet file.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A column that is needed is not there.
    #[error("{file}: no column {column}; it has {available}. Needed are entity_id (or id) and embedding")]
    Column {
        /// The table.
        file: String,
        /// The column looked for.
        column: &'static str,
        /// The columns there are.
        available: String,
    },
    /// A column of a type that is not read.
    #[error("{file}: column {column:?} is {found}; expected {expected}")]
    Type {
        /// The table.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: DataType,
        /// What is read.
        expected: &'static str,
    },
    /// One row is wrong.
    #[error("{file}, row {row}: {reason}")]
    Row {
        /// The table.
        file: String,
        /// Counted from 1.
        row: u64,
        /// What is wrong.
        reason: String,
    },
}

/// Some rows of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingBatch {
    /// The entities.
    pub ids: Vec<EntityId>,
    /// Their embeddings, one after the other, each of [`Self::dimension`] values.
    pub values: Vec<f32>,
    /// Values of an embedding, at least 1.
    pub dimension: usize,
}

impl EmbeddingBatch {
    /// Each entity with its embedding.
    pub fn iter(&self) -> impl Iterator<Item = (&EntityId, &[f32])> {
        self.ids.iter().zip(self.values.chunks(self.dimension))
    }
}

/// A table, read in batches.
#[derive(Debug)]
pub struct EmbeddingTable {
    reader: TableReader,
    file: String,
    id: &'static str,
    row: u64,
    dimension: Option<usize>,
}

impl EmbeddingTable {
    /// Opens the table; nothing but its footer is read yet.
    ///
    /// # Errors
    /// [`EmbeddingTableError`] if it is missing, no Parquet file, or lacks a column.
    pub async fn open(location: &Location) -> Result<Self, EmbeddingTableError> {
        let file = location.url().to_owned();
        if !location.exists().await? {
            return Err(LocationError::NotFound { url: file }.into());
        }
        let columns = [&ID_COLUMNS[..], &[EMBEDDING_COLUMN]].concat();
        let reader = TableReader::open_columns(location, Select::Only(&columns)).await?;
        let has = |name: &str| reader.schema().field_with_name(name).is_ok();
        let missing =
            |column| EmbeddingTableError::Column { file: file.clone(), column, available: names(&reader).join(", ") };
        let id = ID_COLUMNS.into_iter().find(|name| has(name));
        let id = id.ok_or_else(|| missing(ID_COLUMNS[0]))?;
        if !has(EMBEDDING_COLUMN) {
            return Err(missing(EMBEDDING_COLUMN));
        }
        Ok(Self { reader, file, id, row: 0, dimension: None })
    }

    /// One value of the footer.
    pub fn footer(&self, key: &str) -> Option<String> {
        self.reader.footer(key)
    }

    /// The next rows, or `None` at the end.
    ///
    /// # Errors
    /// [`EmbeddingTableError`], naming the first row that is wrong and its entity.
    pub async fn next_batch(&mut self) -> Result<Option<EmbeddingBatch>, EmbeddingTableError> {
        loop {
            match self.reader.next_batch().await? {
                None => return Ok(None),
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => return self.read(&batch).map(Some),
            }
        }
    }

    fn read(&mut self, batch: &RecordBatch) -> Result<EmbeddingBatch, EmbeddingTableError> {
        let ids = self.ids(batch)?;
        let column = batch.column_by_name(EMBEDDING_COLUMN);
        let rows = column.map_or_else(|| Ok(Vec::new()), |column| self.lists(column))?;
        let mut values = Vec::new();
        for ((id, embedding), row) in ids.iter().zip(rows).zip(1..) {
            let wrong =
                |reason: String| EmbeddingTableError::Row { file: self.file.clone(), row: self.row + row, reason };
            let embedding = embedding.ok_or_else(|| wrong(format!("{id} has no embedding")))?;
            let found = embedding.len();
            let expected = *self.dimension.get_or_insert(found);
            if found != expected || found == 0 {
                return Err(wrong(format!(
                    "the embedding of {id} has {found} values, expected {expected} as in those before, at least 1"
                )));
            }
            let embedding = embedding.as_primitive::<Float32Type>();
            let is_finite = |at: &usize| embedding.is_valid(*at) && embedding.value(*at).is_finite();
            if let Some(position) = (0..found).find(|at| !is_finite(at)) {
                return Err(wrong(format!(
                    "the embedding of {id} holds NaN, infinity or null at position {position}; embeddings must be finite"
                )));
            }
            values.extend_from_slice(embedding.values());
        }
        self.row += batch.num_rows() as u64;
        Ok(EmbeddingBatch { ids, values, dimension: self.dimension.unwrap_or(1) })
    }

    fn ids(&self, batch: &RecordBatch) -> Result<Vec<EntityId>, EmbeddingTableError> {
        let column = batch.column_by_name(self.id).ok_or_else(|| self.wrong_type(self.id, &DataType::Null))?;
        let target = match column.data_type() {
            DataType::Int64 => DataType::Int64,
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => DataType::Utf8,
            other => return Err(self.wrong_type(self.id, other)),
        };
        let column = self.cast(column, self.id, &target)?;
        let id = |at: usize| match target {
            _ if column.is_null(at) => None,
            DataType::Int64 => Some(EntityId::Int(column.as_primitive::<Int64Type>().value(at))),
            _ => Some(EntityId::Text(column.as_string::<i32>().value(at).to_owned())),
        };
        let ids = (0..column.len()).zip(1..).map(|(at, row)| {
            id(at).ok_or_else(|| EmbeddingTableError::Row {
                file: self.file.clone(),
                row: self.row + row,
                reason: format!("column {:?} is empty; every entity needs an id", self.id),
            })
        });
        ids.collect()
    }

    /// The lists of a column, each of single-precision values; none where there is no list.
    fn lists(&self, column: &ArrayRef) -> Result<Vec<Option<ArrayRef>>, EmbeddingTableError> {
        let item = |item: &DataType| matches!(item, DataType::Float32 | DataType::Float64);
        let single = |item: &arrow::datatypes::FieldRef| {
            let field = item.as_ref().clone();
            std::sync::Arc::new(field.with_data_type(DataType::Float32))
        };
        let lists = match column.data_type() {
            DataType::FixedSizeList(field, size) if item(field.data_type()) => {
                let target = DataType::FixedSizeList(single(field), *size);
                let lists = self.cast(column, EMBEDDING_COLUMN, &target)?;
                lists.as_fixed_size_list().iter().collect()
            }
            DataType::List(field) if item(field.data_type()) => {
                let target = DataType::List(single(field));
                let lists = self.cast(column, EMBEDDING_COLUMN, &target)?;
                lists.as_list::<i32>().iter().collect()
            }
            DataType::LargeList(field) if item(field.data_type()) => {
                let target = DataType::LargeList(single(field));
                let lists = self.cast(column, EMBEDDING_COLUMN, &target)?;
                lists.as_list::<i64>().iter().collect()
            }
            other => return Err(self.wrong_type(EMBEDDING_COLUMN, other)),
        };
        Ok(lists)
    }

    fn cast(&self, column: &ArrayRef, name: &str, target: &DataType) -> Result<ArrayRef, EmbeddingTableError> {
        cast(column, target).map_err(|_| self.wrong_type(name, column.data_type()))
    }

    fn wrong_type(&self, column: &str, found: &DataType) -> EmbeddingTableError {
        EmbeddingTableError::Type {
            file: self.file.clone(),
            column: column.to_owned(),
            found: found.clone(),
            expected: match column {
                EMBEDDING_COLUMN => "a list of float or double, of fixed size or not",
                _ => "int64 or string",
            },
        }
    }
}

fn names(reader: &TableReader) -> Vec<String> {
    let fields = reader.schema().fields().iter();
    fields.map(|field| field.name().clone()).collect()
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

    fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) -> Location {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let file = std::fs::File::create(path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        Location::parse(path.to_str().unwrap()).unwrap()
    }

    async fn read(location: &Location) -> Result<Vec<(EntityId, Vec<f32>)>, EmbeddingTableError> {
        let mut reader = EmbeddingTable::open(location).await?;
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
        let narrow: ArrayRef = Arc::new(Int32Array::from(vec![1, 2]));
        let no_id: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None]));
        let embedding = |row| (EMBEDDING_COLUMN, list(vec![good(), row]));
        let cases = [
            (vec![ids()], "no column embedding; it has entity_id"),
            (vec![embedding(good())], "no column entity_id; it has embedding"),
            (vec![ids(), (EMBEDDING_COLUMN, flat)], "column \"embedding\" is Float64; expected a list"),
            (vec![("id", narrow), embedding(good())], "column \"id\" is Int32; expected int64 or string"),
            (vec![("id", no_id), embedding(good())], "row 2: column \"id\" is empty"),
            (vec![ids(), embedding(None)], "row 2: 8 has no embedding"),
            (vec![ids(), embedding(Some(vec![Some(1.0)]))], "row 2: the embedding of 8 has 1 values, expected 2"),
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
