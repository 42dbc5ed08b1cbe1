//! What a user reads when a night has ended: figures by pool, the speedup, two texts, where the output is.

use std::fmt::Write as _;

use anyhow::Result;
use laser_model::Tokenizer;
use laser_night::Finished;
use laser_schema::audit::AuditReport;
use laser_schema::job::Price;
use laser_schema::knowledge::{Figures, KnowledgeRecord, ratio};
use laser_schema::manifest::{Cost, ERRORS, Manifest};
use laser_store::part::decode_part;
use laser_terminal::Table;

use crate::list_summary;

/// Accepted drafts a forward below which a pool is not worth its name, and forwards before it is said.
const IDLE: (f64, u64) = (0.1, 200);

/// The columns of the table of pools.
const COLUMNS: [&str; 13] = [
    "pool", "texts", "tokens", "tokens/s", "AAL", "ART ms", "yield", "relaxed", "speedup", "identical", "length",
    "drift", "price",
];

/// Marks around accepted drafts in sample texts.
const MARKS: (&str, &str) = ("⟦", "⟧");

/// The summary as text.
///
/// # Errors
/// If a published part cannot be read.
pub(crate) async fn render(finished: &Finished) -> Result<String> {
    if finished.run.plan.spec.lists.is_some() {
        return list_summary::render(finished).await;
    }
    let mut out = String::new();
    for manifest in &finished.manifests {
        render_manifest(&mut out, manifest)?;
    }
    render_total(&mut out, finished)?;
    for manifest in &finished.manifests {
        if let Some((id, text)) = sample(finished, manifest).await? {
            let (open, close) = MARKS;
            let legend = match manifest.spec.constraint {
                None => format!(" (accepted drafts in {open} {close})"),
                Some(_) => String::new(),
            };
            writeln!(out, "\nSample {} {id}{legend}:\n  {text}", manifest.kind)?;
        }
        writeln!(out, "\n{}s: {}", manifest.kind, finished.run.partition(manifest.kind).url())?;
        if manifest.errors > 0 {
            writeln!(out, "  {} without a text: see {ERRORS} there", manifest.errors)?;
        }
    }
    Ok(out)
}

