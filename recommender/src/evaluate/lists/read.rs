//! What lists are judged on, and the lists, brought to the numbers of the catalogue's items.
//!
//! Ids are compared as text, since tables may keep them in different types.

use std::collections::HashSet;

use anyhow::{Context, Result, anyhow, bail, ensure};
use jiff::civil::Date;
use laser_schema::layout::DataSet;
use laser_schema::{Entity, EntityId, EntityTable, Kind, Progress};
use laser_store::catalogue::{Catalogue, CatalogueTable};
use laser_store::entities::EntityReader;
use laser_store::previous::{PreviousError, PreviousReader, PreviousSource};
use laser_store::user_items::{UserItems, UserItemsReader};

use super::ListsSource;
use crate::evaluate::knowledge::Places;

/// The items that lists are made of.
pub(super) struct Items(Places);

impl Items {
    pub(super) async fn read(table: &CatalogueTable) -> Result<Self> {
        let Catalogue { ids, .. } = Catalogue::read(table).await?;
        u32::try_from(ids.len()).context("more items than 32 bits count")?;
        Ok(Self(Places::new(&ids)))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn find(&self, id: &str) -> Option<u32> {
        self.0.find(id).and_then(|place| u32::try_from(place).ok())
    }

    /// The numbers of items that the catalogue must have.
    fn numbers(&self, ids: &[EntityId]) -> Result<Vec<u32>, String> {
        let number = |id: &EntityId| {
            self.find(&id.to_string())
                .ok_or_else(|| format!("item {id} is not in the catalogue; give [lists.catalogue] the table with it"))
        };
        ids.iter().map(number).collect()
    }
}

/// The users who took something later.
pub(super) struct Truth {
    users: Places,
    /// By user, at least one item.
    pub(super) items: Vec<Vec<u32>>,
}

impl Truth {
    /// Reads the table; users without items are left out.
    pub(super) async fn read(path: &str, items: &Items) -> Result<Self> {
        let (mut ids, mut all, mut known) = (Vec::new(), Vec::new(), HashSet::new());
        let mut reader = UserItemsReader::open(path).await?;
        while let Some(rows) = reader.next_batch().await? {
            for UserItems { row, user, items: later } in rows {
                let numbers = items.numbers(&later).map_err(|reason| reader.error(row, reason))?;
                if !known.insert(user.to_string()) {
                    bail!(reader.error(row, format!("user {user} is there twice; put all items in one row")));
                }
                if !numbers.is_empty() {
                    ids.push(user);
                    all.push(numbers);
                }
            }
        }
        ensure!(!ids.is_empty(), "{path}: no user has a true item; hold out some interactions");
        Ok(Self { users: Places::new(&ids), items: all })
    }

    pub(super) fn users(&self) -> usize {
        self.items.len()
    }
}

/// What users had before.
#[derive(Default)]
pub(super) struct Histories {
    /// Of every user of the input who has an item of the catalogue.
    pub(super) all: Vec<Vec<u32>>,
    /// By user with a truth; empty where nothing is known.
    pub(super) judged: Vec<Vec<u32>>,
}

impl Histories {
    pub(super) async fn read(
        source: &ListsSource<'_>,
        items: &Items,
        truth: &Truth,
        progress: &mut dyn Progress,
    ) -> Result<Self> {
        let mut histories = Self { all: Vec::new(), judged: vec![Vec::new(); truth.users()] };
        // The fields of the first interaction, as long as none has named its item.
        let (mut fields, mut is_named) = (None, false);
        for table in source.input {
            let mut reader = EntityReader::open(table).await?;
            while let Some(users) = reader.next_batch().await? {
                for user in users {
                    let mut interactions = user.history.iter();
                    is_named = is_named || interactions.clone().any(|one| one.field(source.item).is_some());
                    fields = fields.or_else(|| interactions.next().map(|one| one.fields()));
                    histories.add(table, &user, known(&user, source.item, items), truth)?;
                }
                progress.update(histories.all.len() as u64, None, "users");
            }
        }
        if let Some(fields) = fields.filter(|_| !is_named) {
            let available: Vec<&str> = fields.keys().map(String::as_str).collect();
            let available = available.join(", ");
            bail!("[lists] item = {:?}: no interaction has that field; there is {available}", source.item);
        }
        ensure!(
            !histories.all.is_empty(),
            "[[input]]: no user has an item of the catalogue in its history; baselines have nothing to count"
        );
        Ok(histories)
    }

