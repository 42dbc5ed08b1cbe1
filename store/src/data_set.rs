//! Published data sets: their manifests, their parts, and the check that they are whole.

use laser_schema::knowledge::ErrorRecord;
use laser_schema::manifest::{ERRORS, MANIFEST, Manifest, PartEntry, SUCCESS};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::location::{Location, LocationError};
use crate::part::decode_part;
use crate::verify::{Check, VerifyReport};

/// The manifest of a folder, `None` where there is none that can be read.
///
/// # Errors
/// The store's.
pub async fn read_manifest<M: DeserializeOwned>(folder: &Location) -> Result<Option<M>, LocationError> {
    let bytes = folder.join(MANIFEST).read_optional().await?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
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
    Ok(parts.map(|all| all.parts.iter().map(|part| folder.join(&part.name)).collect()))
}

/// Checks a published folder: `_SUCCESS`, every part's digest and row count, no nulls, no entity twice,
/// no text empty, nothing missing and nothing that the manifest does not name.
///
/// # Errors
/// Only if the manifest itself cannot be read; every other fault is in the report.
pub async fn verify(folder: &Location) -> Result<VerifyReport, LocationError> {
    let bytes = folder.join(MANIFEST).read().await?;
    let mut check = Check::of(folder).await?;
    let manifest: Manifest = match serde_json::from_slice(&bytes) {
        Ok(manifest) => manifest,
        Err(error) => {
            check.fault(format!("{MANIFEST}: not a manifest: {error}"));
            return Ok(check.report);
        }
    };
    for part in &manifest.parts {
        check_part(part, &mut check).await?;
    }
    check_errors(folder, &manifest, &mut check).await?;
    check.sum("rows", check.report.rows, manifest.rows);
    if manifest.rows + manifest.errors != manifest.entities {
        check.fault(format!(
            "{} rows and {} errors do not make up {} entities",
            manifest.rows, manifest.errors, manifest.entities
        ));
    }
    let parts = manifest.parts.iter().map(|part| part.name.as_str());
    check.finish(parts).await
}

async fn check_part(part: &PartEntry, check: &mut Check<'_>) -> Result<(), LocationError> {
    let name = &part.name;
    let Some(bytes) = check.file(name, &part.digest).await? else {
        return Ok(());
    };
    let rows = match decode_part(name, bytes) {
        Ok((rows, _)) => rows,
        Err(error) => {
            check.fault(error.to_string());
            return Ok(());
        }
    };
    for row in rows.iter().filter(|row| row.text.trim().is_empty()) {
        check.fault(format!("{name}: entity {} has an empty text", row.entity_id));
    }
    check.part(name, part.rows, rows.into_iter().map(|row| row.entity_id));
    Ok(())
}

async fn check_errors(folder: &Location, manifest: &Manifest, check: &mut Check<'_>) -> Result<(), LocationError> {
    let bytes = folder.join(ERRORS).read_optional().await?;
    let rows: Result<Vec<ErrorRecord>, _> =
        serde_json::Deserializer::from_slice(&bytes.unwrap_or_default()).into_iter().collect();
    match rows {
        Ok(rows) => {
            check.rows(ERRORS, rows.len() as u64, manifest.errors);
            rows.into_iter().for_each(|row| check.entity(ERRORS, row.entity_id));
        }
        Err(error) => check.fault(format!("{ERRORS}: {error}")),
    }
    Ok(())
}
