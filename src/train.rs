//! `laser train`: a draft model from published texts, or a recommender from histories; their epochs as a table and a
//! picture.

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use laser_night::recommender::{self, RecommenderEpoch};
use laser_night::train::{Trained, train};
use laser_report::LineChart;
use laser_store::Location;
use laser_terminal::{Display, Style, Table, print};

use crate::exit::DRAINED;
use crate::{ConfigArgs, drain_on_signal};

/// The picture of the epochs, in the model's folder.
const CURVES: &str = "curves.svg";

/// What can be trained.
#[derive(Debug, Subcommand)]
pub(crate) enum TrainCommand {
    /// Train a draft model on the texts of the output's runs, as [train] describes it, or for a model that makes lists,
    /// as [recommender.draft] describes it. The same command resumes.
    Draft(DraftArgs),
    /// Train a model that makes lists, as [recommender] describes it, on the histories of the input. The same command
    /// resumes.
    Recommender(ConfigArgs),
}

/// What a draft model is trained for.
#[derive(Debug, Args)]
pub(crate) struct DraftArgs {
    /// What the draft model drafts
    #[arg(long = "for", value_enum, default_value_t)]
    made_for: MadeFor,
    #[command(flatten)]
    config: ConfigArgs,
}

/// What a draft model drafts.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum MadeFor {
    /// Texts, for the model of the configuration
    #[default]
    Texts,
    /// Lists of items, for the recommender in [recommender] output
    Recommendation,
}

/// `laser train`.
pub(crate) async fn run(command: TrainCommand) -> Result<u8> {
    let drain = drain_on_signal()?;
    let mut display = Display::new();
    let shown = match command {
        TrainCommand::Draft(DraftArgs { made_for: MadeFor::Texts, config }) => {
            let trained = train(&config.load()?, &mut display, &drain).await?;
            trained.map(|trained| (trained.folder.clone(), curves(&trained), summary(&trained)))
        }
        TrainCommand::Draft(DraftArgs { made_for: MadeFor::Recommendation, config }) => {
            let trained = recommender::train_draft(&config.load_histories()?, &mut display, &drain).await?;
            trained.map(|trained| (trained.folder.clone(), lists_curves(&trained), lists_summary(&trained)))
        }
        TrainCommand::Recommender(args) => {
            let trained = recommender::train(&args.load_histories()?, &mut display, &drain).await?;
            trained.map(|trained| (trained.folder.clone(), lists_curves(&trained), lists_summary(&trained)))
        }
    };
    drop(display);
    let Some((folder, curves, summary)) = shown else {
        return Ok(DRAINED);
    };
    let place = Location::parse(&folder.to_string_lossy())?.join(CURVES);
    place.write(curves.svg()?.into()).await?;
    print(&summary)?;
    Ok(0)
}

fn lists_summary(trained: &Trained<RecommenderEpoch>) -> String {
    let overlaps = trained.kept.overlap.is_some();
    let mut header = vec!["epoch", "seconds", "loss", "held out", "first code", "all codes"];
    header.extend(overlaps.then_some("overlap"));
    let mut table = Table::new(&header);
    for epoch in &trained.history {
        let mut row = vec![
            format!("{}{}", epoch.epoch, if epoch.epoch == trained.kept.epoch { " (kept)" } else { "" }),
            format!("{:.0}", epoch.seconds),
            format!("{:.4}", epoch.loss),
            format!("{:.4}", epoch.held_out_loss),
            percent(epoch.first),
            percent(epoch.all),
        ];
        row.extend(epoch.overlap.map(percent));
        table.push(row);
    }
    let state = if trained.is_new { "" } else { ", complete already" };
    let folder = trained.folder.display();
    let (what, usage) = match overlaps {
        false => ("a recommender", "; use it with [model] path and [lists]"),
        true => ("a draft model for lists", "; use it with [draft.model] path and [lists]"),
    };
    format!("{folder}: {what}{state}{usage}\n\n{}", table.render(Style::Text))
}

fn lists_curves(trained: &Trained<RecommenderEpoch>) -> LineChart {
    let line = |name: &str, value: fn(&RecommenderEpoch) -> f64| {
        (name.to_owned(), trained.history.iter().map(value).collect())
    };
    let mut lines = vec![
        line("loss", |epoch| epoch.loss),
        line("loss on held-out items", |epoch| epoch.held_out_loss),
        line("first code", |epoch| epoch.first),
        line("all codes", |epoch| epoch.all),
    ];
    if trained.kept.overlap.is_some() {
        lines.push(line("overlap", |epoch| epoch.overlap.unwrap_or_default()));
    }
    LineChart {
        title: "Recommender".to_owned(),
        x: "epoch",
        y: "nats, share",
        places: trained.history.iter().map(|epoch| epoch.epoch.to_string()).collect(),
        lines,
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn summary(trained: &Trained) -> String {
    let mut header = ["epoch", "seconds", "loss", "held out", "overlap", "first"].map(str::to_owned).to_vec();
    header.extend((2..).take(trained.kept.deeper.len()).map(|depth| format!("at depth {depth}")));
    header.extend(trained.kept.own_loss.map(|_| "held out, draft model alone".to_owned()));
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    for epoch in &trained.history {
        let mut row = vec![
            format!("{}{}", epoch.epoch, if epoch.epoch == trained.kept.epoch { " (kept)" } else { "" }),
            format!("{:.0}", epoch.seconds),
            format!("{:.4}", epoch.loss),
            format!("{:.4}", epoch.held_out_loss),
            percent(epoch.overlap),
            percent(epoch.first),
        ];
        row.extend(epoch.deeper.iter().map(|first| percent(*first)));
        row.extend(epoch.own_loss.map(|loss| format!("{loss:.4}")));
        table.push(row);
    }
    let state = if trained.is_new { "" } else { ", complete already" };
    let folder = trained.folder.display();
    let (what, key) = match trained.kept.own_loss {
        None => ("a draft model", "path"),
        Some(_) => ("an acceptance head", "acceptance_head"),
    };
    format!("{folder}: {what}{state}; use it with [draft.model] {key}\n\n{}", table.render(Style::Text))
}

fn curves(trained: &Trained) -> LineChart {
    let line = |name: &str, value: fn(&laser_night::train::EpochReport) -> f64| {
        (name.to_owned(), trained.history.iter().map(value).collect())
    };
    LineChart {
        title: "Draft model".to_owned(),
        x: "epoch",
        y: "nats, share",
        places: trained.history.iter().map(|epoch| epoch.epoch.to_string()).collect(),
        lines: vec![
            line("loss", |epoch| epoch.loss),
            line("loss on held-out texts", |epoch| epoch.held_out_loss),
            line("overlap", |epoch| epoch.overlap),
            line("first", |epoch| epoch.first),
        ],
    }
}
