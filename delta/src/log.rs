//! A table's log through the Delta kernel: what a version holds, and one more commit. All of it blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{Array, StringArray};
use arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
use delta_kernel::committer::FileSystemCommitter;
use delta_kernel::engine::arrow_conversion::TryIntoArrow;
use delta_kernel::engine::arrow_data::ArrowEngineData;
use delta_kernel::engine_data::FilteredEngineData;
use delta_kernel::scan::state::ScanFile;
use delta_kernel::schema::{StructField, StructType};
use delta_kernel::transaction::create_table::create_table;
use delta_kernel::transaction::data_layout::DataLayout;
use delta_kernel::transaction::{CommitResult, CommittedTransaction, Transaction, UpdateTableOperation};
use delta_kernel::{KernelError, KernelResult, Snapshot, SnapshotRef};
use delta_kernel_default_engine::executor::tokio::TokioMultiThreadExecutor;
use delta_kernel_default_engine::{DefaultEngine, DefaultEngineBuilder};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::knowledge::WRITER;
use laser_store::Location;
use serde::Serialize;
use url::Url;

use crate::columns::{PARTITION, table_schema};
use crate::night::Night;

/// A reader replays this many commits at most, as Delta tables have it by default; a checkpoint is written then.
const CHECKPOINT_COMMITS: u64 = 10;

/// A table's log.
#[derive(Debug)]
pub(crate) struct Log {
    engine: DefaultEngine<TokioMultiThreadExecutor>,
    url: Url,
}

/// A file of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct File {
    /// `None` if the log does not say.
    pub(crate) rows: Option<u64>,
    pub(crate) bytes: u64,
}

/// A table at one version.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    snapshot: SnapshotRef,
    /// By path below the table's root.
    pub(crate) files: BTreeMap<String, File>,
}

/// One commit.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) operation: UpdateTableOperation,
    pub(crate) kind: Kind,
    /// Columns that the table lacks.
    pub(crate) columns: Vec<StructField>,
    /// Versions of transaction ids by run.
    pub(crate) transactions: BTreeMap<String, i64>,
    /// Files of these folders leave.
    pub(crate) removed: Vec<String>,
    pub(crate) added: Vec<Night>,
}

/// The metadata of an added file, as the kernel wants it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Added {
    path: String,
    partition_values: BTreeMap<&'static str, String>,
    size: u64,
    modification_time: i64,
    stats: Stats,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Stats {
    num_records: u64,
    tight_bounds: bool,
}

impl Version {
    /// The nights of which the table has files.
    pub(crate) fn dates(&self) -> BTreeSet<Date> {
        self.files.keys().filter_map(|path| Some(split(path)?.0)).collect()
    }

    /// The files of a folder, by their path below it.
    pub(crate) fn files_in(&self, folder: &str) -> BTreeMap<&str, File> {
        let folder = format!("{folder}/");
        let files =
            self.files.range(folder.clone()..).map_while(|(path, file)| Some((path.strip_prefix(&folder)?, *file)));
        files.collect()
    }

    pub(crate) fn schema(&self) -> Arc<StructType> {
        self.snapshot.schema()
    }
}

/// Night, run and name of a path below the table's root; `None` if it is none of Laser's.
pub(crate) fn split(path: &str) -> Option<(Date, &str, &str)> {
    let (date, rest) = path.strip_prefix("dt=")?.split_once("/run=")?;
    let (run, name) = rest.split_once('/')?;
    Some((date.parse().ok()?, run, name))
}

impl Log {
    /// The log of the table in a folder.
    pub(crate) fn open(root: &Location, runtime: tokio::runtime::Handle) -> KernelResult<Self> {
        let (store, path) = root.store();
        let url = match root.local_path() {
            Some(path) => Url::from_directory_path(path).ok(),
            // The store is that of the URL, so of the URL only the path inside it counts.
            None => Url::parse(root.url()).ok().map(|mut url| {
                url.set_path(&format!("/{path}/"));
                url
            }),
        };
        let url = url.ok_or_else(|| KernelError::invalid_table_location(root.url()))?;
        let executor = Arc::new(TokioMultiThreadExecutor::new(runtime));
        Ok(Self { engine: DefaultEngineBuilder::new(store).with_task_executor(executor).build(), url })
    }

    /// Commits an empty table, unless another process was first.
    pub(crate) fn create(&self, columns: &[StructField]) -> KernelResult<()> {
        let schema = Arc::new(table_schema(columns)?);
        let table = create_table(&self.url, schema, WRITER, false);
        let table = table.with_data_layout(DataLayout::partitioned(PARTITION));
        match table.build(&self.engine, Box::new(FileSystemCommitter::new())) {
            Err(KernelError::TableAlreadyExistsAtPath(_)) => Ok(()),
            table => match table?.commit(&self.engine)? {
                CommitResult::Retryable(failed) => Err(failed.error),
                CommitResult::Committed(_) | CommitResult::Conflicted(_) => Ok(()),
            },
        }
    }

