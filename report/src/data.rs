//! The report as data: every figure of the page, as numbers, in one structure that serialises. How they are called and
//! shown is the template's.

use std::collections::BTreeMap;

use laser_schema::Kind;
use laser_schema::audit::{AuditReport, AuditedText, Proposer};
use laser_schema::guard::Verdict;
use laser_schema::knowledge::{Figures, WRITER, ratio};
use laser_schema::lists::ListSpec;
use laser_schema::manifest::{Cost, Manifest, SUCCESS, Value};
use serde::Serialize;

use crate::canary::Comparison;
use crate::chart::{Histogram, SERIES};
use crate::estimate::{self, EstimateRow};
use crate::gather::{KindNight, Night, ShardLine, Stage};
use crate::lists::ListSample;

/// Pools in a chart; its table has all.
const POOLS_SHOWN: usize = 12;

/// Bins of a histogram.
const BINS: usize = 24;

/// Shards in the table of the slowest.
const SHARDS_SHOWN: usize = 10;

/// Drafts of one forward that a chart tells apart.
const DEPTH_MAX: usize = 32;

/// A night.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    run: &'a str,
    date: String,
    writer: &'static str,
    success: &'static str,
    /// The verification policy.
    policy: Option<String>,
    /// Whether the run's own folder is there.
    has_plan: bool,
    /// Whether there are lists in place of texts.
    is_lists: bool,
    /// Kinds whose `_SUCCESS` is withheld.
    withheld: Vec<String>,
    entities: u64,
    rows: u64,
    carried: u64,
    failed: u64,
    figures: Speed,
    price: Option<Price<'a>>,
    /// By pool; the last is of all pools, where there are several.
    audits: Vec<AuditRow>,
    engine: Vec<Share>,
    /// What the night was expected to take beside what it took; the last is of all.
    estimate: Vec<EstimateRow>,
    timeline: &'a [Stage],
    shards: Vec<Shard<'a>>,
    shard_count: usize,
    errors: Vec<ErrorCount<'a>>,
    first_errors: Vec<ErrorRow<'a>>,
    kinds: Vec<KindReport<'a>>,
    /// Beside the night in force, of a canary.
    comparisons: Vec<&'a Comparison>,
}

/// One kind of entities.
#[derive(Debug, Serialize)]
struct KindReport<'a> {
    kind: Kind,
    /// How a heading calls them.
    name: &'static str,
    folder: &'a str,
    manifest: &'a Manifest,
    verification: String,
    engine: String,
    model: String,
    price: Option<f64>,
    pools: Vec<PoolRow>,
    /// Forwards by their accepted drafts.
    accepted: Vec<Share>,
    forwards: Option<Histogram>,
    /// For each depth the share of forwards that accepted a draft there.
    depths: Vec<Line>,
    proposers: Vec<Share>,
    lengths: Option<Histogram>,
    /// The lengths of this run's texts and of the plain ones.
    audited_lengths: Option<Histogram>,
    similarities: Option<Histogram>,
    /// The share of the value that has a text, if the night has a priority.
    value_coverage: Option<f64>,
    /// Shares of value and entities that had a text, over time.
    reached: Vec<Line>,
    /// The time that [`Self::reached`] covers.
    reached_seconds: f64,
    /// Tonight's texts by why they ended.
    stops: &'a BTreeMap<String, u64>,
    samples: Vec<Sample<'a>>,
    /// How lists are made, if they are.
    lists: Option<&'a ListSpec>,
    list_samples: &'a [ListSample],
}

/// The speed at which some texts were generated.
#[derive(Debug, Serialize)]
struct Speed {
    texts: u64,
    tokens: u64,
    tokens_per_second: f64,
    texts_per_second: f64,
    text_length: f64,
    forwards_per_text: f64,
    accepted_per_text: f64,
    drafted_per_text: f64,
    /// Accepted drafts per forward.
    aal: f64,
    draft_yield: f64,
    draft_seconds_per_text: f64,
    relaxed_share: f64,
}

