//! The streams and the consumer: created if missing, changed if possible, refused otherwise.
//!
//! A server may accept a setting and drop it, so its answer is compared with the request.

use std::fmt::Debug;

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::stream::{Config, ConsumerErrorKind, DiscardPolicy, RetentionPolicy, StorageType, Stream};

use super::{NatsClient, NatsError, failed};

/// Most shards held by workers or waiting for another attempt, over all runs. The server's default of 1,000 would leave
/// workers idle from 250 on, at four shards each.
const ACK_PENDING_MAX: i64 = 20_000;
/// Most workers that wait for a shard at the same time; the server's default is 512.
const WAITING_MAX: i64 = 4_096;
/// Most dead letters, at about 1 kB each: far more than any run has that is not broken as a whole.
const DEAD_LETTERS_MAX: i64 = 1_000_000;

impl NatsClient {
    /// Ensures that the streams and the consumer exist as configured. This is cheap if they do: five requests. Queued
    /// runs are not touched.
    ///
    /// # Errors
    /// [`NatsError::Differs`] if an existing one cannot be changed; [`NatsError::Away`], [`NatsError::Request`].
    pub async fn ensure_streams(&self) -> Result<(), NatsError> {
        self.patiently(|| async {
            self.ensure_stream(self.dead_letter_stream()).await?;
            self.ensure_stream(self.planning_stream()).await?;
            let jobs = self.ensure_stream(self.job_stream()).await?;
            self.ensure_consumer(&jobs).await
        })
        .await
    }

    fn job_stream(&self) -> Config {
        Config {
            name: self.config.stream.clone(),
            subjects: vec![format!("{}.*.*", self.config.job_subjects())],
            retention: RetentionPolicy::WorkQueue,
            storage: StorageType::File,
            num_replicas: self.config.replicas,
            discard: DiscardPolicy::New,
            discard_new_per_subject: true,
            max_messages_per_subject: 1,
            max_messages: -1,
            max_bytes: -1,
            ..Default::default()
        }
    }

    fn dead_letter_stream(&self) -> Config {
        Config {
            name: self.config.dead_letters.clone(),
            subjects: vec![format!("{}.*.*", self.config.dead_letter_subjects())],
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            num_replicas: self.config.replicas,
            discard: DiscardPolicy::Old,
            max_messages_per_subject: 1,
            max_messages: DEAD_LETTERS_MAX,
            max_bytes: -1,
            ..Default::default()
        }
    }

    fn planning_stream(&self) -> Config {
        Config {
            name: self.config.planning.clone(),
            subjects: vec![format!("{}.*.*", self.config.planning_subjects())],
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            num_replicas: self.config.replicas,
            discard: DiscardPolicy::Old,
            max_messages_per_subject: 1,
            max_messages: -1,
            max_bytes: -1,
            max_age: self.config.planning_lease(),
            ..Default::default()
        }
    }

    fn consumer(&self) -> pull::Config {
        pull::Config {
            durable_name: Some(self.config.consumer.clone()),
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.config.lease(),
            // Workers count attempts and write the dead letter: a message at the server's own limit would stay in the
            // stream and never be delivered.
            max_deliver: -1,
            max_ack_pending: ACK_PENDING_MAX,
            max_waiting: WAITING_MAX,
            ..Default::default()
        }
    }

    async fn ensure_stream(&self, wanted: Config) -> Result<Stream, NatsError> {
        let what = format!("stream {}", wanted.name);
        let found = match self.jetstream.get_stream(&wanted.name).await {
            Ok(stream) => stream.cached_info().config.clone(),
            Err(error) if matches!(error.kind(), GetStreamErrorKind::JetStream(e) if e.code() == 404) => {
                let stream = match self.jetstream.create_stream(&wanted).await {
                    Ok(stream) => stream,
                    // Of processes that make it at once, servers of 2.9 tell some that its subjects are taken.
                    Err(error) => {
                        let made = self.jetstream.get_stream(&wanted.name).await;
                        made.map_err(|_| failed(format!("make {what}"))(error))?
                    }
                };
                refuse(&what, stream_differences(&wanted, &stream.cached_info().config))?;
                return Ok(stream);
            }
            Err(error) => return Err(failed(format!("look at {what}"))(error)),
        };
        let differences = stream_differences(&wanted, &found);
        if !differences.is_empty() {
            tracing::info!(what, differences = differences.join(", "), "changing");
            // The server reports which settings cannot be changed; settings that it dropped silently show below.
            let changed = changed(&wanted, found);
            if let Err(error) = self.jetstream.update_stream(&changed).await {
                return Err(differs(&what, &[differences, vec![error.to_string()]].concat()));
            }
        }
        let stream = self.jetstream.get_stream(&wanted.name).await;
        let stream = stream.map_err(failed(format!("look at {what}")))?;
        refuse(&what, stream_differences(&wanted, &stream.cached_info().config))?;
        Ok(stream)
    }

