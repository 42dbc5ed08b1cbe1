//! The manifest of a published data set, and the check that what is there is what it says.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::embedding::EmbeddingInfo;
use crate::entity::{EntityId, Kind};
use crate::job::{AuditReport, Price, Spec};
use crate::knowledge::{ErrorRecord, Figures, decode_part, ratio};
use crate::location::{Location, LocationError};

/// The manifest's file name; readers of data sets ignore names that start with `_`.
pub const MANIFEST: &str = "_manifest.json";

/// Says that the data set is complete. Written last.
pub const SUCCESS: &str = "_SUCCESS";

/// The rows that have no text, one JSON object a line.
pub const ERRORS: &str = "_errors.jsonl";

/// One Parquet part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// File name within the folder.
    pub name: String,
    /// The shard it commits.
    pub shard: u32,
    /// Its rows.
    pub rows: u64,
    /// Its size.
    pub bytes: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// What the texts of a folder cost: time of engines that had a shard in hand, not of idle ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// What the engines' time costs.
    pub price: Price,
    /// Seconds of all engines that went into the texts.
    pub gpu_seconds: f64,
    /// Seconds of all engines that went into the audit.
    pub audit_gpu_seconds: f64,
    /// Price of 1,000 generated texts.
    pub per_1000_texts: f64,
    /// The same, by pool.
    pub per_1000_texts_by_pool: BTreeMap<String, f64>,
}

impl Cost {
    /// The cost of what figures and audits of all pools tell.
    pub fn of(
        price: &Price,
        figures: &BTreeMap<String, Figures>,
        audits: &BTreeMap<String, AuditReport>,
    ) -> Self {
        let mut all = Figures::default();
        figures.values().for_each(|f| all.add(f));
        let by_pool = figures
            .iter()
            .map(|(pool, f)| (pool.clone(), per_1000(price, f)));
        Self {
            price: price.clone(),
            gpu_seconds: all.engine_seconds,
            audit_gpu_seconds: audits.values().map(|a| a.plain_seconds + a.seconds).sum(),
            per_1000_texts: per_1000(price, &all),
            per_1000_texts_by_pool: by_pool.collect(),
        }
    }

    /// The night's whole price, the audit included.
    pub fn total(&self) -> f64 {
        self.price
            .of_seconds(self.gpu_seconds + self.audit_gpu_seconds)
    }
}

/// The price of 1,000 texts such as those of the figures.
fn per_1000(price: &Price, figures: &Figures) -> f64 {
    ratio(
        price.of_seconds(figures.engine_seconds) * 1e3,
        figures.texts as f64,
    )
}

/// What a folder of knowledge holds and how it came to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`crate::knowledge::SCHEMA_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The night.
    pub date: Date,
    /// When the newest text was generated.
    pub created: Timestamp,
    /// What texts were acceptable.
    pub spec: Spec,
    /// Its digest.
    pub spec_digest: Digest,
    /// Digest of the pool set.
    pub pool_digest: Digest,
    /// Entities of the input.
    pub entities: u64,
    /// Rows of all parts.
    pub rows: u64,
    /// Of these: carried forward.
    pub carried: u64,
    /// Entities without a text; `_errors.jsonl` says why.
    pub errors: u64,
    /// Sums over the generated rows, by pool.
    pub figures: BTreeMap<String, Figures>,
    /// Plain decoding against speculation on the audit sample, by pool.
    pub audit: BTreeMap<String, AuditReport>,
    /// What it cost, where the plan has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// What made the embeddings, where the parts have them, and how many texts it cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingInfo>,
    /// The parts, by name.
    pub parts: Vec<PartEntry>,
}

impl Manifest {
    /// The manifest of a folder, `None` where there is none that can be read.
    ///
    /// # Errors
    /// The store's.
    pub async fn read(folder: &Location) -> Result<Option<Self>, LocationError> {
        let bytes = folder.join(MANIFEST).read_optional().await?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }
}

/// The parts of a published folder of any of Laser's data sets, by name; `None` if the folder is not published.
///
/// # Errors
/// The store's.
pub async fn published_parts(folder: &Location) -> Result<Option<Vec<Location>>, LocationError> {
    #[derive(Deserialize)]
    struct Part {
        name: String,
    }
    #[derive(Deserialize)]
    struct Parts {
        parts: Vec<Part>,
    }
    if !folder.join(SUCCESS).exists().await? {
        return Ok(None);
    }
    let bytes = folder.join(MANIFEST).read_optional().await?;
    let parts = bytes.and_then(|bytes| serde_json::from_slice::<Parts>(&bytes).ok());
    Ok(parts.map(|all| {
        all.parts
            .iter()
            .map(|part| folder.join(&part.name))
            .collect()
    }))
}

