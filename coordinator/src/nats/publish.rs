//! The coordinator's side: queueing a run, counting its queued shards, removing them.

use std::error::Error;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::stream::Stream;
use async_nats::jetstream::{self, ErrorCode};
use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::FuturesUnordered;
use laser_schema::job::ShardJob;
use tokio::time::Instant;

use super::connect::{PATIENCE, PAUSE};
use super::message::{JobMessage, check_run, encode, subjects};
use super::{NatsClient, NatsError, RunRef, failed};

/// Number of publishes whose confirmation is awaited at the same time: ten times as fast as one after the other.
const WINDOW: usize = 256;
impl NatsClient {
    /// Queues the shards that are not queued already, roughly in the given order, and returns how many were new.
    /// Publishing again is safe at any time: a shard that a worker holds counts as queued. (After an outage the number
    /// may be too small, because a publish whose confirmation was lost is found queued.)
    ///
    /// # Errors
    /// [`NatsError::RunName`]; [`NatsError::Away`] after 30 s; [`NatsError::Request`] if it is refused. Some shards are
    /// queued then; publish all of them again to continue.
    pub fn publish<'a>(
        &'a self,
        run: &'a RunRef,
        jobs: impl IntoIterator<Item = &'a ShardJob>,
    ) -> impl Future<Output = Result<u64, NatsError>> + Send {
        // The iterator is consumed here: a future that held a caller's closures could not be spawned.
        let jobs: Vec<&ShardJob> = jobs.into_iter().collect();
        async move {
            check_run(&run.run)?;
            let (mut jobs, mut new) = (jobs.into_iter(), 0);
            let prefix = self.config.job_subjects();
            let mut under_way = FuturesUnordered::new();
            loop {
                for job in jobs.by_ref().take(WINDOW - under_way.len()) {
                    let message = JobMessage::new(run, job);
                    under_way.push(self.enqueue(message.subject(&prefix), encode(&message)));
                }
                match under_way.try_next().await? {
                    Some(is_new) => new += u64::from(is_new),
                    None => return Ok(new),
                }
            }
        }
    }

    /// Returns how many shards of a run are queued: waiting, held by a worker, or waiting for another attempt. This is
    /// no measure of progress (the store is), but 0 means that no worker will do anything more for the run.
    ///
    /// It counts the stream's subjects, which every server since 2.9 lists, 100,000 per request.
    ///
    /// # Errors
    /// [`NatsError::RunName`], [`NatsError::Away`], [`NatsError::Request`].
    pub async fn queued(&self, run: &str) -> Result<u64, NatsError> {
        check_run(run)?;
        let filter = subjects(&self.config.job_subjects(), run);
        let listed = self.subjects(&self.config.stream, &filter).await?;
        Ok(listed.len() as u64)
    }

    /// Removes a run's queued shards, also those that workers hold, and returns their number. Workers finish and commit
    /// what they hold, but nobody gets those shards again unless they are published again.
    ///
    /// # Errors
    /// [`NatsError::RunName`], [`NatsError::Request`].
    pub async fn purge(&self, run: &str) -> Result<u64, NatsError> {
        check_run(run)?;
        let stream = self.stream(&self.config.stream).await?;
        let purged = stream.purge().filter(subjects(&self.config.job_subjects(), run)).await;
        Ok(purged.map_err(failed(format!("purge run {run}")))?.purged)
    }

    /// Returns the stream of this name without checking that it exists.
    pub(super) async fn stream(&self, name: &str) -> Result<Stream<()>, NatsError> {
        let stream = self.jetstream.get_stream_no_info(name).await;
        stream.map_err(failed(format!("use stream {name}")))
    }

    /// Returns the matching subjects of a stream.
    pub(super) async fn subjects(&self, stream: &str, filter: &str) -> Result<Vec<String>, NatsError> {
        self.patiently(|| async {
            let action = format!("list {filter} of stream {stream}");
            let listed = self.stream(stream).await?.info_with_subjects(filter).await;
            let listed = listed.map_err(failed(&action))?;
            let subjects = listed.map_ok(|(subject, _)| subject).try_collect().await;
            subjects.map_err(failed(&action))
        })
        .await
    }

    /// Publishes a job; `false` if its subject already holds a message.
    pub(super) async fn enqueue(&self, subject: String, payload: Bytes) -> Result<bool, NatsError> {
        let started = Instant::now();
        loop {
            let published = self.publish_confirmed(&subject, &payload);
            match self.while_connected(published).await {
                Some(Ok(())) => return Ok(true),
                Some(Err(error)) if is_queued_already(&error) => return Ok(false),
                Some(Err(error)) if !is_passing(&error) || started.elapsed() > PATIENCE => {
                    return Err(failed(format!("publish {subject}"))(error));
                }
                None if started.elapsed() > PATIENCE => {
                    return Err(NatsError::Away);
                }
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Publishes once and waits for the confirmation.
    pub(super) async fn publish_confirmed(&self, subject: &str, payload: &Bytes) -> Result<(), PublishError> {
        let sent = self.jetstream.publish(subject.to_owned(), payload.clone());
        sent.await?.await?;
        Ok(())
    }
}

/// All limits of a stream share this error code; a full stream must not look like success.
fn is_queued_already(error: &PublishError) -> bool {
    let source = error.source().and_then(|s| s.downcast_ref::<jetstream::Error>());
    source.is_some_and(|e| e.error_code() == ErrorCode::STREAM_STORE_FAILED && e.to_string().contains("per subject"))
}

/// No stream: while it exists, it is being recovered or elects a leader.
fn is_passing(error: &PublishError) -> bool {
    matches!(error.kind(), PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe | PublishErrorKind::StreamNotFound)
}
