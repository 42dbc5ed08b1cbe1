//! Fits the routers to the entity tables, then assigns every entity to its groups.
//!
//! Two passes over the tables: the first gathers what grouping looks at, the second asks the router.
//! Memory: 4 bytes an attribute value, the embeddings of the k-means sample, and the id and groups of
//! every entity (about 100 bytes). K-means runs on the calling thread and rayon's.

use std::collections::BTreeMap;

use laser_schema::{Entity, EntityId, EntityReader, EntityTable, Kind};

use crate::attribute_tree::{self, AttributeColumns};
use crate::clusters::{self, Clustering};
use crate::config::{Grouping, GroupingConfig, PoolsConfig};
use crate::embeddings::EntityEmbeddings;
use crate::error::PoolsError;
use crate::pool_set::EmbeddingCounts;
use crate::progress::{BuildProgress, Progress, Stage};
use crate::router::{Membership, Router};
use crate::sample::{Sample, priority};

/// The router of a kind and the groups of all its entities.
#[derive(Debug)]
pub(crate) struct FittedKind {
    pub(crate) router: Router,
    pub(crate) members: BTreeMap<EntityId, Membership>,
    pub(crate) clustering: Option<Clustering>,
    pub(crate) embeddings: Option<EmbeddingCounts>,
}

/// Fits and assigns all kinds of which there are entities.
pub(crate) async fn fit(
    tables: &[EntityTable],
    config: &PoolsConfig,
    progress: Progress<'_>,
) -> Result<BTreeMap<Kind, FittedKind>, PoolsError> {
    config.validate()?;
    let embeddings = EntityEmbeddings::read(config).await?;
    let observed = observe(tables, config, &embeddings, progress).await?;
    if observed.is_empty() {
        let tables = tables
            .iter()
            .map(|table| table.path.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        return Err(PoolsError::NoEntities { tables });
    }
    let total: u64 = observed.values().map(|kind| kind.entities).sum();
    let mut kinds = BTreeMap::new();
    for (number, (kind, observed)) in (0..).zip(observed) {
        progress(BuildProgress {
            stage: Stage::Group,
            done: number,
            total: None,
        });
        kinds.insert(kind, observed.fit(config, &embeddings)?);
    }
    assign(tables, &mut kinds, &embeddings, total, progress).await?;
    Ok(kinds)
}

/// What grouping looks at, of all entities of one kind.
struct Observed<'a> {
    kind: Kind,
    grouping: &'a GroupingConfig,
    seed: u64,
    entities: u64,
    attributes: AttributeColumns,
    with_embedding: u64,
    dimension: usize,
    sample: Sample<Vec<f32>>,
}

async fn observe<'a>(
    tables: &[EntityTable],
    config: &'a PoolsConfig,
    embeddings: &EntityEmbeddings,
    progress: Progress<'_>,
) -> Result<BTreeMap<Kind, Observed<'a>>, PoolsError> {
    let mut kinds = BTreeMap::new();
    let mut done = 0;
    for table in tables {
        let mut reader = EntityReader::open(table).await?;
        while let Some(entities) = reader.next_batch().await? {
            for entity in &entities {
                let kind = entity.kind;
                let observed = kinds
                    .entry(kind)
                    .or_insert_with(|| Observed::new(kind, config));
                observed.push(entity, embeddings.get(entity), &table.path)?;
            }
            done += entities.len() as u64;
            progress(BuildProgress {
                stage: Stage::ReadEntities,
                done,
                total: None,
            });
        }
    }
    Ok(kinds)
}

impl<'a> Observed<'a> {
    fn new(kind: Kind, config: &'a PoolsConfig) -> Self {
        let grouping = config.of(kind);
        Self {
            kind,
            grouping,
            seed: config.seed,
            entities: 0,
            attributes: AttributeColumns::new(&grouping.attributes),
            with_embedding: 0,
            dimension: 0,
            sample: Sample::new(config.kmeans.fit_sample),
        }
    }

    fn push(
        &mut self,
        entity: &Entity,
        embedding: Option<&[f32]>,
        table: &str,
    ) -> Result<(), PoolsError> {
        self.entities += 1;
        if self.grouping.grouping.has_attributes() {
            self.attributes.push(&entity.attributes);
        }
        let Some(embedding) = embedding.filter(|_| self.grouping.grouping.has_clusters()) else {
            return Ok(());
        };
        if self.with_embedding == 0 {
            self.dimension = embedding.len();
        }
        if embedding.len() != self.dimension || self.dimension == 0 {
            return Err(PoolsError::Dimension {
                table: table.to_owned(),
                kind: self.kind,
                id: entity.id.clone(),
                expected: self.dimension,
                found: embedding.len(),
            });
        }
        self.with_embedding += 1;
        if entity.interactions >= min_interactions(self.grouping) {
            let id = entity.id.to_string();
            self.sample
                .offer(priority(self.seed, &[id.as_bytes()]), || embedding.to_vec());
        }
        Ok(())
    }

