//! Texts that leave a pool set although a set never changes otherwise: those of erased entities.
//!
//! A pool knows tokens and not whose they are. So of each text as many copies leave as erased entities have it in the
//! nights that the set was built from; what is left of the same text is then others'. That needs the sources of the
//! set, which it names in `sources.json`, and all of them must still be there.
//!
//! A purge may be killed anywhere and repeated: `pools.json`, which names the pools by their digests, is written after
//! them, and pools that are empty are removed last.

use std::collections::{BTreeSet, HashMap, HashSet};

use bytes::Bytes;
use laser_decode::{Pool, PoolText, Token, build_pool};
use laser_schema::{Digest, Kind};
use laser_store::Location;

use crate::build::EXTENSION;
use crate::error::PoolsError;
use crate::open::read_set;
use crate::pool_set::{POOL_SET_FILE, PoolEntry, PoolSet};

/// The file of a pool set that names what it is built from. It is there before any text is read for the set.
pub const POOL_SOURCES_FILE: &str = "sources.json";

/// Writes what the set in a folder is built from: folders below the output, or other places by URL.
///
/// # Errors
/// The store's.
pub async fn write_sources(dir: &Location, sources: &BTreeSet<String>) -> Result<(), PoolsError> {
    let json = serde_json::to_vec_pretty(sources).unwrap_or_default();
    Ok(dir.join(POOL_SOURCES_FILE).write(json.into()).await?)
}

/// What a set was built from; `None` if it does not say.
///
/// # Errors
/// The store's, and a file that holds something else.
pub async fn read_sources(dir: &Location) -> Result<Option<BTreeSet<String>>, PoolsError> {
    let file = dir.join(POOL_SOURCES_FILE);
    let Some(json) = file.read_optional().await? else {
        return Ok(None);
    };
    let sources = serde_json::from_slice(&json);
    sources.map(Some).map_err(|e| PoolsError::at(&file, format!("not the sources of a pool set: {e}; remove it")))
}

/// The contents of a set's `pools.json`.
///
/// # Errors
/// If the set is not finished or was written by another version.
pub async fn read_pool_set(dir: &Location) -> Result<PoolSet, PoolsError> {
    Ok(read_set(dir).await?.0)
}

/// Texts by their tokens, and how many entities have each.
pub type TextCounter = HashMap<Vec<Token>, usize>;

/// The files of a set's pools that hold any of these texts of a kind, with how many copies would leave each. Reads
/// every pool of the kind.
///
/// # Errors
/// The store's, and a pool that is damaged.
pub async fn find_texts(
    dir: &Location,
    set: &PoolSet,
    kind: Kind,
    texts: &TextCounter,
) -> Result<Vec<(String, u64)>, PoolsError> {
    let mut found = Vec::new();
    if texts.is_empty() {
        return Ok(found);
    }
    for entry in set.pools.iter().filter(|entry| entry.kind == kind) {
        let (_, pool) = read_pool(dir, entry).await?;
        let leaving = pool.texts() - staying(&pool, texts).len();
        if leaving > 0 {
            found.push((entry.file.clone(), leaving as u64));
        }
    }
    Ok(found)
}

/// Takes these texts of a kind out of a set's pools: those files that are as in `before`, since others were purged by a
/// call that was stopped. A pool without any text left is removed, and its group drafts from the pool of all.
///
/// # Errors
/// The store's, and a pool that is damaged; the same call goes on.
pub async fn purge_texts(
    dir: &Location,
    kind: Kind,
    texts: &TextCounter,
    before: &HashMap<&str, &Digest>,
) -> Result<(), PoolsError> {
    let mut set = read_pool_set(dir).await?;
    let unpurged = set.clone();
    let mut pools = Vec::new();
    for entry in std::mem::take(&mut set.pools) {
        let before = before.get(entry.file.as_str()).filter(|_| entry.kind == kind);
        let Some(before) = before else {
            pools.push(entry);
            continue;
        };
        match purge_pool(dir, &entry, texts, before).await? {
            Some(entry) => pools.push(entry),
            None => set.kinds.values_mut().for_each(|groups| groups.router.remove_pool(&entry.name)),
        }
    }
    set.pools = pools;
    if set != unpurged {
        let json = serde_json::to_vec_pretty(&set).unwrap_or_default();
        dir.join(POOL_SET_FILE).write(json.into()).await?;
    }
    remove_unnamed(dir, &set).await
}

/// Removes the pools that `pools.json` does not name.
async fn remove_unnamed(dir: &Location, set: &PoolSet) -> Result<(), PoolsError> {
    let named: HashSet<&str> = set.pools.iter().map(|entry| entry.file.as_str()).collect();
    for listed in dir.list().await? {
        if listed.name.ends_with(EXTENSION) && !named.contains(listed.name.as_str()) {
            dir.join(&listed.name).remove().await?;
        }
    }
    Ok(())
}

/// The pool's entry once the texts are gone; `None` if no text is left.
async fn purge_pool(
    dir: &Location,
    entry: &PoolEntry,
    texts: &TextCounter,
    before: &Digest,
) -> Result<Option<PoolEntry>, PoolsError> {
    let (digest, mut pool) = read_pool(dir, entry).await?;
    if digest == *before {
        let staying = staying(&pool, texts);
        if staying.is_empty() {
            return Ok(None);
        }
        let bytes = Bytes::from(build_pool(pool.meta(), staying)?);
        dir.join(&entry.file).write(bytes.clone()).await?;
        pool = Pool::open(bytes)?;
    }
    Ok(Some(PoolEntry {
        digest: Digest::from_bytes(pool.digest()),
        texts: pool.texts(),
        tokens: pool.tokens(),
        bytes: pool.size_bytes(),
        ..entry.clone()
    }))
}

/// The texts of a pool of which, for each text, as many copies have left as there are entities to leave.
fn staying(pool: &Pool, leaving: &TextCounter) -> Vec<PoolText> {
    let mut leaving: HashMap<&[Token], usize> = leaving.iter().map(|(text, count)| (text.as_slice(), *count)).collect();
    let stays = |text: &PoolText| match leaving.get_mut(text.tokens.as_slice()) {
        Some(count @ 1..) => {
            *count -= 1;
            false
        }
        _ => true,
    };
    pool.contents().filter(stays).collect()
}

/// A pool with the digest of its file.
async fn read_pool(dir: &Location, entry: &PoolEntry) -> Result<(Digest, Pool), PoolsError> {
    let file = dir.join(&entry.file);
    let wrong = |source| PoolsError::PoolFile { file: file.url().to_owned(), source };
    let bytes = file.read().await?;
    let digest = Digest::of(&bytes);
    let pool = Pool::open(bytes).map_err(wrong)?;
    pool.verify().map_err(wrong)?;
    Ok((digest, pool))
}
