//! Last night's knowledge: Laser's own output, any Parquet with id and text, or JSONL `{id, text}`.
//!
//! A reader asks for texts (profiles) or for lists (recommendations), and what is the other is refused by name.

use std::collections::BTreeSet;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data_set::{self, ManifestError};
use crate::location::{Location, LocationError};
use crate::part::PART_KEY;
use crate::rows::{RowError, RowReader};
use crate::table::{Select, TableError, TableReader};
use laser_schema::digest::Digest;
use laser_schema::entity::{EntityId, IdType, Kind};
use laser_schema::knowledge::{KnowledgeRecord, PartInfo, RunnerUp};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, Manifest, Profiles};

/// The path of a [`PreviousSource`] that stands for the nights in the run's own output when it was begun ([`latest`]).
pub const LATEST: &str = "latest";

/// One source of previous knowledge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreviousSource {
    /// [`LATEST`], the root of an earlier output of Laser (its newest complete night is taken), one published
    /// folder of it, or, of texts, a `.parquet` or `.jsonl` file with the columns `id` (or `entity_id`) and `text`.
    pub path: String,
    /// The kind of a foreign file's texts; Laser's own output knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// The type to read a foreign file's ids as; as stored if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id_type: Option<IdType>,
}

impl PreviousSource {
    /// Whether it stands for the output's own newest night.
    pub fn is_latest(&self) -> bool {
        self.path == LATEST
    }
}

/// The newest complete night of a data set of each kind before `before`, as folders below `output`; none on a first
/// night.
///
/// # Errors
/// The store's.
pub async fn latest(output: &Location, data_set: DataSet, before: Date) -> Result<Vec<String>, PreviousError> {
    let mut folders = Vec::new();
    for kind in Kind::ALL {
        let newest = data_set::newest::<Profiles>(output, data_set, kind, before).await?;
        folders.extend(newest.map(|found| found.folder));
    }
    Ok(folders)
}

/// `sources`, with each that [is latest](PreviousSource::is_latest) replaced by those of `folders` that are of its
/// kind.
pub fn resolve_latest(sources: &[PreviousSource], output: &Location, folders: &[String]) -> Vec<PreviousSource> {
    let mut resolved = Vec::new();
    for source in sources {
        if !source.is_latest() {
            resolved.push(source.clone());
            continue;
        }
        let of_kind = |folder: &&String| {
            let is = |kind: Kind, data_set: DataSet| folder.starts_with(&(data_set.kind_folder(kind) + "/"));
            source.kind.is_none_or(|kind| DataSet::OF_RUNS.iter().any(|data_set| is(kind, *data_set)))
        };
        resolved.extend(
            folders
                .iter()
                .filter(of_kind)
                .map(|folder| PreviousSource { path: output.join(folder).url().to_owned(), ..source.clone() }),
        );
    }
    resolved
}

/// One earlier text, or list.
#[derive(Debug, Clone, PartialEq)]
pub struct PreviousText {
    /// User or item.
    pub kind: Kind,
    /// The entity.
    pub id: EntityId,
    /// The text; empty where the record has a list.
    pub text: String,
    /// What lost against its tokens, where that is known.
    pub runners_up: Vec<RunnerUp>,
    /// The whole record, if Laser wrote it: what carry-forward needs.
    pub record: Option<Box<KnowledgeRecord>>,
}

/// Why previous knowledge could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PreviousError {
    /// The place itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A manifest of Laser's own output.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A part.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A foreign file, or one of its rows.
    #[error(transparent)]
    Rows(#[from] RowError),
    /// There is no complete night.
    #[error(
        "{path}: no complete earlier output (no _SUCCESS below {data_set}/): give {}path = \"latest\" for the run's \
         own output (which a first night does without), or no [[previous]]",
        if *data_set == DataSet::Profiles { "a .jsonl or .parquet of texts, " } else { "" }
    )]
    Nothing {
        /// The source.
        path: String,
        /// The data set that was asked for.
        data_set: DataSet,
    },
    /// It holds lists in place of texts, or texts in place of lists.
    #[error(
        "{path}: holds {found}, expected {expected}: texts are made from earlier texts, and lists are carried forward \
         from earlier lists"
    )]
    DataSet {
        /// The source.
        path: String,
        /// The data set that it is of.
        found: DataSet,
        /// The data set that was asked for.
        expected: DataSet,
    },
    /// A foreign file without a configured kind.
    #[error("{path}: whose texts are these? set kind = \"user\" or \"item\" for this [[previous]]")]
    NoKind {
        /// The source.
        path: String,
    },
    /// The texts are of the other kind than configured.
    #[error("{path}: holds knowledge of {found}s, but [[previous]] says kind = \"{expected}\"")]
    WrongKind {
        /// The source.
        path: String,
        /// The kind of its texts.
        found: Kind,
        /// The configured kind.
        expected: Kind,
    },
    /// The type of the ids is configured where Laser wrote it.
    #[error("{path}: the ids of Laser's own output have a type; remove id_type from this [[previous]]")]
    IdType {
        /// The source.
        path: String,
    },
}

