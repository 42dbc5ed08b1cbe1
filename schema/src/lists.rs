//! Recommendation lists: the second product of a night. `docs/output.md` lists the columns.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Most items of a list.
pub const ITEMS_MAX: usize = 1000;

/// Which lists are acceptable for a user: a part of the specification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListSpec {
    /// Digest of the trie of identifiers.
    pub trie: Digest,
    /// Digest of the items that are out of stock; none if all may be listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_stock: Option<Digest>,
    /// Items of a list, where no column says another number.
    pub items: usize,
    /// The users' column with the number of items of each list, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items_from: Option<String>,
    /// Beams of the search for that many items, at least as many; other searches have them in proportion.
    pub width: usize,
    /// What a code's probability is relative to.
    pub normalisation: Normalisation,
    /// Whether items of the user's history may be listed.
    pub repeat: bool,
    /// What becomes of items that share an identifier.
    pub ties: Ties,
}

/// What a code's probability is relative to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Normalisation {
    /// The whole vocabulary; codes that are not allowed keep their share.
    #[default]
    Vocabulary,
    /// The codes that are allowed.
    Allowed,
}

impl fmt::Display for Normalisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vocabulary => "vocabulary",
            Self::Allowed => "allowed",
        })
    }
}

/// What a row of a part of lists is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListRows {
    /// A user, with a list of items.
    #[default]
    User,
    /// A user and a rank, with one item: as many rows as the list has items, the best one first.
    Item,
}

impl ListRows {
    /// Whether a user has one row.
    pub fn is_user(&self) -> bool {
        *self == Self::User
    }
}

/// What becomes of items that share an identifier, which the model cannot tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ties {
    /// All are listed one behind the other, in the catalogue's order and with the same score.
    #[default]
    All,
    /// Only the first of the catalogue that may be listed.
    First,
}
