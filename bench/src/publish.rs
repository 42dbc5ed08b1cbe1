//! `laser-bench publish`: how long publishing and verifying a night of any size take, and in how much memory.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use laser_coordinator::finalise::{Published, Terms, publish};
use laser_night::Progress;
use laser_schema::entity::IdType;
use laser_schema::job::{Plan, ShardJob, Spec};
use laser_schema::knowledge::{Figures, KnowledgeRecord, PartInfo};
use laser_schema::{Digest, EntityId, Kind};
use laser_store::Location;
use laser_store::data_set::verify;
use laser_store::parallel;
use laser_store::part::encode_part;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_terminal::{Display, Style, Table};
use rayon::prelude::*;
use serde::Serialize;

use super::machine;
use super::simulated::{self, NIGHT};
use super::stage::{Stage, Watch};
use super::synthetic::{mix, words};

/// `laser-bench publish`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct PublishArgs {
    /// Texts of the night.
    #[arg(long, default_value_t = 1_000_000)]
    rows: u32,
    /// Parts that they are in.
    #[arg(long, default_value_t = 200)]
    parts: u32,
    /// Where the parts and the figures are written: about 400 bytes per text. The parts are removed afterwards.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// The measurement.
#[derive(Debug, Serialize)]
pub(super) struct PublishReport {
    options: PublishArgs,
    machine: String,
    /// Of all parts.
    bytes: u64,
    stages: Vec<Stage>,
}

impl PublishReport {
    pub(super) fn render(&self, style: Style) -> String {
        let mut table = Table::new(&["rows", "parts", "MB", "stage", "s", "CPU s", "rows/s", "MB/s", "peak MB"]);
        for stage in &self.stages {
            table.push(vec![
                self.options.rows.to_string(),
                self.options.parts.to_string(),
                format!("{:.0}", self.bytes as f64 / 1e6),
                stage.stage.to_owned(),
                format!("{:.1}", stage.seconds),
                format!("{:.1}", stage.cpu_seconds),
                format!("{:.0}", stage.rows_per_second),
                format!("{:.0}", self.bytes as f64 / stage.seconds / 1e6),
                format!("{:.0}", stage.peak_mb),
            ]);
        }
        format!("{}\n{}", self.machine, table.render(style))
    }
}

/// Writes the parts as workers would, publishes them, and verifies the published folder.
pub(super) async fn run(options: &PublishArgs) -> Result<PublishReport> {
    ensure!(options.parts > 0, "--parts 0: there must be at least one");
    let dir = options.output.join("publish");
    let root = Location::parse(&dir.to_string_lossy())?;
    let rows = u64::from(options.rows);
    let plan = simulated::plan(rows, options.parts);
    let night = PlannedRun::new(RunStore::new(&root, &plan.run), plan.clone());
    let mut display = Display::new();
    display.stage("writing parts");
    let bytes = write_parts(&root, &plan, &mut display).await?;
    let mut report = PublishReport { options: options.clone(), machine: machine(), bytes, stages: Vec::new() };
    display.stage("publishing");
    let watch = Watch::start("publish")?;
    let published = publish(&night, Kind::User, &Terms::coverage(1.0)).await?;
    report.stages.push(watch.stop(rows)?);
    ensure!(matches!(&published, Published::Complete(manifest) if manifest.rows == rows));
    display.stage("verifying");
    let watch = Watch::start("verify")?;
    let verified = verify(&night.partition(Kind::User)).await?;
    report.stages.push(watch.stop(rows)?);
    ensure!(verified.faults.is_empty(), "{:?}", verified.faults);
    std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    Ok(report)
}

/// Writes all parts on all threads; returns their bytes.
async fn write_parts(root: &Location, plan: &Plan, display: &mut Display) -> Result<u64> {
    let (mut bytes, mut written) = (0, 0);
    for jobs in plan.shards.chunks(rayon::current_num_threads()) {
        let first = |shard: u32| plan.shards[..shard as usize].iter().map(|job| job.rows).sum::<u64>();
        let parts = jobs.par_iter().map(|job| encode(plan, job, first(job.shard)));
        for (job, part) in jobs.iter().zip(parallel::try_collect(parts)?) {
            bytes += part.len() as u64;
            written += job.rows;
            root.join(&job.output).write(part).await?;
        }
        display.update(written, Some(plan.counts[&Kind::User].entities), "texts");
    }
    Ok(bytes)
}

/// The part of a shard whose users have the numbers from `first` on.
fn encode(plan: &Plan, job: &ShardJob, first: u64) -> Result<bytes::Bytes> {
    let at = NIGHT.to_zoned(TimeZone::UTC)?.timestamp();
    let rows: Vec<_> = (first..first + job.rows).map(|user| record(user, &plan.spec, at)).collect();
    let mut figures = Figures::default();
    rows.iter().for_each(|row| figures.add_record(row));
    let new = PartInfo::new(&plan.run, job.shard, job.kind, "bench", &rows);
    let info = PartInfo { figures: [(job.pool.clone(), figures)].into(), ..new };
    Ok(encode_part(&job.output, IdType::Int64, &rows, None, &info)?)
}

/// A text of 60 to 100 words, with the digests and figures of a generated one.
fn record(user: u64, spec: &Spec, at: Timestamp) -> KnowledgeRecord {
    let tokens = 60 + mix(user) % 41;
    let forwards = tokens / 3;
    let accepted = (0..forwards).map(|step| (mix(user ^ (step << 40)) % 5).cast_signed()).collect::<Vec<_>>();
    KnowledgeRecord {
        entity_id: EntityId::Int(mix(user).cast_signed()),
        text: words(user, tokens),
        items: Vec::new(),
        scores: Vec::new(),
        prompt_tokens: 60,
        text_tokens: tokens.cast_signed(),
        pool: "user-all".into(),
        policy: "strict".into(),
        stop_reason: "end".into(),
        forwards: forwards.cast_signed(),
        drafted_tokens: 12 * forwards.cast_signed(),
        accepted_tokens: accepted.iter().sum(),
        relaxed_tokens: 0,
        step_accepted: accepted,
        mean_log_probability: -((mix(user ^ 1) % 1_000_000) as f64) / 1e6,
        draft_seconds: (mix(user ^ 2) % 10_000) as f64 / 1e6,
        engine_seconds: (mix(user ^ 3) % 1_000_000) as f64 / 1e6,
        prompt_digest: Digest::of(&user.to_le_bytes()),
        spec_digest: spec.digest(),
        model_digest: spec.model.clone(),
        pool_digest: String::new(),
        generated_by: "bench".into(),
        event_timestamp: at,
        created_timestamp: at,
        samples: Vec::new(),
        runners_up: None,
    }
}
