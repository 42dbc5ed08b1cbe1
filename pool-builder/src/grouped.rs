//! Entities in their groups with a sample of each group's previous texts: the starting point of building and tuning.
//!
//! Memory does not depend on the number of entities and texts. It takes the budget for what is spilled (see
//! [`join`](laser_store::join)), the samples that routers are fitted on, and `max_texts` texts per group. The tables
//! are read three times; of Parquet, first only the ids, then everything but histories, which are counted.

use std::collections::BTreeMap;

use futures::Stream;
use laser_schema::{EntityTable, Kind};
use laser_store::join::{Join, Joined};
use laser_store::previous::PreviousText;

use crate::Progress;
use crate::config::PoolsConfig;
use crate::embeddings::join_embeddings;
use crate::error::PoolsError;
use crate::fit::{self, FittedKind};
use crate::pool_set::TextCounts;
use crate::router::Membership;
use crate::texts::{self, ReadError, SampledKind, Sampler};

/// How many entities of a kind belong to the same groups. Which of these groups provides their pool is known only once
/// all pools are built.
pub(crate) type Members = BTreeMap<Membership, u64>;

/// Entities in their groups, and the sampled texts.
#[derive(Debug)]
pub(crate) struct Grouped {
    pub(crate) kinds: BTreeMap<Kind, FittedKind>,
    pub(crate) samples: BTreeMap<Kind, SampledKind>,
    pub(crate) members: BTreeMap<Kind, Members>,
    pub(crate) counts: TextCounts,
}

/// Fits the routers, routes every entity, and samples at most `capacity` texts of each group.
pub(crate) async fn group<P>(
    tables: &[EntityTable],
    previous: P,
    config: &PoolsConfig,
    memory: usize,
    capacity: impl Fn(Kind) -> usize,
    progress: Progress<'_>,
) -> Result<Grouped, PoolsError>
where
    P: Stream<Item = Result<Vec<PreviousText>, ReadError>>,
{
    config.validate()?;
    let mut join = Join::new(tables, memory).await?;
    if join.kinds().is_empty() {
        let tables: Vec<&str> = tables.iter().map(|table| table.path.as_str()).collect();
        return Err(PoolsError::Input(format!("no entities in {}; there is nothing to group", tables.join(", "))));
    }
    join_embeddings(config, &mut join).await?;
    let mut counts = texts::read(previous, &mut join, progress).await?;
    let capacities = join.kinds().keys().map(|&kind| (kind, capacity(kind)));
    let mut sampler = Sampler::new(config.seed, capacities);
    let joined = join.finish(&mut |kind, id, text| {
        counts.without_entity += 1;
        sampler.offer(kind, &id, &text, std::iter::empty());
    })?;
    let kinds = fit::fit(&joined, config, progress).await?;
    for (&kind, fitted) in &kinds {
        sampler.set_groups(kind, fitted.router.groups().len());
    }
    let members = route(&joined, &kinds, &mut sampler, progress).await?;
    Ok(Grouped { kinds, samples: sampler.kinds, members, counts })
}

/// Routes every entity and counts the members of the groups.
async fn route(
    joined: &Joined,
    kinds: &BTreeMap<Kind, FittedKind>,
    sampler: &mut Sampler,
    progress: Progress<'_>,
) -> Result<BTreeMap<Kind, Members>, PoolsError> {
    let mut members: BTreeMap<Kind, Members> = BTreeMap::new();
    let mut done = 0;
    let mut reader = joined.counting_reader();
    while let Some(entities) = reader.next_batch().await? {
        done += entities.len() as u64;
        for joined in entities {
            let entity = &joined.entity;
            let Some(fitted) = kinds.get(&entity.kind) else {
                continue;
            };
            let membership = fitted.router.membership(entity, entity.embedding.as_deref());
            *members.entry(entity.kind).or_default().entry(membership).or_default() += 1;
            for text in &joined.texts {
                sampler.offer(entity.kind, &entity.id, text, membership.iter().flatten().copied());
            }
        }
        progress(done, Some(joined.rows()), "routing");
    }
    Ok(members)
}
