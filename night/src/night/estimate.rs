//! What a night is going to take, before it runs: a sample of its rows is generated as the night would generate them,
//! in an output of its own, and last night's figures tell how long its texts were.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use laser_coordinator::ledger::LedgerLimits;
use laser_coordinator::local_queue::LocalQueue;
use laser_coordinator::plan::SampleRequest;
use laser_pool_builder::OpenPools;
use laser_schema::audit::AuditReport;
use laser_schema::estimate::{Estimate, GroupEstimate, Interval};
use laser_schema::job::{Action, Plan, ShardJob};
use laser_schema::knowledge::{Figures, KnowledgeRecord, ratio};
use laser_schema::manifest::Manifest;
use laser_schema::{Kind, Progress};
use laser_store::Location;
use laser_store::part::decode_part;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_worker::run::Stop;

use super::{Night, Purpose};
use crate::model::open_draft_models;

/// Batches of a sample per kind, where nothing else is asked for: at batch 8 the mean of 128 texts, of which 112 tell
/// the speed.
const SAMPLE_BATCHES: usize = 16;

/// Batches of a sample per kind that are audited.
const AUDIT_BATCHES: usize = 4;

/// Texts of a pool in the sample from which on its own mean counts, and not its kind's.
const POOL_TEXTS_MIN: usize = 30;

/// Relative standard error of last night's lengths as a statement about tonight's.
const NIGHTLY_ERROR: f64 = 0.03;

impl Night<'_> {
    /// Plans without writing, and estimates what the run takes from `sample` rows per kind, which are generated now.
    /// Returns the manifests of the previous knowledge, too. The estimate is kept with the run.
    ///
    /// # Errors
    /// Those of a night until its first shards are generated.
    pub async fn estimate(
        &self,
        sample: Option<usize>,
        progress: &mut dyn Progress,
    ) -> Result<(Plan, Vec<Manifest>, Estimate)> {
        let batch = self.batch();
        let temporary = tempfile::tempdir().context("no temporary directory for the sample")?;
        let output = Location::parse(&temporary.path().to_string_lossy())?;
        let (begun, manifests, pools) = self.dry_begin(&output, progress).await?;
        let request = SampleRequest {
            output: &output,
            rows: sample.unwrap_or(SAMPLE_BATCHES * batch),
            audited: AUDIT_BATCHES * batch,
        };
        let (plan, sampled) = self.plan(Purpose::Sample(&request), &begun, &pools, progress).await?;
        let sampled = sampled.filter(|sampled| !sampled.shards.is_empty());
        let measured = match sampled {
            Some(sampled) => self.measure(&output, sampled, &pools, progress).await?,
            // All rows are carried forward, or none can be generated.
            None => Measured::default(),
        };
        let estimate = Estimate {
            run: plan.run.clone(),
            made: Timestamp::now(),
            sampled: measured.texts.values().map(|texts| texts.len() as u64).sum(),
            earlier: earlier(&plan, &manifests).values().map(|figures| figures.texts).sum(),
            groups: groups(&plan, &measured, &manifests),
            audits: audits(&plan, &measured),
            price: plan.price.clone(),
        };
        begun.store.keep_estimate(&estimate).await?;
        Ok((plan, manifests, estimate))
    }

    /// Requests that the engine works on at a time.
    fn batch(&self) -> usize {
        self.config.generate.batch
    }

    /// Generates the sample, and reads what came of it.
    async fn measure(
        &self,
        output: &Location,
        plan: Plan,
        pools: &OpenPools,
        progress: &mut dyn Progress,
    ) -> Result<Measured> {
        let store = RunStore::new(output, &plan.run);
        if let Some((items, lists)) = self.items.as_ref().zip(self.config.lists.as_ref()) {
            items.keep((self.config, lists), &store, progress).await?;
        }
        let run = PlannedRun::new(store, plan);
        let drafts = open_draft_models(self.config, &self.model).await?;
        let worker = self.worker(&run, pools, drafts, progress).await?;
        let queue = LocalQueue::new(&run.plan.shards, &[], LedgerLimits { attempts: 1, ..LedgerLimits::default() });
        let queue = queue.into();
        worker.empty(&queue, 0, progress, &Stop::default()).await?;
        if let Some((_, reason)) = queue.dead().into_iter().next() {
            anyhow::bail!("the sample could not be generated: {reason}");
        }
        Measured::read(&run, self.batch()).await
    }
}

/// What a sample came to.
#[derive(Debug, Default)]
struct Measured {
    texts: BTreeMap<Kind, Vec<Text>>,
    audits: BTreeMap<Kind, AuditReport>,
}

