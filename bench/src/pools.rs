//! The pools that variants draft from: the same old texts, grouped in different ways.

use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result};
use futures::stream;
use laser_decode::Pool;
use laser_model::ModelFiles;
use laser_night::Progress;
use laser_night::config::RunConfig;
use laser_pool_builder::{
    Attributes, Clusters, Grouping, GroupingConfig, OpenPools, PoolSet, PoolTokenizer, PoolsConfig, build_pools,
    clear_pools, join_embeddings,
};
use laser_schema::embedding::EmbeddingSource;
use laser_schema::{Entity, EntityId, EntityTable, Kind};
use laser_store::Location;
use laser_store::join::Join;
use laser_store::previous::PreviousText;
use laser_terminal::Display;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::SetupArgs;

/// How entities are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PoolScheme {
    /// One pool for all users and one for all items.
    Global,
    /// One pool for all users and one for all items, of texts whose words are in random order: it predicts nothing.
    Shuffled,
    /// As many random groups as there are customised ones with texts.
    Random,
    /// Users by clusters of their embeddings, items by attributes.
    Custom {
        /// Texts of a pool at most.
        max_texts: usize,
    },
}

impl fmt::Display for PoolScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Global => f.write_str("global"),
            Self::Shuffled => f.write_str("shuffled"),
            Self::Random => f.write_str("random"),
            Self::Custom { max_texts } => write!(f, "custom-{max_texts}"),
        }
    }
}

/// A pool that was built.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PoolSummary {
    pub(super) scheme: String,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) texts: usize,
    pub(super) tokens: usize,
    bytes: usize,
    /// Entities of the table that are routed to it.
    members: u64,
}

/// The pools of all schemes.
pub(super) struct Pools {
    schemes: Vec<(PoolScheme, OpenPools)>,
    /// Of the entities of the tables.
    embeddings: HashMap<(Kind, EntityId), Vec<f32>>,
}

impl Pools {
    /// Builds the pools of each scheme from the same texts, below the output folder. Random ones come
    /// after the customised ones, whose number they take.
    pub(super) async fn build(
        setup: &SetupArgs,
        mut schemes: Vec<PoolScheme>,
        tables: &[EntityTable],
        texts: &[PreviousText],
        model: &ModelFiles,
        display: &mut Display,
    ) -> Result<Self> {
        let custom = custom_config(setup);
        custom.validate()?;
        let embeddings = read_embeddings(tables, &custom).await?;
        let mut pools = Self { schemes: Vec::new(), embeddings };
        schemes.sort_by_key(|scheme| *scheme == PoolScheme::Random);
        for scheme in schemes {
            let config = pools.config(scheme, &custom);
            let dir = setup.output.join("pools").join(scheme.to_string());
            let dir = Location::parse(&dir.to_string_lossy())?;
            let texts = match scheme {
                PoolScheme::Shuffled => shuffled(texts, setup.seed),
                _ => texts.to_vec(),
            };
            let previous = stream::iter([Ok(texts)]);
            let mut progress = |done, total, stage: &str| display.update(done, total, stage);
            clear_pools(&dir).await?;
            build_pools(
                tables,
                previous,
                PoolTokenizer::of(model)?,
                &config,
                RunConfig::default().memory(),
                &dir,
                &mut progress,
            )
            .await
            .with_context(|| format!("{scheme} pools (embeddings are given by --user-embeddings and --user-ids)"))?;
            let open = OpenPools::open(&dir, &model.tokenizer.fingerprint()).await?;
            pools.schemes.push((scheme, open));
        }
        Ok(pools)
    }

    fn config(&self, scheme: PoolScheme, custom: &PoolsConfig) -> PoolsConfig {
        let mut config = custom.clone();
        for (kind, grouping) in [(Kind::User, &mut config.user), (Kind::Item, &mut config.item)] {
            match scheme {
                PoolScheme::Global | PoolScheme::Shuffled => grouping.grouping = Grouping::Global,
                PoolScheme::Random => {
                    grouping.grouping = Grouping::Random;
                    grouping.groups = self.custom_groups(kind).max(1);
                }
                PoolScheme::Custom { max_texts } => grouping.max_texts = max_texts,
            }
        }
        config
    }

