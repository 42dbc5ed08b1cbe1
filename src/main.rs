//! `laser`: knowledge for every user and item of a recommender, every night.
//!
//! Parses arguments, calls, and prints.

mod canary;
mod commands;
mod encode;
mod erase;
mod eval;
mod exit;
mod ids;
mod list_summary;
mod operate;
mod outputs;
mod plan;
mod pools;
mod summary;
mod telemetry;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use laser_night::doctor::selftest;
use laser_night::{Config, Night, demo, distributed};
use laser_pool_builder::TuneConfig;
use laser_terminal::{Display, Style, print};
use serde::Serialize;
use serde::de::{DeserializeOwned, IntoDeserializer};
use tokio_util::sync::CancellationToken;

use commands::PrepareSource;
use exit::{DATA_ERROR, DRAINED, report};
use plan::EstimateArgs;
use telemetry::LogFormat;

/// Rows of a table are thousands of small values each, made on one thread and dropped on another: with the system's
/// allocator two fifths of planning.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Knowledge generation for recommenders with retrieval-based speculative decoding.
///
/// Exit codes: 0 complete; 65 input, configuration or coverage is not acceptable; 75 incomplete, run the same
/// command again; 143 stopped by a signal, run the same command again.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// How logs are written to standard error; RUST_LOG chooses which.
    #[arg(long, global = true, value_enum, default_value_t, env = "LASER_LOG")]
    log: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a night: build pools, plan, generate, publish. The same command resumes.
    Run(RunArgs),
    /// Run a night on many machines: plan it, queue its shards, publish what workers generate. The same command
    /// resumes.
    Coordinator(RunArgs),
    /// Generate shards that a coordinator queued, of whatever run has some.
    Worker(ConfigArgs),
    /// Show how far runs are.
    Status {
        #[command(flatten)]
        config: ConfigArgs,
        /// The run; all that the output holds if not given.
        #[arg(long)]
        run: Option<String>,
        /// Print JSON, a line a run.
        #[arg(long)]
        json: bool,
    },
    /// Check all that a night needs (model, inputs, store, clocks, queue) and say what to mend.
    Doctor(ConfigArgs),
    /// Check that the configured device computes what the CPU does, on a small model with random weights.
    Selftest(ConfigArgs),
    /// Stop a distributed run. What is committed stays.
    Cancel(RunName),
    /// Take a cancellation back and go on as `coordinator` does, with the options that the run was begun with.
    Resume {
        #[command(flatten)]
        args: RunArgs,
        /// The run, as `laser status` names it.
        run: String,
    },
    /// Shards of a distributed run that were given up.
    #[command(subcommand)]
    Dlq(DlqCommand),
    /// Tell what a run would do, without doing it, and what it would take.
    Plan {
        #[command(flatten)]
        args: NightArgs,
        #[command(flatten)]
        estimate: EstimateArgs,
    },
    /// Print the effective configuration.
    Config(ConfigArgs),
    /// Remove nights, runs and pool sets older than the kept nights.
    Prune {
        #[command(flatten)]
        config: ConfigArgs,
        /// Only tell what would be removed.
        #[arg(long)]
        dry_run: bool,
    },
    /// Erase entities from nights, runs and pools of the output. The same command resumes, and later checks again.
    Erase(erase::EraseArgs),
    /// Check published output: digests, counts, nulls, duplicates.
    Verify {
        /// An output's root or one published folder, as path or URL.
        dir: String,
    },
    /// Write a published night as one HTML page that needs no network.
    Report {
        /// An output's root, for its newest night, or one published folder, as path or URL.
        dir: String,
        /// The page, as path or URL; report-RUN.html if not given.
        #[arg(short, long, value_name = "FILE")]
        output: Option<String>,
        /// Print the page's figures as JSON instead.
        #[arg(long, conflicts_with = "output")]
        json: bool,
    },
    /// List the runs of nights and choose which of them readers get.
    #[command(subcommand)]
    Outputs(OutputsCommand),
    /// Build, list, promote, inspect and tune pools.
    #[command(subcommand, visible_alias = "pool-builder")]
    Pools(PoolsCommand),
    /// Turn texts that are there into embeddings, without generating anything. The same command resumes.
    Encode(encode::EncodeArgs),
    /// Turn the embeddings of a night's texts into knowledge ids: k-means, stable from night to night. The same command
    /// resumes.
    Ids(ids::IdsArgs),
    /// Train embeddings of users and items on interactions (LightGCN), for pools to group by.
    Embed {
        #[command(flatten)]
        config: ConfigArgs,
        /// Where users.parquet and items.parquet (id, embedding) go: a folder or URL.
        #[arg(short, long)]
        output: String,
    },
    /// Measure what embeddings and texts are worth to recommender models, and how good lists are.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Train what drafts tokens for the model, or a model that makes lists.
    #[command(subcommand)]
    Train(train::TrainCommand),
    /// Turn a public data set into entity tables.
    #[command(subcommand)]
    Prepare(PrepareSource),
}

