//! The sections of the page: cards, each a chart with the table of its figures, or a table alone.

use anyhow::Result;
use laser_schema::Kind;
use laser_schema::audit::AuditReport;
use laser_schema::audit::Proposer;
use laser_schema::guard::Verdict;
use laser_schema::knowledge::ratio;
use minijinja::Value;
use serde::Serialize;

use super::chart::{self, Axes, Drawing, Histogram};
use super::format::{duration, known, percent, short, whole, whole_f, whole_only};
use super::gather::{KindNight, Night, ShardLine};
use super::page::sums;

/// Pools in a chart; its table has all.
const POOLS_SHOWN: usize = 12;

/// Bins of a histogram.
const BINS: usize = 24;

/// Shards in the table of the slowest.
const SHARDS_SHOWN: usize = 10;

/// Drafts of one forward that a chart tells apart.
const DEPTH_MAX: usize = 32;

/// What two series are called throughout.
const BOTH: [&str; 2] = ["This run", "Plain decoding"];

#[derive(Debug, Serialize)]
pub(super) struct Section {
    id: &'static str,
    title: &'static str,
    intro: String,
    cards: Vec<Card>,
}

#[derive(Debug, Default, Serialize)]
struct Card {
    title: String,
    note: String,
    chart: Option<Svg>,
    /// Names and the colours of their series.
    legend: Vec<(String, usize)>,
    table: Table,
    /// Over the page's whole width.
    wide: bool,
    /// The table is figures of the chart that few will want to read.
    folded: bool,
}

#[derive(Debug, Serialize)]
struct Svg {
    width: u32,
    height: u32,
    body: Value,
}

impl From<Drawing> for Svg {
    fn from(drawing: Drawing) -> Self {
        Self {
            width: drawing.width,
            height: drawing.height,
            // plotters escapes the texts in it.
            body: Value::from_safe_string(drawing.body),
        }
    }
}

#[derive(Debug, Default, Serialize)]
struct Table {
    head: Vec<String>,
    /// The first cell names the row.
    rows: Vec<Vec<String>>,
    /// So many columns are text, the others numbers.
    texts: usize,
}

