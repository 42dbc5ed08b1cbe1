//! The `[pools]` section: how entities are grouped and how large their pools are.
//!
//! Everything here can change the pools' bytes, so the whole section is stored in the pool set.

use std::fmt;

use laser_schema::Kind;
use laser_schema::embedding::EmbeddingSource;
use serde::{Deserialize, Serialize};

use crate::error::PoolsError;

/// The `[pools]` section.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PoolsConfig {
    /// Seeds k-means, sampling and random groups.
    pub seed: u64,
    /// `[pools.user]`: how users are grouped.
    pub user: GroupingConfig,
    /// `[pools.item]`: how items are grouped.
    pub item: GroupingConfig,
    /// `[pools.kmeans]`: how clusters are fitted.
    pub kmeans: KMeansConfig,
}

/// `[pools.user]` or `[pools.item]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupingConfig {
    /// The scheme that decides an entity's group; if absent, one pool for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grouping: Option<Grouping>,
    /// The number of clusters (`3`), or a range (`{ min = 2, max = 10 }`) of which the number with the highest
    /// silhouette is used. The paper uses 3 to 10.
    pub clusters: Clusters,
    /// With `router`: the least number of interactions of an entity in a cluster.
    pub min_interactions: u64,
    /// The attributes that group, in order (`["genres", "decade"]`), or `"best"`.
    pub attributes: Attributes,
    /// A larger attribute group is subdivided by a further attribute.
    pub max_group: usize,
    /// A smaller attribute group gets no pool of its own.
    pub min_group: usize,
    /// Most texts of a pool, sampled. The paper searches 500 to 5000.
    pub max_texts: usize,
    /// With `random`: the number of groups.
    pub groups: u64,
    /// The source of embeddings; if absent, the entity table's own column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<EmbeddingSource>,
}

impl Default for GroupingConfig {
    fn default() -> Self {
        Self {
            grouping: None,
            clusters: Clusters::Fixed(3),
            min_interactions: 5,
            attributes: Attributes::Best(Best::Best),
            max_group: 1000,
            min_group: 20,
            max_texts: 10_000,
            groups: 3,
            embeddings: None,
        }
    }
}

/// How entities are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grouping {
    /// Clusters for entities with an embedding and enough interactions, attributes for the others.
    Router,
    /// Only clusters, whatever the number of interactions.
    Collaborative,
    /// Only attributes.
    Attribute,
    /// Random groups (the paper's RRP), for comparison.
    Random,
    /// One pool for all (the paper's GRP): what accepts most if it holds as many texts as the groups' pools together.
    Global,
}

impl Grouping {
    /// Whether entities may belong to clusters.
    pub(crate) fn has_clusters(self) -> bool {
        matches!(self, Self::Router | Self::Collaborative)
    }

    /// Whether entities may belong to attribute groups.
    pub(crate) fn has_attributes(self) -> bool {
        matches!(self, Self::Router | Self::Attribute)
    }
}

/// The number of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected a number of clusters, such as 3, or a range, such as { min = 2, max = 10 }"
)]
pub enum Clusters {
    /// Exactly this number.
    Fixed(usize),
    /// The number within these bounds, both included, that has the highest silhouette.
    Range {
        /// Lower bound, at least 2.
        min: usize,
        /// Upper bound.
        max: usize,
    },
}

impl Clusters {
    /// The candidates for the number of clusters.
    pub(crate) fn candidates(self) -> std::ops::RangeInclusive<usize> {
        match self {
            Self::Fixed(k) => k..=k,
            Self::Range { min, max } => min..=max,
        }
    }
}

impl fmt::Display for Clusters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(k) => write!(f, "{k}"),
            Self::Range { min, max } => write!(f, "{{ min = {min}, max = {max} }}"),
        }
    }
}

