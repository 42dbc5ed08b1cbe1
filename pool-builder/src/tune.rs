//! `laser pools tune`: finds the fastest pool size, and whether groups pay.
//!
//! Each group's previous texts are split at random into held-out texts and candidates for the pool. The held-out texts
//! are replayed against pools of growing size. A larger pool accepts more and takes longer to draft from; the estimated
//! speed, tokens per step / (step cost + draft time), weighs the two. The same texts are also replayed against one pool
//! of all that the groups' pools hold together. It needs no model, only the cost of a forward
//! ([`TuneConfig::step_us`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use laser_decode::{Drafter, Pool, PoolText, build_pool};
use laser_schema::sample::Sample;
use laser_schema::{EntityTable, Kind};
use laser_store::previous::PreviousText;
use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::config::{Grouping, PoolsConfig};
use crate::error::PoolsError;
use crate::fit::FittedKind;
use crate::grouped::group;
use crate::pool_set::TextCounts;
use crate::replay::{ReplayReport, ReplayText, replay};
use crate::texts::{self, PoolTokenizer, ReadError, SampledKind, Written};

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
    /// The proposed value of `grouping`.
    pub grouping: Grouping,
    /// The proposed value of `max_texts`.
    pub max_texts: usize,
    /// Results per size, all groups together.
    pub rows: Vec<TuneRow>,
    /// Results of one pool of the texts of all groups' pools, per size of these; empty without groups.
    pub one_pool: Vec<TuneRow>,
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
    let TextCounts { read, empty, without_entity, of_other_kind } = grouped.counts;
    if without_entity > 0 && without_entity == read - empty - of_other_kind && has_groups(config) {
        let expected = "texts of entities in the tables ([[previous]] id_type says whether ids are numbers)";
        return Err(refused("previous texts", expected, &format!("{without_entity} of other ids")));
    }
    let tokens = texts::tokenise(&grouped.samples, tokenizer.tokenizer, progress)?;
    let mut tuner = Tuner { tokenizer, config, tune, drafter, tokens: &tokens, done: 0, progress };
    let kinds = tuner.kinds(&grouped.kinds, &grouped.samples)?;
    if kinds.is_empty() {
        return Err(refused("previous texts", "at least 5 of one group", &format!("{} in all", tokens.len())));
    }
    Ok(TuneReport { config: tune.clone(), kinds })
}

fn has_groups(config: &PoolsConfig) -> bool {
    Kind::ALL.iter().any(|&kind| config.of(kind).grouping() != Grouping::Global)
}

struct Tuner<'a> {
    tokenizer: PoolTokenizer<'a>,
    config: &'a PoolsConfig,
    tune: &'a TuneConfig,
    drafter: Drafter,
    tokens: &'a HashMap<u128, PoolText>,
    done: u64,
    progress: Progress<'a>,
}

