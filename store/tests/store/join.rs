//! Entities meet what belongs to them, whatever was spilled.

use std::collections::BTreeMap;
use std::path::Path;

use laser_schema::entity::IdType;
use laser_schema::{Columns, EntityId, EntityTable, Kind};
use laser_store::join::{Join, JoinError, JoinedEntity};
use proptest::prelude::*;
use serde_json::{Value, json};

/// More than any test here needs, and so little that every record is spilled at once.
const BUDGETS: [usize; 2] = [1 << 30, 0];

fn table(dir: &Path, name: &str, kind: Kind, rows: &[Value]) -> EntityTable {
    let path = dir.join(name);
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(&path, lines).unwrap();
    EntityTable { path: path.to_str().unwrap().to_owned(), kind: Some(kind), columns: Columns::default() }
}

fn users(dir: &Path, ids: impl IntoIterator<Item = i64>) -> EntityTable {
    let rows: Vec<Value> = ids.into_iter().map(|id| json!({"id": id})).collect();
    table(dir, "users.jsonl", Kind::User, &rows)
}

type Strangers = Vec<(Kind, EntityId, String)>;

async fn finish(join: Join) -> Result<(Vec<JoinedEntity>, Strangers), JoinError> {
    let mut strangers = Vec::new();
    let joined = join.finish(&mut |kind, id, text| {
        strangers.push((kind, id, String::from_utf8_lossy(&text).into_owned()));
    })?;
    let mut reader = joined.reader();
    let mut all = Vec::new();
    while let Some(batch) = reader.next_batch().await? {
        all.extend(batch);
    }
    Ok((all, strangers))
}

async fn error(tables: &[EntityTable]) -> String {
    let join = match Join::new(tables, 0).await {
        Err(error) => return error.to_string(),
        Ok(join) => join,
    };
    finish(join).await.unwrap_err().to_string()
}

#[tokio::test]
async fn ids_are_unique_and_of_one_type_from_table_to_table() {
    let dir = tempfile::tempdir().unwrap();
    let table = |name: &str, kind, ids: &[Value]| {
        let rows: Vec<Value> = ids.iter().map(|id| json!({"id": id})).collect();
        table(dir.path(), name, kind, &rows)
    };
    let one = table("one.jsonl", Kind::User, &[json!(1), json!(5), json!(6)]);
    let items = table("items.jsonl", Kind::Item, &[json!("1")]);
    finish(Join::new(&[one.clone(), items.clone()], 0).await.unwrap()).await.unwrap();
    let twice = table("twice.jsonl", Kind::User, &[json!(2), json!(6), json!(1)]);
    let found = error(&[one.clone(), items.clone(), twice]).await;
    let expected = "twice.jsonl, row 2: user id 6 appears twice; ids must be unique over all tables";
    assert!(found.ends_with(expected), "{found}");
    let text = table("text.jsonl", Kind::User, &[json!("7")]);
    let found = error(&[one, items, text]).await;
    let expected = "text.jsonl, row 1: user id 7 is string, but the users before have int64 ids";
    assert!(found.contains(expected), "{found}");
}

#[tokio::test]
async fn a_second_embedding_of_an_id_is_refused_by_row() {
    let dir = tempfile::tempdir().unwrap();
    for budget in BUDGETS {
        let mut join = Join::new(&[users(dir.path(), [1])], budget).await.unwrap();
        join.use_embeddings(Kind::User, "e.npy", "ids.txt");
        for (row, id) in (1..).zip(["9", "1", "x", "9", "1"]) {
            join.push_embedding(Kind::User, row, id, &[1.0]).unwrap();
        }
        let error = finish(join).await.unwrap_err().to_string();
        assert_eq!(error, "ids.txt, row 4: id 9 appears twice; ids must be unique");
    }
}

#[tokio::test]
async fn a_table_that_changes_in_between_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for ids in [vec![1, 3, 2], vec![1, 2], vec![1, 2, 3, 4]] {
        let mut join = Join::new(&[users(dir.path(), [1, 2, 3])], 0).await.unwrap();
        for id in 1..=3 {
            let id = EntityId::Int(id);
            join.push_text(Kind::User, &id, b"text").unwrap();
        }
        users(dir.path(), ids);
        let error = finish(join).await.unwrap_err().to_string();
        assert!(error.ends_with("users.jsonl: was changed while it was read; run again"));
    }
}

#[tokio::test]
async fn embeddings_match_by_text_and_texts_by_type() {
    let dir = tempfile::tempdir().unwrap();
    let mut join = Join::new(&[users(dir.path(), [7])], 0).await.unwrap();
    assert_eq!(join.kinds()[&Kind::User].first.id_type(), IdType::Int64);
    join.use_embeddings(Kind::User, "e.npy", "ids.txt");
    join.push_embedding(Kind::User, 1, "07", &[1.0]).unwrap();
    join.push_embedding(Kind::User, 2, "7", &[2.0, -0.5]).unwrap();
    let text = EntityId::Text("7".into());
    join.push_text(Kind::User, &text, b"a").unwrap();
    join.push_text(Kind::Item, &EntityId::Int(7), b"b").unwrap();
    join.push_text(Kind::User, &EntityId::Int(7), b"c").unwrap();
    let (entities, mut strangers) = finish(join).await.unwrap();
    assert_eq!(entities[0].entity.embedding, Some(vec![2.0, -0.5]));
    assert_eq!(entities[0].texts, ["c"]);
    strangers.sort();
    let expected = [(Kind::User, text, "a".to_owned()), (Kind::Item, EntityId::Int(7), "b".to_owned())];
    assert_eq!(strangers, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_join_is_the_naive_one_in_the_order_of_the_table(
        ids in prop::collection::hash_set(0i64..60, 0..50),
        embedded in prop::collection::hash_set(0i64..60, 0..40),
        texts in prop::collection::vec((0i64..60, "[a-z]{0,5}"), 0..80),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<i64> = ids.into_iter().collect();
        let table = users(dir.path(), ids.iter().copied());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let run = |budget: usize| runtime.block_on(async {
            let mut join = Join::new(std::slice::from_ref(&table), budget).await.unwrap();
            join.use_embeddings(Kind::User, "e.npy", "ids.txt");
            for (row, id) in (1..).zip(&embedded) {
                join.push_embedding(Kind::User, row, &id.to_string(), &[*id as f32]).unwrap();
            }
            for (id, text) in &texts {
                join.push_text(Kind::User, &EntityId::Int(*id), text.as_bytes()).unwrap();
            }
            finish(join).await.unwrap()
        });
        let (joined, strangers) = run(BUDGETS[0]);
        prop_assert_eq!(joined.len(), ids.len());
        let mut by_id: BTreeMap<i64, Vec<&str>> = BTreeMap::new();
        for (id, text) in &texts {
            by_id.entry(*id).or_default().push(text);
        }
        for (joined, id) in joined.iter().zip(&ids) {
            prop_assert_eq!(&joined.entity.id, &EntityId::Int(*id));
            let embedding = embedded.contains(id).then(|| vec![*id as f32]);
            prop_assert_eq!(&joined.entity.embedding, &embedding);
            prop_assert_eq!(&joined.texts, &by_id.remove(id).unwrap_or_default());
        }
        let unmatched: usize = by_id.values().map(Vec::len).sum();
        prop_assert_eq!(strangers.len(), unmatched);
        prop_assert_eq!(run(BUDGETS[1]), (joined, strangers));
    }
}
