//! The router (LASER 3.2), which alone decides an entity's pool.
//!
//! It is plain data, made when pools are built and stored with them, so builder, coordinator and workers decide alike.
//! It decides for every entity, including new ones. An entity has up to two groups: a cluster (or a random group) and
//! an attribute group. The first of them that has a pool is used, otherwise the pool of all texts of the kind.
//!
//! Costs O(clusters · dimension) for an entity with a cluster and a few look-ups for the others.

use laser_schema::{Entity, EntityId, Kind};
use serde::{Deserialize, Serialize};

use crate::attribute_tree::{AttributeTree, Grown};
use crate::clusters::nearest;
use laser_schema::sample::priority;

/// Decides the pool of every entity of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Router {
    kind: Kind,
    scheme: Scheme,
    groups: Vec<Group>,
}

/// A group of entities.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The group's name, which is also the name of its pool: `user-all`, `user-cluster-0`, `item-genres-drama`.
    pub name: String,
    /// What the group's entities have in common, such as `genres = Drama`.
    pub label: String,
    /// Whether the group has a pool: a group whose members have no previous text has none.
    pub has_pool: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "scheme", rename_all = "lowercase")]
enum Scheme {
    /// The groups are all, the clusters, the attribute groups.
    Grouped { min_interactions: u64, centroids: Vec<Vec<f32>>, attributes: Option<AttributeTree> },
    /// The groups are all, the random groups.
    Random { seed: u64, groups: u64 },
    /// The only group is all.
    Global,
}

/// The groups of an entity by precedence, as indices into the router's groups.
pub(crate) type Membership = [Option<usize>; 2];

/// The group that every entity of the kind belongs to.
pub(crate) const ALL: usize = 0;

impl Router {
    /// Creates a router with one group for all.
    pub(crate) fn global(kind: Kind) -> Self {
        let all = Group { name: format!("{kind}-all"), label: format!("all {kind}s"), has_pool: false };
        Self { kind, scheme: Scheme::Global, groups: vec![all] }
    }

    /// Creates a router with `groups` random groups.
    pub(crate) fn random(kind: Kind, seed: u64, groups: u64) -> Self {
        let mut router = Self::global(kind);
        router.scheme = Scheme::Random { seed, groups };
        for group in 0..groups {
            router.add_group(&format!("random-{group}"), format!("random group {group}"));
        }
        router
    }

    /// Creates a router with clusters for entities with `min_interactions` and a tree's groups for the others.
    pub(crate) fn grouped(
        kind: Kind,
        min_interactions: u64,
        centroids: Vec<Vec<f32>>,
        attributes: Option<Grown>,
    ) -> Self {
        let mut router = Self::global(kind);
        for cluster in 0..centroids.len() {
            router.add_group(&format!("cluster-{cluster}"), format!("cluster {cluster}"));
        }
        let (attributes, labels) = attributes.unzip();
        for label in labels.unwrap_or_default() {
            router.add_group(&slug(&label), label);
        }
        router.scheme = Scheme::Grouped { min_interactions, centroids, attributes };
        router
    }

    /// Names that become equal as file names get a number.
    fn add_group(&mut self, name: &str, label: String) {
        let base = format!("{}-{name}", self.kind);
        let taken = |name: &String| self.groups.iter().any(|group| group.name == *name);
        let mut name = base.clone();
        let mut number = 2;
        while taken(&name) {
            name = format!("{base}-{number}");
            number += 1;
        }
        self.groups.push(Group { name, label, has_pool: false });
    }

    /// All groups, the group of everything first.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    pub(crate) fn set_has_pool(&mut self, group: usize) {
        self.groups[group].has_pool = true;
    }

    /// Has the entities of a group draft from the pool of all.
    pub(crate) fn remove_pool(&mut self, name: &str) {
        self.groups.iter_mut().filter(|group| group.name == name).for_each(|group| group.has_pool = false);
    }

    /// Returns the name of an entity's pool. Never fails: an embedding of another dimension or with NaN counts as none.
    pub fn route(&self, entity: &Entity, embedding: Option<&[f32]>) -> &str {
        &self.groups[self.resolve(&self.membership(entity, embedding))].name
    }

    /// Returns the groups that an entity belongs to, with or without a pool.
    pub(crate) fn membership(&self, entity: &Entity, embedding: Option<&[f32]>) -> Membership {
        match &self.scheme {
            Scheme::Global => [None, None],
            Scheme::Random { seed, groups } => [Some(1 + random_group(*seed, *groups, &entity.id)), None],
            Scheme::Grouped { min_interactions, centroids, attributes } => {
                let warm = entity.interactions >= *min_interactions;
                let cluster = embedding.filter(|_| warm).and_then(|e| nearest(centroids, e));
                let attribute = attributes.as_ref().and_then(|tree| tree.group(&entity.attributes));
                [cluster.map(|cluster| 1 + cluster), attribute.map(|group| 1 + centroids.len() + group)]
            }
        }
    }

    /// Returns the first of an entity's groups that has a pool, or the group of everything.
    pub(crate) fn resolve(&self, membership: &Membership) -> usize {
        let has_pool = |group: &usize| self.groups.get(*group).is_some_and(|group| group.has_pool);
        membership.iter().flatten().copied().find(has_pool).unwrap_or(ALL)
    }
}

/// Chooses by a hash of the id alone, so that an entity stays in its group from night to night.
fn random_group(seed: u64, groups: u64, id: &EntityId) -> usize {
    let hash = priority(seed, &[id.to_string().as_bytes()]);
    usize::try_from(hash % u128::from(groups.max(1))).unwrap_or(0)
}

