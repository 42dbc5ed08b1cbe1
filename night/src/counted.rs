//! What the histories of a night's users say of its items, for drafts of lists: files of a run, on which no list
//! depends. Where the histories of all users would take more than `[run] memory_mb`, those of a share of the users are
//! counted.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use laser_decode::{CodeShares, Neighbours, NeighboursOptions, Trie, build_code_pool, build_neighbours};
use laser_schema::{Entity, EntityId, sample::priority};
use laser_store::TablesReader;
use laser_store::run_store::{CODES, COUNTED};
use laser_worker::lists::Counted;

use crate::config::{Config, HistoryFiles};

/// Bytes that an interaction takes while it is counted, and a history beside them.
const INTERACTION: usize = 20;
const HISTORY: usize = 64;

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
    let mut histories = Histories::within(config.run.memory());
    let mut reader = TablesReader::new(config.input.as_slice());
    while let Some(users) = reader.next_batch().await? {
        let items = |user: &Entity| user.history.items(field).filter_map(|item| trie.find(&item)).collect();
        users.iter().for_each(|user| histories.add(&user.id, items(user)));
    }
    tracing::info!(users = histories.kept.len(), share = histories.share(), "counting histories");
    let (histories, trie): (Vec<_>, _) = (histories.kept.into_iter().map(|(_, items)| items).collect(), trie.clone());
    tokio::task::spawn_blocking(move || built(&histories, &trie, files)).await?
}

/// The histories of all users, or of a share of them that takes no more memory. Who is in the share is a function of
/// the ids, whatever their order.
struct Histories {
    most: usize,
    bytes: usize,
    /// The priority below which users are in the share.
    below: u128,
    kept: Vec<(u128, Vec<u32>)>,
}

impl Histories {
    /// Those that take so many bytes while they are counted.
    fn within(most: usize) -> Self {
        Self { most, bytes: 0, below: u128::MAX, kept: Vec::new() }
    }

    /// Adds a user's, if the user is in the share, and halves the share if that is too much.
    fn add(&mut self, id: &EntityId, items: Vec<u32>) {
        let priority = priority(0, &[id.to_string().as_bytes()]);
        if priority >= self.below {
            return;
        }
        let bytes = |items: &[u32]| HISTORY + items.len() * INTERACTION;
        self.bytes += bytes(&items);
        self.kept.push((priority, items));
        while self.bytes > self.most {
            self.below /= 2;
            self.kept.retain(|(priority, _)| *priority < self.below);
            self.bytes = self.kept.iter().map(|(_, items)| bytes(items)).sum();
        }
    }

    /// The share of all users that is kept.
    fn share(&self) -> f64 {
        self.below as f64 / u128::MAX as f64
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Histories of 0 to 9 items.
    fn histories(most: usize, users: impl Iterator<Item = i64>) -> Histories {
        let mut histories = Histories::within(most);
        users.for_each(|user| histories.add(&EntityId::Int(user), vec![7; usize::try_from(user % 10).unwrap()]));
        histories
    }

    #[test]
    fn all_histories_are_kept_as_long_as_there_is_room() {
        let all = 1000 * HISTORY + 4500 * INTERACTION;
        let kept = histories(all, 0..1000);
        assert_eq!((kept.kept.len(), kept.bytes, kept.share()), (1000, all, 1.0));
        let half = histories(all - 1, 0..1000);
        assert!(half.share() == 0.5 && (400..600).contains(&half.kept.len()), "{}", half.kept.len());
    }

    #[test]
    fn a_share_of_the_users_is_within_the_memory_whatever_their_order() {
        let most = 10_000;
        let [mut forth, mut back] = [histories(most, 0..5000), histories(most, (0..5000).rev())];
        let share = forth.share();
        assert!(forth.bytes <= most && forth.bytes > most / 8 && share < 0.1, "{} {share}", forth.bytes);
        [&mut forth, &mut back].into_iter().for_each(|histories| histories.kept.sort());
        assert_eq!((forth.kept, forth.below, forth.bytes), (back.kept, back.below, back.bytes));
        assert_eq!(histories(HISTORY - 1, 0..3).kept, []);
    }
}
