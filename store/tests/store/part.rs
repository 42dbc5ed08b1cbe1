//! Parts are read as they were written, and whatever else is refused.

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, Int64Type};
use bytes::Bytes;
use laser_schema::embedding::{EmbeddingInfo, EmbeddingLayout, EmbeddingSpec, Embeddings, EncoderInfo, Pooling};
use laser_schema::entity::IdType;
use laser_schema::knowledge::{Content, KnowledgeRecord, PartInfo};
use laser_schema::lists::ListRows;
use laser_schema::{Digest, EntityId, Kind};
use laser_store::embedding_column;
use laser_store::part::{check_part, decode_part, encode_part};
use laser_store::table::decode_embedded;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

pub(crate) fn record(id: i64) -> KnowledgeRecord {
    let digest = Digest::of(b"x");
    KnowledgeRecord {
        entity_id: EntityId::Int(id),
        text: format!("Text \"{id}\"\nand é"),
        items: Vec::new(),
        scores: Vec::new(),
        prompt_tokens: 3,
        text_tokens: 9,
        pool: "user-all".into(),
        policy: "strict".into(),
        stop_reason: "end".into(),
        forwards: 4,
        drafted_tokens: 20,
        accepted_tokens: 5,
        relaxed_tokens: 1,
        step_accepted: vec![0, 5, 0, 0],
        mean_log_probability: -0.123_456_789_012_3,
        draft_seconds: 0.1 + 0.2,
        engine_seconds: 1e-9,
        prompt_digest: digest.clone(),
        spec_digest: digest.clone(),
        model_digest: digest,
        pool_digest: String::new(),
        generated_by: "r".into(),
        event_timestamp: "2026-11-20T00:00:00Z".parse().unwrap(),
        created_timestamp: "2026-11-20T03:04:05.678901Z".parse().unwrap(),
        samples: Vec::new(),
        runners_up: None,
    }
}

pub(crate) fn part(rows: &[KnowledgeRecord]) -> Bytes {
    encode_part("part", IdType::Int64, rows, None, &info(rows)).unwrap()
}

fn info(rows: &[KnowledgeRecord]) -> PartInfo {
    PartInfo::new("r", 7, Kind::User, "a", rows)
}

/// A record with a text for an id.
fn text_record(id: &str) -> KnowledgeRecord {
    KnowledgeRecord { entity_id: EntityId::Text(id.into()), ..record(0) }
}

/// A list of two items and their scores, and nothing that only texts have.
pub(crate) fn list_record(id: i64, items: [EntityId; 2]) -> KnowledgeRecord {
    KnowledgeRecord {
        text: String::new(),
        items: items.to_vec(),
        scores: vec![-0.123_457, -12.5],
        text_tokens: 0,
        pool: String::new(),
        stop_reason: String::new(),
        relaxed_tokens: 0,
        mean_log_probability: 0.0,
        ..record(id)
    }
}

pub(crate) fn list_info(rows: &[KnowledgeRecord], items: IdType) -> PartInfo {
    info(rows).with_content(Content::Lists { items, rows: ListRows::User })
}

/// Embeddings of three dimensions, with values that text does not keep.
fn embedded(rows: &[KnowledgeRecord], layout: EmbeddingLayout) -> (Embeddings, PartInfo) {
    let digest = Digest::of(b"e");
    let encoder = EncoderInfo {
        model: digest.clone(),
        tokenizer: digest,
        pooling: Pooling::Mean,
        normalise: true,
        max_tokens: 256,
        prefix: "passage: ".into(),
        lower_case: false,
        dimensions: 3,
    };
    // Neighbouring floats, so that a lost bit shows.
    let values = (0x3dcc_cccd..).map(f32::from_bits).take(rows.len() * 3);
    let embeddings = Embeddings::from_values(3, values.collect()).unwrap();
    let info = PartInfo { embedding: Some(EmbeddingInfo::new(EmbeddingSpec { encoder, layout }, 1)), ..info(rows) };
    (embeddings, info)
}

