//! Embeddings without their texts: what `laser encode` writes, finds again, and checks.
//!
//! A data set of an output beside the texts, `embeddings/kind=…/dt=…/run=…`, with the same rules: parts are created
//! once, `_manifest.json` and then `_SUCCESS` come last. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::embedding::{EmbeddingInfo, Embeddings};
use crate::entity::{EntityId, Kind};
use crate::layout::{EMBEDDINGS, nights_of, partition_of, runs_of_night_of};
use crate::location::{Location, LocationError};
use crate::manifest::{MANIFEST, PartEntry, SUCCESS};
use crate::table::{self, TableError};
use crate::verify::{Check, VerifyReport};

/// The version of the columns and of [`EmbeddingManifest`].
pub const EMBEDDINGS_VERSION: u32 = 1;

/// The footer key of a part's [`EmbeddingPart`].
const PART_KEY: &str = "laser.embeddings";

/// An entity of a part; its embedding stands in a column of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddedEntity {
    /// The entity, in the source's id type.
    pub entity_id: EntityId,
    /// The night that its text stands for.
    pub event_timestamp: Timestamp,
    /// When its text was generated, where the source tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_timestamp: Option<Timestamp>,
}

/// What a part says about itself in its footer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingPart {
    /// [`EMBEDDINGS_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The version of Laser that wrote it.
    pub writer: String,
    /// What made the embeddings, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
    /// Of the rows but for their embeddings.
    pub rows_digest: Digest,
    /// [`Embeddings::digest`].
    pub embeddings_digest: Digest,
}

/// Where the texts are from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextSource {
    /// The folder or file.
    pub path: String,
    /// Digest of what it held.
    pub digest: Digest,
}

/// What a data set of embeddings holds and how it came to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingManifest {
    /// [`EMBEDDINGS_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The night of the texts.
    pub date: Date,
    /// The version of Laser.
    pub writer: String,
    /// Where the texts are from.
    pub source: TextSource,
    /// What made the embeddings, and how many texts it cut off.
    pub embedding: EmbeddingInfo,
    /// Rows of all parts.
    pub rows: u64,
    /// The parts, by name.
    pub parts: Vec<PartEntry>,
}

impl EmbeddingManifest {
    /// The manifest of a folder, `None` where there is none that can be read.
    ///
    /// # Errors
    /// The store's.
    pub async fn read(folder: &Location) -> Result<Option<Self>, LocationError> {
        let bytes = folder.join(MANIFEST).read_optional().await?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }
}

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
    let id = rows.first().map_or(DataType::Int64, |row| row.entity_id.id_type().into());
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
