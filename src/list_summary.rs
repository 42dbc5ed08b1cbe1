//! What a user reads when a night of lists has ended: how many, at what cost in forwards, one of them, and where they
//! are.

use std::fmt::Write as _;

use anyhow::Result;
use laser_night::Finished;
use laser_schema::EntityId;
use laser_schema::audit::AuditReport;
use laser_schema::knowledge::{Figures, KnowledgeRecord, ratio};
use laser_schema::manifest::{ERRORS, Manifest};
use laser_store::catalogue;
use laser_store::part::decode_part;

/// Items of the sample list that are shown.
const SHOWN: usize = 5;

/// The summary as text.
///
/// # Errors
/// If a published part cannot be read.
pub(crate) async fn render(finished: &Finished) -> Result<String> {
    let mut out = String::new();
    for manifest in &finished.manifests {
        writeln!(
            out,
            "{}s on {}: {} entities, {} lists generated, {} unchanged and carried forward, {} errors",
            manifest.kind,
            manifest.date,
            manifest.entities,
            manifest.rows - manifest.carried,
            manifest.carried,
            manifest.errors
        )?;
        if let Some(value) = &manifest.value {
            writeln!(out, "  {value}")?;
        }
        render_figures(&mut out, manifest)?;
        if let Some(KnowledgeRecord { entity_id, items, scores, .. }) = sample(finished, manifest).await? {
            let shown = items.iter().map(EntityId::to_string).take(SHOWN).collect();
            let titles = catalogue::titles(&finished.run.store.folder(), &shown).await?;
            let name =
                |item: &EntityId| titles.get(&item.to_string()).map_or(String::new(), |title| format!(" {title}"));
            let listed = items.iter().zip(&scores).take(SHOWN);
            let listed: Vec<String> =
                listed.map(|(item, score)| format!("{item}{} ({score:.2})", name(item))).collect();
            writeln!(out, "\nSample {} {entity_id}, {} items: {} …", manifest.kind, items.len(), listed.join(", "))?;
        }
        render_audit(&mut out, manifest)?;
        writeln!(out, "\n{}s: {}", manifest.kind, finished.run.partition(manifest.kind).url())?;
        if manifest.errors > 0 {
            writeln!(out, "  {} without a list: see {ERRORS} there", manifest.errors)?;
        }
    }
    match finished.seconds {
        Some(seconds) => writeln!(out, "Generated in {seconds:.1} s, audit included.")?,
        None => writeln!(out, "This run was complete already: nothing was generated now.")?,
    }
    Ok(out)
}

fn render_figures(out: &mut String, manifest: &Manifest) -> Result<()> {
    let figures: Figures = manifest.figures.values().sum();
    if figures.texts == 0 {
        return Ok(());
    }
    let per_list = |count: u64| ratio(count as f64, figures.texts as f64);
    writeln!(
        out,
        "  {:.0} lists per second of the engine; per list {:.2} forwards, {:.2} steps that drafts saved, {:.0} drafted \
         prefixes",
        ratio(figures.texts as f64, figures.engine_seconds),
        per_list(figures.forwards),
        per_list(figures.accepted),
        per_list(figures.drafted)
    )?;
    if let Some(cost) = &manifest.cost {
        writeln!(out, "  {:.4} {}, {:.4} per 1,000 lists", cost.total(), cost.price.currency, cost.per_1000_texts)?;
    }
    Ok(())
}

fn render_audit(out: &mut String, manifest: &Manifest) -> Result<()> {
    let audit: AuditReport = manifest.audit.values().sum();
    if audit.texts == 0 {
        return Ok(());
    }
    writeln!(
        out,
        "\nAudit of {} lists, plain beam search against this run in turns: {:.1} against {:.1} lists/s, speedup \
         {:.2}x, {:.0}% of the lists the same",
        audit.texts,
        audit.plain_rate(),
        audit.rate(),
        audit.speedup(),
        audit.identical_share() * 100.0
    )?;
    Ok(())
}

/// The first list of the first part that has one.
async fn sample(finished: &Finished, manifest: &Manifest) -> Result<Option<KnowledgeRecord>> {
    let folder = finished.run.partition(manifest.kind);
    for part in &manifest.parts {
        let (rows, _) = decode_part(&part.name, folder.join(&part.name).read().await?)?;
        if let Some(row) = rows.into_iter().next() {
            return Ok(Some(row));
        }
    }
    Ok(None)
}