#[derive(Debug, Subcommand)]
enum PoolsCommand {
    /// Build a pool set from previous knowledge: pools/VERSION of the output, or a folder elsewhere.
    Build {
        #[command(flatten)]
        config: ConfigArgs,
        /// The version's name; by default the date and a digest of what the pools depend on.
        #[arg(long, conflicts_with = "output")]
        name: Option<String>,
        /// A folder or URL to write to instead, in place of any pools there.
        #[arg(short, long)]
        output: Option<String>,
    },
    /// List the output's pool sets, oldest first; a night's own is named as its run.
    List {
        #[command(flatten)]
        config: ConfigArgs,
        /// Print JSON, a line a set.
        #[arg(long)]
        json: bool,
    },
    /// Put a pool set in force for runs with [run] pools = "promoted".
    Promote {
        #[command(flatten)]
        config: ConfigArgs,
        /// The version, as `laser pools list` names it.
        version: String,
    },
    /// Put the pool set in force that was so before the current one; again goes one further back.
    Rollback(ConfigArgs),
    /// Show sizes, groups and the most frequent branches of a pool set.
    Inspect {
        #[command(flatten)]
        config: ConfigArgs,
        /// A version, `promoted`, or a folder or URL (with a slash).
        #[arg(value_name = "SET")]
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

#[derive(Debug, Subcommand)]
enum OutputsCommand {
    /// List the runs of all nights, oldest first: rows, specification, and which run is in force.
    List {
        #[command(flatten)]
        config: ConfigArgs,
        /// Print JSON, a line a run.
        #[arg(long)]
        json: bool,
    },
    /// Put a run in force for its night, in place of the one that was created last.
    Promote(RunName),
    /// Take back the promotion of a run: what was in force before it is so again.
    Rollback(RunName),
}

#[derive(Debug, Subcommand)]
enum EvalCommand {
    /// Recall and NDCG of popularity, matrix factorisation and LightGCN on held-out interactions.
    Embed(EvalArgs),
    /// AUC and log loss of DIN and DCNv2 without and with knowledge, and whether the differences matter.
    Ctr(EvalArgs),
    /// Recall, NDCG and coverage of published lists, of popularity, a Markov chain and item-kNN, and whether the
    /// differences matter.
    Lists(EvalArgs),
}

#[derive(Debug, Args)]
struct EvalArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print GitHub tables.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

impl EvalArgs {
    /// How tables are printed; none for JSON.
    fn style(&self) -> Option<Style> {
        let style = if self.markdown { Style::Markdown } else { Style::Text };
        (!self.json).then_some(style)
    }
}

#[derive(Debug, Subcommand)]
enum DlqCommand {
    /// List them, with the reason of the last attempt.
    List(RunName),
    /// Show one, with its job.
    Show {
        #[command(flatten)]
        run: RunName,
        /// The shard.
        shard: u32,
    },
    /// Queue some or all again.
    Replay {
        #[command(flatten)]
        run: RunName,
        /// The shards; all if none is given.
        shards: Vec<u32>,
    },
}

#[derive(Debug, Args)]
struct RunName {
    #[command(flatten)]
    config: ConfigArgs,
    /// The run, as `laser status` names it.
    run: String,
}

#[derive(Debug, Args)]
struct NightArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Previous knowledge in place of the configuration's: `latest`, or the path or URL of an output or a file.
    #[arg(long, value_name = "latest|PATH")]
    previous: Option<String>,
}

impl NightArgs {
    fn load(mut self) -> Result<Config> {
        let path = self.previous.map(toml::Value::String);
        let settings = &mut self.config.settings;
        settings.extend(path.map(|path| format!("previous=[{{path={path}}}]")));
        self.config.load()
    }
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    night: NightArgs,
    /// Publish at this time of day whatever is missing: sets run.deadline.
    #[arg(long, value_name = "HH:MM")]
    deadline: Option<jiff::civil::Time>,
    /// Share of the entities that must have a text: sets output.min_coverage.
    #[arg(long)]
    min_coverage: Option<f64>,
}

impl RunArgs {
    fn load(mut self) -> Result<Config> {
        let settings = &mut self.night.config.settings;
        settings.extend(self.deadline.map(|time| format!("run.deadline='{time}'")));
        settings.extend(self.min_coverage.map(|share| format!("output.min_coverage={share:?}")));
        self.night.load()
    }
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