    /// Groups of the customised pools, built before, that have a pool beside that of everything.
    fn custom_groups(&self, kind: Kind) -> u64 {
        let is_custom = |scheme: &PoolScheme| matches!(scheme, PoolScheme::Custom { .. });
        let custom = self.schemes.iter().find(|(scheme, _)| is_custom(scheme));
        custom.map_or(0, |(_, pools)| group_pools(pools.set(), kind))
    }

    /// An entity's pool under each scheme; none where there are no texts.
    pub(super) fn of(&self, entity: &Entity) -> Vec<(PoolScheme, Option<Pool>)> {
        let embedding = self.embeddings.get(&(entity.kind, entity.id.clone()));
        let embedding = embedding.map(Vec::as_slice);
        let pool = |pools: &OpenPools| pools.pool(pools.route(entity, embedding)?);
        self.schemes.iter().map(|(scheme, pools)| (*scheme, pool(pools))).collect()
    }

    /// All pools of all schemes.
    pub(super) fn summary(&self) -> Vec<PoolSummary> {
        let of_scheme = |(scheme, pools): &(PoolScheme, OpenPools)| -> Vec<PoolSummary> {
            let summary = |entry: &laser_pool_builder::PoolEntry| PoolSummary {
                scheme: scheme.to_string(),
                name: entry.name.clone(),
                kind: entry.kind,
                texts: entry.texts,
                tokens: entry.tokens,
                bytes: entry.bytes,
                members: entry.members,
            };
            pools.set().pools.iter().map(summary).collect()
        };
        self.schemes.iter().flat_map(of_scheme).collect()
    }
}

/// The texts with their words in random order.
fn shuffled(texts: &[PreviousText], seed: u64) -> Vec<PreviousText> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let shuffle = |text: &PreviousText| {
        let mut words: Vec<&str> = text.text.split_whitespace().collect();
        words.shuffle(&mut rng);
        PreviousText { text: words.join(" "), ..text.clone() }
    };
    texts.iter().map(shuffle).collect()
}

async fn read_embeddings(tables: &[EntityTable], config: &PoolsConfig) -> Result<HashMap<(Kind, EntityId), Vec<f32>>> {
    let mut join = Join::new(tables, RunConfig::default().memory()).await?;
    join_embeddings(config, &mut join).await?;
    let joined = join.finish(&mut |_, _, _| {})?;
    let mut embeddings = HashMap::new();
    let mut reader = joined.counting_reader();
    while let Some(entities) = reader.next_batch().await? {
        for Entity { kind, id, embedding, .. } in entities.into_iter().map(|joined| joined.entity) {
            embeddings.extend(embedding.map(|embedding| ((kind, id), embedding)));
        }
    }
    Ok(embeddings)
}

fn group_pools(set: &PoolSet, kind: Kind) -> u64 {
    let all = format!("{kind}-all");
    set.pools.iter().filter(|pool| pool.kind == kind && pool.name != all).count() as u64
}

/// Users by collaboration, items by attributes: the customised pools of the paper.
fn custom_config(setup: &SetupArgs) -> PoolsConfig {
    let npy = setup.user_embeddings.clone().zip(setup.user_ids.clone());
    let embeddings = npy.map(|(npy, ids)| EmbeddingSource::Npy { npy, ids, skip_rows: setup.skip_rows });
    PoolsConfig {
        seed: setup.seed,
        user: GroupingConfig {
            grouping: Grouping::Collaborative,
            clusters: Clusters::Fixed(setup.clusters),
            max_texts: setup.pool_texts,
            embeddings,
            ..GroupingConfig::default()
        },
        item: GroupingConfig {
            grouping: Grouping::Attribute,
            attributes: Attributes::Order(setup.item_attributes.clone()),
            max_texts: setup.pool_texts,
            ..GroupingConfig::default()
        },
        ..PoolsConfig::default()
    }
}
