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
    Attributes, Clusters, Grouping, GroupingConfig, OpenPools, PoolTokenizer, PoolsConfig, build_pools, clear_pools,
    join_embeddings,
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
    /// The same with the runners-up of the texts, of which the others take none.
    Soft,
    /// One pool for all users and one for all items, of texts whose words are in random order: it predicts nothing.
    Shuffled,
    /// The customised pools with their texts dealt out at random: the same sizes and routes, but no likeness.
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
            Self::Soft => f.write_str("soft"),
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
    /// Builds the pools of each scheme from the same texts, below the output folder.
    pub(super) async fn build(
        setup: &SetupArgs,
        schemes: Vec<PoolScheme>,
        tables: &[EntityTable],
        texts: &[PreviousText],
        model: &ModelFiles,
        display: &mut Display,
    ) -> Result<Self> {
        let custom = custom_config(setup);
        custom.validate()?;
        let embeddings = read_embeddings(tables, &custom).await?;
        let mut pools = Self { schemes: Vec::new(), embeddings };
        for scheme in schemes {
            let config = config(scheme, &custom);
            let dir = setup.output.join("pools").join(scheme.to_string());
            let dir = Location::parse(&dir.to_string_lossy())?;
            let texts = match scheme {
                PoolScheme::Shuffled => shuffled(texts, setup.seed),
                PoolScheme::Random => dealt(texts, setup.seed),
                PoolScheme::Soft => texts.to_vec(),
                PoolScheme::Global | PoolScheme::Custom { .. } => texts.iter().map(hard).collect(),
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

fn config(scheme: PoolScheme, custom: &PoolsConfig) -> PoolsConfig {
    let mut config = custom.clone();
    for grouping in [&mut config.user, &mut config.item] {
        match scheme {
            PoolScheme::Global | PoolScheme::Soft | PoolScheme::Shuffled => grouping.grouping = Some(Grouping::Global),
            PoolScheme::Random => {}
            PoolScheme::Custom { max_texts } => grouping.max_texts = max_texts,
        }
    }
    config
}

/// A text of which no more is known than that it was written.
fn hard(text: &PreviousText) -> PreviousText {
    PreviousText { runners_up: Vec::new(), ..text.clone() }
}

/// The texts of each kind, dealt out anew to its entities.
fn dealt(texts: &[PreviousText], seed: u64) -> Vec<PreviousText> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut dealt = Vec::with_capacity(texts.len());
    for kind in Kind::ALL {
        let of_kind: Vec<&PreviousText> = texts.iter().filter(|text| text.kind == kind).collect();
        let mut contents: Vec<&str> = of_kind.iter().map(|text| text.text.as_str()).collect();
        contents.shuffle(&mut rng);
        let deal = |(text, content): (&&PreviousText, &str)| PreviousText { text: content.to_owned(), ..hard(text) };
        dealt.extend(of_kind.iter().zip(contents).map(deal));
    }
    dealt
}

/// The texts with their words in random order.
fn shuffled(texts: &[PreviousText], seed: u64) -> Vec<PreviousText> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let shuffle = |text: &PreviousText| {
        let mut words: Vec<&str> = text.text.split_whitespace().collect();
        words.shuffle(&mut rng);
        PreviousText { text: words.join(" "), ..hard(text) }
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

/// Users by collaboration, items by attributes: the customised pools of the paper.
fn custom_config(setup: &SetupArgs) -> PoolsConfig {
    let npy = setup.user_embeddings.clone().zip(setup.user_ids.clone());
    let embeddings = npy.map(|(npy, ids)| EmbeddingSource::Npy { npy, ids, skip_rows: setup.skip_rows });
    PoolsConfig {
        seed: setup.seed,
        user: GroupingConfig {
            grouping: Some(Grouping::Collaborative),
            clusters: Clusters::Fixed(setup.clusters),
            max_texts: setup.pool_texts,
            embeddings,
            ..GroupingConfig::default()
        },
        item: GroupingConfig {
            grouping: Some(Grouping::Attribute),
            attributes: Attributes::Order(setup.item_attributes.clone()),
            max_texts: setup.pool_texts,
            ..GroupingConfig::default()
        },
        ..PoolsConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use laser_schema::EntityId;

    use super::*;

    #[test]
    fn dealing_keeps_each_kinds_entities_and_its_texts() {
        let text = |kind, id| PreviousText {
            kind,
            id: EntityId::Int(id),
            text: format!("{kind} {id}"),
            runners_up: Vec::new(),
            record: None,
        };
        let texts: Vec<_> = (0..60).map(|id| text(if id % 3 == 0 { Kind::Item } else { Kind::User }, id)).collect();
        let dealt = dealt(&texts, 1);
        for kind in Kind::ALL {
            let of_kind = |texts: &[PreviousText]| texts.iter().filter(|t| t.kind == kind).cloned().collect::<Vec<_>>();
            let (before, after) = (of_kind(&texts), of_kind(&dealt));
            assert!(before.iter().map(|text| &text.id).eq(after.iter().map(|text| &text.id)));
            assert!(before.iter().zip(&after).any(|(before, after)| before.text != after.text));
            let contents = |texts: &[PreviousText]| {
                texts.iter().map(|t| t.text.clone()).collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!(contents(&before), contents(&after));
        }
    }
}