impl Table {
    fn new<const N: usize>(texts: usize, head: [&str; N]) -> Self {
        Self { head: head.map(str::to_owned).into(), rows: Vec::new(), texts }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

/// All sections that have something to tell.
pub(super) fn sections(night: &Night) -> Result<Vec<Section>> {
    let all =
        [speed(night)?, acceptance(night)?, time(night)?, texts(night)?, shards(night), errors(night), run(night)];
    let with_cards = all.into_iter().filter(|section| !section.cards.is_empty());
    Ok(with_cards.collect())
}

/// A pool's name in charts and tables that hold those of all kinds.
fn pool_name(pool: &str) -> String {
    match pool {
        "" => "no pool".to_owned(),
        pool => pool.to_owned(),
    }
}

fn speed(night: &Night) -> Result<Section> {
    let mut table = Table::new(
        2,
        ["Pool", "Kind", "Audited texts", "Plain tokens/s", "This run's", "Speedup", "Same texts", "Length"],
    );
    let mut bars = Vec::new();
    let all = night.kinds.iter().flat_map(|k| {
        let audits = k.manifest.audit.iter().filter(|(_, audit)| audit.texts > 0);
        audits.map(|(pool, audit)| (k.manifest.kind.to_string(), pool_name(pool), *audit))
    });
    let mut all: Vec<(String, String, AuditReport)> = all.collect();
    let sum = sums(night).1;
    if all.len() > 1 {
        all.push(("all".to_owned(), "All pools".to_owned(), sum));
    }
    for (kind, pool, audit) in &all {
        let plain = ratio(audit.plain_tokens as f64, audit.plain_seconds);
        let fast = ratio(audit.tokens as f64, audit.seconds);
        bars.push((audit.texts, (pool.clone(), vec![fast, plain])));
        table.row([
            pool.clone(),
            kind.clone(),
            whole(audit.texts),
            whole_f(plain),
            whole_f(fast),
            format!("{:.2}×", audit.speedup()),
            percent(audit.identical_share(), 0),
            format!("{:.2}×", audit.length_ratio()),
        ]);
    }
    let bars = largest(bars);
    let mut cards = Vec::new();
    if sum.plain_tokens > 0 && sum.tokens > 0 {
        cards.push(Card {
            title: "Tokens a second, by pool".into(),
            note:
                "Same texts: token for token those of plain decoding. Length: tokens of this run's texts over those of \
                   the plain ones."
                    .into(),
            chart: Some(chart::bars(&bars, &whole_f)?.into()),
            legend: legend(&BOTH),
            table,
            wide: true,
            ..Card::default()
        });
    }
    Ok(Section {
        id: "speed",
        title: "Speed against plain decoding",
        intro: "A sample of the entities was generated twice, plainly and as this run generates, in turns on the same \
                engine."
            .into(),
        cards,
    })
}

/// The largest, in their order.
fn largest<T>(mut rows: Vec<(u64, T)>) -> Vec<T> {
    let mut sizes: Vec<u64> = rows.iter().map(|(size, _)| *size).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let least = sizes.get(POOLS_SHOWN - 1).copied().unwrap_or_default();
    rows.retain(|(size, _)| *size >= least);
    rows.truncate(POOLS_SHOWN);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn acceptance(night: &Night) -> Result<Section> {
    let mut cards = Vec::new();
    for kind in &night.kinds {
        cards.extend(accepted_by_forward(kind)?);
        cards.extend(accepted_by_depth(kind)?);
        cards.extend(pools(kind)?);
    }
    for kind in &night.kinds {
        cards.extend(proposers(kind)?);
    }
    Ok(Section {
        id: "acceptance",
        title: "Acceptance of drafts",
        intro:
            "Every forward verifies a tree of drafted tokens. The more of them are accepted, the fewer forwards a text \
                takes."
                .into(),
        cards,
    })
}

/// Forwards by accepted drafts, over all pools.
fn all_accepted(kind: &KindNight) -> Vec<u64> {
    let mut all = Vec::new();
    for counts in kind.texts.accepted.values() {
        all.resize(all.len().max(counts.len()), 0);
        for (sum, count) in all.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    all
}

fn accepted_by_forward(kind: &KindNight) -> Result<Option<Card>> {
    let counts = all_accepted(kind);
    let forwards: u64 = counts.iter().sum();
    if forwards == 0 {
        return Ok(None);
    }
    let values = (0u32..).zip(&counts).map(|(n, count)| (f64::from(n), *count));
    let Some(histogram) = Histogram::of(&[values.collect()], BINS, 1.0) else {
        return Ok(None);
    };
    let axes = Axes { x: "accepted drafts", y: "forwards", format_x: &whole_only, format_y: &short };
    let mut table = Table::new(0, ["Accepted drafts", "Forwards", "Share"]);
    for (n, count) in counts.iter().enumerate() {
        table.row([n.to_string(), whole(*count), percent(ratio(*count as f64, forwards as f64), 1)]);
    }
    Ok(Some(Card {
        title: format!("{}: accepted drafts of a forward", plural(kind)),
        chart: Some(chart::histogram(&histogram, &axes)?.into()),
        table,
        folded: true,
        ..Card::default()
    }))
}

/// For each depth the share of forwards that accepted a draft there: all before it were accepted too.
fn by_depth(counts: &[u64]) -> Vec<f64> {
    let forwards: u64 = counts.iter().sum();
    let depths = 1..counts.len().min(DEPTH_MAX + 1);
    let reached = |depth: usize| counts[depth..].iter().sum::<u64>();
    depths.map(|depth| ratio(reached(depth) as f64, forwards as f64)).collect()
}

fn accepted_by_depth(kind: &KindNight) -> Result<Option<Card>> {
    let all = by_depth(&all_accepted(kind));
    if all.first().is_none_or(|share| *share <= 0.0) {
        return Ok(None);
    }
    let mut lines = vec![("All pools".to_owned(), all)];
    let pools = &kind.texts.accepted;
    if pools.len() > 1 {
        let mut largest: Vec<_> = pools.iter().collect();
        largest.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.iter().sum::<u64>()));
        largest.truncate(usize::from(chart::SERIES) - 2);
        largest.sort_by_key(|(pool, _)| *pool);
        lines.extend(largest.into_iter().map(|(pool, counts)| (pool_name(pool), by_depth(counts))));
    }
    let axes = Axes { x: "draft depth", y: "share of forwards", format_x: &whole_only, format_y: &|y| percent(y, 0) };
    let mut table = Table {
        head: ["Depth".to_owned()].into_iter().chain(lines.iter().map(|l| l.0.clone())).collect(),
        ..Table::default()
    };
    for depth in 0..lines[0].1.len() {
        let shares = lines.iter().map(|(_, shares)| {
            let share = shares.get(depth).copied().unwrap_or_default();
            percent(share, 1)
        });
        table.row([(depth + 1).to_string()].into_iter().chain(shares));
    }
    Ok(Some(Card {
        title: format!("{}: forwards that accepted a draft at this depth", plural(kind)),
        chart: Some(chart::lines(&lines, &axes)?.into()),
        legend: (0..).zip(lines).map(|(index, (name, _))| (name, chart::line_color(index))).collect(),
        table,
        folded: true,
        ..Card::default()
    }))
}

fn proposers(kind: &KindNight) -> Result<Option<Card>> {
    let proposed = &kind.audited.proposed;
    let tokens: u64 = proposed.values().sum();
    if tokens == 0 {
        return Ok(None);
    }
    let mut table = Table::new(1, ["Proposed by", "Tokens", "Share"]);
    let mut bars = Vec::new();
    for source in Proposer::ALL {
        let name = match source {
            Proposer::Target => "The model",
            Proposer::Pool => "The pool",
            Proposer::Previous => "The previous text",
            Proposer::Context => "Prompt and text so far",
        };
        let of_source = proposed.get(&source).copied().unwrap_or_default();
        let share = ratio(of_source as f64, tokens as f64);
        bars.push((name.to_owned(), vec![share]));
        table.row([name.to_owned(), whole(of_source), percent(share, 1)]);
    }
    Ok(Some(Card {
        title: format!("{}: who proposed the tokens of the audited texts", plural(kind)),
        chart: Some(chart::bars(&bars, &|share| percent(share, 1))?.into()),
        table,
        folded: true,
        ..Card::default()
    }))
}

fn pools(kind: &KindNight) -> Result<Option<Card>> {
    let figures = &kind.manifest.figures;
    if figures.is_empty() {
        return Ok(None);
    }
    let bars = figures.iter().map(|(pool, f)| (f.texts, (pool_name(pool), vec![f.aal()])));
    let bars = largest(bars.collect());
    let has_chart = bars.iter().any(|(_, aal)| aal[0] > 0.0);
    let chart = has_chart.then(|| chart::bars(&bars, &|aal| format!("{aal:.2}")));
    let mut table = Table::new(
        1,
        [
            "Pool",
            "Texts",
            "Tokens",
            "Tokens/s",
            "Accepted a forward",
            "Drafting, ms a text",
            "Drafts accepted",
            "Relaxed",
            "Length drift",
        ],
    );
    for (pool, figures) in figures {
        table.row([
            pool_name(pool),
            whole(figures.texts),
            whole(figures.tokens),
            whole_f(figures.tokens_per_second()),
            format!("{:.2}", figures.aal()),
            format!("{:.2}", figures.art_seconds() * 1e3),
            percent(figures.draft_yield(), 0),
            percent(figures.relaxed_share(), 1),
            match figures.previous {
                0 => "–".to_owned(),
                _ => format!("{:.2}×", figures.length_drift()),
            },
        ]);
    }
    Ok(Some(Card {
        title: format!("{}: accepted drafts a forward, by pool", plural(kind)),
        note: "Length drift: tokens of the texts over those of the same entities' earlier texts.".into(),
        chart: chart.transpose()?.map(Svg::from),
        table,
        wide: true,
        ..Card::default()
    }))
}

fn time(night: &Night) -> Result<Section> {
    let (figures, audit) = sums(night);
    let mut cards = Vec::new();
    let stages = [
        ("Forwards of texts", figures.engine_seconds - figures.draft_seconds),
        ("Drafting", figures.draft_seconds),
        ("Audit, plain", audit.plain_seconds),
        ("Audit, as this run", audit.seconds),
    ];
    let all: f64 = stages.iter().map(|(_, seconds)| seconds).sum();
    if all > 0.0 {
        let mut table = Table::new(1, ["Stage", "Engine time", "Share"]);
        let mut bars = Vec::new();
        for (name, seconds) in stages.into_iter().filter(|(_, seconds)| *seconds > 0.0) {
            bars.push((name.to_owned(), vec![seconds]));
            table.row([name.to_owned(), duration(seconds), percent(seconds / all, 1)]);
        }
        cards.push(Card {
            title: "Engine time, by stage".into(),
            note: "Summed over all engines.".into(),
            chart: Some(chart::bars(&bars, &duration)?.into()),
            table,
            ..Card::default()
        });
    }
    if night.timeline.last().is_some_and(|last| last.to > 0.0) {
        let mut table = Table::new(1, ["Stage", "From", "To", "Took"]);
        let mut spans = Vec::new();
        for stage in &night.timeline {
            let took = duration(stage.to - stage.from);
            spans.push((stage.name.to_owned(), vec![(stage.from, stage.to, took.clone())]));
            table.row([stage.name.to_owned(), duration(stage.from), duration(stage.to), took]);
        }
        cards.push(Card {
            title: "From the first command to publishing".into(),
            note: "By the times at which the store got the run's files; pauses before a resume are in them.".into(),
            chart: Some(chart::spans(&spans)?.into()),
            table,
            ..Card::default()
        });
    }
    Ok(Section { id: "time", title: "Where the time went", intro: String::new(), cards })
}

fn texts(night: &Night) -> Result<Section> {
    let mut cards = Vec::new();
    for kind in &night.kinds {
        let values = |lengths: &std::collections::BTreeMap<u64, u64>| {
            let values = lengths.iter().map(|(length, count)| (*length as f64, *count));
            values.collect::<Vec<_>>()
        };
        let audited = [values(&kind.audited.texts), values(&kind.audited.plain)];
        let title = format!("{}: length of the audited texts", plural(kind));
        cards.extend(lengths(title, &audited, &BOTH)?);
        let all = [values(&kind.texts.lengths)];
        let title = format!("{}: length of all texts", plural(kind));
        let mut card = lengths(title, &all, &["Texts"])?;
        if let Some(card) = &mut card {
            card.legend.clear();
            let stops = kind.texts.stops.iter();
            let stops: Vec<String> = stops.map(|(why, texts)| format!("{} {why}", whole(*texts))).collect();
            card.note = match stops.is_empty() {
                true => String::new(),
                false => format!("Why tonight's ended: {}.", stops.join(", ")),
            };
        }
        cards.extend(card);
    }
    for kind in &night.kinds {
        cards.extend(similarities(kind)?);
    }
    cards.extend(guarded(night));
    Ok(Section {
        id: "texts",
        title: "The texts",
        intro: "Relaxed verification accepts close variants. Their lengths tell whether it drifts.".into(),
        cards,
    })
}

fn lengths(title: String, series: &[Vec<(f64, u64)>], names: &[&str]) -> Result<Option<Card>> {
    let Some(histogram) = Histogram::of(series, BINS, 1.0) else {
        return Ok(None);
    };
    let axes = Axes { x: "tokens", y: "texts", format_x: &whole_only, format_y: &short };
    let head = ["Tokens"].into_iter().chain(names.iter().copied());
    let mut table = Table { head: head.map(str::to_owned).collect(), ..Table::default() };
    for bin in 0..histogram.bins() {
        let (from, to) = histogram.bin(bin);
        let counts = histogram.counts.iter().map(|counts| whole(counts[bin]));
        let name = format!("{from:.0} to {:.0}", to - 1.0);
        table.row([name].into_iter().chain(counts));
    }
    Ok(Some(Card {
        title,
        chart: Some(chart::histogram(&histogram, &axes)?.into()),
        legend: legend(names),
        table,
        folded: true,
        ..Card::default()
    }))
}

fn similarities(kind: &KindNight) -> Result<Option<Card>> {
    let values = kind.audited.similarities.iter();
    let values: Vec<(f64, u64)> = values.map(|cosine| (*cosine, 1)).collect();
    let Some(histogram) = Histogram::of(&[values], BINS, 0.002) else {
        return Ok(None);
    };
    let axes = Axes { x: "cosine of the embeddings", y: "texts", format_x: &|x| format!("{x:.2}"), format_y: &short };
    let mut table = Table::new(0, ["Similarity", "Texts"]);
    for bin in 0..histogram.bins() {
        let (from, to) = histogram.bin(bin);
        table.row([format!("{from:.3} to {to:.3}"), whole(histogram.counts[0][bin])]);
    }
    Ok(Some(Card {
        title: format!("{}: similarity of the audited texts to the plain ones", plural(kind)),
        chart: Some(chart::histogram(&histogram, &axes)?.into()),
        table,
        folded: true,
        ..Card::default()
    }))
}

/// What the guards watch, by pool, and what they found.
fn guarded(night: &Night) -> Option<Card> {
    let mut table = Table::new(
        2,
        [
            "Pool",
            "Kind",
            "Length to plain",
            "Length drift",
            "Distinct-1",
            "Distinct-2",
            "Distinct-3",
            "Relaxed",
            "Mean log probability",
            "Similarity",
            "Guards",
        ],
    );
    for KindNight { manifest, .. } in &night.kinds {
        for (pool, figures) in &manifest.figures {
            let audit = manifest.audit.get(pool).filter(|audit| audit.texts > 0);
            let drift = (figures.previous > 0).then(|| figures.length_drift());
            let verdict = manifest.guards.as_ref().and_then(|report| report.pools.get(pool));
            table.row([
                pool_name(pool),
                manifest.kind.to_string(),
                known(audit.map(AuditReport::length_ratio)),
                known(drift),
                known(figures.distinct(1)),
                known(figures.distinct(2)),
                known(figures.distinct(3)),
                percent(figures.relaxed_share(), 1),
                known(figures.mean_log_probability()),
                known(audit.and_then(AuditReport::mean_similarity)),
                verdict.map_or_else(|| "–".to_owned(), told),
            ]);
        }
    }
    (!table.rows.is_empty()).then(|| Card {
        title: "What the guards watch, by pool".into(),
        note: "Length to plain and similarity compare the audited texts with plain decoding's. Distinct-n: the share of a \
               text's runs of n tokens that are distinct; loops make it small."
            .into(),
        table,
        wide: true,
        ..Card::default()
    })
}

fn told(verdict: &Verdict) -> String {
    let breaches: Vec<String> = verdict.breaches.iter().map(ToString::to_string).collect();
    match (breaches.is_empty(), verdict.strict) {
        (true, _) => "kept".to_owned(),
        (false, false) => breaches.join("; "),
        (false, true) => format!("{}: verified strictly", breaches.join("; ")),
    }
}

fn shards(night: &Night) -> Section {
    let mut table = Table::new(4, ["Part", "Kind", "Pools", "Worker", "Texts", "Tokens", "Engine time", "Tokens/s"]);
    let all = night.kinds.iter().flat_map(|k| {
        let shards = k.texts.shards.iter();
        shards.map(|shard| (k.manifest.kind, shard))
    });
    let mut all: Vec<(Kind, &ShardLine)> = all.collect();
    all.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds).then(a.1.shard.cmp(&b.1.shard)));
    for (kind, shard) in all.iter().take(SHARDS_SHOWN) {
        table.row([
            shard.part.clone(),
            kind.to_string(),
            shard.pools.iter().map(|pool| pool_name(pool)).collect::<Vec<_>>().join(", "),
            shard.worker.clone(),
            whole(shard.texts),
            whole(shard.tokens),
            duration(shard.seconds),
            whole_f(ratio(shard.tokens as f64, shard.seconds)),
        ]);
    }
    let card = Card {
        title: format!("{} of {} generated shards, by engine time", table.rows.len(), all.len()),
        table,
        wide: true,
        ..Card::default()
    };
    Section {
        id: "shards",
        title: "Slowest shards",
        intro: String::new(),
        cards: Some(card).filter(|card| !card.table.rows.is_empty()).into_iter().collect(),
    }
}

