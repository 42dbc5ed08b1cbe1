//! Replay: known texts play the model's strict output, so drafting is measured without one.
//!
//! The texts of all files are split by a seeded hash of their id: a share is held out and replayed, the others
//! are shuffled by the same means and fill pools of the sizes asked for. An end-of-text token beyond the
//! vocabulary stands for the model's, so any tokenizer will do. Acceptance is exact; times are those of one thread.

use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use jiff::civil::Date;
use laser_decode::{Drafter, Pool, PoolMeta, Token, build_pool};
use laser_model::Tokenizer;
use laser_night::{Progress, open_local_model};
use laser_pool_builder::{RELIABILITY_BINS, ReplayReport, ReplayText, replay as replay_texts};
use laser_schema::layout::DataSet;
use laser_schema::{EntityId, Kind};
use laser_store::previous::{PreviousReader, PreviousSource, PreviousText};
use laser_terminal::{Display, Style, Table};
use serde::Serialize;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::history::hash;
use super::machine;
use super::{DraftRule, ORDER, ReplayArgs};

/// What a replay measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: String,
    options: ReplayArgs,
    pools: Vec<PoolRow>,
    pub(super) rows: Vec<Row>,
    threads: Vec<ThreadsRow>,
}

/// Several threads on one pool, each with all texts.
#[derive(Debug, Serialize)]
struct ThreadsRow {
    threads: u16,
    drafts_per_second: f64,
    /// The median draft of the slowest thread, in microseconds.
    draft_us_p50: f64,
}

/// One pool.
#[derive(Debug, Serialize)]
struct PoolRow {
    tokens: usize,
    texts: usize,
    build_tokens_per_second: f64,
    bytes_per_token: f64,
}

/// One drafter on one pool with one tree size, over the held-out texts of one file or of all.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) texts_of: String,
    pub(super) drafter: &'static str,
    pool_tokens: usize,
    nodes: usize,
    pub(super) accepted_per_step: f64,
    tokens_per_step: f64,
    #[serde(flatten)]
    report: ReplayReport,
}

/// The texts of one file.
struct Corpus {
    name: String,
    held_out: Vec<ReplayText>,
}

/// Texts for pools, in the order in which pools take them.
type PoolTexts = Vec<(u64, Vec<Token>)>;

/// Replays held-out texts with every drafter, pool size and tree size.
pub(super) async fn replay(options: &ReplayArgs) -> Result<Report> {
    ensure!(
        options.held_out > 0.0 && options.held_out < 1.0,
        "--held-out {}: expected a share between 0 and 1",
        options.held_out
    );
    let mut display = Display::new();
    display.stage("reading");
    let tokenizer = open_tokenizer(options).await?;
    let (mut corpora, mut texts) = (Vec::new(), PoolTexts::new());
    for path in &options.texts {
        corpora.push(read(path, options, &tokenizer, &mut texts).await?);
    }
    texts.sort_unstable();
    let held_out: usize = corpora.iter().map(|corpus| corpus.held_out.len()).sum();
    ensure!(held_out > 0, "no text is held out; raise --held-out");
    display.finish_with(&format!("{held_out} texts held out, {} for pools", texts.len()));
    if corpora.len() > 1 {
        let all = corpora.iter().flat_map(|corpus| corpus.held_out.clone()).collect();
        corpora.push(Corpus { name: "all".into(), held_out: all });
    }
    let mut report = Report {
        machine: machine(),
        options: options.clone(),
        pools: Vec::new(),
        rows: Vec::new(),
        threads: Vec::new(),
    };
    display.stage("replaying");
    let total = Some((options.pool_tokens.len() * options.nodes.len()) as u64);
    let (mut done, mut largest) = (0, None::<Pool>);
    for &size in &options.pool_tokens {
        let (pool, row) = build(size, &texts, &tokenizer)?;
        report.pools.push(row);
        if largest.as_ref().is_none_or(|largest| largest.tokens() < pool.tokens()) {
            largest = Some(pool.clone());
        }
        for &nodes in &options.nodes {
            report.rows.extend(measure(&corpora, &pool, nodes));
            done += 1;
            display.update(done, total, "pools × trees");
        }
    }
    if let Some((pool, corpus)) = largest.zip(corpora.last()) {
        let nodes = options.nodes.iter().max().copied().unwrap_or_default();
        report.threads = options.threads.iter().map(|&threads| together(corpus, &pool, nodes, threads)).collect();
    }
    Ok(report)
}

