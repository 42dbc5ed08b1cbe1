//! The catalogue of a lists night: which identifier each item has.
//!
//! An identifier is a list of codes, one per level: the text that the model writes (`<a_47>`), or numbers, as
//! `laser ids` gives them, which are written `<a_47>` for the first level, `<b_…>` for the second, and so on.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use laser_schema::EntityId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::batch::from_batch;
use crate::data_set;
use crate::location::{Location, LocationError};
use crate::rows::{RowError, RowReader, ValueError, id_value};
use crate::run_store::TITLES;
use crate::table::{self, Select, TableError, TableReader};

/// A table of items with their identifiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CatalogueTable {
    /// A local path or object-store URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`, or a folder that
    /// `laser ids` has published.
    pub path: String,
    /// The column of the item's id: string or int64.
    pub id: String,
    /// The column of the identifier: a list of codes.
    pub identifier: String,
    /// Whether items with the same codes are told apart by one more code, their number among these.
    pub distinct: bool,
    /// The column of the item's title, which summary and report show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

impl Default for CatalogueTable {
    fn default() -> Self {
        Self { path: String::new(), id: "id".into(), identifier: "identifier".into(), distinct: false, title: None }
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
    /// The items that have a title, with it.
    pub titles: Vec<ItemTitle>,
    /// For each file that was read the number of its first item. Every row is an item.
    files: Vec<(usize, String)>,
}

impl Catalogue {
    /// Reads the table.
    ///
    /// # Errors
    /// Naming the row that has no id, that of an earlier row or no identifier, one of another length or of something
    /// else than codes, or a title that is no text.
    pub async fn read(table: &CatalogueTable) -> Result<Self, RowError> {
        let keys = [("id", &table.id), ("identifier", &table.identifier)];
        let keys: Vec<_> = keys.into_iter().chain(table.title.as_ref().map(|title| ("title", title))).collect();
        let columns: Vec<&str> = keys.iter().map(|(_, column)| column.as_str()).collect();
        let mut building = Building::default();
        for path in tables(&table.path).await? {
            let mut reader = RowReader::open(&path, Select::Only(&columns)).await?;
            building.files.push((building.ids.len(), path.clone()));
            for (key, column) in &keys {
                require(&mut reader, (&path, column), ("lists.catalogue", key))?;
            }
            while let Some(rows) = reader.next_batch().await? {
                for (number, row) in rows {
                    building.add_row(row, table).map_err(|error| reader.error(number, error))?;
                }
            }
        }
        if let Some(column) = table.title.as_ref().filter(|_| building.titles.is_empty() && !building.ids.is_empty()) {
            let reason = format!("no item has a {column:?}; set [lists.catalogue] title to the column of titles");
            return Err(RowError::File { file: table.path.clone(), reason });
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

    /// The error of an item's row, for a fault that shows only later; `item` is its number in the table's order.
    pub fn row_error(&self, item: usize, reason: impl ToString) -> RowError {
        let file = self.files.iter().rev().find(|(first, _)| *first <= item);
        let (first, file) = file.map_or((0, ""), |(first, file)| (*first, file.as_str()));
        RowError::Row { file: file.to_owned(), row: (item - first + 1) as u64, reason: reason.to_string() }
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

/// The tables at a path: a table, or the parts of a published folder.
async fn tables(path: &str) -> Result<Vec<String>, RowError> {
    let place = Location::parse(path)?;
    if !place.extension().is_empty() {
        return Ok(vec![path.to_owned()]);
    }
    let wrong = |reason: String| RowError::File { file: path.to_owned(), reason };
    match data_set::parts(&place).await {
        Ok(Some(parts)) => Ok(parts.iter().map(|part| part.url().to_owned()).collect()),
        Ok(None) => Err(wrong(
            "it is no table (.parquet, .csv, .jsonl or .ndjson) and no complete folder knowledge_ids/kind=item/dt=…/\
             run=… that `laser ids` has published"
                .to_owned(),
        )),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// A code that is a number, as it is written.
fn written(level: usize, number: u64) -> String {
    let letter = u32::try_from(level).ok().and_then(|level| char::from_u32(u32::from('a') + level)).unwrap_or('?');
    format!("<{letter}_{number}>")
}

/// The title of a row, if it has one.
fn title(value: Option<Value>, column: &str) -> Result<Option<String>, ValueError> {
    match value.unwrap_or_default() {
        Value::Null => Ok(None),
        Value::String(title) => Ok(Some(title).filter(|title| !title.is_empty())),
        other => Err(ValueError::new(column, format!("holds {other}"), "a title is a text")),
    }
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
    /// Their ids as text: tables may keep one id in two types.
    known: HashSet<String>,
    codes: Vec<BTreeMap<String, u16>>,
    identifiers: Vec<u16>,
    titles: Vec<ItemTitle>,
    files: Vec<(usize, String)>,
}

impl Building {
    fn add_row(&mut self, mut row: Map<String, Value>, table: &CatalogueTable) -> Result<(), ValueError> {
        let id = id_value(row.remove(&table.id), &table.id, "item")?;
        let title = table.title.as_ref().map_or(Ok(None), |column| title(row.remove(column), column))?;
        if !self.known.insert(id.to_string()) {
            let found = format!("holds {id}, the id of an earlier row");
            return Err(ValueError::new(&table.id, found, "each item has one row"));
        }
        self.titles.extend(title.map(|title| ItemTitle { id: id.to_string(), title }));
        self.add(id, codes(row.remove(&table.identifier), &table.identifier)?, &table.identifier)
    }

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
        Catalogue { ids: self.ids, codes, identifiers, titles: self.titles, files: self.files }
    }
}

/// An item and what people call it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemTitle {
    /// The item's id as text.
    pub id: String,
    /// Its title.
    pub title: String,
}

/// Writes titles into a run's folder, unless some are there.
///
/// # Errors
/// The store's.
pub async fn keep_titles(folder: &Location, titles: &[ItemTitle]) -> Result<(), TitleError> {
    let file = folder.join(TITLES);
    if file.exists().await? {
        return Ok(());
    }
    let field = |name| Field::new(name, DataType::Utf8, false);
    let schema = Arc::new(Schema::new(vec![field("id"), field("title")]));
    file.create(table::encode(TITLES, schema, titles, &[])?).await?;
    Ok(())
}

/// Those of a run's titles that are `wanted`, by the items' ids as text; none if the run has no titles.
///
/// # Errors
/// The store's, and a table that is none.
pub async fn titles(folder: &Location, wanted: &HashSet<String>) -> Result<HashMap<String, String>, TitleError> {
    let file = folder.join(TITLES);
    let mut found = HashMap::new();
    if wanted.is_empty() || !file.exists().await? {
        return Ok(found);
    }
    let mut table = TableReader::open(&file).await?;
    while let Some(batch) = table.next_batch().await? {
        let rows: Vec<ItemTitle> = from_batch(&batch)
            .map_err(|error| TableError::Row { file: file.url().to_owned(), reason: error.to_string() })?;
        found.extend(rows.into_iter().filter(|item| wanted.contains(&item.id)).map(|item| (item.id, item.title)));
    }
    Ok(found)
}

/// Why titles could not be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum TitleError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The table.
    #[error(transparent)]
    Table(#[from] TableError),
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

    #[test]
    fn an_item_is_traced_to_its_row() {
        // The second file has no rows.
        let files = [(0, "first.csv"), (2, "second.csv"), (2, "third.csv")];
        let files = files.map(|(first, file)| (first, file.to_owned())).to_vec();
        let catalogue = Catalogue { files, ..Catalogue::default() };
        let found = [1, 2, 4].map(|item| catalogue.row_error(item, "why").to_string());
        assert_eq!(found, ["first.csv, row 2: why", "third.csv, row 1: why", "third.csv, row 3: why"]);
    }

    #[tokio::test]
    async fn titles_are_kept_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("items.jsonl").display().to_string();
        let table = CatalogueTable { path, title: Some("name".to_owned()), ..CatalogueTable::default() };
        let write = |title: &str| {
            let lines = ["1", title].map(|id| format!("{{\"id\": {id}, \"identifier\": [1]}}\n")).concat();
            std::fs::write(&table.path, lines).unwrap();
        };
        write("2, \"name\": \"Two\"");
        let catalogue = Catalogue::read(&table).await.unwrap();
        assert_eq!(catalogue.titles, [ItemTitle { id: "2".to_owned(), title: "Two".to_owned() }]);
        let folder = Location::parse(dir.path().to_str().unwrap()).unwrap();
        let wanted = HashSet::from(["1", "2"].map(str::to_owned));
        assert_eq!(titles(&folder, &wanted).await.unwrap(), HashMap::new());
        keep_titles(&folder, &catalogue.titles).await.unwrap();
        keep_titles(&folder, &[]).await.unwrap();
        let found = titles(&folder, &wanted).await.unwrap();
        assert_eq!(found, HashMap::from([("2".to_owned(), "Two".to_owned())]));
        write("2, \"name\": 7");
        let error = Catalogue::read(&table).await.unwrap_err().to_string();
        assert!(error.ends_with("row 2: column \"name\" holds 7; a title is a text"), "{error}");
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
            (
                "{\"id\": 1, \"identifier\": [3, 4]}",
                "row 2: column \"id\" holds 1, the id of an earlier row; each item has one row",
            ),
            ("{\"id\": \"1\", \"identifier\": [3, 4]}", "row 2: column \"id\" holds 1, the id of an earlier row"),
        ] {
            let error = read(&format!("{first}{row}\n"), false).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
