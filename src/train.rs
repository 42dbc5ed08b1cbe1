//! `laser train`: a draft model from published texts, or a recommender from histories; their epochs as a table and a
//! picture.

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use laser_night::recommender;
use laser_night::train::{DraftKind, Epoch, Trained, train};
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
    let (what, trained) = match command {
        TrainCommand::Draft(DraftArgs { made_for: MadeFor::Texts, config }) => {
            let config = config.load()?;
            let what = match config.train.kind {
                DraftKind::Acceptance => ["an acceptance head", "[draft.model] acceptance_head"],
                DraftKind::Model | DraftKind::Eagle | DraftKind::Medusa => ["a draft model", "[draft.model] path"],
            };
            (what, train(&config, &mut display, &drain).await?)
        }
        TrainCommand::Draft(DraftArgs { made_for: MadeFor::Recommendation, config }) => {
            let trained = recommender::train_draft(&config.load_histories()?, &mut display, &drain).await?;
            (["a draft model for lists", "[draft.model] path and [lists]"], trained)
        }
        TrainCommand::Recommender(args) => {
            let trained = recommender::train(&args.load_histories()?, &mut display, &drain).await?;
            (["a recommender", "[model] path and [lists]"], trained)
        }
    };
    drop(display);
    let Some(trained) = trained else {
        return Ok(DRAINED);
    };
    let place = Location::parse(&trained.folder.to_string_lossy())?.join(CURVES);
    place.write(curves(what[0], &trained).svg()?.into()).await?;
    print(&summary(what, &trained))?;
    Ok(0)
}

/// What was trained, where to name it in a configuration, and the table of its epochs.
fn summary([what, keys]: [&str; 2], trained: &Trained) -> String {
    let mut header = vec!["epoch", "seconds", "loss", "held out"];
    header.extend(trained.kept.shares.iter().map(|(name, _)| name.as_str()));
    header.extend(trained.kept.own_loss.map(|_| "held out, draft model alone"));
    let mut table = Table::new(&header);
    for epoch in &trained.history {
        let mut row = vec![
            format!("{}{}", epoch.epoch, if epoch.epoch == trained.kept.epoch { " (kept)" } else { "" }),
            format!("{:.0}", epoch.seconds),
            format!("{:.4}", epoch.loss),
            format!("{:.4}", epoch.held_out_loss),
        ];
        row.extend(epoch.shares.iter().map(|(_, share)| format!("{:.1} %", 100.0 * share)));
        row.extend(epoch.own_loss.map(|loss| format!("{loss:.4}")));
        table.push(row);
    }
    let state = if trained.is_new { "" } else { ", complete already" };
    let folder = trained.folder.display();
    format!("{folder}: {what}{state}; use it with {keys}\n\n{}", table.render(Style::Text))
}

fn curves(what: &str, trained: &Trained) -> LineChart {
    let of_epochs = |value: &dyn Fn(&Epoch) -> f64| trained.history.iter().map(value).collect::<Vec<_>>();
    let mut lines = vec![
        ("loss".to_owned(), of_epochs(&|epoch| epoch.loss)),
        ("loss on what was held out".to_owned(), of_epochs(&|epoch| epoch.held_out_loss)),
    ];
    let shares = trained.kept.shares.iter().map(|(name, _)| name);
    lines.extend(shares.map(|name| (name.clone(), of_epochs(&|epoch| epoch.share(name).unwrap_or_default()))));
    LineChart {
        title: format!("Training of {what}"),
        x: "epoch",
        y: "nats, share",
        places: trained.history.iter().map(|epoch| epoch.epoch.to_string()).collect(),
        lines,
    }
}