/// What [`verify`] found wrong; empty means that the data set is whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The folder.
    pub folder: String,
    /// Parts looked at.
    pub parts: usize,
    /// Rows counted.
    pub rows: u64,
    /// One line for each fault.
    pub faults: Vec<String>,
}

/// Checks a published folder: `_SUCCESS`, every part's digest and row count, no nulls, no entity twice,
/// no text empty, nothing missing and nothing that the manifest does not name.
///
/// # Errors
/// Only if the manifest itself cannot be read; every other fault is in the report.
pub async fn verify(folder: &Location) -> Result<VerifyReport, LocationError> {
    let bytes = folder.join(MANIFEST).read().await?;
    let mut report = VerifyReport {
        folder: folder.url().to_owned(),
        ..Default::default()
    };
    let manifest: Manifest = match serde_json::from_slice(&bytes) {
        Ok(manifest) => manifest,
        Err(error) => {
            report
                .faults
                .push(format!("{MANIFEST}: not a manifest: {error}"));
            return Ok(report);
        }
    };
    if !folder.join(SUCCESS).exists().await? {
        report
            .faults
            .push(format!("{SUCCESS} is missing: the run did not finish"));
    }
    let mut seen = HashSet::new();
    for part in &manifest.parts {
        check_part(folder, part, &mut seen, &mut report).await?;
    }
    check_errors(folder, &manifest, &mut seen, &mut report).await?;
    check_counts(&manifest, &mut report);
    let known: HashSet<&str> = manifest.parts.iter().map(|p| p.name.as_str()).collect();
    for listed in folder.list().await? {
        if !listed.name.starts_with('_') && !known.contains(listed.name.as_str()) {
            report
                .faults
                .push(format!("{}: not named by the manifest", listed.name));
        }
    }
    Ok(report)
}

async fn check_part(
    folder: &Location,
    part: &PartEntry,
    seen: &mut HashSet<EntityId>,
    report: &mut VerifyReport,
) -> Result<(), LocationError> {
    report.parts += 1;
    let Some(bytes) = folder.join(&part.name).read_optional().await? else {
        report.faults.push(format!("{}: missing", part.name));
        return Ok(());
    };
    if Digest::of(&bytes) != part.digest {
        report.faults.push(format!(
            "{}: its bytes do not match the manifest's digest",
            part.name
        ));
        return Ok(());
    }
    let rows = match decode_part(&part.name, bytes) {
        Ok((rows, _)) => rows,
        Err(error) => {
            report.faults.push(error.to_string());
            return Ok(());
        }
    };
    if rows.len() as u64 != part.rows {
        report.faults.push(format!(
            "{}: {} rows, the manifest says {}",
            part.name,
            rows.len(),
            part.rows
        ));
    }
    report.rows += rows.len() as u64;
    for row in rows {
        if row.text.trim().is_empty() {
            report.faults.push(format!(
                "{}: entity {} has an empty text",
                part.name, row.entity_id
            ));
        }
        if let Some(twice) = seen.replace(row.entity_id) {
            report
                .faults
                .push(format!("{}: entity {twice} appears twice", part.name));
        }
    }
    Ok(())
}

async fn check_errors(
    folder: &Location,
    manifest: &Manifest,
    seen: &mut HashSet<EntityId>,
    report: &mut VerifyReport,
) -> Result<(), LocationError> {
    let bytes = folder
        .join(ERRORS)
        .read_optional()
        .await?
        .unwrap_or_default();
    let rows: Result<Vec<ErrorRecord>, _> = serde_json::Deserializer::from_slice(&bytes)
        .into_iter()
        .collect();
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) => {
            report.faults.push(format!("{ERRORS}: {error}"));
            return Ok(());
        }
    };
    if rows.len() as u64 != manifest.errors {
        report.faults.push(format!(
            "{ERRORS}: {} rows, the manifest says {}",
            rows.len(),
            manifest.errors
        ));
    }
    for row in rows {
        if let Some(twice) = seen.replace(row.entity_id) {
            report
                .faults
                .push(format!("{ERRORS}: entity {twice} appears twice"));
        }
    }
    Ok(())
}

fn check_counts(manifest: &Manifest, report: &mut VerifyReport) {
    if report.rows != manifest.rows {
        report.faults.push(format!(
            "{} rows in the parts, the manifest says {}",
            report.rows, manifest.rows
        ));
    }
    if manifest.rows + manifest.errors != manifest.entities {
        report.faults.push(format!(
            "{} rows and {} errors do not make up {} entities",
            manifest.rows, manifest.errors, manifest.entities
        ));
    }
}
