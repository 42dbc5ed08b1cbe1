//! Knowledge records: what Laser writes, and reads back the next night.
//!
//! One record is one text with its provenance (what it was generated from) and its acceptance figures
//! (what speculation saved). `docs/output.md` lists the columns.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::embedding::{EmbeddingInfo, Embeddings};
use crate::entity::{EntityId, Kind};
use crate::table::{self, TableError};

/// The version of the output's columns and of [`PartInfo`].
pub const SCHEMA_VERSION: u32 = 1;

/// The footer key of a part's [`PartInfo`].
pub const PART_KEY: &str = "laser.part";

/// The footer key of the digest of [`PART_KEY`]'s text.
pub const PART_DIGEST_KEY: &str = "laser.part_digest";

/// One generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KnowledgeRecord {
    /// The entity, in the input's id type.
    pub entity_id: EntityId,
    /// The knowledge.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: i64,
    /// Tokens of the text, with the end-of-text token where there is one.
    pub text_tokens: i64,
    /// The pool that drafted.
    pub pool: String,
    /// The verification policy, such as `strict` or `relaxed(k=2,p=0.1)`.
    pub policy: String,
    /// Why the text ended: `end`, `stop` or `length`.
    pub stop_reason: String,
    /// Forwards of the model that this text took part in after its prompt.
    pub forwards: i64,
    /// Tokens that were drafted for it.
    pub drafted_tokens: i64,
    /// Drafted tokens that are part of the text.
    pub accepted_tokens: i64,
    /// Accepted tokens that are not the target's argmax.
    pub relaxed_tokens: i64,
    /// Accepted draft tokens of each forward, in order.
    pub step_accepted: Vec<i64>,
    /// Mean natural-log probability of the text's tokens under the target.
    pub mean_log_probability: f64,
    /// Seconds spent retrieving drafts (the paper's ART).
    pub draft_seconds: f64,
    /// Seconds of the engine that this text took: its even share of every step it was part of.
    pub engine_seconds: f64,
    /// Digest of the prompt's tokens.
    pub prompt_digest: Digest,
    /// Digest of the specification.
    pub spec_digest: Digest,
    /// Digest of the model's weights.
    pub model_digest: Digest,
    /// Digest of the pool, or empty where there was none.
    pub pool_digest: String,
    /// The run that generated the text; an earlier one if it was carried forward.
    pub generated_by: String,
    /// The night the record stands for.
    pub event_timestamp: Timestamp,
    /// When the text was generated.
    pub created_timestamp: Timestamp,
}

/// The arrow type of ids: `int64` or `string`.
pub fn id_type(id: &EntityId) -> DataType {
    match id {
        EntityId::Int(_) => DataType::Int64,
        EntityId::Text(_) => DataType::Utf8,
    }
}

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

/// A row that could not be turned into knowledge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// The entity.
    pub entity_id: EntityId,
    /// Where it failed: `plan` or `generate`.
    pub stage: String,
    /// What went wrong.
    pub reason: String,
}

/// Sums over texts; what every figure of a summary is derived from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Generated texts.
    pub texts: u64,
    /// Generated tokens.
    pub tokens: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Forwards that texts took part in, summed over texts.
    pub forwards: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Accepted draft tokens.
    pub accepted: u64,
    /// Accepted tokens that are not the argmax.
    pub relaxed: u64,
    /// Seconds spent drafting.
    pub draft_seconds: f64,
    /// Seconds of the engine.
    pub engine_seconds: f64,
    /// Tokens of the texts whose entity had an earlier text.
    #[serde(default)]
    pub compared: u64,
    /// Tokens of those earlier texts.
    #[serde(default)]
    pub previous: u64,
    /// Runs of one, two and three tokens within the texts.
    #[serde(default)]
    pub ngrams: [u64; 3],
    /// Of these: distinct within their text.
    #[serde(default)]
    pub distinct_ngrams: [u64; 3],
    /// Sum of the natural-log probabilities of the tokens; 0 where the engine tells none.
    #[serde(default)]
    pub log_probability: f64,
}

