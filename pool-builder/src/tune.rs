//! `laser pools tune`: finds the fastest pool size.
//!
//! Each group's previous texts are split at random into held-out texts and candidates for the pool. The held-out texts
//! are replayed against pools of growing size. A larger pool accepts more and takes longer to draft from; the estimated
//! speed, tokens per step / (step cost + draft time), weighs the two. It needs no model, only the cost of a forward
//! ([`TuneConfig::step_us`]).

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use futures::Stream;
use laser_decode::{Drafter, Pool, Token, build_pool};
use laser_schema::{EntityTable, Kind};
use laser_store::previous::PreviousText;
use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::config::PoolsConfig;
use crate::error::PoolsError;
use crate::fit::FittedKind;
use crate::grouped::group;
use crate::replay::{ReplayReport, ReplayText, replay};
use crate::texts::{self, PoolTokenizer, ReadError, SampledKind};

/// The smallest size within this share of the fastest is chosen: measured draft times vary by as much.
const SPEED_TOLERANCE: f64 = 0.01;

/// A group whose texts do not fill the largest pool holds out at most one text in this many.
const HELD_OUT_SHARE: usize = 5;

/// The sizes to try, and the cost of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TuneConfig {
    /// Pool sizes in texts, in ascending order.
    pub sizes: Vec<usize>,
    /// Most texts per group that are held out and replayed.
    pub held_out: usize,
    /// Drafted tokens per step.
    pub nodes: usize,
    /// Duration of a forward of `nodes` + 1 tokens, in microseconds.
    pub step_us: f64,
}

impl Default for TuneConfig {
    /// The sizes around the paper's 500 to 5000, and a forward of 20 ms.
    fn default() -> Self {
        let sizes = vec![100, 200, 500, 1000, 2000, 5000];
        Self { sizes, held_out: 50, nodes: 16, step_us: 20_000.0 }
    }
}

impl TuneConfig {
    fn validate(&self) -> Result<(), PoolsError> {
        let rising = self.sizes.is_sorted_by(|a, b| a < b) && self.sizes.first() > Some(&0);
        let checks = [
            ("sizes", "rising numbers from 1", rising, format!("{:?}", self.sizes)),
            ("held_out", "at least 1", self.held_out > 0, self.held_out.to_string()),
            ("nodes", "at least 1", self.nodes > 0, self.nodes.to_string()),
            ("step_us", "a number above 0", self.step_us > 0.0, self.step_us.to_string()),
        ];
        for (option, expected, valid, found) in checks {
            if !valid {
                return Err(refused(option, expected, &found));
            }
        }
        Ok(())
    }
}

fn refused(option: &str, expected: &str, found: &str) -> PoolsError {
    PoolsError::Input(format!("pools tune: {option} must be {expected}, got {found}"))
}

/// The result of tuning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TuneReport {
    /// The configuration tried.
    pub config: TuneConfig,
    /// Results per kind; a kind in which no group has enough texts is left out.
    pub kinds: Vec<KindTuning>,
}

/// One kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindTuning {
    /// The kind.
    pub kind: Kind,
    /// The proposed value of `max_texts`.
    pub max_texts: usize,
    /// Results per size, all groups together.
    pub rows: Vec<TuneRow>,
    /// Results per group.
    pub groups: Vec<GroupTuning>,
}

/// One group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupTuning {
    /// The group's name.
    pub name: String,
    /// The fastest size for the group.
    pub max_texts: usize,
    /// Results per size, up to the first that takes all texts of the group.
    pub rows: Vec<TuneRow>,
}

/// One pool size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TuneRow {
    /// The size asked for, in texts.
    pub max_texts: usize,
    /// Number of texts in the pools.
    pub pool_texts: usize,
    /// Number of tokens in the pools.
    pub pool_tokens: usize,
    /// Number of texts held out and replayed.
    pub held_out: u64,
    /// Accepted draft tokens per step.
    pub accepted_per_step: f64,
    /// Mean draft time in microseconds.
    pub draft_us: f64,
    /// Estimated tokens per second.
    pub tokens_per_second: f64,
}

/// Groups the entities as a build does, then replays held-out `previous` texts against pools of each size.
///
/// # Errors
/// The errors of a build, invalid options, or no group with five texts.
pub async fn tune<P>(
    tables: &[EntityTable],
    previous: P,
    tokenizer: PoolTokenizer<'_>,
    (config, memory): (&PoolsConfig, usize),
    tune: &TuneConfig,
    drafter: Drafter,
    progress: Progress<'_>,
) -> Result<TuneReport, PoolsError>
where
    P: Stream<Item = Result<Vec<PreviousText>, ReadError>>,
{
    tune.validate()?;
    let largest = tune.sizes.last().copied().unwrap_or(0);
    let capacity = |_| largest + tune.held_out;
    let grouped = group(tables, previous, config, memory, capacity, progress).await?;
    let tokens = texts::tokenise(&grouped.samples, tokenizer.tokenizer, progress)?;
    let mut tuner = Tuner { tokenizer, tune, drafter, tokens: &tokens, done: 0, progress };
    let kinds = tuner.kinds(&grouped.kinds, &grouped.samples)?;
    if kinds.is_empty() {
        return Err(refused("previous texts", "at least 5 of one group", &format!("{} in all", tokens.len())));
    }
    Ok(TuneReport { config: tune.clone(), kinds })
}

