//! Parts of knowledge: the commit of a shard, its columns and digests. `docs/output.md` lists the columns.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use laser_schema::Digest;
use laser_schema::embedding::Embeddings;
use laser_schema::entity::IdType;
use laser_schema::knowledge::{KnowledgeRecord, PartInfo, SCHEMA_VERSION, WRITER, rows_digest};

use crate::table::{self, TableError};

/// The footer key of a part's [`PartInfo`].
pub const PART_KEY: &str = "laser.part";

/// The footer key of the digest of [`PART_KEY`]'s text.
pub const PART_DIGEST_KEY: &str = "laser.part_digest";

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

/// Encodes a part; with embeddings if `info` says what made them.
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
    let info =
        serde_json::to_string(info).map_err(|e| TableError::Row { file: name.to_owned(), reason: e.to_string() })?;
    let digest = Digest::of(info.as_bytes()).to_string();
    let metadata = [(PART_KEY, info), (PART_DIGEST_KEY, digest)];
    table::encode_embedded(name, record_schema(table::id_type(id)), rows, embedded, &metadata)
}

/// Decodes a part and checks its rows, embeddings and footer against the digests in the footer.
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
    let unreadable = |reason: String| TableError::Unreadable { file: name.to_owned(), reason };
    let info = table::footer(name, &bytes, PART_KEY)?
        .ok_or_else(|| unreadable(format!("the footer has no {PART_KEY}: not written by Laser")))?;
    let digest = table::footer(name, &bytes, PART_DIGEST_KEY)?;
    if digest != Some(Digest::of(info.as_bytes()).to_string()) {
        return Err(unreadable("its footer does not match the footer's own digest".to_owned()));
    }
    let info: PartInfo = serde_json::from_str(&info).map_err(|e| unreadable(e.to_string()))?;
    if info.version != SCHEMA_VERSION {
        return Err(unreadable(format!("schema version {}, this Laser reads {SCHEMA_VERSION}", info.version)));
    }
    let (rows, embeddings) = match &info.embedding {
        None => (table::decode(name, bytes)?, None),
        Some(embedding) => {
            let dimensions = embedding.spec.encoder.dimensions;
            let (rows, embeddings) = table::decode_embedded(name, bytes, dimensions)?;
            (rows, Some(embeddings))
        }
    };
    if rows_digest(&rows) != info.rows_digest {
        return Err(unreadable("its rows do not match the digest in its footer".to_owned()));
    }
    if embeddings.as_ref().map(Embeddings::digest) != info.embeddings_digest {
        return Err(unreadable("its embeddings do not match the digest in its footer".to_owned()));
    }
    Ok((rows, embeddings, info))
}

/// Decodes a part as [`decode_part`] does, and checks every other byte of it as well: statistics, indexes and bloom
/// filters, which readers trust and which no digest covers before there is a manifest. Equal rows encode to equal
/// bytes, so encoding them again tells; a part that another version of Laser wrote is spared that.
///
/// # Errors
/// [`TableError::Unreadable`] if the bytes are not those that a worker wrote.
pub fn check_part(name: &str, id: IdType, bytes: Bytes) -> Result<(Vec<KnowledgeRecord>, PartInfo), TableError> {
    let (rows, embeddings, info) = decode_whole(name, bytes.clone())?;
    if info.writer != WRITER {
        return Ok((rows, info));
    }
    let value = |key| table::footer(name, &bytes, key).map(|v| (key, v.unwrap_or_default()));
    let metadata = [value(PART_KEY)?, value(PART_DIGEST_KEY)?];
    let layout = info.embedding.as_ref().map(|e| e.spec.layout);
    let embedded = embeddings.as_ref().zip(layout);
    let again = table::encode_embedded(name, record_schema(table::id_type(id)), &rows, embedded, &metadata)?;
    match again == bytes {
        true => Ok((rows, info)),
        false => Err(TableError::Unreadable {
            file: name.to_owned(),
            reason: "its bytes are not what its rows encode to".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use laser_schema::embedding::{EmbeddingInfo, EmbeddingLayout, EmbeddingSpec, EncoderInfo, Pooling};
    use laser_schema::{EntityId, Kind};

    use super::*;
    use crate::embedding_column;

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
        PartInfo {
            version: SCHEMA_VERSION,
            run: "r".into(),
            shard: 7,
            kind: Kind::User,
            writer: WRITER.into(),
            attempt: "a".into(),
            carried: 0,
            rows_digest: rows_digest(rows),
            errors: vec![],
            figures: BTreeMap::new(),
            embedding: None,
            embeddings_digest: None,
        }
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
        let info = PartInfo {
            embedding: Some(EmbeddingInfo::new(EmbeddingSpec { encoder, layout }, 1)),
            embeddings_digest: Some(embeddings.digest()),
            ..info(rows)
        };
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
    fn changed_or_missing_embeddings_are_noticed() {
        let rows = vec![record(EntityId::Int(1))];
        let (embeddings, info) = embedded(&rows, EmbeddingLayout::Fixed);
        let encode = |e| encode_part("p", IdType::Int64, &rows, e, &info);
        let other = Embeddings::from_values(3, vec![0.0; 3]).unwrap();
        let error = decode_part("p", encode(Some(&other)).unwrap()).unwrap_err();
        assert!(error.to_string().contains("its embeddings do not match the digest"));
        let wider = Embeddings::from_values(4, vec![0.0; 4]).unwrap();
        let error = decode_part("p", encode(Some(&wider)).unwrap()).unwrap_err();
        assert!(error.to_string().contains("expected lists of 3 float32 values"), "{error}");
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

    #[test]
    fn changed_rows_are_noticed() {
        let rows = vec![record(EntityId::Int(1))];
        let mut other = rows.clone();
        other[0].text.push('!');
        let bytes = encode_part("p", IdType::Int64, &other, None, &info(&rows)).unwrap();
        let error = decode_part("p", bytes).unwrap_err().to_string();
        assert!(error.contains("do not match the digest"), "{error}");
    }

    #[test]
    fn mixed_id_types_are_refused() {
        let rows = vec![record(EntityId::Text("x".into()))];
        assert!(encode_part("p", IdType::Int64, &rows, None, &info(&rows)).is_err());
    }
}
