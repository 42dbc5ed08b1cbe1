//! The entities of a canary, checked against the tables before anything is written.

use std::collections::HashSet;

use laser_schema::canary::Canary;
use laser_schema::{EntityId, EntityTable, Kind};
use laser_store::rows::RowReader;
use laser_store::table::Select;
use laser_store::{EntityReader, Location, LocationError, RowError};
use serde::Deserialize;
use serde_json::Value;

/// Ids of no entity that an error names.
const NAMED: usize = 3;

/// Why a canary has no entities.
#[derive(Debug, thiserror::Error)]
pub enum CanaryError {
    /// The table of ids, or an entity table.
    #[error(transparent)]
    Rows(#[from] RowError),
    /// The table of ids.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The share is too small for these tables.
    #[error("[canary] share = {share}: takes none of the {entities} entities; give a larger share, or another seed")]
    None {
        /// The share.
        share: f64,
        /// Entities of all tables.
        entities: u64,
    },
    /// A table of ids without one.
    #[error("[canary] ids = {file:?}: has no id; name at least one entity")]
    NoIds {
        /// The table.
        file: String,
    },
    /// Ids of no entity.
    #[error(
        "[canary] ids = {file:?}: {count} of its ids are in no table of [[input]], such as {}; remove them, or give \
         the table that has them",
        ids.join(", ")
    )]
    Unknown {
        /// The table.
        file: String,
        /// How many.
        count: usize,
        /// The first ones.
        ids: Vec<String>,
    },
}

/// Chooses the entities of a canary.
#[derive(Debug)]
pub struct CanaryEntities {
    canary: Canary,
    /// Of a table of ids, by their text: `7` of a CSV file is the int64 7 of a Parquet one.
    ids: HashSet<(Option<Kind>, String)>,
}

impl CanaryEntities {
    /// A seeded share of `tables`.
    ///
    /// # Errors
    /// If it takes none of their entities.
    pub async fn of_share(share: f64, seed: u64, tables: &[EntityTable]) -> Result<Self, CanaryError> {
        let chosen = Self { canary: Canary::Share { share, seed }, ids: HashSet::new() };
        let mut entities = 0;
        for table in tables {
            let mut reader = EntityReader::open_ids(table).await?;
            while let Some(batch) = reader.next_batch().await? {
                if batch.iter().any(|entity| chosen.takes(entity.kind, &entity.id)) {
                    return Ok(chosen);
                }
                entities += batch.len() as u64;
            }
        }
        Err(CanaryError::None { share, entities })
    }

    /// The entities of `tables` that the table `file` names: by `id`, and by `kind` where it has such a column.
    ///
    /// # Errors
    /// A table that cannot be read, and ids of no entity.
    pub async fn of_ids(file: &str, tables: &[EntityTable]) -> Result<Self, CanaryError> {
        let digest = Location::parse(file)?.fingerprint().await?;
        let ids = read_ids(file).await?;
        if ids.is_empty() {
            return Err(CanaryError::NoIds { file: file.to_owned() });
        }
        let mut unknown = ids.clone();
        for table in tables {
            let mut reader = EntityReader::open_ids(table).await?;
            while let Some(batch) = reader.next_batch().await? {
                for entity in batch {
                    names(entity.kind, &entity.id).iter().for_each(|name| _ = unknown.remove(name));
                }
            }
        }
        if unknown.is_empty() {
            return Ok(Self { canary: Canary::Ids { ids: file.to_owned(), digest }, ids });
        }
        let mut ids: Vec<String> = unknown.into_iter().map(|(_, id)| id).collect();
        ids.sort_unstable();
        let count = ids.len();
        ids.truncate(NAMED);
        Err(CanaryError::Unknown { file: file.to_owned(), count, ids })
    }

    /// What is chosen, for plan and manifest.
    pub fn canary(&self) -> &Canary {
        &self.canary
    }

    /// Whether an entity is chosen.
    pub fn takes(&self, kind: Kind, id: &EntityId) -> bool {
        match self.canary {
            Canary::Share { share, seed } => Canary::share_takes(share, seed, kind, id),
            Canary::Ids { .. } => names(kind, id).iter().any(|name| self.ids.contains(name)),
        }
    }
}

/// What a table of ids may call an entity.
fn names(kind: Kind, id: &EntityId) -> [(Option<Kind>, String); 2] {
    [(None, id.to_string()), (Some(kind), id.to_string())]
}

#[derive(Deserialize)]
struct CanaryRow {
    id: EntityId,
    #[serde(default)]
    kind: Option<Kind>,
}

async fn read_ids(file: &str) -> Result<HashSet<(Option<Kind>, String)>, RowError> {
    let mut rows = RowReader::open(file, Select::Only(&["id", "kind"])).await?;
    if let Some(columns) = rows.columns()?.filter(|columns| !columns.iter().any(|name| name == "id")) {
        let reason = format!("no column \"id\"; it has {}", columns.join(", "));
        return Err(RowError::File { file: file.to_owned(), reason });
    }
    let mut ids = HashSet::new();
    while let Some(batch) = rows.next_batch().await? {
        for (number, row) in batch {
            let row = serde_json::from_value(Value::Object(row));
            let CanaryRow { id, kind } =
                row.map_err(|e| rows.error(number, format!("expected {{\"id\": …, \"kind\": \"user\"}}: {e}")))?;
            ids.insert((kind, id.to_string()));
        }
    }
    Ok(ids)
}
