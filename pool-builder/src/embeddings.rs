//! Embeddings of users and items that are not in the entity table, brought to their entities by the [`Join`].

use laser_schema::Kind;
use laser_schema::embedding::EmbeddingSource;
use laser_store::embeddings::{EmbeddingFiles, EmbeddingReader};
use laser_store::join::Join;

use crate::config::PoolsConfig;
use crate::error::PoolsError;

/// Gives `join` the embeddings that the configuration names, of kinds whose grouping uses them.
///
/// # Errors
/// [`PoolsError::Embeddings`] or the local disk's; an id that is there twice is found when the join is finished.
pub async fn join_embeddings(config: &PoolsConfig, join: &mut Join) -> Result<(), PoolsError> {
    for kind in Kind::ALL {
        let grouping = config.of(kind);
        let Some(source) = &grouping.embeddings else {
            continue;
        };
        if !grouping.grouping.has_clusters() {
            continue;
        }
        match source {
            EmbeddingSource::Npy { npy, ids, .. } => join.use_embeddings(kind, npy, ids),
            EmbeddingSource::Table { table, .. } => join.use_embeddings(kind, table, table),
        }
        let mut reader = EmbeddingReader::open(EmbeddingFiles::find(source, kind).await?).await?;
        while let Some(batch) = reader.next_batch().await? {
            for (&row, (id, embedding)) in batch.rows.iter().zip(batch.iter()) {
                join.push_embedding(kind, row, &id.to_string(), embedding)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ndarray::{Array2, ShapeBuilder, array};
    use ndarray_npy::{WritableElement, WriteNpyExt};
    use serde_json::json;

    use laser_schema::{Columns, EntityTable};

    use super::*;

    fn write_npy<T: WritableElement>(path: &Path, matrix: &Array2<T>) {
        matrix.write_npy(std::fs::File::create(path).unwrap()).unwrap();
    }

    type Embedded = Vec<Option<Vec<f32>>>;

    /// The embeddings of some users as the source has them.
    async fn read_source(dir: &Path, source: EmbeddingSource, users: &[serde_json::Value]) -> Result<Embedded, String> {
        let rows: String = users.iter().map(|id| format!("{{\"id\": {id}}}\n")).collect();
        let table = dir.join("users.jsonl");
        std::fs::write(&table, rows).unwrap();
        let table = EntityTable {
            path: table.to_str().unwrap().to_owned(),
            kind: Some(Kind::User),
            columns: Columns::default(),
        };
        let mut config = PoolsConfig::default();
        config.user.embeddings = Some(source);
        let mut join = Join::new(&[table], 0).await.unwrap();
        let read = join_embeddings(&config, &mut join).await;
        read.map_err(|e| e.to_string())?;
        let joined = join.finish(&mut |_, _, _| {}).map_err(|e| e.to_string())?;
        let users = joined.reader().next_batch().await.unwrap().unwrap();
        Ok(users.into_iter().map(|u| u.entity.embedding).collect())
    }

    async fn read(dir: &Path, ids: &str, skip_rows: usize, users: &[serde_json::Value]) -> Result<Embedded, String> {
        std::fs::write(dir.join("ids.txt"), ids).unwrap();
        let source = EmbeddingSource::Npy {
            npy: dir.join("e.npy").to_str().unwrap().into(),
            ids: dir.join("ids.txt").to_str().unwrap().into(),
            skip_rows,
        };
        read_source(dir, source, users).await
    }

    #[tokio::test]
    async fn rows_follow_their_ids_after_the_padding() {
        let dir = tempfile::tempdir().unwrap();
        write_npy(&dir.path().join("e.npy"), &array![[0.0f32, 0.0], [1.0, 2.0], [3.0, 4.0]]);
        let found = read(dir.path(), "7\nx\n", 1, &[json!(7), json!(8)]).await;
        assert_eq!(found.unwrap(), [Some(vec![1.0, 2.0]), None]);
        let found = read(dir.path(), "7\r\nx", 1, &[json!("x"), json!("7")]).await;
        assert_eq!(found.unwrap(), [Some(vec![3.0, 4.0]), Some(vec![1.0, 2.0])]);
    }

    #[tokio::test]
    async fn double_precision_and_column_order_read_alike() {
        let dir = tempfile::tempdir().unwrap();
        let rows = 2 * 1024 + 3;
        let value = |row: usize, column: usize| (3 * row + column) as f32;
        let ids: String = (0..rows).map(|id| format!("{id}\n")).collect();
        let last = json!(rows - 1);
        let expected = [0, 1].map(|column| value(rows - 1, column)).to_vec();
        for by_row in [true, false] {
            let mut matrix = Array2::<f64>::zeros((rows, 2).set_f(!by_row));
            matrix.indexed_iter_mut().for_each(|((row, column), v)| *v = value(row, column).into());
            write_npy(&dir.path().join("e.npy"), &matrix);
            let found = read(dir.path(), &ids, 0, &[last.clone(), json!(1)]).await;
            assert_eq!(found.unwrap(), [Some(expected.clone()), Some(vec![3.0, 4.0])]);
        }
    }

    #[tokio::test]
    async fn bad_matrices_and_lists_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let npy = dir.path().join("e.npy");
        write_npy(&npy, &array![[1.0f32, 2.0], [3.0, f32::NAN]]);
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("e.npy, row 1: value NaN at position 1"), "{error}");
        let error = read(dir.path(), "1\n2\n3", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("2 rows, 2 of them after skip_rows = 0") && error.contains("3 ids"));
        let error = read(dir.path(), "1\n2", 5, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("0 of them after skip_rows = 5"), "{error}");
        write_npy(&npy, &array![[1.0f32, 2.0], [3.0, 4.0]]);
        let error = read(dir.path(), "1\n1", 0, &[json!(2)]).await.unwrap_err();
        assert!(error.contains("ids.txt, row 2: id 1 appears twice"), "{error}");
        write_npy(&npy, &array![[1i64, 2], [3, 4]]);
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("float32 or float64"), "{error}");
        std::fs::remove_file(&npy).unwrap();
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.ends_with("e.npy: no such file or object"), "{error}");
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
        let source = || EmbeddingSource::Table {
            table: folder.to_str().unwrap().into(),
            id: "entity_id".into(),
            embedding: "embedding".into(),
        };
        let users = [json!(1), json!(2), json!(3)];
        let error = read_source(dir.path(), source(), &users).await.unwrap_err();
        assert!(error.contains("nor a published folder of embeddings (with a _SUCCESS)"), "{error}");
        write("_SUCCESS", "");
        let found = read_source(dir.path(), source(), &users).await.unwrap();
        assert_eq!(found, [Some(vec![1.0, 2.0]), Some(vec![3.0, 4.0]), None]);
        write("b.jsonl", r#"{"entity_id": 2, "embedding": [3.0]}"#);
        let error = read_source(dir.path(), source(), &users).await.unwrap_err();
        assert!(error.contains("b.jsonl, row 1: embedding of 2 has 1 values"), "{error}");
    }

    async fn read_lines(dir: &Path, lines: &str) -> Result<Embedded, String> {
        let table = dir.join("e.jsonl");
        std::fs::write(&table, lines).unwrap();
        let source = EmbeddingSource::Table {
            table: table.to_str().unwrap().into(),
            id: "movie".into(),
            embedding: "vector".into(),
        };
        read_source(dir, source, &[json!(1)]).await
    }

    #[tokio::test]
    async fn bad_table_rows_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"{"movie": 1, "vector": [1.0, 2.0]}"#;
        let found = read_lines(dir.path(), good).await.unwrap();
        assert_eq!(found, [Some(vec![1.0, 2.0])]);
        let cases = [
            (r#"{"movie": 2, "vector": [1.0]}"#, "row 2: embedding of 2 has 1 values"),
            (r#"{"movie": 2, "vector": [1.0, null]}"#, "row 2: column \"vector\" holds NaN"),
            (good, "row 2: id 1 appears twice"),
            (r#"{"movie": 2}"#, "row 2: 2 has no embedding in column \"vector\""),
        ];
        for (bad, message) in cases {
            let error = read_lines(dir.path(), &format!("{good}\n{bad}")).await.unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
