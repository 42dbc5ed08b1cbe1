//! Published data sets: profiles, recommendations, embeddings and knowledge ids alike.
//!
//! A run's folder `DATA_SET/kind=…/dt=…/run=…` holds parts, which are created once, then a manifest, and last
//! `_SUCCESS`: a folder without it is not finished. Of several complete runs of one night one is in force, see
//! [`in_force()`].

mod in_force;
mod verify;
mod write;

use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::knowledge::SCHEMA_VERSION;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{AnyManifest, Details, MANIFEST, Manifest, SUCCESS};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::location::{Location, LocationError};
use crate::promotions::PromotionError;

pub use in_force::{
    IN_FORCE, NightInForce, NightRuns, PROMOTIONS, PromotedRun, RunPromotion, check_in_force, in_force, promotions,
    write_in_force,
};
pub use verify::{VerifyError, VerifyReport, verify};
pub use write::{PartWriter, complete, publish, write_manifest};

/// Why a manifest could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// It is no manifest.
    #[error("{file}: not a manifest of Laser's: {reason}; restore it, or remove its folder and make it anew")]
    Unreadable {
        /// The manifest.
        file: String,
        /// The parser's message.
        reason: String,
    },
    /// Another version of Laser wrote it.
    #[error("{file}: schema version {found}, this Laser reads {SCHEMA_VERSION}; use the version that wrote it")]
    Version {
        /// The manifest.
        file: String,
        /// Its version.
        found: u32,
    },
    /// The folder holds something else than was asked for.
    #[error("{file}: the manifest of {found}, expected that of {}", names(expected))]
    DataSet {
        /// The manifest.
        file: String,
        /// The data set that it describes.
        found: DataSet,
        /// The data sets that it could have been of.
        expected: &'static [DataSet],
    },
    /// What says which run of a night is in force.
    #[error(transparent)]
    Promotion(PromotionError),
}

impl From<PromotionError> for ManifestError {
    fn from(error: PromotionError) -> Self {
        match error {
            PromotionError::Location(error) => Self::Location(error),
            error => Self::Promotion(error),
        }
    }
}

/// The nights of a data set and kind that an output holds anything of, newest first. One request, however many there
/// are.
pub async fn nights(output: &Location, data_set: DataSet, kind: Kind) -> Result<Vec<Date>, LocationError> {
    let folders = output.join(&data_set.kind_folder(kind)).folders().await?;
    let dates = folders.iter().filter_map(|name| name.strip_prefix("dt=")?.parse().ok());
    let mut dates: Vec<Date> = dates.collect();
    dates.sort_unstable_by(|a, b| b.cmp(a));
    Ok(dates)
}

/// The runs of a night, complete or not, by name.
pub async fn runs(output: &Location, data_set: DataSet, kind: Kind, date: Date) -> Result<Vec<String>, LocationError> {
    let folders = output.join(&data_set.night_folder(kind, date)).folders().await?;
    let runs = folders.iter().filter_map(|name| Some(name.strip_prefix("run=")?.to_owned()));
    let mut runs: Vec<String> = runs.collect();
    runs.sort_unstable();
    Ok(runs)
}

/// A published folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Found<D> {
    /// The folder, relative to the output's root.
    pub folder: String,
    /// Its manifest.
    pub manifest: Manifest<D>,
}

/// The newest complete night of a data set and kind before a date: its run [in force](in_force()).
///
/// # Errors
/// [`ManifestError`]: a complete night whose manifest cannot be read is not passed over.
pub async fn newest<D: Details>(
    output: &Location,
    data_set: DataSet,
    kind: Kind,
    before: Date,
) -> Result<Option<Found<D>>, ManifestError> {
    let nights = nights(output, data_set, kind).await?;
    for date in nights.into_iter().filter(|date| *date < before) {
        if let Some(run) = in_force(output, data_set, kind, date).await? {
            let folder = data_set.folder(kind, date, &run);
            let file = output.join(&folder).join(MANIFEST);
            let manifest = parse(&file, &file.read().await?)?;
            return Ok(Some(Found { folder, manifest }));
        }
    }
    Ok(None)
}

