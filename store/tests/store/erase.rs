//! Rows leave parts and shards; parts keep their size, and all other rows keep every bit.

use bytes::Bytes;
use laser_schema::entity::IdType;
use laser_schema::ids::IdRecord;
use laser_schema::job::ShardRow;
use laser_schema::knowledge::{Content, ErrorRecord, KnowledgeRecord, PartInfo};
use laser_schema::lists::ListRows;
use laser_schema::{Digest, EntityId, Kind};
use laser_store::Location;
use laser_store::erase::{erase_from_part, erase_from_shard, find_rows};
use laser_store::id_list::IdList;
use laser_store::id_set::encode_ids;
use laser_store::part::{check_part, decode_part, encode_part, record_schema};
use laser_store::shard::shard_schema;
use laser_store::table;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use proptest::prelude::*;

use crate::part::{list_info, list_record, record};

fn ids(ids: impl IntoIterator<Item = impl ToString>) -> IdList {
    IdList::new(ids.into_iter().map(|id| id.to_string()).collect())
}

fn error(id: EntityId) -> ErrorRecord {
    ErrorRecord { entity_id: id, stage: "generate".into(), reason: "x".into(), value: None }
}

/// A part of rows with ids of a type, and of errors behind them.
fn part(id_type: IdType, texts: &[String], errors: usize) -> (Vec<KnowledgeRecord>, Vec<ErrorRecord>, Bytes) {
    let id = |at: usize| match id_type {
        IdType::Int64 => EntityId::Int(i64::try_from(at).unwrap()),
        IdType::String => EntityId::Text(format!("person-{at}")),
    };
    let row = |(at, text): (usize, &String)| KnowledgeRecord {
        entity_id: id(at),
        text: text.clone(),
        generated_by: if at.is_multiple_of(3) { "earlier" } else { "r" }.to_owned(),
        mean_log_probability: -0.1 / (at + 1) as f64,
        ..record(0)
    };
    let rows: Vec<KnowledgeRecord> = texts.iter().enumerate().map(row).collect();
    let errors: Vec<ErrorRecord> = (0..errors).map(|at| error(id(texts.len() + at))).collect();
    let carried = rows.iter().filter(|row| row.generated_by == "earlier").count() as u64;
    let info = PartInfo { carried, errors: errors.clone(), ..PartInfo::new("r", 7, Kind::User, "a", &rows) };
    let bytes = encode_part("part", id_type, &rows, None, &info).unwrap();
    // As a reader has them: floats are read to their last bit but one.
    let (rows, _) = decode_part("part", bytes.clone()).unwrap();
    (rows, errors, bytes)
}

/// What Arrow's own schema in the footer says, encoded.
fn arrow_schema(bytes: &Bytes) -> String {
    let metadata = ArrowReaderMetadata::load(bytes, ArrowReaderOptions::new()).unwrap();
    let pairs = metadata.metadata().file_metadata().key_value_metadata().unwrap();
    pairs.iter().find(|pair| pair.key == "ARROW:schema").and_then(|pair| pair.value.clone()).unwrap()
}

proptest! {
    #[test]
    fn a_part_without_some_rows_is_as_long_and_has_all_others(
        texts in prop::collection::vec("[a-zA-Z0-9 é]{1,300}", 1..40),
        errors in 0_usize..4,
        is_text in any::<bool>(),
        erased in prop::collection::hash_set(0_usize..44, 1..12),
    ) {
        let id_type = if is_text { IdType::String } else { IdType::Int64 };
        let (rows, error_rows, bytes) = part(id_type, &texts, errors);
        let named = erased.iter().map(|at| if is_text { format!("person-{at}") } else { at.to_string() });
        let list = ids(named);
        let found = erase_from_part("part", bytes.clone(), &list).unwrap();
        let is_there = erased.iter().any(|at| *at < texts.len() + errors);
        prop_assert_eq!(found.is_some(), is_there);
        let kept = found.unwrap_or_else(|| bytes.clone());
        prop_assert_eq!(kept.len(), bytes.len());
        // It would keep the errors and their ids where nobody looks for them.
        prop_assert_eq!(arrow_schema(&kept), arrow_schema(&bytes));
        let (left, info) = decode_part("part", kept.clone()).unwrap();
        let expected: Vec<KnowledgeRecord> = rows.into_iter().filter(|row| !list.contains(&row.entity_id)).collect();
        prop_assert_eq!(&left, &expected);
        let without: Vec<ErrorRecord> = error_rows.into_iter().filter(|e| !list.contains(&e.entity_id)).collect();
        prop_assert_eq!(&info.errors, &without);
        let carried = expected.iter().filter(|row| row.generated_by == "earlier").count() as u64;
        prop_assert_eq!((info.rows, info.carried), (expected.len() as u64, carried));
        prop_assert_eq!(check_part("part", id_type, kept.clone()).unwrap().ids.len(), expected.len());
        prop_assert!(erase_from_part("part", kept, &list).unwrap().is_none());
    }

    /// Rows of a few bytes: what the footer says of them may take more than they did.
    #[test]
    fn a_part_of_tiny_rows_is_as_long(
        names in prop::collection::btree_set("[a-z]{1,60}", 2..30),
        gone in any::<prop::sample::Index>(),
    ) {
        let names: Vec<String> = names.into_iter().collect();
        let time = record(0).created_timestamp;
        let row = |name: &String| IdRecord {
            entity_id: EntityId::Text(name.clone()),
            knowledge_ids: vec![1, 2],
            event_timestamp: time,
            created_timestamp: time,
        };
        let mut rows: Vec<IdRecord> = names.iter().map(row).collect();
        let bytes = encode_ids("part", &rows, &serde_json::json!({"version": 2})).unwrap();
        let gone = gone.index(rows.len());
        let kept = erase_from_part("part", bytes.clone(), &ids([&names[gone]])).unwrap().unwrap();
        prop_assert_eq!(kept.len(), bytes.len());
        rows.remove(gone);
        prop_assert_eq!(table::decode::<IdRecord>("part", kept).unwrap(), rows);
    }
}