impl Figures {
    /// One record's figures, given the tokens of its text. `previous` are those of the entity's earlier text, 0 if it
    /// had none.
    pub fn of(record: &KnowledgeRecord, tokens: &[u32], previous: u64) -> Self {
        let mut figures = Self::default();
        figures.add_record(record);
        figures.previous = previous;
        figures.compared = if previous > 0 { figures.tokens } else { 0 };
        for n in 1..=3 {
            figures.ngrams[n - 1] = tokens.windows(n).len() as u64;
            let distinct: HashSet<&[u32]> = tokens.windows(n).collect();
            figures.distinct_ngrams[n - 1] = distinct.len() as u64;
        }
        figures
    }

    /// Adds one record's figures.
    pub fn add_record(&mut self, record: &KnowledgeRecord) {
        self.add(&Self {
            texts: 1,
            tokens: record.text_tokens.unsigned_abs(),
            prompt_tokens: record.prompt_tokens.unsigned_abs(),
            forwards: record.forwards.unsigned_abs(),
            drafted: record.drafted_tokens.unsigned_abs(),
            accepted: record.accepted_tokens.unsigned_abs(),
            relaxed: record.relaxed_tokens.unsigned_abs(),
            draft_seconds: record.draft_seconds,
            engine_seconds: record.engine_seconds,
            log_probability: record.mean_log_probability * record.text_tokens as f64,
            ..Self::default()
        });
    }

    /// Adds other sums.
    pub fn add(&mut self, other: &Self) {
        self.texts += other.texts;
        self.tokens += other.tokens;
        self.prompt_tokens += other.prompt_tokens;
        self.forwards += other.forwards;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.relaxed += other.relaxed;
        self.draft_seconds += other.draft_seconds;
        self.engine_seconds += other.engine_seconds;
        self.compared += other.compared;
        self.previous += other.previous;
        for n in 0..3 {
            self.ngrams[n] += other.ngrams[n];
            self.distinct_ngrams[n] += other.distinct_ngrams[n];
        }
        self.log_probability += other.log_probability;
    }

    /// Average accepted length: accepted draft tokens a forward (paper 4.1).
    pub fn aal(&self) -> f64 {
        ratio(self.accepted as f64, self.forwards as f64)
    }

    /// Tokens a second of the engine.
    pub fn tokens_per_second(&self) -> f64 {
        ratio(self.tokens as f64, self.engine_seconds)
    }

    /// Average retrieval time: seconds of drafting a text (paper 4.1).
    pub fn art_seconds(&self) -> f64 {
        ratio(self.draft_seconds, self.texts as f64)
    }

    /// Share of the text's tokens that were accepted though not the argmax.
    pub fn relaxed_share(&self) -> f64 {
        ratio(self.relaxed as f64, self.tokens as f64)
    }

    /// Mean tokens a text.
    pub fn text_length(&self) -> f64 {
        ratio(self.tokens as f64, self.texts as f64)
    }

    /// Length of the texts over that of the same entities' earlier texts; 0 where there were none.
    pub fn length_drift(&self) -> f64 {
        ratio(self.compared as f64, self.previous as f64)
    }

    /// Distinct-n: the share of the texts' runs of `n` tokens, 1 to 3, that are distinct within their text (Li et al.,
    /// NAACL 2016); a loop drives it to 0. Longer texts weigh more. `None` where there is no such run.
    pub fn distinct(&self, n: usize) -> Option<f64> {
        let all = *self.ngrams.get(n.checked_sub(1)?)?;
        (all > 0).then(|| self.distinct_ngrams[n - 1] as f64 / all as f64)
    }

    /// Mean natural-log probability of a token under the target; `None` where the engine tells none.
    pub fn mean_log_probability(&self) -> Option<f64> {
        let is_known = self.log_probability < 0.0 && self.tokens > 0;
        is_known.then(|| self.log_probability / self.tokens as f64)
    }

    /// Share of drafted tokens that were accepted.
    pub fn draft_yield(&self) -> f64 {
        ratio(self.accepted as f64, self.drafted as f64)
    }
}

/// `a / b`, or 0 where there is nothing to divide by.
pub fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

/// This version's encoder, as parts name it.
pub const WRITER: &str = concat!("laser ", env!("CARGO_PKG_VERSION"));

/// What a part says about itself in its footer. With the rows it is the whole commit of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartInfo {
    /// [`SCHEMA_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// The shard.
    pub shard: u32,
    /// Users or items.
    pub kind: Kind,
    /// The [`WRITER`] whose encoder wrote it.
    pub writer: String,
    /// Who wrote it, to tell one's own write from another's after an ambiguous error.
    pub attempt: String,
    /// Rows carried forward rather than generated.
    pub carried: u64,
    /// [`rows_digest`] of the rows.
    pub rows_digest: Digest,
    /// Rows of the shard that have no text.
    pub errors: Vec<ErrorRecord>,
    /// Sums over the generated rows, by pool.
    pub figures: BTreeMap<String, Figures>,
    /// Of the column of embeddings, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingInfo>,
    /// [`Embeddings::digest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings_digest: Option<Digest>,
}