/// The manifests of the nights that the sources stand for: what they measured tells what tonight may cost.
///
/// # Errors
/// Those of [`PreviousReader::open`].
pub async fn manifests(
    sources: &[PreviousSource],
    data_set: DataSet,
    before: Date,
) -> Result<Vec<Manifest>, PreviousError> {
    let mut manifests = Vec::new();
    for folder in published(sources, data_set, before).await? {
        manifests.extend(data_set::read(&folder).await?);
    }
    Ok(manifests)
}

/// A digest that changes whenever what the sources hold changes; what [`LATEST`] stands for is left out, since it is
/// pinned when a run is begun.
///
/// # Errors
/// Those of [`PreviousReader::open`].
pub async fn fingerprint(sources: &[PreviousSource], data_set: DataSet, before: Date) -> Result<Digest, PreviousError> {
    let mut digests = vec![Digest::of_json(&sources)];
    let sources: Vec<_> = sources.iter().filter(|s| !s.is_latest()).cloned().collect();
    for source in &sources {
        let location = Location::parse(&source.path)?;
        if is_file(&location) {
            digests.push(location.fingerprint().await?);
        }
    }
    for folder in published(&sources, data_set, before).await? {
        digests.push(folder.join(MANIFEST).fingerprint().await?);
    }
    Ok(Digest::of_json(&digests))
}

fn is_file(location: &Location) -> bool {
    matches!(location.extension().as_str(), "jsonl" | "ndjson" | "parquet")
}

/// The published folders that the sources stand for.
async fn published(
    sources: &[PreviousSource],
    data_set: DataSet,
    before: Date,
) -> Result<Vec<Location>, PreviousError> {
    let mut folders = Vec::new();
    for source in sources {
        let location = Location::parse(&source.path)?;
        if !is_file(&location) {
            folders.extend(find_folders(source, &location, (data_set, before)).await?);
        }
    }
    Ok(folders)
}

async fn find_folders(
    source: &PreviousSource,
    location: &Location,
    (data_set, before): (DataSet, Date),
) -> Result<Vec<Location>, PreviousError> {
    if location.join(MANIFEST).exists().await? {
        return Ok(vec![location.clone()]);
    }
    let mut folders = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|k| source.kind.is_none_or(|s| s == *k)) {
        let newest = data_set::newest::<Profiles>(location, data_set, kind, before).await?;
        folders.extend(newest.map(|found| location.join(&found.folder)));
    }
    if folders.is_empty() {
        return Err(PreviousError::Nothing { path: source.path.clone(), data_set });
    }
    Ok(folders)
}

#[derive(Deserialize)]
struct ForeignRow {
    #[serde(alias = "entity_id")]
    id: EntityId,
    text: String,
}

#[derive(Debug)]
enum File {
    /// A part of Laser's own output.
    Part(Kind, Location),
    /// Somebody else's texts, and the type to read their ids as.
    Foreign(Kind, Location, Option<IdType>),
}

/// Reads all sources, file by file, in batches: memory is that of one part, or of a thousand rows of a foreign file.
#[derive(Debug)]
pub struct PreviousReader {
    files: Vec<File>,
    open: Option<ForeignReader>,
}

impl PreviousReader {
    /// Finds the files of all sources, which are of this data set: texts or lists. Of Laser's own output only nights
    /// before `before` count, so that a run that is started again never takes itself for its past.
    ///
    /// # Errors
    /// [`PreviousError`], naming the source.
    pub async fn open(sources: &[PreviousSource], data_set: DataSet, before: Date) -> Result<Self, PreviousError> {
        let mut files = Vec::new();
        for source in sources {
            files.extend(find_files(source, data_set, before).await?);
        }
        files.reverse();
        Ok(Self { files, open: None })
    }

    /// The published folders and the files that are read, by URL.
    pub fn places(&self) -> BTreeSet<String> {
        let place = |file: &File| match file {
            File::Part(_, part) => {
                let part = part.absolute_url();
                part.rsplit_once('/').map_or(part.clone(), |(folder, _)| folder.to_owned())
            }
            File::Foreign(_, location, _) => location.absolute_url(),
        };
        self.files.iter().map(place).collect()
    }

    /// The next texts, or `None` after the last.
    ///
    /// # Errors
    /// [`PreviousError`], naming file and row.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<PreviousText>>, PreviousError> {
        loop {
            if let Some(open) = &mut self.open
                && let Some(texts) = open.next_batch().await?
            {
                return Ok(Some(texts));
            }
            self.open = None;
            match self.files.pop() {
                None => return Ok(None),
                Some(File::Part(kind, location)) => {
                    return read_part(kind, &location).await.map(Some);
                }
                Some(File::Foreign(kind, location, id_type)) => {
                    self.open = Some(ForeignReader::open(kind, &location, id_type).await?);
                }
            }
        }
    }
}

