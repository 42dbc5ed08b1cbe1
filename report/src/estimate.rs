//! What a night was expected to take beside what it took.

use laser_schema::Kind;
use laser_schema::estimate::{Estimate, Interval};
use laser_schema::manifest::Manifest;
use serde::Serialize;

/// An estimated amount and its outcome.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Compared {
    estimate: Interval,
    outcome: f64,
    /// The outcome over the estimate; 0 where nothing was estimated.
    ratio: f64,
}

impl Compared {
    fn new(estimate: Interval, outcome: f64) -> Self {
        let ratio = if estimate.mean > 0.0 { outcome / estimate.mean } else { 0.0 };
        Self { estimate, outcome, ratio }
    }
}

/// The texts of a pool, an audit, or all.
#[derive(Debug, Serialize)]
pub(crate) struct EstimateRow {
    name: String,
    tokens: Compared,
    /// Of the engine.
    seconds: Compared,
}

/// A row for each pool and audit of these manifests' kinds that was estimated; the last is of all of them.
pub(crate) fn rows(estimate: &Estimate, manifests: &[&Manifest]) -> Vec<EstimateRow> {
    let manifest = |kind: Kind| manifests.iter().find(|manifest| manifest.kind == kind);
    let mut rows = Vec::new();
    for (group, manifest) in estimate.groups.iter().filter_map(|group| Some((group, manifest(group.kind)?))) {
        let figures = manifest.figures.get(&group.pool).copied().unwrap_or_default();
        let pool = if group.pool.is_empty() { String::new() } else { format!(", {}", group.pool) };
        rows.push(EstimateRow {
            name: format!("{}s{pool}", group.kind),
            tokens: Compared::new(group.tokens, figures.tokens as f64),
            seconds: Compared::new(group.seconds, figures.engine_seconds),
        });
    }
    for (kind, seconds, manifest) in estimate.audits.iter().filter_map(|(kind, s)| Some((kind, s, manifest(*kind)?))) {
        let outcome = manifest.audit.values().map(|audit| audit.plain_seconds + audit.seconds).sum();
        let name = format!("audit of {kind}s");
        rows.push(EstimateRow { name, tokens: Compared::default(), seconds: Compared::new(*seconds, outcome) });
    }
    let sum = |of: fn(&EstimateRow) -> &Compared| {
        let estimate = rows.iter().map(|row| of(row).estimate).sum();
        Compared::new(estimate, rows.iter().map(|row| of(row).outcome).sum())
    };
    let (tokens, seconds) = (sum(|row| &row.tokens), sum(|row| &row.seconds));
    rows.push(EstimateRow { name: "all".to_owned(), tokens, seconds });
    rows
}