#[test]
fn a_part_may_lose_all_its_rows() {
    let (_, _, bytes) = part(IdType::Int64, &["a".into(), "b".into()], 0);
    let empty = erase_from_part("part", bytes.clone(), &ids([0, 1])).unwrap().unwrap();
    assert_eq!(empty.len(), bytes.len());
    let checked = check_part("part", IdType::Int64, empty).unwrap();
    assert_eq!((checked.info.rows, checked.ids.len(), checked.table_rows), (0, 0, 0));
}

#[test]
fn a_list_of_several_rows_is_one_entity() {
    let rows: Vec<KnowledgeRecord> = (0..4).map(|id| list_record(id, [EntityId::Int(8), EntityId::Int(9)])).collect();
    let info = PartInfo { list_rows: ListRows::Item, ..list_info(&rows, IdType::Int64) };
    let bytes = encode_part("part", IdType::Int64, &rows, None, &info).unwrap();
    let kept = erase_from_part("part", bytes, &ids([1, 8])).unwrap().unwrap();
    let (left, info) = decode_part("part", kept).unwrap();
    assert_eq!(info.rows, 3);
    assert_eq!(left, [&rows[..1], &rows[2..]].concat(), "an item of the same id stays in lists");
}

#[tokio::test]
async fn what_is_found_is_what_goes() {
    let dir = tempfile::tempdir().unwrap();
    let file = Location::parse(dir.path().to_str().unwrap()).unwrap().join("part.parquet");
    let (_, _, bytes) = part(IdType::Int64, &["a".into(), "b".into(), "c".into()], 1);
    file.write(bytes).await.unwrap();
    let found = find_rows(&file, &ids([0, 2, 3, 9])).await.unwrap();
    assert_eq!((found.rows, found.errors), (2, 1));
    assert_eq!(found.ids.into_iter().collect::<Vec<_>>(), ["0", "2", "3"]);
}

#[test]
fn a_shard_loses_rows_and_nothing_else() {
    let rows: Vec<KnowledgeRecord> = (0..5).map(record).collect();
    let schema =
        record_schema(table::id_type(IdType::Int64), Content::Texts { has_samples: false, has_runners_up: false });
    let bytes = table::encode("shard", schema, &rows, &[]).unwrap();
    let shard = erase_from_shard("shard", bytes.clone(), &ids([1, 4])).unwrap();
    assert_eq!((shard.rows, shard.erased), (3, 2));
    let left: Vec<KnowledgeRecord> = table::decode("shard", shard.bytes).unwrap();
    assert_eq!(left, [record(0), record(2), record(3)]);
    let same = erase_from_shard("shard", bytes.clone(), &ids([7])).unwrap();
    assert_eq!((same.bytes, same.erased), (bytes, 0));
}

#[test]
fn a_shard_of_lists_keeps_other_histories_and_lists() {
    let row = |id: u32| ShardRow {
        entity_id: EntityId::Int(id.into()),
        pool: String::new(),
        prompt: vec![id, 7],
        prompt_digest: Digest::of(&id.to_le_bytes()),
        previous: None,
        error: None,
        history: (0..id).collect(),
        previous_items: (0..id % 3).map(|at| 10 * id + at).collect(),
        items: Some(id),
        value: None,
    };
    let rows: Vec<ShardRow> = (0..5).map(row).collect();
    let lists = Content::Lists { items: IdType::Int64, rows: ListRows::User };
    let bytes = table::encode("shard", shard_schema(table::id_type(IdType::Int64), lists), &rows, &[]).unwrap();
    let shard = erase_from_shard("shard", bytes, &ids([0, 2])).unwrap();
    assert_eq!((shard.rows, shard.erased), (3, 2));
    let left: Vec<ShardRow> = table::decode("shard", shard.bytes).unwrap();
    assert_eq!(left, [&rows[1..2], &rows[3..]].concat());
}
