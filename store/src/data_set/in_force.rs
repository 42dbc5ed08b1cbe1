//! Which run of a night counts, and the object that tells it to readers.
//!
//! A promotion puts a run of a night in force: an object in the night's folder, `dt=DATE/_promotions/000001.json`, see
//! [`promotions`]. Without one, and where the promoted run is not complete any more, the run with the greater `created`
//! counts, and of two that are equal in it the one with the greater name.
//!
//! `DATA_SET/kind=KIND/_in_force.json` lists the run in force of every night, so that readers need neither of these
//! rules. It is the one published object that is overwritten. That is safe: a store replaces an object whole, what it
//! says is derived from the nights' folders alone, and whoever changes one of these writes it afterwards. Each writer
//! derives it again after writing, so of two at the same time the last one has seen what both changed.

use std::collections::BTreeSet;

use futures::{StreamExt, TryStreamExt};
use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{AnyManifest, MANIFEST};
use serde::{Deserialize, Serialize};

use super::{ManifestError, is_complete, nights, parse_any};
use crate::location::{Location, LocationError};
use crate::promotions::{Promotion, Promotions};

/// The object that lists the runs in force, in the folder of a kind.
pub const IN_FORCE: &str = "_in_force.json";

/// The folder of a night's promotions, among its runs.
pub const PROMOTIONS: &str = "_promotions";

/// Nights that are looked at at a time: each takes a store two or three short requests.
const NIGHTS_AT_ONCE: usize = 16;

/// The run that a promotion puts in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromotedRun {
    /// The run; none after a rollback to what holds without a promotion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

/// One promotion of a run of a night.
pub type RunPromotion = Promotion<PromotedRun>;

/// The promotions of a night.
pub fn promotions(output: &Location, data_set: DataSet, kind: Kind, date: Date) -> Promotions<PromotedRun> {
    Promotions::new(output.join(&data_set.night_folder(kind, date)).join(PROMOTIONS))
}

/// The complete runs of a night.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NightRuns {
    /// Their names, in order.
    pub complete: Vec<String>,
    /// The promotion in force, of one of them.
    pub promotion: Option<RunPromotion>,
}

impl NightRuns {
    /// Reads what a night has, with a request for the night and one per run.
    ///
    /// # Errors
    /// The store's, and a promotion that cannot be read.
    pub async fn read(output: &Location, data_set: DataSet, kind: Kind, date: Date) -> Result<Self, ManifestError> {
        let night = output.join(&data_set.night_folder(kind, date));
        let folders = night.folders().await?;
        let mut complete = Vec::new();
        for name in &folders {
            if let Some(run) = name.strip_prefix("run=")
                && is_complete(&night.join(name)).await?
            {
                complete.push(run.to_owned());
            }
        }
        complete.sort_unstable();
        let promotion = match folders.iter().any(|name| name == PROMOTIONS) {
            true => promotions(output, data_set, kind, date).history().await?.pop(),
            false => None,
        };
        let is_complete = |p: &RunPromotion| p.run.as_ref().is_some_and(|run| complete.contains(run));
        Ok(Self { promotion: promotion.filter(is_complete), complete })
    }

    /// The run that is promoted.
    pub fn promoted(&self) -> Option<&str> {
        self.promotion.as_ref().and_then(|promotion| promotion.run.as_deref())
    }
}

/// The run of a night that counts; none without a complete one.
///
/// # Errors
/// [`ManifestError`]: of several complete runs, one whose manifest cannot be read is not passed over.
pub async fn in_force(
    output: &Location,
    data_set: DataSet,
    kind: Kind,
    date: Date,
) -> Result<Option<String>, ManifestError> {
    let runs = NightRuns::read(output, data_set, kind, date).await?;
    if let Some(promoted) = runs.promoted() {
        return Ok(Some(promoted.to_owned()));
    }
    newest_of(output, (data_set, kind, date), runs.complete).await
}

