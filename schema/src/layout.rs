//! Names of folders and runs in an output.
//!
//! Everything that belongs to a run is in folders of the run's name, which begins with its date, so that whoever looks
//! for the newest night or the oldest run lists folders and never parts.

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::Kind;

/// The data set of texts.
pub const PROFILES: &str = "profiles";

/// The data set of embeddings without texts.
pub const EMBEDDINGS: &str = "embeddings";

/// The data set of knowledge ids.
pub const KNOWLEDGE_IDS: &str = "knowledge_ids";

/// The folder of a kind's published output of a run, relative to the output's root.
pub fn partition(kind: Kind, date: Date, run: &str) -> String {
    partition_of(PROFILES, kind, date, run)
}

/// The folder of a kind and run of a data set, relative to the output's root.
pub fn partition_of(data_set: &str, kind: Kind, date: Date, run: &str) -> String {
    format!("{data_set}/kind={kind}/dt={date}/run={run}")
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

/// What a run was begun with where its configuration leaves that open. Nights that are published and pools that are
/// promoted while it is under way change nothing any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins {
    /// The published folders that `latest` stands for, below the output's root; none on a first night.
    pub previous: Vec<String>,
    /// Where the pools are: below the output's root, or a URL.
    pub pools: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn only_dated_names_have_a_date() {
        let name = dated_name(date(2026, 1, 2), &Digest::of(b"x"));
        assert_eq!(name_date(&name), Some(date(2026, 1, 2)));
        for other in ["", "2026-01-02", "2026-01-02-mine", "2026-13-02-0123456789ab", "promotions"] {
            assert_eq!(name_date(other), None, "{other}");
        }
    }
}
