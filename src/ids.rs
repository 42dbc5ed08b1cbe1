//! `laser ids`: knowledge ids of a night's embeddings, and the codebook they are of.

use std::fmt::Write as _;

use anyhow::Result;
use clap::Args;
use laser_night::Config;
use laser_night::derived::Derived;
use laser_night::embedding_source::{EmbeddingSource, IdList};
use laser_night::ids::assign_ids;
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_schema::ids::IdSet;
use laser_schema::knowledge::ratio;
use laser_store::Location;
use laser_terminal::{Display, print};

use crate::{ConfigArgs, word};

/// The arguments of `laser ids`.
#[derive(Debug, Args)]
pub(crate) struct IdsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Embeddings: an output (its newest night is taken), one published folder of texts with embeddings or of
    /// embeddings, a .parquet with the columns id and embedding, or an .npy with --ids. By default the configuration's
    /// output.
    source: Option<String>,
    /// Where the ids go: a folder or URL; by default the configuration's output.
    #[arg(short, long)]
    output: Option<String>,
    /// The codebook to begin with, so that ids keep their meaning: that of the newest earlier night of the ids' output
    /// (on a first night there is none), of another output, folder or file, or none.
    #[arg(long, value_name = "latest|none|PATH", default_value = "latest")]
    previous: String,
    #[command(flatten)]
    embedded: Embedded,
}

/// How embeddings are read that Laser did not write.
#[derive(Debug, Args)]
struct Embedded {
    /// Only this kind; for a .parquet or .npy, whose embeddings these are.
    #[arg(long, value_parser = word::<Kind>, value_name = "user|item")]
    kind: Option<Kind>,
    /// The entities of the rows of an .npy, an id a line.
    #[arg(long, value_name = "FILE")]
    ids: Option<String>,
    /// Rows of an .npy before the first entity's.
    #[arg(long, default_value_t = 0, requires = "ids")]
    skip_rows: usize,
    /// The type of the ids in --ids.
    #[arg(long, value_parser = word::<IdType>, default_value = "string", requires = "ids", value_name = "string|int64")]
    id_type: IdType,
}

/// `laser ids`.
pub(crate) async fn ids(args: IdsArgs) -> Result<()> {
    let config = Config::load_ids(&args.config.file, &args.config.settings)?;
    let Embedded { kind, ids, skip_rows, id_type } = args.embedded;
    let ids = ids.map(|file| IdList { file, skip_rows, id_type });
    let sources = EmbeddingSource::find(&config, args.source.as_deref(), kind, ids.as_ref()).await?;
    let output = Location::parse(config.or_output(args.output.as_deref(), "--output")?)?;
    let mut display = Display::new();
    for source in &sources {
        print(&summary(&assign_ids(&config, source, &args.previous, &output, &mut display).await?)?)?;
    }
    Ok(())
}

/// Describes the ids of a kind.
fn summary(Derived { manifest, folder, is_new }: &Derived<IdSet>) -> Result<String> {
    let info = &manifest.codebook.info;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut out = String::new();
    let state = if *is_new { "" } else { ", complete already" };
    writeln!(out, "{}s, {}: {} entities{state}\n  {}", manifest.kind, manifest.date, manifest.rows, folder.url())?;
    let last = info.inertia.last().copied().unwrap_or_default();
    let empty: u64 = info.empty.iter().sum();
    writeln!(
        out,
        "  codebook {}: {} x {} levels of {} ids, fitted on {} embeddings of {} values; {} of the variance explained, \
         {empty} ids unused",
        manifest.codebook.digest.short(),
        info.codebooks,
        info.levels,
        info.clusters,
        info.fitted_on,
        info.dimension,
        percent(1.0 - ratio(last, info.variance)),
    )?;
    if let Some(parent) = &info.parent {
        let moved = info.drift.iter().map(|drift| format!("{drift:.4}"));
        let fate = match info.kept {
            true => "its centroids are kept".to_owned(),
            false => format!("fitted again, centroids moved by {}", moved.collect::<Vec<_>>().join(", ")),
        };
        writeln!(out, "  begun with {}: {fate}", parent.short())?;
    }
    if let Some(churn) = &manifest.churn {
        let places = churn.changed_by_place.iter();
        let places = places.map(|changed| percent(ratio(*changed as f64, churn.common as f64)));
        writeln!(
            out,
            "  churn: {} of {} entities of both nights have another id (by place: {})",
            percent(churn.share()),
            churn.common,
            places.collect::<Vec<_>>().join(", ")
        )?;
    }
    Ok(out)
}
