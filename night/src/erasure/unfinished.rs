//! What is in an output and was never finished: runs, data sets and pool sets without the object that completes them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use futures::{StreamExt, TryStreamExt};
use jiff::{SignedDuration, Timestamp};
use laser_coordinator::retention::UNDER_WAY_HOURS;
use laser_pool_builder::{POOL_SET_FILE, POOL_SOURCES_FILE, POOLS_FOLDER};
use laser_schema::Kind;
use laser_schema::erasure::Removed;
use laser_schema::layout::DataSet;
use laser_store::Location;
use laser_store::data_set::{self, parts_in_flight};
use laser_store::erase::{FoundRows, find_rows};
use laser_store::id_list::IdList;
use laser_store::run_store::{CODES, PROMPTS, RunStore, SHARDS, run_folder};

/// Folders by the run or the pool set that they belong to.
pub(super) type Unfinished = BTreeMap<String, Vec<String>>;

/// Refuses an output in which something may be under way, and returns the rest of what is not finished.
///
/// # Errors
/// The store's, and that something unfinished was written to within [`UNDER_WAY_HOURS`].
pub(super) async fn settled(output: &Location) -> Result<Unfinished> {
    let unfinished = find(output).await?;
    let limit = Timestamp::now() - SignedDuration::from_hours(UNDER_WAY_HOURS);
    for (name, folders) in &unfinished {
        for folder in folders {
            let written = output.join(folder).list().await?.into_iter().map(|listed| listed.modified).max();
            if written.is_some_and(|written| written >= limit) {
                let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
                bail!(
                    "{}: {name} is not finished and may be under way: it was written to within {UNDER_WAY_HOURS} \
                     hours; let the command that began it end it, or stop its processes and remove {}",
                    output.join(folder).url(),
                    folders.join(" and ")
                );
            }
        }
    }
    Ok(unfinished)
}

/// Those of which a table holds any of the entities, whatever their kind, and what does not say whose texts it holds:
/// pool sets, and runs with prompts that coordinators shared or with histories for drafts. They are of no use to
/// anybody and are removed. Adds the entities to `found`.
pub(super) async fn holding(
    output: &Location,
    unfinished: Unfinished,
    ids: &IdList,
    found: &mut BTreeSet<String>,
) -> Result<Vec<Removed>> {
    let mut removed = Vec::new();
    for (name, folders) in unfinished {
        let mut holds = folders.iter().any(|folder| folder.starts_with(POOLS_FOLDER));
        for folder in &folders {
            let held = ids_below(&output.join(folder), ids).await?;
            holds |= !held.is_empty();
            holds |= !output.join(folder).join(PROMPTS.name).list().await?.is_empty();
            holds |= output.join(folder).join(CODES).exists().await?;
            found.extend(held);
        }
        if holds {
            removed.push(Removed { name, folders, reason: "it was never finished".to_owned() });
        }
    }
    Ok(removed)
}

async fn ids_below(folder: &Location, ids: &IdList) -> Result<BTreeSet<String>> {
    let names = folder.names_after(None).await?.into_iter();
    let tables = names.filter(|name| name.starts_with("part-") || SHARDS.has(name));
    let tables: Vec<Location> = tables.map(|name| folder.join(&name)).collect();
    let found = futures::stream::iter(&tables).map(|table| find_rows(table, ids)).buffered(parts_in_flight());
    let found: Vec<FoundRows> = found.try_collect().await?;
    Ok(found.into_iter().flat_map(|found| found.ids).collect())
}

async fn find(output: &Location) -> Result<Unfinished> {
    let mut unfinished = Unfinished::new();
    for data_set in DataSet::ALL {
        for kind in Kind::ALL {
            for date in data_set::nights(output, data_set, kind).await? {
                for run in data_set::runs(output, data_set, kind, date).await? {
                    let folder = data_set.folder(kind, date, &run);
                    if !data_set::is_complete(&output.join(&folder)).await? {
                        unfinished.entry(run).or_default().push(folder);
                    }
                }
            }
        }
    }
    for run in RunStore::names(output).await? {
        let store = RunStore::new(output, &run);
        let is_published = match store.planned().await? {
            Some(planned) => planned.is_published().await?,
            // Retention removes the plan first: it was killed before it came to the rest, or the run was never planned.
            None => false,
        };
        if !is_published {
            let folder = run_folder(&run);
            unfinished.entry(run).or_default().push(folder);
        }
    }
    for set in output.join(POOLS_FOLDER).folders().await? {
        let folder = format!("{POOLS_FOLDER}/{set}");
        let names = output.join(&folder).names_after(None).await?;
        let is_finished = names.iter().any(|name| name == POOL_SET_FILE);
        // A set that is being built names its sources before its texts are read, and may have no pool for long.
        let is_begun = names.iter().any(|name| name == POOL_SOURCES_FILE || name.ends_with(".pool"));
        if is_begun && !is_finished {
            unfinished.entry(set).or_default().push(folder);
        }
    }
    Ok(unfinished)
}
