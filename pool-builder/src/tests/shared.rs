//! Real data, where it is present: `LASER_SHARED`, else `../shared` beside the workspace.

use std::io::Write;
use std::path::PathBuf;

use super::*;

/// The folder of shared data, or none with a message.
fn shared(part: &str) -> Option<PathBuf> {
    let beside = std::path::absolute("../../shared").unwrap();
    let folder = std::env::var_os("LASER_SHARED").map_or(beside, PathBuf::from).join(part);
    if !folder.exists() {
        // Past the test harness, which shows only what failing tests print; tests/run.sh ends with these lines.
        let skipped = format!("skipped: {} is not there; set LASER_SHARED\n", folder.display());
        std::io::stderr().write_all(skipped.as_bytes()).unwrap();
        return None;
    }
    Some(folder.canonicalize().unwrap())
}

#[tokio::test]
async fn users_of_movielens_cluster_by_lightgcn_embeddings() {
    let Some(data) = shared("data/lightgcn-ml-1m") else {
        return;
    };
    let file = |name: &str| data.join(name).to_str().unwrap().to_owned();
    let ids = std::fs::read_to_string(file("user_ids.txt")).unwrap();
    let ids: Vec<i64> = ids.lines().map(|id| id.parse().unwrap()).collect();
    let rows: Vec<_> = ids.iter().map(|id| json!({"id": id, "interactions": 20})).collect();
    let dir = tempfile::tempdir().unwrap();
    let table = write_table(dir.path(), "users.jsonl", Kind::User, &rows);
    let config = config(json!({"user": {
        "grouping": "router",
        "clusters": {"min": 2, "max": 6},
        "embeddings": {
            "npy": file("user_embeddings.npy"),
            "ids": file("user_ids.txt"),
            "skip_rows": 1,
        },
    }}));
    let set = build(&[table], Vec::new(), &config, &dir.path().join("pools")).await.unwrap();
    let users = &set.kinds[&Kind::User];
    let embeddings = users.embeddings.as_ref().unwrap();
    assert_eq!((embeddings.entities, embeddings.unknown, embeddings.dimension), (6040, 0, 32));
    let clustering = users.clustering.as_ref().unwrap();
    println!("{clustering:?}");
    assert_eq!((clustering.fitted_on, clustering.candidates.len()), (6040, 5));
    let sizes: Vec<u64> = users.statistics[1..].iter().map(|group| group.entities).collect();
    assert_eq!(sizes.iter().sum::<u64>(), 6040);
    assert!(sizes.iter().all(|&size| size > 100), "{sizes:?}");
}