    fn fit(
        self,
        config: &PoolsConfig,
        embeddings: &EntityEmbeddings,
    ) -> Result<FittedKind, PoolsError> {
        let (centroids, clustering) = self.clusters(config)?;
        let router = match self.grouping.grouping {
            Grouping::Global => Router::global(self.kind),
            Grouping::Random => Router::random(self.kind, self.seed, self.grouping.groups),
            Grouping::Router | Grouping::Collaborative | Grouping::Attribute => {
                let min = min_interactions(self.grouping);
                Router::grouped(self.kind, min, centroids, self.tree()?)
            }
        };
        let counts = |_| {
            let file = embeddings.of(self.kind);
            EmbeddingCounts {
                file: file.map(|file| file.file().to_owned()),
                dimension: self.dimension,
                entities: self.with_embedding,
                unknown: file.map_or(0, |file| file.len() as u64 - self.with_embedding),
            }
        };
        let embeddings = self
            .grouping
            .grouping
            .has_clusters()
            .then_some(())
            .map(counts);
        Ok(FittedKind {
            router,
            members: BTreeMap::new(),
            clustering,
            embeddings,
        })
    }

    /// The router does without clusters where nobody could be in one; `collaborative` has nothing else.
    fn clusters(
        &self,
        config: &PoolsConfig,
    ) -> Result<(Vec<Vec<f32>>, Option<Clustering>), PoolsError> {
        let grouping = self.grouping;
        if self.sample.len() == 0 && grouping.grouping == Grouping::Collaborative {
            return Err(PoolsError::NoEmbeddings {
                kind: self.kind,
                entities: self.entities,
            });
        }
        if self.sample.len() == 0 {
            return Ok((Vec::new(), None));
        }
        let sample: Vec<&[f32]> = self.sample.iter().map(|(_, e)| e.as_slice()).collect();
        let (centroids, clustering) = clusters::fit(
            &sample,
            grouping.clusters,
            &config.kmeans,
            self.seed,
            self.kind,
        )?;
        Ok((centroids, Some(clustering)))
    }

    fn tree(&self) -> Result<Option<(attribute_tree::AttributeTree, Vec<String>)>, PoolsError> {
        if !self.grouping.grouping.has_attributes() {
            return Ok(None);
        }
        if let Some(attribute) = self.attributes.unknown(&self.grouping.attributes) {
            return Err(PoolsError::UnknownAttribute {
                kind: self.kind,
                attribute: attribute.to_owned(),
                available: self.attributes.names().collect::<Vec<_>>().join(", "),
            });
        }
        let grown = attribute_tree::grow(&self.attributes, self.grouping);
        Ok(grown.map(|grown| (grown.tree, grown.labels)))
    }
}

/// With `collaborative` every entity that has an embedding is in a cluster.
fn min_interactions(grouping: &GroupingConfig) -> u64 {
    match grouping.grouping {
        Grouping::Collaborative => 0,
        _ => grouping.min_interactions,
    }
}

async fn assign(
    tables: &[EntityTable],
    kinds: &mut BTreeMap<Kind, FittedKind>,
    embeddings: &EntityEmbeddings,
    total: u64,
    progress: Progress<'_>,
) -> Result<(), PoolsError> {
    let mut done = 0;
    for table in tables {
        let mut reader = EntityReader::open(table).await?;
        while let Some(entities) = reader.next_batch().await? {
            done += entities.len() as u64;
            for entity in entities {
                let Some(fitted) = kinds.get_mut(&entity.kind) else {
                    continue;
                };
                let membership = fitted.router.membership(&entity, embeddings.get(&entity));
                if fitted
                    .members
                    .insert(entity.id.clone(), membership)
                    .is_some()
                {
                    let (kind, id) = (entity.kind, entity.id);
                    return Err(PoolsError::DuplicateEntity {
                        table: table.path.clone(),
                        kind,
                        id,
                    });
                }
            }
            progress(BuildProgress {
                stage: Stage::Route,
                done,
                total: Some(total),
            });
        }
    }
    Ok(())
}
