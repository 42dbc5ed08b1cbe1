//! Embeddings of every source, brought to the entities they belong to.

use laser_store::join::Join;
use ndarray::{Array2, ShapeBuilder, array};
use ndarray_npy::WriteNpyExt;
use serde_json::Value;

use super::*;
use crate::join_embeddings;

/// The embeddings of some users as the source has them.
async fn read(dir: &Path, source: Value, users: &[Value]) -> Result<Vec<Option<Vec<f32>>>, String> {
    let rows: Vec<Value> = users.iter().map(|id| json!({"id": id})).collect();
    let table = write_table(dir, "users.jsonl", Kind::User, &rows);
    let mut join = Join::new(&[table], 0).await.unwrap();
    let config = config(json!({"user": {"grouping": "collaborative", "embeddings": source}}));
    join_embeddings(&config, &mut join).await.map_err(|e| e.to_string())?;
    let joined = join.finish(&mut |_, _, _| {}).map_err(|e| e.to_string())?;
    let users = joined.reader().next_batch().await.unwrap().unwrap();
    Ok(users.into_iter().map(|u| u.entity.embedding).collect())
}

/// The matrix `e.npy` with these ids.
fn npy(dir: &Path, ids: &str, skip_rows: usize) -> Value {
    std::fs::write(dir.join("ids.txt"), ids).unwrap();
    json!({"npy": dir.join("e.npy"), "ids": dir.join("ids.txt"), "skip_rows": skip_rows})
}

fn write(dir: &Path, matrix: &impl WriteNpyExt) {
    matrix.write_npy(std::fs::File::create(dir.join("e.npy")).unwrap()).unwrap();
}

#[tokio::test]
async fn rows_follow_their_ids_after_the_padding() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    write(dir, &array![[0.0f32, 0.0], [1.0, 2.0], [3.0, 4.0]]);
    let found = read(dir, npy(dir, "7\nx\n", 1), &[json!(7), json!(8)]).await;
    assert_eq!(found.unwrap(), [Some(vec![1.0, 2.0]), None]);
    let found = read(dir, npy(dir, "7\r\nx", 1), &[json!("x"), json!("7")]).await;
    assert_eq!(found.unwrap(), [Some(vec![3.0, 4.0]), Some(vec![1.0, 2.0])]);
}

#[tokio::test]
async fn double_precision_and_column_order_read_alike() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let rows = 2 * 1024 + 3;
    let value = |row: usize, column: usize| (3 * row + column) as f32;
    let ids: String = (0..rows).map(|id| format!("{id}\n")).collect();
    let expected = [0, 1].map(|column| value(rows - 1, column)).to_vec();
    for by_row in [true, false] {
        let mut matrix = Array2::<f64>::zeros((rows, 2).set_f(!by_row));
        matrix.indexed_iter_mut().for_each(|((row, column), v)| *v = value(row, column).into());
        write(dir, &matrix);
        let found = read(dir, npy(dir, &ids, 0), &[json!(rows - 1), json!(1)]).await;
        assert_eq!(found.unwrap(), [Some(expected.clone()), Some(vec![3.0, 4.0])]);
    }
}

#[tokio::test]
async fn bad_matrices_and_lists_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let refused = async |ids: &str, skip_rows, expected: &str| {
        let error = read(dir, npy(dir, ids, skip_rows), &[json!(1)]).await.unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    write(dir, &array![[1.0f32, 2.0], [3.0, f32::NAN]]);
    refused("1\n2", 0, "e.npy, row 1: value NaN at position 1").await;
    refused("1\n2\n3", 0, "2 rows, 2 of them after skip_rows = 0").await;
    refused("1\n2\n3", 0, "3 ids").await;
    refused("1\n2", 5, "0 of them after skip_rows = 5").await;
    write(dir, &array![[1.0f32, 2.0], [3.0, 4.0]]);
    refused("1\n1", 0, "ids.txt, row 2: id 1 appears twice").await;
    write(dir, &array![[1i64, 2], [3, 4]]);
    refused("1\n2", 0, "float32 or float64").await;
    std::fs::remove_file(dir.join("e.npy")).unwrap();
    refused("1\n2", 0, "e.npy: no such file or object").await;
}

#[tokio::test]
async fn a_published_folder_is_read_part_by_part() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run");
    std::fs::create_dir(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("a.jsonl", r#"{"entity_id": 1, "embedding": [1.0, 2.0]}"#);
    write("b.jsonl", r#"{"entity_id": 2, "embedding": [3.0, 4.0]}"#);
    write("left-over.jsonl", r#"{"entity_id": 3, "embedding": [5.0, 6.0]}"#);
    let part = |name| json!({"name": name, "rows": 1, "bytes": 1, "digest": ""});
    let manifest = json!({
        "version": laser_schema::knowledge::SCHEMA_VERSION, "data_set": "embeddings", "run": "r", "kind": "user",
        "date": "2026-01-02", "created": "2026-01-02T00:00:00Z", "writer": "w", "rows": 2,
        "parts": [part("a.jsonl"), part("b.jsonl")],
    });
    write("_manifest.json", &manifest.to_string());
    let users = [json!(1), json!(2), json!(3)];
    let read = || read(dir.path(), json!({"table": folder, "id": "entity_id"}), &users);
    let error = read().await.unwrap_err();
    assert!(error.contains("nor a published folder of embeddings (with a _SUCCESS)"), "{error}");
    write("_SUCCESS", "");
    assert_eq!(read().await.unwrap(), [Some(vec![1.0, 2.0]), Some(vec![3.0, 4.0]), None]);
    write("b.jsonl", r#"{"entity_id": 2, "embedding": [3.0]}"#);
    let error = read().await.unwrap_err();
    assert!(error.contains("b.jsonl, row 1: embedding of 2 has 1 values"), "{error}");
}

#[tokio::test]
async fn bad_table_rows_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("e.jsonl");
    let read = async |lines: String| {
        std::fs::write(&table, lines).unwrap();
        let source = json!({"table": table, "id": "movie", "embedding": "vector"});
        read(dir.path(), source, &[json!(1)]).await
    };
    let good = r#"{"movie": 1, "vector": [1.0, 2.0]}"#;
    assert_eq!(read(good.to_owned()).await.unwrap(), [Some(vec![1.0, 2.0])]);
    let cases = [
        (r#"{"movie": 2, "vector": [1.0]}"#, "row 2: embedding of 2 has 1 values"),
        (r#"{"movie": 2, "vector": [1.0, null]}"#, "row 2: column \"vector\" holds NaN"),
        (good, "row 2: id 1 appears twice"),
        (r#"{"movie": 2}"#, "row 2: 2 has no embedding in column \"vector\""),
    ];
    for (bad, message) in cases {
        let error = read(format!("{good}\n{bad}")).await.unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