/// A digest of rows that does not depend on their encoding, checked before a part is published.
pub fn rows_digest(rows: &[KnowledgeRecord]) -> Digest {
    Digest::of_json(&rows)
}

/// Encodes a part; with embeddings if `info` says what made them.
///
/// # Errors
/// [`TableError::Row`] if ids are of mixed types, or not every row has an embedding.
pub fn encode_part(
    name: &str,
    id: DataType,
    rows: &[KnowledgeRecord],
    embeddings: Option<&Embeddings>,
    info: &PartInfo,
) -> Result<Bytes, TableError> {
    let embedded = embeddings.zip(info.embedding.as_ref().map(|e| e.spec.layout));
    let info =
        serde_json::to_string(info).map_err(|e| TableError::Row { file: name.to_owned(), reason: e.to_string() })?;
    let digest = Digest::of(info.as_bytes()).to_string();
    let metadata = [(PART_KEY, info), (PART_DIGEST_KEY, digest)];
    table::encode_embedded(name, record_schema(id), rows, embedded, &metadata)
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
pub fn check_part(name: &str, id: DataType, bytes: Bytes) -> Result<(Vec<KnowledgeRecord>, PartInfo), TableError> {
    let (rows, embeddings, info) = decode_whole(name, bytes.clone())?;
    if info.writer != WRITER {
        return Ok((rows, info));
    }
    let value = |key| table::footer(name, &bytes, key).map(|v| (key, v.unwrap_or_default()));
    let metadata = [value(PART_KEY)?, value(PART_DIGEST_KEY)?];
    let layout = info.embedding.as_ref().map(|e| e.spec.layout);
    let embedded = embeddings.as_ref().zip(layout);
    let again = table::encode_embedded(name, record_schema(id), &rows, embedded, &metadata)?;
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
    use super::*;
    use crate::embedding::{EmbeddingLayout, EmbeddingSpec, EncoderInfo, Pooling};

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
            let field = layout.field(3);
            assert_eq!((field.name().as_str(), field.is_nullable()), ("embedding", false));
            assert_eq!(field.data_type().to_string(), list);
            let (embeddings, info) = embedded(&rows, layout);
            let bytes = encode_part("p", DataType::Int64, &rows, Some(&embeddings), &info).unwrap();
            let read = decode_whole("p", bytes.clone()).unwrap();
            assert_eq!(read, (rows.clone(), Some(embeddings), info));
            check_part("p", DataType::Int64, bytes).unwrap();
        }
    }

    #[test]
    fn changed_or_missing_embeddings_are_noticed() {
        let rows = vec![record(EntityId::Int(1))];
        let (embeddings, info) = embedded(&rows, EmbeddingLayout::Fixed);
        let encode = |e| encode_part("p", DataType::Int64, &rows, e, &info);
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
            let bytes = encode_part("p", id_type(&id), &rows, None, &info(&rows)).unwrap();
            let (read, read_info) = decode_part("p", bytes).unwrap();
            assert_eq!(read, rows);
            assert_eq!(read_info, info(&rows));
        }
    }

    #[test]
    fn an_empty_part_is_a_valid_file() {
        let bytes = encode_part("p", DataType::Int64, &[], None, &info(&[])).unwrap();
        assert!(decode_part("p", bytes).unwrap().0.is_empty());
    }

    #[test]
    fn changed_rows_are_noticed() {
        let rows = vec![record(EntityId::Int(1))];
        let mut other = rows.clone();
        other[0].text.push('!');
        let bytes = encode_part("p", DataType::Int64, &other, None, &info(&rows)).unwrap();
        let error = decode_part("p", bytes).unwrap_err().to_string();
        assert!(error.contains("do not match the digest"), "{error}");
    }

    #[test]
    fn mixed_id_types_are_refused() {
        let rows = vec![record(EntityId::Text("x".into()))];
        assert!(encode_part("p", DataType::Int64, &rows, None, &info(&rows)).is_err());
    }
}
