//! Writing a published folder: parts that are created once, the manifest, and last `_SUCCESS`.

use bytes::Bytes;
use laser_schema::Digest;
use laser_schema::manifest::{Details, MANIFEST, Manifest, PartEntry, SUCCESS};

use crate::location::{Created, Location, LocationError};

/// Creates the parts of a folder one after the other. A part that is there already, from an earlier process or another
/// one at the same work, is kept.
#[derive(Debug)]
pub struct PartWriter<'a> {
    folder: &'a Location,
    parts: Vec<PartEntry>,
}

impl<'a> PartWriter<'a> {
    /// Begins with the first part.
    pub fn new(folder: &'a Location) -> Self {
        Self { folder, parts: Vec::new() }
    }

    /// The name of the next part.
    pub fn name(&self) -> String {
        format!("part-{:05}.parquet", self.parts.len())
    }

    /// The place of the next part.
    pub fn place(&self) -> Location {
        self.folder.join(&self.name())
    }

    /// Creates the next part, and returns what is there from then on: these bytes, or those of whoever was first.
    pub async fn create(&self, bytes: Bytes) -> Result<Bytes, LocationError> {
        let place = self.place();
        match place.create(bytes.clone()).await? {
            Created::Won => Ok(bytes),
            Created::Exists => place.read().await,
        }
    }

    /// Takes what is there as the next part, of so many rows.
    pub fn add(&mut self, rows: u64, bytes: &Bytes) {
        let part = PartEntry {
            name: self.name(),
            rows,
            table_rows: None,
            bytes: bytes.len() as u64,
            digest: Digest::of(bytes),
        };
        self.parts.push(part);
    }

    /// Rows of all parts so far.
    pub fn rows(&self) -> u64 {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// The parts, for the manifest.
    pub fn finish(self) -> Vec<PartEntry> {
        self.parts
    }
}

/// Writes the manifest and then `_SUCCESS`: the folder is published.
pub async fn publish<D: Details>(folder: &Location, manifest: &Manifest<D>) -> Result<(), LocationError> {
    write_manifest(folder, manifest).await?;
    complete(folder).await
}

/// Writes the manifest alone, for a folder whose `_SUCCESS` is withheld or comes later.
pub async fn write_manifest<D: Details>(folder: &Location, manifest: &Manifest<D>) -> Result<(), LocationError> {
    let json = serde_json::to_vec_pretty(manifest).unwrap_or_default();
    folder.join(MANIFEST).write(json.into()).await
}

/// Writes `_SUCCESS`.
pub async fn complete(folder: &Location) -> Result<(), LocationError> {
    folder.join(SUCCESS).write(Bytes::new()).await
}
