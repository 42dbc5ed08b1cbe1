//! A list of entities that a user gives: a text file with an id per line, or a table.

use std::collections::{BTreeSet, HashSet};

use laser_schema::{Digest, EntityId};

use crate::location::Location;
use crate::rows::{RowError, RowReader, id_value};
use crate::table::Select;

/// The columns that ids may be in.
const COLUMNS: [&str; 2] = ["id", "entity_id"];

/// Ids, whatever the type of the column that they are looked for in: `7` is the integer 7 and the text "7".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdList {
    texts: HashSet<String>,
    /// Those that are integers as a table writes them.
    integers: HashSet<i64>,
    digest: Digest,
}

impl IdList {
    /// Reads the ids of a Parquet, CSV or JSONL table (by extension) with a column `id` or `entity_id`, or the lines of
    /// any other file, of which blank ones are passed over. Memory is that of the ids.
    ///
    /// # Errors
    /// [`RowError`], naming file and row; also if there is no id.
    pub async fn read(path: &str) -> Result<Self, RowError> {
        let location = Location::parse(path)?;
        let ids = match location.extension().as_str() {
            "parquet" | "csv" | "jsonl" | "ndjson" => read_table(path).await?,
            _ => read_lines(path, &location).await?,
        };
        match ids.is_empty() {
            true => Err(RowError::File { file: path.to_owned(), reason: "it has no id; give one per line".to_owned() }),
            false => Ok(Self::new(ids)),
        }
    }

    /// The list of these ids.
    pub fn new(ids: BTreeSet<String>) -> Self {
        let digest = Digest::of_json(&ids);
        let integers = ids.iter().filter_map(|id| id.parse().ok().filter(|int: &i64| int.to_string() == **id));
        Self { integers: integers.collect(), digest, texts: ids.into_iter().collect() }
    }

    /// Whether an entity is in the list.
    pub fn contains(&self, id: &EntityId) -> bool {
        match id {
            EntityId::Int(id) => self.integers.contains(id),
            EntityId::Text(id) => self.texts.contains(id),
        }
    }

    /// The ids that are not among others, in their order as text.
    pub fn without(&self, others: &BTreeSet<String>) -> Vec<&str> {
        let mut rest: Vec<&str> = self.texts.iter().filter(|id| !others.contains(*id)).map(String::as_str).collect();
        rest.sort_unstable();
        rest
    }

    /// The number of different ids.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Digest of the ids; their order and the file's format do not matter.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }
}

async fn read_table(path: &str) -> Result<BTreeSet<String>, RowError> {
    let (mut reader, mut ids) = (RowReader::open(path, Select::Only(&COLUMNS)).await?, BTreeSet::new());
    while let Some(rows) = reader.next_batch().await? {
        for (row, mut values) in rows {
            let column = COLUMNS.into_iter().find(|column| values.contains_key(*column)).unwrap_or(COLUMNS[0]);
            let id = id_value(values.remove(column), column, "entity").map_err(|e| reader.error(row, e))?;
            ids.insert(id.to_string());
        }
    }
    Ok(ids)
}

async fn read_lines(path: &str, location: &Location) -> Result<BTreeSet<String>, RowError> {
    let bytes = location.read().await?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|e| RowError::File { file: path.to_owned(), reason: format!("it is no text: {e}") })?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> IdList {
        IdList::new(ids.iter().map(|id| (*id).to_owned()).collect())
    }

    #[test]
    fn an_id_is_found_in_columns_of_either_type() {
        let list = ids(&["7", "007", "u1"]);
        for (id, expected) in [("7", true), ("007", true), ("u1", true), ("u2", false)] {
            assert_eq!(list.contains(&EntityId::Text(id.to_owned())), expected, "{id}");
        }
        assert!(list.contains(&EntityId::Int(7)) && !list.contains(&EntityId::Int(1)));
    }

    #[tokio::test]
    async fn lines_and_tables_give_the_same_list() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("ids.txt", "7\n\n u1 \n7\n"),
            ("ids.csv", "id,name\nu1,x\n7,y\n"),
            ("ids.jsonl", "{\"entity_id\":7}\n{\"entity_id\":\"u1\"}\n"),
        ];
        for (name, content) in files {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert_eq!(IdList::read(path.to_str().unwrap()).await.unwrap(), ids(&["u1", "7"]), "{name}");
        }
        let empty = dir.path().join("empty.txt");
        std::fs::write(&empty, "\n").unwrap();
        let error = IdList::read(empty.to_str().unwrap()).await.unwrap_err().to_string();
        assert!(error.contains("empty.txt") && error.contains("no id"), "{error}");
    }
}
