//! The workload of the paper (4.1): entities as they were and as they are now.
//!
//! A user's history of n interactions is cut at m, drawn from (n/2, n): the first m are the old state, the rest is the
//! new one, and none is in both. Interactions without a timestamp are left out where others have one. The items are cut
//! into two halves: the old half's texts are old knowledge, the new half is measured. What is drawn depends on the seed
//! and the id alone, not on the order of the table nor on how many entities are asked for.
//!
//! Memory: the entities that are kept, and as many again while the table is read.

use anyhow::{Result, ensure};
use laser_schema::{Columns, Digest, Entity, EntityId, EntityTable, Kind};
use laser_store::EntityReader;

/// Which entities are drawn, and how many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draw {
    /// Entities whose old state gets a text.
    pub(super) old: usize,
    /// Entities whose new state gets one.
    pub(super) new: usize,
    /// A user needs this many interactions to be drawn.
    pub(super) min_history: usize,
    pub(super) seed: u64,
}

/// Entities of one kind.
#[derive(Debug, Default)]
pub(super) struct Workload {
    /// As they were: their texts fill the pools.
    pub(super) old: Vec<Entity>,
    /// As they are: their texts are measured.
    pub(super) new: Vec<Entity>,
}

/// The contract's table at `path`.
pub(super) fn table(path: &str, kind: Kind) -> EntityTable {
    EntityTable { path: path.to_owned(), kind: Some(kind), columns: Columns::default() }
}

impl Workload {
    /// Draws from the table. Measured users are among those with an old text as far as these reach, as in
    /// the paper; measured items never are.
    pub(super) async fn read(table: &EntityTable, kind: Kind, draw: Draw) -> Result<Self> {
        let workload = match kind {
            Kind::User => Self::users(table, draw).await?,
            Kind::Item => Self::items(table, draw).await?,
        };
        ensure!(
            !workload.new.is_empty() && !workload.old.is_empty(),
            "{}: nothing to measure: no {kind}s with what it takes (users need {} interactions, items must be two)",
            table.path,
            draw.min_history.max(3),
        );
        Ok(workload)
    }

    async fn users(table: &EntityTable, draw: Draw) -> Result<Self> {
        let mut kept = Lowest::new(draw.old.max(draw.new));
        let mut reader = EntityReader::open(table).await?;
        while let Some(batch) = reader.next_batch().await? {
            for mut user in batch {
                keep_timed(&mut user);
                if user.kind == Kind::User && user.history.len() >= draw.min_history.max(3) {
                    kept.offer(hash(draw.seed, "entity", &user.id), user);
                }
            }
        }
        let mut workload = Self::default();
        for (place, user) in kept.finish().enumerate() {
            let (old, new) = split_history(user, draw.seed);
            if place < draw.old {
                workload.old.push(old);
            }
            if place < draw.new {
                workload.new.push(new);
            }
        }
        Ok(workload)
    }

    async fn items(table: &EntityTable, draw: Draw) -> Result<Self> {
        let (mut old, mut new) = (Lowest::new(draw.old), Lowest::new(draw.new));
        let mut reader = EntityReader::open(table).await?;
        while let Some(batch) = reader.next_batch().await? {
            for item in batch.into_iter().filter(|item| item.kind == Kind::Item) {
                let is_old = hash(draw.seed, "half", &item.id).is_multiple_of(2);
                let half = if is_old { &mut old } else { &mut new };
                half.offer(hash(draw.seed, "entity", &item.id), item);
            }
        }
        Ok(Self { old: old.finish().collect(), new: new.finish().collect() })
    }
}

/// The entities of the lowest hashes.
struct Lowest {
    limit: usize,
    kept: Vec<(u64, Entity)>,
}

impl Lowest {
    fn new(limit: usize) -> Self {
        Self { limit, kept: Vec::new() }
    }

    fn offer(&mut self, hash: u64, entity: Entity) {
        self.kept.push((hash, entity));
        if self.kept.len() > 2 * self.limit {
            self.shrink();
        }
    }

    fn shrink(&mut self) {
        self.kept.sort_by_key(|(hash, _)| *hash);
        self.kept.truncate(self.limit);
    }

    fn finish(mut self) -> impl Iterator<Item = Entity> {
        self.shrink();
        self.kept.into_iter().map(|(_, entity)| entity)
    }
}

/// Leaves out interactions whose place in time is not known, where those of others are, and puts the rest in order: the
/// reader leaves a history as it is if one interaction has no timestamp.
fn keep_timed(user: &mut Entity) {
    let timed = user.history.filter(|interaction| interaction.timestamp().is_some());
    if !timed.is_empty() {
        // Those without have been left out, and the reader takes no other timestamp that cannot be read.
        user.history = timed.by_time().unwrap_or_default();
    }
}

/// The user before and after the cut. The router sees as many interactions as there were.
fn split_history(mut user: Entity, seed: u64) -> (Entity, Entity) {
    let m = cut(user.history.len(), hash(seed, "cut", &user.id));
    let (before, history) = user.history.split_at(m);
    let new = Entity { history, ..user.clone() };
    user.history = before;
    user.interactions = m as u64;
    (user, new)
}

/// m, uniform in (n/2, n), for n of 3 or more.
fn cut(n: usize, hash: u64) -> usize {
    let choices = (n - 1 - n / 2) as u64;
    n / 2 + 1 + usize::try_from(hash % choices).unwrap_or(0)
}

