//! Opening and inspecting what was built.

use super::*;
use crate::{GroupInspection, OpenPools, POOL_SET_FILE, inspect};

#[tokio::test]
async fn opened_pools_are_those_that_were_built() {
    let (_dir, pools, set) = built().await;
    let open = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap();
    assert_eq!(open.set(), &set);
    for entry in &set.pools {
        let pool = open.pool(&entry.name).unwrap();
        assert_eq!((pool.name(), pool.texts(), pool.tokens()), (&*entry.name, entry.texts, entry.tokens));
    }
    assert!(open.pool("user-cluster-9").is_none());
}

#[tokio::test]
async fn what_was_not_written_like_this_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pools = dir.path().join("pools");
    let open = || async {
        let opened = OpenPools::open(&location(&pools), &FINGERPRINT).await;
        opened.unwrap_err().to_string()
    };
    assert!(open().await.contains("no pools.json"), "{}", open().await);
    build(&write_tables(dir.path()), previous(), &default_config(), &pools).await.unwrap();
    let other = OpenPools::open(&location(&pools), &[8; 32]).await.unwrap_err().to_string();
    assert!(other.contains("built with tokenizer 0707") && other.contains("model's is 0808"), "{other}");

    let (pool, json) = (pools.join("user-cluster-1.pool"), pools.join(POOL_SET_FILE));
    let (good, good_json) = (std::fs::read(&pool).unwrap(), std::fs::read_to_string(&json).unwrap());
    let mut flipped = good.clone();
    flipped[50] ^= 1;
    std::fs::write(&pool, flipped).unwrap();
    assert!(open().await.contains("user-cluster-1.pool: pool file is damaged"), "{}", open().await);
    std::fs::copy(pools.join("user-cluster-2.pool"), &pool).unwrap();
    assert!(open().await.contains("user-cluster-1.pool: digest"), "{}", open().await);
    std::fs::remove_file(&pool).unwrap();
    assert!(open().await.contains("user-cluster-1.pool"), "{}", open().await);
    std::fs::write(&pool, good).unwrap();

    for (from, to, message) in [
        ("\"version\": 1", "\"version\": 2", "version 2, expected 1"),
        ("\"texts\"", "\"text\"", "missing field `texts`"),
        ("{", "", "not a set of pools"),
    ] {
        std::fs::write(&json, good_json.replacen(from, to, 1)).unwrap();
        assert!(open().await.contains(message), "{}", open().await);
    }
}

#[tokio::test]
async fn a_pool_file_of_an_earlier_format_is_to_be_built_again() {
    let (_dir, pools, _) = built().await;
    let pool = pools.join("user-cluster-1.pool");
    let mut earlier = std::fs::read(&pool).unwrap();
    // The version behind the magic number.
    earlier[8..12].copy_from_slice(&3u32.to_le_bytes());
    std::fs::write(&pool, earlier).unwrap();
    let error = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap_err().to_string();
    assert!(error.contains("user-cluster-1.pool: pool file has format version 3, this build reads"), "{error}");
    assert!(error.ends_with("rebuild the pool"), "{error}");
}

#[tokio::test]
async fn damage_that_opening_does_not_see_is_found_by_verifying() {
    let (_dir, pools, _) = built().await;
    let open = || async { OpenPools::open(&location(&pools), &FINGERPRINT).await };
    open().await.unwrap().verify().unwrap();
    let pool = pools.join("user-cluster-1.pool");
    let mut flipped = std::fs::read(&pool).unwrap();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&pool, flipped).unwrap();
    let error = open().await.unwrap().verify().unwrap_err().to_string();
    assert!(error.contains("user-cluster-1.pool: pool file is damaged: checksum"), "{error}");
}

#[tokio::test]
async fn inspection_shows_groups_sizes_and_branches() {
    let (_dir, pools, _) = built().await;
    let open = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap();
    let inspection = inspect(&open, &tokenizer(), 5, 2).unwrap();
    let users = &inspection.kinds[0];
    assert!(users.clustering.as_ref().unwrap().candidates[0].silhouette.unwrap() > 0.8);
    let GroupInspection { group, statistics } = &users.groups[4];
    assert_eq!((group.name.as_str(), group.label.as_str()), ("user-age-18", "age = 18"));
    assert_eq!((statistics.entities, statistics.routed, group.has_pool), (30, 6, true));
    let pool = &inspection.pools[1];
    assert_eq!((pool.entry.name.as_str(), pool.entry.texts, pool.entry.tokens), ("user-cluster-0", 24, 264));
    assert!((11.0..12.0).contains(&pool.bytes_per_token), "{}", pool.bytes_per_token);
    // Every text of a cluster starts with the same five words.
    assert_eq!((pool.branches.len(), pool.branches[0].count), (2, 24));
    assert_eq!(pool.branches[0].text.split(' ').count(), 5);
    assert!(serde_json::to_string(&inspection).unwrap().contains("\"silhouette\""));
}
