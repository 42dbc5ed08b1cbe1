//! Text files read row by row: lines, lines of separated cells, and CSV with a header.
//!
//! A row that is wrong is named by file and line, and where a cell is wrong by its column.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use csv::StringRecord;
use serde::de::DeserializeOwned;

use crate::{PrepareError, Result};

/// Reads text lines and leaves out empty ones.
///
/// A line that is not UTF-8 is Latin-1, as the older MovieLens archives are.
pub(crate) fn for_each_line(path: &Path, mut row: impl FnMut(&str) -> Result<(), String>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
    let mut bytes = Vec::new();
    for line in 1u64.. {
        bytes.clear();
        if reader.read_until(b'\n', &mut bytes).map_err(|error| at(path, line, error))? == 0 {
            break;
        }
        let text = decode(bytes.trim_ascii_end());
        if !text.is_empty() {
            row(&text).map_err(|fault| at(path, line, fault))?;
        }
    }
    Ok(())
}

/// Reads CSV with a header into `T`.
pub(crate) fn for_each_record<T: DeserializeOwned>(
    path: &Path,
    mut row: impl FnMut(T) -> Result<(), String>,
) -> Result<()> {
    let mut reader = csv::Reader::from_reader(open(path)?);
    let line_of = |error: &csv::Error| error.position().map_or(1, csv::Position::line);
    let header = reader.headers().map_err(|error| at(path, 1, error))?.clone();
    let mut record = StringRecord::new();
    // A quoted cell may span lines: a record's line is the one it starts on.
    while reader.read_record(&mut record).map_err(|error| at(path, line_of(&error), error))? {
        let line = record.position().map_or(0, csv::Position::line);
        let value = record.deserialize(Some(&header)).map_err(|error| at(path, line, cell_fault(&header, &error)))?;
        row(value).map_err(|fault| at(path, line, fault))?;
    }
    Ok(())
}

/// The columns of lines whose cells are separated and never quoted.
#[derive(Debug)]
pub(crate) struct Columns {
    separator: &'static str,
    names: StringRecord,
}

impl Columns {
    pub(crate) fn new(separator: &'static str, names: &[&str]) -> Self {
        Self { separator, names: names.to_vec().into() }
    }

    /// The line's cells as `T`.
    pub(crate) fn parse<T: DeserializeOwned>(&self, line: &str) -> Result<T, String> {
        self.read(line.split(self.separator).collect())
    }

    /// These cells as `T`.
    pub(crate) fn read<T: DeserializeOwned>(&self, cells: Vec<&str>) -> Result<T, String> {
        let (found, expected) = (cells.len(), self.names.len());
        if found != expected {
            let names: Vec<&str> = self.names.iter().collect();
            return Err(format!("{found} cells; expected {expected}: {}", names.join(self.separator)));
        }
        StringRecord::from(cells).deserialize(Some(&self.names)).map_err(|error| cell_fault(&self.names, &error))
    }
}

fn cell_fault(names: &StringRecord, error: &csv::Error) -> String {
    let csv::ErrorKind::Deserialize { err, .. } = error.kind() else {
        return error.to_string();
    };
    let column = err.field().and_then(|field| names.get(usize::try_from(field).ok()?));
    let column = column.map(|name| format!("column {name:?}: ")).unwrap_or_default();
    let names: Vec<&str> = names.iter().collect();
    format!("{column}{} (the columns are {})", err.kind(), names.join(","))
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| PrepareError::at(path, format!("cannot be opened: {error}")))
}

fn at(path: &Path, line: u64, reason: impl ToString) -> PrepareError {
    PrepareError::Input { place: format!("{}, line {line}", path.display()), reason: reason.to_string() }
}

fn decode(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(bytes.iter().map(|&b| char::from(b)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::files;

    #[test]
    fn lines_that_are_not_utf8_are_latin1() {
        assert_eq!(decode(b"Caf\xe9"), "Café");
        assert_eq!(decode("Café".as_bytes()), "Café");
    }

    #[test]
    fn a_record_is_named_by_the_line_it_starts_on() {
        let dir = files(&[("t.csv", b"a,b\n\"two\nlines\",1\nx,y\n")]);
        let rows = for_each_record(&dir.path().join("t.csv"), |_: (String, u32)| Ok(()));
        let error = rows.unwrap_err().to_string();
        assert!(error.contains("t.csv, line 4: column \"b\": invalid digit"), "{error}");
    }
}
