//! Sums over the parts of a kind: all that its manifest says of them.
//!
//! Parts are checked in parallel and added in the order of their shards. Memory is that of a few parts, whatever their
//! number: the rows without a text go to `_errors.jsonl` as they come, and ids are compared through the local disk.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use laser_schema::guard::{GuardReport, Guards, Verdict};
use laser_schema::job::{Action, KindCounts, Plan, ShardJob};
use laser_schema::knowledge::{ErrorRecord, Figures};
use laser_schema::manifest::{Cost, ERRORS, Manifest, PartEntry, Profiles, Value};
use laser_schema::{Kind, audit::AuditReport, embedding::EmbeddingInfo, entity::IdType};
use laser_store::part::{CheckedPart, check_part};
use laser_store::{
    Location, data_set::parts_in_flight, location::ObjectWriter, run_store::PlannedRun, table::TableError,
    unique::UniqueIds,
};

use super::{FinaliseError, id_type};

/// The sums.
#[derive(Debug, Default)]
pub(super) struct Sums {
    carried: u64,
    errors: u64,
    /// The value of rows without a text.
    lost: f64,
    figures: BTreeMap<String, Figures>,
    audit: BTreeMap<String, AuditReport>,
    parts: Vec<PartEntry>,
    /// When the run was planned or, if later, its newest text generated: of two runs of a night that one counts which
    /// was planned later, also if it carries every text of an earlier night.
    created: Timestamp,
    /// Texts that were cut off before they were encoded.
    truncated: u64,
}

/// The output of a shard, checked.
enum Output {
    Part(Box<CheckedPart>),
    Audit(AuditReport),
}

impl Sums {
    /// Checks and adds the outputs of all shards of a kind, and writes `_errors.jsonl`.
    pub(super) async fn new(run: &PlannedRun, kind: Kind, jobs: &[&ShardJob]) -> Result<Self, FinaliseError> {
        let mut errors = run.partition(kind).join(ERRORS).object_writer();
        match Self::add_all(run, jobs, &mut errors).await {
            Ok(sums) => {
                errors.finish().await?;
                Ok(sums)
            }
            Err(error) => {
                errors.abort().await;
                Err(error)
            }
        }
    }

    async fn add_all(run: &PlannedRun, jobs: &[&ShardJob], errors: &mut ObjectWriter) -> Result<Self, FinaliseError> {
        let plan = &run.plan;
        let created = run.store.planned_at().await?;
        let (mut sums, mut ids) = (Self { created, ..Self::default() }, UniqueIds::default());
        let checks = jobs.iter().map(|job| check(run.part(job), id_type(plan, job.kind), (*job).clone()));
        let mut checks = futures::stream::iter(checks).buffered(parts_in_flight());
        while let Some((job, checked)) = checks.try_next().await? {
            match checked {
                Output::Audit(report) => sums.audit.entry(job.pool).or_default().add(&report),
                Output::Part(part) => {
                    let without_text = part.info.errors.iter().map(|error| &error.entity_id);
                    ids.add(&job.output, part.ids.iter().chain(without_text))?;
                    errors.write(&lines(&part.info.errors)).await?;
                    sums.add(plan, &job, *part)?;
                }
            }
        }
        let repeated = tokio::task::spawn_blocking(move || ids.repeated(1)).await??;
        match repeated.into_iter().next() {
            Some(twice) => Err(FinaliseError::Duplicate { part: twice.file, id: twice.id }),
            None => Ok(sums),
        }
    }

