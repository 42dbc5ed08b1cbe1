//! Nights as manifests describe them.

use jiff::Timestamp;
use jiff::civil::Date;
use laser_schema::manifest::{AnyManifest, MANIFEST, PartEntry};
use laser_store::Location;
use laser_store::data_set::{self, ManifestError, NightRuns};
use laser_store::location::LocationError;

/// The parts of one run of one night.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Night {
    pub(crate) date: Date,
    pub(crate) run: String,
    pub(crate) created: Timestamp,
    pub(crate) parts: Vec<PartEntry>,
}

impl Night {
    /// Reads the manifest of a run; `None` if there is none.
    pub(crate) async fn read(root: &Location, date: Date, run: &str) -> Result<Option<Self>, ManifestError> {
        let file = root.join(&run_folder(date, run)).join(MANIFEST);
        let Some(bytes) = file.read_optional().await? else {
            return Ok(None);
        };
        let AnyManifest { created, parts, .. } = data_set::parse_any(&file, &bytes)?;
        Ok(Some(Self { date, run: run.to_owned(), created, parts }))
    }

    /// The run's folder below the table's root.
    pub(crate) fn folder(&self) -> String {
        run_folder(self.date, &self.run)
    }

    /// The complete runs of a night. The last one is the one that counts: the one that is promoted, else the one that
    /// has the greatest `created`, and of equal ones the greatest name. One whose manifest cannot be read is left out
    /// with a warning, so that it keeps no other night from being published.
    pub(crate) async fn complete(root: &Location, date: Date, runs: &NightRuns) -> Result<Vec<Self>, LocationError> {
        let mut found: Vec<Self> = Vec::new();
        for run in &runs.complete {
            match Self::read(root, date, run).await {
                Ok(night) => found.extend(night),
                Err(ManifestError::Location(error)) => return Err(error),
                Err(error) => tracing::warn!("left out of the table: {error}"),
            }
        }
        let rank = |night: &Self| (runs.promoted() == Some(&night.run), night.created);
        // Of equal ones the greatest name stays last.
        found.sort_by_key(rank);
        Ok(found)
    }
}

/// The folder of a run below the table's root.
pub(crate) fn run_folder(date: Date, run: &str) -> String {
    format!("{}run={run}", date_folder(date))
}

/// The folder of a night below the table's root, with its `/`.
pub(crate) fn date_folder(date: Date) -> String {
    format!("dt={date}/")
}