/// Parts that are in memory at a time where parts are checked: one per core, and one that is being read.
pub fn parts_in_flight() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get() + 1)
}

/// Whether a folder has its `_SUCCESS`.
pub async fn is_complete(folder: &Location) -> Result<bool, LocationError> {
    folder.join(SUCCESS).exists().await
}

/// The manifest of a folder, complete or not; `None` where there is none.
pub async fn read<D: Details>(folder: &Location) -> Result<Option<Manifest<D>>, ManifestError> {
    let file = folder.join(MANIFEST);
    let Some(bytes) = file.read_optional().await? else {
        return Ok(None);
    };
    parse(&file, &bytes).map(Some)
}

/// The manifest of a complete folder; `None` where there is no `_SUCCESS`.
///
/// # Errors
/// [`ManifestError`], also for a complete folder without a manifest.
pub async fn read_complete<D: Details>(folder: &Location) -> Result<Option<Manifest<D>>, ManifestError> {
    if !is_complete(folder).await? {
        return Ok(None);
    }
    let file = folder.join(MANIFEST);
    parse(&file, &file.read().await?).map(Some)
}

/// The parts of a complete folder of any data set, by name; `None` where there is no `_SUCCESS`.
pub async fn parts(folder: &Location) -> Result<Option<Vec<Location>>, ManifestError> {
    if !is_complete(folder).await? {
        return Ok(None);
    }
    let file = folder.join(MANIFEST);
    let manifest: AnyManifest = parse_any(&file, &file.read().await?)?;
    Ok(Some(manifest.parts.iter().map(|part| folder.join(&part.name)).collect()))
}

/// A manifest of one of the data sets that have such details, from its bytes.
///
/// # Errors
/// [`ManifestError`], naming `file`.
pub fn parse<D: Details>(file: &Location, bytes: &[u8]) -> Result<Manifest<D>, ManifestError> {
    let found = data_set_of(file, bytes)?;
    if !D::DATA_SETS.contains(&found) {
        return Err(ManifestError::DataSet { file: file.url().to_owned(), found, expected: D::DATA_SETS });
    }
    let manifest: Manifest<D> = parse_details(file, bytes)?;
    match manifest.details.data_set() {
        said if said == found => Ok(manifest),
        said => Err(unreadable(file, format!("it names the data_set {found} and describes {said}"))),
    }
}

/// A manifest of any data set from its bytes, with those of its details that `D` has.
///
/// # Errors
/// [`ManifestError`], naming `file`.
pub fn parse_any<D: DeserializeOwned>(file: &Location, bytes: &[u8]) -> Result<Manifest<D>, ManifestError> {
    data_set_of(file, bytes)?;
    parse_details(file, bytes)
}

/// The data set of a manifest of this version.
fn data_set_of(file: &Location, bytes: &[u8]) -> Result<DataSet, ManifestError> {
    #[derive(Deserialize)]
    struct Header {
        version: u32,
        data_set: Option<DataSet>,
    }
    let Header { version, data_set } = serde_json::from_slice(bytes).map_err(|e| unreadable(file, e))?;
    if version != SCHEMA_VERSION {
        return Err(ManifestError::Version { file: file.url().to_owned(), found: version });
    }
    data_set.ok_or_else(|| unreadable(file, "it names no data_set"))
}

fn parse_details<D: DeserializeOwned>(file: &Location, bytes: &[u8]) -> Result<Manifest<D>, ManifestError> {
    serde_json::from_slice(bytes).map_err(|e| unreadable(file, e))
}

fn names(data_sets: &[DataSet]) -> String {
    data_sets.iter().map(|data_set| data_set.name()).collect::<Vec<_>>().join(" or ")
}

fn unreadable(file: &Location, reason: impl ToString) -> ManifestError {
    ManifestError::Unreadable { file: file.url().to_owned(), reason: reason.to_string() }
}
