//! A data set's table: nights enter it, leave it, and are held against what is published.

use std::collections::{BTreeMap, BTreeSet};

use delta_kernel::KernelError;
use delta_kernel::schema::StructField;
use delta_kernel::transaction::UpdateTableOperation;
use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, PartEntry};
use laser_store::Location;
use laser_store::data_set::{self, ManifestError, NightRuns};
use laser_store::location::LocationError;
use laser_store::table::{TableError, TableReader};

use crate::columns::{self, Columns, Misfit};
use crate::log::{Change, File, Log, Version, split};
use crate::night::{Night, date_folder, run_folder};

/// The folder of a table's log.
const LOG: &str = "_delta_log";

/// Each lost race is another process's commit, of which a night has a handful.
const COMMITS_MAX: usize = 100;

/// Why a table was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The manifest of the night.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A part whose columns cannot be read.
    #[error(transparent)]
    Part(#[from] TableError),
    /// A night that the table cannot hold.
    #[error(
        "{table}: run {run} does not fit the table: {reason}; to begin a new table, remove {table}/{LOG} and run again"
    )]
    Unfit {
        /// The table's root.
        table: String,
        /// The night's run.
        run: String,
        /// The column and what is wrong with it.
        reason: String,
    },
    /// Other processes keep committing.
    #[error("{table}: other processes were first {COMMITS_MAX} times; run again once they are done")]
    Conflicts {
        /// The table's root.
        table: String,
    },
    /// The table's log.
    #[error("{table}: {source}")]
    Log {
        /// The table's root.
        table: String,
        /// The Delta kernel's error.
        source: Box<KernelError>,
    },
}

impl DeltaError {
    /// Whether something in the store is not what its writer wrote, or does not fit the table.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Unfit { .. } | Self::Part(_) => true,
            Self::Manifest(error) => !matches!(error, ManifestError::Location(_)),
            Self::Location(_) | Self::Conflicts { .. } | Self::Log { .. } => false,
        }
    }
}

/// The Delta table of a data set and kind. Needs a multi-threaded runtime.
#[derive(Debug, Clone)]
pub struct Table {
    output: Location,
    data_set: DataSet,
    kind: Kind,
    pub(crate) root: Location,
}

impl Table {
    /// The table of a data set of an output. Nothing is touched yet.
    pub fn new(output: &Location, data_set: DataSet, kind: Kind) -> Self {
        let root = output.join(&data_set.kind_folder(kind));
        Self { output: output.clone(), data_set, kind, root }
    }

    /// Commits a run whose manifest is there, unless the table has it or another run of the night is promoted: its
    /// parts enter, those of other runs of the night leave. Complete nights that the table lacks, such as those
    /// published before there was a table, enter with it. Creates the table.
    ///
    /// # Errors
    /// [`DeltaError`]; the table is then as it was.
    pub async fn publish(&self, date: Date, run: &str) -> Result<(), DeltaError> {
        if self.is_superseded(date, run).await? {
            return Ok(());
        }
        self.enter(date, run, |version, night, was_in| was_in && !is_changed(version, night)).await?;
        // Another run may have been promoted in the meantime.
        match self.is_superseded(date, run).await? {
            true => self.follow(date).await,
            false => Ok(()),
        }
    }

    /// Commits the run of a night that is [in force](data_set::in_force) in place of any other, after a promotion or a
    /// rollback; nothing without a table.
    ///
    /// # Errors
    /// [`DeltaError`]; the table is then as it was.
    pub async fn follow(&self, date: Date) -> Result<(), DeltaError> {
        loop {
            let in_force = self.in_force(date).await?;
            if let Some(run) = &in_force
                && self.read().await?.is_some()
            {
                self.enter(date, run, |version, night, _| is_night(version, night)).await?;
            }
            if self.in_force(date).await? == in_force {
                return Ok(());
            }
        }
    }

    async fn in_force(&self, date: Date) -> Result<Option<String>, ManifestError> {
        data_set::in_force(&self.output, self.data_set, self.kind, date).await
    }

    /// The complete runs of a night, and which of them is promoted.
    pub(crate) async fn runs(&self, date: Date) -> Result<NightRuns, ManifestError> {
        NightRuns::read(&self.output, self.data_set, self.kind, date).await
    }

    /// Whether another run of the night is promoted.
    async fn is_superseded(&self, date: Date, run: &str) -> Result<bool, ManifestError> {
        Ok(self.runs(date).await?.promoted().is_some_and(|promoted| promoted != run))
    }

