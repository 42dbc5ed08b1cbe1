//! `laser-bench`: the paper's measurements (4.1 to 4.3) on any data set and model.
//!
//! `paper` compares ways of speculating, `ablation` policies of verification, `sweep` sizes of pools and trees, `batch`
//! batch sizes, `compare` draft models and pools; they differ in their list of [variants] only, and one routine runs
//! such a list [interleaved](mod@run).
//! `engine` measures forwards alone, `replay` measures drafting on known texts, without a model; `plan`, `publish`,
//! `queue` and `look` measure the coordinator on nights of any size.
//!
//! Texts, acceptance and counts are a function of the inputs and the seed; times are of this machine, at this
//! moment. Each command prints a table and writes the same figures as JSON.

mod apart;
mod engine;
mod history;
mod lists;
mod look;
mod lossless;
mod old;
mod pad;
mod paper;
mod plan;
mod pools;
mod precision;
mod publish;
mod queue;
mod replay;
mod report;
mod rounded;
mod rounds;
mod run;
mod shared;
mod simulated;
mod sources;
mod stage;
mod synthetic;
mod variants;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use laser_coordinator::prompt::Chat;
use laser_decode::Drafter;
use laser_engine::{DTypeOption, EngineOptions};
use laser_schema::DeviceOption;
use laser_terminal::{Style, print};
use serde::Serialize;
use tracing_subscriber::EnvFilter;

use report::Report;

/// Longest context of the drafters, in tokens.
const ORDER: usize = 8;

/// As in `laser`: planning allocates many small values on one thread and drops them on another.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Repeat the paper's measurements, and others, on your data and model.
#[derive(Debug, Parser)]
#[command(name = "laser-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Box<Command>,
    /// Print GitHub markdown instead of aligned text.
    #[arg(long, global = true)]
    markdown: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Plain decoding, prompt lookup, and global, random and customised pools, strict and relaxed (paper 4.2, 4.3).
    Paper(SetupArgs),
    /// Verification: strict, top-k alone, p alone, both (paper 3.4), AASD's and Medusa's, all on customised pools.
    Ablation(SetupArgs),
    /// Sizes of pools and of draft trees, on customised pools with relaxed verification.
    Sweep(SweepArgs),
    /// Plain decoding, prompt lookup, fixed and adaptive draft trees by batch size, also where no pool predicts
    /// anything.
    Batch(BatchArgs),
    /// Every source of drafts, draft models among them, and every rule of verification, by batch size.
    Compare(sources::CompareArgs),
    /// What the rules that keep the target's distribution accept of a draft model's tokens, at a temperature.
    Lossless(lossless::LosslessArgs),
    /// Every source of drafts for lists of items, and every rule of verification, beside plain beam search.
    Lists(lists::ListsArgs),
    /// Acceptance and draft time on known texts; needs no model.
    Replay(ReplayArgs),
    /// What a forward costs by its number of tokens.
    Engine(engine::EngineArgs),
    /// What precisions of the weights cost in accuracy: equal texts and perplexity against f32.
    Precision(PrecisionArgs),
    /// Writes a model that computes the same in a larger shape, to measure at the cost of real models.
    Pad(pad::PadArgs),
    /// Time and memory of building the pools of a synthetic night and planning it.
    Plan(plan::PlanArgs),
    /// The queue of a distributed night on a NATS server, with many leases in flight.
    Queue(queue::QueueArgs),
    /// Time and memory of publishing and verifying a synthetic night.
    Publish(publish::PublishArgs),
    /// Time and processor time of the coordinator's look at a store of many shards.
    Look(look::LookArgs),
}

