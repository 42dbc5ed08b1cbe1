//! `laser-bench engine`: what a forward costs by its number of tokens, against one token and against how fast the
//! machine reads memory.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_engine::{DTypeOption, Engine, EngineInfo};
use laser_schema::DeviceOption;
use laser_terminal::{Style, Table};
use laser_worker::cost::Probe;
use rayon::prelude::*;
use serde::Serialize;

use super::LoadArgs;
use super::machine;

/// Words that are read to measure memory: 512 MiB, many times the caches.
const READ_WORDS: usize = 1 << 26;

/// How often memory is read: not in every round, since it empties the caches.
const READS: usize = 10;

/// `laser-bench engine`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct EngineArgs {
    /// The model: a directory or a .gguf file.
    #[arg(long)]
    model: PathBuf,
    /// Tokens of a forward, each measured in every round.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128])]
    tokens: Vec<usize>,
    /// Tokens that are cached before.
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// Sequences among which the tokens are divided.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// How often each is measured, in turns.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    #[command(flatten)]
    #[serde(flatten)]
    load: LoadArgs,
    /// Where the figures are written.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct EngineReport {
    options: EngineArgs,
    machine: String,
    threads: usize,
    architecture: String,
    parameters: u64,
    load_seconds: f64,
    /// Bytes a second that as many threads together read from memory; the greatest of all rounds.
    read_bandwidth: f64,
    forwards: Vec<Forward>,
}

/// Forwards of one size.
#[derive(Debug, Serialize)]
struct Forward {
    tokens: usize,
    least_seconds: f64,
    median_seconds: f64,
    /// Median against that of the first size.
    against_first: f64,
    /// What the cached context adds: median of the differences in each round.
    attention_seconds: f64,
    /// What scoring the tokens adds, in the same way: the last layer's MLP, which only scored tokens need, the
    /// unembedding, and the search for the most probable tokens.
    scoring_seconds: f64,
    /// Bytes of weights a second, by the median.
    weight_bandwidth: Option<f64>,
}

/// Measures forwards in rounds, and between some of them the machine's reads.
pub(super) fn run(options: &EngineArgs) -> Result<EngineReport> {
    ensure!(options.batch > 0 && options.rounds > 0, "--batch and --rounds: at least 1");
    let start = Instant::now();
    let mut engine = laser_engine::load(&options.load.options(options.model.clone()))
        .with_context(|| format!("--model {}", options.model.display()))?;
    let load_seconds = start.elapsed().as_secs_f64();
    let probe = probe(engine.as_mut(), options, options.context)?;
    let bare = self::probe(engine.as_mut(), options, 0)?;
    let mut times = vec![Times::default(); options.tokens.len()];
    let mut read_seconds = f64::INFINITY;
    let memory = vec![1_u64; READ_WORDS];
    // As many threads as the engine has, or as many as there are.
    let readers = rayon::ThreadPoolBuilder::new().num_threads(options.load.threads.unwrap_or(0)).build()?;
    let reads = options.rounds.div_ceil(READS);
    for round in 0..options.rounds {
        if round % reads == 0 {
            read_seconds = read_seconds.min(readers.install(|| read(&memory)));
        }
        for (tokens, times) in options.tokens.iter().zip(&mut times) {
            let seconds = probe.forward(engine.as_mut(), *tokens)?;
            times.whole.push(seconds);
            times.attention.push(seconds - bare.forward(engine.as_mut(), *tokens)?);
            times.scoring.push(seconds - probe.unscored(engine.as_mut(), *tokens)?);
        }
    }
    let first = median(&mut times[0].whole);
    let info = engine.info();
    let forwards = options.tokens.iter().zip(&mut times);
    let forwards = forwards.map(|(&tokens, times)| {
        let median_seconds = median(&mut times.whole);
        Forward {
            tokens,
            least_seconds: times.whole[0],
            median_seconds,
            attention_seconds: median(&mut times.attention),
            scoring_seconds: median(&mut times.scoring),
            against_first: median_seconds / first,
            weight_bandwidth: weight_bytes(info, options).map(|bytes| bytes / median_seconds),
        }
    });
    Ok(EngineReport {
        machine: machine(),
        threads: readers.current_num_threads(),
        architecture: info.architecture.clone(),
        parameters: info.parameters,
        load_seconds,
        read_bandwidth: (READ_WORDS * size_of::<u64>()) as f64 / read_seconds,
        forwards: forwards.collect(),
        options: options.clone(),
    })
}

