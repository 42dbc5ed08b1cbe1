//! The smaller commands: plan, verify, pools inspect and tune, prepare.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result};
use jiff::civil::Date;
use laser_delta::Table;
use laser_pool_builder::{BuildProgress, OpenPools, PoolTokenizer, TuneConfig, inspect, tune};
use laser_schema::Kind;
use laser_schema::embedding_set::EmbeddingManifest;
use laser_schema::ids::IdsManifest;
use laser_schema::interactions::{SplitBy, Until};
use laser_schema::knowledge::Figures;
use laser_schema::layout::{EMBEDDINGS, KNOWLEDGE_IDS, PROFILES};
use laser_schema::manifest::MANIFEST;
use laser_store::Location;
use laser_store::data_set::read_manifest;
use laser_store::data_set::verify;
use laser_store::embedding_set::verify_embeddings;
use laser_store::id_set::verify_ids;
use laser_store::previous::PreviousReader;

use crate::config::Config;
use crate::night::{Night, demo_nights, open_model, previous_sources, previous_texts};
use crate::pool_sets;
use crate::prepare::{self, Division};
use crate::progress::Display;

/// Writes to standard output; a closed pipe is an error like any other.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}

/// `laser plan`: what a run would do.
pub(crate) async fn plan(config: &Config) -> Result<()> {
    let demo = demo_nights(config).await?;
    let config = demo.as_ref().map_or(config, |(_, tonight)| tonight);
    let mut display = Display::new();
    let night = Night::open(config).await?;
    let (plan, manifests) = night.dry_plan(&mut display).await?;
    drop(display);
    let mut out = format!("run {} for {}\n", plan.run, plan.date);
    for (kind, counts) in &plan.counts {
        let shards = plan.shards.iter().filter(|s| s.kind == *kind).count();
        out += &format!(
            "{kind}s: {} entities, {} to generate, {} unchanged, {} failed; {shards} shards, {} prompt tokens\n",
            counts.entities, counts.generate, counts.carried, counts.failed, counts.prompt_tokens
        );
    }
    let mut past = Figures::default();
    manifests.iter().flat_map(|m| m.figures.values()).for_each(|f| past.add(f));
    let texts: u64 = plan.counts.values().map(|c| c.generate).sum();
    let tokens = texts as f64 * past.text_length();
    out += &if past.texts == 0 {
        "ETA: unknown, no earlier output of Laser's among [[previous]] to tell the speed from\n".to_owned()
    } else {
        let seconds = tokens / past.tokens_per_second();
        format!(
            "ETA: {seconds:.0} s on one worker for about {tokens:.0} tokens, at last night's {:.0} tokens/s and {:.0} tokens a text\n",
            past.tokens_per_second(),
            past.text_length()
        )
    };
    print(&out)
}

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
        let report = if let Some(ids) = read_manifest::<IdsManifest>(&folder).await? {
            verify_ids(&folder, &ids).await?
        } else if let Some(embeddings) = read_manifest::<EmbeddingManifest>(&folder).await? {
            verify_embeddings(&folder, &embeddings).await?
        } else {
            verify(&folder).await?
        };
        let state = if report.faults.is_empty() { "whole" } else { "DAMAGED" };
        print(&format!("{state}: {} ({} parts, {} rows)\n", report.folder, report.parts, report.rows))?;
        for fault in &report.faults {
            print(&format!("  {fault}\n"))?;
        }
        whole &= report.faults.is_empty();
    }
    Ok(whole & verify_tables(&location).await?)
}

/// Holds the Delta tables that the output has against its manifests. `false` if one has a fault.
async fn verify_tables(output: &Location) -> Result<bool> {
    let mut whole = true;
    for data_set in [PROFILES, EMBEDDINGS, KNOWLEDGE_IDS] {
        for kind in Kind::ALL {
            let Some(faults) = Table::new(output, data_set, kind).verify().await? else {
                continue;
            };
            let state = if faults.is_empty() { "agrees" } else { "DISAGREES" };
            print(&format!("{state}: the table {data_set}/kind={kind} with its manifests\n"))?;
            for fault in &faults {
                print(&format!("  {fault}\n"))?;
            }
            whole &= faults.is_empty();
        }
    }
    Ok(whole)
}