#[test]
fn embeddings_keep_every_bit_in_both_layouts() {
    let rows = vec![record(1), record(2)];
    for (layout, list) in [
        (EmbeddingLayout::Fixed, "FixedSizeList(3 x non-null Float32)"),
        (EmbeddingLayout::List, "List(non-null Float32)"),
    ] {
        let field = embedding_column::field(layout, 3);
        assert_eq!((field.name().as_str(), field.is_nullable()), ("embedding", false));
        assert_eq!(field.data_type().to_string(), list);
        let (embeddings, info) = embedded(&rows, layout);
        let bytes = encode_part("p", IdType::Int64, &rows, Some(&embeddings), &info).unwrap();
        assert_eq!(decode_embedded("p", bytes.clone(), 3).unwrap(), (rows.clone(), embeddings));
        assert_eq!(decode_part("p", bytes.clone()).unwrap(), (rows.clone(), info));
        check_part("p", IdType::Int64, bytes).unwrap();
    }
}

#[test]
fn embeddings_of_other_rows_or_dimensions_are_noticed() {
    let rows = vec![record(1)];
    let (embeddings, info) = embedded(&rows, EmbeddingLayout::Fixed);
    let encode = |e| encode_part("p", IdType::Int64, &rows, e, &info);
    let wider = Embeddings::from_values(4, vec![0.0; 4]).unwrap();
    let error = decode_part("p", encode(Some(&wider)).unwrap()).unwrap_err();
    assert!(error.to_string().contains("expected lists of 3 float32 values"), "{error}");
    let error = check_part("p", IdType::Int64, encode(Some(&wider)).unwrap()).unwrap_err();
    assert!(error.to_string().contains("column 23: expected Field"), "{error}");
    assert!(decode_part("p", encode(None).unwrap()).is_err(), "no column");
    let more = Embeddings::from_values(3, [embeddings.values(), &[0.0; 3]].concat()).unwrap();
    let error = encode(Some(&more)).unwrap_err().to_string();
    assert!(error.contains("2 embeddings for 1 rows"), "{error}");
}

#[test]
fn parts_round_trip_with_both_id_types_and_without_rows() {
    for rows in [vec![record(-5), record(-5)], vec![text_record("u/1")], Vec::new()] {
        let id = rows.first().map_or(IdType::Int64, |row| row.entity_id.id_type());
        let bytes = encode_part("p", id, &rows, None, &info(&rows)).unwrap();
        assert_eq!(decode_part("p", bytes).unwrap(), (rows.clone(), info(&rows)));
    }
}

#[test]
fn lists_round_trip_with_items_of_both_id_types() {
    let numbers = list_record(-5, [7, -8].map(EntityId::Int));
    let texts = list_record(3, ["i/7", "é"].map(|id| EntityId::Text(id.into())));
    for (items, rows) in [(IdType::Int64, vec![numbers]), (IdType::String, vec![texts]), (IdType::Int64, Vec::new())] {
        let info = list_info(&rows, items);
        let bytes = encode_part("p", IdType::Int64, &rows, None, &info).unwrap();
        assert_eq!(check_part("p", IdType::Int64, bytes.clone()).unwrap().info, info);
        assert_eq!(decode_part("p", bytes).unwrap(), (rows, info));
    }
}

