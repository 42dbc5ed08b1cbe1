//! The distributed queue: NATS JetStream, for runs of many processes.
//!
//! One *WorkQueue* stream holds a message for each shard that is not done, on the subject
//! `laser.jobs.RUN.SHARD`, at most one for each subject: publishing a plan twice queues it once, without a
//! window of time. One durable pull consumer hands the messages out; an acknowledgement deletes. A shard that is given
//! up is copied to the dead letter stream, `laser.dlq.RUN.SHARD`, and leaves the queue once that stream has confirmed
//! the copy. (A plain subscription to `laser.dlq.>` may see the copy before it is stored; read the stream instead.)
//!
//! Guaranteed: a queued shard is delivered at least once and ends acknowledged or as a dead letter; none gets stuck.
//! Not guaranteed: that it is delivered only once, or that the stream outlives its servers' disks. Both are harmless
//! because the output object is the commit: what the store does not list is published again.
//!
//! Cost: a message is a few hundred bytes without payload, and 256 publishes are in flight at a time. A worker fetches
//! one message at a time, because messages fetched ahead would be taken from its peers.
//!
//! Needs servers from 2.9.0 on. Everything used exists there; a server would silently drop newer settings.

mod config;
mod connect;
mod dead_letters;
mod delivery;
mod message;
mod planning;
mod publish;
mod queue;
mod streams;
mod worker;

use std::fmt::Display;

pub use config::NatsConfig;
pub use connect::{NatsClient, NatsEvents, connect};
pub use message::{DeadLetter, JobMessage, MESSAGE_VERSION, RunRef};
pub use planning::Planner;
pub use queue::NatsQueue;
pub use worker::NatsWorker;

/// The reasons why NATS could not be used.
#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    /// A key of the configuration has an invalid value, or names a file that cannot be used.
    #[error("[queue] {key}: {reason}")]
    Config {
        /// The key.
        key: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
    /// No server accepts the connection.
    #[error(
        "cannot connect to nats at {servers}: {reason}; check that the server runs and that [queue] url, tls_* and \
         credentials or nkey_seed are its own"
    )]
    Connect {
        /// The servers, without user names and passwords.
        servers: String,
        /// The client's message.
        reason: String,
    },
    /// A server lacks what the queue needs.
    #[error("nats server {server} {problem}")]
    Server {
        /// The server's name.
        server: String,
        /// What it lacks and what to do.
        problem: String,
    },
    /// An existing stream or consumer has a configuration that cannot be changed to ours.
    #[error(
        "{what} exists with another configuration: {differences}; let its runs end and delete it, or give \
         another name in [queue]"
    )]
    Differs {
        /// `stream X` or `consumer X`.
        what: String,
        /// Each difference with expected and found.
        differences: String,
    },
    /// The connection was lost and did not come back in time.
    #[error(
        "nats has not answered for {} s; the client keeps reconnecting: try again later",
        connect::PATIENCE.as_secs()
    )]
    Away,
    /// A request failed.
    #[error("nats: {action}: {reason}")]
    Request {
        /// The request.
        action: String,
        /// The answer. A missing permission shows as a timeout.
        reason: String,
    },
    /// A message that is no job of this release.
    #[error("{0}")]
    Message(String),
    /// A run's name cannot be part of a subject.
    #[error("run {0:?} cannot be part of a nats subject; use letters, digits, '-' and '_' only")]
    RunName(String),
    /// The dead letter does not exist.
    #[error("run {run} has no dead letter for shard {shard}; `laser dlq list` shows the existing ones")]
    NoDeadLetter {
        /// The run.
        run: String,
        /// The shard.
        shard: u32,
    },
    /// A dead letter cannot be read, or its message is not a job.
    #[error("dead letter of run {run}, shard {shard}: {reason}")]
    BadDeadLetter {
        /// The run.
        run: String,
        /// The shard.
        shard: u32,
        /// What is wrong and what to do.
        reason: String,
    },
}

/// Converts a request's error.
fn failed<E: Display>(action: impl Into<String>) -> impl FnOnce(E) -> NatsError {
    let action = action.into();
    move |error| NatsError::Request { action, reason: error.to_string() }
}
