//! The catalogue of a lists night: which identifier each item has.
//!
//! An identifier is a list of codes, one per level: the text that the model writes (`<a_47>`), or numbers, as
//! `laser ids` gives them, which are written `<a_47>` for the first level, `<b_…>` for the second, and so on.

use std::collections::BTreeMap;

use laser_schema::EntityId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rows::{RowError, RowReader, ValueError, id_value};
use crate::table::Select;

/// A table of items with their identifiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CatalogueTable {
    /// A local path or object-store URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    pub path: String,
    /// The column of the item's id: string or int64.
    pub id: String,
    /// The column of the identifier: a list of codes.
    pub identifier: String,
    /// Whether items with the same codes are told apart by one more code, their number among these.
    pub distinct: bool,
}

impl Default for CatalogueTable {
    fn default() -> Self {
        Self { path: String::new(), id: "id".into(), identifier: "identifier".into(), distinct: false }
    }
}

/// Items and their identifiers, in the order of the table.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Catalogue {
    /// The items.
    pub ids: Vec<EntityId>,
    /// For each level the codes that occur, in ascending order.
    pub codes: Vec<Vec<String>>,
    /// For each item and level the number of the code, `[items, levels]`.
    pub identifiers: Vec<u16>,
}

impl Catalogue {
    /// Reads the table.
    ///
    /// # Errors
    /// Naming the row that has no id or no identifier, or one of another length or of something else than codes.
    pub async fn read(table: &CatalogueTable) -> Result<Self, RowError> {
        let columns = [table.id.as_str(), table.identifier.as_str()];
        let mut reader = RowReader::open(&table.path, Select::Only(&columns)).await?;
        for (column, key) in [(&table.id, "id"), (&table.identifier, "identifier")] {
            require(&mut reader, (&table.path, column), ("lists.catalogue", key))?;
        }
        let mut building = Building::default();
        while let Some(rows) = reader.next_batch().await? {
            for (number, mut row) in rows {
                let id = id_value(row.remove(&table.id), &table.id, "item");
                let codes = codes(row.remove(&table.identifier), &table.identifier);
                let added = id.and_then(|id| building.add(id, codes?, &table.identifier));
                added.map_err(|error| reader.error(number, error))?;
            }
        }
        let mut catalogue = building.finish();
        if table.distinct {
            catalogue.tell_apart();
        }
        Ok(catalogue)
    }

    /// Codes of an identifier.
    pub fn levels(&self) -> usize {
        self.codes.len()
    }

    /// One more code: an item's number among those of the same codes.
    fn tell_apart(&mut self) {
        let levels = self.levels();
        let mut taken: BTreeMap<&[u16], u16> = BTreeMap::new();
        let numbers: Vec<u16> = self
            .identifiers
            .chunks_exact(levels.max(1))
            .map(|codes| {
                let next = taken.entry(codes).or_default();
                *next = next.saturating_add(1);
                *next - 1
            })
            .collect();
        let most = numbers.iter().copied().max().unwrap_or_default();
        let items = self.identifiers.chunks_exact(levels.max(1)).zip(&numbers);
        self.identifiers = items.flat_map(|(codes, number)| codes.iter().copied().chain([*number])).collect();
        self.codes.push((0..=u64::from(most)).map(|number| written(levels, number)).collect());
    }
}

/// A code that is a number, as it is written.
fn written(level: usize, number: u64) -> String {
    let letter = u32::try_from(level).ok().and_then(|level| char::from_u32(u32::from('a') + level)).unwrap_or('?');
    format!("<{letter}_{number}>")
}

/// The codes of a row's identifier.
fn codes(value: Option<Value>, column: &str) -> Result<Vec<String>, ValueError> {
    const EXPECTED: &str = "an identifier is a list of codes such as [\"<a_47>\", \"<b_103>\"] or [47, 103]";
    let wrong = |found: String| ValueError::new(column, found, EXPECTED);
    let list = match value {
        Some(Value::Array(list)) => list,
        // CSV holds JSON.
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|_| wrong(format!("holds {text:?}")))?,
        None | Some(Value::Null) => return Err(wrong("is empty".to_owned())),
        Some(other) => return Err(wrong(format!("holds {other}"))),
    };
    let code = |(level, value): (usize, &Value)| match value {
        Value::String(code) if !code.is_empty() => Ok(code.clone()),
        Value::Number(number) => {
            number.as_u64().map(|number| written(level, number)).ok_or_else(|| wrong(format!("holds {number}")))
        }
        other => Err(wrong(format!("holds {other}"))),
    };
    match list.is_empty() {
        true => Err(wrong("is empty".to_owned())),
        false => list.iter().enumerate().map(code).collect(),
    }
}

/// A catalogue while its rows come in; codes are numbered as they come.
#[derive(Default)]
struct Building {
    ids: Vec<EntityId>,
    codes: Vec<BTreeMap<String, u16>>,
    identifiers: Vec<u16>,
}