/// What `paper`, `ablation` and `sweep` share: data, model, and how texts are generated.
#[derive(Debug, Clone, Args, Serialize)]
struct SetupArgs {
    /// The users' entity table (.parquet, .csv, .jsonl). Without it users are left out.
    #[arg(long, required_unless_present = "items_table")]
    users_table: Option<String>,
    /// The items' entity table. Without it items are left out.
    #[arg(long)]
    items_table: Option<String>,
    /// The model: a directory, a .gguf file or a hub id.
    #[arg(long)]
    model: String,
    /// The model that writes the old texts, in f32; --model if not given. It must have the same tokenizer. A padded
    /// model's texts are those of the model that was padded, which writes them far sooner.
    #[arg(long)]
    old_model: Option<String>,
    /// Where the old knowledge is kept for the next run, and pools and figures are written.
    #[arg(long, default_value = "output/bench")]
    output: PathBuf,
    /// The users' prompt template: a shipped one or a file.
    #[arg(long, default_value = "plain/films")]
    user_template: String,
    /// The items' prompt template.
    #[arg(long, default_value = "plain/films")]
    item_template: String,
    /// Whether prompts take the model's chat format: true, false, or auto for whatever the model has.
    #[arg(long, default_value = "auto", value_parser = parse_chat)]
    chat: Chat,
    /// Bound on a prompt's tokens; half of the model's positions, at most 1024, if not given.
    #[arg(long)]
    prompt_tokens: Option<usize>,
    /// Bound on a text's tokens.
    #[arg(long, default_value_t = 256)]
    max_new_tokens: usize,
    /// Old texts of each kind: what the pools are built from.
    #[arg(long, default_value_t = 500)]
    old_texts: usize,
    /// New texts of each kind, which every variant generates.
    #[arg(long, default_value_t = 500)]
    new_texts: usize,
    /// Interactions of a user below which its history is not split.
    #[arg(long, default_value_t = 10)]
    min_history: usize,
    /// Gives every speculating variant the user's own old text as a branch, not `LASER+own` alone.
    #[arg(long)]
    own_previous: bool,
    /// Drafted tokens of a step.
    #[arg(long, default_value_t = 12)]
    nodes: usize,
    /// Texts generated at a time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// How often every variant generates the new texts. With several rounds a speedup is the mean of theirs, with its
    /// standard error.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Relaxed verification: the most probable tokens that are eligible.
    #[arg(short, long, default_value_t = 2)]
    k: usize,
    /// Relaxed verification: the probability to exceed.
    #[arg(short, long, default_value_t = 0.1)]
    p: f32,
    /// The rule that drafts from pools.
    #[arg(long, value_enum, default_value_t = DraftRule::Blended)]
    drafter: DraftRule,
    /// Texts of a pool at most.
    #[arg(long, default_value_t = 2000)]
    pool_texts: usize,
    /// Clusters of users, from their embeddings.
    #[arg(long, default_value_t = 3)]
    clusters: usize,
    /// The users' embeddings as an .npy matrix; the table's own column if not given.
    #[arg(long, requires = "user_ids")]
    user_embeddings: Option<String>,
    /// The ids of the matrix's rows, one a line.
    #[arg(long)]
    user_ids: Option<String>,
    /// Rows of padding at the matrix's start.
    #[arg(long, default_value_t = 0)]
    skip_rows: usize,
    /// The attributes that group items, in order.
    #[arg(long, value_delimiter = ',', default_value = "genres")]
    item_attributes: Vec<String>,
    /// Seed of everything that is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    #[serde(flatten)]
    load: LoadArgs,
}

/// How an engine is loaded.
#[derive(Debug, Clone, Args, Serialize)]
struct LoadArgs {
    /// Precision: f32, f16 or bf16.
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    dtype: DTypeOption,
    /// Quantise the linear layers while loading: q4k, q8_0, ….
    #[arg(long)]
    isq: Option<String>,
    /// cpu, cuda or cuda:INDEX.
    #[arg(long, default_value = "cpu")]
    device: DeviceOption,
    /// Threads of a forward on the CPU; one per core if not given.
    #[arg(long)]
    threads: Option<usize>,
}

impl LoadArgs {
    fn options(&self, path: PathBuf) -> EngineOptions {
        let Self { dtype, isq, device, threads } = self.clone();
        EngineOptions { path, drafts: None, dtype, isq, device, threads, cache_mb: None }
    }
}

/// `laser-bench sweep`.
#[derive(Debug, Clone, Args)]
struct SweepArgs {
    #[command(flatten)]
    setup: SetupArgs,
    /// Pool sizes to try, in texts, each with --nodes drafted tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 100, 200, 500])]
    sizes: Vec<usize>,
    /// Tree sizes to try, in drafted tokens, each with pools of --pool-texts.
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8, 12, 16, 24, 32])]
    trees: Vec<usize>,
}

/// `laser-bench batch`.
#[derive(Debug, Clone, Args)]
struct BatchArgs {
    #[command(flatten)]
    setup: SetupArgs,
    /// Batch sizes to try.
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 2, 4, 8, 16, 32, 64],
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    batches: Vec<u16>,
    /// Tree sizes to try, in drafted tokens; the adaptive trees have as many as the largest at most.
    #[arg(long, value_delimiter = ',', default_values_t = [16, 32, 64])]
    trees: Vec<usize>,
}

/// `laser-bench precision`.
#[derive(Debug, Clone, Args, Serialize)]
struct PrecisionArgs {
    #[command(flatten)]
    #[serde(flatten)]
    setup: SetupArgs,
    /// Precisions to compare with f32: bf16, f16, or a quantisation.
    #[arg(long, value_delimiter = ',', default_values_t = ["bf16", "q8_0"].map(String::from))]
    precisions: Vec<String>,
}

/// `laser-bench replay`.
#[derive(Debug, Clone, Args, Serialize)]
struct ReplayArgs {
    /// Files of texts (.jsonl or .parquet with id and text), or outputs of Laser.
    #[arg(required = true)]
    texts: Vec<String>,
    /// A tokenizer.json; that of --model if not given.
    #[arg(long, required_unless_present_any = ["model", "train_tokenizer"])]
    tokenizer: Option<PathBuf>,
    /// Train a byte-level BPE of this many tokens on the texts that are not held out, and write it to --output.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["model", "tokenizer"])]
    train_tokenizer: Option<usize>,
    /// A model, for its tokenizer.
    #[arg(long)]
    model: Option<String>,
    /// Share of the texts that is replayed; the others are for the pools.
    #[arg(long, default_value_t = 0.05)]
    held_out: f64,
    /// Texts of each file that are replayed, at most.
    #[arg(long, default_value_t = 200)]
    held_out_texts: usize,
    /// Tree sizes, in drafted tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [16, 32, 64])]
    nodes: Vec<usize>,
    /// Pool sizes, in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [100_000, 1_000_000])]
    pool_tokens: Vec<usize>,
    /// Numbers of threads that draft from the largest pool with the largest tree at the same time.
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 2, 8],
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    threads: Vec<u16>,
    /// Seed of what is held out and what the pools hold.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the figures are written.
    #[arg(long, default_value = "output/bench")]
    output: PathBuf,
}

