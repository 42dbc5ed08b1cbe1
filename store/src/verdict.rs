//! The verdicts of guards: one object per pool of a run, created once.

use laser_schema::Kind;
use laser_schema::guard::Verdict;
use laser_schema::layout::run_folder;

use crate::location::{Created, Location, LocationError};

/// Why it is not known what was found about a pool.
#[derive(Debug, thiserror::Error)]
pub enum VerdictError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The file holds something else.
    #[error("{file}: not the verdict on a pool: {reason}; remove the run's folder to begin it anew")]
    Unreadable {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

/// The verdict on a pool of a run, if it was judged.
///
/// # Errors
/// The store's, and a file that holds something else.
pub async fn read_verdict(
    output: &Location,
    run: &str,
    kind: Kind,
    pool: &str,
) -> Result<Option<Verdict>, VerdictError> {
    let file = output.join(&verdict_file(run, kind, pool));
    let Some(bytes) = file.read_optional().await? else {
        return Ok(None);
    };
    let verdict = serde_json::from_slice(&bytes);
    verdict.map(Some).map_err(|e| VerdictError::Unreadable { file: file.url().to_owned(), reason: e.to_string() })
}

/// Creates the verdict, unless the pool was judged before: of any number of processes one wins, and all go on with
/// what is returned.
///
/// # Errors
/// Those of [`read_verdict`].
pub async fn pin_verdict(
    verdict: Verdict,
    output: &Location,
    run: &str,
    kind: Kind,
    pool: &str,
) -> Result<Verdict, VerdictError> {
    let file = output.join(&verdict_file(run, kind, pool));
    let json = serde_json::to_vec_pretty(&verdict).unwrap_or_default();
    match file.create(json.into()).await? {
        Created::Won => Ok(verdict),
        Created::Exists => Ok(read_verdict(output, run, kind, pool).await?.unwrap_or(verdict)),
    }
}
/// The object that holds the verdict on a pool of a run, relative to the output's root. It is created once, before any
/// of the pool's texts, and whoever generates one reads it.
fn verdict_file(run: &str, kind: Kind, pool: &str) -> String {
    format!("{}/guards/{kind}-{pool}.json", run_folder(run))
}
