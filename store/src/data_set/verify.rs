//! The check that a published folder is whole.
//!
//! Parts are read once each and checked in parallel: memory is that of a few parts, and the ids are compared through
//! the local disk. What all data sets share is here; each adds the check of its own columns.

use std::collections::HashSet;
use std::io::BufReader;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::entity::IdType;
use laser_schema::ids::{CODEBOOK, IdSet};
use laser_schema::knowledge::{Content, ErrorRecord, PartInfo};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{Details, ERRORS, MANIFEST, Manifest, PartEntry, Profiles, SUCCESS};
use laser_schema::{Digest, EntityId};
use serde::Serialize;

use crate::data_set::{ManifestError, data_set_of, is_complete, parse, parts_in_flight};
use crate::embedding_set::check_embeddings;
use crate::id_set::ids_schema;
use crate::lists;
use crate::location::{Location, LocationError};
use crate::part::{PART_KEY, part_ids};
use crate::sealed::SealedTable;
use crate::spill::SpillError;
use crate::table::TableError;
use crate::unique::UniqueIds;

/// Faults of one kind that are listed one by one.
const LISTED: usize = 100;

/// Rows without a text that are read from `_errors.jsonl` at a time.
const ERRORS_HELD: usize = 8192;

/// Why a folder could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// A thread of the check.
    #[error("the check of a part ended: {0}")]
    Ended(#[from] tokio::task::JoinError),
}

/// A check of a folder. No faults mean that the data set is whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The folder.
    pub folder: String,
    /// Parts that the manifest names.
    pub parts: usize,
    /// Rows counted.
    pub rows: u64,
    /// One line for each fault.
    pub faults: Vec<String>,
}

/// Checks a published folder of any data set: `_SUCCESS`, every part's digest, columns and row count, no nulls, no
/// entity twice, all that the data set's own columns must be, nothing missing and nothing that the manifest does not
/// name.
///
/// # Errors
/// If there is no manifest or it cannot be fetched, and [`VerifyError`]; every other fault is in the report.
pub async fn verify(folder: &Location) -> Result<VerifyReport, VerifyError> {
    let file = folder.join(MANIFEST);
    let bytes = file.read().await?;
    let check = Check::new(folder).await?;
    match data_set_of(&file, &bytes) {
        Ok(DataSet::Profiles | DataSet::Recommendations) => check.whole(parse::<Profiles>(&file, &bytes)).await,
        Ok(DataSet::Embeddings) => check.whole(parse::<EmbeddingSet>(&file, &bytes)).await,
        Ok(DataSet::KnowledgeIds) => check.whole(parse::<IdSet>(&file, &bytes)).await,
        Err(error) => Ok(check.failed(&error)),
    }
}

/// A part without its rows.
struct Checked {
    ids: Vec<EntityId>,
    faults: Vec<String>,
    /// Texts that were cut off before they were encoded.
    truncated: u64,
}

/// The checks that one data set adds to those of all.
trait CheckOwn: Details + Clone + Send + 'static {
    /// Checks the columns of a part.
    fn part(&self, table: &SealedTable) -> Result<Checked, TableError>;

    /// Checks what is there beside the parts, of whose texts so many were cut off.
    async fn others(manifest: &Manifest<Self>, truncated: u64, check: &mut Check<'_>) -> Result<(), VerifyError>;
}

impl CheckOwn for Profiles {
    fn part(&self, table: &SealedTable) -> Result<Checked, TableError> {
        // The manifest does not tell the type of listed items, what a row is, nor whether there are runners-up.
        let PartInfo { lists: items, list_rows, has_runners_up, .. } = table.footer(PART_KEY)?;
        let content = self.spec.content((items.unwrap_or(IdType::String), list_rows), has_runners_up);
        let parsed = self.spec.parsed();
        let ids = part_ids(table, table.id_type()?, content, (parsed.as_deref(), self.embedding.as_ref()))?;
        let faults = match content {
            Content::Texts { .. } => empty_texts(table, &ids)?,
            Content::Lists { rows, .. } => lists::faults(table, rows, &ids)?,
        };
        Ok(Checked { ids, faults, truncated: 0 })
    }

    async fn others(manifest: &Manifest<Self>, _: u64, check: &mut Check<'_>) -> Result<(), VerifyError> {
        check.errors(manifest.errors).await?;
        if manifest.rows + manifest.errors != manifest.entities {
            check.fault(format!(
                "{} rows and {} errors do not make up {} entities",
                manifest.rows, manifest.errors, manifest.entities
            ));
        }
        Ok(())
    }
}