    /// For a command that learns from histories and needs no model.
    fn load_histories(&self) -> Result<Config> {
        Config::load_histories(&self.file, &self.settings)
    }

    /// For commands that need neither model nor entities.
    fn load_learning(&self) -> Result<Config> {
        Config::load_learning(&self.file, &self.settings)
    }
}

fn print_json(value: &impl Serialize) -> Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Parses a word as configurations have it.
fn word<T: DeserializeOwned>(text: &str) -> Result<T, serde::de::value::Error> {
    T::deserialize(text.into_deserializer())
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = match telemetry::start(cli.log) {
        Ok(traces) => {
            let ended = dispatch(cli.command).await;
            traces.end();
            ended
        }
        Err(error) => Err(error),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            telemetry::tell_error(&format!("{error:#}"));
            ExitCode::from(exit::code(&error))
        }
    }
}

async fn dispatch(command: Command) -> Result<u8> {
    match command {
        Command::Run(args) => return run(&args.load()?).await,
        Command::Coordinator(args) => return coordinate(&args.load()?, None).await,
        Command::Worker(args) => {
            let drain = drain_on_signal()?;
            let config = args.load()?;
            telemetry::serve(&config)?;
            let ended = distributed::work(&config, &mut Display::new(), &drain).await?;
            return Ok(if ended { 0 } else { DRAINED });
        }
        Command::Status { config, run, json } => {
            operate::status(&config.load()?, run.as_deref(), json).await?;
        }
        Command::Doctor(args) => {
            let well = operate::doctor(&args.load()?).await?;
            return Ok(if well { 0 } else { DATA_ERROR });
        }
        Command::Selftest(args) => print(&(selftest(&args.load()?).await? + "\n"))?,
        Command::Cancel(RunName { config, run }) => {
            let removed = distributed::cancel(&config.load()?, &run).await?;
            print(&format!("{run}: cancelled, {removed} shards left the queue\n"))?;
        }
        Command::Resume { args, run } => {
            let mut config = args.load()?;
            config.run.date = distributed::date_of(&run);
            return coordinate(&config, Some(&run)).await;
        }
        Command::Dlq(command) => dlq(command).await?,
        Command::Plan { args, estimate } => plan::plan(&args.load()?, &estimate).await?,
        Command::Config(args) => print(&args.load()?.to_toml()?)?,
        Command::Verify { dir } => {
            return Ok(if commands::verify_all(&dir).await? { 0 } else { DATA_ERROR });
        }
        Command::Report { dir, json: true, .. } => print(&(laser_report::report_json(&dir).await? + "\n"))?,
        Command::Report { dir, output, json: false } => {
            print(&format!("{}\n", laser_report::report(&dir, output.as_deref()).await?))?
        }
        Command::Outputs(command) => manage_outputs(command).await?,
        Command::Pools(command) => manage_pools(command).await?,
        Command::Prune { config, dry_run } => operate::prune(&config.load()?, dry_run).await?,
        Command::Erase(args) => erase::erase(args).await?,
        Command::Encode(args) => encode::encode(args).await?,
        Command::Ids(args) => ids::ids(args).await?,
        Command::Embed { config, output } => {
            eval::embed(&config.load_learning()?, &output).await?;
        }
        Command::Eval(EvalCommand::Embed(args)) => {
            eval::ranking(&args.config.load_learning()?, args.style()).await?;
        }
        Command::Eval(EvalCommand::Ctr(args)) => {
            eval::ctr(&args.config.load_learning()?, args.style()).await?;
        }
        Command::Eval(EvalCommand::Lists(args)) => {
            eval::lists(&args.config.load_histories()?, args.style()).await?;
        }
        Command::Train(command) => return train::run(command).await,
        Command::Prepare(source) => commands::prepare_data(&source).await?,
    }
    Ok(0)
}