/// A number from the seed, what it is for, and the id.
pub(super) fn hash(seed: u64, purpose: &str, id: &EntityId) -> u64 {
    let id = id.to_string();
    let digest = Digest::of_parts([&seed.to_le_bytes(), purpose.as_bytes(), id.as_bytes()]);
    u64::from_str_radix(&digest.as_str()[..16], 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    const DRAW: Draw = Draw { old: 6, new: 4, min_history: 3, seed: 7 };

    /// User i has 2 + i films, named by their place.
    fn write(dir: &tempfile::TempDir, kind: Kind, rows: i64) -> EntityTable {
        let row = |id: i64| {
            let films: Vec<_> = (0..2 + id).map(|film| json!({"film": film})).collect();
            format!("{}\n", json!({"id": id, "history": films}))
        };
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, (0..rows).map(row).collect::<String>()).unwrap();
        table(path.to_str().unwrap(), kind)
    }

    fn ids(entities: &[Entity]) -> Vec<String> {
        entities.iter().map(|entity| entity.id.to_string()).collect()
    }

    #[test]
    fn the_cut_takes_every_value_above_half_and_below_the_length() {
        for n in 3..40 {
            let drawn: BTreeSet<usize> = (0..2000).map(|hash| cut(n, hash)).collect();
            assert_eq!(drawn, (n / 2 + 1..n).collect(), "n = {n}");
        }
    }

    #[tokio::test]
    async fn only_interactions_with_a_timestamp_are_split_where_some_have_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let film = |film: i64| match film % 2 {
            0 => json!({"film": film, "timestamp": 900_000_000 - film}),
            _ => json!({"film": film}),
        };
        let row = json!({"id": 1, "history": (0..12).map(film).collect::<Vec<_>>()});
        let other = json!({"id": 2, "history": (0..12).map(|film| json!({"film": film})).collect::<Vec<_>>()});
        std::fs::write(&path, format!("{row}\n{other}\n")).unwrap();
        let users = table(path.to_str().unwrap(), Kind::User);
        let workload = Workload::read(&users, Kind::User, DRAW).await.unwrap();
        for (old, new) in workload.old.iter().zip(&workload.new) {
            let films = old.history.iter().chain(new.history.iter());
            let films: Vec<i64> = films.map(|i| i.field("film").unwrap().as_i64().unwrap()).collect();
            match old.id.to_string().as_str() {
                "1" => assert_eq!(films, [10, 8, 6, 4, 2, 0]),
                _ => assert_eq!(films, (0..12).collect::<Vec<_>>()),
            }
        }
    }

    #[tokio::test]
    async fn a_users_states_share_no_interaction_and_miss_none() {
        let dir = tempfile::tempdir().unwrap();
        let users = write(&dir, Kind::User, 30);
        let workload = Workload::read(&users, Kind::User, DRAW).await.unwrap();
        assert_eq!((workload.old.len(), workload.new.len()), (6, 4));
        assert_eq!(ids(&workload.old)[..4], ids(&workload.new));
        for (old, new) in workload.old.iter().zip(&workload.new) {
            let films = old.history.iter().chain(new.history.iter());
            let films: Vec<i64> = films.map(|i| i.field("film").unwrap().as_i64().unwrap()).collect();
            let n = films.len();
            assert_eq!(films, (0..n as i64).collect::<Vec<_>>());
            assert!(2 * old.history.len() > n && old.history.len() < n);
            assert_eq!((old.interactions, new.interactions), (old.history.len() as u64, n as u64));
        }
    }

    #[tokio::test]
    async fn the_draw_depends_on_the_seed_alone() {
        let dir = tempfile::tempdir().unwrap();
        let users = write(&dir, Kind::User, 30);
        let drawn = async |draw| Workload::read(&users, Kind::User, draw).await.unwrap();
        let first = drawn(DRAW).await;
        assert_eq!(first.old, drawn(DRAW).await.old);
        let fewer = drawn(Draw { old: 3, ..DRAW }).await;
        assert_eq!(first.old[..3], fewer.old);
        let other = drawn(Draw { seed: 8, ..DRAW }).await;
        assert_ne!(ids(&first.old), ids(&other.old));
    }

    #[tokio::test]
    async fn items_are_old_or_new_but_not_both() {
        let dir = tempfile::tempdir().unwrap();
        let items = write(&dir, Kind::Item, 40);
        let draw = Draw { old: 100, new: 100, ..DRAW };
        let workload = Workload::read(&items, Kind::Item, draw).await.unwrap();
        let (old, new) = (ids(&workload.old), ids(&workload.new));
        assert!(old.len() > 8 && new.len() > 8, "{} old, {} new", old.len(), new.len());
        let all: BTreeSet<&String> = old.iter().chain(&new).collect();
        assert_eq!((all.len(), old.len() + new.len()), (40, 40));
    }

    #[tokio::test]
    async fn users_without_enough_history_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let users = write(&dir, Kind::User, 10);
        let draw = Draw { min_history: 50, ..DRAW };
        let error = Workload::read(&users, Kind::User, draw).await.unwrap_err().to_string();
        assert!(error.contains("t.jsonl") && error.contains("50 interactions"), "{error}");
    }
}