impl Building {
    fn add(&mut self, id: EntityId, codes: Vec<String>, column: &str) -> Result<(), ValueError> {
        if self.ids.is_empty() {
            self.codes.resize_with(codes.len(), BTreeMap::new);
        }
        let levels = self.codes.len();
        if codes.len() != levels {
            let found = format!("holds {} codes", codes.len());
            return Err(ValueError::new(column, found, format!("the rows before have {levels}")));
        }
        for (code, known) in codes.into_iter().zip(&mut self.codes) {
            let Ok(next) = u16::try_from(known.len()) else {
                let most = u32::from(u16::MAX) + 1;
                return Err(ValueError::new(column, "holds too many codes", format!("a level has at most {most}")));
            };
            self.identifiers.push(*known.entry(code).or_insert(next));
        }
        self.ids.push(id);
        Ok(())
    }

    /// Numbers the codes in their order, whatever that of the rows.
    fn finish(self) -> Catalogue {
        let order: Vec<Vec<u16>> = self
            .codes
            .iter()
            .map(|known| {
                let mut places = vec![0; known.len()];
                (0..).zip(known.values()).for_each(|(place, &number)| places[usize::from(number)] = place);
                places
            })
            .collect();
        let mut identifiers = self.identifiers;
        for codes in identifiers.chunks_exact_mut(order.len().max(1)) {
            codes.iter_mut().zip(&order).for_each(|(code, places)| *code = places[usize::from(*code)]);
        }
        let codes = self.codes.into_iter().map(|known| known.into_keys().collect()).collect();
        Catalogue { ids: self.ids, codes, identifiers }
    }
}

/// Refuses a table without a column that the configuration names.
fn require(
    reader: &mut RowReader,
    (file, column): (&str, &str),
    (section, key): (&'static str, &'static str),
) -> Result<(), RowError> {
    match reader.columns()? {
        Some(available) if !available.iter().any(|name| name == column) => Err(RowError::MissingColumn {
            file: file.to_owned(),
            column: column.to_owned(),
            section,
            key,
            available: available.join(", "),
        }),
        _ => Ok(()),
    }
}

/// Reads ids from a table, such as those of the items that are out of stock.
///
/// # Errors
/// Naming the row without an id.
pub async fn read_ids(path: &str, column: &str) -> Result<Vec<EntityId>, RowError> {
    let mut reader = RowReader::open(path, Select::Only(&[column])).await?;
    require(&mut reader, (path, column), ("lists.catalogue", "id"))?;
    let mut ids = Vec::new();
    while let Some(rows) = reader.next_batch().await? {
        for (number, mut row) in rows {
            let id = id_value(row.remove(column), column, "item");
            ids.push(id.map_err(|error| reader.error(number, error))?);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(lines: &str, distinct: bool) -> Result<Catalogue, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("items.jsonl").display().to_string();
        std::fs::write(&path, lines).unwrap();
        let table = CatalogueTable { path, distinct, ..CatalogueTable::default() };
        Catalogue::read(&table).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn codes_are_numbered_in_their_order() {
        let lines = concat!(
            "{\"id\": 7, \"identifier\": [\"<a_9>\", \"<b_1>\"]}\n",
            "{\"id\": 3, \"identifier\": [\"<a_2>\", \"<b_1>\"]}\n",
            "{\"id\": 5, \"identifier\": [\"<a_9>\", \"<b_0>\"]}\n",
        );
        let found = read(lines, false).await.unwrap();
        assert_eq!(found.codes, [["<a_2>", "<a_9>"], ["<b_0>", "<b_1>"]]);
        assert_eq!(found.identifiers, [1, 1, 0, 1, 1, 0]);
        assert_eq!(found.ids, [7, 3, 5].map(EntityId::Int));
    }

    #[tokio::test]
    async fn numbers_are_written_and_items_told_apart() {
        let lines = concat!(
            "{\"id\": \"x\", \"identifier\": [4, 0]}\n",
            "{\"id\": \"y\", \"identifier\": \"[4, 0]\"}\n",
            "{\"id\": \"z\", \"identifier\": [4, 1]}\n",
        );
        let found = read(lines, true).await.unwrap();
        let expected = [vec!["<a_4>"], vec!["<b_0>", "<b_1>"], vec!["<c_0>", "<c_1>"]];
        assert_eq!(found.codes, expected);
        assert_eq!(found.identifiers, [0, 0, 0, 0, 0, 1, 0, 1, 0]);
    }

    #[tokio::test]
    async fn a_damaged_row_is_refused_by_its_number() {
        let first = "{\"id\": 1, \"identifier\": [1, 2]}\n";
        for (row, expected) in [
            ("{\"id\": 2, \"identifier\": [1]}", "row 2: column \"identifier\" holds 1 codes; the rows before have 2"),
            ("{\"id\": 2}", "row 2: column \"identifier\" is empty; an identifier is a list of codes"),
            ("{\"id\": 2, \"identifier\": [1, -2]}", "row 2: column \"identifier\" holds -2"),
            ("{\"id\": 2, \"identifier\": \"a-b\"}", "row 2: column \"identifier\" holds \"a-b\""),
            ("{\"identifier\": [1, 2]}", "row 2: column \"id\" is empty; every item needs an id"),
        ] {
            let error = read(&format!("{first}{row}\n"), false).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
