//! Parts with lists that are none, as no writer of ours makes them, are refused by name.

use arrow::datatypes::DataType;
use bytes::Bytes;
use jiff::civil::date;
use laser_schema::entity::IdType;
use laser_schema::job::{Policy, Spec};
use laser_schema::knowledge::{Content, PartInfo};
use laser_schema::lists::{ListSpec, Normalisation, Ties};
use laser_schema::manifest::{ERRORS, Manifest, Profiles};
use laser_schema::{Digest, Kind};

use super::*;
use crate::data_set::{PartWriter, publish, verify};
use crate::location::Location;
use crate::part::{PART_KEY, check_part, part_schema};
use crate::sealed;

const ROWS: [ListRows; 2] = [ListRows::User, ListRows::Item];

fn record(id: i64, items: &[i64], scores: &[f64]) -> KnowledgeRecord {
    let digest = Digest::of(b"x");
    KnowledgeRecord {
        entity_id: EntityId::Int(id),
        text: String::new(),
        items: items.iter().copied().map(EntityId::Int).collect(),
        scores: scores.to_vec(),
        prompt_tokens: 3,
        text_tokens: 0,
        pool: String::new(),
        policy: "strict".into(),
        stop_reason: String::new(),
        forwards: 2,
        drafted_tokens: 40,
        accepted_tokens: 1,
        relaxed_tokens: 0,
        step_accepted: vec![1, 0],
        mean_log_probability: 0.0,
        draft_seconds: 0.25,
        engine_seconds: 0.5,
        prompt_digest: digest.clone(),
        spec_digest: digest.clone(),
        model_digest: digest,
        pool_digest: String::new(),
        generated_by: "r".into(),
        event_timestamp: "2026-11-20T00:00:00Z".parse().unwrap(),
        created_timestamp: "2026-11-20T03:04:05Z".parse().unwrap(),
        samples: Vec::new(),
        runners_up: None,
    }
}

/// Without the check that writers make.
fn part(records: &[KnowledgeRecord], rows: ListRows) -> Bytes {
    let content = Content::Lists { items: IdType::Int64, rows };
    let info = PartInfo::new("r", 7, Kind::User, "a", records).with_content(content);
    let (schema, footer) = (part_schema(DataType::Int64, content), (PART_KEY, &info));
    let bytes = match rows {
        ListRows::User => sealed::encode("part-00007.parquet", schema, records, None, footer),
        ListRows::Item => sealed::encode("part-00007.parquet", schema, &by_item(records), None, footer),
    };
    bytes.unwrap()
}

