//! `laser report`: a published night as one HTML page that needs nothing else; and the charts of benchmarks.
//!
//! What is told comes from the published folders and, where it is still there, from the run's own folder: its plan,
//! its audits, and the times at which the store got its files. Parts are read one at a time.

mod canary;
mod chart;
mod data;
mod estimate;
mod format;
mod gather;
mod line_chart;
mod lists;
mod page;
mod value;

use anyhow::Result;
use laser_store::Location;

pub use canary::{Agreement, Comparison, Figure, PoolBreach, compare};
pub use format::duration;
pub use line_chart::LineChart;

/// Writes the page of the night in `dir`, an output's root or one published folder, to `file` and returns its URL.
///
/// # Errors
/// A folder without a published night, one of another version, and a place that cannot be read or written.
pub async fn report(dir: &str, file: Option<&str>) -> Result<String> {
    let night = gather::gather(dir).await?;
    let page = page::render(&data::Report::new(&night))?;
    let file = file.map_or_else(|| format!("report-{}.html", night.run), str::to_owned);
    let target = Location::parse(&file)?;
    target.write(page.into()).await?;
    Ok(target.url().to_owned())
}

/// The figures of the page as JSON, as [`report`] shows them.
///
/// # Errors
/// Those of [`report`].
pub async fn report_json(dir: &str) -> Result<String> {
    let night = gather::gather(dir).await?;
    Ok(serde_json::to_string_pretty(&data::Report::new(&night))?)
}
