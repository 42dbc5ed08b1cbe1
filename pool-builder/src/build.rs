//! Builds all pools of a night and writes them as one committed folder.
//!
//! The folder holds a `.pool` file per group that has previous texts, and `pools.json`, which is written last: without
//! it the folder is not a pool set. The same inputs give the same bytes, so two processes that build one folder at the
//! same time do no harm.
//!
//! An attribute group's pool takes the texts of all entities with those attributes, including those that the router
//! sends to a cluster. It serves cold and new entities, which have few texts of their own.
//!
//! Memory grows with groups, not with rows: see [`grouped`](crate::grouped).

use bytes::Bytes;
use futures::Stream;
use laser_decode::{Pool, PoolMeta, PoolText, build_pool};
use laser_schema::{Digest, EntityTable, Kind};
use laser_store::Location;
use laser_store::previous::PreviousText;

use crate::Progress;
use crate::config::PoolsConfig;
use crate::error::PoolsError;
use crate::fit::FittedKind;
use crate::grouped::{Grouped, Members, group};
use crate::pool_set::{GroupStatistics, KindGroups, POOL_SET_FILE, POOL_SET_VERSION, PoolEntry, PoolSet};
use crate::router::ALL;
use crate::texts::{self, PoolTokenizer, ReadError, SampledKind};

/// The extension of pool files.
pub(crate) const EXTENSION: &str = ".pool";

/// Groups the entities of `tables`, builds a pool per group from `previous` (in any order, in batches of any size) and
/// writes everything into `dir`. To remove pools of other inputs there, call [`clear_pools`] first. Beyond about
/// `memory` bytes, entities and texts are spilled to the local disk.
///
/// Fitting, tokenising and building run on the calling thread between awaits; fitting and tokenising also use rayon's
/// threads.
///
/// # Errors
/// Any invalid input; see [`PoolsError`]. Having no previous text at all is not an error: the set then has no pools.
pub async fn build_pools<P>(
    tables: &[EntityTable],
    previous: P,
    tokenizer: PoolTokenizer<'_>,
    config: &PoolsConfig,
    memory: usize,
    dir: &Location,
    progress: Progress<'_>,
) -> Result<PoolSet, PoolsError>
where
    P: Stream<Item = Result<Vec<PreviousText>, ReadError>>,
{
    let capacity = |kind: Kind| config.of(kind).max_texts;
    let Grouped { mut kinds, samples, members, counts } =
        group(tables, previous, config, memory, capacity, progress).await?;
    let tokens = texts::tokenise(&samples, tokenizer.tokenizer, progress)?;
    let mut writer = PoolWriter { dir, tokenizer, written: Vec::new() };
    let total = samples.values().map(|sampled| sampled.groups.len() as u64).sum();
    let mut done = 0;
    for (kind, fitted) in &mut kinds {
        for group in 0..fitted.router.groups().len() {
            let texts = samples[kind].tokens(group, &tokens);
            if !texts.is_empty() {
                writer.write(*kind, &fitted.router.groups()[group].name, texts).await?;
                fitted.router.set_has_pool(group);
            }
            done += 1;
            progress(done, Some(total), "writing pools");
        }
    }
    let mut set = PoolSet {
        version: POOL_SET_VERSION,
        tokenizer: Digest::from_bytes(tokenizer.fingerprint),
        config: config.clone(),
        texts: counts,
        kinds: kinds
            .into_iter()
            .map(|(kind, fitted)| (kind, summary(fitted, &members[&kind], &samples[&kind])))
            .collect(),
        pools: writer.written,
    };
    count_members(&mut set);
    let file = dir.join(POOL_SET_FILE);
    let json = serde_json::to_vec_pretty(&set);
    let json = json.map_err(|e| PoolsError::at(&file, format!("cannot be written: {e}")))?;
    file.write(json.into()).await?;
    Ok(set)
}

/// Uncommits a folder, then removes its pools. Processes that have them mapped keep them.
///
/// # Errors
/// The store's.
pub async fn clear_pools(dir: &Location) -> Result<(), PoolsError> {
    dir.join(POOL_SET_FILE).remove().await?;
    for object in dir.list().await? {
        if object.name.ends_with(EXTENSION) && !object.name.contains('/') {
            dir.join(&object.name).remove().await?;
        }
    }
    Ok(())
}

struct PoolWriter<'a> {
    dir: &'a Location,
    tokenizer: PoolTokenizer<'a>,
    written: Vec<PoolEntry>,
}

impl PoolWriter<'_> {
    async fn write(&mut self, kind: Kind, name: &str, texts: Vec<PoolText>) -> Result<(), PoolsError> {
        let bytes = Bytes::from(build_pool(&self.tokenizer.pool_meta(name), texts)?);
        let pool = Pool::open(bytes.clone())?;
        pool.verify()?;
        let file = format!("{name}{EXTENSION}");
        self.written.push(PoolEntry {
            name: name.to_owned(),
            kind,
            digest: Digest::from_bytes(pool.digest()),
            texts: pool.texts(),
            tokens: pool.tokens(),
            bytes: bytes.len(),
            members: 0,
            file: file.clone(),
        });
        Ok(self.dir.join(&file).write(bytes).await?)
    }
}

impl PoolTokenizer<'_> {
    /// Returns the description of a pool of this tokenizer.
    pub(crate) fn pool_meta(&self, name: &str) -> PoolMeta {
        PoolMeta {
            name: name.to_owned(),
            tokenizer: self.fingerprint,
            vocab_size: self.vocab_size,
            end_of_text: self.end_of_text,
        }
    }
}

fn summary(fitted: FittedKind, members: &Members, sampled: &SampledKind) -> KindGroups {
    let FittedKind { router, clustering, embeddings } = fitted;
    let of_group = |&texts: &u64| GroupStatistics { texts, ..Default::default() };
    let mut statistics: Vec<GroupStatistics> = sampled.offered.iter().map(of_group).collect();
    for (membership, &entities) in members {
        for group in membership.iter().flatten().chain([&ALL]) {
            statistics[*group].entities += entities;
        }
        statistics[router.resolve(membership)].routed += entities;
    }
    KindGroups { entities: statistics[ALL].entities, router, statistics, clustering, embeddings }
}

/// Names are unique over the kinds, because each begins with its kind.
fn count_members(set: &mut PoolSet) {
    for groups in set.kinds.values() {
        for (group, statistics) in groups.router.groups().iter().zip(&groups.statistics) {
            for pool in set.pools.iter_mut().filter(|pool| pool.name == group.name) {
                pool.members = statistics.routed;
            }
        }
    }
}