struct Tuner<'a> {
    tokenizer: PoolTokenizer<'a>,
    tune: &'a TuneConfig,
    drafter: Drafter,
    tokens: &'a HashMap<u128, Vec<Token>>,
    done: u64,
    progress: Progress<'a>,
}

/// A replay against one pool.
#[derive(Clone, Copy, Default)]
struct Measured {
    pool_texts: usize,
    pool_tokens: usize,
    report: ReplayReport,
}

impl Tuner<'_> {
    fn kinds(
        &mut self,
        kinds: &BTreeMap<Kind, FittedKind>,
        samples: &BTreeMap<Kind, SampledKind>,
    ) -> Result<Vec<KindTuning>, PoolsError> {
        let mut tuned = Vec::new();
        for (&kind, fitted) in kinds {
            let mut groups = Vec::new();
            for (index, group) in fitted.router.groups().iter().enumerate() {
                let measured = self.group(&group.name, samples[&kind].tokens(index, self.tokens))?;
                if !measured.is_empty() {
                    groups.push((group.name.clone(), measured));
                }
            }
            if !groups.is_empty() {
                tuned.push(self.summary(kind, groups));
            }
        }
        Ok(tuned)
    }

    /// Returns the results per size, up to the first that takes all texts; nothing if there are too few. Texts come in
    /// the order of their sample, which is random.
    fn group(&mut self, name: &str, texts: Vec<Vec<Token>>) -> Result<Vec<Measured>, PoolsError> {
        let largest = self.tune.sizes.last().copied().unwrap_or(0);
        let spare = texts.len().saturating_sub(largest);
        let held_out = self.tune.held_out.min(spare.max(texts.len() / HELD_OUT_SHARE));
        let mut measured = Vec::new();
        if held_out == 0 {
            return Ok(measured);
        }
        let replayed = texts[..held_out].iter().cloned();
        let replayed: Vec<ReplayText> = replayed.map(|text| ReplayText { text, ..Default::default() }).collect();
        let candidates = &texts[held_out..];
        for &size in &self.tune.sizes {
            let of = &candidates[..size.min(candidates.len())];
            let pool = Pool::open(Bytes::from(build_pool(&self.tokenizer.pool_meta(name), of)?))?;
            let (nodes, end) = (self.tune.nodes, self.tokenizer.end_of_text);
            measured.push(Measured {
                pool_texts: pool.texts(),
                pool_tokens: pool.tokens(),
                report: replay(&replayed, Some(&pool), self.drafter, nodes, end),
            });
            self.done += 1;
            (self.progress)(self.done, None, "replaying");
            if size >= candidates.len() {
                break;
            }
        }
        Ok(measured)
    }

    fn summary(&self, kind: Kind, groups: Vec<(String, Vec<Measured>)>) -> KindTuning {
        let sizes = groups.iter().map(|(_, measured)| measured.len()).max().unwrap_or(0);
        let total = |size: usize| {
            let of_size = groups.iter().filter_map(|(_, m)| m.get(size).or(m.last()));
            of_size.fold(Measured::default(), |sum, &m| sum.add(m))
        };
        let rows = self.rows(&(0..sizes).map(total).collect::<Vec<_>>());
        let groups = groups.into_iter().map(|(name, measured)| {
            let rows = self.rows(&measured);
            GroupTuning { name, max_texts: fastest(&rows), rows }
        });
        KindTuning { kind, max_texts: fastest(&rows), groups: groups.collect(), rows }
    }

    fn rows(&self, measured: &[Measured]) -> Vec<TuneRow> {
        let row = |(&max_texts, m): (&usize, &Measured)| TuneRow {
            max_texts,
            pool_texts: m.pool_texts,
            pool_tokens: m.pool_tokens,
            held_out: m.report.texts,
            accepted_per_step: m.report.accepted_per_step(),
            draft_us: m.report.draft_us_mean,
            tokens_per_second: m.report.tokens_per_second(self.tune.step_us),
        };
        self.tune.sizes.iter().zip(measured).map(row).collect()
    }
}

impl Measured {
    /// Adds two replays. Percentiles do not add up and are left out.
    fn add(self, other: Self) -> Self {
        let (a, b) = (self.report, other.report);
        let steps = a.steps + b.steps;
        let draft_us = a.draft_us_mean * a.steps as f64 + b.draft_us_mean * b.steps as f64;
        Self {
            pool_texts: self.pool_texts + other.pool_texts,
            pool_tokens: self.pool_tokens + other.pool_tokens,
            report: ReplayReport {
                texts: a.texts + b.texts,
                steps,
                tokens: a.tokens + b.tokens,
                drafted: a.drafted + b.drafted,
                accepted: a.accepted + b.accepted,
                draft_us_mean: draft_us / steps.max(1) as f64,
                ..Default::default()
            },
        }
    }
}

/// Returns the smallest size whose speed is within the tolerance of the best.
fn fastest(rows: &[TuneRow]) -> usize {
    let best = rows.iter().map(|row| row.tokens_per_second).fold(0.0, f64::max);
    let enough = |row: &&TuneRow| row.tokens_per_second >= best * (1.0 - SPEED_TOLERANCE);
    rows.iter().find(enough).map_or(0, |row| row.max_texts)
}
