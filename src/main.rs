//! `laser`: knowledge for every user and item of a recommender, every night.
//!
//! The command line and the wiring of the crates; no logic of its own.

mod bench;
mod commands;
mod config;
mod night;
mod prepare;
mod progress;
mod summary;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use laser_pool_builder::TuneConfig;
use laser_schema::LocationError;
use laser_worker::run::WorkerError;
use tokio_util::sync::CancellationToken;

use commands::PrepareSource;
use config::Config;
use night::{Night, Outcome};
use progress::Display;

/// Knowledge generation for recommenders with retrieval-based speculative decoding.
///
/// Exit codes: 0 complete; 65 input, configuration or coverage is not acceptable; 75 incomplete, run the same
/// command again; 143 stopped by a signal, run the same command again.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a night: build pools, plan, generate, publish. The same command resumes.
    Run(ConfigArgs),
    /// Tell what a run would do, without doing it.
    Plan(ConfigArgs),
    /// Print the effective configuration.
    Config(ConfigArgs),
    /// Check published output: digests, counts, nulls, duplicates.
    Verify {
        /// An output's root or one published folder, as path or URL.
        dir: String,
    },
    /// Build, inspect and tune pools.
    #[command(subcommand, visible_alias = "pool-builder")]
    Pools(PoolsCommand),
    /// Repeat the paper's measurements, and others, on your data and model.
    Bench(bench::BenchArgs),
    /// Turn a public data set into entity tables.
    #[command(subcommand)]
    Prepare(PrepareSource),
}

#[derive(Debug, Subcommand)]
enum PoolsCommand {
    /// Build the pools of a configuration into a folder.
    Build {
        #[command(flatten)]
        config: ConfigArgs,
        /// The folder or URL to write to.
        #[arg(short, long)]
        output: String,
    },
    /// Show sizes, groups and the most frequent branches of a folder of pools.
    Inspect {
        #[command(flatten)]
        config: ConfigArgs,
        /// The folder of pools; a run keeps its own in runs/RUN/pools of its output.
        dir: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Find the fastest pool size by replaying held-out previous texts; needs no weights.
    Tune {
        #[command(flatten)]
        config: ConfigArgs,
        /// Duration of a forward of the draft tree in microseconds.
        #[arg(long, default_value_t = TuneConfig::default().step_us)]
        step_us: f64,
        /// Pool sizes to try, in texts, rising.
        #[arg(long, value_delimiter = ',', default_values_t = TuneConfig::default().sizes)]
        sizes: Vec<usize>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The configuration file.
    #[arg(id = "configuration", value_name = "CONFIG")]
    file: PathBuf,
    /// Override a key: --set run.limit=100. LASER_RUN__LIMIT=100 in the environment does the same.
    #[arg(short, long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

impl ConfigArgs {
    fn load(&self) -> Result<Config> {
        Config::load(&self.file, &self.settings)
    }
}

const DATA_ERROR: u8 = 65;
const TRY_AGAIN: u8 = 75;
const DRAINED: u8 = 143;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new("error,laser=warn,laser_worker=warn")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match dispatch(cli.command).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

/// What may pass by itself is worth another try; the rest needs a hand.
fn exit_code(error: &anyhow::Error) -> u8 {
    let passing = error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(LocationError::Store { .. }))
            || cause.downcast_ref::<WorkerError>().is_some()
    });
    if passing { TRY_AGAIN } else { DATA_ERROR }
}

async fn dispatch(command: Command) -> Result<u8> {
    match command {
        Command::Run(args) => return run(&args.load()?).await,
        Command::Plan(args) => commands::plan(&args.load()?).await?,
        Command::Config(args) => commands::print(&args.load()?.to_toml()?)?,
        Command::Verify { dir } => {
            return Ok(if commands::verify_all(&dir).await? {
                0
            } else {
                DATA_ERROR
            });
        }
        Command::Pools(PoolsCommand::Build { config, output }) => {
            commands::pools_build(&config.load()?, &output).await?;
        }
        Command::Pools(PoolsCommand::Inspect { config, dir, json }) => {
            commands::pools_inspect(&config.load()?, &dir, json).await?;
        }
        Command::Pools(PoolsCommand::Tune {
            config,
            step_us,
            sizes,
            json,
        }) => {
            let config = config.load()?;
            let nodes = config.draft.nodes;
            let tuning = TuneConfig {
                sizes,
                nodes,
                step_us,
                ..TuneConfig::default()
            };
            commands::pools_tune(&config, &tuning, json).await?;
        }
        Command::Bench(args) => bench::run(args).await?,
        Command::Prepare(source) => commands::prepare_data(&source).await?,
    }
    Ok(0)
}

async fn run(config: &Config) -> Result<u8> {
    let drain = CancellationToken::new();
    drain_on_signal(drain.clone())?;
    let mut display = Display::new();
    if let Some((last_night, tonight)) = night::demo_nights(config).await? {
        commands::print("Demo, last night: a first night, without pools.\n")?;
        let code = run_night(&last_night, &mut display, &drain).await?;
        if code != 0 {
            return Ok(code);
        }
        commands::print("\nDemo, tonight: last night's texts are the pools.\n")?;
        return run_night(&tonight, &mut display, &drain).await;
    }
    run_night(config, &mut display, &drain).await
}

async fn run_night(
    config: &Config,
    display: &mut Display,
    drain: &CancellationToken,
) -> Result<u8> {
    let night = Night::open(config).await?;
    match night.run(display, drain).await? {
        Outcome::Complete(finished) => {
            commands::print(&summary::render(&finished).await?)?;
            Ok(0)
        }
        Outcome::BelowCoverage(finished) => {
            commands::print(&summary::render(&finished).await?)?;
            eprintln!(
                "error: fewer than {:.1} % of the entities have a text ([output] min_coverage): _SUCCESS is withheld",
                config.output.min_coverage * 100.0
            );
            Ok(DATA_ERROR)
        }
        Outcome::Incomplete { dead, missing } => {
            for (shard, reason) in &dead {
                eprintln!("error: shard {shard} was given up: {reason}");
            }
            eprintln!(
                "error: {missing} shards are missing; run the same command again once the cause is mended"
            );
            Ok(TRY_AGAIN)
        }
        Outcome::Drained { committed, shards } => {
            eprintln!(
                "stopped: {committed} of {shards} shards are committed; the same command goes on"
            );
            Ok(DRAINED)
        }
    }
}

/// The first SIGINT or SIGTERM drains, the second ends the process at once; what is committed stays.
fn drain_on_signal(drain: CancellationToken) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if drain.is_cancelled() {
                std::process::exit(i32::from(DRAINED));
            }
            drain.cancel();
        }
    });
    Ok(())
}
