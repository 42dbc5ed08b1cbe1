//! Churn: how many entities' ids differ from those of the night before.
//!
//! Up to [`ENTITIES_MAX`] entities of the night before are compared; if there are more, a seeded sample, so that memory
//! is bounded. The share over 100,000 entities is known to 0.2 % (95 % confidence), which is much finer than the
//! conclusions drawn from it.

use laser_schema::EntityId;
use laser_schema::ids::Churn;
use laser_schema::sample::{Sample, priority};

/// About 15 MB.
const ENTITIES_MAX: usize = 100_000;

/// Counts entities whose ids changed: it takes the ids of the night before, then tonight's.
#[derive(Debug)]
pub struct ChurnCounter {
    previous: String,
    before: Sample<Vec<i64>>,
    common: u64,
    changed: u64,
    changed_by_place: Vec<u64>,
}

impl ChurnCounter {
    /// Compares with the night in the folder `previous`, with `places` ids per entity.
    pub fn new(previous: String, places: usize) -> Self {
        Self { previous, before: Sample::new(ENTITIES_MAX), common: 0, changed: 0, changed_by_place: vec![0; places] }
    }

    /// Takes an entity's ids of the night before.
    pub fn remember(&mut self, id: &EntityId, ids: Vec<i64>) {
        self.before.offer(identity(id), || ids);
    }

    /// Compares an entity's ids of tonight.
    pub fn compare(&mut self, id: &EntityId, ids: &[i64]) {
        let Some(before) = self.before.get(identity(id)) else {
            return;
        };
        self.common += 1;
        self.changed += u64::from(before != ids);
        let places = self.changed_by_place.iter_mut();
        for ((changed, before), now) in places.zip(before).zip(ids) {
            *changed += u64::from(before != now);
        }
    }

    /// Returns the result.
    pub fn finish(self) -> Churn {
        Churn {
            previous: self.previous,
            looked_at: self.before.len() as u64,
            common: self.common,
            changed: self.changed,
            changed_by_place: self.changed_by_place,
        }
    }
}

fn identity(id: &EntityId) -> u128 {
    priority(0, &[id.to_string().as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_counted_by_place_among_entities_of_both_nights() {
        let mut churn = ChurnCounter::new("before".into(), 2);
        for (id, ids) in [(1, [0, 0]), (2, [1, 1]), (3, [2, 2]), (4, [3, 3])] {
            churn.remember(&EntityId::Int(id), ids.to_vec());
        }
        for (id, ids) in [(5, [9, 9]), (4, [3, 3]), (3, [2, 7]), (1, [8, 7])] {
            churn.compare(&EntityId::Int(id), &ids);
        }
        let churn = churn.finish();
        assert_eq!((churn.looked_at, churn.common, churn.changed), (4, 3, 2));
        assert_eq!(churn.changed_by_place, [1, 2]);
        assert!((churn.share() - 2.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn of_many_entities_a_sample_is_compared() {
        let mut churn = ChurnCounter::new("before".into(), 1);
        let entities = || (0..150_000).map(EntityId::Int);
        entities().for_each(|id| churn.remember(&id, vec![0]));
        // Every tenth has another id.
        for (number, id) in entities().enumerate() {
            churn.compare(&id, &[i64::from(number % 10 == 0)]);
        }
        let churn = churn.finish();
        assert_eq!((churn.looked_at, churn.common), (100_000, 100_000));
        assert!((churn.share() - 0.1).abs() < 0.003, "{}", churn.share());
    }
}
