//! The demo: its own data set, and two nights of it.

use anyhow::{Context, Result};
use laser_night::Config;
use laser_night::config::RunConfig;
use laser_schema::EntityTable;
use laser_store::Location;
use laser_store::previous::PreviousSource;

use crate::prepare::{self, DemoOptions};

/// The configurations of last night (a cold start) and of tonight; none without `[demo]`. Makes the data set.
pub(crate) async fn nights(config: &Config) -> Result<Option<(Config, Config)>> {
    let Some(demo) = &config.demo else {
        return Ok(None);
    };
    let data = Location::parse(&demo.data)?;
    let options = DemoOptions { users: demo.users, items: demo.items, seed: demo.seed };
    let paths = prepare::demo(&data, &options).await.context("[demo]")?;
    let tables = |tables: prepare::Tables| {
        [tables.users, tables.items].map(|path| EntityTable { path, kind: None, columns: Default::default() }).to_vec()
    };
    let date = config.night();
    let tonight = Config {
        demo: None,
        input: tables(paths.tonight),
        previous: vec![PreviousSource { path: config.output.path.clone(), kind: None, id_type: None }],
        run: RunConfig { date: Some(date), ..config.run.clone() },
        ..config.clone()
    };
    let last_night = Config {
        input: tables(paths.last_night),
        previous: Vec::new(),
        run: RunConfig { date: Some(date.yesterday()?), audit_share: 0.0, ..config.run.clone() },
        ..tonight.clone()
    };
    Ok(Some((last_night, tonight)))
}
