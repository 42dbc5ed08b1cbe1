//! `[demo]`: two nights in place of one.

use anyhow::Result;
use laser_schema::EntityTable;

use crate::config::{Config, RunConfig};

/// The two nights of a demo: the one before tonight, which starts cold and is not audited, and tonight.
///
/// # Errors
/// Before the first day of the calendar.
pub fn nights(config: &Config) -> Result<Option<(Config, Config)>> {
    let Some(demo) = &config.demo else {
        return Ok(None);
    };
    let date = config.night();
    let tonight = Config { demo: None, run: RunConfig { date: Some(date), ..config.run.clone() }, ..config.clone() };
    let table = |path: &String| EntityTable { path: path.clone(), kind: None, columns: Default::default() };
    let last_night = Config {
        input: demo.last_night.iter().map(table).collect(),
        previous: Vec::new(),
        run: RunConfig { date: Some(date.yesterday()?), audit_share: 0.0, ..config.run.clone() },
        ..tonight.clone()
    };
    Ok(Some((last_night, tonight)))
}
