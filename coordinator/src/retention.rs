//! Retention: finds and removes everything in an output that is older than the nights to keep.
//!
//! Everything that belongs to a run bears its name, which begins with its date: the published folders of texts, lists,
//! embeddings and knowledge ids, `runs/RUN` and `pools/RUN`. Anything dated before the oldest kept night, of texts or
//! lists, is outdated, except for the following, which is never removed:
//!
//! - the two newest complete nights of each kind, of its texts, lists, embeddings and ids alike: the second is what a
//!   run of the first was or is being made from;
//! - runs that are under way, and what they were begun with, canaries included, which else leave with their night;
//! - pool sets that the caller keeps (the promoted one and the one that a rollback goes to);
//! - files that are not named as Laser names them, and folders without a dated name.
//!
//! Runs leave the Delta tables and the lists of runs in force first, see [`withdraw`]. Removal may be killed anywhere
//! and repeated: a run's plan goes first, so that nobody takes it up again, then `_SUCCESS`, so that no reader takes
//! half a night for a whole one, then the rest. A night's promotions go with its last run. Surveying lists folders of
//! nights and runs; parts are listed only where they are removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use jiff::civil::Date;
use jiff::{SignedDuration, Timestamp};
use laser_delta::{DeltaError, Table};
use laser_schema::Kind;
use laser_schema::ids::CODEBOOK;
use laser_schema::layout::{CANARIES, DataSet, name_date};
use laser_schema::manifest::{BEGUN, ERRORS, MANIFEST, SUCCESS};
use laser_store::Location;
use laser_store::data_set::{self, PROMOTIONS};
use laser_store::location::LocationError;
use laser_store::run_store::{PINS, PLAN, RunStore, RunStoreError, is_file_of_run, run_folder};

/// A run that is not published counts as under way if it wrote something within these hours: nights that are two days
/// old are not resumed.
pub const UNDER_WAY_HOURS: i64 = 48;

/// Complete nights of each kind that stay, whatever is configured.
const NIGHTS_MIN: usize = 2;

/// The folder of pool sets.
const POOLS: &str = "pools";

/// The file of a pool set that says what it was built from.
const POOL_SOURCES: &str = "sources.json";

/// The reasons why nothing could be removed.
#[derive(Debug, thiserror::Error)]
pub enum RetentionError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A run that is under way.
    #[error(transparent)]
    Run(#[from] RunStoreError),
    /// A Delta table that has a run to remove.
    #[error(transparent)]
    Delta(#[from] DeltaError),
}

/// What to keep.
#[derive(Debug, Clone)]
pub struct Keep {
    /// Number of newest nights with complete output of any kind to keep, at least two.
    pub nights: usize,
    /// Pool sets to keep, by their folder below the output's root.
    pub pools: BTreeSet<String>,
    /// The current time, to decide which runs are under way.
    pub now: Timestamp,
}

/// A run that has something to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outdated {
    /// Its name.
    pub run: String,
    /// The folders to remove, below the output's root.
    pub folders: Vec<String>,
}

/// A run's folder of one kind.
struct Partition {
    data_set: DataSet,
    kind: Kind,
    date: Date,
    folder: String,
    complete: bool,
}

/// Everything with a dated name in an output.
struct Survey<'a> {
    output: &'a Location,
    partitions: BTreeMap<String, Vec<Partition>>,
    runs: BTreeSet<String>,
    pools: BTreeSet<String>,
}

/// Returns the runs that have something outdated, oldest first; none while there are fewer complete nights than to
/// keep.
///
/// # Errors
/// The store's.
pub async fn outdated(output: &Location, keep: &Keep) -> Result<Vec<Outdated>, RetentionError> {
    let survey = Survey::of(output).await?;
    let Some(oldest) = survey.oldest_kept(keep.nights.max(NIGHTS_MIN)) else {
        return Ok(Vec::new());
    };
    let below = output.join(CANARIES);
    let canaries = Survey::of(&below).await?;
    let (mut runs, mut pools) = (survey.newest_of_each_kind(), keep.pools.clone());
    survey.protect_under_way(keep.now, &mut runs, &mut pools).await?;
    canaries.protect_under_way(keep.now, &mut runs, &mut pools).await?;
    // A canary names the pools of nights by their URL.
    let root = output.absolute_url() + "/";
    let pools = pools.into_iter().map(|pools| pools.strip_prefix(&root).map(str::to_owned).unwrap_or(pools)).collect();
    let mut outdated = survey.outdated(oldest, &runs, &pools);
    for mut canary in canaries.outdated(oldest, &runs, &pools) {
        canary.folders.iter_mut().for_each(|folder| *folder = format!("{CANARIES}/{folder}"));
        outdated.push(canary);
    }
    outdated.sort_by(|a, b| a.run.cmp(&b.run));
    Ok(outdated)
}