#[test]
fn a_list_that_is_none_is_not_written() {
    let encode = |row: KnowledgeRecord, items| {
        let rows = [row];
        let bytes = encode_part("p", IdType::Int64, &rows, None, &list_info(&rows, items));
        bytes.map_err(|error| error.to_string())
    };
    let right = list_record(5, [7, 8].map(EntityId::Int));
    encode(right.clone(), IdType::Int64).unwrap();
    let error = encode(right.clone(), IdType::String).unwrap_err();
    assert!(error.starts_with("p: a row does not fit the file's schema"), "{error}");
    let cases = [
        (KnowledgeRecord { items: Vec::new(), scores: Vec::new(), ..right.clone() }, "entity 5: an empty list"),
        (list_record(5, [7, 7].map(EntityId::Int)), "entity 5: item 7 is listed twice"),
        (record(5), "entity 5: an empty list"),
    ];
    for (row, expected) in cases {
        let error = encode(row, IdType::Int64).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_row_for_each_item_holds_the_same_lists() {
    let items = |items: [&str; 2]| items.map(|id| EntityId::Text(id.into()));
    let records = [list_record(5, items(["b", "a"])), list_record(6, items(["a", "c"]))];
    let content = Content::Lists { items: IdType::String, rows: ListRows::Item };
    let info = PartInfo { embedding: None, ..info(&records).with_content(content) };
    let bytes = encode_part("p", IdType::Int64, &records, None, &info).unwrap();
    let (read, read_info) = decode_part("p", bytes.clone()).unwrap();
    assert_eq!((read.as_slice(), &read_info), (records.as_slice(), &info));
    let checked = check_part("p", IdType::Int64, bytes.clone()).unwrap();
    assert_eq!(checked.ids, [5, 6].map(EntityId::Int));
    assert_eq!((checked.info.rows, checked.table_rows), (2, 4));

    let batches: Vec<RecordBatch> =
        ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap().build().unwrap().map(Result::unwrap).collect();
    let [batch] = batches.as_slice() else { panic!("{} batches", batches.len()) };
    let column = |name: &str| batch.column_by_name(name).unwrap();
    assert_eq!(column("rank").as_primitive::<Int64Type>().values(), &[1, 2, 1, 2]);
    let ids: Vec<Option<&str>> = column("item_id").as_string::<i32>().iter().collect();
    assert_eq!(ids, ["b", "a", "a", "c"].map(Some));
    assert_eq!(column("score").as_primitive::<Float64Type>().values(), &[-0.123_457, -12.5, -0.123_457, -12.5]);
}

/// Rows, page headers, statistics, indexes, bloom filters, footer, trailer, and the digest itself.
#[test]
fn every_flipped_bit_is_noticed() {
    let whole = part(&(0..40).map(record).collect::<Vec<_>>());
    check_part("part", IdType::Int64, whole.clone()).unwrap();
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut flipped = whole.to_vec();
            flipped[at] ^= 1 << bit;
            let error = decode_part("part", flipped.into()).unwrap_err().to_string();
            assert!(error.starts_with("part: not readable as Parquet: its "), "bit {bit} of byte {at}: {error}");
        }
    }
}

#[test]
fn a_digest_in_a_text_is_not_taken_for_the_parts_own() {
    let mark = "\x18\x0claser.digest\x18\x40";
    let text = mark.to_owned() + &"0".repeat(64);
    let rows = vec![KnowledgeRecord { text: text.clone(), pool: text.clone(), ..record(1) }];
    let info = PartInfo { attempt: text, ..info(&rows) };
    let bytes = encode_part("p", IdType::Int64, &rows, None, &info).unwrap();
    let marks = bytes.windows(mark.len()).filter(|window| *window == mark.as_bytes());
    assert!(marks.count() > 1, "it stands in the statistics too");
    assert_eq!(decode_part("p", bytes).unwrap(), (rows, info));
}

#[test]
fn a_part_of_other_columns_or_rows_than_its_footer_says_is_noticed() {
    let check = |rows: &[KnowledgeRecord], footer: &[KnowledgeRecord]| {
        let bytes = encode_part("p", rows[0].entity_id.id_type(), rows, None, &info(footer)).unwrap();
        check_part("p", IdType::Int64, bytes).map_err(|error| error.to_string())
    };
    let rows = [record(1)];
    assert_eq!(check(&rows, &rows).unwrap().ids, [EntityId::Int(1)]);
    let error = check(&rows, &[]).unwrap_err();
    assert!(error.contains("1 rows, its footer says 0"), "{error}");
    let texts = [text_record("1")];
    let error = check(&texts, &texts).unwrap_err();
    assert!(error.contains("column 1: expected Field"), "{error}");
}

#[test]
fn an_id_of_another_type_is_refused() {
    let rows = [text_record("x")];
    assert!(encode_part("p", IdType::Int64, &rows, None, &info(&rows)).is_err());
}
