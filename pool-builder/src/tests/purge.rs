//! Texts leave pools, and a purge that was stopped goes on.

use std::collections::{BTreeSet, HashMap, HashSet};

use laser_decode::{Pool, Token};
use laser_schema::{Digest, EntityId, Kind};

use super::*;
use crate::{OpenPools, TextCounter, find_texts, purge_texts, read_pool_set, read_sources, write_sources};

/// The tokens of the previous texts of some users.
fn tokens(users: impl Fn(i64) -> bool) -> HashSet<Vec<Token>> {
    let of_users = previous().into_iter().filter(|text| matches!(text.id, EntityId::Int(id) if users(id)));
    of_users.map(|text| tokenizer().encode(text.text, false).unwrap().get_ids().to_vec()).collect()
}

fn texts(pool: &Pool) -> HashSet<Vec<Token>> {
    pool.contents().map(|text| text.tokens).collect()
}

#[tokio::test]
async fn texts_leave_every_pool_of_their_kind_and_a_pool_without_texts_goes() {
    let dir = tempfile::tempdir().unwrap();
    let tables = write_tables(dir.path());
    let pools = dir.path().join("pools");
    let before = build(&tables, previous(), &default_config(), &pools).await.unwrap();
    let place = location(&pools);
    // All of one age, and one of another.
    let gone: TextCounter = tokens(|id| id < 30 || id == 31).into_iter().map(|text| (text, 1)).collect();
    let found = find_texts(&place, &before, Kind::User, &gone).await.unwrap();
    let counts: Vec<u64> = found.iter().map(|(_, texts)| *texts).collect();
    assert_eq!(counts, [31, 9, 8, 8, 30, 1], "{found:?}");
    assert!(find_texts(&place, &before, Kind::Item, &gone).await.unwrap().is_empty());
    // Stopped before `pools.json`, and once more.
    let json = std::fs::read(pools.join("pools.json")).unwrap();
    let digests = digests(&pools);
    let digests = digests.iter().map(|(name, digest)| (name.as_str(), digest)).collect();
    purge_texts(&place, Kind::User, &gone, &digests).await.unwrap();
    let purged = std::fs::read(pools.join("pools.json")).unwrap();
    std::fs::write(pools.join("pools.json"), json).unwrap();
    assert!(!pools.join("user-age-18.pool").exists());
    restore_empty(&before, dir.path(), &tables, &pools).await;
    for _ in 0..2 {
        purge_texts(&place, Kind::User, &gone, &digests).await.unwrap();
        assert!(std::fs::read(pools.join("pools.json")).unwrap() == purged);
    }
    let set = OpenPools::open(&place, &FINGERPRINT).await.unwrap();
    set.verify().unwrap();
    let all = set.pool("user-all").unwrap();
    assert_eq!((all.texts(), texts(&all)), (59, tokens(|id| (30..90).contains(&id) && id != 31)));
    let has_pool = |kind: Kind| set.set().kinds[&kind].router.groups().iter().filter(|group| group.has_pool).count();
    assert_eq!([has_pool(Kind::User), has_pool(Kind::Item)], [6, 4]);
    assert_eq!(set.set().pools.len(), before.pools.len() - 1);
    assert_eq!(read_pool_set(&place).await.unwrap(), *set.set());
}

/// Of the files of the users' pools.
fn digests(pools: &Path) -> HashMap<String, Digest> {
    let files = std::fs::read_dir(pools).unwrap().map(|entry| entry.unwrap().path());
    let named = files.map(|path| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), Digest::of(&std::fs::read(path).unwrap()))
    });
    named.filter(|(name, _)| name.starts_with("user-")).collect()
}

/// Puts the pools back that a purge removes last.
async fn restore_empty(set: &PoolSet, dir: &Path, tables: &[EntityTable], pools: &Path) {
    let copy = dir.join("copy");
    assert_eq!(build(tables, previous(), &default_config(), &copy).await.unwrap(), *set);
    for pool in &set.pools {
        if !pools.join(&pool.file).exists() {
            std::fs::copy(copy.join(&pool.file), pools.join(&pool.file)).unwrap();
        }
    }
}

#[tokio::test]
async fn as_many_copies_of_a_text_leave_as_entities_do() {
    let dir = tempfile::tempdir().unwrap();
    let tables = write_tables(dir.path());
    let pools = dir.path().join("pools");
    let mut same = previous();
    let text = same[0].text.clone();
    same.iter_mut().take(4).for_each(|previous| previous.text.clone_from(&text));
    let config = config(json!({"user": {"grouping": "global"}, "item": {"grouping": "global"}}));
    build(&tables, same, &config, &pools).await.unwrap();
    let gone: TextCounter = tokens(|id| id == 0).into_iter().map(|text| (text, 3)).collect();
    let digests = digests(&pools);
    let digests = digests.iter().map(|(name, digest)| (name.as_str(), digest)).collect();
    for _ in 0..2 {
        purge_texts(&location(&pools), Kind::User, &gone, &digests).await.unwrap();
        let set = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap();
        let all = set.pool("user-all").unwrap();
        assert_eq!(all.texts(), 87);
        assert_eq!(all.contents().filter(|text| gone.contains_key(&text.tokens)).count(), 1, "another user's");
    }
}

#[tokio::test]
async fn a_set_says_what_it_was_built_from() {
    let dir = tempfile::tempdir().unwrap();
    let place = location(dir.path());
    assert_eq!(read_sources(&place).await.unwrap(), None);
    let sources = BTreeSet::from(["profiles/kind=user/dt=2026-01-01/run=r".to_owned()]);
    write_sources(&place, &sources).await.unwrap();
    assert_eq!(read_sources(&place).await.unwrap(), Some(sources));
    std::fs::write(dir.path().join("sources.json"), "{").unwrap();
    let error = read_sources(&place).await.unwrap_err().to_string();
    assert!(error.contains("sources.json: not the sources of a pool set"), "{error}");
}