fn empty_texts(table: &SealedTable, ids: &[EntityId]) -> Result<Vec<String>, TableError> {
    let (mut row, mut empty) = (0, Vec::new());
    for batch in table.batches(&["text"])? {
        let batch = batch?;
        let texts = batch.column(0).as_string::<i32>();
        let is_empty = texts.iter().map(|text| text.is_none_or(|text| text.trim().is_empty()));
        empty.extend(is_empty.enumerate().filter(|(_, is_empty)| *is_empty).map(|(at, _)| row + at));
        row += texts.len();
    }
    let empty = empty.into_iter().filter_map(|row| ids.get(row));
    Ok(empty.map(|id| format!("entity {id} has an empty text")).collect())
}

impl CheckOwn for EmbeddingSet {
    fn part(&self, table: &SealedTable) -> Result<Checked, TableError> {
        let part = check_embeddings(table)?;
        let mut faults = Vec::new();
        if part.embedding.spec != self.embedding.spec {
            faults.push("of another encoder than the manifest's".to_owned());
        }
        Ok(Checked { ids: table.ids()?, faults, truncated: part.embedding.truncated })
    }

    async fn others(manifest: &Manifest<Self>, truncated: u64, check: &mut Check<'_>) -> Result<(), VerifyError> {
        check.sum("texts cut off", truncated, manifest.embedding.truncated);
        Ok(())
    }
}

impl CheckOwn for IdSet {
    fn part(&self, table: &SealedTable) -> Result<Checked, TableError> {
        table.check_columns(&ids_schema(table.id_type()?))?;
        let (places, clusters) = (self.codebook.info.places(), self.codebook.info.clusters);
        let in_range = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < clusters);
        let (mut row, mut first) = (0, None);
        for batch in table.batches(&["knowledge_ids"])? {
            let batch = batch?;
            let lists = batch.column(0).as_list::<i32>();
            for at in 0..lists.len() {
                let list = lists.value(at);
                let found = list.as_primitive::<Int64Type>().values();
                if first.is_none() && (found.len() != places || !found.iter().all(in_range)) {
                    first = Some((row + at, found.to_vec()));
                }
            }
            row += lists.len();
        }
        let ids = table.ids()?;
        let fault = first.and_then(|(row, found)| {
            let id = ids.get(row)?;
            Some(format!("entity {id} has ids {found:?}, expected {places} below {clusters}"))
        });
        Ok(Checked { faults: fault.into_iter().collect(), ids, truncated: 0 })
    }

    async fn others(manifest: &Manifest<Self>, _: u64, check: &mut Check<'_>) -> Result<(), VerifyError> {
        check.file(CODEBOOK, &manifest.codebook.digest).await
    }
}

/// A folder while it is checked.
struct Check<'a> {
    folder: &'a Location,
    ids: UniqueIds,
    report: VerifyReport,
}

impl<'a> Check<'a> {
    /// Begins with `_SUCCESS`.
    async fn new(folder: &'a Location) -> Result<Self, LocationError> {
        let report = VerifyReport { folder: folder.url().to_owned(), ..VerifyReport::default() };
        let mut check = Self { folder, ids: UniqueIds::default(), report };
        if !is_complete(folder).await? {
            check.fault(format!("{SUCCESS} is missing: the run did not finish"));
        }
        Ok(check)
    }

    fn fault(&mut self, fault: String) {
        self.report.faults.push(fault);
    }

    /// The report of a folder that cannot be checked any further.
    fn failed(mut self, error: &ManifestError) -> VerifyReport {
        self.fault(error.to_string());
        self.report
    }

    /// The whole folder.
    async fn whole<D: CheckOwn>(
        mut self,
        manifest: Result<Manifest<D>, ManifestError>,
    ) -> Result<VerifyReport, VerifyError> {
        let manifest = match manifest {
            Ok(manifest) => manifest,
            Err(error) => return Ok(self.failed(&error)),
        };
        let truncated = self.parts(&manifest).await?;
        self.sum("rows", self.report.rows, manifest.rows);
        D::others(&manifest, truncated, &mut self).await?;
        self.finish(&manifest.parts).await
    }

    /// The bytes of a file that are as the manifest says.
    async fn file(&mut self, name: &str, digest: &Digest) -> Result<(), VerifyError> {
        let bytes = self.folder.join(name).read_optional().await?;
        if let Err(fault) = check_digest(bytes, digest) {
            self.fault(format!("{name}: {fault}"));
        }
        Ok(())
    }