    async fn ensure_consumer(&self, jobs: &Stream) -> Result<(), NatsError> {
        let name = &self.config.consumer;
        let what = format!("consumer {name}");
        let wanted = self.consumer();
        let stream = &self.config.stream;
        let found: Result<PullConsumer, _> = self.jetstream.get_consumer_from_stream(name, stream).await;
        match found {
            Ok(found) => {
                let differences = consumer_differences(&wanted, &found.cached_info().config);
                if differences.is_empty() {
                    return Ok(());
                }
                tracing::info!(what, differences = differences.join(", "), "changing");
            }
            Err(error) if matches!(error.kind(), ConsumerErrorKind::JetStream(e) if e.code() == 404) => {}
            Err(error) => return Err(failed(format!("look at {what}"))(error)),
        }
        let made = jobs.create_consumer(wanted.clone()).await;
        let made = made.map_err(failed(format!("make or change {what}")))?;
        refuse(&what, consumer_differences(&wanted, &made.cached_info().config))
    }
}

fn refuse(what: &str, differences: Vec<String>) -> Result<(), NatsError> {
    match differences.is_empty() {
        true => Ok(()),
        false => Err(differs(what, &differences)),
    }
}

fn differs(what: &str, differences: &[String]) -> NatsError {
    NatsError::Differs { what: what.to_owned(), differences: differences.join(", ") }
}

/// Returns the operator's configuration with our settings applied.
fn changed(wanted: &Config, found: Config) -> Config {
    Config {
        subjects: wanted.subjects.clone(),
        retention: wanted.retention,
        storage: wanted.storage,
        num_replicas: wanted.num_replicas,
        discard: wanted.discard,
        discard_new_per_subject: wanted.discard_new_per_subject,
        max_messages_per_subject: wanted.max_messages_per_subject,
        max_messages: wanted.max_messages,
        max_age: wanted.max_age,
        ..found
    }
}

/// The settings that differ, by their names on the server.
macro_rules! differences {
    ($wanted:expr, $found:expr, $($key:literal $field:ident),+ $(,)?) => {{
        let difference = |key: &str, wanted: &dyn Debug, found: &dyn Debug| {
            format!("{key}: expected {wanted:?}, found {found:?}")
        };
        let differences = [$(
            ($wanted.$field != $found.$field).then(|| difference($key, &$wanted.$field, &$found.$field))
        ),+];
        differences.into_iter().flatten().collect()
    }};
}

/// Compares every setting that the queue needs; other settings are the operator's.
fn stream_differences(wanted: &Config, found: &Config) -> Vec<String> {
    differences!(
        wanted, found,
        "subjects" subjects, "retention" retention, "storage" storage, "replicas" num_replicas, "discard" discard,
        "discard_new_per_subject" discard_new_per_subject, "max_msgs_per_subject" max_messages_per_subject,
        "max_msgs" max_messages, "max_age" max_age,
    )
}

fn consumer_differences(wanted: &pull::Config, found: &async_nats::jetstream::consumer::Config) -> Vec<String> {
    differences!(
        wanted, found,
        "ack_policy" ack_policy, "ack_wait" ack_wait, "max_deliver" max_deliver, "filter_subject" filter_subject,
        "backoff" backoff, "max_ack_pending" max_ack_pending, "max_waiting" max_waiting,
    )
}
