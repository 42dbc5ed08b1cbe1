//! The `[queue]` section.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::NatsError;

/// Longest wait before a failed shard is retried.
const RETRY_MAX: Duration = Duration::from_secs(600);

/// `[queue]`: how to reach NATS and how to queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NatsConfig {
    /// The servers, separated by commas: `nats://host:4222` or `tls://host:4222`.
    pub url: String,
    /// The first token of all subjects; two queues of one account need different ones.
    pub subjects: String,
    /// The stream of open shards.
    pub stream: String,
    /// The durable consumer that all workers share.
    pub consumer: String,
    /// The stream of shards that were given up.
    pub dead_letters: String,
    /// The stream by which coordinators of one run share its planning.
    pub planning: String,
    /// Copies that the servers keep of each stream: 1, 3 or 5, at most the number of servers.
    pub replicas: usize,
    /// Seconds that a lease lasts without a heartbeat. Workers take it from the consumer.
    pub lease_seconds: u64,
    /// Deliveries of a shard before it is given up, at least 1. JetStream counts all of them: failures, leases that
    /// ended, and shards that a draining worker gave back.
    pub attempts: u32,
    /// Seconds before the second attempt of a failed shard; doubles with each further attempt, up to 600.
    pub retry_seconds: u64,
    /// The servers' certificate authority, a PEM file; if not set, the system's.
    pub tls_ca: Option<PathBuf>,
    /// Our own certificate, a PEM file; with `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// The key of `tls_cert`, a PEM file.
    pub tls_key: Option<PathBuf>,
    /// A credentials file (JWT and seed), as `nsc` writes it.
    pub credentials: Option<PathBuf>,
    /// A file with the seed of a user's nkey (`SU…`); instead of `credentials`.
    pub nkey_seed: Option<PathBuf>,
    /// The prefix for answers, for users who may subscribe only to it, such as `_INBOX_worker`; if not set, `_INBOX`.
    pub inbox_prefix: Option<String>,
}

impl Default for NatsConfig {
    /// A server on this machine, one replica, a lease of one minute, 5 attempts.
    fn default() -> Self {
        Self {
            url: "nats://127.0.0.1:4222".into(),
            subjects: "laser".into(),
            stream: "LASER_JOBS".into(),
            consumer: "laser-workers".into(),
            dead_letters: "LASER_DLQ".into(),
            planning: "LASER_PLANNING".into(),
            replicas: 1,
            lease_seconds: 60,
            attempts: 5,
            retry_seconds: 1,
            tls_ca: None,
            tls_cert: None,
            tls_key: None,
            credentials: None,
            nkey_seed: None,
            inbox_prefix: None,
        }
    }
}

impl NatsConfig {
    /// Checks what can be checked without a server; files are read when connecting.
    ///
    /// # Errors
    /// [`NatsError::Config`], with the first key that is wrong.
    pub fn validate(&self) -> Result<(), NatsError> {
        let names = [
            ("subjects", &self.subjects),
            ("stream", &self.stream),
            ("consumer", &self.consumer),
            ("dead_letters", &self.dead_letters),
            ("planning", &self.planning),
        ];
        for (key, name) in names {
            if !is_token(name) {
                return bad(key, format!("{name:?}: use letters, digits, '-' and '_' only"));
            }
        }
        let streams = [("stream", &self.stream), ("dead_letters", &self.dead_letters), ("planning", &self.planning)];
        for (at, (key, name)) in streams.iter().enumerate() {
            if let Some((other, _)) = streams[..at].iter().find(|(_, before)| before == name) {
                return bad(key, format!("{name:?} is [queue] {other} too; give it another name"));
            }
        }
        if self.lease_seconds == 0 {
            return bad("lease_seconds", "expected at least 1, got 0".into());
        }
        if self.attempts == 0 {
            return bad("attempts", "expected at least 1, got 0".into());
        }
        if !(1..=5).contains(&self.replicas) {
            return bad("replicas", format!("expected 1 to 5, got {}", self.replicas));
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return bad("tls_cert", "set both tls_cert and tls_key, or neither".into());
        }
        if self.credentials.is_some() && self.nkey_seed.is_some() {
            return bad("nkey_seed", "credentials is set too; remove one".into());
        }
        Ok(())
    }

    /// The queue of canaries beside this one, so that no worker of nights gets their shards.
    #[must_use]
    pub fn of_canaries(&self) -> Self {
        Self {
            subjects: format!("{}-canary", self.subjects),
            stream: format!("{}_CANARY", self.stream),
            consumer: format!("{}-canary", self.consumer),
            dead_letters: format!("{}_CANARY", self.dead_letters),
            planning: format!("{}_CANARY", self.planning),
            ..self.clone()
        }
    }

    /// The prefix of the subjects of open shards.
    pub(super) fn job_subjects(&self) -> String {
        format!("{}.jobs", self.subjects)
    }

    /// The prefix of the subjects of dead letters.
    pub(super) fn dead_letter_subjects(&self) -> String {
        format!("{}.dlq", self.subjects)
    }

    /// The prefix of the subjects of planning.
    pub(super) fn planning_subjects(&self) -> String {
        format!("{}.planning", self.subjects)
    }

    /// How long a coordinator that plans may be silent. A coordinator that is started again after a crash waits as
    /// long for its predecessor, so this is at most ten seconds.
    pub(super) fn planning_lease(&self) -> Duration {
        self.lease().min(Duration::from_secs(10))
    }

    /// Duration of a lease without a heartbeat.
    pub fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_seconds)
    }

    /// Wait of a shard after its attempt (from 1) has failed.
    pub(super) fn retry_delay(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(16);
        (Duration::from_secs(self.retry_seconds) * (1 << doublings)).min(RETRY_MAX)
    }
}

/// Whether a name can be one token of a subject and the name of a stream or consumer.
pub(super) fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

fn bad(key: &'static str, reason: String) -> Result<(), NatsError> {
    Err(NatsError::Config { key, reason })
}

/// Reads the file that a key names; the client's own errors would name neither key nor file.
pub(super) fn read(key: &'static str, file: &Path, expected: &'static str) -> Result<String, NatsError> {
    fs::read_to_string(file).map_err(|error| bad_file(key, file, expected, error.to_string()))
}

pub(super) fn bad_file(key: &'static str, file: &Path, expected: &'static str, reason: String) -> NatsError {
    let reason = format!("{}: {reason}; name a readable {expected}, or remove the key", file.display());
    NatsError::Config { key, reason }
}
