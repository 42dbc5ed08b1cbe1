//! Tables without the rows of erased entities.
//!
//! A published part keeps its name and its size: zeros before the footer take the place of the rows that are gone. So
//! one atomic write replaces it, whatever tells its name and size (a plan, the log of a Delta table and its earlier
//! versions) stays true, and the name never becomes free for a late worker. All other rows keep every bit, since they
//! are copied as columns and not as records.

use std::collections::{BTreeSet, HashMap};

use arrow::array::{AsArray, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use bytes::Bytes;
use laser_schema::EntityId;
use laser_schema::knowledge::PartInfo;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use crate::id_list::IdList;
use crate::location::Location;
use crate::part::PART_KEY;
use crate::sealed::{self, BLANK, DIGEST_KEY, SealedTable, entity_ids};
use crate::table::{self, Select, TableError, TableReader};

/// The column of entities in all that Laser writes.
const ID: &str = "entity_id";

/// The key by which Parquet files keep their Arrow schema; the writer adds it.
const ARROW_SCHEMA: &str = "ARROW:schema";

/// What a table holds of the entities of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundRows {
    /// The entities' ids, as text.
    pub ids: BTreeSet<String>,
    /// Entities with rows; one may have several, where a list has a row for each item.
    pub rows: u64,
    /// Entities in the footer of a part that have an error in place of a row.
    pub errors: u64,
}

/// Looks for entities in a table of Laser's. Reads one column and the footer.
///
/// # Errors
/// [`TableError::Unreadable`] if it is missing or no such table.
pub async fn find_rows(table: &Location, ids: &IdList) -> Result<FoundRows, TableError> {
    let mut reader = TableReader::open_columns(table, Select::Only(&[ID])).await?;
    let mut found = FoundRows::default();
    let mut last = None;
    while let Some(batch) = reader.next_batch().await? {
        for id in ids_of(table.url(), &batch)?.into_iter().filter(|id| ids.contains(id)) {
            if last.as_ref() != Some(&id) {
                found.rows += 1;
                found.ids.insert(id.to_string());
                last = Some(id);
            }
        }
    }
    if let Some(info) = reader.footer(PART_KEY) {
        let info: PartInfo = serde_json::from_str(&info).map_err(|e| unreadable(table.url(), e))?;
        let errors = info.errors.iter().filter(|error| ids.contains(&error.entity_id));
        let errors: Vec<String> = errors.map(|error| error.entity_id.to_string()).collect();
        found.errors = errors.len() as u64;
        found.ids.extend(errors);
    }
    Ok(found)
}

/// Returns a part without the entities of a list, as long as it was; `None` if it holds none of them. What its footer
/// says of the work of the night stays: sums are no rows.
///
/// # Errors
/// [`TableError::Unreadable`] if it is not as it was written.
pub fn erase_from_part(file: &str, bytes: Bytes, ids: &IdList) -> Result<Option<Bytes>, TableError> {
    let size = bytes.len();
    let table = SealedTable::open(file, bytes.clone())?;
    let kept = Kept::new(file, bytes, table.metadata(), ids)?;
    let mut pairs = pairs(table.metadata());
    let mut errors = 0;
    for (_, value) in pairs.iter_mut().filter(|(key, _)| key == PART_KEY) {
        let mut info: PartInfo = serde_json::from_str(value).map_err(|e| unreadable(file, e))?;
        let all = info.errors.len();
        info.errors.retain(|error| !ids.contains(&error.entity_id));
        errors += all - info.errors.len();
        info.rows -= kept.erased.len() as u64;
        info.carried -= kept.erased.iter().filter(|erased| erased.generated_by != info.run).count() as u64;
        *value = serde_json::to_string(&info).map_err(|e| unreadable(file, e))?;
    }
    if kept.erased.is_empty() && errors == 0 {
        return Ok(None);
    }
    pairs.push((DIGEST_KEY.to_owned(), BLANK.to_owned()));
    for indexes in [true, false] {
        let mut bytes = kept.write(file, &pairs, indexes)?;
        if sealed::pad(&mut bytes, size) {
            return sealed::seal(file, bytes).map(Some);
        }
    }
    let reason = format!("fewer rows take more than its {size} bytes; this is a fault of Laser, please report it");
    Err(TableError::Row { file: file.to_owned(), reason })
}

