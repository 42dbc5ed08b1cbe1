//! Where an output keeps its nights and runs, and what a run was begun with.
//!
//! Everything that belongs to a run is in folders of the run's name, which begins with its date, so that whoever looks
//! for the newest night or the oldest run lists folders and never parts.

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::Kind;
use crate::job::run_folder;
use crate::location::{Created, Location, LocationError};

/// The data set of texts.
pub const PROFILES: &str = "profiles";

/// The data set of embeddings without texts.
pub const EMBEDDINGS: &str = "embeddings";

/// The data set of knowledge ids.
pub const KNOWLEDGE_IDS: &str = "knowledge_ids";

/// The folder of a kind's published output of a run, relative to the output's root.
pub fn partition(kind: Kind, date: Date, run: &str) -> String {
    partition_of(PROFILES, kind, date, run)
}

/// The folder of a kind and run of a data set, relative to the output's root.
pub fn partition_of(data_set: &str, kind: Kind, date: Date, run: &str) -> String {
    format!("{data_set}/kind={kind}/dt={date}/run={run}")
}

/// The name of what was made on a date from what `identity` tells: the same inputs give the same name.
pub fn dated_name(date: Date, identity: &Digest) -> String {
    format!("{date}-{}", identity.short())
}

/// The date of a [`dated_name`]; none if it is not one, and so not Laser's.
pub fn name_date(name: &str) -> Option<Date> {
    let (date, digest) = (name.get(..10)?, name.get(10..)?.strip_prefix('-')?);
    let is_digest = digest.len() == Digest::SHORT && digest.bytes().all(|b| b.is_ascii_hexdigit());
    is_digest.then(|| date.parse().ok())?
}

/// The nights of a kind that an output holds anything of, newest first. One request, however many there are.
///
/// # Errors
/// The store's.
pub async fn nights(output: &Location, kind: Kind) -> Result<Vec<Date>, LocationError> {
    nights_of(PROFILES, output, kind).await
}

/// [`nights`] of a data set.
///
/// # Errors
/// The store's.
pub async fn nights_of(data_set: &str, output: &Location, kind: Kind) -> Result<Vec<Date>, LocationError> {
    let folder = output.join(&format!("{data_set}/kind={kind}"));
    let folders = folder.folders().await?;
    let dates = folders.iter().filter_map(|name| name.strip_prefix("dt=")?.parse().ok());
    let mut dates: Vec<Date> = dates.collect();
    dates.sort_unstable_by(|a, b| b.cmp(a));
    Ok(dates)
}

/// The runs of a night of a kind that an output holds anything of, by name.
///
/// # Errors
/// The store's.
pub async fn runs_of_night(output: &Location, kind: Kind, date: Date) -> Result<Vec<String>, LocationError> {
    runs_of_night_of(PROFILES, output, kind, date).await
}

/// [`runs_of_night`] of a data set.
///
/// # Errors
/// The store's.
pub async fn runs_of_night_of(
    data_set: &str,
    output: &Location,
    kind: Kind,
    date: Date,
) -> Result<Vec<String>, LocationError> {
    let night = output.join(&format!("{data_set}/kind={kind}/dt={date}"));
    let folders = night.folders().await?;
    let mut runs: Vec<String> =
        (folders.iter()).filter_map(|name| Some(name.strip_prefix("run=")?.to_owned())).collect();
    runs.sort_unstable();
    Ok(runs)
}

/// The file of [`Pins`] in a run's folder.
pub const PINS: &str = "pins.json";

/// What a run was begun with where its configuration leaves that open. Nights that are published and pools that are
/// promoted while it is under way change nothing any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins {
    /// The published folders that `latest` stands for, below the output's root; none on a first night.
    pub previous: Vec<String>,
    /// Where the pools are: below the output's root, or a URL.
    pub pools: String,
}

/// Why it is not known what a run was begun with.
#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The file holds something else.
    #[error("{file}: not the pins of a run: {reason}; remove the run's folder to begin it anew")]
    Unreadable {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

impl Pins {
    /// The pins of a run, if it was begun.
    ///
    /// # Errors
    /// The store's, and a file that holds something else.
    pub async fn read(output: &Location, run: &str) -> Result<Option<Self>, PinsError> {
        let file = output.join(&run_folder(run)).join(PINS);
        let Some(bytes) = file.read_optional().await? else {
            return Ok(None);
        };
        let pins = serde_json::from_slice(&bytes);
        pins.map(Some).map_err(|e| PinsError::Unreadable { file: file.url().to_owned(), reason: e.to_string() })
    }

    /// Begins a run with these pins, unless it was begun before: of any number of processes one wins, and all go on
    /// with what is returned.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub async fn begin(self, output: &Location, run: &str) -> Result<Self, PinsError> {
        let file = output.join(&run_folder(run)).join(PINS);
        let json = serde_json::to_vec_pretty(&self).unwrap_or_default();
        match file.create(json.into()).await? {
            Created::Won => Ok(self),
            Created::Exists => Ok(Self::read(output, run).await?.unwrap_or(self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn only_dated_names_have_a_date() {
        let name = dated_name(date(2026, 1, 2), &Digest::of(b"x"));
        assert_eq!(name_date(&name), Some(date(2026, 1, 2)));
        for other in ["", "2026-01-02", "2026-01-02-mine", "2026-13-02-0123456789ab", "promotions"] {
            assert_eq!(name_date(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn of_two_beginnings_of_a_run_the_first_stands() {
        let dir = tempfile::tempdir().unwrap();
        let output = Location::parse(dir.path().to_str().unwrap()).unwrap();
        let pins = |pools: &str| Pins { previous: Vec::new(), pools: pools.to_owned() };
        assert_eq!(Pins::read(&output, "r").await.unwrap(), None);
        assert_eq!(pins("a").begin(&output, "r").await.unwrap(), pins("a"));
        assert_eq!(pins("b").begin(&output, "r").await.unwrap(), pins("a"));
        output.join("runs/r/pins.json").write("x".into()).await.unwrap();
        let error = pins("b").begin(&output, "r").await.unwrap_err().to_string();
        assert!(error.contains("pins.json: not the pins of a run"), "{error}");
    }
}