#[derive(Debug, Serialize)]
struct PoolRow {
    pool: String,
    /// Whether the chart, which has room for the largest, shows it.
    charted: bool,
    #[serde(flatten)]
    speed: Speed,
    length_drift: Option<f64>,
    length_to_plain: Option<f64>,
    distinct: [Option<f64>; 3],
    mean_log_probability: Option<f64>,
    similarity: Option<f64>,
    /// The guards' findings, if any are set.
    guards: Option<String>,
}

#[derive(Debug, Serialize)]
struct AuditRow {
    pool: String,
    kind: String,
    charted: bool,
    texts: u64,
    plain_rate: f64,
    rate: f64,
    speedup: f64,
    identical_share: f64,
    length_ratio: f64,
}

/// A part of a whole.
#[derive(Debug, Serialize)]
struct Share {
    name: String,
    amount: f64,
    share: f64,
}

#[derive(Debug, Serialize)]
struct Line {
    name: String,
    values: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Price<'a> {
    currency: &'a str,
    total: f64,
    per_1000_texts: f64,
}

#[derive(Debug, Serialize)]
struct Shard<'a> {
    kind: Kind,
    #[serde(flatten)]
    line: &'a ShardLine,
    pools: String,
    tokens_per_second: f64,
    texts_per_second: f64,
}

#[derive(Debug, Serialize)]
struct ErrorCount<'a> {
    kind: Kind,
    stage: &'a str,
    reason: &'a str,
    rows: u64,
}

#[derive(Debug, Serialize)]
struct ErrorRow<'a> {
    entity: String,
    kind: Kind,
    stage: &'a str,
    reason: &'a str,
}

#[derive(Debug, Serialize)]
struct Sample<'a> {
    pool: &'a str,
    id: String,
    #[serde(flatten)]
    text: &'a AuditedText,
}

impl<'a> Report<'a> {
    pub(crate) fn new(night: &'a Night) -> Self {
        let sum = |of: fn(&Manifest) -> u64| night.kinds.iter().map(|kind| of(&kind.manifest)).sum();
        let figures: Figures = night.kinds.iter().flat_map(|kind| kind.manifest.figures.values()).sum();
        let audit: AuditReport = night.kinds.iter().flat_map(|kind| kind.manifest.audit.values()).sum();
        let (shards, shard_count) = slowest_shards(night);
        Self {
            run: &night.run,
            date: night.date.to_string(),
            writer: WRITER,
            success: SUCCESS,
            policy: night.kinds.first().map(|k| k.manifest.spec.verification.to_string()),
            has_plan: night.has_plan,
            is_lists: night.is_lists(),
            withheld: night.kinds.iter().filter(|k| !k.complete).map(|k| format!("{}s", k.manifest.kind)).collect(),
            entities: sum(|m| m.entities),
            rows: sum(|m| m.rows),
            carried: sum(|m| m.carried),
            failed: sum(|m| m.errors),
            price: price(night, figures.texts),
            audits: audits(night, &audit),
            engine: engine_time(night.is_lists(), &figures, &audit),
            figures: Speed::new(&figures),
            estimate: night.estimate.as_ref().map_or_else(Vec::new, |estimate| {
                estimate::rows(estimate, &night.kinds.iter().map(|kind| &kind.manifest).collect::<Vec<_>>())
            }),
            timeline: if night.timeline.last().is_some_and(|last| last.to > 0.0) { &night.timeline } else { &[] },
            shards,
            shard_count,
            errors: error_counts(night),
            first_errors: first_errors(night),
            kinds: night.kinds.iter().map(KindReport::new).collect(),
            comparisons: night.kinds.iter().filter_map(|kind| kind.comparison.as_ref()).collect(),
        }
    }
}

