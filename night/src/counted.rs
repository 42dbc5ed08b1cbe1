//! What the histories of a night's users say of its items, for drafts of lists: files of a run, on which no list
//! depends.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use laser_decode::{CodeShares, Neighbours, NeighboursOptions, Trie, build_code_pool, build_neighbours};
use laser_schema::Entity;
use laser_store::TablesReader;
use laser_store::run_store::{CODES, COUNTED};
use laser_worker::lists::Counted;

use crate::config::{Config, HistoryFiles};

/// Makes files of the histories of the input, whose interactions name their items in `field`. Returns their names and
/// bytes.
///
/// # Errors
/// A table that cannot be read, and more histories than a file holds.
pub(crate) async fn build(
    config: &Config,
    field: &str,
    trie: &Trie,
    files: HistoryFiles,
) -> Result<Vec<(&'static str, Bytes)>> {
    let mut histories: Vec<Vec<u32>> = Vec::new();
    let mut reader = TablesReader::new(config.input.as_slice());
    while let Some(users) = reader.next_batch().await? {
        let items = |user: &Entity| user.history.items(field).filter_map(|item| trie.find(&item)).collect();
        histories.extend(users.iter().map(items));
    }
    let trie = trie.clone();
    tokio::task::spawn_blocking(move || built(&histories, &trie, files)).await?
}

fn built(histories: &[Vec<u32>], trie: &Trie, files: HistoryFiles) -> Result<Vec<(&'static str, Bytes)>> {
    let mut built = Vec::new();
    if files.counted {
        let items = u32::try_from(trie.items())?;
        let bytes = build_neighbours(NeighboursOptions::default(), items, histories.iter())?;
        built.push((COUNTED, Bytes::from(bytes)));
    }
    if files.codes {
        let bytes =
            build_code_pool(trie, histories).context("[lists] draft: for so many, choose \"knn\" or \"trie\"")?;
        built.push((CODES, Bytes::from(bytes)));
    }
    Ok(built)
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

/// Opens the histories as codes of a trie.
///
/// # Errors
/// Damage, and the codes of another trie.
pub(crate) async fn open_codes(bytes: Bytes, trie: &Trie) -> Result<CodeShares> {
    let trie = trie.clone();
    Ok(tokio::task::spawn_blocking(move || CodeShares::open(bytes, trie)).await??)
}
