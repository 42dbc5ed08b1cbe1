//! Sequences of items to train a recommender on, each in two parts: what is learned, and what is only measured on.
//!
//! `laser prepare atspeed` writes such a table, so that a data set's own division of training and validation is kept
//! exactly. Columns: `items` and `held_out`, lists of item ids, oldest first.

use laser_schema::EntityId;

use crate::rows::{RowError, RowReader, id_list};
use crate::table::Select;

const ITEMS: &str = "items";
const HELD_OUT: &str = "held_out";
const EXPECTED: &str = "sequences are lists of item ids such as [3, 17]";

/// A user's items, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sequence {
    /// Those to learn from.
    pub items: Vec<EntityId>,
    /// Those behind them, to measure on.
    pub held_out: Vec<EntityId>,
}

/// Reads a table of sequences in batches of rows.
#[derive(Debug)]
pub struct SequenceReader {
    rows: RowReader,
}

impl SequenceReader {
    /// Opens the table at a path or URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    ///
    /// # Errors
    /// A table that is not there, cannot be read, or lacks one of the two columns.
    pub async fn open(path: &str) -> Result<Self, RowError> {
        let mut rows = RowReader::open(path, Select::Only(&[ITEMS, HELD_OUT])).await?;
        let columns = rows.columns()?;
        for column in [ITEMS, HELD_OUT] {
            if let Some(available) = columns.as_ref().filter(|names| !names.iter().any(|name| name == column)) {
                let reason = format!(
                    "no column {column:?}; it has {}, and sequences have {ITEMS:?} and {HELD_OUT:?}",
                    available.join(", ")
                );
                return Err(RowError::File { file: path.to_owned(), reason });
            }
        }
        Ok(Self { rows })
    }

    /// The next sequences, or `None` at the end. Either part may be empty.
    ///
    /// # Errors
    /// The first row that cannot be read, or whose columns hold something else than lists of ids.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<Sequence>>, RowError> {
        let Some(rows) = self.rows.next_batch().await? else {
            return Ok(None);
        };
        let mut sequences = Vec::with_capacity(rows.len());
        for (number, mut row) in rows {
            let [items, held_out] = [ITEMS, HELD_OUT].map(|column| {
                id_list(row.remove(column), column, EXPECTED).map_err(|error| self.rows.error(number, error))
            });
            sequences.push(Sequence { items: items?, held_out: held_out? });
        }
        Ok(Some(sequences))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(name: &str, text: &str) -> Result<Vec<Sequence>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let read = async {
            let mut reader = SequenceReader::open(&path.display().to_string()).await?;
            let mut all = Vec::new();
            while let Some(batch) = reader.next_batch().await? {
                all.extend(batch);
            }
            Ok(all)
        };
        read.await.map_err(|error: RowError| error.to_string())
    }

    #[tokio::test]
    async fn both_parts_are_read_and_may_be_empty() {
        let ints = |ids: &[i64]| ids.iter().map(|&id| EntityId::Int(id)).collect::<Vec<_>>();
        let expected = [
            Sequence { items: ints(&[3, 1]), held_out: ints(&[7]) },
            Sequence { items: ints(&[2]), held_out: Vec::new() },
        ];
        let lines =
            "{\"id\": 1, \"items\": [3, 1], \"held_out\": [7]}\n{\"id\": 2, \"items\": [2], \"held_out\": []}\n";
        assert_eq!(read("s.jsonl", lines).await.unwrap(), expected);
        assert_eq!(read("s.csv", "id,items,held_out\n1,\"[3, 1]\",[7]\n2,[2],\n").await.unwrap(), expected);
        let text = read("s.jsonl", "{\"items\": [\"x\"]}\n").await.unwrap();
        assert_eq!(text[0].items, [EntityId::Text("x".to_owned())]);
    }

    #[tokio::test]
    async fn a_table_of_something_else_is_refused() {
        let error = read("s.csv", "id,items\n1,[3]\n").await.unwrap_err();
        assert!(error.contains("no column \"held_out\"; it has id, items"), "{error}");
        let error = read("s.jsonl", "{\"items\": [3]}\n{\"items\": 3}\n").await.unwrap_err();
        assert!(error.contains("row 2: column \"items\" holds 3; sequences are lists of item ids"), "{error}");
        let error = read("s.jsonl", "{\"items\": [null]}\n").await.unwrap_err();
        assert!(error.contains("row 1: column \"items\" is empty; every item needs an id"), "{error}");
    }
}
