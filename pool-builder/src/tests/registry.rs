//! Which version is in force, and what of two who promote at once.

use std::path::Path;

use jiff::Timestamp;

use super::*;
use crate::{POOL_SET_FILE, PoolRegistry};

/// A registry with finished sets of these names.
async fn registry(dir: &Path, versions: &[&str]) -> PoolRegistry {
    let output = location(dir);
    for version in versions {
        let file = output.join(&format!("pools/{version}/{POOL_SET_FILE}"));
        let json = format!("{{\"set\": {version:?}}}");
        file.write(json.into()).await.unwrap();
    }
    PoolRegistry::new(&output)
}

async fn promoted(registry: &PoolRegistry) -> String {
    registry.promoted().await.unwrap().choice.version
}

#[tokio::test]
async fn rollbacks_go_back_one_promotion_each() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(dir.path(), &["a", "b", "c", "d"]).await;
    let now = Timestamp::UNIX_EPOCH;
    for version in ["a", "b", "c"] {
        registry.promote(version, now).await.unwrap();
        assert_eq!(promoted(&registry).await, version);
    }
    for version in ["b", "a"] {
        registry.rollback(now).await.unwrap();
        assert_eq!(promoted(&registry).await, version);
    }
    let error = registry.rollback(now).await.unwrap_err();
    assert!(error.to_string().contains("a was the first to be promoted"), "{error}");
    // What was in force before `d` is `a`, not `c`.
    registry.promote("d", now).await.unwrap();
    registry.rollback(now).await.unwrap();
    assert_eq!(promoted(&registry).await, "a");
    let history = registry.history().await.unwrap();
    let versions: String = history.into_iter().map(|p| p.choice.version).collect();
    assert_eq!(versions, "abcbada");
}

#[tokio::test]
async fn of_two_who_promote_at_once_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(dir.path(), &["a", "b"]).await;
    let (a, b) =
        futures::join!(registry.promote("a", Timestamp::UNIX_EPOCH), registry.promote("b", Timestamp::UNIX_EPOCH));
    let winner = promoted(&registry).await;
    // One after the other is no race; at the same moment exactly one wins.
    for (version, outcome) in [("a", a), ("b", b)] {
        match outcome {
            Ok(promotion) => assert_eq!(promotion.version, version),
            Err(error) => {
                assert!(error.to_string().contains("somebody else has just promoted"), "{error}");
                assert_ne!(winner, version);
            }
        }
    }
    let numbers: Vec<u64> = registry.history().await.unwrap().iter().map(|p| p.number).collect();
    assert!(numbers == [1] || numbers == [1, 2], "{numbers:?}");
}

#[tokio::test]
async fn what_cannot_be_promoted_is_told_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(dir.path(), &["a"]).await;
    let now = Timestamp::UNIX_EPOCH;
    let none = registry.promoted().await.unwrap_err().to_string();
    assert!(none.contains("laser pools promote CONFIG VERSION"), "{none}");
    let none = registry.rollback(now).await.unwrap_err().to_string();
    assert!(none.contains("no pool set is promoted"), "{none}");
    for (version, expected) in [
        ("missing", "no finished pool set \"missing\""),
        ("promotions", "is not \"promotions\""),
        ("../a", "letters, digits"),
        ("", "letters, digits"),
    ] {
        let error = registry.promote(version, now).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    registry.promote("a", now).await.unwrap();
    let again = registry.promote("a", now).await.unwrap_err().to_string();
    assert!(again.contains("promoted already"), "{again}");
    let file = dir.path().join("pools/a").join(POOL_SET_FILE);
    std::fs::write(file, "{}").unwrap();
    let changed = registry.promoted().await.unwrap_err().to_string();
    assert!(changed.contains("was changed after it was promoted"), "{changed}");
    assert_eq!(registry.versions().await.unwrap(), ["a"]);
}

#[tokio::test]
async fn a_set_that_was_purged_stays_in_force_and_a_rollback_goes_past_it() {
    let dir = tempfile::tempdir().unwrap();
    let registry = registry(dir.path(), &["a", "b"]).await;
    let now = Timestamp::UNIX_EPOCH;
    registry.renew(now).await.unwrap();
    for version in ["a", "b"] {
        registry.promote(version, now).await.unwrap();
    }
    registry.renew(now).await.unwrap();
    assert_eq!(registry.history().await.unwrap().len(), 2, "nothing was changed");
    std::fs::write(dir.path().join("pools/b").join(POOL_SET_FILE), "{}").unwrap();
    let error = registry.promoted().await.unwrap_err();
    assert!(error.to_string().contains("was changed after it was promoted"), "{error}");
    for _ in 0..2 {
        registry.renew(now).await.unwrap();
        assert_eq!((promoted(&registry).await, registry.history().await.unwrap().len()), ("b".to_owned(), 3));
    }
    registry.rollback(now).await.unwrap();
    assert_eq!(promoted(&registry).await, "a");
}
