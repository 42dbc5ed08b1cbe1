//! What checks of published folders share: [`crate::data_set::verify`], [`crate::embedding_set::verify_embeddings`] and
//! [`crate::ids::verify_ids`].

use std::collections::HashSet;

use bytes::Bytes;
use serde::Serialize;

use crate::location::{Location, LocationError};
use laser_schema::digest::Digest;
use laser_schema::entity::EntityId;
use laser_schema::manifest::SUCCESS;

/// What a check of a folder found wrong; no faults mean that the data set is whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The folder.
    pub folder: String,
    /// Parts that the manifest names.
    pub parts: usize,
    /// Rows counted.
    pub rows: u64,
    /// One line for each fault.
    pub faults: Vec<String>,
}

/// A folder while it is checked.
pub(crate) struct Check<'a> {
    folder: &'a Location,
    seen: HashSet<EntityId>,
    pub(crate) report: VerifyReport,
}

impl<'a> Check<'a> {
    /// Begins with `_SUCCESS`.
    pub(crate) async fn of(folder: &'a Location) -> Result<Self, LocationError> {
        let mut check = Self {
            folder,
            seen: HashSet::new(),
            report: VerifyReport { folder: folder.url().to_owned(), ..VerifyReport::default() },
        };
        if !folder.join(SUCCESS).exists().await? {
            check.fault(format!("{SUCCESS} is missing: the run did not finish"));
        }
        Ok(check)
    }

    pub(crate) fn fault(&mut self, fault: String) {
        self.report.faults.push(fault);
    }

    /// The bytes of a file that are as the manifest says.
    pub(crate) async fn file(&mut self, name: &str, digest: &Digest) -> Result<Option<Bytes>, LocationError> {
        let Some(bytes) = self.folder.join(name).read_optional().await? else {
            self.fault(format!("{name}: missing"));
            return Ok(None);
        };
        if Digest::of(&bytes) != *digest {
            let fault = "its bytes do not match the manifest's digest";
            self.fault(format!("{name}: {fault}"));
            return Ok(None);
        }
        Ok(Some(bytes))
    }

    /// Rows of a part, as many as the manifest says, of entities that were in none before.
    pub(crate) fn part(&mut self, name: &str, expected: u64, rows: impl ExactSizeIterator<Item = EntityId>) {
        let found = rows.len() as u64;
        self.report.rows += found;
        self.rows(name, found, expected);
        rows.for_each(|id| self.entity(name, id));
    }

    /// As many rows in a file as the manifest says.
    pub(crate) fn rows(&mut self, name: &str, found: u64, expected: u64) {
        if found != expected {
            self.fault(format!("{name}: {found} rows, the manifest says {expected}"));
        }
    }

    /// No entity twice.
    pub(crate) fn entity(&mut self, name: &str, id: EntityId) {
        if let Some(twice) = self.seen.replace(id) {
            self.fault(format!("{name}: entity {twice} appears twice"));
        }
    }

    /// A sum over all parts that the manifest tells too.
    pub(crate) fn sum(&mut self, what: &str, found: u64, expected: u64) {
        if found != expected {
            self.fault(format!("{found} {what} in the parts, the manifest says {expected}"));
        }
    }

    /// Ends with the files that the manifest does not name.
    pub(crate) async fn finish<'b>(
        mut self,
        parts: impl Iterator<Item = &'b str>,
    ) -> Result<VerifyReport, LocationError> {
        let known: HashSet<&str> = parts.collect();
        self.report.parts = known.len();
        for listed in self.folder.list().await? {
            let name = listed.name;
            if !name.starts_with('_') && !known.contains(name.as_str()) {
                self.fault(format!("{name}: not named by the manifest"));
            }
        }
        Ok(self.report)
    }
}