/// `laser pools inspect`.
pub(crate) async fn pools_inspect(config: &Config, dir: &str, json: bool) -> Result<()> {
    let model = open_model(config).await?;
    let dir = pool_sets::find(config, dir).await?;
    let pools = OpenPools::open(&dir, &model.tokenizer.fingerprint()).await?;
    pools.verify()?;
    let inspection = inspect(&pools, model.tokenizer.library(), 8, 3)?;
    if json {
        return print(&(serde_json::to_string_pretty(&inspection)? + "\n"));
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
                group.name,
                group.label,
                group.statistics.routed,
                group.statistics.texts,
                if group.has_pool { "" } else { "  no pool" }
            );
        }
    }
    for pool in &inspection.pools {
        out += &format!(
            "{}: {} texts, {} tokens, {:.2} bytes a token\n",
            pool.name, pool.texts, pool.tokens, pool.bytes_per_token
        );
        for branch in &pool.branches {
            out += &format!("  {:>6} x {:?}\n", branch.count, branch.text);
        }
    }
    print(&out)
}

/// `laser pools tune`.
pub(crate) async fn pools_tune(config: &Config, tuning: &TuneConfig, json: bool) -> Result<()> {
    let model = open_model(config).await?;
    let mut display = Display::new();
    display.stage("tuning pools");
    let mut progress = |p: BuildProgress| display.update(p.done, p.total, p.stage.as_str());
    let before = config.run.date.unwrap_or(Date::MAX);
    let sources = previous_sources(config, before).await?;
    let texts = previous_texts(PreviousReader::open(&sources, before).await?);
    let drafter = config.draft.drafter()?;
    let tokenizer = PoolTokenizer::of(&model)?;
    let report =
        tune(&config.input, texts, tokenizer, (&config.pools, config.run.memory()), tuning, drafter, &mut progress)
            .await?;
    drop(display);
    if json {
        return print(&(serde_json::to_string_pretty(&report)? + "\n"));
    }
    let mut out = String::new();
    for kind in &report.kinds {
        out += &format!("{}s: [pools.{}] max_texts = {}\n", kind.kind, kind.kind, kind.max_texts);
        out += &format!(
            "  {:>9} {:>10} {:>14} {:>9} {:>10}\n",
            "max_texts", "tokens", "accepted/step", "draft µs", "tokens/s"
        );
        for row in &kind.rows {
            out += &format!(
                "  {:>9} {:>10} {:>14.2} {:>9.1} {:>10.0}\n",
                row.max_texts, row.pool_tokens, row.accepted_per_step, row.draft_us, row.tokens_per_second
            );
        }
    }
    print(&out)
}

/// `laser prepare`.
pub(crate) async fn prepare_data(source: &PrepareSource) -> Result<()> {
    let summary = match source {
        PrepareSource::Movielens { dir, output, until, split_by } => {
            let by = *split_by;
            let division = until.map(|until| Division { until, by });
            prepare::movielens(dir, &Location::parse(output)?, division).await?
        }
        PrepareSource::Amazon { reviews, meta, output } => {
            prepare::amazon(reviews, meta.as_deref(), &Location::parse(output)?).await?
        }
    };
    let table = summary.tables.interactions.as_deref();
    let mut out = format!(
        "{} users: {}\n{} items: {}\n{} interactions{}{}\n",
        summary.users,
        summary.tables.users,
        summary.items,
        summary.tables.items,
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
    print(&out)
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
        /// End histories here, for texts that know nothing of what comes later: a share of the interactions (0.8), a
        /// timestamp, or ISO 8601. Interactions without timestamp are left out.
        #[arg(long)]
        until: Option<Until>,
        /// `time`: one instant for all; `user`: the same share of each user's interactions.
        #[arg(long, default_value = "time", requires = "until")]
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
}
