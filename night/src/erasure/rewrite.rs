//! Writes runs and data sets anew, without the rows of erased entities.
//!
//! Each object is replaced by one atomic write; what counts or names others follows them. Whatever a process has left
//! undone, the same call does, since it starts from what is there.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};

use anyhow::{Context, Result};
use jiff::civil::Date;
use laser_delta::Table;
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::erasure::ErasedPlace;
use laser_schema::ids::IdSet;
use laser_schema::knowledge::{ErrorRecord, PartInfo};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{Details, ERRORS, MANIFEST, Manifest, PartEntry, Profiles};
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::data_set;
use laser_store::erase::{erase_from_part, erase_from_shard};
use laser_store::id_list::IdList;
use laser_store::location::ObjectWriter;
use laser_store::part::PART_KEY;
use laser_store::run_store::{AUDITS, CODES, PLAN, RunStore};
use laser_store::table::TableReader;

use super::search::read_audit;

/// The inputs and audits of a published run, then its plan. Prompts that its coordinators may have left, and histories
/// that its drafts looked up, name nobody, so all of them go.
pub(super) async fn rewrite_run(store: &RunStore, place: &ErasedPlace, ids: &IdList) -> Result<()> {
    store.remove_prompts().await?;
    let folder = store.folder();
    folder.join(CODES).remove().await?;
    let names = names(place);
    for name in names.iter().filter(|name| AUDITS.has(name)) {
        rewrite_audit(&folder.join(name), ids).await?;
    }
    let plan = store.plan().await?.with_context(|| format!("{}: it is gone", folder.join(PLAN).url()))?;
    let mut restated = plan.clone();
    for job in restated.shards.iter_mut().filter(|job| names.contains(job.input.as_str())) {
        let input = folder.join(&job.input);
        let shard = erase_from_shard(input.url(), input.read().await?, ids)?;
        if shard.erased > 0 {
            input.write(shard.bytes.clone()).await?;
        }
        (job.rows, job.input_digest) = (shard.rows, Digest::of(&shard.bytes));
    }
    if restated != plan {
        store.replace_plan(&restated).await?;
    }
    Ok(())
}

/// What was measured stays. An audit that was given up is written without any text.
async fn rewrite_audit(file: &Location, ids: &IdList) -> Result<()> {
    let found = read_audit(file).await?;
    let mut audit = found.clone().unwrap_or_default();
    audit.pairs.retain(|pair| !ids.contains(&pair.entity_id));
    if found.as_ref() != Some(&audit) {
        file.write(serde_json::to_vec(&audit)?.into()).await?;
    }
    Ok(())
}

/// The parts of a published data set, its errors and its manifest, and then the Delta table that has it.
pub(super) async fn rewrite_folder(output: &Location, kind: Kind, place: &ErasedPlace, ids: &IdList) -> Result<()> {
    let (data_set, date, run) = parse_folder(kind, &place.folder)
        .with_context(|| format!("{}: no folder of a night; this is a fault of Laser", place.folder))?;
    let folder = output.join(&place.folder);
    for name in names(place).iter().filter(|name| name.ends_with(".parquet")) {
        let part = folder.join(name);
        if let Some(bytes) = erase_from_part(part.url(), part.read().await?, ids)? {
            part.write(bytes).await?;
        }
    }
    if names(place).contains(ERRORS) {
        rewrite_errors(&folder.join(ERRORS), ids).await?;
    }
    match data_set {
        DataSet::Profiles | DataSet::Recommendations => restate::<Profiles>(&folder, place, count_entities).await?,
        DataSet::Embeddings => restate::<EmbeddingSet>(&folder, place, |_, _| {}).await?,
        DataSet::KnowledgeIds => restate::<IdSet>(&folder, place, |_, _| {}).await?,
    }
    Ok(Table::new(output, data_set, kind).restate(date, run).await?)
}

fn names(place: &ErasedPlace) -> HashSet<&str> {
    place.objects.iter().map(|object| object.name.as_str()).collect()
}

/// Data set, night and run of a folder below the output's root.
pub(super) fn parse_folder(kind: Kind, folder: &str) -> Option<(DataSet, Date, &str)> {
    DataSet::ALL.into_iter().find_map(|data_set| {
        let (date, run) = folder.strip_prefix(&format!("{}/dt=", data_set.kind_folder(kind)))?.split_once("/run=")?;
        Some((data_set, date.parse().ok()?, run))
    })
}

async fn rewrite_errors(file: &Location, ids: &IdList) -> Result<()> {
    let mut writer = file.object_writer();
    match copy_errors(file, &mut writer, ids).await {
        Ok(()) => Ok(writer.finish().await?),
        Err(error) => {
            writer.abort().await;
            Err(error)
        }
    }
}

async fn copy_errors(file: &Location, to: &mut ObjectWriter, ids: &IdList) -> Result<()> {
    for line in BufReader::with_capacity(1 << 20, file.open().await?).lines() {
        let line = line?;
        let error: ErrorRecord = serde_json::from_str(&line).with_context(|| file.url().to_owned())?;
        if !ids.contains(&error.entity_id) {
            to.write(&(line + "\n")).await?;
        }
    }
    Ok(())
}

/// Sums over the footers of all parts of texts or lists.
#[derive(Debug, Default)]
struct Sums {
    rows: u64,
    carried: u64,
    errors: u64,
}

fn count_entities(details: &mut Profiles, sums: &Sums) {
    (details.carried, details.errors, details.entities) = (sums.carried, sums.errors, sums.rows + sums.errors);
}

/// Has the manifest say what the parts hold. When it was created does not change, and so not which of two runs of a
/// night counts; nor does what was measured.
async fn restate<D: Details + Clone + PartialEq>(
    folder: &Location,
    place: &ErasedPlace,
    count: impl FnOnce(&mut D, &Sums),
) -> Result<()> {
    let before: Option<Manifest<D>> = data_set::read(folder).await?;
    let before = before.with_context(|| format!("{}: it is gone", folder.join(MANIFEST).url()))?;
    let (mut manifest, mut sums, touched) = (before.clone(), Sums::default(), names(place));
    for part in &mut manifest.parts {
        let is_touched = touched.contains(part.name.as_str());
        restate_part(&folder.join(&part.name), is_touched, part, &mut sums).await?;
    }
    manifest.rows = sums.rows;
    count(&mut manifest.details, &sums);
    if manifest != before {
        data_set::write_manifest(folder, &manifest).await?;
    }
    Ok(())
}

async fn restate_part(file: &Location, is_touched: bool, part: &mut PartEntry, sums: &mut Sums) -> Result<()> {
    let table = TableReader::open(file).await?;
    let info: Option<PartInfo> = table.footer(PART_KEY).map(|info| serde_json::from_str(&info)).transpose()?;
    if is_touched {
        let bytes = file.read().await?;
        part.rows = info.as_ref().map_or(table.rows(), |info| info.rows);
        part.table_rows = (table.rows() != part.rows).then_some(table.rows());
        (part.bytes, part.digest) = (bytes.len() as u64, Digest::of(&bytes));
    }
    sums.rows += part.rows;
    if let Some(info) = info {
        sums.carried += info.carried;
        sums.errors += info.errors.len() as u64;
    }
    Ok(())
}