impl<'a> Survey<'a> {
    async fn of(output: &'a Location) -> Result<Self, LocationError> {
        let dated = |names: Vec<String>| names.into_iter().filter(|n| name_date(n).is_some());
        let runs = dated(RunStore::names(output).await?).collect();
        let pools = dated(output.join(POOLS).folders().await?).collect();
        let mut partitions: BTreeMap<String, Vec<Partition>> = BTreeMap::new();
        for data_set in DataSet::ALL {
            for kind in Kind::ALL {
                for date in data_set::nights(output, data_set, kind).await? {
                    let runs = data_set::runs(output, data_set, kind, date).await?;
                    for run in dated(runs) {
                        let folder = data_set.folder(kind, date, &run);
                        let complete = data_set::is_complete(&output.join(&folder)).await?;
                        let found = Partition { data_set, kind, date, folder, complete };
                        partitions.entry(run).or_default().push(found);
                    }
                }
            }
        }
        Ok(Self { output, partitions, runs, pools })
    }

    /// Returns the runs before a date that have something to remove.
    fn outdated(&self, oldest: Date, kept: &BTreeSet<String>, kept_pools: &BTreeSet<String>) -> Vec<Outdated> {
        let names = self.partitions.keys().chain(&self.runs).chain(&self.pools);
        let names: BTreeSet<&String> =
            names.filter(|run| name_date(run).is_some_and(|date| date < oldest) && !kept.contains(*run)).collect();
        let outdated =
            names.into_iter().map(|run| Outdated { run: run.clone(), folders: self.folders(run, kept_pools) });
        outdated.filter(|o| !o.folders.is_empty()).collect()
    }

    fn complete(&self) -> impl Iterator<Item = (&String, &Partition)> {
        let all = self.partitions.iter();
        all.flat_map(|(run, parts)| parts.iter().map(move |part| (run, part))).filter(|(_, part)| part.complete)
    }

    /// Returns the date of the oldest night to keep.
    fn oldest_kept(&self, nights: usize) -> Option<Date> {
        let of_runs = self.complete().map(|(_, part)| part);
        let of_runs = of_runs.filter(|part| DataSet::OF_RUNS.contains(&part.data_set));
        let dates: BTreeSet<Date> = of_runs.map(|part| part.date).collect();
        dates.into_iter().rev().nth(nights - 1)
    }

    /// Returns the runs of the newest complete nights of each kind.
    fn newest_of_each_kind(&self) -> BTreeSet<String> {
        let mut dates: BTreeMap<_, BTreeSet<Date>> = BTreeMap::new();
        for (_, part) in self.complete() {
            let of_kind = dates.entry((part.data_set, part.kind)).or_default();
            of_kind.insert(part.date);
        }
        let is_newest = |part: &Partition| {
            let of_kind = &dates[&(part.data_set, part.kind)];
            let newer = of_kind.range(part.date..).count();
            newer <= NIGHTS_MIN
        };
        let kept = self.complete().filter(|(_, part)| is_newest(part));
        kept.map(|(run, _)| run.clone()).collect()
    }

    /// Adds the runs under way to `runs`, with the runs whose output they started from, and their pools to `pools`.
    async fn protect_under_way(
        &self,
        now: Timestamp,
        runs: &mut BTreeSet<String>,
        pools: &mut BTreeSet<String>,
    ) -> Result<(), RetentionError> {
        for run in &self.runs {
            let folders = self.partitions.get(run).map_or(&[][..], Vec::as_slice);
            if !folders.is_empty() && folders.iter().all(|part| part.complete) {
                continue;
            }
            let Some(pins) = RunStore::new(self.output, run).pins().await? else {
                continue;
            };
            if self.newest_object(run, folders).await? < now - SignedDuration::from_hours(UNDER_WAY_HOURS) {
                continue;
            }
            runs.insert(run.clone());
            let previous = pins.previous.iter().filter_map(|folder| folder.rsplit_once("/run="));
            runs.extend(previous.map(|(_, run)| run.to_owned()));
            pools.insert(pins.pools);
        }
        Ok(())
    }

    /// Returns the time at which a run last wrote something, by the store's clock.
    async fn newest_object(&self, run: &str, folders: &[Partition]) -> Result<Timestamp, LocationError> {
        let mut newest = Timestamp::UNIX_EPOCH;
        let folders = folders.iter().map(|part| part.folder.clone());
        for folder in folders.chain([run_folder(run)]) {
            let listed = self.output.join(&folder).list().await?;
            newest = listed.iter().map(|l| l.modified).fold(newest, Timestamp::max);
        }
        Ok(newest)
    }