    /// The newest version.
    pub(crate) fn read(&self) -> KernelResult<Version> {
        let snapshot = Snapshot::builder_for(&self.url).build(&self.engine)?;
        let mut files = BTreeMap::new();
        for found in snapshot.clone().scan_builder().build()?.scan_metadata(&self.engine)? {
            files = found?.visit_scan_files(files, |files, file: ScanFile| {
                let rows = file.stats.map(|stats| stats.num_records);
                files.insert(file.path, File { rows, bytes: file.size.unsigned_abs() });
            })?;
        }
        Ok(Version { snapshot, files })
    }

    /// The version of a run's transaction id.
    pub(crate) fn transaction(&self, version: &Version, run: &str) -> KernelResult<Option<i64>> {
        version.snapshot.get_app_id_version(&application(run), &self.engine)
    }

    /// Commits the change as the version after `version`; `false` if another process has committed that one.
    pub(crate) fn commit(&self, version: &Version, change: &Change) -> KernelResult<bool> {
        let snapshot = version.snapshot.clone();
        let mut builder = snapshot.clone().update_table(change.operation.clone(), WRITER, true);
        for column in &change.columns {
            builder = builder.add_column(column.clone());
        }
        for (run, version) in &change.transactions {
            builder = builder.with_transaction_id(application(run), *version);
        }
        let mut transaction = builder.build(&self.engine, Box::new(FileSystemCommitter::new()))?;
        add(&mut transaction, change)?;
        for found in snapshot.scan_builder().build()?.scan_metadata(&self.engine)? {
            if let Some(files) = files_below(&change.removed, found?.scan_files)? {
                transaction.remove_files(files);
            }
        }
        match transaction.commit(&self.engine)? {
            CommitResult::Committed(committed) => {
                self.checkpoint(&committed);
                Ok(true)
            }
            CommitResult::Conflicted(_) => Ok(false),
            CommitResult::Retryable(failed) => Err(failed.error),
        }
    }

    /// Spares readers the replay of many commits. The table is whole without it.
    fn checkpoint(&self, committed: &CommittedTransaction) {
        let is_due = committed.post_commit_stats().commits_since_checkpoint >= CHECKPOINT_COMMITS;
        let Some(snapshot) = committed.post_commit_snapshot().filter(|_| is_due) else {
            return;
        };
        if let Err(error) = snapshot.checkpoint(&self.engine, None) {
            tracing::warn!("{}: no checkpoint was written: {error}", self.url);
        }
    }
}

fn application(run: &str) -> String {
    format!("laser:{run}")
}

/// Stages the parts of nights that enter.
fn add(transaction: &mut Transaction, change: &Change) -> KernelResult<()> {
    let now = Timestamp::now().as_millisecond();
    let rows: Vec<Added> = change.added.iter().flat_map(|night| added(change.kind, night, now)).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let wanted: ArrowSchema = transaction.add_files_schema().as_ref().try_into_arrow()?;
    let stats = [Field::new("numRecords", DataType::Int64, true), Field::new("tightBounds", DataType::Boolean, true)];
    let fields = wanted.fields().iter().map(|field| match field.name().as_str() {
        "stats" => Arc::new(Field::new("stats", DataType::Struct(stats.to_vec().into()), true)),
        _ => field.clone(),
    });
    let schema = Arc::new(ArrowSchema::new(fields.collect::<Vec<_>>()));
    let batch = laser_store::table::to_batch(&schema, &rows).map_err(KernelError::generic)?;
    transaction.add_files(Box::new(ArrowEngineData::new(batch)));
    Ok(())
}

fn added(kind: Kind, night: &Night, now: i64) -> impl Iterator<Item = Added> + '_ {
    let folder = night.folder();
    night.parts.iter().map(move |part| Added {
        path: format!("{folder}/{}", part.name),
        partition_values: PARTITION
            .into_iter()
            .zip([kind.to_string(), night.date.to_string(), night.run.clone()])
            .collect(),
        size: part.bytes,
        modification_time: now,
        stats: Stats { num_records: part.table_rows(), tight_bounds: true },
    })
}

/// Returns those of a table's files that lie in one of the folders; `None` if none does.
fn files_below(folders: &[String], files: FilteredEngineData) -> KernelResult<Option<FilteredEngineData>> {
    let (data, selected) = files.into_parts();
    let data = ArrowEngineData::try_from_engine_data(data)?;
    let paths = data.record_batch().column_by_name("path");
    let paths = paths.and_then(|column| column.as_any().downcast_ref::<StringArray>());
    let paths = paths.ok_or_else(|| KernelError::generic("the kernel's list of files has no column path"))?;
    let below = |path: &str| folders.iter().any(|folder| path.starts_with(folder.as_str()));
    let is_below = |row: usize| selected.get(row).is_none_or(|selected| *selected) && below(paths.value(row));
    let selection: Vec<bool> = (0..paths.len()).map(is_below).collect();
    if !selection.contains(&true) {
        return Ok(None);
    }
    FilteredEngineData::try_new(data, selection).map(Some)
}
