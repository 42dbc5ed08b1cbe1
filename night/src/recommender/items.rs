//! Items by number, and what users did with them.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use laser_schema::{EntityId, Kind, Progress};
use laser_store::catalogue;
use laser_store::entities::EntityReader;
use laser_store::sequences::{Sequence, SequenceReader};
use laser_train::{Catalogue, CodeVocabulary, History};

use crate::config::Config;

/// What is learned from and what is measured on.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sets {
    pub(super) learned: Vec<History>,
    pub(super) measured: Vec<History>,
}

impl Sets {
    /// Adds a user's items, oldest first: the first `learned` are learned, the others measured on.
    fn add(&mut self, items: Vec<u32>, learned: usize) {
        if learned == 0 {
            return;
        }
        self.learned.push(History { items: items[..learned].to_vec(), counts_from: 0 });
        if learned < items.len() {
            self.measured.push(History { items, counts_from: learned });
        }
    }

    /// Items to learn from.
    pub(super) fn count(&self) -> usize {
        self.learned.iter().map(|history| history.items.len() - history.counts_from).sum()
    }
}

/// The items of the catalogue by id, and their codes as tokens.
pub(super) struct Items {
    pub(super) catalogue: Catalogue,
    /// By the item's id as text, since histories may keep ids in another type.
    numbers: HashMap<String, u32>,
}

impl Items {
    /// Numbers the items of a table in its order.
    pub(super) fn new(table: &catalogue::Catalogue) -> Result<Self> {
        let vocabulary = CodeVocabulary::new(table.codes.clone()).context("[lists.catalogue] identifier")?;
        let levels = table.levels().max(1);
        let token = |(level, code): (usize, &u16)| -> Result<u32> {
            Ok(u32::try_from(vocabulary.level(level).start)? + u32::from(*code))
        };
        let identifiers = table.identifiers.chunks_exact(levels);
        let identifiers: Vec<Vec<u32>> =
            identifiers.map(|codes| codes.iter().enumerate().map(token).collect()).collect::<Result<_>>()?;
        let numbers = table.ids.iter().map(EntityId::to_string).zip(0..).collect();
        Ok(Self { catalogue: Catalogue::new(vocabulary, identifiers)?, numbers })
    }

    /// What `[recommender]` says to learn from; items that the catalogue lacks are left out.
    ///
    /// # Errors
    /// Naming the table or the row; if nothing is left to learn from, or to measure on.
    pub(super) async fn sets(&self, config: &Config, progress: &mut dyn Progress) -> Result<Sets> {
        match &config.recommender.sequences {
            Some(path) => self.sequences(path, progress).await.context("[recommender] sequences"),
            None => self.histories(config, progress).await,
        }
    }

    /// A table's own division.
    async fn sequences(&self, path: &str, progress: &mut dyn Progress) -> Result<Sets> {
        let (mut sets, mut reader) = (Sets::default(), SequenceReader::open(path).await?);
        while let Some(sequences) = reader.next_batch().await? {
            for Sequence { items, held_out } in sequences {
                let known = |items: Vec<EntityId>| self.known(items.into_iter().map(|id| id.to_string()));
                let mut items = known(items);
                let learned = items.len();
                items.extend(known(held_out));
                sets.add(items, learned);
            }
            progress.update(sets.learned.len() as u64, None, "users");
        }
        let (learned, measured) = (sets.learned.len(), sets.measured.len());
        ensure!(
            learned > 0 && measured > 0,
            "{path}: {learned} users with items of the catalogue, {measured} of them with some held out; expected at \
             least one of each"
        );
        Ok(sets)
    }

    /// The histories of the input, the latest items of which are held out.
    async fn histories(&self, config: &Config, progress: &mut dyn Progress) -> Result<Sets> {
        let held_out = config.recommender.held_out;
        let field = config.lists.as_ref().map_or("item", |lists| &lists.item);
        let mut sets = Sets::default();
        for table in &config.input {
            let mut reader = EntityReader::open(table).await?;
            while let Some(users) = reader.next_batch().await? {
                for user in users {
                    ensure!(
                        user.kind == Kind::User,
                        "{}: {} {} is no user, and only users have histories to learn from",
                        table.path,
                        user.kind,
                        user.id
                    );
                    let items = self.known(user.history.items(field));
                    let learned = items.len().saturating_sub(held_out);
                    sets.add(items, learned);
                }
                progress.update(sets.learned.len() as u64, None, "users");
            }
        }
        ensure!(
            !sets.learned.is_empty(),
            "[[input]]: no user has more than {held_out} items of the catalogue in its history; nothing is left to \
             learn from"
        );
        Ok(sets)
    }

    /// The numbers of those that the catalogue has.
    fn known(&self, ids: impl Iterator<Item = String>) -> Vec<u32> {
        ids.filter_map(|id| self.numbers.get(&id).copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_items_are_measured_on_and_not_learnt_from() {
        let mut sets = Sets::default();
        for (items, learned) in [(vec![1, 2, 3], 2), (vec![7], 0), (vec![4, 5], 1), (vec![6], 1)] {
            sets.add(items, learned);
        }
        let history = |items: &[u32], counts_from| History { items: items.to_vec(), counts_from };
        assert_eq!(sets.learned, [history(&[1, 2], 0), history(&[4], 0), history(&[6], 0)]);
        assert_eq!(sets.measured, [history(&[1, 2, 3], 2), history(&[4, 5], 1)]);
        assert_eq!(sets.count(), 4);
    }
}
