//! `laser bench engine`: what a forward costs by its number of tokens, against one token and against how fast the
//! machine reads memory.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_decode::ROOT_PARENT;
use laser_worker::engine::{
    DTypeOption, DeviceOption, Engine, EngineInfo, EngineOptions, Segment, Slot, TreeEngine,
};
use rayon::prelude::*;
use serde::Serialize;

use super::parse_dtype;
use super::report::{Style, Table, machine};

/// Words that are read to measure memory: 512 MiB, many times the caches.
const READ_WORDS: usize = 1 << 26;

/// How often memory is read: not in every round, since it empties the caches.
const READS: usize = 10;

/// `laser bench engine`.
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
    /// Precision: f32, f16 or bf16.
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    dtype: DTypeOption,
    /// Quantise the linear layers while loading: q4k, q8_0, ….
    #[arg(long)]
    isq: Option<String>,
    /// cpu, cuda or cuda:INDEX.
    #[arg(long, default_value = "cpu")]
    device: DeviceOption,
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
    /// Bytes a second that all threads together read from memory; the greatest of all rounds.
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
    /// Bytes of weights a second, by the median.
    weight_bandwidth: Option<f64>,
}

/// Measures forwards in rounds, and between some of them the machine's reads.
pub(super) fn run(options: &EngineArgs) -> Result<EngineReport> {
    ensure!(
        options.batch > 0 && options.rounds > 0,
        "--batch and --rounds: at least 1"
    );
    let start = Instant::now();
    let mut engine = TreeEngine::load(&EngineOptions {
        dtype: options.dtype,
        isq: options.isq.clone(),
        device: options.device,
        ..EngineOptions::new(options.model.clone())
    })
    .with_context(|| format!("--model {}", options.model.display()))?;
    let load_seconds = start.elapsed().as_secs_f64();
    let slots = fill(&mut engine, options)?;
    let mut times = vec![Vec::new(); options.tokens.len()];
    let mut read_seconds = f64::INFINITY;
    let memory = vec![1_u64; READ_WORDS];
    let reads = options.rounds.div_ceil(READS);
    for round in 0..options.rounds {
        if round % reads == 0 {
            read_seconds = read_seconds.min(read(&memory));
        }
        for (tokens, times) in options.tokens.iter().zip(&mut times) {
            times.push(forward(&mut engine, &slots, *tokens)?);
        }
    }
    let first = median(&mut times[0]);
    let info = engine.info();
    let forwards = options.tokens.iter().zip(&mut times);
    let forwards = forwards.map(|(&tokens, times)| {
        let median_seconds = median(times);
        Forward {
            tokens,
            least_seconds: times[0],
            median_seconds,
            against_first: median_seconds / first,
            weight_bandwidth: weight_bytes(info, options).map(|bytes| bytes / median_seconds),
        }
    });
    Ok(EngineReport {
        machine: machine(),
        threads: rayon::current_num_threads(),
        architecture: info.architecture.clone(),
        parameters: info.parameters,
        load_seconds,
        read_bandwidth: (READ_WORDS * size_of::<u64>()) as f64 / read_seconds,
        forwards: forwards.collect(),
        options: options.clone(),
    })
}

/// Bytes of the weights that a forward multiplies with; unknown where they are quantised.
fn weight_bytes(info: &EngineInfo, options: &EngineArgs) -> Option<f64> {
    let bytes = match options.dtype {
        DTypeOption::F32 => 4,
        DTypeOption::F16 | DTypeOption::Bf16 => 2,
    };
    let dense = options.isq.is_none() && options.model.is_dir();
    dense.then_some((info.forward_parameters * bytes) as f64)
}

/// Sequences with the context cached.
fn fill(engine: &mut TreeEngine, options: &EngineArgs) -> Result<Vec<Slot>> {
    let most = options.tokens.iter().max().copied().unwrap_or_default();
    ensure!(most > 0, "--tokens: at least one number above 0");
    let capacity = options.context + most.div_ceil(options.batch);
    let limit = engine.info().max_positions;
    ensure!(
        capacity <= limit,
        "--context and --tokens: {capacity} positions, but the model has {limit}"
    );
    let mut slots = Vec::new();
    for _ in 0..options.batch {
        let slot = engine.open(capacity)?;
        if options.context > 0 {
            step(engine, &[(slot, options.context)], false)?;
            engine.commit(slot, &(0..options.context).collect::<Vec<_>>())?;
        }
        slots.push(slot);
    }
    Ok(slots)
}

/// Seconds of a forward of `tokens`, divided among the sequences; nothing of it is kept.
fn forward(engine: &mut TreeEngine, slots: &[Slot], tokens: usize) -> Result<f64> {
    let used = slots.len().min(tokens);
    let share = |index: usize| tokens * (index + 1) / used - tokens * index / used;
    let shares: Vec<(Slot, usize)> = (slots.iter().copied().enumerate().take(used))
        .map(|(index, slot)| (slot, share(index)))
        .collect();
    let start = Instant::now();
    step(engine, &shares, true)?;
    let seconds = start.elapsed().as_secs_f64();
    for (slot, _) in shares {
        engine.commit(slot, &[])?;
    }
    Ok(seconds)
}

/// A forward over chains of tokens, scored as trees are, or not at all.
fn step(engine: &mut TreeEngine, shares: &[(Slot, usize)], scored: bool) -> Result<()> {
    let vocabulary = u32::try_from(engine.info().vocab_size).unwrap_or(u32::MAX);
    let most = shares.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
    let tokens: Vec<u32> = (0..)
        .map(|i: u32| (i * 37) % vocabulary)
        .take(most)
        .collect();
    let parents: Vec<u32> = std::iter::once(ROOT_PARENT).chain(0..).take(most).collect();
    let segments: Vec<Segment<'_>> = (shares.iter())
        .map(|&(slot, count)| Segment {
            slot,
            tokens: &tokens[..count],
            parents: &parents[..count],
            scored_from: if scored { 0 } else { count },
        })
        .collect();
    engine.step(&segments, 2)?;
    Ok(())
}

/// Seconds in which all threads together read the memory once.
fn read(memory: &[u64]) -> f64 {
    let start = Instant::now();
    let share = memory.len().div_ceil(rayon::current_num_threads());
    let sum = memory
        .par_chunks(share)
        .map(|words| {
            words
                .iter()
                .fold(0_u64, |sum, word| sum.wrapping_add(*word))
        })
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
            "tokens",
            "median ms",
            "least ms",
            "against first",
            "weights GB/s",
            "of reads",
        ]);
        for forward in &self.forwards {
            let or_dash = |value: Option<String>| value.unwrap_or_else(|| "–".to_owned());
            let bandwidth = forward.weight_bandwidth;
            table.push(vec![
                forward.tokens.to_string(),
                format!("{:.3}", 1e3 * forward.median_seconds),
                format!("{:.3}", 1e3 * forward.least_seconds),
                format!("{:.2}", forward.against_first),
                or_dash(bandwidth.map(|b| format!("{:.1}", b / 1e9))),
                or_dash(bandwidth.map(|b| format!("{:.0} %", 100.0 * b / self.read_bandwidth))),
            ]);
        }
        format!(
            "{}, {:.1}M parameters, {} on {}, {} threads ({}); context {}, {} sequences; memory is read at {:.1} GB/s; \
             loaded in {:.2} s\n\n{}",
            self.architecture,
            self.parameters as f64 / 1e6,
            self.options.dtype,
            self.options.device,
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
