//! Publishing: from committed parts to a data set that readers may trust.
//!
//! Every part is read back and checked, then `_errors.jsonl`, `_manifest.json` and last `_SUCCESS` are written.
//! The manifest is a function of the parts, so two coordinators that finish one run write the same bytes.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use jiff::Timestamp;
use laser_delta::{DeltaError, Table};
use laser_schema::audit::AuditReport;
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::entity::IdType;
use laser_schema::guard::{GuardReport, Guards, Verdict};
use laser_schema::job::{Action, KindCounts, Plan, ShardJob};
use laser_schema::knowledge::{ErrorRecord, Figures, PartInfo, SCHEMA_VERSION, WRITER, rows_digest};
use laser_schema::layout::PROFILES;
use laser_schema::manifest::{Cost, ERRORS, MANIFEST, Manifest, PartEntry, SUCCESS};
use laser_schema::{Digest, Embeddings, EntityId, Kind};
use laser_store::Location;
use laser_store::data_set::read_manifest;
use laser_store::location::{Created, LocationError};
use laser_store::part::{check_part, encode_part};
use laser_store::table::{self, TableError};
use laser_store::verdict::VerdictError;
use laser_store::verdict::read_verdict;
use serde::Deserialize;

/// Why nothing was published.
#[derive(Debug, thiserror::Error)]
pub enum FinaliseError {
    /// A store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A committed part is not what its writer wrote.
    #[error("{0}; remove that part and run again: only its shard is generated anew")]
    Damaged(#[from] TableError),
    /// What was found about a pool.
    #[error(transparent)]
    Verdict(#[from] VerdictError),
    /// The kind's Delta table.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// An entity stands in two parts.
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
        /// Rows of the shard.
        expected: u64,
        /// Rows and errors of the part.
        found: u64,
    },
    /// A part's embeddings are not those that the run was planned with.
    #[error("{part}: its embeddings are not those that the run was planned with; remove that part and run again")]
    Encoder {
        /// The part.
        part: String,
    },
}

/// What came of publishing one kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Published {
    /// The data set is whole: `_SUCCESS` is there.
    Complete(Box<Manifest>),
    /// Too many entities have no text: everything but `_SUCCESS` is there.
    BelowCoverage(Box<Manifest>),
    /// A pool breaches a guard that withholds the night: everything but `_SUCCESS` is there.
    Breached(Box<Manifest>),
    /// Shards are missing; nothing was written.
    Incomplete {
        /// How many.
        missing: usize,
    },
}

/// The shards whose output exists.
///
/// # Errors
/// The store's.
pub async fn committed(output: &Location, plan: &Plan) -> Result<Vec<u32>, LocationError> {
    let mut committed = Committed::new(plan);
    committed.look(output).await?;
    Ok(committed.shards())
}

/// The shards whose output was seen, for whoever looks again and again: shards are done about in their order, so
/// each look lists only what comes after the first that is missing. What is removed in the meantime is not noticed.
#[derive(Debug)]
pub struct Committed {
    folders: Vec<Folder>,
    done: Vec<bool>,
}

/// The outputs of one folder.
#[derive(Debug)]
struct Folder {
    path: String,
    /// Names with their shards, by name.
    outputs: Vec<(String, u32)>,
    /// How many of the first are all there.
    whole: usize,
}

impl Committed {
    /// Nothing seen yet.
    pub fn new(plan: &Plan) -> Self {
        let mut folders: BTreeMap<&str, Vec<(String, u32)>> = BTreeMap::new();
        for job in &plan.shards {
            let (folder, name) = job.output.rsplit_once('/').unwrap_or(("", &job.output));
            let outputs = folders.entry(folder).or_default();
            outputs.push((name.to_owned(), job.shard));
        }
        let folder = |(path, mut outputs): (&str, Vec<(String, u32)>)| {
            outputs.sort_unstable();
            Folder { path: path.to_owned(), outputs, whole: 0 }
        };
        Self { folders: folders.into_iter().map(folder).collect(), done: vec![false; plan.shards.len()] }
    }

    /// Lists what may have come since.
    ///
    /// # Errors
    /// The store's.
    pub async fn look(&mut self, output: &Location) -> Result<(), LocationError> {
        for folder in &mut self.folders {
            let (whole, missing) = folder.outputs.split_at(folder.whole);
            if missing.is_empty() {
                continue;
            }
            let last = whole.last().map(|(name, _)| name.as_str());
            for name in output.join(&folder.path).names_after(last).await? {
                if let Ok(at) = missing.binary_search_by(|(other, _)| other.cmp(&name)) {
                    self.done[missing[at].1 as usize] = true;
                }
            }
            let there = missing.iter().take_while(|o| self.done[o.1 as usize]);
            folder.whole += there.count();
        }
        Ok(())
    }

