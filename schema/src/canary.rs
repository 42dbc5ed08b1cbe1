//! Canaries: a share of a night's entities, made by another configuration beside the night and compared with it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::entity::{EntityId, Kind};
use crate::sample::priority;

/// The entities that a canary is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Canary {
    /// A seeded share of each kind.
    Share {
        /// Above 0, at most 1.
        share: f64,
        /// Another seed chooses other entities.
        seed: u64,
    },
    /// The entities that a table names.
    Ids {
        /// The table.
        ids: String,
        /// A digest that changes with it.
        digest: Digest,
    },
}

impl Canary {
    /// Whether a seeded share takes an entity: by a hash of seed, kind and id alone. So it does not depend on the order
    /// of the entities, and a larger share takes those of a smaller one and more.
    pub fn share_takes(share: f64, seed: u64, kind: Kind, id: &EntityId) -> bool {
        const BITS: u32 = f64::MANTISSA_DIGITS;
        let hash = priority(seed, &[b"canary", kind.as_str().as_bytes(), id.to_string().as_bytes()]);
        let first = u64::try_from(hash >> (u128::BITS - BITS)).unwrap_or(u64::MAX);
        (first as f64) < share * (1u64 << BITS) as f64
    }
}

impl fmt::Display for Canary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share { share, .. } => write!(f, "{} % of the entities", share * 100.0),
            Self::Ids { ids, .. } => write!(f, "the entities of {ids}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(share: f64, seed: u64, ids: &[i64]) -> Vec<i64> {
        let is_taken = |id: &&i64| Canary::share_takes(share, seed, Kind::User, &EntityId::Int(**id));
        ids.iter().filter(is_taken).copied().collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn a_larger_share_contains_a_smaller_one_whatever_the_order(
            seed in 0u64..9,
            shares in (0.0f64..=1.0, 0.0f64..=1.0),
            ids in prop::collection::vec(-99i64..99, 0..60),
        ) {
            let (small, large) = (shares.0.min(shares.1), shares.0.max(shares.1));
            let reversed: Vec<i64> = ids.iter().rev().copied().collect();
            let mut backwards = taken(large, seed, &reversed);
            backwards.reverse();
            prop_assert_eq!(taken(large, seed, &ids), backwards);
            let of_large = taken(large, seed, &ids);
            prop_assert!(taken(small, seed, &ids).iter().all(|id| of_large.contains(id)));
        }
    }

    #[test]
    fn a_share_takes_about_as_many_and_the_whole_takes_all() {
        let ids: Vec<i64> = (0..20_000).collect();
        assert_eq!((taken(1.0, 1, &ids).len(), taken(0.0, 1, &ids).len()), (20_000, 0));
        // Five standard deviations of a binomial count are 154.
        let count = taken(0.05, 1, &ids).len();
        assert!((846..=1154).contains(&count), "{count}");
        assert_ne!(taken(0.05, 1, &ids), taken(0.05, 2, &ids));
    }

    #[test]
    fn a_canary_reads_back_as_itself() {
        let digest = Digest::of(b"x");
        for canary in [Canary::Share { share: 0.01, seed: 3 }, Canary::Ids { ids: "ids.csv".to_owned(), digest }] {
            let json = serde_json::to_string(&canary).unwrap();
            assert_eq!(serde_json::from_str::<Canary>(&json).unwrap(), canary);
        }
    }
}
