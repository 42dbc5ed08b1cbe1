//! Where a run keeps what it writes: no other module knows the paths of a run, or names its files.
//!
//! ```text
//! OUTPUT/runs/RUN/pins.json               what the run was begun with
//!                 plan.json               the plan, written last and whole
//!                 shards/*.parquet        the shards' inputs
//!                 prompts/*.prompts       prompts that coordinators render for each other, until there is a plan
//!                 audits/*.json           the outputs of audit shards
//!                 guards/KIND-POOL.json   verdicts on pools
//!                 estimate.json           what `laser plan --estimate` expects the run to take
//!                 items.trie, out_of_stock.json, titles.parquet
//!                                         the catalogue, of a run that makes lists
//!                 items.counted, histories.pool
//!                                         what the histories say, for drafts of lists
//!                 cancelled, lock         markers
//! OUTPUT/profiles/kind=KIND/dt=DATE/run=RUN/part-*.parquet and, once published, _manifest.json and _SUCCESS; of lists
//!                                           below recommendations/ in place of profiles/
//! ```
//!
//! Pins, plan and verdicts are created once, by put-if-absent: of any number of processes one wins, and all of them
//! go on with what it wrote.

mod committed;
mod files;
mod prompts;

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use committed::Committed;
pub use files::{
    AUDITS, CANCELLED, CODES, COUNTED, ESTIMATE, FILES, GUARDS, LOCK, OUT_OF_STOCK, PINS, PLAN, PROMPTS, SHARDS,
    SUBFOLDERS, Subfolder, TITLES, TRIE, is_file_of_run,
};
pub use prompts::{Prompt, prompts_name};

use crate::data_set;
use crate::location::{Created, Location, LocationError};
use laser_schema::Digest;
use laser_schema::Kind;
use laser_schema::estimate::Estimate;
use laser_schema::guard::Verdict;
use laser_schema::job::{PLAN_VERSION, Plan, ShardJob};
use laser_schema::layout::Pins;

/// The folder of all runs.
const RUNS: &str = "runs";