/// The input of a shard without the entities of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErasedShard {
    /// The file.
    pub bytes: Bytes,
    /// Its rows.
    pub rows: u64,
    /// Entities that are gone; if there are none, the file is as it was.
    pub erased: usize,
}

/// Returns the input of a shard without the entities of a list.
///
/// # Errors
/// [`TableError::Unreadable`] if it is no table.
pub fn erase_from_shard(file: &str, bytes: Bytes, ids: &IdList) -> Result<ErasedShard, TableError> {
    let metadata = ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::new()).map_err(|e| unreadable(file, e))?;
    let kept = Kept::new(file, bytes.clone(), &metadata, ids)?;
    let rows = kept.batches.iter().map(|batch| batch.num_rows() as u64).sum();
    let erased = kept.erased.len();
    let bytes = if erased == 0 { bytes } else { kept.write(file, &pairs(&metadata), true)?.into() };
    Ok(ErasedShard { bytes, rows, erased })
}

/// An entity that goes.
struct Erased {
    id: EntityId,
    /// The run that generated its text; empty where the table does not say.
    generated_by: String,
}

/// A table divided into what stays and what goes.
struct Kept {
    batches: Vec<RecordBatch>,
    erased: Vec<Erased>,
    schema: arrow::datatypes::SchemaRef,
}

impl Kept {
    fn new(file: &str, bytes: Bytes, metadata: &ArrowReaderMetadata, ids: &IdList) -> Result<Self, TableError> {
        // The reader's schema has all pairs of the footer, errors with their ids among them, which the writer would put
        // into the footer a second time, encoded.
        let schema = metadata.schema().as_ref().clone().with_metadata(HashMap::new());
        let mut kept = Self { batches: Vec::new(), erased: Vec::new(), schema: schema.into() };
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(bytes, metadata.clone()).build();
        for batch in reader.map_err(|e| unreadable(file, e))? {
            let batch = batch.map_err(|e| unreadable(file, e))?;
            kept.divide(file, &batch, ids)?;
        }
        Ok(kept)
    }

    fn divide(&mut self, file: &str, batch: &RecordBatch, ids: &IdList) -> Result<(), TableError> {
        let generated_by = batch.column_by_name("generated_by").and_then(|column| column.as_string_opt::<i32>());
        let mut stays = Vec::with_capacity(batch.num_rows());
        for (row, id) in ids_of(file, batch)?.into_iter().enumerate() {
            stays.push(!ids.contains(&id));
            if !stays[row] && self.erased.last().is_none_or(|last| last.id != id) {
                let generated_by = generated_by.map_or("", |column| column.value(row)).to_owned();
                self.erased.push(Erased { id, generated_by });
            }
        }
        let rows = filter_record_batch(batch, &BooleanArray::from(stays)).map_err(|e| unreadable(file, e))?;
        self.batches.push(rows);
        Ok(())
    }

    fn write(&self, file: &str, pairs: &[(String, String)], indexes: bool) -> Result<Vec<u8>, TableError> {
        let pairs: Vec<(&str, String)> = pairs.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        let properties = table::properties(&pairs, indexes);
        let written = || {
            let mut writer = ArrowWriter::try_new(Vec::new(), self.schema.clone(), Some(properties))?;
            self.batches.iter().try_for_each(|batch| writer.write(batch))?;
            writer.into_inner()
        };
        written().map_err(|e| TableError::Row { file: file.to_owned(), reason: e.to_string() })
    }
}

/// All that a footer says beside the columns, without the digest.
fn pairs(metadata: &ArrowReaderMetadata) -> Vec<(String, String)> {
    let pairs = metadata.metadata().file_metadata().key_value_metadata();
    let pairs = pairs.into_iter().flatten().filter(|pair| ![ARROW_SCHEMA, DIGEST_KEY].contains(&pair.key.as_str()));
    pairs.map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default())).collect()
}

fn ids_of(file: &str, batch: &RecordBatch) -> Result<Vec<EntityId>, TableError> {
    let ids = batch.column_by_name(ID).and_then(entity_ids);
    ids.ok_or_else(|| unreadable(file, format!("{ID} is neither int64 nor string")))
}

fn unreadable(file: &str, reason: impl ToString) -> TableError {
    TableError::Unreadable { file: file.to_owned(), reason: reason.to_string() }
}
