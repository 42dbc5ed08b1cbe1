//! What a user reads of a canary when it has ended: a few figures beside those of the night in force.

use std::fmt::Write as _;

use anyhow::Result;
use laser_night::Finished;
use laser_report::{Comparison, Figure, compare};
use laser_terminal::Table;

/// The comparison as text; nothing if the run is no canary.
///
/// # Errors
/// A part of either run that cannot be read.
pub(crate) async fn render(finished: &Finished) -> Result<String> {
    let mut out = String::new();
    for manifest in &finished.manifests {
        let folder = finished.run.partition(manifest.kind);
        if let Some(comparison) = compare(Some(finished.run.store.output()), &folder, manifest).await? {
            render_kind(&mut out, &comparison)?;
        }
    }
    Ok(out)
}

fn render_kind(out: &mut String, comparison: &Comparison) -> Result<()> {
    let Comparison { kind, entities, rows, compared, .. } = comparison;
    write!(out, "\nCanary of {entities}: {rows} {kind}s")?;
    let Some(night) = &comparison.night else {
        writeln!(
            out,
            "; there is no complete run of this night to compare them with. `laser report` compares them once there is"
        )?;
        return Ok(());
    };
    writeln!(out, ", {compared} of them with a row in {night}, which is in force")?;
    if comparison.same_specification {
        writeln!(out, "  Both have the same specification: their rows differ by nothing that it decides.")?;
    }
    if *compared > 0 {
        out.push_str(&table(comparison).indented());
    }
    for breach in &comparison.breaches {
        writeln!(out, "  {} of {}: {}", breach.pool, breach.run, breach.breach)?;
    }
    Ok(())
}

fn table(comparison: &Comparison) -> Table {
    let mut table = Table::new(&["", "canary", "night"]);
    for Figure { name, canary, night, digits } in &comparison.figures {
        let cell = |value: &Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"));
        table.push(vec![name.clone(), cell(canary), cell(night)]);
    }
    for agreement in &comparison.agreement {
        table.push(vec![agreement.name.to_owned(), format!("{:.3}", agreement.value), String::new()]);
    }
    table
}
