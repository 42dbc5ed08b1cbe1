//! Fits the routers to the entities.
//!
//! One pass over the tables gathers the inputs of grouping. Memory holds two samples: the embeddings of `[pools.kmeans]
//! fit_sample` entities, and the attributes (4 bytes per value, and each distinct value) of [`ATTRIBUTE_SAMPLE`]
//! entities. K-means runs on the calling thread and rayon's.

use std::collections::BTreeMap;

use laser_schema::{Entity, EntityId, Kind};
use laser_store::join::{ExternalEmbeddings, Joined};

use crate::Progress;
use crate::attribute_tree::{self, AttributeColumns};
use crate::clusters::{self, Clustering};
use crate::config::{Grouping, GroupingConfig, PoolsConfig};
use crate::error::PoolsError;
use crate::pool_set::EmbeddingCounts;
use crate::router::Router;
use laser_schema::sample::{Sample, priority};

/// The attribute tree is grown on about this many entities of a kind. With more entities its groups have a thousand
/// entities or more, so the sizes in a sample are good enough.
const ATTRIBUTE_SAMPLE: u64 = 200_000;

/// The router of a kind.
#[derive(Debug)]
pub(crate) struct FittedKind {
    pub(crate) router: Router,
    pub(crate) clustering: Option<Clustering>,
    pub(crate) embeddings: Option<EmbeddingCounts>,
}

/// Fits all kinds that have entities.
pub(crate) async fn fit(
    joined: &Joined,
    config: &PoolsConfig,
    progress: Progress<'_>,
) -> Result<BTreeMap<Kind, FittedKind>, PoolsError> {
    let observed = observe(joined, config, progress).await?;
    let mut kinds = BTreeMap::new();
    for (number, (kind, observed)) in (0..).zip(observed) {
        progress(number, None, "grouping");
        kinds.insert(kind, observed.fit(config, joined.embeddings(kind))?);
    }
    Ok(kinds)
}

/// The inputs of grouping for all entities of one kind.
struct Observed<'a> {
    kind: Kind,
    grouping: &'a GroupingConfig,
    seed: u64,
    entities: u64,
    /// Share of the entities whose attributes are used.
    attribute_share: f64,
    attributes: AttributeColumns,
    with_embedding: u64,
    dimension: usize,
    sample: Sample<Vec<f32>>,
}

async fn observe<'a>(
    joined: &Joined,
    config: &'a PoolsConfig,
    progress: Progress<'_>,
) -> Result<BTreeMap<Kind, Observed<'a>>, PoolsError> {
    let kinds = joined.kinds().iter();
    let mut kinds: BTreeMap<Kind, Observed> =
        kinds.map(|(&kind, ids)| (kind, Observed::new(kind, ids.entities, config))).collect();
    let mut done = 0;
    let mut reader = joined.counting_reader();
    while let Some(entities) = reader.next_batch().await? {
        for joined in &entities {
            if let Some(observed) = kinds.get_mut(&joined.entity.kind) {
                observed.push(&joined.entity, reader.table())?;
            }
        }
        done += entities.len() as u64;
        progress(done, Some(joined.rows()), "reading entities");
    }
    Ok(kinds)
}

impl<'a> Observed<'a> {
    fn new(kind: Kind, entities: u64, config: &'a PoolsConfig) -> Self {
        let grouping = config.of(kind);
        Self {
            kind,
            grouping,
            seed: config.seed,
            entities,
            attribute_share: (ATTRIBUTE_SAMPLE as f64 / entities as f64).min(1.0),
            attributes: AttributeColumns::new(&grouping.attributes),
            with_embedding: 0,
            dimension: 0,
            sample: Sample::new(config.kmeans.fit_sample),
        }
    }

