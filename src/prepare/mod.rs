//! `laser prepare`: public data sets, and the demo's own one, as entity tables.
//!
//! Each source becomes `users.parquet` and `items.parquet` in the contract of
//! [`laser_schema::entity`]: flat attribute columns, histories oldest first, interaction counts. MovieLens also
//! becomes `interactions.parquet`, which recommender models are trained on. The
//! same input gives the same bytes. A row that is wrong stops the work and is named by file and line;
//! nothing is written then.
//!
//! Sources are read once, front to back. What is held in memory is the catalogue and one small record per
//! interaction (16 bytes for MovieLens: 32 million ratings take about 1 GB while the vectors grow), then the
//! compressed table.

mod amazon;
mod catalogue;
mod demo;
mod movielens;
mod table;

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde::de::DeserializeOwned;

pub(crate) use amazon::amazon;
pub(crate) use demo::{DemoOptions, demo};
pub(crate) use movielens::{Division, movielens};

/// Where the two tables of a data set lie, as path or URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tables {
    /// One row a user.
    pub(crate) users: String,
    /// One row an item.
    pub(crate) items: String,
    /// One row an interaction, of data sets that are prepared for training too.
    pub(crate) interactions: Option<String>,
}

/// What a data set was found to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrepareSummary {
    /// Rows of the users' table.
    pub(crate) users: u64,
    /// Rows of the items' table.
    pub(crate) items: u64,
    /// Interactions of the data set, without those left out.
    pub(crate) interactions: u64,
    /// Of these, interactions in histories.
    pub(crate) in_histories: u64,
    /// Interactions left out, since they have no timestamp and histories end at one.
    pub(crate) untimed: u64,
    /// Where the tables are.
    pub(crate) tables: Tables,
}

/// Reads text lines, empty ones left out; a reason that `row` gives is told with file and line.
///
/// A line that is not UTF-8 is Latin-1, as the older MovieLens archives are.
fn for_each_line(path: &Path, mut row: impl FnMut(&str) -> Result<(), String>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
    let mut bytes = Vec::new();
    for line in 1u64.. {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes);
        if read.with_context(|| format!("{}, line {line}: cannot be read", path.display()))? == 0 {
            break;
        }
        let text = decode(bytes.trim_ascii_end());
        if !text.is_empty() {
            row(&text).map_err(|reason| at(path, line, &reason))?;
        }
    }
    Ok(())
}

/// Reads CSV with a header; a cell that does not fit `T`, or a reason that `row` gives, is told with its line.
fn for_each_record<T: DeserializeOwned>(path: &Path, mut row: impl FnMut(T) -> Result<(), String>) -> Result<()> {
    let mut reader = csv::ReaderBuilder::new().from_reader(open(path)?);
    let header = reader.headers().map_err(|e| anyhow!("{}: {e}", path.display()))?.clone();
    let mut record = csv::StringRecord::new();
    loop {
        // A quoted cell may span lines: a record's line is the one it starts on.
        match reader.read_record(&mut record) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => return Err(csv_error(path, &header, &error)),
        }
        let line = record.position().map_or(0, csv::Position::line);
        let value = record.deserialize(Some(&header)).map_err(|error| csv_error(path, &header, &error))?;
        row(value).map_err(|reason| at(path, line, &reason))?;
    }
}

fn csv_error(path: &Path, header: &csv::StringRecord, error: &csv::Error) -> anyhow::Error {
    let line = error.position().map_or(1, csv::Position::line);
    let csv::ErrorKind::Deserialize { err, .. } = error.kind() else {
        return at(path, line, &error.to_string());
    };
    let column = err.field().and_then(|field| header.get(usize::try_from(field).ok()?));
    let column = column.map(|name| format!("column {name:?}: ")).unwrap_or_default();
    let names: Vec<&str> = header.iter().collect();
    at(path, line, &format!("{column}{} (the header is {})", err.kind(), names.join(",")))
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("{}: cannot be opened", path.display()))
}

fn at(path: &Path, line: u64, reason: &str) -> anyhow::Error {
    anyhow!("{}, line {line}: {reason}", path.display())
}

fn decode(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(bytes.iter().map(|&b| char::from(b)).collect()),
    }
}

#[cfg(test)]
mod testing {
    //! What the tests of all sources share: files to read, tables read back.

    use std::path::{Path, PathBuf};

    use laser_schema::{Columns, Entity, EntityTable};
    use laser_store::{EntityReader, Location};

    pub(super) fn location(dir: &Path) -> Location {
        Location::parse(dir.to_str().unwrap()).unwrap()
    }

    /// A directory with these files in it.
    pub(super) fn files(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    pub(super) async fn read_table(path: &str) -> Vec<Entity> {
        let table = EntityTable { path: path.to_owned(), kind: None, columns: Columns::default() };
        let mut reader = EntityReader::open(&table).await.unwrap();
        let mut entities = Vec::new();
        while let Some(batch) = reader.next_batch().await.unwrap() {
            entities.extend(batch);
        }
        entities
    }

    /// A folder of the shared data, or `None` (said on standard error) where it is not there.
    pub(super) fn shared(folder: &str) -> Option<PathBuf> {
        let root =
            std::env::var_os("LASER_SHARED").map_or_else(|| std::path::absolute("../shared").unwrap(), PathBuf::from);
        let path = root.join(folder);
        if path.is_dir() {
            return Some(path);
        }
        eprintln!("skipped: {} is not there; set LASER_SHARED to the shared data", path.display());
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_utf8_are_latin1() {
        assert_eq!(decode(b"Caf\xe9"), "Café");
        assert_eq!(decode("Café".as_bytes()), "Café");
    }

    #[test]
    fn a_record_is_named_by_the_line_it_starts_on() {
        let dir = testing::files(&[("t.csv", b"a,b\n\"two\nlines\",1\nx,y\n")]);
        let rows = for_each_record(&dir.path().join("t.csv"), |_: (String, u32)| Ok(()));
        let error = rows.unwrap_err().to_string();
        assert!(error.contains("t.csv, line 4: column \"b\": invalid digit"), "{error}");
    }
}