/// Lists that are none, each with the words that tell why.
fn wrong() -> [(KnowledgeRecord, &'static str); 4] {
    [
        (record(5, &[1, 2, 3], &[-1.0, -2.0]), "entity 5: 3 items and 2 scores"),
        (record(5, &[1, 2, 3], &[-1.0, -3.0, -2.0]), "entity 5: the score -3 before the greater -2"),
        (record(5, &[4, 2, 4], &[-1.0, -2.0, -3.0]), "entity 5: item 4 is listed twice"),
        (record(5, &[4], &[f64::NEG_INFINITY]), "entity 5: the score -inf, expected a finite number"),
    ]
}

#[test]
fn a_part_is_refused_by_its_name_and_the_entity() {
    let check =
        |records: &[KnowledgeRecord], rows| check_part("part-00007.parquet", IdType::Int64, part(records, rows));
    // Items of the same identifier have the same score.
    let right = record(4, &[9, 8, 7], &[-1.0, -1.0, -2.5]);
    for rows in ROWS {
        assert_eq!(check(std::slice::from_ref(&right), rows).unwrap().ids, [EntityId::Int(4)]);
    }
    for (wrong, expected) in wrong() {
        // Of a row for each item, each has a score.
        let is_of_both = wrong.items.len() == wrong.scores.len();
        for rows in ROWS.into_iter().filter(|rows| rows.is_user() || is_of_both) {
            let error = check(&[right.clone(), wrong.clone(), right.clone()], rows).unwrap_err().to_string();
            assert!(error.starts_with("part-00007.parquet: ") && error.contains(expected), "{error}");
        }
        assert!(fault_of(&wrong).unwrap().contains(expected));
    }
}

#[test]
fn ranks_out_of_order_are_refused() {
    let mut rows = by_item(&[record(4, &[9, 8], &[-1.0, -2.0]), record(5, &[9, 8, 7], &[-1.0, -2.0, -3.0])]);
    rows[3].rank = 3;
    let content = Content::Lists { items: IdType::Int64, rows: ListRows::Item };
    let info = PartInfo { rows: 2, ..PartInfo::new("r", 7, Kind::User, "a", &[]).with_content(content) };
    let schema = part_schema(DataType::Int64, content);
    let bytes = sealed::encode("part", schema, &rows, None, (PART_KEY, &info)).unwrap();
    let error = check_part("part", IdType::Int64, bytes).unwrap_err().to_string();
    assert!(error.ends_with("entity 5: rank 3, expected 2"), "{error}");
}

/// More rows than are read at a time.
#[test]
fn every_list_of_a_long_part_is_checked() {
    let mut records: Vec<KnowledgeRecord> = (0..9000).map(|id| record(id, &[id, -1], &[-1.0, -2.0])).collect();
    for at in [0, 4095, 4096, 8191, 8192, 8999] {
        records[at].items[1] = records[at].items[0].clone();
    }
    let expected = [0, 4095, 4096, 8191, 8192, 8999].map(|id| format!("entity {id}: item {id} is listed twice"));
    for rows in ROWS {
        let table = SealedTable::open("part", part(&records, rows)).unwrap();
        assert_eq!(faults(&table, rows, &table.ids().unwrap()).unwrap(), expected);
    }
}

fn spec() -> Spec {
    Spec {
        engine: "tree".into(),
        model: Digest::of(b"m"),
        tokenizer: Digest::of(b"t"),
        end_of_text: Vec::new(),
        precision: "f32".into(),
        prompts: [].into(),
        verification: Policy::Strict,
        sampling: None,
        max_new_tokens: 9,
        stop: Vec::new(),
        constraint: None,
        lists: Some(ListSpec {
            trie: Digest::of(b"trie"),
            out_of_stock: None,
            items: 3,
            items_from: None,
            width: 3,
            normalisation: Normalisation::Vocabulary,
            repeat: false,
            ties: Ties::All,
        }),
    }
}

/// A published folder of lists.
async fn published(root: &Location, records: &[KnowledgeRecord], rows: ListRows) {
    let details = Profiles {
        spec_digest: spec().digest(),
        spec: spec(),
        pool_digest: Digest::of(b"p"),
        entities: records.len() as u64,
        carried: 0,
        errors: 0,
        value: None,
        figures: [].into(),
        audit: [].into(),
        guards: None,
        cost: None,
        embedding: None,
        canary: None,
    };
    let mut writer = PartWriter::new(root);
    let bytes = writer.create(part(records, rows)).await.unwrap();
    writer.add(records.len() as u64, &bytes);
    let created = "2026-11-20T05:00:00Z".parse().unwrap();
    let manifest = Manifest::new("r", (Kind::User, date(2026, 11, 20)), created, writer.finish(), details);
    root.join(ERRORS).write(Bytes::new()).await.unwrap();
    publish(root, &manifest).await.unwrap();
}

#[tokio::test]
async fn verify_names_every_list_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let root = |name: &str| Location::parse(dir.path().join(name).to_str().unwrap()).unwrap();
    let right = |id| record(id, &[9, 8], &[-1.0, -2.0]);
    for rows in ROWS {
        let root = root(&format!("{rows:?}"));
        published(&root, &[right(1), right(2)], rows).await;
        let report = verify(&root).await.unwrap();
        assert_eq!((report.faults.as_slice(), report.rows), ([].as_slice(), 2), "{report:?}");
    }

    let rows: Vec<KnowledgeRecord> =
        (0..).zip(wrong()).map(|(id, (wrong, _))| KnowledgeRecord { entity_id: EntityId::Int(id), ..wrong }).collect();
    published(&root("damaged"), &rows, ListRows::User).await;
    let faults = verify(&root("damaged")).await.unwrap().faults;
    assert_eq!(faults.len(), 4, "{faults:?}");
    for (id, (fault, (_, expected))) in (0..).zip(faults.iter().zip(wrong())) {
        let expected = expected.replace("entity 5", &format!("part-00000.parquet: entity {id}"));
        assert!(fault.starts_with(&expected), "{fault}");
    }
}
