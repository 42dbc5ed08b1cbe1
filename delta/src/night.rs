//! Nights as manifests describe them.

use jiff::Timestamp;
use jiff::civil::Date;
use laser_schema::manifest::SUCCESS;
use laser_store::Location;
use laser_store::data_set::read_manifest;
use laser_store::location::LocationError;
use serde::Deserialize;

/// The parts of one run of one night.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Night {
    pub(crate) date: Date,
    pub(crate) run: String,
    pub(crate) parts: Vec<Part>,
}

/// One Parquet part, as manifests list it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Part {
    /// File name within the run's folder.
    pub(crate) name: String,
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
}

#[derive(Deserialize)]
struct Manifest {
    parts: Vec<Part>,
}

impl Night {
    /// What a run's manifest says; `None` if there is none.
    pub(crate) async fn read(root: &Location, date: Date, run: &str) -> Result<Option<Self>, LocationError> {
        let manifest = read_manifest(&root.join(&run_folder(date, run))).await?;
        Ok(manifest.map(|Manifest { parts }| Self { date, run: run.to_owned(), parts }))
    }

    /// The run's folder below the table's root.
    pub(crate) fn folder(&self) -> String {
        run_folder(self.date, &self.run)
    }

    /// The complete runs of a night, the one that finished last at the end.
    pub(crate) async fn complete(root: &Location, date: Date) -> Result<Vec<Self>, LocationError> {
        let folder = root.join(&date_folder(date));
        let mut found: Vec<(Timestamp, Self)> = Vec::new();
        for name in folder.folders().await? {
            let Some(run) = name.strip_prefix("run=") else {
                continue;
            };
            let place = folder.join(&name);
            let finished = match place.join(SUCCESS).modified().await {
                Err(LocationError::NotFound { .. }) => continue,
                finished => finished?,
            };
            if let Some(night) = Self::read(root, date, run).await? {
                found.push((finished, night));
            }
        }
        found.sort_by(|(a, one), (b, other)| (a, &one.run).cmp(&(b, &other.run)));
        Ok(found.into_iter().map(|(_, night)| night).collect())
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