    fn add(&mut self, table: &EntityTable, user: &Entity, history: Vec<u32>, truth: &Truth) -> Result<()> {
        let Entity { id, kind, .. } = user;
        ensure!(*kind == Kind::User, "{}: {kind} {id} is no user, and lists are made for users", table.path);
        if let Some(judged) = truth.users.find(&id.to_string()).and_then(|place| self.judged.get_mut(place)) {
            ensure!(judged.is_empty(), "{}: user {id} is there twice; put all of its history in one row", table.path);
            judged.clone_from(&history);
        }
        self.all.extend(Some(history).filter(|history| !history.is_empty()));
        Ok(())
    }
}

/// The items of a user's history that the catalogue has, oldest first.
fn known(user: &Entity, field: &str, items: &Items) -> Vec<u32> {
    user.history.items(field).filter_map(|item| items.find(&item)).collect()
}

/// The lists of one seed of a maker.
pub(super) struct Lists {
    /// By user with a truth, the best item first; empty where the maker has none.
    pub(super) lists: Vec<Vec<u32>>,
    /// Lists of other users, which are passed over.
    pub(super) others: usize,
}

impl Lists {
    /// Reads published lists, or a table.
    pub(super) async fn read(path: &str, items: &Items, truth: &Truth) -> Result<Self> {
        let mut lists = Self { lists: vec![Vec::new(); truth.users()], others: 0 };
        if is_table(path) {
            let mut reader = UserItemsReader::open(path).await?;
            while let Some(rows) = reader.next_batch().await? {
                for UserItems { row, user, items: listed } in rows {
                    let added = lists.add(&user, &listed, items, truth);
                    added.map_err(|reason| reader.error(row, reason))?;
                }
            }
            return Ok(lists);
        }
        let source = PreviousSource { path: path.to_owned(), kind: Some(Kind::User), id_type: None };
        let opened = PreviousReader::open(&[source], DataSet::Recommendations, Date::MAX).await;
        let mut reader = opened.map_err(|error| match error {
            PreviousError::Nothing { path, data_set } => anyhow!(
                "{path}: no complete night of lists (no _SUCCESS below {data_set}/); give the output of a night with \
                 [lists], one published folder of it, or a table with id and items"
            ),
            PreviousError::DataSet { path, found, expected } => anyhow!("{path}: holds {found}, expected {expected}"),
            error => error.into(),
        })?;
        while let Some(rows) = reader.next_batch().await? {
            for record in rows.into_iter().filter_map(|row| row.record) {
                let added = lists.add(&record.entity_id, &record.items, items, truth);
                added.map_err(anyhow::Error::msg).with_context(|| path.to_owned())?;
            }
        }
        Ok(lists)
    }

    fn add(&mut self, user: &EntityId, listed: &[EntityId], items: &Items, truth: &Truth) -> Result<(), String> {
        let Some(list) = truth.users.find(&user.to_string()).and_then(|place| self.lists.get_mut(place)) else {
            self.others += 1;
            return Ok(());
        };
        let numbers = items.numbers(listed).map_err(|reason| format!("the list of user {user}: {reason}"))?;
        let mut found = HashSet::new();
        if let Some((_, id)) = numbers.iter().zip(listed).find(|(number, _)| !found.insert(**number)) {
            return Err(format!("the list of user {user} has item {id} twice; a hit would count twice"));
        }
        if !list.is_empty() {
            return Err(format!("user {user} has two lists; give one list per user"));
        }
        *list = numbers;
        Ok(())
    }

    /// How many users with a truth have no list.
    pub(super) fn missing(&self) -> usize {
        self.lists.iter().filter(|list| list.is_empty()).count()
    }

    /// How many listed items are in their users' histories.
    pub(super) fn in_histories(&self, histories: &Histories) -> usize {
        both(&self.lists, &histories.judged)
    }

    /// The length of the longest list.
    pub(super) fn longest(&self) -> usize {
        self.lists.iter().map(Vec::len).max().unwrap_or_default()
    }
}

/// How many items of each of the first are in that of the second.
pub(super) fn both(first: &[Vec<u32>], second: &[Vec<u32>]) -> usize {
    let of_user = |(items, others): (&Vec<u32>, &Vec<u32>)| items.iter().filter(|item| others.contains(item)).count();
    first.iter().zip(second).map(of_user).sum()
}

/// Whether a path is that of a table, and not of an output.
fn is_table(path: &str) -> bool {
    [".parquet", ".csv", ".jsonl", ".ndjson"].iter().any(|extension| path.ends_with(extension))
}
