//! Removing nights that are older than those kept.

use anyhow::Result;
use jiff::Timestamp;
use laser_coordinator::retention::{self, Keep, Outdated};
use laser_store::Location;

use crate::erasure::marker::ensure_none;
use crate::pool_sets;

/// The runs of which something is older than the newest `nights`.
///
/// # Errors
/// The store's.
pub async fn outdated(output: &Location, nights: usize) -> Result<Vec<Outdated>> {
    ensure_none(output).await?;
    let keep = Keep { nights, pools: pool_sets::kept(output).await?, now: Timestamp::now() };
    Ok(retention::outdated(output, &keep).await?)
}

/// Removes what is older than the newest `nights`, but for the run that was just published, and returns of how many
/// runs.
pub(crate) async fn remove_outdated(output: &Location, nights: usize, published: &str) -> Result<usize> {
    let mut outdated = outdated(output, nights).await?;
    outdated.retain(|outdated| outdated.run != published);
    retention::withdraw(output, &outdated).await?;
    for outdated in &outdated {
        retention::remove(output, outdated).await?;
    }
    Ok(outdated.len())
}
