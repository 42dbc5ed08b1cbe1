//! The smaller commands: verify, prepare.

use std::path::PathBuf;

use anyhow::Result;
use laser_delta::Table;
use laser_prepare::{AtSpeedSummary, Histories, PrepareSummary, UntilPart};
use laser_schema::Kind;
use laser_schema::interactions::{SplitBy, Until};
use laser_schema::layout::{CANARIES, DataSet};
use laser_schema::manifest::MANIFEST;
use laser_store::Location;
use laser_store::data_set::{check_in_force, verify};
use laser_terminal::print;

use crate::word;

/// `laser verify`: checks every published folder below `root`. `false` if one has a fault.
pub(crate) async fn verify_all(root: &str) -> Result<bool> {
    let location = Location::parse(root)?;
    let mut folders = Vec::new();
    for listed in location.list().await? {
        if let Some(folder) = listed.name.strip_suffix(MANIFEST) {
            folders.push(location.join(folder.trim_end_matches('/')));
        }
    }
    anyhow::ensure!(!folders.is_empty(), "{root}: nothing published here (no {MANIFEST})");
    let mut whole = true;
    for folder in folders {
        let report = verify(&folder).await?;
        let state = if report.faults.is_empty() { "whole" } else { "DAMAGED" };
        let canary = if report.folder.contains(&format!("/{CANARIES}/")) { ", canary" } else { "" };
        print(&format!("{state}: {} ({} parts, {} rows{canary})\n", report.folder, report.parts, report.rows))?;
        whole &= tell_faults(&report.faults)?;
    }
    Ok(whole & verify_tables(&location).await? & verify_in_force(&location).await?)
}

/// Whether there are none.
fn tell_faults(faults: &[String]) -> Result<bool> {
    faults.iter().try_for_each(|fault| print(&format!("  {fault}\n")))?;
    Ok(faults.is_empty())
}

/// Compares the Delta tables of the output with its manifests. `false` if one has a fault.
async fn verify_tables(output: &Location) -> Result<bool> {
    let mut whole = true;
    for data_set in DataSet::ALL {
        for kind in Kind::ALL {
            let Some(faults) = Table::new(output, data_set, kind).verify().await? else {
                continue;
            };
            let state = if faults.is_empty() { "agrees" } else { "DISAGREES" };
            print(&format!("{state}: the table {} with its manifests\n", data_set.kind_folder(kind)))?;
            whole &= tell_faults(&faults)?;
        }
    }
    Ok(whole)
}

/// Compares the lists of runs in force with the nights. `false` if one differs.
async fn verify_in_force(output: &Location) -> Result<bool> {
    let mut faults = Vec::new();
    for data_set in DataSet::ALL {
        for kind in Kind::ALL {
            faults.extend(check_in_force(output, data_set, kind).await?);
        }
    }
    tell_faults(&faults)
}

/// `laser prepare`.
pub(crate) async fn prepare_data(source: &PrepareSource) -> Result<()> {
    let out = match source {
        PrepareSource::Movielens { dir, output, timed, until, split_by } => {
            let histories = match *until {
                Some(until) => Histories::Until { until, by: *split_by },
                None if *timed => Histories::Timed,
                None => Histories::All,
            };
            told(&laser_prepare::movielens(dir, &Location::parse(output)?, histories).await?)
        }
        PrepareSource::Amazon { reviews, meta, output } => {
            told(&laser_prepare::amazon(reviews, meta.as_deref(), &Location::parse(output)?).await?)
        }
        PrepareSource::Atspeed { dir, output, until } => {
            told_sequences(&laser_prepare::atspeed(dir, &Location::parse(output)?, *until).await?)
        }
    };
    print(&out)
}

/// What became of a data set.
fn told(summary: &PrepareSummary) -> String {
    let table = summary.interactions_table.as_deref();
    let mut out = format!(
        "{} users: {}\n{} items: {}\n{} interactions{}{}\n",
        summary.users,
        summary.users_table,
        summary.items,
        summary.items_table,
        summary.interactions,
        if table.is_some() { ": " } else { "" },
        table.unwrap_or_default()
    );
    if summary.in_histories < summary.interactions {
        out += &format!("  {} of them in histories\n", summary.in_histories);
    }
    if summary.untimed > 0 {
        out += &format!("  {} others left out: they have no timestamp\n", summary.untimed);
    }
    out
}

/// What became of a data set of sequences.
fn told_sequences(summary: &AtSpeedSummary) -> String {
    let AtSpeedSummary { users, without_history, in_histories, items, interactions, sequences, truth } = summary;
    let mut out = format!("{} users: {}\n  {in_histories} items in their histories\n", users.rows, users.url);
    if *without_history > 0 {
        out += &format!("  {without_history} others left out: they have no item in their history\n");
    }
    let others = [
        (items, "items"),
        (interactions, "interactions"),
        (sequences, "sequences to train on"),
        (truth, "users with a truth"),
    ];
    for (table, rows) in others {
        out += &format!("{} {rows}: {}\n", table.rows, table.url);
    }
    out
}

/// Public data sets that become entity tables.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum PrepareSource {
    /// MovieLens 100k, 1M, 10M or latest: the folder with its files.
    Movielens {
        /// The unpacked folder.
        dir: PathBuf,
        /// Where users.parquet, items.parquet and interactions.parquet go: a folder or URL.
        #[arg(short, long)]
        output: String,
        /// Leave out interactions without a timestamp, so that histories are in the order of time.
        #[arg(long)]
        timed: bool,
        /// End histories here, for texts that know nothing of what comes later: a share of the interactions (0.8), a
        /// timestamp, or ISO 8601. Interactions without timestamp are left out.
        #[arg(long)]
        until: Option<Until>,
        /// `time`: one instant for all; `user`: the same share of each user's interactions.
        #[arg(long, value_parser = word::<SplitBy>, default_value = "time", requires = "until")]
        split_by: SplitBy,
    },
    /// Amazon reviews as JSONL (2014, 2018 or 2023).
    Amazon {
        /// The reviews.
        reviews: PathBuf,
        /// The items' metadata.
        #[arg(long)]
        meta: Option<PathBuf>,
        /// Where users.parquet and items.parquet go: a folder or URL.
        #[arg(short, long)]
        output: String,
    },
    /// Sequences of items with semantic identifiers, divided as AtSpeed divides them.
    Atspeed {
        /// The folder with items.jsonl and sequential_train.txt, sequential_valid.txt and sequential_test.txt.
        dir: PathBuf,
        /// Where items.parquet, users.parquet, interactions.parquet, sequences.parquet and truth.parquet go: a folder
        /// or URL.
        #[arg(short, long)]
        output: String,
        /// The last part in histories; the truth is the part behind it.
        #[arg(long, value_parser = word::<UntilPart>, default_value = "valid", value_name = "train|valid")]
        until: UntilPart,
    },
}