    fn add(&mut self, plan: &Plan, job: &ShardJob, part: CheckedPart) -> Result<(), FinaliseError> {
        let info = part.info;
        // Parts of earlier builds do not tell.
        if info.input.as_ref().is_some_and(|input| *input != job.input_digest) {
            return Err(FinaliseError::Plan { part: job.output.clone() });
        }
        let found = info.rows + info.errors.len() as u64;
        if found != job.rows {
            return Err(FinaliseError::Rows { part: job.output.clone(), expected: job.rows, found });
        }
        let (expected, found) = (plan.content(), info.content());
        if found != expected {
            return Err(FinaliseError::Content { part: job.output.clone(), expected, found });
        }
        if info.parsed != plan.spec.parsed() {
            return Err(FinaliseError::Parsed { part: job.output.clone() });
        }
        let embedding = info.embedding.as_ref();
        if embedding.map(|e| &e.spec) != plan.embedding.as_ref() {
            return Err(FinaliseError::Encoder { part: job.output.clone() });
        }
        self.truncated += embedding.map_or(0, |e| e.truncated);
        self.created = self.created.max(info.newest.unwrap_or_default());
        self.carried += info.carried;
        self.errors += info.errors.len() as u64;
        self.lost += info.lost(job.value);
        for (pool, figures) in info.figures {
            self.figures.entry(pool).or_default().add(&figures);
        }
        let prefix = format!("{}/", plan.partition(job.kind));
        let name = job.output.strip_prefix(&prefix).unwrap_or(&job.output).to_owned();
        let table_rows = (part.table_rows != info.rows).then_some(part.table_rows);
        self.parts.push(PartEntry { name, rows: info.rows, table_rows, bytes: part.bytes, digest: part.digest });
        Ok(())
    }

    /// The verdict on each pool: that from before its texts, where they are strict for it, else that on all of them.
    pub(super) async fn judge(
        &self,
        run: &PlannedRun,
        kind: Kind,
        guards: &Guards,
    ) -> Result<GuardReport, FinaliseError> {
        let mut pools = BTreeMap::new();
        for (pool, figures) in &self.figures {
            let pinned = match &run.plan.guards {
                Some(_) => run.store.verdict(kind, pool).await?,
                None => None,
            };
            let audit = self.audit.get(pool).copied().unwrap_or_default();
            let of_all = || Verdict { texts: figures.texts, breaches: guards.breaches(figures, &audit), strict: false };
            let verdict = pinned.filter(|verdict| verdict.strict);
            pools.insert(pool.clone(), verdict.unwrap_or_else(of_all));
        }
        Ok(GuardReport { guards: *guards, pools })
    }

    pub(super) fn manifest(self, plan: &Plan, kind: Kind, guards: Option<GuardReport>) -> Manifest {
        let counts: KindCounts = plan.counts.get(&kind).copied().unwrap_or_default();
        let price = plan.price.as_ref();
        let details = Profiles {
            spec: plan.spec.clone(),
            spec_digest: plan.spec.digest(),
            pool_digest: plan.pool_digest.clone(),
            entities: counts.entities,
            carried: self.carried,
            errors: self.errors,
            value: plan.priority.clone().zip(counts.value).map(|(priority, all)| Value {
                priority,
                all,
                lost: self.lost,
            }),
            guards,
            cost: price.map(|price| Cost::of(price, &self.figures, &self.audit)),
            figures: self.figures,
            audit: self.audit,
            embedding: (plan.embedding.clone()).map(|spec| EmbeddingInfo::new(spec, self.truncated)),
            canary: plan.canary.clone(),
        };
        Manifest::new(&plan.run, (kind, plan.date), self.created, self.parts, details)
    }
}

/// Reads the output of a shard and checks it on a thread of its own.
async fn check(part: Location, id: IdType, job: ShardJob) -> Result<(ShardJob, Output), FinaliseError> {
    let bytes = part.read().await?;
    let checked = tokio::task::spawn_blocking(move || checked(&job, id, bytes).map(|output| (job, output)));
    Ok(checked.await??)
}

fn checked(job: &ShardJob, id: IdType, bytes: Bytes) -> Result<Output, TableError> {
    if job.action == Action::Audit {
        let report = serde_json::from_slice(&bytes);
        let unreadable =
            |e: serde_json::Error| TableError::Unreadable { file: job.output.clone(), reason: e.to_string() };
        return report.map(Output::Audit).map_err(unreadable);
    }
    check_part(&job.output, id, bytes).map(|part| Output::Part(Box::new(part)))
}

/// One JSON object per line.
fn lines(errors: &[ErrorRecord]) -> String {
    errors.iter().map(|error| serde_json::to_string(error).unwrap_or_default() + "\n").collect()
}