/// Makes a label part of a file name: lower-case ASCII letters and digits, with `-` for anything between. 64 characters
/// are enough to recognise a group and keep paths short.
fn slug(label: &str) -> String {
    let words = label.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let mut slug = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
    slug.truncate(64);
    match slug.trim_end_matches('-') {
        "" => "group".to_owned(),
        slug => slug.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn entity(id: i64, interactions: u64, genre: &str) -> Entity {
        Entity {
            id: EntityId::Int(id),
            kind: Kind::User,
            attributes: Map::from_iter([("genre".to_owned(), Value::from(genre))]),
            history: laser_schema::History::default(),
            interactions,
            embedding: None,
        }
    }

    /// Two clusters, two attribute groups; every group but `without_pool` has a pool.
    fn router(without_pool: &[&str]) -> Router {
        let values = [("Drama", 0), ("War", 1)];
        let values = values.map(|(value, group)| (value.to_owned(), AttributeTree::Group(group)));
        let tree = AttributeTree::Split { attribute: "genre".to_owned(), values: BTreeMap::from(values), rest: None };
        let labels = vec!["genre = Drama".to_owned(), "genre = War".to_owned()];
        let centroids = vec![vec![0.0, 0.0], vec![5.0, 5.0]];
        let mut router = Router::grouped(Kind::User, 3, centroids, Some((tree, labels)));
        for group in 0..router.groups.len() {
            if !without_pool.contains(&router.groups[group].name.as_str()) {
                router.set_has_pool(group);
            }
        }
        router
    }

    #[test]
    fn warm_entities_go_to_clusters_and_cold_ones_to_attributes_or_all() {
        let router = router(&[]);
        let near_second: Option<&[f32]> = Some(&[4.0, 4.5]);
        let cases = [
            (entity(1, 3, "Drama"), near_second, "user-cluster-1"),
            (entity(1, 2, "Drama"), near_second, "user-genre-drama"),
            (entity(1, 9, "War"), None, "user-genre-war"),
            (entity(1, 9, "War"), Some(&[1.0]), "user-genre-war"),
            (entity(1, 9, "War"), Some(&[f32::NAN, 1.0]), "user-genre-war"),
            (entity(1, 2, "Western"), near_second, "user-all"),
        ];
        for (entity, embedding, pool) in cases {
            assert_eq!(router.route(&entity, embedding), pool);
        }
    }

    #[test]
    fn groups_without_a_pool_give_way_to_the_next() {
        let near_second: Option<&[f32]> = Some(&[4.0, 4.5]);
        let drama = entity(1, 3, "Drama");
        let cases: [(&[&str], &str); 3] = [
            (&["user-cluster-1"], "user-genre-drama"),
            (&["user-cluster-1", "user-genre-drama"], "user-all"),
            (&["user-genre-drama"], "user-cluster-1"),
        ];
        for (without_pool, pool) in cases {
            assert_eq!(router(without_pool).route(&drama, near_second), pool);
        }
    }

    #[test]
    fn random_groups_are_stable_and_even() {
        let mut router = Router::random(Kind::User, 7, 4);
        (0..5).for_each(|group| router.set_has_pool(group));
        let mut counts = BTreeMap::new();
        for id in 0..4000 {
            let pool = router.route(&entity(id, 0, "any"), None);
            assert_eq!(pool, router.route(&entity(id, 50, "other"), Some(&[1.0])));
            *counts.entry(pool).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 4);
        assert!(counts.keys().all(|pool| pool.starts_with("user-random-")), "{counts:?}");
        assert!(counts.values().all(|count| (800..1200).contains(count)), "{counts:?}");
        // Pinned: groups must not move between versions.
        assert_eq!(router.route(&entity(1, 0, ""), None), "user-random-2");
    }

    #[test]
    fn global_sends_everything_to_one_pool() {
        assert_eq!(Router::global(Kind::Item).route(&entity(1, 9, "War"), None), "item-all");
    }

    #[test]
    fn names_are_file_names_and_unique() {
        let labels = ["genre = Sci-Fi", "genre = sci fi", "类型 = 剧情", "genre unknown", "genre = ../x"];
        let labels: Vec<String> = labels.map(str::to_owned).into();
        let tree = AttributeTree::Group(0);
        let router = Router::grouped(Kind::Item, 0, Vec::new(), Some((tree, labels)));
        let names: Vec<_> = router.groups().iter().map(|group| group.name.as_str()).collect();
        let expected = "item-all item-genre-sci-fi item-genre-sci-fi-2 item-group item-genre-unknown item-genre-x";
        assert_eq!(names.join(" "), expected);
        assert_eq!(slug(&"long ".repeat(40)).len(), 64);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn route_is_total_deterministic_and_survives_serialisation(
            id in any::<i64>(),
            interactions in 0u64..6,
            genre in prop::sample::select(vec![json!("Drama"), json!(["War"]), json!(3), Value::Null]),
            embedding in prop::option::of(prop::collection::vec(any::<f32>(), 0..4)),
            scheme in 0..3,
        ) {
            let router = match scheme {
                0 => router(&["user-genre-war"]),
                1 => Router::random(Kind::User, 1, 3),
                _ => Router::global(Kind::User),
            };
            let mut entity = entity(id, interactions, "");
            entity.attributes.insert("genre".to_owned(), genre);
            let pool = router.route(&entity, embedding.as_deref());
            prop_assert!(router.groups().iter().any(|group| group.name == pool));
            let json = serde_json::to_string(&router).unwrap();
            let reread: Router = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(&reread, &router);
            prop_assert_eq!(reread.route(&entity, embedding.as_deref()), pool);
        }
    }
}
