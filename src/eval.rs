//! `laser embed` and `laser eval`: calls the passes and prints what they found.

mod lists;

use anyhow::Result;
use laser_night::Config;
use laser_recommender::embed as embedding;
use laser_recommender::evaluate::{self, CtrReport, GroupRow, RankingReport, Split, instant};
use laser_recommender::lightgcn::CUTOFF;
use laser_recommender::statistics::{Comparison, Mean};
use laser_terminal::{Display, Style, Table, print};

use crate::print_json;

/// `laser embed`.
pub(crate) async fn embed(config: &Config, output: &str) -> Result<()> {
    let mut display = Display::new();
    let found = embedding::embed(config.interactions()?, &config.embed, output, &mut display).await?;
    drop(display);
    print(&format!(
        "{} users: {}\n{} items: {}\nrecall@{CUTOFF} {:.4}, NDCG@{CUTOFF} {:.4} on {} held-out interactions ({}), \
         epoch {} of {}\n",
        found.users,
        found.user_table,
        found.items,
        found.item_table,
        found.validation.recall,
        found.validation.ndcg,
        found.held_out,
        found.split,
        found.epoch,
        found.epochs
    ))
}

/// `laser eval embed`.
pub(crate) async fn ranking(config: &Config, style: Option<Style>) -> Result<()> {
    let mut display = Display::new();
    let report = evaluate::ranking(config.interactions()?, &config.embed, &mut display).await?;
    drop(display);
    style.map_or_else(|| print_json(&report), |style| print(&ranking_tables(&report, style)))
}

/// `laser eval ctr`.
pub(crate) async fn ctr(config: &Config, style: Option<Style>) -> Result<()> {
    let mut display = Display::new();
    let report = evaluate::ctr(config.interactions()?, &config.eval, &mut display).await?;
    drop(display);
    style.map_or_else(|| print_json(&report), |style| print(&ctr_tables(&report, style)))
}

/// `laser eval lists`.
pub(crate) async fn lists(config: &Config, style: Option<Style>) -> Result<()> {
    let (source, eval) = config.lists_evaluation()?;
    let mut display = Display::new();
    let report = evaluate::lists(source, eval, &mut display).await?;
    drop(display);
    style.map_or_else(|| print_json(&report), |style| print(&lists::tables(&report, style)))
}

fn ranking_tables(report: &RankingReport<'_>, style: Style) -> String {
    let mut table = Table::new(&["method", "recall@20", "NDCG@20", "epoch", "seconds"]);
    for method in &report.methods {
        table.push(vec![
            method.name.to_owned(),
            format!("{:.4}", method.quality.recall),
            format!("{:.4}", method.quality.ndcg),
            method.epoch.map_or_else(String::new, |e| e.to_string()),
            format!("{:.0}", method.seconds),
        ]);
    }
    format!(
        "{} users, {} items; {} interactions to train, {} to validate, {} to test ({})\n\n{}",
        report.users,
        report.items,
        report.train,
        report.validation,
        report.test,
        report.split,
        table.render(style)
    )
}

fn ctr_tables(report: &CtrReport<'_>, style: Style) -> String {
    let mut out = heading(report);
    out += &parts(report).render(style);
    if !report.knowledge.is_empty() {
        out += &coverage(report).render(style);
    }
    out += &results(report).render(style);
    if report.config.split_by == Split::Item {
        out += &groups(report).render(style);
        out += &gains(report).render(style);
    }
    if !report.pairs.is_empty() {
        out += &comparisons(report).render(style);
    }
    out
}

fn heading(report: &CtrReport<'_>) -> String {
    let config = report.config;
    let split = match config.split_by {
        Split::Time => {
            let [train, validation] = report.ends.unwrap_or_default().map(instant);
            format!("training ends at {train}, validation at {validation}")
        }
        Split::User => format!(
            "training ends after {} and validation after {} of each user's interactions",
            config.train_until, config.validation_until
        ),
        Split::Item => format!(
            "{} of the items only tested on, half as many only validated on; of the others' interactions {} train and, \
             up to {}, validate; each seed holds out its own, the parts are the first one's",
            percent(config.item_share),
            config.train_until,
            config.validation_until
        ),
    };
    format!(
        "positive from a rating of {}; {split}; {} seeds, margin {} AUC\n\n",
        config.positive_rating, config.seeds, config.margin
    )
}

fn parts(report: &CtrReport<'_>) -> Table {
    let mut table = Table::new(&["part", "impressions", "positive", "of trained users", "of trained items"]);
    for part in &report.parts {
        table.push(vec![
            part.part.as_str().to_owned(),
            part.impressions.to_string(),
            percent(part.positive),
            percent(part.users_trained),
            percent(part.items_trained),
        ]);
    }
    table
}