/// Seconds of forwards of one size, in each round.
#[derive(Debug, Clone, Default)]
struct Times {
    whole: Vec<f64>,
    attention: Vec<f64>,
    scoring: Vec<f64>,
}

/// Bytes of the weights that a forward multiplies with; unknown where a library of kernels quantises them.
fn weight_bytes(info: &EngineInfo, options: &EngineArgs) -> Option<f64> {
    let bytes = match (options.load.isq.as_deref(), options.load.dtype) {
        // 32 weights and the f32 scale that they share.
        (Some("q8_0"), _) if options.load.device == DeviceOption::Cpu => 36.0 / 32.0,
        (Some(_), _) => return None,
        (None, DTypeOption::F32) => 4.0,
        (None, DTypeOption::F16 | DTypeOption::Bf16) => 2.0,
    };
    options.model.is_dir().then_some(info.forward_parameters as f64 * bytes)
}

/// Sequences with so many tokens cached and room for the largest forward.
fn probe(engine: &mut dyn Engine, options: &EngineArgs, context: usize) -> Result<Probe> {
    let most = options.tokens.iter().max().copied().unwrap_or_default();
    ensure!(most > 0, "--tokens: at least one number above 0");
    let capacity = context + most.div_ceil(options.batch);
    let limit = engine.info().max_positions;
    ensure!(capacity <= limit, "--context and --tokens: {capacity} positions, but the model has {limit}");
    let capacities = std::iter::repeat_n(capacity, options.batch);
    let probe = Probe::open(engine, capacities, context)?;
    let (opened, batch) = (probe.sequences(), options.batch);
    ensure!(opened == batch, "--batch {batch}: the device has memory for the keys and values of {opened} sequences");
    Ok(probe)
}

/// Seconds in which all threads of the pool together read the memory once.
fn read(memory: &[u64]) -> f64 {
    let start = Instant::now();
    let share = memory.len().div_ceil(rayon::current_num_threads());
    let sum = memory
        .par_chunks(share)
        .map(|words| words.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)))
        .reduce(|| 0, u64::wrapping_add);
    std::hint::black_box(sum);
    start.elapsed().as_secs_f64()
}

/// Sorts, and returns the middle.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl EngineReport {
    /// As a table.
    pub(super) fn render(&self, style: Style) -> String {
        let mut table = Table::new(&[
            "tokens", "median ms", "least ms", "against first", "attention ms", "scoring ms", "weights GB/s",
            "of reads",
        ]);
        for forward in &self.forwards {
            let or_dash = |value: Option<String>| value.unwrap_or_else(|| "–".to_owned());
            let bandwidth = forward.weight_bandwidth;
            // Of reads of the host's memory.
            let of_reads = bandwidth.filter(|_| self.options.load.device == DeviceOption::Cpu);
            table.push(vec![
                forward.tokens.to_string(),
                format!("{:.3}", 1e3 * forward.median_seconds),
                format!("{:.3}", 1e3 * forward.least_seconds),
                format!("{:.2}", forward.against_first),
                format!("{:.3}", 1e3 * forward.attention_seconds),
                format!("{:.3}", 1e3 * forward.scoring_seconds),
                or_dash(bandwidth.map(|b| format!("{:.1}", b / 1e9))),
                or_dash(of_reads.map(|b| format!("{:.0} %", 100.0 * b / self.read_bandwidth))),
            ]);
        }
        format!(
            "{}, {:.1}M parameters, {} on {}, {} threads ({}); context {}, {} sequences; memory is read at {:.1} GB/s; \
             loaded in {:.2} s\n\n{}",
            self.architecture,
            self.parameters as f64 / 1e6,
            self.options.load.isq.clone().unwrap_or_else(|| self.options.load.dtype.to_string()),
            self.options.load.device,
            self.threads,
            self.machine,
            self.options.context,
            self.options.batch,
            self.read_bandwidth / 1e9,
            self.load_seconds,
            table.render(style)
        )
    }
}