    /// All parts; returns how many texts were cut off.
    async fn parts<D: CheckOwn>(&mut self, manifest: &Manifest<D>) -> Result<u64, VerifyError> {
        let folder = self.folder.clone();
        let checks = manifest.parts.iter().map(|part| check_part(&folder, part.clone(), manifest.details.clone()));
        let mut checks = futures::stream::iter(checks).buffered(parts_in_flight());
        let mut truncated = 0;
        while let Some((part, checked)) = checks.try_next().await? {
            let name = &part.name;
            match checked {
                Ok(checked) => {
                    let found = checked.ids.len() as u64;
                    self.report.rows += found;
                    truncated += checked.truncated;
                    self.list(name, checked.faults);
                    self.rows(name, found, part.rows);
                    self.ids.add(name, checked.ids.iter())?;
                }
                Err(fault) => self.fault(fault),
            }
        }
        Ok(truncated)
    }

    /// Adds faults of a file, of very many the first ones.
    fn list(&mut self, name: &str, faults: Vec<String>) {
        let more = faults.len().saturating_sub(LISTED);
        for fault in faults.into_iter().take(LISTED) {
            self.fault(format!("{name}: {fault}"));
        }
        if more > 0 {
            self.fault(format!("{name}: {more} more rows like these"));
        }
    }

    /// Compares the number of rows in a file with the manifest's.
    fn rows(&mut self, name: &str, found: u64, expected: u64) {
        if found != expected {
            self.fault(format!("{name}: {found} rows, the manifest says {expected}"));
        }
    }

    /// A sum over all parts that the manifest has too.
    fn sum(&mut self, counted: &str, found: u64, expected: u64) {
        if found != expected {
            self.fault(format!("{found} {counted} in the parts, the manifest says {expected}"));
        }
    }

    /// The rows without a text, as many as the manifest says.
    async fn errors(&mut self, expected: u64) -> Result<(), VerifyError> {
        let file = match self.folder.join(ERRORS).open().await {
            Err(LocationError::NotFound { .. }) => {
                self.rows(ERRORS, 0, expected);
                return Ok(());
            }
            file => BufReader::with_capacity(1 << 20, file?),
        };
        let (mut found, mut held) = (0, Vec::new());
        for row in serde_json::Deserializer::from_reader(file).into_iter::<ErrorRecord>() {
            match row {
                Ok(row) => held.push(row.entity_id),
                Err(error) => {
                    self.fault(format!("{ERRORS}: {error}"));
                    break;
                }
            }
            found += 1;
            if held.len() == ERRORS_HELD {
                self.ids.add(ERRORS, held.iter())?;
                held.clear();
            }
        }
        self.ids.add(ERRORS, held.iter())?;
        self.rows(ERRORS, found, expected);
        Ok(())
    }

    /// Ends with entities that are there twice and files that the manifest does not name.
    async fn finish(mut self, parts: &[PartEntry]) -> Result<VerifyReport, VerifyError> {
        let ids = std::mem::take(&mut self.ids);
        for twice in tokio::task::spawn_blocking(move || ids.repeated(LISTED)).await?? {
            self.fault(format!("{}: entity {} appears twice", twice.file, twice.id));
        }
        let known: HashSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        self.report.parts = known.len();
        for listed in self.folder.list().await? {
            let name = listed.name;
            if !name.starts_with('_') && !known.contains(name.as_str()) {
                self.fault(format!("{name}: not named by the manifest"));
            }
        }
        Ok(self.report)
    }
}

/// A part with its check, or the fault for which it could not be made.
type PartCheck = (PartEntry, Result<Checked, String>);

async fn check_part<D: CheckOwn>(folder: &Location, part: PartEntry, details: D) -> Result<PartCheck, VerifyError> {
    let bytes = folder.join(&part.name).read_optional().await?;
    let check = move || {
        let checked = check_digest(bytes, &part.digest).map_err(|fault| format!("{}: {fault}", part.name));
        let checked = checked.and_then(|bytes| {
            let table = SealedTable::open(&part.name, bytes);
            table.and_then(|table| details.part(&table)).map_err(|error| error.to_string())
        });
        (part, checked)
    };
    Ok(tokio::task::spawn_blocking(check).await?)
}

fn check_digest(bytes: Option<Bytes>, digest: &Digest) -> Result<Bytes, &'static str> {
    let bytes = bytes.ok_or("missing")?;
    match Digest::of(&bytes) == *digest {
        true => Ok(bytes),
        false => Err("its bytes do not match the manifest's digest"),
    }
}
