//! Names of folders and runs in an output.
//!
//! Everything that belongs to a run is in folders of the run's name, which begins with its date, so that whoever looks
//! for the newest night or the oldest run lists folders and never parts.

use std::fmt;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::Kind;

/// The data sets of an output. In the output's root each has a folder of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataSet {
    /// Texts.
    Profiles,
    /// Lists of items.
    Recommendations,
    /// Embeddings without texts.
    Embeddings,
    /// Knowledge ids.
    KnowledgeIds,
}

impl DataSet {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Profiles, Self::Recommendations, Self::Embeddings, Self::KnowledgeIds];

    /// Those that runs publish; the others are made from them.
    pub const OF_RUNS: [Self; 2] = [Self::Profiles, Self::Recommendations];

    /// The name, as in paths and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Profiles => "profiles",
            Self::Recommendations => "recommendations",
            Self::Embeddings => "embeddings",
            Self::KnowledgeIds => "knowledge_ids",
        }
    }

    /// The folder of a kind, relative to the output's root.
    pub fn kind_folder(self, kind: Kind) -> String {
        format!("{self}/kind={kind}")
    }

    /// The folder of a kind and night, relative to the output's root.
    pub fn night_folder(self, kind: Kind, date: Date) -> String {
        format!("{}/dt={date}", self.kind_folder(kind))
    }

    /// The folder of a kind and run, relative to the output's root.
    pub fn folder(self, kind: Kind, date: Date, run: &str) -> String {
        format!("{}/run={run}", self.night_folder(kind, date))
    }
}

/// The folder of canaries in an output's root: an output of its own, so that no reader of nights finds one.
pub const CANARIES: &str = "canaries";

impl fmt::Display for DataSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of what was made on a date from what `identity` tells: the same inputs give the same name.
pub fn dated_name(date: Date, identity: &Digest) -> String {
    format!("{date}-{}", identity.short())
}

/// The date of a [`dated_name`]; none if it is not one, and so not Laser's.
pub fn name_date(name: &str) -> Option<Date> {
    let (date, digest) = (name.get(..10)?, name.get(10..)?.strip_prefix('-')?);
    let is_digest = digest.len() == Digest::SHORT && digest.bytes().all(|b| b.is_ascii_hexdigit());
    is_digest.then(|| date.parse().ok())?
}

/// The choices that a run was begun with where its configuration leaves them open. Nights that are published and pools
/// that are promoted while it is under way change nothing any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins {
    /// The published folders that `latest` stands for, below the output's root (of a canary below that of the nights);
    /// none on a first night.
    pub previous: Vec<String>,
    /// Where the pools are: below the output's root, or a URL.
    pub pools: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn a_data_set_is_named_alike_in_paths_and_in_manifests() {
        for data_set in DataSet::ALL {
            assert_eq!(serde_json::to_value(data_set).unwrap(), data_set.name());
        }
        let folder = DataSet::KnowledgeIds.folder(Kind::User, date(2026, 1, 2), "r");
        assert_eq!(folder, "knowledge_ids/kind=user/dt=2026-01-02/run=r");
    }

    #[test]
    fn only_dated_names_have_a_date() {
        let name = dated_name(date(2026, 1, 2), &Digest::of(b"x"));
        assert_eq!(name_date(&name), Some(date(2026, 1, 2)));
        for other in ["", "2026-01-02", "2026-01-02-mine", "2026-13-02-0123456789ab", "promotions"] {
            assert_eq!(name_date(other), None, "{other}");
        }
    }
}
