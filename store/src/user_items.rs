//! Tables of items by user: what users took later, which lists are judged by, or the lists of another program.
//!
//! Columns: `id` (or `entity_id`), string or int64, and `items`, a list of item ids. `laser prepare atspeed` writes
//! such a table as `truth.parquet`.

use laser_schema::EntityId;
use serde_json::{Map, Value};

use crate::rows::{RowError, RowReader, ValueError, id_list, id_value};
use crate::table::Select;

/// The names that the column of the user's id may have.
const IDS: [&str; 2] = ["id", "entity_id"];

const ITEMS: &str = "items";
const EXPECTED: &str = "expected a list of ids such as [3, 17]";

/// A row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserItems {
    /// Counted from 1, without a header line.
    pub row: u64,
    /// The user.
    pub user: EntityId,
    /// The items in the order of the row; may be empty.
    pub items: Vec<EntityId>,
}

/// Reads a table in batches of rows.
#[derive(Debug)]
pub struct UserItemsReader {
    rows: RowReader,
}

impl UserItemsReader {
    /// Opens the table at a path or URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    ///
    /// # Errors
    /// A table that is not there, cannot be read, or lacks a column.
    pub async fn open(path: &str) -> Result<Self, RowError> {
        let [id, entity_id] = IDS;
        let mut rows = RowReader::open(path, Select::Only(&[id, entity_id, ITEMS])).await?;
        if let Some(names) = rows.columns()? {
            let has = |column: &str| names.iter().any(|name| name == column);
            if !IDS.into_iter().any(has) || !has(ITEMS) {
                let reason = format!("expected the columns {id:?} and {ITEMS:?}; it has {}", names.join(", "));
                return Err(RowError::File { file: path.to_owned(), reason });
            }
        }
        Ok(Self { rows })
    }

    /// The next rows, or `None` at the end.
    ///
    /// # Errors
    /// The first row without an id, or whose items are no list of ids.
    pub async fn next_batch(&mut self) -> Result<Option<Vec<UserItems>>, RowError> {
        let Some(rows) = self.rows.next_batch().await? else {
            return Ok(None);
        };
        let user_items = |(row, values)| user_items(row, values).map_err(|error| self.rows.error(row, error));
        rows.into_iter().map(user_items).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the error of a row of this table.
    pub fn error(&self, row: u64, reason: impl ToString) -> RowError {
        self.rows.error(row, reason)
    }
}

fn user_items(row: u64, mut values: Map<String, Value>) -> Result<UserItems, ValueError> {
    let [id, entity_id] = IDS;
    let user = values.remove(id).or_else(|| values.remove(entity_id));
    Ok(UserItems { row, user: id_value(user, id, "user")?, items: id_list(values.remove(ITEMS), ITEMS, EXPECTED)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(name: &str, text: &str) -> Result<Vec<UserItems>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut reader = UserItemsReader::open(&path.display().to_string()).await.map_err(|error| error.to_string())?;
        let mut rows = Vec::new();
        while let Some(batch) = reader.next_batch().await.map_err(|error| error.to_string())? {
            rows.extend(batch);
        }
        Ok(rows)
    }

    #[tokio::test]
    async fn users_come_with_their_items_in_order() {
        let expected = [(1, 7, vec![3, 1]), (2, 8, vec![])].map(|(row, user, items)| UserItems {
            row,
            user: EntityId::Int(user),
            items: items.into_iter().map(EntityId::Int).collect(),
        });
        let lines = "{\"id\": 7, \"items\": [3, 1]}\n{\"entity_id\": 8, \"items\": []}\n";
        assert_eq!(read("t.jsonl", lines).await.unwrap(), expected);
        let text = read("t.csv", "entity_id,items\nu,\"[\"\"x\"\", \"\"y\"\"]\"\n").await.unwrap();
        assert_eq!((&text[0].user, text[0].items.len()), (&EntityId::Text("u".to_owned()), 2));
    }

    #[tokio::test]
    async fn other_tables_and_damaged_rows_are_refused() {
        for (name, text, expected) in [
            ("t.csv", "user,items\n1,[2]\n", "expected the columns \"id\" and \"items\"; it has user, items"),
            ("t.csv", "id,history\n1,[2]\n", "it has id, history"),
            ("t.jsonl", "{\"id\": 1, \"items\": [2]}\n{\"items\": [2]}\n", "row 2: column \"id\" is empty"),
            ("t.jsonl", "{\"id\": 1, \"items\": 2}\n", "row 1: column \"items\" holds 2; expected a list of ids"),
            ("t.jsonl", "{\"id\": 1, \"items\": [2, null]}\n", "row 1: column \"items\" is empty; every item needs"),
        ] {
            let error = read(name, text).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