/// Of a night's complete runs, which come by name, the one that was created last.
async fn newest_of(
    output: &Location,
    (data_set, kind, date): (DataSet, Kind, Date),
    mut complete: Vec<String>,
) -> Result<Option<String>, ManifestError> {
    if complete.len() < 2 {
        return Ok(complete.pop());
    }
    let mut created = Vec::new();
    for run in complete {
        let file = output.join(&data_set.folder(kind, date, &run)).join(MANIFEST);
        let manifest: AnyManifest = parse_any(&file, &file.read().await?)?;
        created.push((manifest.created, run));
    }
    // Of equal ones the last is the greatest.
    Ok(created.into_iter().max_by_key(|(created, _)| *created).map(|(_, run)| run))
}

/// A night in [`IN_FORCE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NightInForce {
    /// The night, called as in paths.
    pub dt: Date,
    /// The run in force.
    pub run: String,
}

/// The runs in force of all nights of a data set and kind, oldest first, but for nights whose run is `left_out`. A
/// night that cannot be read is left out with a warning, so that it keeps no other one from being published.
///
/// # Errors
/// The store's.
async fn nights_in_force(
    output: &Location,
    data_set: DataSet,
    kind: Kind,
    left_out: &BTreeSet<String>,
) -> Result<Vec<NightInForce>, LocationError> {
    let mut dates = nights(output, data_set, kind).await?;
    dates.reverse();
    let found = dates.into_iter().map(|dt| async move {
        match in_force(output, data_set, kind, dt).await {
            Ok(run) => Ok(run.map(|run| NightInForce { dt, run })),
            Err(ManifestError::Location(error)) => Err(error),
            Err(error) => {
                tracing::warn!("left out of {}/{IN_FORCE}: {error}", data_set.kind_folder(kind));
                Ok(None)
            }
        }
    });
    let found: Vec<_> = futures::stream::iter(found).buffered(NIGHTS_AT_ONCE).try_collect().await?;
    Ok(found.into_iter().flatten().filter(|night| !left_out.contains(&night.run)).collect())
}

/// Writes [`IN_FORCE`] for readers; `left_out` are runs that are about to be removed.
///
/// # Errors
/// The store's.
pub async fn write_in_force(
    output: &Location,
    data_set: DataSet,
    kind: Kind,
    left_out: &BTreeSet<String>,
) -> Result<(), LocationError> {
    let file = output.join(&data_set.kind_folder(kind)).join(IN_FORCE);
    let mut nights = nights_in_force(output, data_set, kind, left_out).await?;
    loop {
        file.write(serde_json::to_vec_pretty(&nights).unwrap_or_default().into()).await?;
        let now = nights_in_force(output, data_set, kind, left_out).await?;
        if now == nights {
            return Ok(());
        }
        nights = now;
    }
}

/// How [`IN_FORCE`] differs from what the nights' folders say; `None` if it does not, or if there is none.
///
/// # Errors
/// The store's.
pub async fn check_in_force(output: &Location, data_set: DataSet, kind: Kind) -> Result<Option<String>, LocationError> {
    let file = output.join(&data_set.kind_folder(kind)).join(IN_FORCE);
    let Some(bytes) = file.read_optional().await? else {
        return Ok(None);
    };
    let expected = nights_in_force(output, data_set, kind, &BTreeSet::new()).await?;
    let found: Vec<NightInForce> = match serde_json::from_slice(&bytes) {
        Ok(found) => found,
        Err(error) => return Ok(Some(format!("{}: not a list of runs in force: {error}", file.url()))),
    };
    let lacking = expected.iter().find(|night| !found.contains(night));
    let differing = lacking.or_else(|| found.iter().find(|night| !expected.contains(night)));
    Ok(differing.map(|night| {
        format!(
            "{}: it does not tell what is in force on {}; the next night writes it, or `laser outputs promote`",
            file.url(),
            night.dt
        )
    }))
}
