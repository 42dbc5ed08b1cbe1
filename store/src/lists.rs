//! What the columns of lists do not say by their types: as many scores as items, falling scores, no item twice; and
//! parts that have a row for each item.

use std::fmt::Display;

use arrow::array::{ArrayRef, AsArray};
use arrow::datatypes::{Float64Type, Int64Type};
use laser_schema::EntityId;
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::lists::ListRows;
use serde::{Deserialize, Serialize};

use crate::sealed::{SealedTable, entity_ids};
use crate::table::TableError;

/// An item of a list, as a row of its own.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ItemRow {
    /// The place in the list, from 1.
    rank: i64,
    item_id: EntityId,
    score: f64,
    /// Without its list.
    #[serde(flatten)]
    record: KnowledgeRecord,
}

/// The rows of lists: one for each item, the best of a list first.
pub(crate) fn by_item(records: &[KnowledgeRecord]) -> Vec<ItemRow> {
    let of_record = |record: &KnowledgeRecord| {
        let listed: Vec<(EntityId, f64)> = record.items.iter().cloned().zip(record.scores.iter().copied()).collect();
        let record = KnowledgeRecord { items: Vec::new(), scores: Vec::new(), ..record.clone() };
        (1..).zip(listed).map(move |(rank, (item_id, score))| ItemRow { rank, item_id, score, record: record.clone() })
    };
    records.iter().flat_map(of_record).collect()
}

/// The lists of rows, each with the first row's record.
pub(crate) fn by_user(rows: Vec<ItemRow>) -> Vec<KnowledgeRecord> {
    let mut records: Vec<KnowledgeRecord> = Vec::new();
    for ItemRow { item_id, score, record, .. } in rows {
        if records.last().is_none_or(|last| last.entity_id != record.entity_id) {
            records.push(record);
        }
        if let Some(last) = records.last_mut() {
            last.items.push(item_id);
            last.scores.push(score);
        }
    }
    records
}

/// What is wrong with the lists of a part that has their columns: a line for each entity at fault. `ids` are those of
/// its entities.
pub(crate) fn faults(table: &SealedTable, rows: ListRows, ids: &[EntityId]) -> Result<Vec<String>, TableError> {
    match rows {
        ListRows::User => faults_of_users(table, ids),
        ListRows::Item => faults_of_items(table),
    }
}

fn faults_of_users(table: &SealedTable, ids: &[EntityId]) -> Result<Vec<String>, TableError> {
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

fn faults_of_items(table: &SealedTable) -> Result<Vec<String>, TableError> {
    let mut rows = Vec::new();
    for batch in table.batches(&["entity_id", "rank", "item_id", "score"])? {
        let batch = batch?;
        let ids = [0, 2].map(|column| entity_ids(batch.column(column)).unwrap_or_default());
        let ranks = batch.column(1).as_primitive::<Int64Type>().values();
        let scores = batch.column(3).as_primitive::<Float64Type>().values();
        let [users, items] = ids;
        let of_row = users.into_iter().zip(ranks).zip(items.into_iter().zip(scores));
        rows.extend(of_row.map(|((user, &rank), (item, &score))| (user, rank, item, score)));
    }
    let mut faults = Vec::new();
    for list in rows.chunk_by(|one, next| one.0 == next.0) {
        let wrong = (1..).zip(list).find(|(expected, row)| row.1 != *expected);
        let reason = match wrong {
            Some((expected, row)) => Some(format!("rank {}, expected {expected}", row.1)),
            None => fault(list.iter().map(|row| &row.2).collect(), &list.iter().map(|row| row.3).collect::<Vec<_>>()),
        };
        faults.extend(reason.map(|reason| format!("entity {}: {reason}", list[0].0)));
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