impl<'a> KindReport<'a> {
    fn new(night: &'a KindNight) -> Self {
        let KindNight { manifest, texts, audited, .. } = night;
        let spec = &manifest.spec;
        let counts = |counts: &BTreeMap<u64, u64>| counts.iter().map(|(n, count)| (*n as f64, *count)).collect();
        let accepted = all_accepted(&texts.accepted);
        let forwards = (0u32..).zip(&accepted).map(|(n, count)| (f64::from(n), *count)).collect();
        Self {
            kind: manifest.kind,
            name: match manifest.kind {
                Kind::User => "Users",
                Kind::Item => "Items",
            },
            folder: &night.folder,
            manifest,
            verification: spec.verification.to_string(),
            engine: format!("{}, {}", spec.engine, spec.precision),
            model: spec.model.to_string(),
            price: manifest.cost.as_ref().map(Cost::total),
            pools: pools(manifest),
            depths: depths(&accepted, &texts.accepted),
            forwards: Histogram::of(&[forwards], BINS, 1.0),
            accepted: shares(accepted.iter().enumerate().map(|(n, count)| (n.to_string(), *count as f64))),
            proposers: shares(Proposer::ALL.into_iter().map(|proposer| {
                let tokens = audited.proposed.get(&proposer).copied().unwrap_or_default();
                (proposer_name(proposer).to_owned(), tokens as f64)
            })),
            lengths: Histogram::of(&[counts(&texts.lengths)], BINS, 1.0),
            audited_lengths: Histogram::of(&[counts(&audited.texts), counts(&audited.plain)], BINS, 1.0),
            similarities: Histogram::of(
                &[audited.similarities.iter().map(|cosine| (*cosine, 1)).collect()],
                BINS,
                0.002,
            ),
            value_coverage: manifest.value.as_ref().map(Value::coverage),
            reached: night.reached.as_ref().map_or_else(Vec::new, |reached| {
                let line = |name: &str, values: &[f64]| Line { name: name.to_owned(), values: values.to_vec() };
                vec![line("Value", &reached.value), line("Entities", &reached.entities)]
            }),
            reached_seconds: night.reached.as_ref().map_or(0.0, |reached| reached.seconds),
            stops: &texts.stops,
            samples: (audited.samples.iter().filter(|_| spec.lists.is_none()))
                .map(|(pool, text)| Sample { pool, id: text.entity_id.to_string(), text })
                .collect(),
            lists: spec.lists.as_ref(),
            list_samples: &texts.lists,
        }
    }
}

impl Speed {
    fn new(figures: &Figures) -> Self {
        Self {
            texts: figures.texts,
            tokens: figures.tokens,
            tokens_per_second: figures.tokens_per_second(),
            texts_per_second: figures.texts_per_second(),
            text_length: figures.text_length(),
            forwards_per_text: figures.forwards_per_text(),
            accepted_per_text: ratio(figures.accepted as f64, figures.texts as f64),
            drafted_per_text: ratio(figures.drafted as f64, figures.texts as f64),
            aal: figures.aal(),
            draft_yield: figures.draft_yield(),
            draft_seconds_per_text: figures.art_seconds(),
            relaxed_share: figures.relaxed_share(),
        }
    }
}

/// A pool's name in charts and tables.
fn pool_name(pool: &str) -> String {
    if pool.is_empty() { "no pool".to_owned() } else { pool.to_owned() }
}

fn proposer_name(proposer: Proposer) -> &'static str {
    match proposer {
        Proposer::Target => "The model",
        Proposer::Pool => "The pool",
        Proposer::Previous => "The previous text",
        Proposer::Context => "Prompt and text so far",
        Proposer::DraftModel => "The draft model",
        Proposer::Constraint => "The constraint",
    }
}

/// Which rows a chart shows: the largest.
fn largest(sizes: &[u64]) -> Vec<bool> {
    let mut sorted = sizes.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let least = sorted.get(POOLS_SHOWN - 1).copied().unwrap_or_default();
    let mut room = POOLS_SHOWN;
    let mut takes = |size: u64| {
        let taken = size >= least && room > 0;
        room -= usize::from(taken);
        taken
    };
    sizes.iter().map(|&size| takes(size)).collect()
}