async fn open_tokenizer(options: &ReplayArgs) -> Result<Tokenizer> {
    match (&options.tokenizer, &options.model, options.train_tokenizer) {
        (Some(path), ..) => Ok(Tokenizer::open(path)?),
        (None, Some(model), _) => Ok(open_local_model(model).await?.tokenizer),
        (None, None, tokens) => train_tokenizer(options, tokens.unwrap_or_default()).await,
    }
}

/// Trains a byte-level BPE on the texts that pools may hold, and leaves it beside the figures.
async fn train_tokenizer(options: &ReplayArgs, tokens: usize) -> Result<Tokenizer> {
    let mut texts = Vec::new();
    for path in &options.texts {
        let mut reader = reader(path).await?;
        while let Some(file) = reader.next_batch().await? {
            texts.extend(file.into_iter().filter(|text| !is_held_out(options, &text.id)).map(|text| text.text));
        }
    }
    let bytes = ByteLevel::default().add_prefix_space(false);
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    let trainer = BpeTrainer::builder()
        .vocab_size(tokens)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect());
    let mut trainer = TrainerWrapper::from(trainer.build());
    let path = options.output.join("tokenizer.json");
    std::fs::create_dir_all(&options.output).with_context(|| options.output.display().to_string())?;
    let trained = tokenizer.train(&mut trainer, texts.iter()).and_then(|trained| trained.save(&path, false));
    trained.map_err(|error| anyhow!("{}: {error}", path.display()))?;
    Ok(Tokenizer::open(&path)?)
}

async fn reader(path: &str) -> Result<PreviousReader> {
    // A foreign file does not tell its kind, which plays no part here.
    let source = PreviousSource { path: path.to_owned(), kind: Some(Kind::User), id_type: None };
    Ok(PreviousReader::open(&[source], DataSet::Profiles, Date::MAX).await?)
}

fn is_held_out(options: &ReplayArgs, id: &EntityId) -> bool {
    (hash(options.seed, "held out", id) as f64 / u64::MAX as f64) < options.held_out
}

/// Reads one file and splits its texts: those held out come back, the others are added to `texts`.
async fn read(path: &str, options: &ReplayArgs, tokenizer: &Tokenizer, texts: &mut PoolTexts) -> Result<Corpus> {
    let mut reader = reader(path).await?;
    let mut held_out = Vec::new();
    while let Some(file) = reader.next_batch().await? {
        let contents: Vec<&str> = file.iter().map(|text| text.text.as_str()).collect();
        let tokens = tokenizer.encode_batch(&contents, false)?;
        for (PreviousText { id, .. }, tokens) in file.iter().zip(tokens) {
            let order = hash(options.seed, path, id);
            if !is_held_out(options, id) {
                texts.push((order, tokens));
            } else if !tokens.is_empty() {
                held_out.push((order, ReplayText { text: tokens, ..ReplayText::default() }));
            }
        }
    }
    held_out.sort_unstable_by_key(|(order, _)| *order);
    held_out.truncate(options.held_out_texts);
    let name = path.rsplit('/').next().unwrap_or(path).to_owned();
    Ok(Corpus { name, held_out: held_out.into_iter().map(|(_, text)| text).collect() })
}

/// A pool of the first texts that have `size` tokens together, or of all.
fn build(size: usize, texts: &PoolTexts, tokenizer: &Tokenizer) -> Result<(Pool, PoolRow)> {
    let end_of_text = u32::try_from(tokenizer.vocab_size())?;
    let mut left = size;
    let taken = texts.iter().map_while(|(_, tokens)| {
        left = left.checked_sub(tokens.len() + 1)?;
        Some(tokens.clone())
    });
    let taken: Vec<Vec<Token>> = taken.collect();
    let meta = PoolMeta {
        name: "replay".into(),
        tokenizer: tokenizer.fingerprint(),
        vocab_size: end_of_text + 1,
        end_of_text,
    };
    let start = Instant::now();
    let bytes = build_pool(&meta, taken).context("pool")?;
    let seconds = start.elapsed().as_secs_f64();
    let pool = Pool::open(bytes.into()).context("pool")?;
    let row = PoolRow {
        tokens: pool.tokens(),
        texts: pool.texts(),
        build_tokens_per_second: pool.tokens() as f64 / seconds,
        bytes_per_token: pool.size_bytes() as f64 / pool.tokens().max(1) as f64,
    };
    Ok((pool, row))
}

