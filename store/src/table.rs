//! Typed rows in Parquet: one schema, one way to write it, one way to read it.
//!
//! Rows are serde values that move in and out of columns as JSON values do, so a row type and its
//! arrow schema are the whole definition of a file. Files are zstd-compressed, with dictionary encoding
//! off for free text, where it only costs memory.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::kernels::length::length;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryFutureExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::{
    AsyncFileReader, MetadataSuffixFetch, ParquetRecordBatchStream, ParquetRecordBatchStreamBuilder,
};
use parquet::arrow::{ArrowWriter, ProjectionMask, arrow_reader::ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::{KeyValue, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::{ColumnPath, SchemaDescriptor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::batch::{from_batch, objects_of};
use crate::cells;
use crate::embedding_column;
use crate::location::Location;
use laser_schema::embedding::{EmbeddingLayout, Embeddings};
use laser_schema::entity::IdType;

pub use crate::batch::{BatchError, to_batch};

/// Rows read or written at a time.
const BATCH_ROWS: usize = 1024;

/// A row group is closed at this size, which bounds what a reader has to hold.
const ROW_GROUP_BYTES: usize = 32 << 20;

/// The type of a column of ids.
pub fn id_type(id: IdType) -> DataType {
    match id {
        IdType::Int64 => DataType::Int64,
        IdType::String => DataType::Utf8,
    }
}

/// The type of a column of times.
pub(crate) fn timestamp() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

/// Why a Parquet file could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The bytes are not the Parquet file that was expected.
    #[error("{file}: not readable as Parquet: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// The reader's message.
        reason: String,
    },
    /// A row does not fit the schema.
    #[error("{file}: a row does not fit the file's schema: {reason}")]
    Row {
        /// The file.
        file: String,
        /// The codec's message.
        reason: String,
    },
}

/// Encodes rows as one Parquet file with `metadata` in its footer. Equal input gives equal bytes.
///
/// # Errors
/// [`TableError::Row`] if a row does not fit the schema.
pub fn encode<T: Serialize>(
    file: &str,
    schema: SchemaRef,
    rows: &[T],
    metadata: &[(&str, String)],
) -> Result<Bytes, TableError> {
    write(file, schema, rows, None, metadata).map(Bytes::from)
}

/// Encodes rows as [`encode`] does, with a column of embeddings after those of `schema` if there are any. Floats keep
/// every bit.
///
/// # Errors
/// [`TableError::Row`] if a row does not fit the schema, or not every row has an embedding.
pub(crate) fn write<T: Serialize>(
    file: &str,
    schema: SchemaRef,
    rows: &[T],
    embedded: Option<(&Embeddings, EmbeddingLayout)>,
    metadata: &[(&str, String)],
) -> Result<Vec<u8>, TableError> {
    let with_embeddings = match embedded {
        None => schema.clone(),
        Some((embeddings, layout)) if embeddings.len() == rows.len() => {
            embedding_column::append_to(layout, &schema, embeddings.dimensions())
        }
        Some((embeddings, _)) => {
            let reason = format!("{} embeddings for {} rows", embeddings.len(), rows.len());
            return Err(TableError::Row { file: file.to_owned(), reason });
        }
    };
    let mut encoder = TableEncoder::new(file, with_embeddings.clone(), metadata)?;
    for (start, chunk) in (0..).step_by(BATCH_ROWS).zip(rows.chunks(BATCH_ROWS)) {
        let Some((embeddings, layout)) = embedded else {
            encoder.write(chunk)?;
            continue;
        };
        let batch = to_batch(&schema, chunk).map_err(|reason| encoder.row_error(reason))?;
        let column = embedding_column::array(layout, embeddings, start..start + chunk.len());
        let mut columns = batch.columns().to_vec();
        columns.push(column.map_err(|reason| encoder.row_error(reason))?);
        let batch = RecordBatch::try_new(with_embeddings.clone(), columns);
        encoder.write_batch(&batch.map_err(|e| encoder.row_error(e))?)?;
    }
    encoder.finish()
}

/// Encodes one Parquet file from rows as they come. Memory is the encoded file, one row group, and the rows of one
/// call.
#[derive(Debug)]
pub struct TableEncoder {
    file: String,
    schema: SchemaRef,
    writer: ArrowWriter<Vec<u8>>,
}

impl TableEncoder {
    /// A file of these columns with `metadata` in its footer.
    ///
    /// # Errors
    /// [`TableError::Row`] if Parquet has no type for a column.
    pub fn new(file: &str, schema: SchemaRef, metadata: &[(&str, String)]) -> Result<Self, TableError> {
        let writer = ArrowWriter::try_new(Vec::new(), schema.clone(), Some(properties(metadata, true)))
            .map_err(|e| TableError::Row { file: file.to_owned(), reason: e.to_string() })?;
        Ok(Self { file: file.to_owned(), schema, writer })
    }

    /// Appends rows.
    ///
    /// # Errors
    /// [`TableError::Row`] if a row does not fit the schema.
    pub fn write<T: Serialize>(&mut self, rows: &[T]) -> Result<(), TableError> {
        let batch = to_batch(&self.schema, rows).map_err(|reason| self.row_error(reason))?;
        self.write_batch(&batch)
    }

    fn write_batch(&mut self, batch: &RecordBatch) -> Result<(), TableError> {
        self.writer.write(batch).map_err(|e| self.row_error(e))
    }

    /// The file.
    ///
    /// # Errors
    /// [`TableError::Row`] if the last rows cannot be encoded.
    pub fn finish(self) -> Result<Vec<u8>, TableError> {
        let Self { file, writer, .. } = self;
        writer.into_inner().map_err(|e| TableError::Row { file, reason: e.to_string() })
    }

    fn row_error(&self, reason: impl ToString) -> TableError {
        TableError::Row { file: self.file.clone(), reason: reason.to_string() }
    }
}

/// How Laser writes its tables; without `indexes` they take less, and readers find a row by reading all.
pub(crate) fn properties(metadata: &[(&str, String)], indexes: bool) -> WriterProperties {
    let pairs = metadata.iter().map(|(k, v)| KeyValue::new((*k).to_owned(), v.clone())).collect();
    // Its values are all different, and nobody looks for one.
    let embedding = ["embedding", "list", "item"].map(str::to_owned).to_vec();
    let embedding = ColumnPath::new(embedding);
    let builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).unwrap_or_default()))
        .set_column_dictionary_enabled(ColumnPath::from("text"), false)
        .set_column_dictionary_enabled(embedding.clone(), false)
        .set_column_statistics_enabled(embedding, EnabledStatistics::None)
        .set_column_bloom_filter_enabled(ColumnPath::from("entity_id"), indexes)
        .set_key_value_metadata(Some(pairs))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES));
    match indexes {
        true => builder.build(),
        false => builder.set_statistics_enabled(EnabledStatistics::None).set_offset_index_disabled(true).build(),
    }
}

