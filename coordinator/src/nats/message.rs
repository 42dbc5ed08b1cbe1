//! The messages that go through NATS, and their subjects.

use async_nats::Subject;
use bytes::Bytes;
use jiff::Timestamp;
use laser_schema::Digest;
use laser_schema::job::ShardJob;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::NatsError;
use super::config::is_token;

/// The version of [`JobMessage`] and [`DeadLetter`].
pub const MESSAGE_VERSION: u32 = 1;

/// Everything that a worker needs to find a run's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRef {
    /// The run's name: letters, digits, `-` and `_`.
    pub run: String,
    /// The output's root, as a URL.
    pub output: String,
    /// Digest of the bytes of `plan.json`.
    pub plan_digest: Digest,
}

pub(super) fn check_run(run: &str) -> Result<(), NatsError> {
    match is_token(run) {
        true => Ok(()),
        false => Err(NatsError::RunName(run.to_owned())),
    }
}

/// One queued shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobMessage {
    /// [`MESSAGE_VERSION`].
    pub version: u32,
    /// The shard's run.
    #[serde(flatten)]
    pub run: RunRef,
    /// The work.
    pub job: ShardJob,
}

impl JobMessage {
    pub(super) fn new(run: &RunRef, job: &ShardJob) -> Self {
        Self { version: MESSAGE_VERSION, run: run.clone(), job: job.clone() }
    }

    /// The version is checked first: a different one explains why the rest does not fit.
    pub(super) fn decode(value: Value) -> Result<Self, NatsError> {
        let version = value.get("version").and_then(Value::as_u64);
        if version != Some(u64::from(MESSAGE_VERSION)) {
            let found = version.map_or("none".to_owned(), |v| v.to_string());
            return Err(NatsError::Message(format!(
                "message of version {found}, expected {MESSAGE_VERSION}: coordinator and workers must be of one release"
            )));
        }
        serde_json::from_value(value).map_err(|error| NatsError::Message(format!("message is not a job: {error}")))
    }

    /// The message's subject, of a queue whose subjects of open shards have this prefix.
    pub(super) fn subject(&self, prefix: &str) -> String {
        subject(prefix, &self.run.run, self.job.shard)
    }
}

/// A shard that was given up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// [`MESSAGE_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// The shard.
    pub shard: u32,
    /// The reason why the last attempt failed.
    pub reason: String,
    /// The worker of the last attempt.
    pub worker: String,
    /// The number of that attempt, from 1.
    pub attempt: u32,
    /// The time at which it was given up.
    pub time: Timestamp,
    /// The job's message as it was queued, or a string if it was not JSON.
    pub message: Value,
}

/// Plain data with string keys always serialises.
pub(super) fn encode(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).unwrap_or_default().into()
}

/// Returns a message's payload as JSON, or as a string.
pub(super) fn value(payload: &[u8]) -> Value {
    serde_json::from_slice(payload).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(payload).into_owned()))
}

pub(super) fn subject(prefix: &str, run: &str, shard: u32) -> String {
    format!("{prefix}.{run}.{shard}")
}

/// Returns the pattern of all subjects of a run.
pub(super) fn subjects(prefix: &str, run: &str) -> String {
    format!("{prefix}.{run}.*")
}

/// Returns the run and shard of a subject, whose prefix the stream has checked.
pub(super) fn parse_subject(subject: &Subject) -> Option<(&str, u32)> {
    let (prefix, shard) = subject.rsplit_once('.')?;
    let (_, run) = prefix.rsplit_once('.')?;
    Some((run, shard.parse().ok()?))
}