/// The attributes that group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a list of attributes, such as [\"genres\", \"decade\"], or \"best\"")]
pub enum Attributes {
    /// Chosen per group: the attribute that splits best.
    Best(Best),
    /// In this order.
    Order(Vec<String>),
}

/// The word `best`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Best {
    /// The attribute whose largest part is the smallest.
    Best,
}

/// `[pools.kmeans]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KMeansConfig {
    /// Number of runs from different k-means++ centroids; the one with the lowest inertia is kept.
    pub runs: usize,
    /// A run ends when the centroids move less than this (Euclidean, all together).
    pub tolerance: f64,
    /// A run ends after this many iterations at the latest.
    pub max_iterations: u64,
    /// Clusters are fitted on a sample of at most this many embeddings.
    pub fit_sample: usize,
    /// The silhouette is measured on at most this many of the sample.
    pub silhouette_sample: usize,
}

impl Default for KMeansConfig {
    fn default() -> Self {
        Self { runs: 4, tolerance: 1e-4, max_iterations: 300, fit_sample: 20_000, silhouette_sample: 2_000 }
    }
}

impl PoolsConfig {
    /// Returns the grouping of one kind.
    pub fn of(&self, kind: Kind) -> &GroupingConfig {
        match kind {
            Kind::User => &self.user,
            Kind::Item => &self.item,
        }
    }

    /// Checks every value that the types do not constrain.
    ///
    /// # Errors
    /// The first key with an invalid value.
    pub fn validate(&self) -> Result<(), PoolsError> {
        let invalid = |section: &str, reason: String| PoolsError::Input(format!("[pools.{section}] {reason}"));
        for kind in Kind::ALL {
            self.of(kind).validate().map_err(|reason| invalid(kind.as_str(), reason))?;
        }
        self.kmeans.validate().map_err(|reason| invalid("kmeans", reason))
    }
}

fn positive(key: &str, value: usize) -> Result<(), String> {
    if value > 0 { Ok(()) } else { Err(format!("{key}: must be at least 1, got 0")) }
}

impl GroupingConfig {
    /// The scheme in force.
    pub fn grouping(&self) -> Grouping {
        self.grouping.unwrap_or(Grouping::Global)
    }

    /// The first key that is set and says something about groups.
    fn key_of_groups(&self) -> Option<&'static str> {
        let default = Self::default();
        let keys = [
            ("clusters", self.clusters != default.clusters),
            ("min_interactions", self.min_interactions != default.min_interactions),
            ("attributes", self.attributes != default.attributes),
            ("max_group", self.max_group != default.max_group),
            ("min_group", self.min_group != default.min_group),
            ("groups", self.groups != default.groups),
            ("embeddings", self.embeddings.is_some()),
        ];
        keys.into_iter().find(|(_, is_set)| *is_set).map(|(key, _)| key)
    }

    fn validate(&self) -> Result<(), String> {
        match self.clusters {
            Clusters::Fixed(k) => positive("clusters", k)?,
            Clusters::Range { min, max } if min > max => {
                return Err(format!("clusters: min must not exceed max, got min = {min}, max = {max}"));
            }
            Clusters::Range { min, .. } if min < 2 => {
                return Err(format!("clusters: min must be at least 2, got {min}: one cluster has no silhouette"));
            }
            Clusters::Range { .. } => {}
        }
        if let Attributes::Order(attributes) = &self.attributes {
            if attributes.is_empty() {
                return Err("attributes: must name an attribute or be \"best\", got an empty list".to_owned());
            }
            if let Some(twice) = (1..attributes.len()).find(|&i| attributes[..i].contains(&attributes[i])) {
                return Err(format!("attributes: {:?} is named twice", attributes[twice]));
            }
        }
        positive("max_group", self.max_group)?;
        positive("min_group", self.min_group)?;
        positive("max_texts", self.max_texts)?;
        positive("groups", usize::from(self.groups > 0))?;
        match (self.grouping, self.key_of_groups()) {
            (None, Some(key)) => Err(format!(
                "{key}: without grouping there are no groups; set grouping, for example to \"router\", or leave it out"
            )),
            _ => Ok(()),
        }
    }
}

