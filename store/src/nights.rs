//! Listings of the nights and runs that an output holds.

use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::layout::PROFILES;

use crate::location::{Location, LocationError};

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
