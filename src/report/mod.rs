//! `laser report`: a published night as one HTML page that needs nothing else.
//!
//! What is told comes from the published folders and, where it is still there, from the run's own folder: its plan,
//! its audits, and the times at which the store got its files. Parts are read one at a time.

mod chart;
mod format;
mod gather;
mod page;
mod sections;

use anyhow::Result;
use laser_store::Location;

use laser_terminal::print;

/// Writes the page of the night in `dir`, an output's root or one published folder, to `file`.
pub(crate) async fn report(dir: &str, file: Option<&str>) -> Result<()> {
    let night = gather::gather(dir).await?;
    let page = page::render(&night)?;
    let file = file.map_or_else(|| format!("report-{}.html", night.run), str::to_owned);
    let target = Location::parse(&file)?;
    target.write(page.into()).await?;
    print(&format!("{}\n", target.url()))
}
