//! Building: same inputs, same bytes; who belongs where; bad input.

use std::collections::BTreeMap;
use std::path::PathBuf;

use laser_schema::{EntityTable, Kind};
use laser_store::EntityReader;
use serde_json::{Value, json};

use super::*;
use crate::{OpenPools, TextCounts, clear_pools};

/// Input tables and a folder for pools.
fn folders() -> (tempfile::TempDir, Vec<EntityTable>, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let tables = write_tables(dir.path());
    let pools = dir.path().join("pools");
    (dir, tables, pools)
}

fn pool_names(set: &PoolSet) -> Vec<&str> {
    set.pools.iter().map(|pool| pool.name.as_str()).collect()
}

#[tokio::test]
async fn router_config_gives_clusters_attribute_groups_and_a_pool_of_everything() {
    let (_dir, tables, pools) = folders();
    let set = build(&tables, previous(), &default_config(), &pools).await.unwrap();
    let users = "user-all user-cluster-0 user-cluster-1 user-cluster-2 user-age-18 user-age-25 user-age-35";
    let items = "item-all item-genres-comedy item-genres-drama item-genres-film-noir";
    assert_eq!(pool_names(&set).join(" "), format!("{users} {items}"));
    let users = &set.kinds[&Kind::User];
    assert_eq!((users.entities, users.statistics[0].entities, users.statistics[0].routed), (90, 90, 0));
    // 24 of each cluster's 30 are warm; the 6 cold of each age go to their age's pool.
    let (entities, routed): (Vec<_>, Vec<_>) = users.statistics[1..].iter().map(|s| (s.entities, s.routed)).unzip();
    assert_eq!(entities, [24, 24, 24, 30, 30, 30]);
    assert_eq!(routed, [24, 24, 24, 6, 6, 6]);
    let members: u64 = set.pools.iter().map(|pool| pool.members).sum();
    assert_eq!(members, 150);
    assert_eq!(users.clustering.as_ref().unwrap().k, 3);
    assert_eq!(set.texts, TextCounts { read: 150, ..Default::default() });
    let all = &set.pools[0];
    // 10 words and the end in each of 90 texts.
    assert_eq!((all.texts, all.tokens, all.kind), (90, 990, Kind::User));
    assert_eq!(all.bytes, std::fs::read(pools.join(&all.file)).unwrap().len());
}

#[tokio::test]
async fn every_scheme_names_its_pools() {
    let cases = [
        (json!({"grouping": "global"}), vec!["user-all"]),
        (json!({"grouping": "random", "groups": 2}), vec!["user-all", "user-random-0", "user-random-1"]),
        (
            json!({"grouping": "collaborative", "clusters": {"min": 2, "max": 5}}),
            vec!["user-all", "user-cluster-0", "user-cluster-1", "user-cluster-2"],
        ),
        (
            json!({"grouping": "attribute", "attributes": ["age"], "min_group": 5}),
            vec!["user-all", "user-age-18", "user-age-25", "user-age-35"],
        ),
    ];
    let (_dir, tables, pools) = folders();
    for (user, expected) in cases {
        clear_pools(&location(&pools)).await.unwrap();
        let set = build(&tables[..1], previous(), &config(json!({"user": user})), &pools).await.unwrap();
        assert_eq!(pool_names(&set), expected);
        assert_eq!(set.texts.of_other_kind, 60);
        let files = files(&pools).len();
        assert_eq!(files, expected.len() + 1, "pools of the build before are gone");
    }
}