    /// Returns all folders of a run except the pool sets to keep.
    fn folders(&self, run: &String, kept_pools: &BTreeSet<String>) -> Vec<String> {
        let parts = self.partitions.get(run).map_or(&[][..], Vec::as_slice);
        let mut folders: Vec<String> = parts.iter().map(|part| part.folder.clone()).collect();
        let pools = format!("{POOLS}/{run}");
        if self.pools.contains(run) && !kept_pools.contains(&pools) {
            folders.push(pools);
        }
        if self.runs.contains(run) {
            folders.push(run_folder(run));
        }
        folders
    }
}

/// Takes the runs out of the Delta tables of the output, with one commit per table, and out of the lists of runs in
/// force. Call it before [`remove`], so that no reader looks for a file that is gone.
///
/// # Errors
/// The store's, and a table that cannot be read; then nothing was removed.
pub async fn withdraw(output: &Location, outdated: &[Outdated]) -> Result<(), RetentionError> {
    withdraw_below(output, "", outdated).await?;
    withdraw_below(&output.join(CANARIES), &format!("{CANARIES}/"), outdated).await
}

/// As [`withdraw`], of the folders that begin with `prefix`.
async fn withdraw_below(output: &Location, prefix: &str, outdated: &[Outdated]) -> Result<(), RetentionError> {
    for data_set in DataSet::ALL {
        for kind in Kind::ALL {
            let dated = outdated.iter().filter_map(|o| Some((o, name_date(&o.run)?)));
            let folder = |o: &Outdated, date| format!("{prefix}{}", data_set.folder(kind, date, &o.run));
            let runs = dated.filter(|(o, date)| o.folders.contains(&folder(o, *date)));
            let runs: BTreeMap<String, Date> = runs.map(|(o, date)| (o.run.clone(), date)).collect();
            if !runs.is_empty() {
                Table::new(output, data_set, kind).remove(&runs).await?;
                data_set::write_in_force(output, data_set, kind, &runs.into_keys().collect()).await?;
            }
        }
    }
    Ok(())
}

/// Removes everything outdated of a run and returns the number of objects removed.
///
/// # Errors
/// The store's. Call again to continue.
pub async fn remove(output: &Location, outdated: &Outdated) -> Result<usize, LocationError> {
    let run = run_folder(&outdated.run);
    let mut removed = 0;
    // The objects that make a run, a night or a pool set complete go first, in this order and one by one.
    let first = outdated.folders.iter().filter(|folder| folder.ends_with(&run));
    for folder in first.chain(&outdated.folders) {
        for head in HEADS {
            output.join(folder).join(head).remove().await?;
        }
    }
    for folder in &outdated.folders {
        let folder = output.join(folder);
        let listed = folder.list().await?.into_iter().map(|l| l.name);
        let ours: Vec<String> = listed.filter(|name| is_ours(name)).collect();
        removed += ours.len();
        // As with folders: what cannot be removed stays.
        let _ = remove_staged(&folder);
        folder.remove_below(ours).await?;
    }
    for folder in &outdated.folders {
        // Remove the night's folder, with its promotions, if this was its last run.
        if let Some((night, _)) = folder.rsplit_once("/run=") {
            let night = output.join(night);
            let is_last = !night.folders().await?.iter().any(|name| name.starts_with("run="));
            let promotions = if is_last { night.join(PROMOTIONS).list().await? } else { Vec::new() };
            night.remove_below(promotions.iter().map(|p| format!("{PROMOTIONS}/{}", p.name)).collect()).await?;
        }
    }
    Ok(removed)
}

/// The objects that make a run, a night or a pool set complete.
const HEADS: [&str; 5] = [PINS, PLAN, SUCCESS, MANIFEST, "pools.json"];

/// Removes what processes that were killed while they wrote have left below a folder on a local disk. The store writes
/// `NAME#1` and gives the file its name at the end, so no list has it, but it may hold texts. Nothing must be under way
/// there.
///
/// # Errors
/// The file system's.
pub fn remove_staged(folder: &Location) -> std::io::Result<()> {
    folder.local_path().map_or(Ok(()), |path| remove_staged_below(&path, ""))
}

fn remove_staged_below(folder: &Path, name: &str) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = format!("{name}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            remove_staged_below(&entry.path(), &format!("{name}/"))?;
        } else if let Some((whole, number)) = name.rsplit_once('#')
            && number.parse::<u32>().is_ok()
            && (is_ours(whole) || HEADS.contains(&whole))
        {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether Laser gives files of runs, nights and pool sets this name.
fn is_ours(name: &str) -> bool {
    let matches = |prefix: &str, suffix: &str| {
        let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix));
        rest.is_some_and(|middle| !middle.contains('/'))
    };
    is_file_of_run(name)
        || [BEGUN, ERRORS, CODEBOOK, POOL_SOURCES].contains(&name)
        || matches("part-", ".parquet")
        || matches("", ".pool")
}
