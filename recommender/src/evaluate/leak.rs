//! Whether knowledge can know what it is tested on: the histories it was written from must end before training does.

use anyhow::{Result, bail, ensure};
use jiff::Timestamp;
use laser_schema::interactions::SplitBy;
use laser_schema::{Entity, EntityTable, Kind};
use laser_store::EntityReader;

use super::knowledge::Places;

/// Where training ends.
pub(super) struct Ends<'a> {
    pub(super) by: SplitBy,
    /// By user.
    pub(super) of_users: Vec<f64>,
    /// The places of the users.
    pub(super) users: &'a Places,
}

impl Ends<'_> {
    /// The instant that this entity's history must be before; none for a user who has no interactions to test on.
    fn of(&self, entity: &Entity) -> Option<f64> {
        let earliest = || self.of_users.iter().copied().min_by(f64::total_cmp);
        match (self.by, entity.kind) {
            // An item's history is of many users.
            (SplitBy::Time, _) | (_, Kind::Item) => earliest(),
            (SplitBy::User, Kind::User) => {
                let place = self.users.find(&entity.id.to_string())?;
                Some(self.of_users[place])
            }
        }
    }
}

/// Reads the tables that the texts called `name` were written from. Without ends no interaction may be in them: a split
/// by item holds out interactions of all users, whenever they were.
///
/// # Errors
/// The first row whose history is not known to end before training does.
pub(super) async fn check(name: &str, tables: &[EntityTable], ends: Option<&Ends<'_>>) -> Result<()> {
    for table in tables {
        let mut reader = EntityReader::open(table).await?;
        let mut row = 0;
        while let Some(entities) = reader.next_batch().await? {
            for entity in entities {
                row += 1;
                match ends {
                    Some(ends) => check_row(name, &table.path, row, &entity, ends)?,
                    None => ensure!(
                        entity.history.is_empty(),
                        "{}, row {row}: {kind} {id} has a history, but split_by = \"item\" takes texts that were \
                         written from no interaction: {name:?} may know what it is tested on",
                        table.path,
                        kind = entity.kind,
                        id = entity.id
                    ),
                }
            }
        }
    }
    Ok(())
}

fn check_row(name: &str, file: &str, row: u64, entity: &Entity, ends: &Ends<'_>) -> Result<()> {
    let Some(end) = ends.of(entity) else {
        return Ok(());
    };
    let Entity { kind, id, .. } = entity;
    for seen in entity.history.iter() {
        let Some(time) = seen.timestamp() else {
            bail!(
                "{file}, row {row}: an interaction in the history of {kind} {id} has no timestamp, so {name:?} cannot \
                 be shown to know only what is before [eval] train_until; give timestamps, or leave such interactions \
                 out"
            );
        };
        if time >= end {
            bail!(
                "{file}, row {row}: the history of {kind} {id} has an interaction at {}, but training ends at {}: \
                 {name:?} knows what it is tested on. End histories there (`laser prepare movielens --until`), write \
                 the texts anew, and set entities to that table; or set a later [eval] train_until",
                instant(time),
                instant(end)
            );
        }
    }
    Ok(())
}

/// A timestamp as a number, and as a date if it may be one in seconds.
pub fn instant(time: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "told to the second, and checked by the library")]
    let date = Timestamp::from_second(time as i64).ok();
    // Earlier and later than that the unit is another one.
    match date.filter(|_| (1e8..1e10).contains(&time)) {
        Some(date) => format!("{time} ({date})"),
        None => time.to_string(),
    }
}