/// The amounts with their shares of the sum; none if that is 0.
fn shares(amounts: impl Iterator<Item = (String, f64)>) -> Vec<Share> {
    let amounts: Vec<(String, f64)> = amounts.collect();
    let sum: f64 = amounts.iter().map(|(_, amount)| amount).sum();
    let shares = amounts.into_iter().filter(|_| sum > 0.0);
    shares.map(|(name, amount)| Share { name, amount, share: amount / sum }).collect()
}

fn audits(night: &Night, all: &AuditReport) -> Vec<AuditRow> {
    if all.speedup() <= 0.0 {
        return Vec::new();
    }
    let by_pool = night.kinds.iter().flat_map(|k| {
        let audits = k.manifest.audit.iter().filter(|(_, audit)| audit.texts > 0);
        audits.map(|(pool, audit)| (pool_name(pool), k.manifest.kind.to_string(), *audit))
    });
    let mut rows: Vec<_> = by_pool.collect();
    if rows.len() > 1 {
        rows.push(("All pools".to_owned(), "all".to_owned(), *all));
    }
    let charted = largest(&rows.iter().map(|(.., audit)| audit.texts).collect::<Vec<_>>());
    let rows = rows.into_iter().zip(charted).map(|((pool, kind, audit), charted)| AuditRow {
        pool,
        kind,
        charted,
        texts: audit.texts,
        plain_rate: audit.plain_rate(),
        rate: audit.rate(),
        speedup: audit.speedup(),
        identical_share: audit.identical_share(),
        length_ratio: audit.length_ratio(),
    });
    rows.collect()
}

fn pools(manifest: &Manifest) -> Vec<PoolRow> {
    let charted = largest(&manifest.figures.values().map(|f| f.texts).collect::<Vec<_>>());
    let rows = manifest.figures.iter().zip(charted).map(|((pool, figures), charted)| {
        let audit = manifest.audit.get(pool).filter(|audit| audit.texts > 0);
        let verdict = manifest.guards.as_ref().and_then(|report| report.pools.get(pool));
        PoolRow {
            pool: pool_name(pool),
            charted,
            speed: Speed::new(figures),
            length_drift: (figures.previous > 0).then(|| figures.length_drift()),
            length_to_plain: audit.map(AuditReport::length_ratio),
            distinct: [1, 2, 3].map(|n| figures.distinct(n)),
            mean_log_probability: figures.mean_log_probability(),
            similarity: audit.and_then(AuditReport::mean_similarity),
            guards: verdict.map(findings),
        }
    });
    rows.collect()
}

fn findings(verdict: &Verdict) -> String {
    let breaches: Vec<String> = verdict.breaches.iter().map(ToString::to_string).collect();
    match (breaches.is_empty(), verdict.strict) {
        (true, _) => "kept".to_owned(),
        (false, false) => breaches.join("; "),
        (false, true) => format!("{}: verified strictly", breaches.join("; ")),
    }
}

/// Forwards by accepted drafts, over all pools.
fn all_accepted(pools: &BTreeMap<String, Vec<u64>>) -> Vec<u64> {
    let most = pools.values().map(Vec::len).max().unwrap_or_default();
    (0..most).map(|n| pools.values().filter_map(|counts| counts.get(n)).sum()).collect()
}

/// For each depth the share of forwards that accepted a draft there: all before it were accepted too.
fn by_depth(counts: &[u64]) -> Vec<f64> {
    let forwards: u64 = counts.iter().sum();
    let depths = 1..counts.len().min(DEPTH_MAX + 1);
    let reached = |depth: usize| counts[depth..].iter().sum::<u64>();
    depths.map(|depth| ratio(reached(depth) as f64, forwards as f64)).collect()
}

