//! What the histories of a night's users say of its items, for drafts of lists.

use anyhow::{Result, ensure};
use bytes::Bytes;
use laser_decode::{Neighbours, NeighboursOptions, Trie, build_neighbours};
use laser_schema::Entity;
use laser_store::TablesReader;
use laser_worker::lists::Counted;

use crate::config::Config;

/// Counts the histories of the input, whose interactions name their items in `field`.
///
/// # Errors
/// A table that cannot be read.
pub(crate) async fn count(config: &Config, field: &str, trie: &Trie) -> Result<Bytes> {
    let mut histories: Vec<Vec<u32>> = Vec::new();
    let mut reader = TablesReader::new(config.input.as_slice());
    while let Some(users) = reader.next_batch().await? {
        let items = |user: &Entity| user.history.items(field).filter_map(|item| trie.find(&item)).collect();
        histories.extend(users.iter().map(items));
    }
    let items = u32::try_from(trie.items())?;
    let built = tokio::task::spawn_blocking(move || {
        build_neighbours(NeighboursOptions::default(), items, histories.into_iter())
    });
    Ok(built.await??.into())
}

/// Opens what was counted for a trie.
///
/// # Errors
/// Damage, and what was counted for another trie.
pub(crate) fn open(bytes: Bytes, trie: &Trie) -> Result<Counted> {
    let neighbours = Neighbours::open(bytes)?;
    neighbours.verify()?;
    ensure!(
        neighbours.items() as usize == trie.items(),
        "counts {} items, the catalogue has {}",
        neighbours.items(),
        trie.items()
    );
    Ok(Counted::new(trie.clone(), neighbours))
}
