//! Parts of knowledge: the commit of a shard, its columns and footer. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use laser_schema::embedding::{EmbeddingInfo, Embeddings};
use laser_schema::entity::IdType;
use laser_schema::knowledge::{KnowledgeRecord, PartInfo, SCHEMA_VERSION};
use laser_schema::{Digest, EntityId};

use crate::embedding_column;
use crate::sealed::{self, SealedTable};
use crate::table::{self, TableError};

/// The footer key of a part's [`PartInfo`].
pub const PART_KEY: &str = "laser.part";

/// The output's columns for ids of a type. No nulls anywhere.
pub fn record_schema(id: DataType) -> SchemaRef {
    let timestamp = || DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let item = Field::new("item", DataType::Int64, false);
    let columns = [
        ("entity_id", id),
        ("text", DataType::Utf8),
        ("prompt_tokens", DataType::Int64),
        ("text_tokens", DataType::Int64),
        ("pool", DataType::Utf8),
        ("policy", DataType::Utf8),
        ("stop_reason", DataType::Utf8),
        ("forwards", DataType::Int64),
        ("drafted_tokens", DataType::Int64),
        ("accepted_tokens", DataType::Int64),
        ("relaxed_tokens", DataType::Int64),
        ("step_accepted", DataType::List(Arc::new(item))),
        ("mean_log_probability", DataType::Float64),
        ("draft_seconds", DataType::Float64),
        ("engine_seconds", DataType::Float64),
        ("prompt_digest", DataType::Utf8),
        ("spec_digest", DataType::Utf8),
        ("model_digest", DataType::Utf8),
        ("pool_digest", DataType::Utf8),
        ("generated_by", DataType::Utf8),
        ("event_timestamp", timestamp()),
        ("created_timestamp", timestamp()),
    ];
    Arc::new(Schema::new(columns.into_iter().map(|(name, t)| Field::new(name, t, false)).collect::<Vec<_>>()))
}

/// Encodes a part; with embeddings if `info` says how they were made.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types, or not every row has an embedding.
pub fn encode_part(
    name: &str,
    id: IdType,
    rows: &[KnowledgeRecord],
    embeddings: Option<&Embeddings>,
    info: &PartInfo,
) -> Result<Bytes, TableError> {
    let embedded = embeddings.zip(info.embedding.as_ref().map(|e| e.spec.layout));
    let footer =
        serde_json::to_string(info).map_err(|e| TableError::Row { file: name.to_owned(), reason: e.to_string() })?;
    sealed::encode(name, record_schema(table::id_type(id)), rows, embedded, (PART_KEY, footer))
}

/// Decodes a part, which must be as it was written.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are no part of Laser's or were changed.
pub fn decode_part(name: &str, bytes: Bytes) -> Result<(Vec<KnowledgeRecord>, PartInfo), TableError> {
    let (rows, _, info) = decode_whole(name, bytes)?;
    Ok((rows, info))
}

/// A part's rows, embeddings and footer.
type Whole = (Vec<KnowledgeRecord>, Option<Embeddings>, PartInfo);

fn decode_whole(name: &str, bytes: Bytes) -> Result<Whole, TableError> {
    let (table, info) = open_part(name, bytes)?;
    let (rows, embeddings) = match &info.embedding {
        None => (table::decode(name, table.bytes())?, None),
        Some(embedding) => {
            let dimensions = embedding.spec.encoder.dimensions;
            let (rows, embeddings) = table::decode_embedded(name, table.bytes(), dimensions)?;
            (rows, Some(embeddings))
        }
    };
    Ok((rows, embeddings, info))
}

fn open_part(name: &str, bytes: Bytes) -> Result<(SealedTable, PartInfo), TableError> {
    let table = SealedTable::open(name, bytes)?;
    let info: PartInfo = table.footer(PART_KEY)?;
    match info.version {
        SCHEMA_VERSION => Ok((table, info)),
        version => Err(table.unreadable(format!("schema version {version}, this Laser reads {SCHEMA_VERSION}"))),
    }
}

/// All that publishing needs of a part.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedPart {
    /// Its footer.
    pub info: PartInfo,
    /// The ids of its rows.
    pub ids: Vec<EntityId>,
    /// Its size.
    pub bytes: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// Checks every byte of a part, its columns and the number of its rows. Of the rows only the ids are decoded.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are not those that a worker wrote.
pub fn check_part(name: &str, id: IdType, bytes: Bytes) -> Result<CheckedPart, TableError> {
    let (size, digest) = (bytes.len() as u64, Digest::of(&bytes));
    let (table, info) = open_part(name, bytes)?;
    let ids = part_ids(&table, table::id_type(id), info.embedding.as_ref())?;
    if ids.len() as u64 != info.rows {
        return Err(table.unreadable(format!("{} rows, its footer says {}", ids.len(), info.rows)));
    }
    Ok(CheckedPart { info, ids, bytes: size, digest })
}

/// The ids of a part whose columns are those of the output.
pub(crate) fn part_ids(
    table: &SealedTable,
    id: DataType,
    embedding: Option<&EmbeddingInfo>,
) -> Result<Vec<EntityId>, TableError> {
    let schema = record_schema(id);
    let schema = match embedding.map(|e| &e.spec) {
        Some(spec) => embedding_column::append_to(spec.layout, &schema, spec.encoder.dimensions),
        None => schema,
    };
    table.check_columns(&schema)?;
    table.ids()
}

