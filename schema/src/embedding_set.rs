//! Embeddings without their texts: what `laser encode` writes, finds again, and checks.
//!
//! A data set of an output beside the texts, `embeddings/kind=…/dt=…/run=…`, with the same rules: parts are created once,
//! `_manifest.json` and then `_SUCCESS` come last. `docs/output.md` lists the columns.

use std::collections::HashSet;
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
use crate::manifest::{MANIFEST, PartEntry, SUCCESS, VerifyReport};
use crate::table::{self, TableError};

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
    let mut fields = vec![
        Field::new("entity_id", id, false),
        Field::new("event_timestamp", timestamp(), false),
    ];
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
    let id = rows
        .first()
        .map_or(DataType::Int64, |row| row.entity_id.id_type().into());
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
pub fn decode_embeddings(
    name: &str,
    bytes: Bytes,
) -> Result<(Vec<EmbeddedEntity>, EmbeddingPart), TableError> {
    let unreadable = |reason: &str| TableError::Unreadable {
        file: name.to_owned(),
        reason: reason.to_owned(),
    };
    let footer = table::footer(name, &bytes, PART_KEY)?.unwrap_or_default();
    let part: EmbeddingPart = serde_json::from_str(&footer)
        .map_err(|_| unreadable("not a part of embeddings that Laser wrote"))?;
    let dimensions = part.embedding.spec.encoder.dimensions;
    let (rows, embeddings) = table::decode_embedded::<EmbeddedEntity>(name, bytes, dimensions)?;
    match Digest::of_json(&rows) == part.rows_digest
        && embeddings.digest() == part.embeddings_digest
    {
        true => Ok((rows, part)),
        false => Err(unreadable(
            "its rows do not match the digests in its footer",
        )),
    }
}

/// The newest complete data set of embeddings of a kind before a date, as a folder below `output`; of two of one night
/// the one with the greater name counts.
///
/// # Errors
/// The store's.
pub async fn newest_embeddings(
    output: &Location,
    kind: Kind,
    before: Date,
) -> Result<Option<String>, LocationError> {
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
pub async fn verify_embeddings(
    folder: &Location,
    manifest: &EmbeddingManifest,
) -> Result<VerifyReport, LocationError> {
    let mut report = VerifyReport {
        folder: folder.url().to_owned(),
        ..Default::default()
    };
    if !folder.join(SUCCESS).exists().await? {
        let fault = format!("{SUCCESS} is missing: the run did not finish");
        report.faults.push(fault);
    }
    let (mut seen, mut truncated) = (HashSet::new(), 0);
    for part in &manifest.parts {
        report.parts += 1;
        match check_part(folder, (manifest, part), &mut seen).await? {
            Ok(info) => {
                report.rows += part.rows;
                truncated += info.embedding.truncated;
            }
            Err(fault) => report.faults.push(format!("{}: {fault}", part.name)),
        }
    }
    for (what, found, expected) in [
        ("rows", report.rows, manifest.rows),
        ("texts cut off", truncated, manifest.embedding.truncated),
    ] {
        if found != expected {
            let fault = format!("{found} {what} in the parts, the manifest says {expected}");
            report.faults.push(fault);
        }
    }
    let known: HashSet<&str> = manifest.parts.iter().map(|p| p.name.as_str()).collect();
    let listed = folder.list().await?.into_iter().map(|listed| listed.name);
    let unknown = listed.filter(|name| !name.starts_with('_') && !known.contains(name.as_str()));
    report
        .faults
        .extend(unknown.map(|name| format!("{name}: not named by the manifest")));
    Ok(report)
}

/// The footer of a part that is as the manifest says, or what is wrong with it.
async fn check_part(
    folder: &Location,
    (manifest, part): (&EmbeddingManifest, &PartEntry),
    seen: &mut HashSet<EntityId>,
) -> Result<Result<EmbeddingPart, String>, LocationError> {
    let Some(bytes) = folder.join(&part.name).read_optional().await? else {
        return Ok(Err("missing".to_owned()));
    };
    if Digest::of(&bytes) != part.digest {
        let fault = "its bytes do not match the manifest's digest";
        return Ok(Err(fault.to_owned()));
    }
    let (rows, info) = match decode_embeddings(&part.name, bytes) {
        Ok(decoded) => decoded,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if rows.len() as u64 != part.rows {
        let (found, expected) = (rows.len(), part.rows);
        return Ok(Err(format!("{found} rows, the manifest says {expected}")));
    }
    if info.embedding.spec != manifest.embedding.spec {
        return Ok(Err("of another encoder than the manifest's".to_owned()));
    }
    for row in rows {
        if let Some(twice) = seen.replace(row.entity_id) {
            return Ok(Err(format!("entity {twice} appears twice")));
        }
    }
    Ok(Ok(info))
}
