//! `laser pools`: prints pool sets and what becomes of them.

use std::fmt::Write as _;

use anyhow::Result;
use laser_night::Config;
use laser_night::config::PoolChoice;
use laser_night::pool_sets::{self, Built};
use laser_pool_builder::{PoolPromotion, TuneConfig, TuneRow};
use laser_terminal::{Display, Table, print};

use crate::print_json;

/// `laser pools build`.
pub(crate) async fn build(config: &Config, name: Option<&str>, dir: Option<&str>) -> Result<()> {
    let mut display = Display::new();
    let built = pool_sets::build(config, name, dir, &mut display).await?;
    drop(display);
    match built {
        Built::Before { version, dir } => print(&format!("{version} is built already: {}\n", dir.url())),
        Built::Now { dir, set } => {
            let tokens: usize = set.pools.iter().map(|p| p.tokens).sum();
            print(&format!("{} pools, {tokens} tokens: {}\n", set.pools.len(), dir.url()))
        }
    }
}

/// `laser pools list`: oldest first.
pub(crate) async fn list(config: &Config, json: bool) -> Result<()> {
    let output = config.output()?;
    let sets = pool_sets::list(&output).await?;
    let mut out = String::new();
    for set in &sets {
        if json {
            writeln!(out, "{}", serde_json::to_string(set)?)?;
            continue;
        }
        writeln!(
            out,
            "{:<26} {:>3} pools {:>9} tokens {:>8} texts  built {:.0}{}",
            set.version,
            set.pools,
            set.tokens,
            set.texts,
            set.built,
            if set.promoted { "  promoted" } else { "" }
        )?;
    }
    if sets.is_empty() && !json {
        writeln!(out, "no pool sets in {}", output.url())?;
    }
    print(&out)
}

/// `laser pools promote`.
pub(crate) async fn promote(config: &Config, version: &str) -> Result<()> {
    tell("promoted", config, &pool_sets::promote(config, version).await?)
}

/// `laser pools rollback`.
pub(crate) async fn rollback(config: &Config) -> Result<()> {
    tell("rolled back to", config, &pool_sets::rollback(config).await?)
}

/// A promotion that no run will see is told to be one.
fn tell(what: &str, config: &Config, promotion: &PoolPromotion) -> Result<()> {
    let hint = match config.run.pools {
        PoolChoice::Promoted => "runs that begin from now on draft from it",
        _ => "but [run] pools is not \"promoted\", so no run of this configuration takes it",
    };
    print(&format!("{what} {} (promotion {}); {hint}\n", promotion.version, promotion.number))
}

/// `laser pools inspect`.
pub(crate) async fn inspect(config: &Config, dir: &str, json: bool) -> Result<()> {
    let inspection = pool_sets::inspection(config, dir).await?;
    if json {
        return print_json(&inspection);
    }
    let mut out = String::new();
    for kind in &inspection.kinds {
        out += &format!("{}s: {} entities\n", kind.kind, kind.entities);
        if let Some(clustering) = &kind.clustering {
            out += &format!("  clusters: {}\n", serde_json::to_string(clustering)?);
        }
        for group in &kind.groups {
            out += &format!(
                "  {:<20} {:<30} {:>8} routed {:>8} texts{}\n",
                group.group.name,
                group.group.label,
                group.statistics.routed,
                group.statistics.texts,
                if group.group.has_pool { "" } else { "  no pool" }
            );
        }
    }
    for pool in &inspection.pools {
        out += &format!(
            "{}: {} texts, {} tokens, {:.2} bytes a token{}\n",
            pool.entry.name,
            pool.entry.texts,
            pool.entry.tokens,
            pool.bytes_per_token,
            if pool.contested > 0 { format!(", runners-up of {}", pool.contested) } else { String::new() }
        );
        for branch in &pool.branches {
            out += &format!("  {:>6} x {:?}\n", branch.count, branch.text);
        }
    }
    print(&out)
}

/// `laser pools tune`.
pub(crate) async fn tune(config: &Config, tuning: &TuneConfig, json: bool) -> Result<()> {
    let mut display = Display::new();
    let report = pool_sets::tuning(config, tuning, &mut display).await?;
    drop(display);
    if json {
        return print_json(&report);
    }
    let mut out = String::new();
    for kind in &report.kinds {
        let (of, grouping) = (kind.kind, serde_json::to_string(&kind.grouping)?);
        out += &format!("{of}s: [pools.{of}] grouping = {grouping}, max_texts = {}\n", kind.max_texts);
        out += &rows(&kind.rows);
        if !kind.one_pool.is_empty() {
            out += "  and one pool of the same texts for all groups (grouping = \"global\"):\n";
            out += &rows(&kind.one_pool);
        }
    }
    print(&out)
}

fn rows(rows: &[TuneRow]) -> String {
    let mut table = Table::new(&["max_texts", "texts", "tokens", "accepted/step", "draft µs", "tokens/s"]);
    for row in rows {
        table.push(vec![
            row.max_texts.to_string(),
            row.pool_texts.to_string(),
            row.pool_tokens.to_string(),
            format!("{:.2}", row.accepted_per_step),
            format!("{:.1}", row.draft_us),
            format!("{:.0}", row.tokens_per_second),
        ]);
    }
    table.indented()
}