/// Decodes a whole Parquet file.
///
/// # Errors
/// [`TableError`] if the bytes are no such file.
pub fn decode<T: DeserializeOwned + Send>(file: &str, bytes: Bytes) -> Result<Vec<T>, TableError> {
    decode_batches(file, bytes, &mut |batch| from_batch(&batch))
}

/// Decodes a whole Parquet file and its column of embeddings of `dimensions` values.
///
/// # Errors
/// [`TableError`] if the bytes are no such file.
pub fn decode_embedded<T: DeserializeOwned + Send>(
    file: &str,
    bytes: Bytes,
    dimensions: usize,
) -> Result<(Vec<T>, Embeddings), TableError> {
    let mut embeddings = Embeddings::new(dimensions);
    let rows =
        decode_batches(file, bytes, &mut |batch| from_batch(&embedding_column::split(&batch, &mut embeddings)?))?;
    Ok((rows, embeddings))
}

fn decode_batches<T>(
    file: &str,
    bytes: Bytes,
    decode: &mut dyn FnMut(RecordBatch) -> Result<Vec<T>, BatchError>,
) -> Result<Vec<T>, TableError> {
    let unreadable = |reason: String| TableError::Unreadable { file: file.to_owned(), reason };
    let reader = ParquetRecordBatchReaderBuilder::try_new(bytes)
        .and_then(|b| b.with_batch_size(BATCH_ROWS).build())
        .map_err(|e| unreadable(e.to_string()))?;
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch.map_err(|e| unreadable(e.to_string()))?;
        rows.extend(decode(batch).map_err(|e| TableError::Row { file: file.to_owned(), reason: e.to_string() })?);
    }
    Ok(rows)
}

