//! A night over many machines: the coordinator plans, queues and publishes, workers generate. Between them are the
//! output's store and NATS.
//!
//! Every process may be killed and started again at any moment, and started twice. What is done is what the store
//! lists; the queue only says who is at what, and is filled again from the store whenever it holds less than what is
//! missing.

mod watch;
mod work;

use anyhow::Result;
use jiff::civil::Date;
use laser_coordinator::nats::{self, NatsClient};
use laser_schema::Progress;
use laser_store::run_store::RunStore;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

pub(crate) use work::check_run;
pub use work::work;

use crate::config::Config;
use crate::night::{Night, Outcome, Ready, planned};
use crate::telemetry;

/// Plans a night, has workers generate it, and publishes it. `expected` is the run that it must be, if any; that it
/// was cancelled is taken back then.
///
/// # Errors
/// What keeps the night from going on; the same command goes on once it is mended.
pub async fn coordinate(
    config: &Config,
    expected: Option<&str>,
    progress: &mut dyn Progress,
    drain: &CancellationToken,
) -> Result<Outcome> {
    let client = nats::connect(&config.queue()?, "laser-coordinator").await?;
    telemetry::watch_nats(client.events().clone());
    client.ensure_streams().await?;
    let night = Night::open(config).await?;
    let (date, store) = match expected {
        Some(run) => night.resume_run(run).await?,
        None => night.choose_run().await?,
    };
    if purge_if_cancelled(&client, &store).await? {
        return Ok(Outcome::Cancelled { run: store.name().to_owned() });
    }
    if store.plan().await?.is_none() {
        // What is queued all the same is of an earlier plan, whose folder was removed. Workers could not read it.
        client.purge(store.name()).await?;
    }
    let span = telemetry::run_span(store.name());
    let work = async {
        match night.prepare(date, &store, Some(&client), progress, drain).await? {
            Ready::Published(run) => night.publish(run, None).await,
            Ready::Drained => Ok(Outcome::Drained { committed: 0, shards: 0 }),
            Ready::Planned(run, _) => watch::watch(night, &client, run, progress, drain).await,
        }
    };
    work.instrument(span).await
}

/// Ends a run: its coordinator stops, its shards leave the queue. Workers finish and commit the shards that they hold.
/// What is committed stays. Returns how many shards left.
///
/// # Errors
/// If there is no such run, and those of store and queue.
pub async fn cancel(config: &Config, run: &str) -> Result<u64> {
    let store = RunStore::new(&config.run_output()?, run);
    planned(&store).await?;
    let client = nats::connect(&config.queue()?, "laser-cancel").await?;
    store.cancel().await?;
    // After the marker, which a coordinator reads once it has published: whoever is later empties the queue.
    Ok(client.purge(run).await?)
}

/// Whether a run was cancelled. If so, its shards leave the queue: a coordinator may have published some after `cancel`
/// emptied it.
async fn purge_if_cancelled(client: &NatsClient, store: &RunStore) -> Result<bool> {
    let is_cancelled = store.is_cancelled().await?;
    if is_cancelled {
        client.purge(store.name()).await?;
    }
    Ok(is_cancelled)
}

/// The night of a run, which its name begins with.
pub fn date_of(run: &str) -> Option<Date> {
    run.get(..10)?.parse().ok()
}