fn coverage(report: &CtrReport<'_>) -> Table {
    let mut table = Table::new(&["knowledge", "users", "items"]);
    let cell = |share: Option<f64>| share.map_or_else(|| "none".to_owned(), percent);
    for knowledge in &report.knowledge {
        table.push(vec![knowledge.variant.clone(), cell(knowledge.users), cell(knowledge.items)]);
    }
    table
}

fn results(report: &CtrReport<'_>) -> Table {
    let mut table = Table::new(&["model", "knowledge", "AUC", "log loss", "AUC gain", "p", "verdict"]);
    for row in &report.results {
        let mut cells = vec![row.model.as_str().to_owned(), row.variant.clone()];
        cells.extend([mean(&row.auc, false), mean(&row.log_loss, false)]);
        cells.extend(gain(row.gain.as_ref()));
        cells.extend([row.gain.as_ref().map_or_else(String::new, |gain| gain.verdict.as_str().to_owned())]);
        table.push(cells);
    }
    table
}

/// AUC and log loss by the items' training interactions; the last row counts impressions.
fn groups(report: &CtrReport<'_>) -> Table {
    let groups = report.results.first().map_or(&[][..], |row| &row.groups);
    let auc = groups.iter().map(|group| format!("AUC {}", group.group));
    let log_loss = groups.iter().take(2).map(|group| format!("log loss {}", group.group));
    let header: Vec<String> =
        ["model".to_owned(), "knowledge".to_owned()].into_iter().chain(auc).chain(log_loss).collect();
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    let cell = |value: Option<&Mean>| value.map_or_else(|| "none".to_owned(), |value| mean(value, false));
    for row in &report.results {
        let mut cells = vec![row.model.as_str().to_owned(), row.variant.clone()];
        cells.extend(row.groups.iter().map(|group| cell(group.auc.as_ref())));
        cells.extend(row.groups.iter().take(2).map(|group| cell(group.log_loss.as_ref())));
        table.push(cells);
    }
    let counts = groups.iter().map(|group| format!("{:.0}", group.impressions));
    let mut last = vec!["impressions".to_owned(), "mean of the seeds".to_owned()];
    last.extend(counts);
    last.resize(header.len(), String::new());
    table.push(last);
    table
}

/// Gains of AUC on cold and on warm items.
fn gains(report: &CtrReport<'_>) -> Table {
    let header = ["model", "knowledge", "items", "over no knowledge", "p", "over attributes", "p"];
    let mut table = Table::new(&header);
    for row in report.results.iter().filter(|row| row.gain.is_some()) {
        for group in row.groups.iter().take(2) {
            let GroupRow { group, gain: over_none, gain_over_attributes, .. } = group;
            let mut cells = vec![row.model.as_str().to_owned(), row.variant.clone(), (*group).to_owned()];
            cells.extend(gain(over_none.as_ref()));
            cells.extend(gain(gain_over_attributes.as_ref()));
            table.push(cells);
        }
    }
    table
}

/// A difference and its p, both empty if there is none.
fn gain(gain: Option<&Comparison>) -> [String; 2] {
    match gain {
        Some(gain) => [mean(&gain.difference, true), p_value(gain.p_different)],
        None => Default::default(),
    }
}

fn comparisons(report: &CtrReport<'_>) -> Table {
    let header = [
        "model", "form", "compared", "AUC difference", "p different", "p as far as the margin", "AUC",
        "log loss difference",
    ];
    let mut table = Table::new(&header);
    for pair in &report.pairs {
        table.push(vec![
            pair.model.as_str().to_owned(),
            pair.form.as_str().to_owned(),
            format!("{} less {}", pair.first, pair.second),
            mean(&pair.auc.difference, true),
            p_value(pair.auc.p_different),
            p_value(pair.auc.p_equivalent),
            pair.auc.verdict.as_str().to_owned(),
            mean(&pair.log_loss.difference, true),
        ]);
    }
    table
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn mean(mean: &Mean, signed: bool) -> String {
    let value = if signed { format!("{:+.4}", mean.mean) } else { format!("{:.4}", mean.mean) };
    match mean.half_width {
        Some(half) => format!("{value} ± {half:.4}"),
        None => value,
    }
}

fn p_value(p: Option<f64>) -> String {
    match p {
        None => String::new(),
        Some(p) if p < 0.001 => "< 0.001".to_owned(),
        Some(p) => format!("{p:.3}"),
    }
}