#[cfg(test)]
mod tests {
    use laser_schema::Kind;
    use laser_schema::embedding::{EmbeddingLayout, EmbeddingSpec, EncoderInfo, Pooling};

    use super::*;

    fn record(id: EntityId) -> KnowledgeRecord {
        let digest = Digest::of(b"x");
        KnowledgeRecord {
            entity_id: id,
            text: "Likes \"noir\"\nand é".into(),
            prompt_tokens: 3,
            text_tokens: 9,
            pool: "user-0".into(),
            policy: "strict".into(),
            stop_reason: "end".into(),
            forwards: 4,
            drafted_tokens: 20,
            accepted_tokens: 5,
            relaxed_tokens: 1,
            step_accepted: vec![0, 5],
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
        }
    }

    fn info(rows: &[KnowledgeRecord]) -> PartInfo {
        PartInfo::new("r", 7, Kind::User, "a", rows)
    }

    /// Of three dimensions, with values that text does not keep.
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
        let rows = vec![record(EntityId::Int(1)), record(EntityId::Int(2))];
        for (layout, list) in [
            (EmbeddingLayout::Fixed, "FixedSizeList(3 x non-null Float32)"),
            (EmbeddingLayout::List, "List(non-null Float32)"),
        ] {
            let field = embedding_column::field(layout, 3);
            assert_eq!((field.name().as_str(), field.is_nullable()), ("embedding", false));
            assert_eq!(field.data_type().to_string(), list);
            let (embeddings, info) = embedded(&rows, layout);
            let bytes = encode_part("p", IdType::Int64, &rows, Some(&embeddings), &info).unwrap();
            let read = decode_whole("p", bytes.clone()).unwrap();
            assert_eq!(read, (rows.clone(), Some(embeddings), info));
            check_part("p", IdType::Int64, bytes).unwrap();
        }
    }

    #[test]
    fn embeddings_of_other_rows_or_dimensions_are_noticed() {
        let rows = vec![record(EntityId::Int(1))];
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
    fn parts_round_trip_with_both_id_types() {
        for id in [EntityId::Int(-5), EntityId::Text("u/1".into())] {
            let rows = vec![record(id.clone()), record(id.clone())];
            let bytes = encode_part("p", id.id_type(), &rows, None, &info(&rows)).unwrap();
            let (read, read_info) = decode_part("p", bytes).unwrap();
            assert_eq!(read, rows);
            assert_eq!(read_info, info(&rows));
        }
    }

    #[test]
    fn an_empty_part_is_a_valid_file() {
        let bytes = encode_part("p", IdType::Int64, &[], None, &info(&[])).unwrap();
        assert!(decode_part("p", bytes).unwrap().0.is_empty());
    }

    /// Rows, page headers, statistics, indexes, bloom filters, footer, trailer, and the digest itself.
    #[test]
    fn every_flipped_bit_is_noticed() {
        let rows: Vec<_> = (0..40).map(|id| record(EntityId::Int(id))).collect();
        let whole = encode_part("p", IdType::Int64, &rows, None, &info(&rows)).unwrap();
        check_part("p", IdType::Int64, whole.clone()).unwrap();
        let mut flipped = whole.to_vec();
        for at in 0..whole.len() {
            for bit in 0..8 {
                flipped[at] ^= 1 << bit;
                let error = SealedTable::open("p", flipped.clone().into()).err();
                assert!(error.is_some(), "bit {bit} of byte {at}");
                flipped[at] ^= 1 << bit;
            }
        }
    }

    #[test]
    fn a_digest_in_a_text_is_not_taken_for_the_parts_own() {
        let mut rows = vec![record(EntityId::Int(1))];
        let mark = "\x18\x0claser.digest\x18\x40";
        rows[0].text = mark.to_owned() + &"0".repeat(64);
        rows[0].pool = rows[0].text.clone();
        let mut info = info(&rows);
        info.attempt = rows[0].text.clone();
        let bytes = encode_part("p", IdType::Int64, &rows, None, &info).unwrap();
        let marks = bytes.windows(mark.len()).filter(|window| *window == mark.as_bytes());
        assert!(marks.count() > 1, "it stands in the statistics too");
        assert_eq!(decode_part("p", bytes).unwrap(), (rows, info));
    }

    #[test]
    fn a_part_of_other_columns_or_rows_than_its_footer_says_is_noticed() {
        let rows = vec![record(EntityId::Int(1))];
        let footer = |rows| serde_json::to_string(&info(rows)).unwrap();
        let check = |id, rows: &[KnowledgeRecord], footer| {
            let schema = record_schema(table::id_type(id));
            let bytes = sealed::encode("p", schema, rows, None, (PART_KEY, footer)).unwrap();
            check_part("p", IdType::Int64, bytes).map_err(|error| error.to_string())
        };
        assert_eq!(check(IdType::Int64, &rows, footer(&rows)).unwrap().ids, [EntityId::Int(1)]);
        let error = check(IdType::Int64, &rows, footer(&[])).unwrap_err();
        assert!(error.contains("1 rows, its footer says 0"), "{error}");
        let texts = [record(EntityId::Text("1".into()))];
        let error = check(IdType::String, &texts, footer(&texts)).unwrap_err();
        assert!(error.contains("column 1: expected Field"), "{error}");
    }

    #[test]
    fn mixed_id_types_are_refused() {
        let rows = vec![record(EntityId::Text("x".into()))];
        assert!(encode_part("p", IdType::Int64, &rows, None, &info(&rows)).is_err());
    }
}