fn render_manifest(out: &mut String, manifest: &Manifest) -> Result<()> {
    writeln!(
        out,
        "{}s on {}: {} entities, {} generated, {} unchanged and carried forward, {} errors",
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
    if let Some(embedding) = &manifest.embedding {
        writeln!(
            out,
            "  embeddings of {} dimensions; {} texts were cut off at {} tokens",
            embedding.spec.encoder.dimensions, embedding.truncated, embedding.spec.encoder.max_tokens
        )?;
    }
    if manifest.figures.is_empty() {
        return Ok(());
    }
    out.push_str(&figures(manifest).indented());
    render_idle(out, manifest)?;
    render_guards(out, manifest)
}

/// Pools that breach a guard, and what followed.
fn render_guards(out: &mut String, manifest: &Manifest) -> Result<()> {
    let Some(report) = &manifest.guards else {
        return Ok(());
    };
    for (pool, verdict) in &report.pools {
        let outcome = match verdict.strict {
            true => "in the audit: verified strictly",
            false => "",
        };
        for breach in &verdict.breaches {
            writeln!(out, "  {pool}: {breach} {outcome}")?;
        }
    }
    Ok(())
}

/// Pools that do not pay.
fn render_idle(out: &mut String, manifest: &Manifest) -> Result<()> {
    for (pool, figures) in &manifest.figures {
        if figures.aal() < IDLE.0 && figures.forwards >= IDLE.1 {
            writeln!(
                out,
                "  {pool} does not pay: {:.2} accepted drafts a forward. Its texts are decoded all but plainly; give \
                 it more texts or closer ones ([pools.{}])",
                figures.aal(),
                manifest.kind
            )?;
        }
    }
    Ok(())
}

/// A row for each pool, and one for all of them.
fn figures(manifest: &Manifest) -> Table {
    let mut table = Table::new(&COLUMNS);
    let cost = manifest.cost.as_ref();
    for (pool, figures) in &manifest.figures {
        let price = cost.and_then(|c| c.per_1000_texts_by_pool.get(pool).copied());
        table.push(row(pool, figures, manifest.audit.get(pool), price));
    }
    if manifest.figures.len() > 1 {
        let (figures, audit) = totals(std::slice::from_ref(manifest));
        table.push(row("all", &figures, audit.as_ref(), cost.map(|c| c.per_1000_texts)));
    }
    table
}

fn row(pool: &str, figures: &Figures, audit: Option<&AuditReport>, price: Option<f64>) -> Vec<String> {
    let audit = audit.filter(|audit| audit.texts > 0);
    let audited = |format: fn(&AuditReport) -> String| audit.map(format);
    let optional = [
        audited(|audit| format!("{:.2}x", audit.speedup())),
        audited(|audit| format!("{:.0}%", audit.identical_share() * 100.0)),
        audited(|audit| format!("{:.2}x", audit.length_ratio())),
        (figures.previous > 0).then(|| format!("{:.2}x", figures.length_drift())),
        price.map(|price| format!("{price:.4}")),
    ];
    let mut cells = vec![
        pool.to_owned(),
        figures.texts.to_string(),
        figures.tokens.to_string(),
        format!("{:.0}", figures.tokens_per_second()),
        format!("{:.2}", figures.aal()),
        format!("{:.2}", figures.art_seconds() * 1e3),
        format!("{:.0}%", figures.draft_yield() * 100.0),
        format!("{:.1}%", figures.relaxed_share() * 100.0),
    ];
    cells.extend(optional.map(|cell| cell.unwrap_or_else(|| "–".to_owned())));
    cells
}

fn totals(manifests: &[Manifest]) -> (Figures, Option<AuditReport>) {
    let figures = manifests.iter().flat_map(|manifest| manifest.figures.values()).sum();
    let audit: AuditReport = manifests.iter().flat_map(|manifest| manifest.audit.values()).sum();
    (figures, Some(audit).filter(|a| a.texts > 0))
}

fn render_total(out: &mut String, finished: &Finished) -> Result<()> {
    let (figures, audit) = totals(&finished.manifests);
    writeln!(
        out,
        "\n{} texts, {} tokens ({:.0} a text) at {:.0} tokens/s; {:.2} accepted drafts a forward, {:.1} % relaxed",
        figures.texts,
        figures.tokens,
        figures.text_length(),
        figures.tokens_per_second(),
        figures.aal(),
        figures.relaxed_share() * 100.0
    )?;
    if figures.forced > 0 {
        writeln!(
            out,
            "{} tokens ({:.0} %) needed no forward of their own: the constraint allowed nothing else",
            figures.forced,
            figures.forced_share() * 100.0
        )?;
    }
    if let Some(audit) = audit {
        writeln!(
            out,
            "Audit of {} texts, plain decoding against this run in turns: {:.0} against {:.0} tokens/s, speedup \
             {:.2}x; {:.0} % of the texts are the plain ones token for token, length {:.2} of plain",
            audit.texts,
            ratio(audit.plain_tokens as f64, audit.plain_seconds),
            ratio(audit.tokens as f64, audit.seconds),
            audit.speedup(),
            audit.identical_share() * 100.0,
            audit.length_ratio()
        )?;
    }
    render_cost(out, &finished.manifests)?;
    match finished.seconds {
        Some(seconds) => writeln!(out, "Generated in {seconds:.1} s, audit included.")?,
        None => writeln!(out, "This run was complete already: nothing was generated now.")?,
    }
    if let Some(note) = &finished.note {
        writeln!(out, "Note: {note}.")?;
    }
    Ok(())
}

fn render_cost(out: &mut String, manifests: &[Manifest]) -> Result<()> {
    let costs: Vec<&Cost> = manifests.iter().filter_map(|m| m.cost.as_ref()).collect();
    let Some(Price { gpu_hour, currency }) = costs.first().map(|cost| &cost.price) else {
        return Ok(());
    };
    let sum = |of: fn(&Cost) -> f64| costs.iter().map(|cost| of(cost)).sum::<f64>();
    let texts = totals(manifests).0.texts as f64;
    let texts_price = sum(|cost| cost.price.of_seconds(cost.gpu_seconds));
    writeln!(
        out,
        "{:.4} {currency}, {:.4} per 1,000 texts: {:.1} GPU seconds of texts and {:.1} of the audit at {gpu_hour} \
         {currency} an hour",
        sum(Cost::total),
        ratio(texts_price * 1e3, texts),
        sum(|cost| cost.gpu_seconds),
        sum(|cost| cost.audit_gpu_seconds),
    )?;
    Ok(())
}

/// A generated text of the kind with its accepted drafts marked (paper 4.3.2): the first of its parts whose
/// tokens the text alone gives back.
async fn sample(finished: &Finished, manifest: &Manifest) -> Result<Option<(String, String)>> {
    let folder = finished.run.partition(manifest.kind);
    for part in &manifest.parts {
        let (rows, info) = decode_part(&part.name, folder.join(&part.name).read().await?)?;
        if info.carried > 0 {
            continue;
        }
        let tokenizer = &finished.model.tokenizer;
        // Forced tokens are not told apart from the others.
        let is_constrained = manifest.spec.constraint.is_some();
        let shown = |row: &KnowledgeRecord| if is_constrained { Some(row.text.clone()) } else { mark(row, tokenizer) };
        if let Some(found) = rows.iter().find_map(|row| Some((row, shown(row)?))) {
            return Ok(Some((found.0.entity_id.to_string(), found.1)));
        }
    }
    Ok(None)
}

/// The text with marks around accepted drafts; `None` where the text's tokens are not those that were generated.
fn mark(row: &KnowledgeRecord, tokenizer: &Tokenizer) -> Option<String> {
    let tokens = tokenizer.encode(&row.text, false).ok()?;
    let ended = usize::from(row.stop_reason == "end");
    if tokens.len() + ended != usize::try_from(row.text_tokens).ok()? {
        return None;
    }
    let (open, close) = MARKS;
    let mut marked = String::new();
    let mut rest = tokens.as_slice();
    for &accepted in &row.step_accepted {
        let (drafted, after) = rest.split_at(usize::try_from(accepted).ok()?.min(rest.len()));
        let (own, after) = after.split_at(1.min(after.len()));
        if !drafted.is_empty() {
            marked = marked + open + &tokenizer.decode(drafted).ok()? + close;
        }
        marked += &tokenizer.decode(own).ok()?;
        rest = after;
    }
    Some(marked.replace('\n', " "))
}