fn errors(night: &Night) -> Section {
    let mut reasons = Table::new(3, ["Reason", "Kind", "Stage", "Rows"]);
    let mut first = Table::new(4, ["Entity", "Kind", "Stage", "Reason"]);
    for kind in &night.kinds {
        let name = kind.manifest.kind.to_string();
        for ((stage, reason), rows) in &kind.errors.reasons {
            reasons.row([reason.clone(), name.clone(), stage.clone(), whole(*rows)]);
        }
        for row in &kind.errors.first {
            let cells = [row.entity_id.to_string(), name.clone(), row.stage.clone(), row.reason.clone()];
            first.row(cells);
        }
    }
    let card = |title: &str, table: Table| Card { title: title.to_owned(), table, wide: true, ..Card::default() };
    let cards = [card("By reason", reasons), card("The first of them", first)];
    Section {
        id: "errors",
        title: "Rows without a text",
        intro: "_errors.jsonl in the published folder has all of them.".into(),
        cards: cards.into_iter().filter(|card| !card.table.rows.is_empty()).collect(),
    }
}

fn run(night: &Night) -> Section {
    let mut cards = Vec::new();
    for kind in &night.kinds {
        let manifest = &kind.manifest;
        let spec = &manifest.spec;
        let mut table = Table::new(2, ["What", "Value"]);
        let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
        row("Folder", kind.folder.clone());
        row("Newest text", manifest.created.to_string());
        row("Entities", whole(manifest.entities));
        row("Parts", whole(manifest.parts.len() as u64));
        row("Verification", spec.verification.to_string());
        row("Engine", format!("{}, {}", spec.engine, spec.precision));
        row("Tokens of a text, at most", whole(spec.max_new_tokens as u64));
        row("Model", spec.model.to_string());
        row("Specification", manifest.spec_digest.to_string());
        row("Pools", manifest.pool_digest.to_string());
        if let Some(cost) = &manifest.cost {
            let price = format!("{} {} an hour", cost.price.gpu_hour, cost.price.currency);
            row("Price of an engine", price);
            row("Price of these texts and their audit", format!("{:.4} {}", cost.total(), cost.price.currency));
        }
        cards.push(Card { title: plural(kind), table, ..Card::default() });
    }
    Section { id: "run", title: "The run", intro: String::new(), cards }
}

fn plural(kind: &KindNight) -> String {
    match kind.manifest.kind {
        Kind::User => "Users".to_owned(),
        Kind::Item => "Items".to_owned(),
    }
}

/// Series in their order.
fn legend(names: &[&str]) -> Vec<(String, usize)> {
    let names = names.iter().map(|name| (*name).to_owned());
    names.zip(0..).collect()
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
    fn a_chart_shows_the_largest_pools_in_their_order() {
        let rows: Vec<(u64, usize)> = (0..POOLS_SHOWN + 3).map(|n| (n as u64 % 14, n)).collect();
        let shown = largest(rows);
        assert_eq!(shown.len(), POOLS_SHOWN);
        assert!(!shown.contains(&0) && !shown.contains(&14) && shown.contains(&13));
        assert!(shown.is_sorted());
    }
}