/// Why a run's own files are of no use.
#[derive(Debug, thiserror::Error)]
pub enum RunStoreError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A file holds something else.
    #[error("{file}: not {expected} of a run: {reason}; remove the run's folder to begin it anew")]
    Unreadable {
        /// The file.
        file: String,
        /// The expected content.
        expected: &'static str,
        /// The fault.
        reason: String,
    },
    /// Another process has locked the run.
    #[error("{folder}: another process is working on run {run}; wait for it, or give another [output] path")]
    Locked {
        /// The run's folder.
        folder: String,
        /// The run.
        run: String,
    },
    /// The run's folder cannot be written to.
    #[error("{file}: the output is not writable")]
    NotWritable {
        /// The folder or file.
        file: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The folder of a run, relative to the output's root.
pub fn run_folder(run: &str) -> String {
    format!("{RUNS}/{run}")
}

/// The output of an audit shard, relative to the output's root; `shard` is its number with leading zeros.
pub fn audit_output(run: &str, shard: &str) -> String {
    format!("{}/{}", run_folder(run), AUDITS.file(shard))
}

/// The files of a run, known by its name.
#[derive(Debug, Clone)]
pub struct RunStore {
    output: Location,
    run: String,
}

impl RunStore {
    /// The run of this name below an output's root. Nothing is read or written.
    pub fn new(output: &Location, run: impl Into<String>) -> Self {
        Self { output: output.clone(), run: run.into() }
    }

    /// The names of all runs that an output holds anything of, newest first.
    pub async fn names(output: &Location) -> Result<Vec<String>, LocationError> {
        let mut names = output.join(RUNS).folders().await?;
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(names)
    }

    /// The run's name.
    pub fn name(&self) -> &str {
        &self.run
    }

    /// The output's root.
    pub fn output(&self) -> &Location {
        &self.output
    }

    /// The run's own folder.
    pub fn folder(&self) -> Location {
        self.output.join(&run_folder(&self.run))
    }

    /// Returns the pins that the run was begun with, if it was begun.
    pub async fn pins(&self) -> Result<Option<Pins>, RunStoreError> {
        self.read(PINS, "the pins").await
    }

    /// Begins the run with these pins, unless it was begun before; returns those that hold.
    pub async fn begin(&self, pins: Pins) -> Result<Pins, RunStoreError> {
        self.create(PINS, "the pins", pins).await
    }

    /// The run with its plan, if it is planned.
    ///
    /// # Errors
    /// [`RunStoreError`]; a plan of another version is an error too.
    pub async fn planned(&self) -> Result<Option<PlannedRun>, RunStoreError> {
        Ok(self.plan().await?.map(|plan| PlannedRun::new(self.clone(), plan)))
    }

    /// The run's plan, if it is planned.
    ///
    /// # Errors
    /// [`RunStoreError`]; a plan of another version is an error too.
    pub async fn plan(&self) -> Result<Option<Plan>, RunStoreError> {
        let plan: Option<Plan> = self.read(PLAN, "the plan").await?;
        match plan {
            Some(Plan { version, .. }) if version != PLAN_VERSION => Err(RunStoreError::Unreadable {
                file: self.folder().join(PLAN).url().to_owned(),
                expected: "the plan",
                reason: format!("plan version {version}, this Laser reads {PLAN_VERSION}"),
            }),
            plan => Ok(plan),
        }
    }

    /// Writes the plan, unless the run was planned before; returns the one that holds.
    pub async fn write_plan(&self, plan: Plan) -> Result<Plan, RunStoreError> {
        match self.folder().join(PLAN).create(encode(&plan)).await? {
            Created::Won => Ok(plan),
            Created::Exists => Ok(self.plan().await?.unwrap_or(plan)),
        }
    }

    /// Writes a plan in place of the one that is there: only an erasure does, of whose shards rows have gone.
    pub async fn replace_plan(&self, plan: &Plan) -> Result<(), LocationError> {
        self.folder().join(PLAN).write(encode(plan)).await
    }

    /// When the run was planned, by the store's clock.
    ///
    /// # Errors
    /// The store's, also if there is no plan.
    pub async fn planned_at(&self) -> Result<Timestamp, LocationError> {
        self.folder().join(PLAN).modified().await
    }

    /// What the run was expected to take, if that was estimated.
    pub async fn estimate(&self) -> Result<Option<Estimate>, RunStoreError> {
        self.read(ESTIMATE, "the estimate").await
    }

    /// Keeps an estimate in place of an earlier one.
    pub async fn keep_estimate(&self, estimate: &Estimate) -> Result<(), LocationError> {
        self.folder().join(ESTIMATE).write(encode(estimate)).await
    }

    /// The verdict on a pool, if it was judged.
    pub async fn verdict(&self, kind: Kind, pool: &str) -> Result<Option<Verdict>, RunStoreError> {
        self.read(&verdict_file(kind, pool), "the verdict on a pool").await
    }

    /// Writes the verdict on a pool, unless it was judged before; returns the one that holds.
    pub async fn judge(&self, kind: Kind, pool: &str, verdict: Verdict) -> Result<Verdict, RunStoreError> {
        self.create(&verdict_file(kind, pool), "the verdict on a pool", verdict).await
    }

    /// Whether the run was cancelled.
    pub async fn is_cancelled(&self) -> Result<bool, LocationError> {
        self.folder().join(CANCELLED).exists().await
    }

    /// Cancels the run.
    pub async fn cancel(&self) -> Result<(), LocationError> {
        self.folder().join(CANCELLED).write(Bytes::new()).await
    }

    /// Takes a cancellation back.
    pub async fn resume(&self) -> Result<(), LocationError> {
        self.folder().join(CANCELLED).remove().await
    }

    /// Keeps a second process off a run on a local disk for as long as the file is open. On a remote store the commit
    /// alone decides; two processes would waste work, never double a row.
    ///
    /// # Errors
    /// If another process has the lock, or the folder cannot be written to.
    pub fn lock(&self) -> Result<Option<File>, RunStoreError> {
        let Some(folder) = self.folder().local_path() else {
            return Ok(None);
        };
        let name = folder.join(LOCK);
        let not_writable = |source| RunStoreError::NotWritable { file: name.display().to_string(), source };
        std::fs::create_dir_all(&folder).map_err(not_writable)?;
        let file = File::create(&name).map_err(not_writable)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => {
                Err(RunStoreError::Locked { folder: folder.display().to_string(), run: self.run.clone() })
            }
            Err(TryLockError::Error(source)) => Err(not_writable(source)),
        }
    }

    async fn read<T: DeserializeOwned>(&self, file: &str, expected: &'static str) -> Result<Option<T>, RunStoreError> {
        let file = self.folder().join(file);
        let Some(bytes) = file.read_optional().await? else {
            return Ok(None);
        };
        let content = serde_json::from_slice(&bytes);
        content.map(Some).map_err(|e| RunStoreError::Unreadable {
            file: file.url().to_owned(),
            expected,
            reason: e.to_string(),
        })
    }

    async fn create<T>(&self, file: &str, expected: &'static str, content: T) -> Result<T, RunStoreError>
    where
        T: Serialize + DeserializeOwned,
    {
        match self.folder().join(file).create(encode(&content)).await? {
            Created::Won => Ok(content),
            Created::Exists => Ok(self.read(file, expected).await?.unwrap_or(content)),
        }
    }
}

/// Created before any of the pool's texts, and read by whoever generates one.
fn verdict_file(kind: Kind, pool: &str) -> String {
    GUARDS.file(&format!("{kind}-{pool}"))
}

/// Plain data with string keys always serialises.
fn encode(content: &impl Serialize) -> Bytes {
    serde_json::to_vec_pretty(content).unwrap_or_default().into()
}

/// A run and its plan. Clones share the plan.
#[derive(Debug, Clone)]
pub struct PlannedRun {
    /// The run's files.
    pub store: RunStore,
    /// The work to do.
    pub plan: Arc<Plan>,
}

impl PlannedRun {
    /// A run of which the plan is known.
    pub fn new(store: RunStore, plan: Plan) -> Self {
        Self { store, plan: Arc::new(plan) }
    }

    /// The run's name.
    pub fn name(&self) -> &str {
        self.store.name()
    }

    /// The digest of the plan's file.
    pub fn plan_digest(&self) -> Digest {
        Digest::of(&encode(&*self.plan))
    }

    /// The input of a shard.
    pub fn input(&self, job: &ShardJob) -> Location {
        self.store.folder().join(&job.input)
    }

    /// The output of a shard: creating it is the commit.
    pub fn part(&self, job: &ShardJob) -> Location {
        self.store.output.join(&job.output)
    }

    /// The folder of a kind's published output.
    pub fn partition(&self, kind: Kind) -> Location {
        self.store.output.join(&self.plan.partition(kind))
    }

    /// The pools that the run drafts from.
    ///
    /// # Errors
    /// If the plan names a place that is none.
    pub fn pools(&self) -> Result<Location, LocationError> {
        self.store.output.resolve(&self.plan.pools)
    }

    /// The kinds whose `_SUCCESS` is there.
    pub async fn published(&self) -> Result<Vec<Kind>, LocationError> {
        let mut published = Vec::new();
        for &kind in self.plan.counts.keys() {
            if data_set::is_complete(&self.partition(kind)).await? {
                published.push(kind);
            }
        }
        Ok(published)
    }

    /// Whether every kind is published.
    pub async fn is_published(&self) -> Result<bool, LocationError> {
        Ok(self.published().await?.len() == self.plan.counts.len())
    }

    /// The shards whose output exists.
    pub async fn committed(&self) -> Result<Vec<u32>, LocationError> {
        let mut committed = Committed::new(self);
        committed.poll().await?;
        Ok(committed.shards())
    }

    /// When each output of a shard was committed, by its path below the output's root.
    pub async fn commit_times(&self) -> Result<HashMap<String, Timestamp>, LocationError> {
        let mut times = HashMap::new();
        let partitions = self.plan.counts.keys().map(|&kind| self.plan.partition(kind));
        for folder in partitions.chain([run_folder(self.name())]) {
            let listed = self.store.output.join(&folder).list().await?;
            times.extend(listed.into_iter().map(|l| (format!("{folder}/{}", l.name), l.modified)));
        }
        Ok(times)
    }

    /// When each audit was committed.
    pub async fn audit_times(&self) -> Result<Vec<Timestamp>, LocationError> {
        let listed = self.store.folder().join(AUDITS.name).list().await?;
        Ok(listed.iter().map(|listed| listed.modified).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_two_beginnings_of_a_run_the_first_stands() {
        let dir = tempfile::tempdir().unwrap();
        let output = Location::parse(dir.path().to_str().unwrap()).unwrap();
        let run = RunStore::new(&output, "r");
        let pins = |pools: &str| Pins { previous: Vec::new(), pools: pools.to_owned() };
        assert_eq!(run.pins().await.unwrap(), None);
        assert_eq!(run.begin(pins("a")).await.unwrap(), pins("a"));
        assert_eq!(run.begin(pins("b")).await.unwrap(), pins("a"));
        output.join("runs/r/pins.json").write("x".into()).await.unwrap();
        let error = run.begin(pins("b")).await.unwrap_err().to_string();
        assert!(error.contains("pins.json: not the pins of a run"), "{error}");
    }

    #[test]
    fn a_run_is_locked_by_one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunStore::new(&Location::parse(dir.path().to_str().unwrap()).unwrap(), "r");
        let lock = run.lock().unwrap();
        assert!(lock.is_some());
        let error = run.lock().unwrap_err().to_string();
        assert!(error.contains("another process is working on run r"), "{error}");
        drop(lock);
        run.lock().unwrap();
    }
}
