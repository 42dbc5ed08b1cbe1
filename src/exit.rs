//! How commands end: exit codes, which schedulers act on, and what is said.

use anyhow::{Error, Result};
use laser_night::{Config, Finished, Outcome, failure};
use laser_schema::guard::GuardReport;
use laser_terminal::print;

use crate::{canary, summary, telemetry};

/// Input, configuration, rights or coverage: needs a hand.
pub(crate) const DATA_ERROR: u8 = 65;
/// Incomplete, or a server did not answer: the same command again.
pub(crate) const TRY_AGAIN: u8 = 75;
/// Stopped by a signal.
pub(crate) const DRAINED: u8 = 143;

/// What may pass by itself is worth another try; the rest needs a hand.
pub(crate) fn code(error: &Error) -> u8 {
    if failure::may_pass(error) { TRY_AGAIN } else { DATA_ERROR }
}

/// The summary of a night; of a canary with how it compares.
async fn summarise(finished: &Finished) -> Result<String> {
    Ok(summary::render(finished).await? + &canary::render(finished).await?)
}

/// Tells how a night ended, and the exit code for it.
pub(crate) async fn report(config: &Config, outcome: Outcome) -> Result<u8> {
    match outcome {
        Outcome::Complete(finished) => {
            print(&summarise(&finished).await?)?;
            Ok(0)
        }
        Outcome::BelowCoverage(finished) => {
            print(&summarise(&finished).await?)?;
            telemetry::tell_error(&format!(
                "fewer than {:.1} % of the entities have a text ([output] min_coverage): _SUCCESS is withheld",
                config.output.min_coverage * 100.0
            ));
            Ok(DATA_ERROR)
        }
        Outcome::Breached(finished) => {
            print(&summarise(&finished).await?)?;
            for manifest in &finished.manifests {
                for (pool, breach) in manifest.guards.iter().flat_map(GuardReport::breaches) {
                    telemetry::tell_error(&format!("{} pool {pool}: {breach}", manifest.kind));
                }
            }
            telemetry::tell_error(
                "a guard is breached and [guards] action is \"fail\": _SUCCESS is withheld. To publish all the same, \
                 run the same command with --set guards.action=warn",
            );
            Ok(DATA_ERROR)
        }
        Outcome::Incomplete { dead, missing } => {
            for (shard, reason) in &dead {
                telemetry::tell_error(&format!("shard {shard} was given up: {reason}"));
            }
            telemetry::tell_error(&format!(
                "{missing} shards are missing; run the same command again once the cause is mended"
            ));
            Ok(TRY_AGAIN)
        }
        Outcome::Cancelled { run } => {
            telemetry::tell_error(&format!("{run} was cancelled; `laser resume CONFIG {run}` goes on"));
            Ok(TRY_AGAIN)
        }
        Outcome::Drained { committed, shards } => {
            telemetry::tell(
                "stopped",
                &format!("{committed} of {shards} shards are committed; the same command goes on"),
            );
            Ok(DRAINED)
        }
    }
}