    /// Commits a run in place of the others of its night, unless it `is_there`, which is told whether it is or was last
    /// in the table.
    async fn enter(
        &self,
        date: Date,
        run: &str,
        is_there: impl Fn(&Version, &Night, bool) -> bool,
    ) -> Result<(), DeltaError> {
        let Some(night) = Night::read(&self.root, date, run).await? else {
            let manifest = self.root.join(&run_folder(date, run)).join(MANIFEST);
            return Err(LocationError::NotFound { url: manifest.url().to_owned() }.into());
        };
        let Some(columns) = self.columns(&night).await? else {
            return Ok(());
        };
        for _ in 0..COMMITS_MAX {
            let Some(version) = self.read().await? else {
                let columns = columns.clone();
                self.blocking(move |log| log.create(&columns)).await?;
                continue;
            };
            let transaction = self.transaction(&version, run).await?;
            if is_there(&version, &night, is_in(transaction)) {
                return Ok(());
            }
            let change = self.entering(&version, &night, &columns, transaction).await?;
            if self.commit(version, change).await? {
                return Ok(());
            }
        }
        Err(DeltaError::Conflicts { table: self.root.url().to_owned() })
    }

    /// Commits a night that was published before there was a table; nothing if the table has a run of the night.
    ///
    /// # Errors
    /// Those of [`Self::publish`].
    pub async fn adopt(&self, date: Date, run: &str) -> Result<(), DeltaError> {
        if let Some(version) = self.read().await?
            && (version.dates().contains(&date) || self.transaction(&version, run).await?.is_some())
        {
            return Ok(());
        }
        self.publish(date, run).await
    }

    /// Creates the empty table, as [`Self::publish`] begins.
    #[cfg(test)]
    pub(crate) async fn create_as(&self, night: &Night) {
        let columns = self.columns(night).await.unwrap().unwrap();
        self.blocking(move |log| log.create(&columns)).await.unwrap();
    }

    /// Takes runs out of the table, if there is one. Their files may be removed afterwards.
    ///
    /// # Errors
    /// [`DeltaError`]; the table is then as it was.
    pub async fn remove(&self, runs: &BTreeMap<String, Date>) -> Result<(), DeltaError> {
        for _ in 0..COMMITS_MAX {
            let Some(version) = self.read().await? else {
                return Ok(());
            };
            let mut transactions = BTreeMap::new();
            for run in runs.keys() {
                // One that was never in it must not be adopted while its files are deleted.
                let before = self.transaction(&version, run).await?;
                if before.is_none_or(|before| is_in(Some(before))) {
                    transactions.insert(run.clone(), before.unwrap_or(1) + 1);
                }
            }
            if transactions.is_empty() {
                return Ok(());
            }
            let removed = transactions.keys().map(|run| run_folder(runs[run], run) + "/");
            let change = Change {
                operation: UpdateTableOperation::Delete,
                kind: self.kind,
                columns: Vec::new(),
                removed: removed.collect(),
                transactions,
                added: Vec::new(),
            };
            if self.commit(version, change).await? {
                return Ok(());
            }
        }
        Err(DeltaError::Conflicts { table: self.root.url().to_owned() })
    }

    /// Commits the rows that a run's manifest gives its parts, if the table has the run with other ones: an erasure has
    /// taken rows out of parts, which keep their names and sizes.
    ///
    /// # Errors
    /// [`DeltaError`]; the table is then as it was.
    pub async fn restate(&self, date: Date, run: &str) -> Result<(), DeltaError> {
        let Some(night) = Night::read(&self.root, date, run).await? else {
            return Ok(());
        };
        for _ in 0..COMMITS_MAX {
            let Some(version) = self.read().await? else {
                return Ok(());
            };
            let found = version.files_in(&night.folder());
            let is_restated = |part: &&PartEntry| {
                found.get(part.name.as_str()).is_some_and(|file| file.rows != Some(part.table_rows()))
            };
            let parts: Vec<PartEntry> = night.parts.iter().filter(is_restated).cloned().collect();
            if parts.is_empty() {
                return Ok(());
            }
            // A file that is added again takes the place of itself; a commit may not remove and add one file.
            let change = Change {
                operation: UpdateTableOperation::Write,
                kind: self.kind,
                columns: Vec::new(),
                transactions: BTreeMap::new(),
                removed: Vec::new(),
                added: vec![Night { parts, ..night.clone() }],
            };
            if self.commit(version, change).await? {
                return Ok(());
            }
        }
        Err(DeltaError::Conflicts { table: self.root.url().to_owned() })
    }

    /// The commit with which a night enters.
    async fn entering(
        &self,
        version: &Version,
        night: &Night,
        columns: &[StructField],
        transaction: Option<i64>,
    ) -> Result<Change, DeltaError> {
        let mut table = Columns::of(&version.schema());
        table.admit(columns).map_err(|misfit| self.unfit(night, &misfit))?;
        // Odd again: after a removal, or in place of itself.
        let entered = transaction.map_or(1, |before| before + 1 + before % 2);
        let mut transactions = BTreeMap::from([(night.run.clone(), entered)]);
        let mut added = vec![night.clone()];
        for lacking in self.lacking(version).await? {
            if lacking.date == night.date {
                continue;
            }
            match self.admit(&mut table, &lacking).await {
                Ok(()) => {
                    transactions.insert(lacking.run.clone(), 1);
                    added.push(lacking);
                }
                // A damaged night must not keep later ones from being published.
                Err(error) if error.is_damage() => tracing::warn!("left out of the table: {error}"),
                Err(error) => return Err(error),
            }
        }
        let operation = UpdateTableOperation::Write;
        let removed = vec![date_folder(night.date)];
        Ok(Change { operation, kind: self.kind, columns: table.into_new(), transactions, removed, added })
    }