    /// By number.
    pub fn shards(&self) -> Vec<u32> {
        let done = (0..).zip(&self.done).filter(|(_, done)| **done);
        done.map(|(shard, _)| shard).collect()
    }
}

/// Commits every shard that is missing without its texts: each of its rows becomes an error record that says `reason`.
/// A worker that is still at one of them loses the create, so what is published stays as it is. Returns how many.
///
/// # Errors
/// The store's, and an input that cannot be read.
pub async fn seal(output: &Location, plan: &Plan, reason: &str) -> Result<usize, FinaliseError> {
    let done: HashSet<u32> = committed(output, plan).await?.into_iter().collect();
    let missing = plan.shards.iter().filter(|s| s.action != Action::Audit && !done.contains(&s.shard));
    let mut sealed = 0;
    for job in missing {
        let part = sealed_part(output, plan, job, reason).await?;
        let created = output.join(&job.output).create(part).await?;
        sealed += usize::from(created == Created::Won);
    }
    Ok(sealed)
}

/// Of any input's row.
#[derive(Deserialize)]
struct RowId {
    entity_id: EntityId,
}

async fn sealed_part(output: &Location, plan: &Plan, job: &ShardJob, reason: &str) -> Result<Bytes, FinaliseError> {
    let input = output.join(&plan.folder()).join(&job.input).read().await?;
    let rows: Vec<RowId> = table::decode(&job.input, input)?;
    let error =
        |row: RowId| ErrorRecord { entity_id: row.entity_id, stage: "deadline".to_owned(), reason: reason.to_owned() };
    let none = plan.embedding.as_ref();
    let none = none.map(|spec| Embeddings::new(spec.encoder.dimensions));
    let info = PartInfo {
        version: SCHEMA_VERSION,
        run: plan.run.clone(),
        shard: job.shard,
        kind: job.kind,
        writer: WRITER.to_owned(),
        attempt: "sealed".to_owned(),
        carried: 0,
        rows_digest: rows_digest(&[]),
        errors: rows.into_iter().map(error).collect(),
        figures: BTreeMap::new(),
        embedding: (plan.embedding.clone()).map(|spec| EmbeddingInfo::new(spec, 0)),
        embeddings_digest: none.as_ref().map(Embeddings::digest),
    };
    Ok(encode_part(&job.output, id_type(plan, job.kind), &[], none.as_ref(), &info)?)
}

fn id_type(plan: &Plan, kind: Kind) -> IdType {
    plan.ids.get(&kind).copied().unwrap_or(IdType::String)
}

/// What must hold for `_SUCCESS` to be written.
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
    /// Only a share of entities that must have a text.
    pub fn coverage(min_coverage: f64) -> Self {
        Self { min_coverage, guards: None, delta: false }
    }
}

/// Publishes one kind of a run, if all its shards are committed.
///
/// # Errors
/// [`FinaliseError`]; then `_SUCCESS` is not written.
pub async fn publish(output: &Location, plan: &Plan, kind: Kind, terms: &Terms) -> Result<Published, FinaliseError> {
    let folder = output.join(&plan.partition(kind));
    if let Some(manifest) = published(&folder).await? {
        if terms.delta {
            Table::new(output, PROFILES, kind).adopt(plan.date, &plan.run).await?;
        }
        return Ok(Published::Complete(Box::new(manifest)));
    }
    let done: HashSet<u32> = committed(output, plan).await?.into_iter().collect();
    let of_kind = plan.shards.iter().filter(|s| s.kind == kind);
    let (there, missing): (Vec<&ShardJob>, Vec<_>) = of_kind.partition(|s| done.contains(&s.shard));
    // A measurement that failed costs the night its figures, not its texts.
    let missing = missing.iter().filter(|s| s.action != Action::Audit).count();
    if missing > 0 {
        return Ok(Published::Incomplete { missing });
    }
    let mut sums = Sums::default();
    for job in there {
        sums.add(output, plan, job).await?;
    }
    let errors = sums.errors.iter().map(|e| serde_json::to_string(e).unwrap_or_default() + "\n");
    folder.join(ERRORS).write(Bytes::from(errors.collect::<String>())).await?;
    let guards = match &terms.guards {
        Some(guards) => Some(sums.judge(output, plan, kind, guards).await?),
        None => None,
    };
    let manifest = sums.manifest(plan, kind, guards);
    let bytes = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
    folder.join(MANIFEST).write(Bytes::from(bytes)).await?;
    if (manifest.rows as f64) < terms.min_coverage * manifest.entities as f64 {
        return Ok(Published::BelowCoverage(Box::new(manifest)));
    }
    let withheld = manifest.guards.as_ref().is_some_and(GuardReport::withholds);
    if withheld {
        return Ok(Published::Breached(Box::new(manifest)));
    }
    if terms.delta {
        Table::new(output, PROFILES, kind).publish(plan.date, &plan.run).await?;
    }
    folder.join(SUCCESS).write(Bytes::new()).await?;
    Ok(Published::Complete(Box::new(manifest)))
}