/// One value of the footer, if it is there.
pub(crate) fn metadata_value(metadata: &ParquetMetaData, key: &str) -> Option<String> {
    let pairs = metadata.file_metadata().key_value_metadata()?;
    pairs.iter().find(|p| p.key == key).and_then(|p| p.value.clone())
}

/// Which columns of a table are read.
#[derive(Debug, Clone, Copy)]
pub enum Select<'a> {
    /// All.
    All,
    /// Those of these names, as far as they are there.
    Only(&'a [&'a str]),
    /// All, but the lists of this one as their lengths: of their elements one field is read.
    Counting(&'a str),
}

impl Select<'_> {
    /// The column that is counted; other types than lists are read as they are.
    fn counted(self, schema: &Schema) -> Option<usize> {
        let Self::Counting(name) = self else {
            return None;
        };
        let (column, field) = schema.column_with_name(name)?;
        is_list(field.data_type()).then_some(column)
    }

    fn mask(self, schema: &Schema, stored: &SchemaDescriptor) -> ProjectionMask {
        if let Self::Only(names) = self {
            let roots = names.iter().filter_map(|name| schema.index_of(name).ok());
            return ProjectionMask::roots(stored, roots);
        }
        let Some(counted) = self.counted(schema) else {
            return ProjectionMask::all();
        };
        let root = |leaf: usize| stored.get_column_root_idx(leaf);
        let repeats = |leaf: usize| root(leaf) == counted && leaf > 0 && root(leaf - 1) == counted;
        let leaves = (0..stored.num_columns()).filter(|&leaf| !repeats(leaf));
        ProjectionMask::leaves(stored, leaves)
    }
}

/// Whether a column can be counted by [`Select::Counting`].
pub(crate) fn is_list(data_type: &DataType) -> bool {
    matches!(data_type, DataType::List(_) | DataType::LargeList(_))
}

/// Rows by column, and a column that was asked for apart.
pub(crate) type Objects = (Vec<Map<String, Value>>, Option<ArrayRef>);

/// Reads a Parquet object in record batches, row group by row group.
#[derive(Debug)]
pub struct TableReader {
    file: String,
    schema: SchemaRef,
    counted: Option<usize>,
    metadata: Arc<ParquetMetaData>,
    stream: ParquetRecordBatchStream<ParquetObject>,
}

impl TableReader {
    /// Opens the object and reads its footer.
    ///
    /// # Errors
    /// [`TableError::Unreadable`] if it is missing or no Parquet file.
    pub async fn open(location: &Location) -> Result<Self, TableError> {
        Self::open_columns(location, Select::All).await
    }

    /// Opens the object to read these columns.
    ///
    /// # Errors
    /// [`TableError::Unreadable`] if it is missing or no Parquet file.
    pub async fn open_columns(location: &Location, columns: Select<'_>) -> Result<Self, TableError> {
        let file = location.url().to_owned();
        let unreadable = |e: ParquetError| TableError::Unreadable { file: file.clone(), reason: e.to_string() };
        let (store, path) = location.store();
        let builder = ParquetRecordBatchStreamBuilder::new(ParquetObject { store, path })
            .await
            .map_err(unreadable)?
            .with_batch_size(BATCH_ROWS);
        let (schema, metadata) = (builder.schema().clone(), builder.metadata().clone());
        let counted = columns.counted(&schema);
        let mask = columns.mask(&schema, builder.parquet_schema());
        let stream = builder.with_projection(mask).build().map_err(unreadable)?;
        Ok(Self { file, schema, counted, metadata, stream })
    }