/// The rule that drafts from pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DraftRule {
    /// The tree of the largest sum of estimated path probabilities.
    Blended,
    /// The paper's: the most frequent nodes below the longest match (3.3).
    RawFrequency,
}

impl DraftRule {
    fn drafter(self) -> Drafter {
        match self {
            Self::Blended => Drafter::default(),
            Self::RawFrequency => Drafter::RawFrequency { max_ngram: ORDER },
        }
    }
}

fn parse_chat(name: &str) -> Result<Chat, String> {
    serde_json::from_value(name.into()).map_err(|_| "expected true, false or auto".to_owned())
}

fn parse_dtype(name: &str) -> Result<DTypeOption, String> {
    serde_json::from_value(name.into()).map_err(|_| "expected f32, f16 or bf16".to_owned())
}

/// The exit code of a measurement that failed.
const FAILED: u8 = 65;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("error,laser=warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// Runs the measurement, prints its tables and writes its figures.
async fn run(cli: Cli) -> Result<()> {
    let style = if cli.markdown { Style::Markdown } else { Style::Text };
    match *cli.command {
        Command::Paper(setup) => finish(&paper::paper(&setup).await?, &setup.output, style),
        Command::Ablation(setup) => finish(&paper::ablation(&setup).await?, &setup.output, style),
        Command::Sweep(sweep) => {
            let report = paper::sweep(&sweep.setup, &sweep.sizes, &sweep.trees).await?;
            finish(&report, &sweep.setup.output, style)
        }
        Command::Batch(batch) => {
            let report = paper::batch(&batch.setup, &batch.batches, &batch.trees).await?;
            finish(&report, &batch.setup.output, style)
        }
        Command::Compare(args) => finish(&paper::sources(&args).await?, &args.setup.output, style),
        Command::Lossless(options) => {
            let report = lossless::run(&options).await?;
            write_and_print(&options.setup.output.join("lossless.json"), &report, &report.render(style))
        }
        Command::Lists(options) => {
            let report = lists::run(&options).await?;
            write_and_print(&options.output.join("lists.json"), &report, &report.render(style))
        }
        Command::Replay(options) => {
            let report = replay::replay(&options).await?;
            write_and_print(&options.output.join("replay.json"), &report, &report.render(style))
        }
        Command::Engine(options) => {
            let report = engine::run(&options)?;
            write_and_print(&options.output.join("engine.json"), &report, &report.render(style))
        }
        Command::Precision(options) => {
            let report = precision::run(&options).await?;
            write_and_print(&options.setup.output.join("precision.json"), &report, &report.render(style))
        }
        Command::Pad(options) => {
            let parameters = pad::pad(&options)?;
            let count = parameters as f64 / 1e6;
            print(&format!("{}: {count:.1}M parameters\n", options.output.display()))
        }
        // One of several coordinators, whose figures the command that started it reads.
        Command::Plan(options) if options.into.is_some() => print(&serde_json::to_string(&plan::run(&options).await?)?),
        Command::Plan(options) => {
            let report = plan::run(&options).await?;
            write_and_print(&options.output.join("plan.json"), &report, &report.render(style))
        }
        Command::Queue(options) => {
            let report = queue::run(&options).await?;
            write_and_print(&options.output.join("queue.json"), &report, &report.render(style))
        }
        Command::Publish(options) => {
            let report = publish::run(&options).await?;
            write_and_print(&options.output.join("publish.json"), &report, &report.render(style))
        }
        Command::Look(options) => {
            let report = look::run(&options).await?;
            write_and_print(&options.output.join("look.json"), &report, &report.render(style))
        }
    }
}

fn finish(report: &Report, output: &Path, style: Style) -> Result<()> {
    for (name, chart) in report.charts() {
        write_file(&output.join(name), chart.svg()?)?;
    }
    write_and_print(&output.join(report.file_name()), report, &report.render(style)?)
}

/// Keeps the figures as JSON and shows their table.
fn write_and_print(path: &Path, report: &impl Serialize, table: &str) -> Result<()> {
    write_file(path, serde_json::to_vec_pretty(report)?)?;
    print(table)
}

/// The processor's name where the system tells it, and the threads of this process.
fn machine() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    format!("{}, {threads} threads", name.map_or(std::env::consts::ARCH, |(_, name)| name.trim()))
}

/// An empty place for files.
fn remove_old(dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    Ok(())
}

fn write_file(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    std::fs::create_dir_all(path.parent().unwrap_or(path))
        .and_then(|()| std::fs::write(path, content))
        .with_context(|| format!("{}: cannot be written", path.display()))
}
