//! Parquet files that carry a digest of themselves.
//!
//! The footer's [`DIGEST_KEY`] is the BLAKE3 of the whole file with that value's 64 characters replaced by `0`. Hashing
//! alone therefore finds a flipped bit anywhere: in rows, statistics, indexes, bloom filters, in the footer and in the
//! digest itself, before anything is parsed.

use std::ops::Range;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use bytes::Bytes;
use laser_schema::embedding::{EmbeddingLayout, Embeddings};
use laser_schema::{Digest, EntityId};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::table::{self, TableError};

/// The footer key of the digest.
pub const DIGEST_KEY: &str = "laser.digest";

/// The digest's placeholder while the file is hashed.
pub(crate) const BLANK: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Rows of a batch when only some columns are read.
const BATCH_ROWS: usize = 8192;

/// Encodes rows, and embeddings if there are any, with one JSON value and the digest in the footer.
///
/// # Errors
/// [`TableError::Row`] if a row does not fit the schema, or not every row has an embedding.
pub(crate) fn encode<T: Serialize>(
    file: &str,
    schema: SchemaRef,
    rows: &[T],
    embedded: Option<(&Embeddings, EmbeddingLayout)>,
    (key, value): (&str, &impl Serialize),
) -> Result<Bytes, TableError> {
    let wrong = |reason: String| TableError::Row { file: file.to_owned(), reason };
    let value = serde_json::to_string(value).map_err(|e| wrong(e.to_string()))?;
    // The digest comes last, so that it is found fast whatever the value's length.
    let metadata = [(key, value), (DIGEST_KEY, BLANK.to_owned())];
    seal(file, table::write(file, schema, rows, embedded, &metadata)?)
}

/// Puts the digest in the place of [`BLANK`].
pub(crate) fn seal(file: &str, mut bytes: Vec<u8>) -> Result<Bytes, TableError> {
    let lacks_digest = || TableError::Row { file: file.to_owned(), reason: "the footer lacks the digest".to_owned() };
    let place = digest_place(&bytes).ok_or_else(lacks_digest)?;
    let digest = digest_but_for(&bytes, &place);
    bytes[place].copy_from_slice(digest.as_str().as_bytes());
    Ok(bytes.into())
}

/// Fills a file up to `size` bytes with zeros before its footer, where no reader looks: a footer names what it
/// describes by its distance from the start. `false` if the file is longer.
pub(crate) fn pad(bytes: &mut Vec<u8>, size: usize) -> bool {
    let Some(more) = size.checked_sub(bytes.len()) else {
        return false;
    };
    let Some(footer) = footer_place(bytes) else {
        return false;
    };
    bytes.splice(footer.start..footer.start, std::iter::repeat_n(0, more));
    true
}

/// Where a Parquet file's footer is.
fn footer_place(bytes: &[u8]) -> Option<Range<usize>> {
    let trailer = bytes.len().checked_sub(8)?;
    let length = u32::from_le_bytes(bytes[trailer..trailer + 4].try_into().ok()?);
    let footer = trailer.checked_sub(usize::try_from(length).ok()?)?;
    Some(footer..trailer)
}

/// Where the digest's characters are. Thrift's compact protocol writes a key and its value as two strings, each after
/// its field header (`0x18`) and its length; the last such pair of the footer counts, since texts in the statistics
/// come before it.
fn digest_place(bytes: &[u8]) -> Option<Range<usize>> {
    let Range { start: footer, end: trailer } = footer_place(bytes)?;
    let mut mark = vec![0x18, u8::try_from(DIGEST_KEY.len()).ok()?];
    mark.extend_from_slice(DIGEST_KEY.as_bytes());
    mark.extend([0x18, u8::try_from(BLANK.len()).ok()?]);
    let at = bytes[footer..trailer].windows(mark.len()).rposition(|window| window == mark)?;
    let start = footer + at + mark.len();
    (start + BLANK.len() <= trailer).then(|| start..start + BLANK.len())
}

fn digest_but_for(bytes: &[u8], place: &Range<usize>) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes[..place.start]).update(BLANK.as_bytes()).update(&bytes[place.end..]);
    Digest::from_bytes(*hasher.finalize().as_bytes())
}

/// A file in memory that is as it was written.
#[derive(Debug)]
pub(crate) struct SealedTable {
    file: String,
    bytes: Bytes,
    metadata: ArrowReaderMetadata,
}