    /// The file's columns, read or not.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The number of the file's rows.
    pub fn rows(&self) -> u64 {
        self.metadata.file_metadata().num_rows().unsigned_abs()
    }

    /// One value of the footer.
    pub fn footer(&self, key: &str) -> Option<String> {
        metadata_value(&self.metadata, key)
    }

    /// The next rows, or `None` at the end. They are decoded on all of rayon's threads.
    ///
    /// # Errors
    /// [`TableError`] if a batch cannot be read or does not fit the row type.
    pub async fn next<T: DeserializeOwned + Send>(&mut self) -> Result<Option<Vec<T>>, TableError> {
        let Some(batch) = self.next_batch().await? else {
            return Ok(None);
        };
        let rows = from_batch(&batch).map(Some);
        rows.map_err(|e| TableError::Row { file: self.file.clone(), reason: e.to_string() })
    }

    /// The next rows by column, or `None` at the end; otherwise as [`Self::next`]. If `apart` is a column of lists, and
    /// their values can be had one by one, it comes as it is stored, and rows do not have it.
    ///
    /// # Errors
    /// [`TableError`] if a batch cannot be read.
    pub(crate) async fn next_objects(&mut self, apart: Option<&str>) -> Result<Option<Objects>, TableError> {
        let Some(mut batch) = self.next_batch().await? else {
            return Ok(None);
        };
        let schema = batch.schema();
        let apart = apart.and_then(|name| schema.index_of(name).ok());
        let has_values = |column: &ArrayRef| is_list(column.data_type()) && cells::has_values(column);
        let apart = apart.filter(|&column| has_values(batch.column(column)));
        let lists = apart.map(|column| batch.remove_column(column));
        let rows =
            objects_of(&batch).map_err(|e| TableError::Row { file: self.file.clone(), reason: e.to_string() })?;
        Ok(Some((rows, lists)))
    }

    /// The next rows as they are stored (but for lists that are counted), or `None` at the end.
    ///
    /// # Errors
    /// [`TableError::Unreadable`] if a batch cannot be read.
    pub async fn next_batch(&mut self) -> Result<Option<RecordBatch>, TableError> {
        let batch = self.stream.next().await.transpose();
        let batch = batch.and_then(|batch| Ok(batch.map(|batch| self.count(batch)).transpose()?));
        batch.map_err(|e| TableError::Unreadable { file: self.file.clone(), reason: e.to_string() })
    }

    fn count(&self, batch: RecordBatch) -> Result<RecordBatch, ArrowError> {
        let Some(column) = self.counted else {
            return Ok(batch);
        };
        let lengths = length(batch.column(column))?;
        let mut fields = batch.schema().fields().to_vec();
        fields[column] = Arc::new(Field::new(fields[column].name(), lengths.data_type().clone(), true));
        let mut columns = batch.columns().to_vec();
        columns[column] = lengths;
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
    }
}

/// A Parquet object behind any store, read by ranges.
struct ParquetObject {
    store: Arc<dyn ObjectStore>,
    path: Path,
}

fn external(error: object_store::Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl AsyncFileReader for ParquetObject {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, ParquetError>> {
        self.store.get_range(&self.path, range).map_err(external).boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, Result<Vec<Bytes>, ParquetError>> {
        async move { self.store.get_ranges(&self.path, &ranges).await.map_err(external) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>, ParquetError>> {
        async move {
            let reader = ParquetMetaDataReader::new().with_arrow_reader_options(options);
            reader.load_via_suffix_and_finish(self).await.map(Arc::new)
        }
        .boxed()
    }
}

impl MetadataSuffixFetch for &mut ParquetObject {
    fn fetch_suffix(&mut self, suffix: usize) -> BoxFuture<'_, Result<Bytes, ParquetError>> {
        let options = GetOptions { range: Some(GetRange::Suffix(suffix as u64)), ..Default::default() };
        async move {
            let got = self.store.get_opts(&self.path, options).await.map_err(external)?;
            got.bytes().await.map_err(external)
        }
        .boxed()
    }
}
