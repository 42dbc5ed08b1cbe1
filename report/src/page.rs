//! The page: what is most asked first, then sections, then samples.

use anyhow::{Context, Result};
use laser_schema::Kind;
use laser_schema::audit::AuditReport;
use laser_schema::audit::{AuditedText, Proposer};
use laser_schema::knowledge::{Figures, WRITER, ratio};
use laser_schema::manifest::{Cost, SUCCESS};
use minijinja::{Environment, context};
use serde::Serialize;

use super::chart;
use super::format::{percent, whole, whole_f};
use super::gather::{KindNight, Night};
use super::sections::sections;

/// Named `.html`, so that everything that is put into it is escaped.
const TEMPLATE: (&str, &str) = ("report.html", include_str!("report.html"));

#[derive(Debug, Serialize)]
struct Tile {
    label: &'static str,
    value: String,
    unit: &'static str,
    note: String,
}

#[derive(Debug, Serialize)]
struct Sample<'a> {
    kind: Kind,
    pool: &'a str,
    id: String,
    #[serde(flatten)]
    text: &'a AuditedText,
}

/// The page of a night.
pub(super) fn render(night: &Night) -> Result<String> {
    let mut environment = Environment::new();
    environment.add_template(TEMPLATE.0, TEMPLATE.1)?;
    let sections = sections(night)?;
    let samples: Vec<Sample<'_>> = night.kinds.iter().flat_map(samples).collect();
    let withheld = night.kinds.iter().filter(|k| !k.complete);
    let page = environment.get_template(TEMPLATE.0)?.render(context! {
        run => night.run,
        date => night.date.to_string(),
        kinds => night.kinds.iter().map(|k| format!("{}s", k.manifest.kind)).collect::<Vec<_>>().join(" and "),
        policy => night.kinds.first().map(|k| k.manifest.spec.verification.to_string()),
        withheld => withheld.map(|k| format!("{}s", k.manifest.kind)).collect::<Vec<_>>(),
        success => SUCCESS,
        has_plan => night.has_plan,
        tiles => tiles(night),
        sections,
        samples,
        sources => sources(),
        series => chart::SERIES,
        writer => WRITER,
    });
    page.context("the page")
}

/// What each origin of a piece is called.
fn sources() -> Vec<(&'static str, &'static str)> {
    let describe = |source| match source {
        Proposer::Target => "the model's own token",
        Proposer::Pool => "accepted from the pool",
        Proposer::Previous => "accepted from the entity's previous text",
        Proposer::Context => "accepted from the prompt or the text so far",
    };
    Proposer::ALL.map(|source| (source.as_str(), describe(source))).into()
}

fn samples(kind: &KindNight) -> impl Iterator<Item = Sample<'_>> {
    kind.audited.samples.iter().map(|(pool, text)| Sample {
        kind: kind.manifest.kind,
        pool,
        id: text.entity_id.to_string(),
        text,
    })
}

/// Sums over all kinds and pools.
pub(super) fn sums(night: &Night) -> (Figures, AuditReport) {
    let (mut figures, mut audit) = (Figures::default(), AuditReport::default());
    for KindNight { manifest, .. } in &night.kinds {
        manifest.figures.values().for_each(|f| figures.add(f));
        manifest.audit.values().for_each(|a| audit.add(a));
    }
    (figures, audit)
}

fn tiles(night: &Night) -> Vec<Tile> {
    let (figures, audit) = sums(night);
    let sum = |of: fn(&KindNight) -> u64| night.kinds.iter().map(of).sum::<u64>();
    let entities = sum(|k| k.manifest.entities);
    let (rows, carried) = (sum(|k| k.manifest.rows), sum(|k| k.manifest.carried));
    let errors = sum(|k| k.manifest.errors);
    let tile = |label, (value, unit), note| Tile { label, value, unit, note };
    let mut tiles = Vec::new();
    if audit.texts > 0 {
        tiles.push(tile(
            "Speedup",
            (format!("{:.2}×", audit.speedup()), ""),
            format!("over plain decoding, of {} audited texts", whole(audit.texts)),
        ));
    }
    tiles.push(tile(
        "Texts",
        (whole(rows), ""),
        format!("{} generated, {} carried forward", whole(rows - carried), whole(carried)),
    ));
    tiles.push(tile(
        "Coverage",
        (percent(ratio(rows as f64, entities as f64), 1), ""),
        match errors {
            0 => format!("all of {} entities", whole(entities)),
            _ => format!("{} of {} entities without a text", whole(errors), whole(entities)),
        },
    ));
    if figures.texts > 0 {
        tiles.push(tile(
            "Throughput",
            (whole_f(figures.tokens_per_second()), "/s"),
            format!("{} tokens, {:.0} a text", whole(figures.tokens), figures.text_length()),
        ));
        tiles.push(tile(
            "Accepted drafts",
            (format!("{:.2}", figures.aal()), ""),
            format!("a forward; {} of what was drafted", percent(figures.draft_yield(), 0)),
        ));
        tiles.push(tile(
            "Relaxed tokens",
            (percent(figures.relaxed_share(), 1), ""),
            "accepted though not the most probable".to_owned(),
        ));
    }
    tiles.extend(price(night, figures.texts));
    tiles
}

fn price(night: &Night, texts: u64) -> Option<Tile> {
    let costs: Vec<&Cost> = night.kinds.iter().filter_map(|k| k.manifest.cost.as_ref()).collect();
    let price = &costs.first()?.price;
    let total: f64 = costs.iter().map(|cost| cost.total()).sum();
    let of_texts: f64 = costs.iter().map(|cost| price.of_seconds(cost.gpu_seconds)).sum();
    let per_1000 = ratio(of_texts * 1e3, texts as f64);
    Some(Tile {
        label: "Price",
        value: format!("{total:.4}"),
        unit: "",
        note: format!("{}; {per_1000:.4} per 1,000 texts", price.currency),
    })
}