/// The manifest of a folder that was published before: it is never written again, so whatever was derived from
/// it stays true.
async fn published(folder: &Location) -> Result<Option<Manifest>, LocationError> {
    if !folder.join(SUCCESS).exists().await? {
        return Ok(None);
    }
    read_manifest::<Manifest>(folder).await
}

/// What the parts of a kind add up to.
#[derive(Default)]
struct Sums {
    seen: HashSet<EntityId>,
    rows: u64,
    carried: u64,
    errors: Vec<ErrorRecord>,
    figures: BTreeMap<String, Figures>,
    audit: BTreeMap<String, AuditReport>,
    parts: Vec<PartEntry>,
    newest: Timestamp,
    /// Texts that were cut off before they were encoded.
    truncated: u64,
}

impl Sums {
    async fn add(&mut self, output: &Location, plan: &Plan, job: &ShardJob) -> Result<(), FinaliseError> {
        let bytes = output.join(&job.output).read().await?;
        if job.action == Action::Audit {
            let report: AuditReport = serde_json::from_slice(&bytes)
                .map_err(|e| TableError::Unreadable { file: job.output.clone(), reason: e.to_string() })?;
            self.audit.entry(job.pool.clone()).or_default().add(&report);
            return Ok(());
        }
        let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
        let id = id_type(plan, job.kind);
        let (rows, info) = check_part(&job.output, id, bytes)?;
        let found = (rows.len() + info.errors.len()) as u64;
        if found != job.rows {
            return Err(FinaliseError::Rows { part: job.output.clone(), expected: job.rows, found });
        }
        let ids = rows.iter().map(|r| &r.entity_id).chain(info.errors.iter().map(|e| &e.entity_id));
        for id in ids {
            if !self.seen.insert(id.clone()) {
                return Err(FinaliseError::Duplicate { part: job.output.clone(), id: id.clone() });
            }
        }
        self.rows += rows.len() as u64;
        let newest = rows.iter().map(|row| row.created_timestamp).max();
        self.newest = self.newest.max(newest.unwrap_or_default());
        self.carried += info.carried;
        let embedding = info.embedding.as_ref();
        if embedding.map(|e| &e.spec) != plan.embedding.as_ref() {
            return Err(FinaliseError::Encoder { part: job.output.clone() });
        }
        self.truncated += embedding.map_or(0, |e| e.truncated);
        self.errors.extend(info.errors);
        for (pool, figures) in &info.figures {
            self.figures.entry(pool.clone()).or_default().add(figures);
        }
        let prefix = format!("{}/", plan.partition(job.kind));
        let name = job.output.strip_prefix(&prefix).unwrap_or(&job.output).to_owned();
        let rows = rows.len() as u64;
        self.parts.push(PartEntry { name, shard: job.shard, rows, bytes: size, digest });
        Ok(())
    }

    /// What there is to say of each pool: the verdict before its texts, where they are strict for it, else what all of
    /// them come to.
    async fn judge(
        &self,
        output: &Location,
        plan: &Plan,
        kind: Kind,
        guards: &Guards,
    ) -> Result<GuardReport, FinaliseError> {
        let mut pools = BTreeMap::new();
        for (pool, figures) in &self.figures {
            let pinned = match &plan.guards {
                Some(_) => read_verdict(output, &plan.run, kind, pool).await?,
                None => None,
            };
            let audit = self.audit.get(pool).copied().unwrap_or_default();
            let of_all = || Verdict { texts: figures.texts, breaches: guards.breaches(figures, &audit), strict: false };
            let verdict = pinned.filter(|verdict| verdict.strict);
            pools.insert(pool.clone(), verdict.unwrap_or_else(of_all));
        }
        Ok(GuardReport { guards: *guards, pools })
    }

    fn manifest(self, plan: &Plan, kind: Kind, guards: Option<GuardReport>) -> Manifest {
        let counts: KindCounts = plan.counts.get(&kind).copied().unwrap_or_default();
        let price = plan.price.as_ref();
        Manifest {
            version: SCHEMA_VERSION,
            run: plan.run.clone(),
            kind,
            date: plan.date,
            created: self.newest,
            spec: plan.spec.clone(),
            spec_digest: plan.spec.digest(),
            pool_digest: plan.pool_digest.clone(),
            entities: counts.entities,
            rows: self.rows,
            carried: self.carried,
            errors: self.errors.len() as u64,
            guards,
            cost: price.map(|price| Cost::of(price, &self.figures, &self.audit)),
            figures: self.figures,
            audit: self.audit,
            embedding: (plan.embedding.clone()).map(|spec| EmbeddingInfo::new(spec, self.truncated)),
            parts: self.parts,
        }
    }
}