/// What a text or list took.
#[derive(Debug, Clone)]
struct Text {
    pool: String,
    /// Tokens of the text; 1 of a list.
    amount: f64,
    seconds: f64,
    /// Whether the batch was full from its first step to its last, so that the seconds tell the speed of a night.
    is_steady: bool,
}

impl Measured {
    async fn read(run: &PlannedRun, batch: usize) -> Result<Self> {
        let mut measured = Self::default();
        let mut records: Vec<(Kind, KnowledgeRecord)> = Vec::new();
        for job in &run.plan.shards {
            let bytes = run.part(job).read().await?;
            if job.action == Action::Audit {
                let report: AuditReport = serde_json::from_slice(&bytes).context("the audit of the sample")?;
                measured.audits.entry(job.kind).or_default().add(&report);
            } else {
                let (rows, _) = decode_part(&job.output, bytes)?;
                records.extend(rows.into_iter().map(|row| (job.kind, row)));
            }
        }
        ensure!(!records.is_empty(), "the sample has no text: every row of it failed; generate a few with [run] limit");
        records.sort_by_key(|(_, record)| record.created_timestamp);
        let steady = steady(records.len(), batch);
        for (at, (kind, record)) in records.into_iter().enumerate() {
            let is_list = !record.items.is_empty();
            let amount = if is_list { 1.0 } else { record.text_tokens as f64 };
            let (pool, seconds, is_steady) = (record.pool, record.engine_seconds, steady.contains(&at));
            measured.texts.entry(kind).or_default().push(Text { pool, amount, seconds, is_steady });
        }
        Ok(measured)
    }
}

/// Which of so many texts, in the order of their ends, had a full batch around them: neither those of the first batch,
/// from which the draft budget learns, nor those of the last, which end alone. Of fewer than four batches all.
fn steady(texts: usize, batch: usize) -> std::ops::Range<usize> {
    if texts < 4 * batch { 0..texts } else { batch..texts - batch }
}

/// A mean with its relative standard error.
#[derive(Debug, Clone, Copy)]
struct Mean {
    mean: f64,
    error: f64,
}

/// The mean amount of texts.
fn amount(texts: &[&Text]) -> Mean {
    let n = texts.len() as f64;
    let mean = ratio(texts.iter().map(|text| text.amount).sum(), n);
    let squares: f64 = texts.iter().map(|text| (text.amount - mean).powi(2)).sum();
    Mean { mean, error: ratio((ratio(squares, n - 1.0) / n).sqrt(), mean) }
}

/// Seconds per token or list, as the ratio of sums, whose error is that of a ratio estimator.
fn pace(texts: &[&Text]) -> Mean {
    let texts: Vec<&&Text> = texts.iter().filter(|text| text.is_steady).collect();
    let (n, amount) = (texts.len() as f64, texts.iter().map(|text| text.amount).sum::<f64>());
    let mean = ratio(texts.iter().map(|text| text.seconds).sum(), amount);
    let squares: f64 = texts.iter().map(|text| (text.seconds - mean * text.amount).powi(2)).sum();
    Mean { mean, error: ratio((n * ratio(squares, n - 1.0)).sqrt(), mean * amount) }
}

/// Both means, weighed by their errors. One without an error, such as that of texts that all reach the longest length,
/// stands for both.
fn combined(a: Mean, b: Mean) -> Mean {
    let variance = |mean: Mean| (mean.mean * mean.error).powi(2);
    let (of_a, of_b) = (variance(a), variance(b));
    let share = ratio(of_b, of_a + of_b);
    let mean = share * a.mean + (1.0 - share) * b.mean;
    Mean { mean, error: ratio(ratio(of_a * of_b, of_a + of_b).sqrt(), mean) }
}

/// The figures of previous nights of tonight's specification, by kind.
fn earlier(plan: &Plan, manifests: &[Manifest]) -> BTreeMap<Kind, Figures> {
    let digest = plan.spec.digest();
    let mut earlier: BTreeMap<Kind, Figures> = BTreeMap::new();
    for manifest in manifests.iter().filter(|manifest| manifest.spec_digest == digest) {
        earlier.entry(manifest.kind).or_default().add(&manifest.figures.values().sum());
    }
    earlier
}

