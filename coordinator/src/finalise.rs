//! Publishing turns committed parts into a data set that readers can trust.
//!
//! Every part is read back and checked, then `_errors.jsonl`, `_manifest.json` and last `_SUCCESS` are written, and
//! readers are told which runs are in force. The manifest is a function of the parts, so two coordinators that finish
//! one run write the same bytes.

mod sums;

use std::collections::{BTreeSet, HashSet};

use bytes::Bytes;
use laser_delta::{DeltaError, Table};
use laser_schema::guard::{GuardReport, Guards};
use laser_schema::job::{Action, Plan, ShardJob};
use laser_schema::knowledge::{Content, ErrorRecord, PartInfo};
use laser_schema::{Embeddings, EntityId, Kind};
use laser_schema::{embedding::EmbeddingInfo, entity::IdType, manifest::Manifest};
use laser_store::data_set::{self, ManifestError};
use laser_store::location::{Created, LocationError};
use laser_store::run_store::{PlannedRun, RunStoreError};
use laser_store::table::{self, TableError};
use laser_store::{part::encode_part, spill::SpillError};
use serde::Deserialize;

use sums::Sums;

/// Why nothing was published.
#[derive(Debug, thiserror::Error)]
pub enum FinaliseError {
    /// A store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A committed part differs from what its writer wrote.
    #[error("{0}; remove that part and run again: only its shard is generated anew")]
    Damaged(#[from] TableError),
    /// The manifest of what was published before.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The local disk, where ids are compared.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// A thread that checks a part.
    #[error("the check of a part ended: {0}")]
    Ended(#[from] tokio::task::JoinError),
    /// The run's own files.
    #[error(transparent)]
    Run(#[from] RunStoreError),
    /// The kind's Delta table.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// An entity is in two parts.
    #[error("{part}: entity {id} is in an earlier part too; this is a fault of Laser, please report it")]
    Duplicate {
        /// The later part.
        part: String,
        /// The entity.
        id: EntityId,
    },
    /// A part holds fewer or more rows than its shard.
    #[error("{part}: {found} rows and errors for a shard of {expected} rows; remove that part and run again")]
    Rows {
        /// The part.
        part: String,
        /// Number of rows of the shard.
        expected: u64,
        /// Number of rows and errors of the part.
        found: u64,
    },
    /// A part is of another plan of the run: it was begun anew while a worker was still at a shard.
    #[error("{part}: was made by another plan of this run; remove that part and run again")]
    Plan {
        /// The part.
        part: String,
    },
    /// A part holds texts in place of lists, or the other way round.
    #[error("{part}: holds {found}, the run was planned for {expected}; remove that part and run again")]
    Content {
        /// The part.
        part: String,
        /// What was planned.
        expected: Content,
        /// What it holds.
        found: Content,
    },
    /// A part's embeddings differ from those that the run was planned with.
    #[error("{part}: its embeddings are not those that the run was planned with; remove that part and run again")]
    Encoder {
        /// The part.
        part: String,
    },
    /// A part's parsed texts differ from those that the run was planned with.
    #[error("{part}: its column parsed is not that of the run's schema; remove that part and run again")]
    Parsed {
        /// The part.
        part: String,
    },
}

/// The outcome of publishing one kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Published {
    /// The data set is complete: `_SUCCESS` is written.
    Complete(Box<Manifest>),
    /// Too many entities have no text: everything except `_SUCCESS` is written.
    BelowCoverage(Box<Manifest>),
    /// A pool breaches a guard that withholds the night: everything except `_SUCCESS` is written.
    Breached(Box<Manifest>),
    /// Shards are missing; nothing was written.
    Incomplete {
        /// The number of missing shards.
        missing: usize,
    },
}

/// Commits every shard that is missing without its texts: each of its rows becomes an error record that says `reason`.
/// A worker that is still at one of them loses the create, so what is published stays as it is. Returns how many.
///
/// # Errors
/// The store's, and an input that cannot be read.
pub async fn seal(run: &PlannedRun, reason: &str) -> Result<usize, FinaliseError> {
    let done: HashSet<u32> = run.committed().await?.into_iter().collect();
    let missing = run.plan.shards.iter().filter(|s| s.action != Action::Audit && !done.contains(&s.shard));
    let mut sealed = 0;
    for job in missing {
        let part = sealed_part(run, job, reason).await?;
        let created = run.part(job).create(part).await?;
        sealed += usize::from(created == Created::Won);
    }
    Ok(sealed)
}

/// Of any input's row.
#[derive(Deserialize)]
struct RowId {
    entity_id: EntityId,
    /// Of rows that are generated.
    #[serde(default)]
    value: Option<f64>,
}

async fn sealed_part(run: &PlannedRun, job: &ShardJob, reason: &str) -> Result<Bytes, FinaliseError> {
    let plan = &run.plan;
    let input = run.input(job).read().await?;
    let rows: Vec<RowId> = table::decode(&job.input, input)?;
    let error = |RowId { entity_id, value }: RowId| {
        let (stage, reason) = ("deadline".to_owned(), reason.to_owned());
        ErrorRecord { entity_id, stage, reason, value }
    };
    let none = plan.embedding.as_ref();
    let none = none.map(|spec| Embeddings::new(spec.encoder.dimensions));
    let info = PartInfo {
        errors: rows.into_iter().map(error).collect(),
        embedding: (plan.embedding.clone()).map(|spec| EmbeddingInfo::new(spec, 0)),
        parsed: plan.spec.parsed(),
        input: Some(job.input_digest.clone()),
        ..PartInfo::new(&plan.run, job.shard, job.kind, "sealed", &[]).with_content(plan.content())
    };
    Ok(encode_part(&job.output, id_type(plan, job.kind), &[], none.as_ref(), &info)?)
}

fn id_type(plan: &Plan, kind: Kind) -> IdType {
    plan.ids.get(&kind).copied().unwrap_or(IdType::String)
}

/// The conditions for writing `_SUCCESS`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// The share of entities that must have a text.
    pub min_coverage: f64,
    /// Bounds on the texts of each pool.
    pub guards: Option<Guards>,
    /// Whether the night is also a commit of the kind's Delta table, before `_SUCCESS`.
    pub delta: bool,
}

impl Terms {
    /// Requires only a share of entities with a text.
    pub fn coverage(min_coverage: f64) -> Self {
        Self { min_coverage, guards: None, delta: false }
    }