#[tokio::test]
async fn same_inputs_give_the_same_pools_in_any_order() {
    let (dir, mut tables, pools) = folders();
    let config = config(json!({
        "seed": 5,
        "user": {"grouping": "router", "min_group": 5, "max_texts": 12},
        "item": {"grouping": "router", "min_group": 5, "max_texts": 7},
    }));
    let set = build(&tables, previous(), &config, &pools).await.unwrap();
    assert!(set.pools.iter().all(|pool| pool.texts <= 12), "{:?}", set.pools);
    let first = files(&pools);
    let mut reversed = previous();
    reversed.reverse();
    tables.reverse();
    let again = dir.path().join("again");
    build(&tables, reversed, &config, &again).await.unwrap();
    assert!(files(&again) == first);
    clear_pools(&location(&again)).await.unwrap();
    assert!(files(&again).is_empty());
    let other_seed = PoolsConfig { seed: 6, ..config };
    build(&tables, previous(), &other_seed, &again).await.unwrap();
    let digest = |files: &[(String, Vec<u8>)]| files.iter().find(|f| f.0 == "user-all.pool").cloned();
    assert!(digest(&files(&again)) != digest(&first), "the seed samples");
}

#[tokio::test]
async fn spilling_changes_no_byte() {
    let (dir, tables, pools) = folders();
    let config = default_config();
    build(&tables, previous(), &config, &pools).await.unwrap();
    let spilled = dir.path().join("spilled");
    build_with(&tables, batches(previous(), 16), &config, 0, &spilled, &mut quiet).await.unwrap();
    assert_eq!(files(&spilled), files(&pools));
}

#[tokio::test]
async fn the_counts_of_a_set_are_what_its_router_says() {
    let (_dir, tables, pools) = folders();
    // Texts of one cluster only: the other clusters have no pool and give way.
    let texts = previous().into_iter().filter(|text| text.text.starts_with("w2 ")).collect();
    build(&tables, texts, &default_config(), &pools).await.unwrap();
    let open = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap();
    let mut routed: BTreeMap<String, u64> = BTreeMap::new();
    for table in &tables {
        let mut reader = EntityReader::open(table).await.unwrap();
        while let Some(entities) = reader.next_batch().await.unwrap() {
            for entity in entities {
                let pool = open.route(&entity, entity.embedding.as_deref()).unwrap();
                *routed.entry(pool.to_owned()).or_default() += 1;
            }
        }
    }
    let counted: BTreeMap<String, u64> = (open.set().kinds.values())
        .flat_map(|kind| kind.router.groups().iter().zip(&kind.statistics))
        .filter(|(_, statistics)| statistics.routed > 0)
        .map(|(group, statistics)| (group.name.clone(), statistics.routed))
        .collect();
    assert_eq!(counted, routed);
    let sum = |part: &str| routed.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum::<u64>();
    // 24 warm users have the one cluster's pool, the other 66 their age's; no item has any text.
    assert_eq!((sum("user-cluster"), sum("user-age"), sum("item-all"), sum("")), (24, 66, 60, 150));
}

#[tokio::test]
async fn without_previous_texts_there_are_no_pools() {
    let (_dir, tables, pools) = folders();
    let blank = PreviousText { text: " \n".into(), ..previous().remove(0) };
    let set = build(&tables, vec![blank], &default_config(), &pools).await.unwrap();
    assert!(set.pools.is_empty());
    assert_eq!((set.texts.read, set.texts.empty), (1, 1));
    assert_eq!(set.kinds[&Kind::User].statistics[0].routed, 90);
    let open = OpenPools::open(&location(&pools), &FINGERPRINT).await.unwrap();
    assert_eq!(open.set(), &set);
    assert!(open.pool("user-all").is_none());
}

#[tokio::test]
async fn texts_of_strangers_are_in_the_pool_of_everything_only() {
    let (_dir, tables, pools) = folders();
    let mut texts = previous();
    texts.truncate(90);
    texts.push(PreviousText { id: laser_schema::EntityId::Int(1000), ..texts[0].clone() });
    let set = build(&tables, texts, &default_config(), &pools).await.unwrap();
    assert_eq!(set.texts.without_entity, 1);
    let texts: Vec<_> = set.pools.iter().map(|pool| pool.texts).collect();
    assert_eq!(texts, [91, 24, 24, 24, 30, 30, 30]);
}

