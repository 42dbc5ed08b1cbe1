//! `laser prepare`: public data sets as entity tables.
//!
//! Each source becomes `users.parquet` and `items.parquet` in the contract of
//! [`laser_schema::entity`]: flat attribute columns, histories oldest first, interaction counts. MovieLens also
//! becomes `interactions.parquet`, which recommender models are trained on, and AtSpeed's data sets `sequences.parquet`
//! and `truth.parquet`. The same input gives the same bytes. A row that is wrong stops the work and is named by file
//! and line; nothing is written then.
//!
//! Sources are read once, front to back. What is held in memory is the catalogue and one small record per interaction
//! (16 bytes for MovieLens: 32 million ratings take about 1 GB while the vectors grow), then the compressed table.

mod amazon;
mod atspeed;
mod delimited;
mod movielens;
mod table;

use std::path::Path;

use laser_store::LocationError;
use laser_store::table::TableError;

pub use amazon::amazon;
pub use atspeed::{AtSpeedSummary, UntilPart, atspeed};
pub use movielens::{Histories, movielens};
pub use table::Written;

type Result<T, E = PrepareError> = std::result::Result<T, E>;

/// Why a data set could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The data set, one of its files or a row is not what was expected.
    #[error("{place}: {reason}")]
    Input {
        /// The directory, the file, or file and line.
        place: String,
        /// What was found, what was expected, and what to do.
        reason: String,
    },
    /// The place of the tables.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A table.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl PrepareError {
    fn at(path: &Path, reason: impl Into<String>) -> Self {
        Self::Input { place: path.display().to_string(), reason: reason.into() }
    }
}

/// What a data set was found to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareSummary {
    /// Rows of the users' table.
    pub users: u64,
    /// Rows of the items' table.
    pub items: u64,
    /// Interactions of the data set, without those left out.
    pub interactions: u64,
    /// Of these, interactions in histories.
    pub in_histories: u64,
    /// Interactions left out because they have no timestamp.
    pub untimed: u64,
    /// The table of a row per user, as path or URL.
    pub users_table: String,
    /// The table of a row per item.
    pub items_table: String,
    /// The table of a row per interaction, of data sets that are prepared for training too.
    pub interactions_table: Option<String>,
}

#[cfg(test)]
mod testing {
    //! What the tests of all sources share: files to read, tables read back.

    use std::path::{Path, PathBuf};

    use laser_schema::{Columns, Entity, EntityTable};
    use laser_store::{EntityReader, Location};

    pub(crate) fn location(dir: &Path) -> Location {
        Location::parse(dir.to_str().unwrap()).unwrap()
    }

    /// A directory with these files in it.
    pub(crate) fn files(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    pub(crate) async fn read_table(path: &str) -> Vec<Entity> {
        let table = EntityTable { path: path.to_owned(), kind: None, columns: Columns::default() };
        let mut reader = EntityReader::open(&table).await.unwrap();
        let mut entities = Vec::new();
        while let Some(batch) = reader.next_batch().await.unwrap() {
            entities.extend(batch);
        }
        entities
    }

    /// A folder of the shared data, or `None` (said on standard error) where it is not there.
    pub(crate) fn shared(folder: &str) -> Option<PathBuf> {
        let beside = || std::path::absolute(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).unwrap();
        let path = std::env::var_os("LASER_SHARED").map_or_else(beside, PathBuf::from).join(folder);
        if path.is_dir() {
            return Some(path);
        }
        // Past the test harness, which shows only what failing tests print; tests/run.sh ends with these lines.
        let skipped = format!("skipped: {} is not there; set LASER_SHARED\n", path.display());
        std::io::Write::write_all(&mut std::io::stderr(), skipped.as_bytes()).unwrap();
        None
    }
}