    fn is_below_coverage(&self, manifest: &Manifest) -> bool {
        (manifest.rows as f64) < self.min_coverage * manifest.entities as f64
    }

    /// Whether `_SUCCESS` is withheld from what a manifest tells. Its breaches are those of the guards that it was
    /// judged by; what others find is not known.
    fn withhold(&self, manifest: &Manifest) -> bool {
        let judged = manifest.guards.as_ref().filter(|report| Some(report.guards) == self.guards);
        judged.is_some_and(GuardReport::withholds) || self.is_below_coverage(manifest)
    }
}

/// Whether publishing a run would do no more than withhold `_SUCCESS` again: it was judged whole, and on these terms.
///
/// # Errors
/// The store's, and a manifest that cannot be read.
pub async fn is_withheld(run: &PlannedRun, terms: &Terms) -> Result<bool, FinaliseError> {
    let done: HashSet<u32> = run.committed().await?.into_iter().collect();
    if run.plan.shards.iter().any(|job| job.action != Action::Audit && !done.contains(&job.shard)) {
        return Ok(false);
    }
    let mut withheld = false;
    for &kind in run.plan.counts.keys() {
        let folder = run.partition(kind);
        if data_set::is_complete(&folder).await? {
            continue;
        }
        let manifest: Option<Manifest> = data_set::read(&folder).await?;
        match manifest {
            Some(manifest) => withheld |= terms.withhold(&manifest),
            None => return Ok(false),
        }
    }
    Ok(withheld)
}

/// Publishes one kind of a run, if all its shards are committed.
///
/// # Errors
/// [`FinaliseError`]; then `_SUCCESS` is not written.
pub async fn publish(run: &PlannedRun, kind: Kind, terms: &Terms) -> Result<Published, FinaliseError> {
    let folder = run.partition(kind);
    let table = terms.delta.then(|| Table::new(run.store.output(), run.plan.spec.data_set(), kind));
    // What was published before is never written again, so whatever was derived from it stays true.
    if let Some(manifest) = data_set::read_complete(&folder).await? {
        if let Some(table) = &table {
            table.adopt(run.plan.date, run.name()).await?;
        }
        write_in_force(run, kind).await?;
        return Ok(Published::Complete(Box::new(manifest)));
    }
    let done: HashSet<u32> = run.committed().await?.into_iter().collect();
    let of_kind = run.plan.shards.iter().filter(|s| s.kind == kind);
    let (there, missing): (Vec<&ShardJob>, Vec<_>) = of_kind.partition(|s| done.contains(&s.shard));
    // A failed measurement costs the night its figures, not its texts.
    let missing = missing.iter().filter(|s| s.action != Action::Audit).count();
    if missing > 0 {
        return Ok(Published::Incomplete { missing });
    }
    let sums = Sums::new(run, kind, &there).await?;
    let guards = match &terms.guards {
        Some(guards) => Some(sums.judge(run, kind, guards).await?),
        None => None,
    };
    let manifest = sums.manifest(&run.plan, kind, guards);
    data_set::write_manifest(&folder, &manifest).await?;
    if terms.is_below_coverage(&manifest) {
        return Ok(Published::BelowCoverage(Box::new(manifest)));
    }
    let withheld = manifest.guards.as_ref().is_some_and(GuardReport::withholds);
    if withheld {
        return Ok(Published::Breached(Box::new(manifest)));
    }
    if let Some(table) = &table {
        table.publish(run.plan.date, run.name()).await?;
    }
    data_set::complete(&folder).await?;
    write_in_force(run, kind).await?;
    Ok(Published::Complete(Box::new(manifest)))
}

/// Tells readers of the complete run.
async fn write_in_force(run: &PlannedRun, kind: Kind) -> Result<(), LocationError> {
    data_set::write_in_force(run.store.output(), run.plan.spec.data_set(), kind, &BTreeSet::new()).await
}
