//! The input contract: users and items, and the columns of their tables.
//!
//! One row is one entity: an id, a kind, attributes, a history of interactions, how many interactions there are, and
//! optionally an embedding. Column names are mapped by [`Columns`]; every column that is not mapped is an attribute.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::history::History;

/// Whether an entity is a user or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Somebody who interacts.
    User,
    /// Something that is interacted with.
    Item,
}

impl Kind {
    /// Both kinds, users first.
    pub const ALL: [Self; 2] = [Self::User, Self::Item];

    /// `user` or `item`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Item => "item",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An entity's id, kept in the type that the input has, since feature stores join on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EntityId {
    /// A 64-bit integer.
    Int(i64),
    /// Text.
    Text(String),
}

impl EntityId {
    /// The id in the type asked for, or as it is.
    ///
    /// # Errors
    /// If it is text that is no integer.
    pub fn into_type(self, id_type: Option<IdType>) -> Result<Self, IdTypeError> {
        match (id_type, self) {
            (Some(IdType::String), Self::Int(id)) => Ok(Self::Text(id.to_string())),
            (Some(IdType::Int64), Self::Text(id)) => id.parse().map(Self::Int).map_err(|_| IdTypeError { id }),
            (_, id) => Ok(id),
        }
    }

    /// The type it has.
    pub fn id_type(&self) -> IdType {
        match self {
            Self::Int(_) => IdType::Int64,
            Self::Text(_) => IdType::String,
        }
    }
}

impl fmt::Display for EntityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(id) => write!(f, "{id}"),
            Self::Text(id) => f.write_str(id),
        }
    }
}

/// An id that is not of the type asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("id {id:?} is not an int64, which id_type asks for")]
pub struct IdTypeError {
    id: String,
}

/// A user or an item as the input describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entity {
    /// Unique within its kind.
    pub id: EntityId,
    /// User or item.
    pub kind: Kind,
    /// Named values: strings, numbers, booleans or lists of them.
    pub attributes: Map<String, Value>,
    /// Oldest first.
    pub history: History,
    /// How many interactions there are in all; at least the history's length.
    pub interactions: u64,
    /// A dense vector without NaN, if the table has one.
    pub embedding: Option<Vec<f32>>,
}

/// The type that ids are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdType {
    /// A 64-bit integer.
    Int64,
    /// Text.
    String,
}

impl fmt::Display for IdType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int64 => "int64",
            Self::String => "string",
        })
    }
}

/// The names of the input's columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Columns {
    /// Entity id: string or int64.
    pub id: String,
    /// The type ids are kept in; as stored if not given (CSV stores text).
    pub id_type: Option<IdType>,
    /// `user` or `item`; not needed where the table's kind is configured.
    pub kind: String,
    /// A struct, map or JSON object of attributes; other unmapped columns are attributes too.
    pub attributes: String,
    /// A list of structs (or of titles), or in CSV a JSON array of objects (or of strings).
    pub history: String,
    /// How many interactions the entity has; the history's length if not given.
    pub interactions: String,
    /// A list of floats.
    pub embedding: String,
    /// The field of a history element that orders it.
    pub timestamp: String,
}

impl Default for Columns {
    fn default() -> Self {
        Self {
            id: "id".into(),
            id_type: None,
            kind: "kind".into(),
            attributes: "attributes".into(),
            history: "history".into(),
            interactions: "interactions".into(),
            embedding: "embedding".into(),
            timestamp: "timestamp".into(),
        }
    }
}

/// One table of the input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntityTable {
    /// A local path or object-store URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    pub path: String,
    /// The kind of all rows, for a table without a kind column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// The table's column names, where they differ from the contract's.
    #[serde(default)]
    pub columns: Columns,
}
