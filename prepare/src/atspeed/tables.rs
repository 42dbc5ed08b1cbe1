//! The tables of items, users, sequences and truth.

use arrow::datatypes::{DataType, Field};
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use serde::Serialize;

use super::{AtSpeed, Item};
use crate::Result;
use crate::table::{Written, history, int64, int64s, text, texts, write, write_entities};

#[derive(Serialize)]
struct UserColumns<'a> {
    history: Vec<Seen<'a>>,
}

#[derive(Serialize)]
struct Seen<'a> {
    item: u32,
    title: Option<&'a str>,
}

#[derive(Serialize)]
struct Trained<'a> {
    id: i64,
    items: &'a [u32],
    held_out: &'a [u32],
}

#[derive(Serialize)]
struct Interaction {
    user: i64,
    item: u32,
}

#[derive(Serialize)]
struct Truth<'a> {
    id: i64,
    items: &'a [u32],
}

impl AtSpeed {
    /// Every item; interactions are those of the first `parts`.
    pub(super) async fn write_items(&self, location: &Location, parts: usize) -> Result<Written> {
        let columns = vec![texts("identifier"), text("title"), text("brand"), texts("categories")];
        let mut counts = vec![0; self.items.len()];
        for item in self.users.values().flat_map(|user| user.first(parts)) {
            counts[position(item)] += 1;
        }
        let rows = (1i64..).zip(&self.items).zip(counts).map(|((id, item), count)| (id, item, count));
        write_entities(location, (Kind::Item, IdType::Int64), columns, rows).await
    }

    /// The users who have an item in the first `parts`.
    pub(super) async fn write_users(&self, location: &Location, parts: usize) -> Result<Written> {
        let columns = vec![history(vec![int64("item"), text("title")])];
        let rows = self.users.iter().filter_map(|(id, user)| {
            let history: Vec<Seen<'_>> = user.first(parts).map(|item| self.seen(item)).collect();
            let length = history.len() as u64;
            (length > 0).then_some((id, UserColumns { history }, length))
        });
        write_entities(location, (Kind::User, IdType::Int64), columns, rows).await
    }

    /// One row per item of the first `parts`, by user and oldest first.
    pub(super) async fn write_interactions(&self, location: &Location, parts: usize) -> Result<Written> {
        let columns = ["user", "item"].map(|name| Field::new(name, DataType::Int64, false)).to_vec();
        let rows = self
            .users
            .iter()
            .flat_map(|(&user, of_user)| of_user.first(parts).map(move |item| Interaction { user, item }));
        write(location, columns, rows).await
    }

    /// The users who have something to train on.
    pub(super) async fn write_sequences(&self, location: &Location) -> Result<Written> {
        let users = self.users.iter();
        let rows = users.map(|(&id, user)| Trained { id, items: user.part(0), held_out: user.part(1) });
        let rows = rows.filter(|row| !row.items.is_empty());
        write(location, vec![id(), int64s("items"), int64s("held_out")], rows).await
    }

    /// What comes behind the first `parts`, of users who have something before and behind.
    pub(super) async fn write_truth(&self, location: &Location, parts: usize) -> Result<Written> {
        let known = self.users.iter().filter(|(_, user)| user.first(parts).next().is_some());
        let rows = known.map(|(&id, user)| Truth { id, items: user.part(parts) }).filter(|row| !row.items.is_empty());
        write(location, vec![id(), int64s("items")], rows).await
    }

    fn seen(&self, item: u32) -> Seen<'_> {
        let Item { title, .. } = &self.items[position(item)];
        Seen { item, title: title.as_deref() }
    }
}

/// Where an item is in the list.
fn position(item: u32) -> usize {
    item as usize - 1
}

fn id() -> Field {
    Field::new("id", DataType::Int64, false)
}