async fn find_files(source: &PreviousSource, data_set: DataSet, before: Date) -> Result<Vec<File>, PreviousError> {
    let location = Location::parse(&source.path)?;
    if is_file(&location) {
        return Ok(vec![find_file(source, location, data_set).await?]);
    }
    let mut files = Vec::new();
    for folder in find_folders(source, &location, (data_set, before)).await? {
        files.extend(published_parts(&folder, source, data_set).await?);
    }
    Ok(files)
}

async fn find_file(source: &PreviousSource, location: Location, data_set: DataSet) -> Result<File, PreviousError> {
    if !location.exists().await? {
        return Err(LocationError::NotFound { url: source.path.clone() }.into());
    }
    if location.extension() == "parquet"
        && let Some(info) = TableReader::open(&location).await?.footer(PART_KEY)
        && let Ok(info) = serde_json::from_str::<PartInfo>(&info)
    {
        check_data_set(source, info.content().data_set(), data_set)?;
        check_own(source, info.kind)?;
        return Ok(File::Part(info.kind, location));
    }
    check_data_set(source, DataSet::Profiles, data_set)?;
    let kind = source.kind.ok_or_else(|| PreviousError::NoKind { path: source.path.clone() })?;
    Ok(File::Foreign(kind, location, source.id_type))
}

/// Refuses lists where texts are read, and texts where lists are.
fn check_data_set(source: &PreviousSource, found: DataSet, expected: DataSet) -> Result<(), PreviousError> {
    match found == expected {
        true => Ok(()),
        false => Err(PreviousError::DataSet { path: source.path.clone(), found, expected }),
    }
}

/// Refuses what is configured of Laser's own output and does not hold.
fn check_own(source: &PreviousSource, found: Kind) -> Result<(), PreviousError> {
    let path = source.path.clone();
    match source.kind {
        Some(expected) if expected != found => Err(PreviousError::WrongKind { path, found, expected }),
        _ if source.id_type.is_some() => Err(PreviousError::IdType { path }),
        _ => Ok(()),
    }
}

async fn published_parts(
    folder: &Location,
    source: &PreviousSource,
    data_set: DataSet,
) -> Result<Vec<File>, PreviousError> {
    let Some(manifest) = data_set::read::<Profiles>(folder).await? else {
        return Err(PreviousError::Nothing { path: source.path.clone(), data_set });
    };
    check_data_set(source, manifest.data_set, data_set)?;
    check_own(source, manifest.kind)?;
    Ok(manifest.parts.iter().map(|p| File::Part(manifest.kind, folder.join(&p.name))).collect())
}

async fn read_part(kind: Kind, location: &Location) -> Result<Vec<PreviousText>, PreviousError> {
    let (rows, _) = crate::part::decode_part(location.url(), location.read().await?)?;
    Ok(rows
        .into_iter()
        .map(|record| PreviousText {
            kind,
            id: record.entity_id.clone(),
            text: record.text.clone(),
            runners_up: record.runners_up.clone().unwrap_or_default(),
            record: Some(Box::new(record)),
        })
        .collect())
}

/// Reads somebody else's texts.
#[derive(Debug)]
struct ForeignReader {
    kind: Kind,
    id_type: Option<IdType>,
    rows: RowReader,
}

impl ForeignReader {
    async fn open(kind: Kind, location: &Location, id_type: Option<IdType>) -> Result<Self, RowError> {
        let rows = RowReader::open(location.url(), Select::Only(&["id", "entity_id", "text"])).await?;
        Ok(Self { kind, id_type, rows })
    }

    async fn next_batch(&mut self) -> Result<Option<Vec<PreviousText>>, RowError> {
        let Some(rows) = self.rows.next_batch().await.map_err(expecting_text)? else {
            return Ok(None);
        };
        let text = |(row, values)| {
            let values = serde_json::from_value(Value::Object(values));
            let ForeignRow { id, text } = values.map_err(|e| expecting_text(self.rows.error(row, e)))?;
            let id = id.into_type(self.id_type).map_err(|e| self.rows.error(row, e))?;
            Ok(PreviousText { kind: self.kind, id, text, runners_up: Vec::new(), record: None })
        };
        rows.into_iter().map(text).collect::<Result<_, _>>().map(Some)
    }
}

/// Says what a row should be.
fn expecting_text(error: RowError) -> RowError {
    match error {
        RowError::Row { file, row, reason } => {
            RowError::Row { file, row, reason: format!("expected {{\"id\": …, \"text\": \"…\"}}: {reason}") }
        }
        error => error,
    }
}
