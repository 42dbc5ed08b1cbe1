//! Embeddings without their texts: what `laser encode` writes, finds again, and checks.
//!
//! A data set of an output beside the texts, `embeddings/kind=…/dt=…/run=…`, with the same rules: parts are created
//! once, `_manifest.json` and then `_SUCCESS` come last. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use jiff::civil::Date;
use laser_schema::embedding::Embeddings;
use laser_schema::embedding_set::{EmbeddedEntity, EmbeddingManifest, EmbeddingPart};
use laser_schema::layout::{EMBEDDINGS, partition_of};
use laser_schema::manifest::{PartEntry, SUCCESS};
use laser_schema::{Digest, Kind};

use crate::location::{Location, LocationError};
use crate::nights::{nights_of, runs_of_night_of};
use crate::table::{self, TableError};
use crate::verify::{Check, VerifyReport};

/// The footer key of a part's [`EmbeddingPart`].
const PART_KEY: &str = "laser.embeddings";

/// The columns of a part but for the embeddings, which come last. No nulls anywhere.
pub fn embedded_schema(id: DataType, has_created: bool) -> SchemaRef {
    let timestamp = || DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let mut fields = vec![Field::new("entity_id", id, false), Field::new("event_timestamp", timestamp(), false)];
    if has_created {
        fields.push(Field::new("created_timestamp", timestamp(), false));
    }
    Arc::new(Schema::new(fields))
}

/// Encodes a part.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types, or not every row has an embedding.
pub fn encode_embeddings(
    name: &str,
    rows: &[EmbeddedEntity],
    embeddings: &Embeddings,
    part: &EmbeddingPart,
) -> Result<Bytes, TableError> {
    let id = rows.first().map_or(DataType::Int64, |row| table::id_type(row.entity_id.id_type()));
    let has_created = rows.iter().any(|row| row.created_timestamp.is_some());
    let metadata = [(PART_KEY, serde_json::to_string(part).unwrap_or_default())];
    let layout = part.embedding.spec.layout;
    let schema = embedded_schema(id, has_created);
    table::encode_embedded(name, schema, rows, Some((embeddings, layout)), &metadata)
}

/// Decodes a part and checks it against the digests in its footer.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are no such part or were changed.
pub fn decode_embeddings(name: &str, bytes: Bytes) -> Result<(Vec<EmbeddedEntity>, EmbeddingPart), TableError> {
    let unreadable = |reason: &str| TableError::Unreadable { file: name.to_owned(), reason: reason.to_owned() };
    let footer = table::footer(name, &bytes, PART_KEY)?.unwrap_or_default();
    let part: EmbeddingPart =
        serde_json::from_str(&footer).map_err(|_| unreadable("not a part of embeddings that Laser wrote"))?;
    let dimensions = part.embedding.spec.encoder.dimensions;
    let (rows, embeddings) = table::decode_embedded::<EmbeddedEntity>(name, bytes, dimensions)?;
    match Digest::of_json(&rows) == part.rows_digest && embeddings.digest() == part.embeddings_digest {
        true => Ok((rows, part)),
        false => Err(unreadable("its rows do not match the digests in its footer")),
    }
}

/// The newest complete data set of embeddings of a kind before a date, as a folder below `output`; of two of one night
/// the one with the greater name counts.
///
/// # Errors
/// The store's.
pub async fn newest_embeddings(output: &Location, kind: Kind, before: Date) -> Result<Option<String>, LocationError> {
    let nights = nights_of(EMBEDDINGS, output, kind).await?;
    for date in nights.into_iter().filter(|date| *date < before) {
        let runs = runs_of_night_of(EMBEDDINGS, output, kind, date).await?;
        for run in runs.into_iter().rev() {
            let name = partition_of(EMBEDDINGS, kind, date, &run);
            if output.join(&name).join(SUCCESS).exists().await? {
                return Ok(Some(name));
            }
        }
    }
    Ok(None)
}

/// Checks a folder of embeddings: `_SUCCESS`, the digest of every part, its rows, its encoder, no entity twice, nothing
/// missing and nothing that the manifest does not name.
///
/// # Errors
/// The store's; every fault is in the report.
pub async fn verify_embeddings(folder: &Location, manifest: &EmbeddingManifest) -> Result<VerifyReport, LocationError> {
    let mut check = Check::of(folder).await?;
    let mut truncated = 0;
    for part in &manifest.parts {
        truncated += check_part(manifest, part, &mut check).await?;
    }
    check.sum("rows", check.report.rows, manifest.rows);
    check.sum("texts cut off", truncated, manifest.embedding.truncated);
    let parts = manifest.parts.iter().map(|part| part.name.as_str());
    check.finish(parts).await
}

/// How many texts of a part were cut off.
async fn check_part(
    manifest: &EmbeddingManifest,
    part: &PartEntry,
    check: &mut Check<'_>,
) -> Result<u64, LocationError> {
    let name = &part.name;
    let Some(bytes) = check.file(name, &part.digest).await? else {
        return Ok(0);
    };
    let (rows, info) = match decode_embeddings(name, bytes) {
        Ok(decoded) => decoded,
        Err(error) => {
            check.fault(error.to_string());
            return Ok(0);
        }
    };
    if info.embedding.spec != manifest.embedding.spec {
        check.fault(format!("{name}: of another encoder than the manifest's"));
    }
    check.part(name, part.rows, rows.into_iter().map(|row| row.entity_id));
    Ok(info.embedding.truncated)
}
