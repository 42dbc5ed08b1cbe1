//! Erasures: what was found of entities, what became of it, and where else to look. `docs/output.md` describes the
//! receipt.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::Kind;

/// The version of [`Erasure`].
pub const ERASURE_VERSION: u32 = 1;

/// An erasure while it is under way, and its receipt once it has ended. It names no entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Erasure {
    /// [`ERASURE_VERSION`].
    pub version: u32,
    /// The name: the date and a digest of kind and ids.
    pub name: String,
    /// The version of Laser that began it.
    pub writer: String,
    /// Users or items.
    pub kind: Kind,
    /// Entities that were to be erased.
    pub ids: u64,
    /// Digest of the sorted ids: who has the list can tell that the receipt is of it.
    pub ids_digest: Digest,
    /// How many of the entities something was found of.
    pub found: u64,
    /// When it was begun.
    pub begun: Timestamp,
    /// When all was checked again and nothing was left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
    /// What is changed, in this order.
    pub places: Vec<ErasedPlace>,
    /// What is removed whole.
    pub removed: Vec<Removed>,
    /// Where Laser does not look.
    pub elsewhere: Vec<String>,
}

/// A folder with objects that hold something of the entities, or that say how much others hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErasedPlace {
    /// The folder, below the output's root.
    pub folder: String,
    /// Its objects.
    pub objects: Vec<ErasedObject>,
}

impl ErasedPlace {
    /// Rows and texts of all objects.
    pub fn rows(&self) -> u64 {
        self.objects.iter().map(|object| object.rows).sum()
    }
}

/// An object that is written anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErasedObject {
    /// Its name in the folder.
    pub name: String,
    /// Rows, texts, audited texts or errors of the entities in it; 0 where it only counts or names others.
    pub rows: u64,
    /// Digest of its bytes before; none where there was no such object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Digest>,
    /// Digest of its bytes afterwards; none until the end, or where the object is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Digest>,
}

/// Folders of one name that are removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The run or pool set.
    pub name: String,
    /// Its folders, below the output's root.
    pub folders: Vec<String>,
    /// Why they are.
    pub reason: String,
}
