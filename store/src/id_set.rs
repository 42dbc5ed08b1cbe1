//! Knowledge ids: what `laser ids` writes, finds again the next night, and checks.
//!
//! A data set of an output beside the texts, `knowledge_ids/kind=…/dt=…/run=…`, with the same rules: parts are created
//! once, `_manifest.json` and then `_SUCCESS` come last. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use jiff::civil::Date;
use laser_schema::Kind;
use laser_schema::ids::{CODEBOOK, IdRecord, IdsManifest, IdsPart};
use laser_schema::layout::{KNOWLEDGE_IDS, partition_of};
use laser_schema::manifest::SUCCESS;

use crate::data_set::read_manifest;
use crate::location::{Location, LocationError};
use crate::nights::{nights_of, runs_of_night_of};
use crate::table::{self, TableError};
use crate::verify::{Check, VerifyReport};

/// The columns of a part for ids of a type. No nulls anywhere.
pub fn ids_schema(id: DataType) -> SchemaRef {
    let timestamp = || DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let item = Arc::new(Field::new("item", DataType::Int64, false));
    Arc::new(Schema::new(vec![
        Field::new("entity_id", id, false),
        Field::new("knowledge_ids", DataType::List(item), false),
        Field::new("event_timestamp", timestamp(), false),
        Field::new("created_timestamp", timestamp(), false),
    ]))
}

/// The newest complete night of ids of a kind before a date, as a folder below `output`; of two runs of one night the
/// one whose codebook is younger counts.
///
/// # Errors
/// The store's.
pub async fn newest_ids(output: &Location, kind: Kind, before: Date) -> Result<Option<String>, LocationError> {
    let nights = nights_of(KNOWLEDGE_IDS, output, kind).await?;
    for date in nights.into_iter().filter(|date| *date < before) {
        let mut found = Vec::new();
        for run in runs_of_night_of(KNOWLEDGE_IDS, output, kind, date).await? {
            let name = partition_of(KNOWLEDGE_IDS, kind, date, &run);
            let folder = output.join(&name);
            if !folder.join(SUCCESS).exists().await? {
                continue;
            }
            let manifest = read_manifest::<IdsManifest>(&folder).await?;
            found.extend(manifest.map(|manifest| (manifest.codebook.info.created, name)));
        }
        if let Some((_, name)) = found.into_iter().max() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Decodes a part.
///
/// # Errors
/// [`TableError`] if the bytes are no such part.
pub fn decode_ids(name: &str, bytes: bytes::Bytes) -> Result<Vec<IdRecord>, TableError> {
    table::decode(name, bytes)
}

/// Checks a folder of ids: `_SUCCESS`, the digest of the codebook and of every part, its rows, no entity twice, as many
/// ids for each entity as the codebook has places, nothing missing and nothing that the manifest does not name.
///
/// # Errors
/// The store's; every fault is in the report.
pub async fn verify_ids(folder: &Location, manifest: &IdsManifest) -> Result<VerifyReport, LocationError> {
    let mut check = Check::of(folder).await?;
    check.file(CODEBOOK, &manifest.codebook.digest).await?;
    let info = &manifest.codebook.info;
    let shape = (info.places(), info.clusters);
    for part in &manifest.parts {
        check_part(part, shape, &mut check).await?;
    }
    check.sum("rows", check.report.rows, manifest.rows);
    let parts = manifest.parts.iter().map(|part| part.name.as_str());
    check.finish(parts).await
}

async fn check_part(
    part: &IdsPart,
    (places, clusters): (usize, usize),
    check: &mut Check<'_>,
) -> Result<(), LocationError> {
    let name = &part.name;
    let Some(bytes) = check.file(name, &part.digest).await? else {
        return Ok(());
    };
    let rows = match decode_ids(name, bytes) {
        Ok(rows) => rows,
        Err(error) => {
            check.fault(error.to_string());
            return Ok(());
        }
    };
    let in_range = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < clusters);
    let fits = |ids: &[i64]| ids.len() == places && ids.iter().all(in_range);
    if let Some(row) = rows.iter().find(|row| !fits(&row.knowledge_ids)) {
        let (id, ids) = (&row.entity_id, &row.knowledge_ids);
        check.fault(format!("{name}: entity {id} has ids {ids:?}, expected {places} below {clusters}"));
    }
    check.part(name, part.rows, rows.into_iter().map(|row| row.entity_id));
    Ok(())
}