/// A group's texts, by their priority as samples, which is random.
struct Split {
    name: String,
    held_out: Vec<u128>,
    candidates: Vec<u128>,
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
            let groups = fitted.router.groups().iter().zip(&samples[&kind].groups);
            let splits: Vec<Split> = groups.filter_map(|(group, sample)| self.split(&group.name, sample)).collect();
            let groups = splits.iter().map(|split| Ok((split.name.clone(), self.group(split)?)));
            let groups: Vec<(String, Vec<Measured>)> = groups.collect::<Result<_, PoolsError>>()?;
            if !groups.is_empty() {
                let one_pool = self.one_pool(kind, &splits)?;
                tuned.push(self.summary(kind, groups, &one_pool));
            }
        }
        Ok(tuned)
    }

    /// Holds out a share of a group's texts; nothing if there are too few.
    fn split(&self, name: &str, sample: &Sample<Arc<Written>>) -> Option<Split> {
        let texts = sample.iter().map(|(priority, _)| priority);
        let texts: Vec<u128> = texts.filter(|text| self.tokens.contains_key(text)).collect();
        let largest = self.tune.sizes.last().copied().unwrap_or(0);
        let spare = texts.len().saturating_sub(largest);
        let held_out = self.tune.held_out.min(spare.max(texts.len() / HELD_OUT_SHARE));
        let (held_out, candidates) = texts.split_at(held_out);
        let split = Split { name: name.to_owned(), held_out: held_out.to_vec(), candidates: candidates.to_vec() };
        (!split.held_out.is_empty()).then_some(split)
    }

    /// Returns the results per size, up to the first that takes all texts.
    fn group(&mut self, split: &Split) -> Result<Vec<Measured>, PoolsError> {
        let mut measured = Vec::new();
        for &size in &self.tune.sizes {
            measured.push(self.measure(&split.name, split.candidates.iter().take(size), split.held_out.iter())?);
            if size >= split.candidates.len() {
                break;
            }
        }
        Ok(measured)
    }

    /// Returns the results, per size of the groups' pools, of one pool of all their texts; nothing where there is only
    /// one group. An entity can belong to several groups, so what one group holds out another may have in its pool.
    fn one_pool(&mut self, kind: Kind, splits: &[Split]) -> Result<Vec<Measured>, PoolsError> {
        let mut measured = Vec::new();
        if splits.len() < 2 {
            return Ok(measured);
        }
        let held_out: HashSet<u128> = splits.iter().flat_map(|split| &split.held_out).copied().collect();
        let most = splits.iter().map(|split| split.candidates.len()).max().unwrap_or(0);
        for &size in &self.tune.sizes {
            let texts = splits.iter().flat_map(|split| split.candidates.iter().take(size));
            let texts: BTreeSet<&u128> = texts.filter(|text| !held_out.contains(text)).collect();
            let replayed = splits.iter().flat_map(|split| &split.held_out);
            measured.push(self.measure(&format!("{kind}-all"), texts.into_iter(), replayed)?);
            if size >= most {
                break;
            }
        }
        Ok(measured)
    }

    /// Replays texts against a pool of others.
    fn measure<'t>(
        &mut self,
        name: &str,
        texts: impl Iterator<Item = &'t u128>,
        held_out: impl Iterator<Item = &'t u128>,
    ) -> Result<Measured, PoolsError> {
        let texts = texts.map(|text| self.tokens[text].clone());
        let replayed = held_out.map(|text| ReplayText { text: self.tokens[text].tokens.clone(), ..Default::default() });
        let replayed: Vec<ReplayText> = replayed.collect();
        let pool = Pool::open(Bytes::from(build_pool(&self.tokenizer.pool_meta(name), texts)?))?;
        let (nodes, end) = (self.tune.nodes, self.tokenizer.end_of_text);
        self.done += 1;
        (self.progress)(self.done, None, "replaying");
        Ok(Measured {
            pool_texts: pool.texts(),
            pool_tokens: pool.tokens(),
            report: replay(&replayed, Some(&pool), self.drafter, nodes, end),
        })
    }

    fn summary(&self, kind: Kind, groups: Vec<(String, Vec<Measured>)>, one_pool: &[Measured]) -> KindTuning {
        let sizes = groups.iter().map(|(_, measured)| measured.len()).max().unwrap_or(0);
        let total = |size: usize| {
            let of_size = groups.iter().filter_map(|(_, m)| m.get(size).or(m.last()));
            of_size.fold(Measured::default(), |sum, &m| sum.add(m))
        };
        let rows = self.rows(&(0..sizes).map(total).collect::<Vec<_>>());
        let groups = groups.into_iter().map(|(name, measured)| {
            let rows = self.rows(&measured);
            GroupTuning { name, max_texts: fastest(&rows).map_or(0, |row| row.max_texts), rows }
        });
        let (groups, one_pool) = (groups.collect(), self.rows(one_pool));
        let (grouping, max_texts) = match (fastest(&rows), fastest(&one_pool)) {
            (Some(of_groups), Some(one)) if one.tokens_per_second > of_groups.tokens_per_second => {
                (Grouping::Global, one.pool_texts)
            }
            (of_groups, _) => (self.config.of(kind).grouping(), of_groups.map_or(0, |row| row.max_texts)),
        };
        KindTuning { kind, grouping, max_texts, rows, one_pool, groups }
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
fn fastest(rows: &[TuneRow]) -> Option<&TuneRow> {
    let best = rows.iter().map(|row| row.tokens_per_second).fold(0.0, f64::max);
    rows.iter().find(|row| row.tokens_per_second >= best * (1.0 - SPEED_TOLERANCE))
}
