//! The pins of a run: the choices that its configuration left open, fixed by its first object.

use laser_schema::layout::run_folder;
use serde::{Deserialize, Serialize};

use crate::location::{Created, Location, LocationError};

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