fn measure(corpora: &[Corpus], pool: &Pool, nodes: usize) -> Vec<Row> {
    let drafters = [
        ("blended", DraftRule::Blended.drafter()),
        ("raw-frequency", DraftRule::RawFrequency.drafter()),
        ("prompt-lookup", Drafter::PromptLookup { max_ngram: ORDER }),
    ];
    let of_corpus = |corpus: &Corpus| {
        drafters.map(|(name, drafter)| {
            let end_of_text = pool.meta().end_of_text;
            let report = replay_texts(&corpus.held_out, Some(pool), drafter, nodes, end_of_text);
            Row {
                texts_of: corpus.name.clone(),
                drafter: name,
                pool_tokens: pool.tokens(),
                nodes,
                accepted_per_step: report.accepted_per_step(),
                tokens_per_step: report.tokens_per_step(),
                report,
            }
        })
    };
    corpora.iter().flat_map(of_corpus).collect()
}

/// Replays the texts on several threads at the same time.
fn together(corpus: &Corpus, pool: &Pool, nodes: usize, threads: u16) -> ThreadsRow {
    let (drafter, end_of_text) = (DraftRule::Blended.drafter(), pool.meta().end_of_text);
    let work = || replay_texts(&corpus.held_out, Some(pool), drafter, nodes, end_of_text);
    let started = Instant::now();
    let reports: Vec<ReplayReport> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let steps: u64 = reports.iter().map(|report| report.steps).sum();
    ThreadsRow {
        threads,
        drafts_per_second: steps as f64 / started.elapsed().as_secs_f64(),
        draft_us_p50: reports.iter().map(|report| report.draft_us_p50).fold(0.0, f64::max),
    }
}

impl Report {
    /// The pools, then every replay, then the estimates, then several threads.
    pub(super) fn render(&self, style: Style) -> String {
        let mut pools = Table::new(&["pool", "texts", "build tokens/s", "bytes/token"]);
        for row in &self.pools {
            pools.push(vec![
                row.tokens.to_string(),
                row.texts.to_string(),
                format!("{:.1}M", row.build_tokens_per_second / 1e6),
                format!("{:.2}", row.bytes_per_token),
            ]);
        }
        let mut replays = Table::new(&[
            "texts", "held out", "drafter", "pool tokens", "nodes", "accepted/step", "tokens/step", "yield", "p50 µs",
            "p99 µs",
        ]);
        for row in &self.rows {
            let report = &row.report;
            replays.push(vec![
                row.texts_of.clone(),
                report.texts.to_string(),
                row.drafter.to_owned(),
                row.pool_tokens.to_string(),
                row.nodes.to_string(),
                format!("{:.2}", row.accepted_per_step),
                format!("{:.2}", row.tokens_per_step),
                format!("{:.1} %", 100.0 * report.accepted as f64 / report.drafted.max(1) as f64),
                format!("{:.0}", report.draft_us_p50),
                format!("{:.0}", report.draft_us_p99),
            ]);
        }
        format!(
            "{}\n\n{}{}\n{}\n{}",
            self.machine,
            pools.render(style),
            replays.render(style),
            self.reliability().render(style),
            self.threads().render(style),
        )
    }

    fn threads(&self) -> Table {
        let mut table = Table::new(&["threads on one pool", "drafts/s", "p50 µs"]);
        for row in &self.threads {
            table.push(vec![
                row.threads.to_string(),
                format!("{:.0}", row.drafts_per_second),
                format!("{:.0}", row.draft_us_p50),
            ]);
        }
        table
    }

    /// How right the estimates of the blended drafter are: on all texts, with the last pool and tree.
    fn reliability(&self) -> Table {
        let mut table = Table::new(&["estimate from", "drafted", "mean estimate", "accepted"]);
        let blended = self.rows.iter().rfind(|row| row.drafter == "blended");
        let bins = blended.map_or(&[][..], |row| &row.report.reliability);
        let mut from = 1.0;
        for (at, bin) in bins.iter().enumerate() {
            from = if at + 1 < RELIABILITY_BINS { from / 2.0 } else { 0.0 };
            if bin.drafted > 0 {
                table.push(vec![
                    format!("{from:.4}"),
                    bin.drafted.to_string(),
                    format!("{:.4}", bin.estimated / bin.drafted as f64),
                    format!("{:.4}", bin.accepted as f64 / bin.drafted as f64),
                ]);
            }
        }
        table
    }
}
