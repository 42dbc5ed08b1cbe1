//! Opens a committed folder of pools: local files are mapped, remote ones fetched.
//!
//! Every pool is checked against the model's tokenizer and the digest in `pools.json`, which its header
//! must have: opening reads headers only. Whether the content is what the header says is the matter of
//! [`OpenPools::verify`], one pass over all bytes. Mapped pools cost no memory of their own and are
//! shared by all processes of a machine.

use std::collections::HashMap;

use laser_decode::Pool;
use laser_schema::{Digest, Entity};
use laser_store::map::map;
use laser_store::{Cache, Location};

use crate::error::PoolsError;
use crate::pool_set::{POOL_SET_FILE, POOL_SET_VERSION, PoolEntry, PoolSet};

/// An open set of pools. Pools are cheap to clone.
#[derive(Debug, Clone)]
pub struct OpenPools {
    dir: Location,
    set: PoolSet,
    digest: Digest,
    pools: HashMap<String, Pool>,
}

impl OpenPools {
    /// Opens all pools of `dir` for a model with the tokenizer of this fingerprint.
    ///
    /// # Errors
    /// If there is no finished set, it was built with another tokenizer, or a file is not the one that was written.
    pub async fn open(dir: &Location, tokenizer: &[u8; 32]) -> Result<Self, PoolsError> {
        Self::open_with(dir, tokenizer, None).await
    }

    /// The same, but with a `cache` remote pools are kept there and mapped.
    ///
    /// # Errors
    /// Those of [`OpenPools::open`], and the cache's.
    pub async fn open_with(dir: &Location, tokenizer: &[u8; 32], cache: Option<&Cache>) -> Result<Self, PoolsError> {
        let (set, digest) = read_set(dir).await?;
        let expected = Digest::from_bytes(*tokenizer);
        if set.tokenizer != expected {
            let reason = format!(
                "the pools were built with tokenizer {}, the model's is {expected}; rebuild them with this model's \
                 tokenizer",
                set.tokenizer
            );
            return Err(PoolsError::at(&dir.join(POOL_SET_FILE), reason));
        }
        let mut pools = HashMap::with_capacity(set.pools.len());
        for entry in &set.pools {
            let pool = open_pool(dir, entry, tokenizer, cache).await?;
            pools.insert(entry.name.clone(), pool);
        }
        let dir = dir.clone();
        Ok(Self { dir, set, digest, pools })
    }

    /// Reads every pool whole and compares it with its checksum. Takes a second a gigabyte of its thread; what is
    /// drafted before is safe, but would show damage in worse drafts only.
    ///
    /// # Errors
    /// [`PoolsError::PoolFile`], naming the first damaged pool's file.
    pub fn verify(&self) -> Result<(), PoolsError> {
        for entry in &self.set.pools {
            let file = || self.dir.join(&entry.file).url().to_owned();
            let checked = self.pools.get(&entry.name).map_or(Ok(()), Pool::verify);
            checked.map_err(|source| PoolsError::PoolFile { file: file(), source })?;
        }
        Ok(())
    }

    /// A pool by its name; none if the group has no previous texts.
    pub fn pool(&self, name: &str) -> Option<Pool> {
        self.pools.get(name).cloned()
    }

    /// The name of an entity's pool, by its kind's router; none if the set has no entities of the kind.
    pub fn route(&self, entity: &Entity, embedding: Option<&[f32]>) -> Option<&str> {
        Some(self.set.kinds.get(&entity.kind)?.router.route(entity, embedding))
    }

    /// What `pools.json` says.
    pub fn set(&self) -> &PoolSet {
        &self.set
    }

    /// The digest of `pools.json`, and so of all pools and routers.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }
}

pub(crate) async fn read_set(dir: &Location) -> Result<(PoolSet, Digest), PoolsError> {
    let file = dir.join(POOL_SET_FILE);
    let Some(json) = file.read_optional().await? else {
        let reason = "no pools.json, so there is no finished set of pools; build it with `laser pool-builder`";
        return Err(PoolsError::at(dir, reason.to_owned()));
    };
    let invalid = |reason: String| PoolsError::at(&file, format!("not a set of pools: {reason}; rebuild the pools"));
    let value: serde_json::Value = serde_json::from_slice(&json).map_err(|e| invalid(e.to_string()))?;
    let version = &value["version"];
    if *version != POOL_SET_VERSION {
        return Err(invalid(format!("version {version}, expected {POOL_SET_VERSION}")));
    }
    let set = serde_json::from_value(value).map_err(|e| invalid(e.to_string()))?;
    Ok((set, Digest::of(&json)))
}

async fn open_pool(
    dir: &Location,
    entry: &PoolEntry,
    tokenizer: &[u8; 32],
    cache: Option<&Cache>,
) -> Result<Pool, PoolsError> {
    let location = dir.join(&entry.file);
    let path = match (location.local_path(), cache) {
        (None, Some(cache)) => Some(cache.file(&location, &entry.digest).await?),
        (path, _) => path,
    };
    let bytes = match path {
        Some(path) => {
            let mapped = std::fs::File::open(&path).and_then(|file| map(&file));
            mapped.map_err(|e| PoolsError::at(&location, format!("cannot be mapped: {e}")))?
        }
        None => location.read().await?,
    };
    let wrong = |source| PoolsError::PoolFile { file: location.url().to_owned(), source };
    let pool = Pool::open(bytes).map_err(wrong)?;
    let found = Digest::from_bytes(pool.digest());
    if found != entry.digest {
        let reason = format!("digest {found}, but pools.json has {}; rebuild the pools", entry.digest);
        return Err(PoolsError::at(&location, reason));
    }
    pool.expect_tokenizer(tokenizer).map_err(wrong)?;
    Ok(pool)
}
