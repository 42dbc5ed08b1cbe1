//! The groups of every entity, and the table with every entity's pool.
//!
//! Which of its groups provides an entity's pool is known only once all pools are built. Until then an entity takes
//! about 40 bytes, on the local disk beyond a budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use laser_schema::{Entity, Kind};
use laser_store::Location;
use laser_store::spill::{PARTITIONS, Records, Spill, SpillError};
use parquet::arrow::AsyncArrowWriter;

use crate::error::PoolsError;
use crate::fit::FittedKind;
use crate::pool_set::{ASSIGNMENTS_FILE, GroupStatistics};
use crate::router::{ALL, Membership};

/// The groups of all entities, in the order of the tables.
#[derive(Debug)]
pub(crate) struct Members {
    rows: u64,
    done: u64,
    spill: Spill,
}

impl Members {
    /// Creates the groups of this many entities.
    pub(crate) fn new(rows: u64, memory: usize) -> Self {
        Self { rows: rows.max(1), done: 0, spill: Spill::new(memory) }
    }

    pub(crate) fn push(&mut self, entity: &Entity, membership: &Membership) -> Result<(), SpillError> {
        let partition = u128::from(self.done) * PARTITIONS as u128 / u128::from(self.rows);
        self.done += 1;
        let key = match entity.kind {
            Kind::User => format!("u{}", entity.id),
            Kind::Item => format!("i{}", entity.id),
        };
        // Numbers and words always serialise.
        let value = serde_json::to_vec(membership).unwrap_or_default();
        let partition = usize::try_from(partition).unwrap_or(PARTITIONS);
        self.spill.push(partition.min(PARTITIONS - 1), key.as_bytes(), &[&value])
    }

    pub(crate) fn finish(&mut self) -> Result<(), SpillError> {
        self.spill.finish()
    }

    /// Writes a row per entity, in the order of the tables: kind, `entity_id` (as text, whatever the id's type), pool,
    /// reason. Returns the number of entities per group.
    pub(crate) async fn write(
        &self,
        kinds: &BTreeMap<Kind, FittedKind>,
        dir: &Location,
    ) -> Result<BTreeMap<Kind, Vec<GroupStatistics>>, PoolsError> {
        let failed = |reason: String| PoolsError::Encode { file: dir.join(ASSIGNMENTS_FILE).url().to_owned(), reason };
        let mut statistics = kinds
            .iter()
            .map(|(&kind, fitted)| (kind, vec![GroupStatistics::default(); fitted.router.groups().len()]))
            .collect();
        let file = dir.join(ASSIGNMENTS_FILE).writer();
        let mut writer = AsyncArrowWriter::try_new(file, schema(), None).map_err(|e| failed(e.to_string()))?;
        for partition in 0..PARTITIONS {
            let columns = resolve(self.spill.read(partition)?, kinds, &mut statistics);
            let columns = columns.map(|column| Arc::new(StringArray::from(column)) as ArrayRef);
            let batch = RecordBatch::try_new(schema(), columns.into());
            let batch = batch.map_err(|e| failed(e.to_string()))?;
            writer.write(&batch).await.map_err(|e| failed(e.to_string()))?;
        }
        writer.close().await.map_err(|e| failed(e.to_string()))?;
        Ok(statistics)
    }
}

fn schema() -> Arc<Schema> {
    let column = |name| Field::new(name, DataType::Utf8, false);
    let columns = ["kind", "entity_id", "pool", "reason"].map(column);
    Arc::new(Schema::new(columns.to_vec()))
}

/// Builds the columns of some entities and counts them.
fn resolve(
    records: Records,
    kinds: &BTreeMap<Kind, FittedKind>,
    statistics: &mut BTreeMap<Kind, Vec<GroupStatistics>>,
) -> [Vec<String>; 4] {
    let mut columns = [const { Vec::new() }; 4];
    for (key, value) in records {
        let kind = match key[0] {
            b'u' => Kind::User,
            _ => Kind::Item,
        };
        let membership: Membership = serde_json::from_slice(&value).unwrap_or_default();
        let (Some(fitted), Some(statistics)) = (kinds.get(&kind), statistics.get_mut(&kind)) else {
            continue;
        };
        let groups = membership.iter().flatten().map(|&(group, _)| group);
        for group in groups.filter(|&group| group != ALL).chain([ALL]) {
            statistics[group].entities += 1;
        }
        let (group, reason) = fitted.router.resolve(&membership);
        statistics[group].routed += 1;
        let row = [
            kind.to_string(),
            String::from_utf8_lossy(&key[1..]).into_owned(),
            fitted.router.groups()[group].name.clone(),
            reason.to_string(),
        ];
        for (column, value) in columns.iter_mut().zip(row) {
            column.push(value);
        }
    }
    columns
}
