//! A few of the published lists, as a page shows them.

use std::collections::HashMap;

use laser_schema::knowledge::KnowledgeRecord;
use serde::Serialize;

/// Items of a list that are shown.
const ITEMS_SHOWN: usize = 10;

/// A user's list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ListSample {
    id: String,
    /// The best ones.
    items: Vec<ListedItem>,
    /// How many there are in all.
    length: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ListedItem {
    /// From 1.
    rank: usize,
    id: String,
    title: Option<String>,
    score: f64,
}

impl ListSample {
    /// The list of a row, if the row has one.
    pub(crate) fn of(row: &KnowledgeRecord) -> Option<Self> {
        let shown = row.items.iter().zip(&row.scores).take(ITEMS_SHOWN).zip(1..);
        let items: Vec<ListedItem> =
            shown.map(|((id, &score), rank)| ListedItem { rank, id: id.to_string(), title: None, score }).collect();
        (!items.is_empty()).then(|| Self { id: row.entity_id.to_string(), items, length: row.items.len() })
    }

    /// The ids of the items that are shown.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &String> {
        self.items.iter().map(|item| &item.id)
    }

    /// Gives the items their titles, by id.
    pub(crate) fn name(&mut self, titles: &HashMap<String, String>) {
        self.items.iter_mut().for_each(|item| item.title = titles.get(&item.id).cloned());
    }
}