/// Returns a line for all pools and one for each of the largest, as far as there are colours; none if no draft was
/// accepted.
fn depths(all: &[u64], pools: &BTreeMap<String, Vec<u64>>) -> Vec<Line> {
    let all = by_depth(all);
    if all.first().is_none_or(|share| *share <= 0.0) {
        return Vec::new();
    }
    let mut lines = vec![Line { name: "All pools".to_owned(), values: all }];
    if pools.len() > 1 {
        let mut largest: Vec<_> = pools.iter().collect();
        largest.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.iter().sum::<u64>()));
        largest.truncate(usize::from(SERIES) - 2);
        largest.sort_by_key(|(pool, _)| *pool);
        lines
            .extend(largest.into_iter().map(|(pool, counts)| Line { name: pool_name(pool), values: by_depth(counts) }));
    }
    lines
}

fn engine_time(is_lists: bool, figures: &Figures, audit: &AuditReport) -> Vec<Share> {
    let stages = [
        (
            if is_lists { "Forwards of lists" } else { "Forwards of texts" },
            figures.engine_seconds - figures.draft_seconds,
        ),
        ("Drafting", figures.draft_seconds),
        ("Audit, plain", audit.plain_seconds),
        ("Audit, as this run", audit.seconds),
    ];
    let stages = stages.into_iter().filter(|(_, seconds)| *seconds > 0.0);
    shares(stages.map(|(name, seconds)| (name.to_owned(), seconds)))
}

fn price(night: &Night, texts: u64) -> Option<Price<'_>> {
    let costs: Vec<&Cost> = night.kinds.iter().filter_map(|k| k.manifest.cost.as_ref()).collect();
    let price = &costs.first()?.price;
    let of_texts: f64 = costs.iter().map(|cost| price.of_seconds(cost.gpu_seconds)).sum();
    Some(Price {
        currency: &price.currency,
        total: costs.iter().map(|cost| cost.total()).sum(),
        per_1000_texts: ratio(of_texts * 1e3, texts as f64),
    })
}

/// The slowest shards, and how many there are.
fn slowest_shards(night: &Night) -> (Vec<Shard<'_>>, usize) {
    let all = night.kinds.iter().flat_map(|k| k.texts.shards.iter().map(|shard| (k.manifest.kind, shard)));
    let mut all: Vec<(Kind, &ShardLine)> = all.collect();
    all.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds).then(a.1.shard.cmp(&b.1.shard)));
    let slowest = all.iter().take(SHARDS_SHOWN).map(|&(kind, line)| Shard {
        kind,
        line,
        pools: line.pools.iter().map(|pool| pool_name(pool)).collect::<Vec<_>>().join(", "),
        tokens_per_second: ratio(line.tokens as f64, line.seconds),
        texts_per_second: ratio(line.texts as f64, line.seconds),
    });
    (slowest.collect(), all.len())
}

fn error_counts(night: &Night) -> Vec<ErrorCount<'_>> {
    let counts = night.kinds.iter().flat_map(|k| {
        let kind = k.manifest.kind;
        k.errors.reasons.iter().map(move |((stage, reason), &rows)| ErrorCount { kind, stage, reason, rows })
    });
    counts.collect()
}

fn first_errors(night: &Night) -> Vec<ErrorRow<'_>> {
    let rows = night.kinds.iter().flat_map(|k| {
        k.errors.first.iter().map(|row| ErrorRow {
            entity: row.entity_id.to_string(),
            kind: k.manifest.kind,
            stage: &row.stage,
            reason: &row.reason,
        })
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_depth_is_reached_by_all_forwards_that_accepted_more() {
        let close = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(close(&by_depth(&[2, 1, 0, 1]), &[0.5, 0.25, 0.25]));
        assert!(by_depth(&[]).is_empty() && by_depth(&[7]).is_empty());
    }

    #[test]
    fn a_chart_shows_the_largest_pools() {
        let sizes: Vec<u64> = (0..POOLS_SHOWN as u64 + 3).map(|n| n % 14).collect();
        let shown = largest(&sizes);
        assert_eq!(shown.iter().filter(|shown| **shown).count(), POOLS_SHOWN);
        assert!(!shown[0] && !shown[14] && shown[13]);
        assert_eq!(largest(&[3, 3, 0]), [true; 3]);
    }
}
