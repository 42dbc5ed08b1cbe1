//! `laser outputs`: prints the runs of nights, and what becomes of them.

use anyhow::Result;
use laser_night::Config;
use laser_night::outputs::{self, Changed, ListedRun, RunState};
use laser_terminal::{Style, Table, print};

/// The columns of `laser outputs list`.
const COLUMNS: [&str; 8] = ["night", "data set", "kind", "run", "rows", "created", "in force", "made with"];

/// `laser outputs list`: by data set and kind, oldest night first.
pub(crate) async fn list(config: &Config, json: bool) -> Result<()> {
    let output = config.output()?;
    let runs = outputs::list(&output).await?;
    if json {
        return runs.iter().try_for_each(|run| print(&(serde_json::to_string(run)? + "\n")));
    }
    if runs.is_empty() {
        return print(&format!("no nights in {}\n", output.url()));
    }
    let mut table = Table::new(&COLUMNS);
    runs.into_iter().for_each(|run| table.push(row(run)));
    print(&table.render(Style::Text))
}

fn row(run: ListedRun) -> Vec<String> {
    let state = match run.state {
        RunState::Promoted { promotion } => format!("yes, promotion {promotion}"),
        RunState::Newest => "yes, the newest".to_owned(),
        RunState::Superseded => "no".to_owned(),
        RunState::Incomplete => "no, incomplete".to_owned(),
    };
    vec![
        run.date.to_string(),
        run.data_set.to_string(),
        run.kind.to_string(),
        run.run,
        run.rows.map_or_else(|| "–".to_owned(), |rows| rows.to_string()),
        run.created.map_or_else(|| "–".to_owned(), |created| format!("{created:.0}")),
        state,
        run.made,
    ]
}

/// `laser outputs promote`.
pub(crate) async fn promote(config: &Config, run: &str) -> Result<()> {
    tell(&outputs::promote(&config.output()?, run).await?)
}

/// `laser outputs rollback`.
pub(crate) async fn rollback(config: &Config, run: &str) -> Result<()> {
    tell(&outputs::rollback(&config.output()?, run).await?)
}

fn tell(changed: &[Changed]) -> Result<()> {
    for Changed { date, data_set, kind, promotion, in_force } in changed {
        let run = in_force.as_deref().unwrap_or("no run");
        print(&format!("{data_set} of {kind}s on {date}: {run} is in force (promotion {promotion})\n"))?;
    }
    Ok(())
}
