//! Histories of an entity table, in the order of their timestamps.
//!
//! Of a Parquet column no value is made until somebody asks for it: prompts leave most of a long history out.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait};
use laser_schema::History;
use laser_schema::history::{Interactions, TIMESTAMP};
use serde_json::Value;

use crate::cells;

/// The elements of a column of lists: structs, or titles.
#[derive(Debug)]
struct Elements {
    /// By name; of two with one name, the first that has a value counts.
    columns: Vec<(String, ArrayRef)>,
}

impl Interactions for Elements {
    fn field(&self, row: usize, name: &str) -> Option<Value> {
        let named = self.columns.iter().filter(|(column, _)| column == name);
        named.map(|(_, column)| cells::value(column, row)).find(|value| !value.is_null())
    }

    fn each(&self, row: usize, found: &mut dyn FnMut(&str, Value)) {
        for (at, (name, column)) in self.columns.iter().enumerate() {
            let counts = |(before, column): &(String, ArrayRef)| before == name && !cells::value(column, row).is_null();
            let value = cells::value(column, row);
            if !value.is_null() && !self.columns[..at].iter().any(counts) {
                found(name, value);
            }
        }
    }
}

/// A column of histories.
#[derive(Debug)]
pub(crate) struct Histories {
    rows: Arc<Elements>,
    elements: ArrayRef,
    /// The first element of each list, and behind them the end of the last.
    offsets: Vec<usize>,
}

impl Histories {
    /// The histories of a column of lists, whose elements have their time in `time`; `None` if it is of another type.
    pub(crate) fn of_column(lists: &ArrayRef, time: &str) -> Option<Self> {
        fn parts<O: OffsetSizeTrait>(lists: &dyn Array) -> Option<(ArrayRef, Vec<usize>)> {
            let lists = lists.as_list_opt::<O>()?;
            let offsets = lists.value_offsets().iter().map(|offset| offset.as_usize()).collect();
            Some((lists.values().clone(), offsets))
        }
        let (elements, offsets) = parts::<i32>(lists).or_else(|| parts::<i64>(lists))?;
        let columns = match elements.as_struct_opt() {
            Some(structs) => {
                let named = structs.fields().iter().map(|field| field.name().clone()).zip(structs.columns().to_vec());
                let (timed, others): (Vec<_>, Vec<_>) = named.partition(|(name, _)| name == time);
                // The configured one counts before one that happens to be called `timestamp`.
                timed.into_iter().map(|(_, column)| (TIMESTAMP.to_owned(), column)).chain(others).collect()
            }
            None => vec![("title".to_owned(), elements.clone())],
        };
        Some(Self { rows: Arc::new(Elements { columns }), elements, offsets })
    }

    /// The history of a row; a missing one is empty.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn of_row(&self, row: usize) -> Result<History, String> {
        let range = self.offsets[row]..self.offsets[row + 1];
        if range.clone().any(|element| self.elements.is_null(element)) {
            return Err("the element null".to_owned());
        }
        in_order(self.rows.clone(), range)
    }
}

/// The interactions of some rows, oldest first if all have a timestamp.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn in_order(rows: Arc<dyn Interactions>, range: Range<usize>) -> Result<History, String> {
    let order: Result<Vec<u32>, _> = range.map(u32::try_from).collect();
    let history = History::new(rows, order.map_err(|_| format!("more than {} interactions", u32::MAX))?);
    history.by_time().map_err(|value| format!("the timestamp {value}, which is neither a number nor ISO 8601"))
}
