//! `laser encode`: embeddings of texts that are there.

use anyhow::Result;
use clap::Args;
use laser_night::Config;
use laser_night::encode::{Encoding, Texts};
use laser_schema::Kind;
use laser_terminal::{Display, print};

use crate::{ConfigArgs, word};

/// The arguments of `laser encode`.
#[derive(Debug, Args)]
pub(crate) struct EncodeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Texts: an output (its newest complete night is taken) or one published folder, or a .parquet or .jsonl with the
    /// columns id and text. By default the newest night of the configuration's output.
    source: Option<String>,
    /// Where the embeddings go: a folder or URL; by default the configuration's output.
    #[arg(short, long)]
    output: Option<String>,
    /// Only this kind; for a .parquet or .jsonl, whose texts these are.
    #[arg(long, value_parser = word::<Kind>, value_name = "user|item")]
    kind: Option<Kind>,
    /// The type of the column, of fixed size or not: sets encoder.layout.
    #[arg(long, value_name = "fixed|list")]
    embedding_layout: Option<String>,
}

/// `laser encode`.
pub(crate) async fn encode(mut args: EncodeArgs) -> Result<()> {
    let layout = args.embedding_layout.take();
    let settings = &mut args.config.settings;
    settings.extend(layout.map(|layout| format!("encoder.layout={layout}")));
    let config = Config::load_encoder(&args.config.file, settings)?;
    let texts = Texts::find(&config, args.source.as_deref(), args.kind).await?;
    let mut encoding = Encoding::open(&config, args.output.as_deref()).await?;
    let mut display = Display::new();
    for texts in &texts {
        let done = encoding.encode(texts, &mut display).await?;
        let (manifest, info) = (&done.manifest, &done.manifest.embedding);
        print(&format!(
            "{}s, {}: {} embeddings of {} dimensions{}; {} texts were cut off at {} tokens\n  {}\n",
            manifest.kind,
            manifest.date,
            manifest.rows,
            info.spec.encoder.dimensions,
            if done.is_new { "" } else { ", complete already" },
            info.truncated,
            info.spec.encoder.max_tokens,
            done.folder.url()
        ))?;
    }
    Ok(())
}
