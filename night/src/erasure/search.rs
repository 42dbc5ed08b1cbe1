//! Looks for entities in the runs and the data sets of an output that are complete.

use std::collections::{BTreeSet, HashSet};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use laser_schema::audit::Audit;
use laser_schema::erasure::{ErasedObject, ErasedPlace};
use laser_schema::job::{Action, ShardJob};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{ERRORS, MANIFEST};
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::data_set::{self, parts_in_flight};
use laser_store::erase::{FoundRows, find_rows};
use laser_store::id_list::IdList;
use laser_store::run_store::{CODES, PLAN, PlannedRun, RunStore, run_folder};

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The entities of which anything was found, as text.
    pub(super) ids: BTreeSet<String>,
    /// Where: runs, then data sets.
    pub(super) places: Vec<ErasedPlace>,
}

/// Looks everywhere. Of tables it reads the column of ids.
pub(super) async fn search(output: &Location, kind: Kind, ids: &IdList) -> Result<Found> {
    let mut found = Found::default();
    for run in RunStore::names(output).await? {
        if let Some(run) = RunStore::new(output, &run).planned().await?
            && run.is_published().await?
        {
            found.search_run(&run, kind, ids).await?;
        }
    }
    for data_set in DataSet::ALL {
        for date in data_set::nights(output, data_set, kind).await? {
            for run in data_set::runs(output, data_set, kind, date).await? {
                let folder = data_set.folder(kind, date, &run);
                if data_set::is_complete(&output.join(&folder)).await? {
                    found.search_folder(output, &folder, ids).await?;
                }
            }
        }
    }
    Ok(found)
}

impl Found {
    /// The inputs and the audits of a published run, and the histories that its drafts looked up.
    async fn search_run(&mut self, run: &PlannedRun, kind: Kind, ids: &IdList) -> Result<()> {
        let folder = run.store.folder();
        let names: HashSet<String> = folder.names_after(None).await?.into_iter().collect();
        let jobs: Vec<&ShardJob> =
            run.plan.shards.iter().filter(|job| job.kind == kind && names.contains(&job.input)).collect();
        let tables: Vec<Location> = jobs.iter().map(|job| run.input(job)).collect();
        let mut objects = Vec::new();
        for (job, rows) in jobs.into_iter().zip(find_all(&tables, ids).await?) {
            if rows.rows == 0 {
                continue;
            }
            objects.push(object(&job.input, rows.rows));
            self.ids.extend(rows.ids);
            if job.action == Action::Audit {
                // One that was given up may still be written by a late worker, so its place is taken.
                let audited = audited(&run.part(job), ids).await?.unwrap_or_default();
                let name = job.output.strip_prefix(&format!("{}/", run_folder(run.name())));
                objects.push(object(name.unwrap_or(&job.output), audited));
            }
        }
        if !objects.is_empty() {
            objects.push(object(PLAN, 0));
        }
        // They name nobody, and are also of users whom the run made nothing for: those beyond its limit or its canary.
        if names.contains(CODES) && (kind == Kind::User || !objects.is_empty()) {
            objects.push(object(CODES, 0));
        }
        if !objects.is_empty() {
            self.places.push(ErasedPlace { folder: run_folder(run.name()), objects });
        }
        Ok(())
    }

    /// The parts of a published data set, and the list of its errors.
    async fn search_folder(&mut self, output: &Location, folder: &str, ids: &IdList) -> Result<()> {
        let place = output.join(folder);
        let names = place.names_after(None).await?;
        let mut names: Vec<String> = names.into_iter().filter(|name| name.ends_with(".parquet")).collect();
        names.sort_unstable();
        let tables: Vec<Location> = names.iter().map(|name| place.join(name)).collect();
        let (mut objects, mut errors) = (Vec::new(), 0);
        for (name, found) in names.iter().zip(find_all(&tables, ids).await?) {
            errors += found.errors;
            if found.rows + found.errors > 0 {
                objects.push(object(name, found.rows + found.errors));
                self.ids.extend(found.ids);
            }
        }
        if errors > 0 {
            objects.push(object(ERRORS, errors));
        }
        if !objects.is_empty() {
            objects.push(object(MANIFEST, 0));
            self.places.push(ErasedPlace { folder: folder.to_owned(), objects });
        }
        Ok(())
    }
}

fn object(name: &str, rows: u64) -> ErasedObject {
    ErasedObject { name: name.to_owned(), rows, before: None, after: None }
}

async fn find_all(tables: &[Location], ids: &IdList) -> Result<Vec<FoundRows>> {
    let found = futures::stream::iter(tables).map(|table| find_rows(table, ids)).buffered(parts_in_flight());
    Ok(found.try_collect().await?)
}

/// How many of an audit's texts are of the entities; `None` if there is no audit.
async fn audited(file: &Location, ids: &IdList) -> Result<Option<u64>> {
    let Some(audit) = read_audit(file).await? else {
        return Ok(None);
    };
    Ok(Some(audit.pairs.iter().filter(|pair| ids.contains(&pair.entity_id)).count() as u64))
}

/// An audit, if it is there.
pub(super) async fn read_audit(file: &Location) -> Result<Option<Audit>> {
    let Some(bytes) = file.read_optional().await? else {
        return Ok(None);
    };
    serde_json::from_slice(&bytes).map(Some).with_context(|| format!("{}: not an audit; remove it", file.url()))
}

/// The digests of the objects as they are now.
pub(super) async fn digests(output: &Location, places: &[ErasedPlace]) -> Result<Vec<Vec<Option<Digest>>>> {
    let mut all = Vec::new();
    for place in places {
        let mut digests = Vec::new();
        for object in &place.objects {
            let bytes = output.join(&place.folder).join(&object.name).read_optional().await?;
            digests.push(bytes.map(|bytes| Digest::of(&bytes)));
        }
        all.push(digests);
    }
    Ok(all)
}
