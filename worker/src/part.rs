//! A shard on its way from rows to its one output object.

use std::collections::BTreeMap;

use bytes::Bytes;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use laser_decode::{Pool, Trie};
use laser_features::encoder::Encoded;
use laser_schema::audit::Audit;
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::entity::IdType;
use laser_schema::job::{Lease, Plan, Policy, ShardRow};
use laser_schema::knowledge::{ErrorRecord, Figures, KnowledgeRecord, PartInfo, ratio};
use laser_schema::{Digest, EntityId};
use laser_store::part::encode_part;
use laser_store::table::TableError;

use crate::generate::Generated;

/// A shard's input, for the engine.
#[derive(Debug)]
pub(crate) enum Work {
    Generate {
        rows: Vec<ShardRow>,
        /// How their texts are verified.
        policy: Policy,
    },
    Audit(Vec<ShardRow>),
}

/// The rows of a part.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) rows: Vec<KnowledgeRecord>,
    pub(crate) errors: Vec<ErrorRecord>,
    pub(crate) carried: u64,
    /// Figures of the generated rows, by pool.
    pub(crate) figures: BTreeMap<String, Figures>,
}

/// What a shard came to.
#[derive(Debug)]
pub(crate) enum Output {
    Part(Rows),
    Audit(Audit),
    /// It was written by an earlier attempt.
    Exists,
    Failed(String),
    /// There is none: the worker ends.
    Released,
}

/// The record of one generated text.
pub(crate) fn record(
    plan: &Plan,
    row: &ShardRow,
    policy: Policy,
    (pool, trie): (Option<&Pool>, Option<&Trie>),
    generated: &Generated,
) -> KnowledgeRecord {
    let accepted: u64 = generated.step_accepted.iter().map(|a| u64::from(*a)).sum();
    KnowledgeRecord {
        entity_id: row.entity_id.clone(),
        text: generated.text.clone(),
        items: trie.map_or_else(Vec::new, |trie| generated.items.iter().map(|item| item_id(trie, item.0)).collect()),
        scores: generated.items.iter().map(|item| micro(item.1)).collect(),
        prompt_tokens: count(row.prompt.len() as u64),
        text_tokens: count(generated.tokens.len() as u64),
        pool: row.pool.clone(),
        policy: policy.to_string(),
        stop_reason: generated.stop.as_str().to_owned(),
        forwards: count(generated.step_accepted.len() as u64),
        drafted_tokens: count(generated.drafted),
        accepted_tokens: count(accepted),
        relaxed_tokens: count(generated.relaxed),
        step_accepted: generated.step_accepted.iter().map(|a| i64::from(*a)).collect(),
        mean_log_probability: micro(ratio(generated.log_probability, generated.tokens.len() as f64)),
        draft_seconds: micro(generated.draft_seconds),
        engine_seconds: micro(generated.engine_seconds),
        prompt_digest: row.prompt_digest.clone(),
        spec_digest: plan.spec.digest(),
        model_digest: plan.spec.model.clone(),
        pool_digest: pool.map(|p| Digest::from_bytes(p.digest()).to_string()).unwrap_or_default(),
        generated_by: plan.run.clone(),
        event_timestamp: event_timestamp(plan),
        // As a part holds it, so that records compare equal once they are read back.
        created_timestamp: Timestamp::from_microsecond(Timestamp::now().as_microsecond()).unwrap_or_default(),
        samples: Vec::new(),
        runners_up: (plan.runners_up > 0).then(|| generated.runners_up.clone()),
    }
}

/// The id of an item of a trie.
fn item_id(trie: &Trie, item: u32) -> EntityId {
    let id = trie.item_id(item);
    match id.parse() {
        Ok(id) if trie.meta().integer_ids => EntityId::Int(id),
        _ => EntityId::Text(id.to_owned()),
    }
}

/// Midnight UTC of the run's night.
fn event_timestamp(plan: &Plan) -> Timestamp {
    plan.date.to_zoned(TimeZone::UTC).map(|z| z.timestamp()).unwrap_or_default()
}

/// To six decimals: all that is meant, and what every reader gives back bit for bit.
fn micro(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

fn count(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Last night's record, standing for tonight.
pub(crate) fn carry(plan: &Plan, mut record: KnowledgeRecord) -> KnowledgeRecord {
    record.event_timestamp = event_timestamp(plan);
    record
}

/// The bytes of a part.
pub(crate) fn encode(
    plan: &Plan,
    lease: &Lease,
    attempt: &str,
    rows: Rows,
    encoded: Option<&Encoded>,
) -> Result<Bytes, TableError> {
    let job = &lease.job;
    let Rows { rows, errors, carried, figures } = rows;
    let embedding = plan.embedding.clone().zip(encoded);
    let info = PartInfo {
        carried,
        errors,
        figures,
        embedding: embedding.map(|(spec, encoded)| EmbeddingInfo::new(spec, encoded.truncated)),
        parsed: plan.spec.parsed(),
        input: Some(job.input_digest.clone()),
        ..PartInfo::new(&plan.run, job.shard, job.kind, attempt, &rows)
    };
    let info = info.with_content(plan.content());
    let id = plan.ids.get(&job.kind).copied().unwrap_or(IdType::String);
    let embeddings = encoded.map(|encoded| &encoded.embeddings);
    encode_part(&job.output, id, &rows, embeddings, &info)
}