impl KMeansConfig {
    fn validate(&self) -> Result<(), String> {
        positive("runs", self.runs)?;
        positive("max_iterations", usize::from(self.max_iterations > 0))?;
        positive("fit_sample", self.fit_sample)?;
        positive("silhouette_sample", self.silhouette_sample)?;
        if self.tolerance > 0.0 && self.tolerance.is_finite() {
            return Ok(());
        }
        Err(format!("tolerance: must be a number above 0, got {}", self.tolerance))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> PoolsConfig {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn defaults_are_valid_and_round_trip() {
        let default = PoolsConfig::default();
        default.validate().unwrap();
        assert_eq!(config(&serde_json::to_string(&default).unwrap()), default);
        assert_eq!(config("{}"), default);
    }

    #[test]
    fn invalid_values_are_refused_by_key() {
        let cases = [
            (r#"{"user": {"clusters": 0}}"#, "[pools.user] clusters: must be at least 1, got 0"),
            (
                r#"{"item": {"clusters": {"min": 9, "max": 3}}}"#,
                "[pools.item] clusters: min must not exceed max, got min = 9, max = 3",
            ),
            (
                r#"{"item": {"clusters": {"min": 1, "max": 3}}}"#,
                "[pools.item] clusters: min must be at least 2, got 1: one cluster has no silhouette",
            ),
            (
                r#"{"user": {"attributes": []}}"#,
                "[pools.user] attributes: must name an attribute or be \"best\", got an empty list",
            ),
            (r#"{"user": {"attributes": ["a", "b", "a"]}}"#, "[pools.user] attributes: \"a\" is named twice"),
            (r#"{"user": {"max_texts": 0}}"#, "[pools.user] max_texts: must be at least 1, got 0"),
            (r#"{"user": {"groups": 0}}"#, "[pools.user] groups: must be at least 1, got 0"),
            (r#"{"kmeans": {"runs": 0}}"#, "[pools.kmeans] runs: must be at least 1, got 0"),
            (r#"{"kmeans": {"tolerance": 0.0}}"#, "[pools.kmeans] tolerance: must be a number above 0, got 0"),
        ];
        for (json, message) in cases {
            assert_eq!(config(json).validate().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn unknown_keys_and_wrong_shapes_are_refused() {
        let cases = [
            (r#"{"user": {"cluster": 3}}"#, "unknown field `cluster`"),
            (r#"{"user": {"clusters": {"min": 2}}}"#, "{ min = 2, max = 10 }"),
            (r#"{"user": {"clusters": {"min": 2, "max": 3, "mean": 2}}}"#, "{ min = 2, max = 10 }"),
            (r#"{"user": {"attributes": "worst"}}"#, "or \"best\""),
            (r#"{"user": {"embeddings": {"npy": "a.npy"}}}"#, "expected { npy = …, ids = …"),
            (r#"{"user": {"grouping": "kmeans"}}"#, "unknown variant `kmeans`"),
        ];
        for (json, part) in cases {
            let error = serde_json::from_str::<PoolsConfig>(json).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn both_embedding_sources_are_told_apart() {
        let config = config(
            r#"{"user": {"embeddings": {"npy": "u.npy", "ids": "u.txt", "skip_rows": 1}},
                "item": {"embeddings": {"table": "i.parquet", "id": "movie"}}}"#,
        );
        let npy = EmbeddingSource::Npy { npy: "u.npy".into(), ids: "u.txt".into(), skip_rows: 1 };
        let table =
            EmbeddingSource::Table { table: "i.parquet".into(), id: "movie".into(), embedding: "embedding".into() };
        assert_eq!(config.user.embeddings, Some(npy));
        assert_eq!(config.item.embeddings, Some(table));
    }
}
