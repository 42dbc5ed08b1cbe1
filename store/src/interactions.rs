//! Reading interactions: the whole table, its ids numbered in the order in which they come.

use std::collections::HashMap;

use laser_schema::EntityId;
use laser_schema::interactions::InteractionTable;
use laser_schema::value::seconds;
use serde_json::{Map, Value};

use crate::rows::{RowError, RowReader, ValueError, id_value};
use crate::table::Select;

/// The columns that a reader needs besides users and items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Every row must have a rating.
    pub rating: bool,
    /// Every row must have a timestamp.
    pub timestamp: bool,
}

/// Who did what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InteractionRow {
    /// Place in [`Interactions::users`].
    pub user: u32,
    /// Place in [`Interactions::items`].
    pub item: u32,
    /// How much they liked it, if the table says so; finite.
    pub rating: Option<f32>,
    /// When it was, if the table says so; finite. Seconds of ISO 8601 text, else the table's unit.
    pub timestamp: Option<f64>,
}

/// A whole table: 32 bytes a row, and the ids once.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Interactions {
    /// Users in the order in which they come.
    pub users: Vec<EntityId>,
    /// Items in the order in which they come.
    pub items: Vec<EntityId>,
    /// In the order of the table.
    pub rows: Vec<InteractionRow>,
}

impl Interactions {
    /// Reads the whole table.
    ///
    /// # Errors
    /// A missing column, or the first row that lacks what is needed or holds what is no id, finite number or time.
    pub async fn read(table: &InteractionTable, needs: Needs) -> Result<Self, RowError> {
        let columns = [
            ("user", &table.user, true),
            ("item", &table.item, true),
            ("rating", &table.rating, needs.rating),
            ("timestamp", &table.timestamp, needs.timestamp),
        ];
        let names: Vec<&str> = columns.iter().map(|(_, name, _)| name.as_str()).collect();
        let mut reader = RowReader::open(&table.path, Select::Only(&names)).await?;
        if let Some(available) = reader.columns()? {
            let missing = |&&(_, column, needed): &&(&str, &String, bool)| needed && !available.contains(column);
            if let Some((key, column, _)) = columns.iter().find(missing) {
                return Err(RowError::MissingColumn {
                    file: table.path.clone(),
                    column: (*column).clone(),
                    section: "interactions",
                    key,
                    available: available.join(", "),
                });
            }
        }
        let (mut users, mut items) = (Ids::default(), Ids::default());
        let mut rows = Vec::new();
        while let Some(batch) = reader.next_batch().await? {
            for (number, row) in batch {
                let row = to_row(row, table, needs, &mut users, &mut items);
                rows.push(row.map_err(|reason| reader.error(number, reason))?);
            }
        }
        if rows.is_empty() {
            return Err(RowError::Empty { file: table.path.clone() });
        }
        Ok(Self { users: users.ids, items: items.ids, rows })
    }
}

/// Numbers ids in the order in which they come.
#[derive(Default)]
struct Ids {
    ids: Vec<EntityId>,
    places: HashMap<EntityId, u32>,
}

impl Ids {
    fn place(&mut self, id: EntityId) -> Result<u32, ValueError> {
        if let Some(&place) = self.places.get(&id) {
            return Ok(place);
        }
        let place = u32::try_from(self.ids.len()).map_err(|_| ValueError::TooManyIds)?;
        self.ids.push(id.clone());
        self.places.insert(id, place);
        Ok(place)
    }
}

fn to_row(
    mut row: Map<String, Value>,
    table: &InteractionTable,
    needs: Needs,
    users: &mut Ids,
    items: &mut Ids,
) -> Result<InteractionRow, ValueError> {
    #[expect(clippy::cast_possible_truncation, reason = "ratings are single precision")]
    let rating = number(row.remove(&table.rating), &table.rating, needs.rating)?.map(|r| r as f32);
    let timestamp = row.remove(&table.timestamp);
    Ok(InteractionRow {
        user: users.place(id_value(row.remove(&table.user), &table.user, "interaction's user")?)?,
        item: items.place(id_value(row.remove(&table.item), &table.item, "interaction's item")?)?,
        rating,
        timestamp: number(timestamp, &table.timestamp, needs.timestamp)?,
    })
}

/// Reads a finite number, or ISO 8601 as seconds. Parquet's NaN comes as null.
fn number(value: Option<Value>, column: &str, needed: bool) -> Result<Option<f64>, ValueError> {
    let value = value.unwrap_or_default();
    let number = match &value {
        Value::Null if needed => {
            let expected = "every interaction needs a value there, leave out those without";
            return Err(ValueError::new(column, "is empty or NaN", expected));
        }
        Value::Null => return Ok(None),
        Value::Number(number) => number.as_f64(),
        Value::String(text) => seconds(text),
        _ => None,
    };
    number
        .map(Some)
        .ok_or_else(|| ValueError::new(column, format!("holds {value}"), "expected a finite number or a time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Needs = Needs { rating: true, timestamp: true };

    async fn read(name: &str, text: &str, needs: Needs) -> Result<Interactions, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let table = InteractionTable { path: path.to_str().unwrap().to_owned(), ..InteractionTable::default() };
        Interactions::read(&table, needs).await.map_err(|e| e.to_string())
    }

    #[tokio::test]
    async fn csv_and_jsonl_are_read() {
        let csv = "user,item,rating,timestamp\na,7,4.5,100\nb,7,3,1970-01-01T00:01:00Z\na,8,1,\n";
        let found = read("i.csv", csv, Needs { rating: true, timestamp: false }).await.unwrap();
        assert_eq!(found.users.len(), 2);
        assert_eq!(found.items, ["7", "8"].map(|id| EntityId::Text(id.into())));
        let last = InteractionRow { user: 0, item: 1, rating: Some(1.0), timestamp: None };
        assert_eq!(found.rows[2], last);
        assert_eq!(found.rows[1].timestamp, Some(60.0));
        let lines = "{\"user\": 1, \"item\": 2}\n{\"user\": 1, \"item\": 3}\n";
        let found = read("i.jsonl", lines, Needs::default()).await.unwrap();
        assert_eq!(found.users, [EntityId::Int(1)]);
        assert_eq!(found.rows[0].rating, None);
    }

    #[tokio::test]
    async fn bad_tables_are_refused_by_column_and_row() {
        let cases = [
            (
                "user,item,rating\na,b,1\n",
                "no column \"timestamp\"; it has user, item, rating. Set [interactions] timestamp",
            ),
            ("user,film,rating,timestamp\na,b,1,2\n", "no column \"item\""),
            ("user,item,rating,timestamp\na,b,1,2\na,b,NaN,3\n", "row 2: column \"rating\" holds \"NaN\""),
            ("user,item,rating,timestamp\na,b,1,2\na,b,1,\n", "row 2: column \"timestamp\" is empty"),
            ("user,item,rating,timestamp\na,b,1,soon\n", "row 1: column \"timestamp\" holds \"soon\""),
            ("user,item,rating,timestamp\n,b,1,1\n", "row 1: column \"user\" is empty"),
            ("user,item,rating,timestamp\n", "no interactions"),
        ];
        for (text, part) in cases {
            let error = read("i.csv", text, ALL).await.unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let error =
            read("i.jsonl", "{\"user\": 1, \"item\": 2, \"rating\": [1], \"timestamp\": 1}", ALL).await.unwrap_err();
        assert!(error.contains("row 1: column \"rating\" holds [1]"), "{error}");
    }
}