/// An estimate for each kind and pool that has rows to generate.
fn groups(plan: &Plan, measured: &Measured, manifests: &[Manifest]) -> Vec<GroupEstimate> {
    let mut rows: BTreeMap<(Kind, &str), u64> = BTreeMap::new();
    for ShardJob { kind, pool, rows: of_shard, .. } in plan.shards.iter().filter(|s| s.action == Action::Generate) {
        *rows.entry((*kind, pool)).or_default() += of_shard;
    }
    let (earlier, samples) = (earlier(plan, manifests), u64::from(plan.spec.samples()));
    let is_list = plan.spec.lists.is_some();
    let group = |((kind, pool), rows): ((Kind, &str), u64)| {
        let texts = measured.texts.get(&kind).map_or(&[][..], Vec::as_slice);
        let of_kind: Vec<&Text> = texts.iter().collect();
        let of_pool: Vec<&Text> = texts.iter().filter(|text| text.pool == pool).collect();
        let told = if of_pool.len() < POOL_TEXTS_MIN { &of_kind } else { &of_pool };
        let mut length = amount(told);
        if let Some(figures) = earlier.get(&kind).filter(|figures| figures.tokens > 0) {
            let last = Mean { mean: figures.text_length(), error: NIGHTLY_ERROR };
            let (sampled, both) = (amount(&of_kind), combined(amount(&of_kind), last));
            length = Mean { mean: length.mean * ratio(both.mean, sampled.mean), error: length.error.min(both.error) };
        }
        let (pace, texts) = (pace(told), rows * samples);
        let tokens = length.mean * texts as f64;
        let error = (length.error.powi(2) + pace.error.powi(2)).sqrt();
        let seconds = tokens * pace.mean;
        GroupEstimate {
            kind,
            pool: pool.to_owned(),
            texts,
            tokens: if is_list { Interval::default() } else { Interval::new(tokens, tokens * length.error) },
            seconds: Interval::new(seconds, seconds * error),
        }
    };
    rows.into_iter().map(group).collect()
}

/// What the audit of each kind takes: its rows, decoded plainly and with speculation.
fn audits(plan: &Plan, measured: &Measured) -> Vec<(Kind, Interval)> {
    let mut rows: BTreeMap<Kind, u64> = BTreeMap::new();
    for job in plan.shards.iter().filter(|job| job.action == Action::Audit) {
        *rows.entry(job.kind).or_default() += job.rows;
    }
    let audit = |(kind, rows): (Kind, u64)| {
        let texts = measured.texts.get(&kind).map_or(&[][..], Vec::as_slice);
        let error = amount(&texts.iter().collect::<Vec<_>>()).error;
        let audit = measured.audits.get(&kind).copied().unwrap_or_default();
        let seconds = rows as f64 * ratio(audit.plain_seconds + audit.seconds, audit.texts as f64);
        (kind, Interval::new(seconds, seconds * error * 2.0_f64.sqrt()))
    };
    rows.into_iter().map(audit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(amounts: impl IntoIterator<Item = (f64, f64)>) -> Vec<Text> {
        let text = |(amount, seconds)| Text { pool: "a".into(), amount, seconds, is_steady: true };
        amounts.into_iter().map(text).collect()
    }

    #[test]
    fn the_speed_is_that_of_full_batches() {
        assert_eq!((steady(100, 8), steady(31, 8), steady(32, 8)), (8..92, 0..31, 8..24));
        let mut all = texts([(10.0, 1.0), (30.0, 3.0), (20.0, 2.0)]);
        all[1] = Text { seconds: 99.0, is_steady: false, ..all[1].clone() };
        let pace = pace(&all.iter().collect::<Vec<_>>());
        assert!((pace.mean - 0.1).abs() < 1e-12 && pace.error < 1e-9, "{pace:?}");
    }

    #[test]
    fn errors_are_those_of_the_mean_and_of_the_ratio() {
        let all = texts([(8.0, 1.0), (12.0, 1.0), (8.0, 1.0), (12.0, 1.0)]);
        let all: Vec<&Text> = all.iter().collect();
        // Variance 16 / 3, so the standard error is the root of 4 / 3, of a mean of 10.
        assert!((amount(&all).error - (4.0_f64 / 3.0).sqrt() / 10.0).abs() < 1e-12);
        // Residuals of 0.2 around 0.1 seconds per token: the root of 4 * (0.16 / 3) over 4 seconds.
        assert!((pace(&all).error - (4.0 * 0.16_f64 / 3.0).sqrt() / 4.0).abs() < 1e-12);
    }

    #[test]
    fn the_surer_of_two_means_counts_more() {
        let both = combined(Mean { mean: 100.0, error: 0.01 }, Mean { mean: 110.0, error: 0.10 });
        assert!((100.0..100.2).contains(&both.mean) && both.error < 0.01, "{both:?}");
        // All texts of the sample were cut at the same length.
        let both = combined(Mean { mean: 200.0, error: 0.0 }, Mean { mean: 190.0, error: 0.02 });
        assert!((both.mean - 200.0).abs() < 1e-9 && both.error.abs() < 1e-9, "{both:?}");
    }
}
