//! Rows in the order of their entities' value, the most valuable first.
//!
//! A sample of each kind's values tells the bounds of [`PARTITIONS`] parts of about equal size. Rows are written to
//! their part and sorted when it is read, so memory is that of the spill and of one part. Equal values stay in the
//! order of the tables.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use laser_schema::job::ShardRow;
use laser_schema::{Entity, EntityTable, Kind};
use laser_store::TablesReader;
use laser_store::spill::{PARTITIONS, Spill, SpillError};

use crate::priority::{PriorityError, Valuation};

/// Values that the bounds are taken from, per kind: a part is then within a third of its size in 99 of 100 cases.
const SAMPLE: u64 = 64 * PARTITIONS as u64;

/// A row by its value; rows of more value come first, and equal ones in the order of the tables.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place {
    value: f64,
    row: u64,
}

impl Eq for Place {}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        other.value.total_cmp(&self.value).then(self.row.cmp(&other.row))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Why rows could not be put in order.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// What came back from the local disk.
    #[error("a row that was kept on the local disk cannot be read back ({0}); run again")]
    Row(#[from] serde_json::Error),
}

/// Rows on their way into the order of their values.
#[derive(Debug)]
pub(crate) struct ByValue {
    /// A sample of each kind's places, in order.
    samples: BTreeMap<Kind, Vec<Place>>,
    /// Entities of each kind so far.
    seen: BTreeMap<Kind, u64>,
    rows: Spill,
}

impl ByValue {
    /// Reads the values of all entities of the tables once; `entities` says how many there are of each kind.
    pub(crate) async fn new(
        valuation: &Valuation,
        tables: &[EntityTable],
        entities: &BTreeMap<Kind, u64>,
        memory: usize,
    ) -> Result<Self, PriorityError> {
        let mut order = Self { samples: BTreeMap::new(), seen: BTreeMap::new(), rows: Spill::new(memory) };
        let mut reader = TablesReader::counting(tables);
        while let Some(batch) = reader.next_batch().await? {
            let values = valuation.values(&batch.iter().collect::<Vec<_>>())?;
            for (entity, value) in batch.iter().zip(values) {
                let stride = entities.get(&entity.kind).map_or(1, |all| all.div_ceil(SAMPLE));
                let place = order.place(entity, value);
                if place.row.is_multiple_of(stride) {
                    order.samples.entry(entity.kind).or_default().push(place);
                }
            }
        }
        order.samples.values_mut().for_each(|sample| sample.sort_unstable());
        order.seen.clear();
        Ok(order)
    }

    /// The place of the next entity of the tables.
    fn place(&mut self, entity: &Entity, value: f64) -> Place {
        let seen = self.seen.entry(entity.kind).or_default();
        *seen += 1;
        Place { value, row: *seen - 1 }
    }

    /// Takes the next entity of the tables, with its row if one is to be generated.
    pub(crate) fn push(&mut self, entity: &Entity, value: f64, row: Option<&ShardRow>) -> Result<(), OrderError> {
        let place = self.place(entity, value);
        let Some(row) = row else {
            return Ok(());
        };
        let sample = self.samples.get(&entity.kind).map_or(&[][..], Vec::as_slice);
        let before = sample.partition_point(|sampled| *sampled < place);
        let part = (before * PARTITIONS / sample.len().max(1)).min(PARTITIONS - 1);
        let kind = [u8::from(entity.kind == Kind::Item)];
        let key = [&kind[..], &place.value.to_le_bytes(), &place.row.to_le_bytes()].concat();
        Ok(self.rows.push(part, &key, &[&serde_json::to_vec(row)?])?)
    }

    /// Sorts the parts from now on.
    pub(crate) fn finish(&mut self) -> Result<(), OrderError> {
        Ok(self.rows.finish()?)
    }

    /// The rows of a part, users first.
    pub(crate) fn take(&mut self, part: usize) -> Result<Vec<(Kind, ShardRow)>, OrderError> {
        let mut records: Vec<_> = self.rows.take(part)?.map(|(key, row)| (place(&key), row)).collect();
        records.sort_unstable_by_key(|(place, _)| *place);
        records.into_iter().map(|((kind, _), row)| Ok((kind, serde_json::from_slice(&row)?))).collect()
    }
}

/// The place that a key tells: kind, value and row, as [`ByValue::push`] writes them.
fn place(key: &[u8]) -> (Kind, Place) {
    let number = |at: usize| key.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; 8]);
    let kind = if key.first() == Some(&0) { Kind::User } else { Kind::Item };
    (kind, Place { value: f64::from_le_bytes(number(1)), row: u64::from_le_bytes(number(9)) })
}
