//! What the columns of lists do not say by their types: as many scores as items, falling scores, no item twice.

use std::fmt::Display;

use arrow::array::{ArrayRef, AsArray};
use arrow::datatypes::{Float64Type, Int64Type};
use laser_schema::EntityId;
use laser_schema::knowledge::KnowledgeRecord;

use crate::sealed::SealedTable;
use crate::table::TableError;

/// What is wrong with the lists of a part that has their columns: a line for each entity at fault. `ids` are those of
/// its rows.
pub(crate) fn faults(table: &SealedTable, ids: &[EntityId]) -> Result<Vec<String>, TableError> {
    let (mut faults, mut ids) = (Vec::new(), ids.iter());
    for batch in table.batches(&["items", "scores"])? {
        let batch = batch?;
        let [items, scores] = [0, 1].map(|column| batch.column(column).as_list::<i32>());
        for (row, id) in (0..batch.num_rows()).zip(&mut ids) {
            let reason = fault_in(&items.value(row), &scores.value(row));
            faults.extend(reason.map(|reason| format!("entity {id}: {reason}")));
        }
    }
    Ok(faults)
}

/// What is wrong with the list of a record.
pub(crate) fn fault_of(record: &KnowledgeRecord) -> Option<String> {
    let reason = fault(record.items.iter().collect(), &record.scores)?;
    Some(format!("entity {}: {reason}", record.entity_id))
}

fn fault_in(items: &ArrayRef, scores: &ArrayRef) -> Option<String> {
    let scores = scores.as_primitive::<Float64Type>().values();
    match items.as_primitive_opt::<Int64Type>() {
        Some(items) => fault(items.values().to_vec(), scores),
        None => fault(items.as_string::<i32>().iter().flatten().collect(), scores),
    }
}

/// What is wrong with a list of items, best first, and their scores.
fn fault<T: Ord + Display>(mut items: Vec<T>, scores: &[f64]) -> Option<String> {
    if items.is_empty() {
        return Some("an empty list; an entity that nothing can be listed for is an error row".to_owned());
    }
    if items.len() != scores.len() {
        return Some(format!("{} items and {} scores", items.len(), scores.len()));
    }
    if let Some(score) = scores.iter().find(|score| !score.is_finite()) {
        return Some(format!("the score {score}, expected a finite number"));
    }
    if let Some(pair) = scores.windows(2).find(|pair| pair[0] < pair[1]) {
        return Some(format!("the score {} before the greater {}, expected the best item first", pair[0], pair[1]));
    }
    items.sort_unstable();
    let twice = items.windows(2).find(|pair| pair[0] == pair[1])?;
    Some(format!("item {} is listed twice", twice[0]))
}

#[cfg(test)]
mod tests;
