//! Parts that an earlier plan of a run has left: a run whose folder was removed is begun anew, and its parts are
//! elsewhere.
//!
//! A shard counts as done once there is a part of its name, and readers take all parts of a folder. So there must be
//! none but those that the plan's own shards come to, which say so by the digest of their input.

use std::collections::HashMap;

use laser_schema::job::{Plan, ShardJob};
use laser_schema::knowledge::PartInfo;
use laser_store::Location;
use laser_store::part::PART_KEY;
use laser_store::run_store::RunStore;
use laser_store::table::TableReader;

use super::PlanError;

/// Writes the plan, unless the run was planned before; returns the one that holds.
///
/// # Errors
/// [`PlanError::EarlierParts`], and the store's.
pub(super) async fn write_plan(store: &RunStore, plan: Plan) -> Result<Plan, PlanError> {
    if let Some(plan) = store.plan().await? {
        return Ok(plan);
    }
    let Some(folder) = foreign_parts(store, &plan).await? else {
        return Ok(store.write_plan(plan).await?);
    };
    // Another coordinator may have written a plan since, to which they belong.
    match store.plan().await? {
        Some(plan) => Ok(plan),
        None => Err(PlanError::EarlierParts { folder: folder.url().to_owned() }),
    }
}

/// A folder of the run with parts that are not the plan's.
async fn foreign_parts(store: &RunStore, plan: &Plan) -> Result<Option<Location>, PlanError> {
    let jobs: HashMap<&str, &ShardJob> = plan.shards.iter().map(|job| (job.output.as_str(), job)).collect();
    for &kind in plan.counts.keys() {
        let partition = plan.partition(kind);
        let folder = store.output().join(&partition);
        for name in folder.names_after(None).await? {
            let job = jobs.get(format!("{partition}/{name}").as_str()).copied();
            if name.ends_with(".parquet") && !is_of(&folder.join(&name), job).await? {
                return Ok(Some(folder));
            }
        }
    }
    Ok(None)
}

/// Whether a part is what a shard comes to.
async fn is_of(part: &Location, job: Option<&ShardJob>) -> Result<bool, PlanError> {
    let Some(job) = job else {
        return Ok(false);
    };
    let footer = TableReader::open(part).await?.footer(PART_KEY);
    let info: Option<PartInfo> = footer.and_then(|json| serde_json::from_str(&json).ok());
    Ok(info.is_some_and(|info| info.input.as_ref() == Some(&job.input_digest)))
}