    /// The complete nights that were never in the table; of a night's runs the one in force.
    pub(crate) async fn lacking(&self, version: &Version) -> Result<Vec<Night>, DeltaError> {
        let known: BTreeSet<Date> = version.dates();
        let mut lacking = Vec::new();
        for date in data_set::nights(&self.output, self.data_set, self.kind).await? {
            if known.contains(&date) {
                continue;
            }
            let runs = match self.runs(date).await {
                Err(ManifestError::Location(error)) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!("left out of the table: {error}");
                    continue;
                }
                Ok(runs) => runs,
            };
            let Some(night) = Night::complete(&self.root, date, &runs).await?.pop() else {
                continue;
            };
            if !night.parts.is_empty() && self.transaction(version, &night.run).await?.is_none() {
                lacking.push(night);
            }
        }
        Ok(lacking)
    }

    /// Makes room for the columns of an earlier night.
    pub(crate) async fn admit(&self, table: &mut Columns, night: &Night) -> Result<(), DeltaError> {
        let columns = self.columns(night).await?.unwrap_or_default();
        table.admit(&columns).map_err(|misfit| self.unfit(night, &misfit))
    }

    /// The columns of a night's parts; `None` if it has none.
    async fn columns(&self, night: &Night) -> Result<Option<Vec<StructField>>, DeltaError> {
        let Some(part) = night.parts.first() else {
            return Ok(None);
        };
        let part = TableReader::open(&self.root.join(&night.folder()).join(&part.name)).await?;
        let columns = columns::columns(part.schema()).map_err(|misfit| self.unfit(night, &misfit))?;
        Ok(Some(columns))
    }

    /// The newest version; `None` without a table.
    pub(crate) async fn read(&self) -> Result<Option<Version>, DeltaError> {
        if self.root.join(LOG).names_after(None).await?.is_empty() {
            return Ok(None);
        }
        self.blocking(Log::read).await.map(Some)
    }

    async fn transaction(&self, version: &Version, run: &str) -> Result<Option<i64>, DeltaError> {
        let (version, run) = (version.clone(), run.to_owned());
        self.blocking(move |log| log.transaction(&version, &run)).await
    }

    async fn commit(&self, version: Version, change: Change) -> Result<bool, DeltaError> {
        self.blocking(move |log| log.commit(&version, &change)).await
    }

    /// Runs what the kernel does on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Log) -> Result<T, KernelError> + Send + 'static,
    ) -> Result<T, DeltaError> {
        let (root, runtime) = (self.root.clone(), tokio::runtime::Handle::current());
        let done = tokio::task::spawn_blocking(move || work(&Log::open(&root, runtime)?)).await;
        match done.unwrap_or_else(|panicked| Err(KernelError::join_failure(panicked))) {
            Ok(done) => Ok(done),
            Err(KernelError::ObjectStore(source)) => {
                let url = self.root.join(LOG).url().to_owned();
                Err(LocationError::Store { url, action: "read or write", source }.into())
            }
            Err(source) => Err(DeltaError::Log { table: self.root.url().to_owned(), source: Box::new(source) }),
        }
    }

    fn unfit(&self, night: &Night, misfit: &Misfit) -> DeltaError {
        let reason = misfit.to_string();
        DeltaError::Unfit { table: self.root.url().to_owned(), run: night.run.clone(), reason }
    }
}

/// Whether a transaction id of this version says that its run is, or was last, in the table.
fn is_in(transaction: Option<i64>) -> bool {
    transaction.is_some_and(|version| version % 2 == 1)
}

/// Whether the table has the run with other parts: it was removed by hand and made anew.
fn is_changed(version: &Version, night: &Night) -> bool {
    let found = version.files_in(&night.folder());
    !found.is_empty() && found != expected(night)
}

/// Whether the table has the run with its parts, and of the night nothing else.
fn is_night(version: &Version, night: &Night) -> bool {
    let of_night = version.files.keys().filter(|path| split(path).is_some_and(|(date, ..)| date == night.date));
    version.files_in(&night.folder()) == expected(night) && of_night.count() == night.parts.len()
}

/// The files that a table has of a night.
pub(crate) fn expected(night: &Night) -> BTreeMap<&str, File> {
    let file = |part: &PartEntry| File { rows: Some(part.table_rows()), bytes: part.bytes };
    night.parts.iter().map(|part| (part.name.as_str(), file(part))).collect()
}