async fn manage_outputs(command: OutputsCommand) -> Result<()> {
    match command {
        OutputsCommand::List { config, json } => outputs::list(&config.load()?, json).await,
        OutputsCommand::Promote(RunName { config, run }) => outputs::promote(&config.load()?, &run).await,
        OutputsCommand::Rollback(RunName { config, run }) => outputs::rollback(&config.load()?, &run).await,
    }
}

async fn manage_pools(command: PoolsCommand) -> Result<()> {
    match command {
        PoolsCommand::Build { config, name, output } => {
            pools::build(&config.load()?, name.as_deref(), output.as_deref()).await
        }
        PoolsCommand::List { config, json } => pools::list(&config.load()?, json).await,
        PoolsCommand::Promote { config, version } => pools::promote(&config.load()?, &version).await,
        PoolsCommand::Rollback(config) => pools::rollback(&config.load()?).await,
        PoolsCommand::Inspect { config, dir, json } => pools::inspect(&config.load()?, &dir, json).await,
        PoolsCommand::Tune { config, step_us, sizes, json } => {
            let config = config.load()?;
            let tuning = TuneConfig { sizes, nodes: config.draft.nodes(), step_us, ..TuneConfig::default() };
            pools::tune(&config, &tuning, json).await
        }
    }
}

async fn dlq(command: DlqCommand) -> Result<()> {
    match command {
        DlqCommand::List(RunName { config, run }) => operate::dlq_list(&config.load()?, &run).await,
        DlqCommand::Show { run, shard } => operate::dlq_show(&run.config.load()?, &run.run, shard).await,
        DlqCommand::Replay { run, shards } => operate::dlq_replay(&run.config.load()?, &run.run, &shards).await,
    }
}

async fn run(config: &Config) -> Result<u8> {
    telemetry::serve(config)?;
    let drain = drain_on_signal()?;
    let mut display = Display::new();
    if let Some((last_night, tonight)) = demo::nights(config)? {
        print("Demo, last night: a first night. There are no pools, so its texts are drafts of each other.\n")?;
        let code = run_night(&last_night, &mut display, &drain).await?;
        if code != 0 {
            return Ok(code);
        }
        print("\nDemo, tonight: last night's texts are the pools.\n")?;
        return run_night(&tonight, &mut display, &drain).await;
    }
    run_night(config, &mut display, &drain).await
}

async fn run_night(config: &Config, display: &mut Display, drain: &CancellationToken) -> Result<u8> {
    let night = Night::open(config).await?;
    report(config, night.run(display, drain).await?).await
}

async fn coordinate(config: &Config, run: Option<&str>) -> Result<u8> {
    telemetry::serve(config)?;
    let drain = drain_on_signal()?;
    let mut display = Display::new();
    let outcome = distributed::coordinate(config, run, &mut display, &drain).await?;
    drop(display);
    report(config, outcome).await
}

/// The first SIGINT or SIGTERM drains, the second ends the process at once; what is committed stays.
fn drain_on_signal() -> Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let signalled = CancellationToken::new();
    let drain = signalled.clone();
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
    Ok(signalled)
}