#[tokio::test]
async fn embeddings_of_a_file_are_counted_against_the_entities() {
    let (dir, tables, pools) = folders();
    let rows: Vec<Value> = (60..100).map(|id| json!({"id": id, "embedding": [id % 2 * 9, 1.0, 2.0]})).collect();
    let table = write_table(dir.path(), "embeddings.jsonl", Kind::User, &rows);
    let user = json!({"grouping": "router", "min_group": 5, "clusters": 2, "embeddings": {"table": table.path}});
    let set = build(&tables, previous(), &config(json!({"user": user})), &pools).await.unwrap();
    let counts = set.kinds[&Kind::User].embeddings.clone().unwrap();
    assert_eq!((counts.entities, counts.unknown, counts.dimension), (30, 10, 3));
    assert_eq!(counts.file, Some(table.path));
    assert_eq!(set.kinds[&Kind::User].clustering.as_ref().unwrap().fitted_on, 24);
}

#[tokio::test]
async fn bad_input_is_refused_by_name() {
    let (dir, tables, pools) = folders();
    let path = dir.path();
    let empty = write_table(path, "empty.jsonl", Kind::User, &[]);
    let uneven = [json!({"id": 1, "embedding": [1, 2]}), json!({"id": 2, "embedding": [1, 2, 3]})];
    let uneven = write_table(path, "uneven.jsonl", Kind::User, &uneven);
    let table = std::slice::from_ref;
    let cases = [
        (table(&empty), json!({}), "no entities in"),
        (&[tables[0].clone(), tables[0].clone()], json!({}), "users.jsonl, row 1: user id 0 appears twice"),
        (
            table(&uneven),
            json!({"user": {"grouping": "router"}}),
            "uneven.jsonl: embedding of user 2 has 3 values, expected 2",
        ),
        (&tables, json!({"user": {"grouping": "router", "clusters": 73}}), "[pools.user] clusters = 73: only 72 users"),
        (&tables, json!({"user": {"clusters": 9}}), "[pools.user] clusters: without grouping there are no groups"),
        (&tables, json!({"user": {"clusters": 0}}), "[pools.user] clusters: must be at least 1"),
        (
            &tables,
            json!({"item": {"grouping": "router", "attributes": ["genre"]}}),
            "no item has \"genre\"; they have: genres, title",
        ),
        (&tables, json!({"item": {"grouping": "collaborative"}}), "none of 60 items has an embedding"),
    ];
    for (tables, pools_config, message) in cases {
        let built = build(tables, previous(), &config(pools_config), &pools).await;
        let error = built.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(!pools.exists(), "nothing is written before the input is known to be good");
}

#[tokio::test]
async fn a_failing_reader_of_previous_texts_is_told() {
    let (_dir, tables, pools) = folders();
    let failing = stream::iter([Ok(previous()), Err("line 7 is not JSON".into())]);
    let built = build_with(&tables, failing, &default_config(), MEMORY, &pools, &mut quiet).await;
    assert_eq!(built.unwrap_err().to_string(), "previous texts: line 7 is not JSON");
}

#[tokio::test]
async fn progress_tells_every_stage_to_its_end() {
    let (_dir, tables, pools) = folders();
    let mut told: Vec<(&str, u64, Option<u64>)> = Vec::new();
    let mut record = |done, total, stage| {
        told.pop_if(|last| last.0 == stage);
        told.push((stage, done, total));
    };
    let texts = batches(previous(), 64);
    build_with(&tables, texts, &default_config(), MEMORY, &pools, &mut record).await.unwrap();
    let expected = [
        ("reading previous texts", 150, None),
        ("reading entities", 150, Some(150)),
        ("grouping", 1, None),
        ("routing", 150, Some(150)),
        ("tokenising", 150, Some(150)),
        ("writing pools", 11, Some(11)),
    ];
    assert_eq!(told, expected);
}