    fn push(&mut self, entity: &Entity, table: &str) -> Result<(), PoolsError> {
        if self.grouping.grouping().has_attributes() {
            let sampled = is_sampled(self.seed, &entity.id, self.attribute_share);
            self.attributes.push(&entity.attributes, sampled);
        }
        let embedding = entity.embedding.as_deref();
        let Some(embedding) = embedding.filter(|_| self.grouping.grouping().has_clusters()) else {
            return Ok(());
        };
        if self.with_embedding == 0 {
            self.dimension = embedding.len();
        }
        if embedding.len() != self.dimension || self.dimension == 0 {
            return Err(PoolsError::Input(format!(
                "{table}: embedding of {} {} has {} values, expected {} as in those before, at least 1",
                self.kind,
                entity.id,
                embedding.len(),
                self.dimension
            )));
        }
        self.with_embedding += 1;
        if entity.interactions >= min_interactions(self.grouping) {
            let id = entity.id.to_string();
            self.sample.offer(priority(self.seed, &[id.as_bytes()]), || embedding.to_vec());
        }
        Ok(())
    }

    fn fit(self, config: &PoolsConfig, external: Option<&ExternalEmbeddings>) -> Result<FittedKind, PoolsError> {
        let (centroids, clustering) = self.clusters(config)?;
        let router = match self.grouping.grouping() {
            Grouping::Global => Router::global(self.kind),
            Grouping::Random => Router::random(self.kind, self.seed, self.grouping.groups),
            Grouping::Router | Grouping::Collaborative | Grouping::Attribute => {
                let min = min_interactions(self.grouping);
                Router::grouped(self.kind, min, centroids, self.tree()?)
            }
        };
        let counts = || EmbeddingCounts {
            file: external.map(|external| external.file.clone()),
            dimension: self.dimension,
            entities: self.with_embedding,
            unknown: external.map_or(0, |external| external.rows - self.with_embedding),
        };
        Ok(FittedKind { router, clustering, embeddings: self.grouping.grouping().has_clusters().then(counts) })
    }

    /// The router has no clusters if no entity could be in one; `collaborative` requires them.
    fn clusters(&self, config: &PoolsConfig) -> Result<(Vec<Vec<f32>>, Option<Clustering>), PoolsError> {
        let grouping = self.grouping;
        if self.sample.is_empty() && grouping.grouping() == Grouping::Collaborative {
            return Err(PoolsError::Input(format!(
                "[pools.{kind}] grouping = \"collaborative\": none of {} {kind}s has an embedding; set [pools.{kind}] \
                 embeddings or the table's embedding column, or group by attribute",
                self.entities,
                kind = self.kind
            )));
        }
        if self.sample.is_empty() {
            return Ok((Vec::new(), None));
        }
        let sample: Vec<&[f32]> = self.sample.iter().map(|(_, e)| e.as_slice()).collect();
        let (centroids, clustering) = clusters::fit(&sample, grouping.clusters, &config.kmeans, self.seed, self.kind)?;
        Ok((centroids, Some(clustering)))
    }

    fn tree(&self) -> Result<Option<attribute_tree::Grown>, PoolsError> {
        if !self.grouping.grouping().has_attributes() {
            return Ok(None);
        }
        if let Some(attribute) = self.attributes.unknown(&self.grouping.attributes) {
            let available = self.attributes.names().collect::<Vec<_>>().join(", ");
            return Err(PoolsError::Input(format!(
                "[pools.{kind}] attributes: no {kind} has {attribute:?}; they have: {available}",
                kind = self.kind
            )));
        }
        Ok(attribute_tree::grow(&self.attributes, self.grouping, self.attribute_share))
    }
}

/// With `collaborative`, every entity that has an embedding is in a cluster.
fn min_interactions(grouping: &GroupingConfig) -> u64 {
    match grouping.grouping() {
        Grouping::Collaborative => 0,
        _ => grouping.min_interactions,
    }
}

/// Makes a seeded choice of a share of the entities, independent of their order.
fn is_sampled(seed: u64, id: &EntityId, share: f64) -> bool {
    if share >= 1.0 {
        return true;
    }
    let hash = priority(seed, &[b"attributes", id.to_string().as_bytes()]);
    (hash as f64) < share * u128::MAX as f64
}