impl SealedTable {
    /// Checks the digest and reads the footer.
    ///
    /// # Errors
    /// [`TableError::Unreadable`] if the bytes are no such file or were changed.
    pub(crate) fn open(file: &str, bytes: Bytes) -> Result<Self, TableError> {
        let unreadable = |reason: String| TableError::Unreadable { file: file.to_owned(), reason };
        let place = digest_place(&bytes).ok_or_else(|| unreadable(format!("its footer has no {DIGEST_KEY}")))?;
        if digest_but_for(&bytes, &place).as_str().as_bytes() != &bytes[place] {
            return Err(unreadable("its bytes do not match the digest in its footer".to_owned()));
        }
        let metadata = ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::new());
        let metadata = metadata.map_err(|e| unreadable(e.to_string()))?;
        Ok(Self { file: file.to_owned(), bytes, metadata })
    }

    /// What its footer says of columns and row groups.
    pub(crate) fn metadata(&self) -> &ArrowReaderMetadata {
        &self.metadata
    }

    pub(crate) fn unreadable(&self, reason: impl Into<String>) -> TableError {
        TableError::Unreadable { file: self.file.clone(), reason: reason.into() }
    }

    /// The number of its rows.
    pub(crate) fn rows(&self) -> u64 {
        self.metadata.metadata().file_metadata().num_rows().unsigned_abs()
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// The JSON value of a footer key.
    pub(crate) fn footer<T: DeserializeOwned>(&self, key: &str) -> Result<T, TableError> {
        let value = table::metadata_value(self.metadata.metadata(), key)
            .ok_or_else(|| self.unreadable(format!("the footer has no {key}: not written by Laser")))?;
        serde_json::from_str(&value).map_err(|e| self.unreadable(format!("{key}: {e}")))
    }

    /// The type of the ids, of which the columns depend.
    pub(crate) fn id_type(&self) -> Result<DataType, TableError> {
        let field = self.metadata.schema().field_with_name("entity_id");
        field.map(|field| field.data_type().clone()).map_err(|e| self.unreadable(e.to_string()))
    }

    /// Whether there is a column of this name.
    pub(crate) fn has_column(&self, name: &str) -> bool {
        self.metadata.schema().index_of(name).is_ok()
    }

    /// Checks that the columns are those of a schema: names, types, and that none may hold nulls which should not.
    pub(crate) fn check_columns(&self, expected: &Schema) -> Result<(), TableError> {
        let found = self.metadata.schema();
        let differs = |(at, field): (usize, _)| found.fields().get(at) != Some(field);
        match expected.fields().iter().enumerate().find(|pair| differs(*pair)) {
            Some((at, field)) => {
                let found = found.fields().get(at).map_or("nothing".to_owned(), |field| field.to_string());
                Err(self.unreadable(format!("column {}: expected {field}, found {found}", at + 1)))
            }
            None if found.fields().len() > expected.fields().len() => {
                let more = found.field(expected.fields().len());
                Err(self.unreadable(format!("it has a column too many: {more}")))
            }
            None => Ok(()),
        }
    }

    /// The ids of all rows.
    pub(crate) fn ids(&self) -> Result<Vec<EntityId>, TableError> {
        let mut ids = Vec::new();
        for batch in self.batches(&["entity_id"])? {
            let batch = batch?;
            let column = batch.column_by_name("entity_id").and_then(entity_ids);
            ids.extend(column.ok_or_else(|| self.unreadable("entity_id is neither int64 nor string"))?);
        }
        Ok(ids)
    }

    /// Some columns of all rows.
    pub(crate) fn batches(
        &self,
        columns: &[&str],
    ) -> Result<impl Iterator<Item = Result<RecordBatch, TableError>>, TableError> {
        let schema = self.metadata.schema();
        let roots = columns.iter().filter_map(|name| schema.index_of(name).ok());
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(self.bytes.clone(), self.metadata.clone());
        let reader = builder.with_batch_size(BATCH_ROWS).with_projection(mask).build();
        let reader = reader.map_err(|e| self.unreadable(e.to_string()))?;
        Ok(reader.map(|batch| batch.map_err(|e| self.unreadable(e.to_string()))))
    }
}

/// The ids of a column; none if it is of another type or has nulls.
pub(crate) fn entity_ids(column: &ArrayRef) -> Option<Vec<EntityId>> {
    if column.null_count() > 0 {
        return None;
    }
    let column = column.as_any();
    match column.downcast_ref::<Int64Array>() {
        Some(ids) => Some(ids.values().iter().copied().map(EntityId::Int).collect()),
        None => {
            let ids = column.downcast_ref::<StringArray>()?;
            Some(ids.iter().flatten().map(|id| EntityId::Text(id.to_owned())).collect())
        }
    }
}
