//! Shards that were given up: list them, show one, queue them again.

use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use futures::{StreamExt, TryStreamExt, stream};

use super::message::{JobMessage, check_run, encode, subject, subjects};
use super::{DeadLetter, NatsClient, NatsError, failed};

/// Number of dead letters read at the same time.
const WINDOW: usize = 16;

impl NatsClient {
    /// Returns the dead letters of a run, by shard. They include shards that were committed after all, if a worker was
    /// wrongly taken for dead.
    ///
    /// # Errors
    /// [`NatsError`]: the run's name, a request, or a dead letter of another release.
    pub async fn dead_letters(&self, run: &str) -> Result<Vec<DeadLetter>, NatsError> {
        check_run(run)?;
        let filter = subjects(&self.config.dead_letter_subjects(), run);
        let listed = self.subjects(&self.config.dead_letters, &filter).await?;
        let shards = listed.into_iter().filter_map(|s| s.rsplit('.').next()?.parse().ok());
        let mut letters: Vec<DeadLetter> = stream::iter(shards)
            .map(|shard| self.dead_letter(run, shard))
            .buffer_unordered(WINDOW)
            .try_collect()
            .await?;
        letters.sort_unstable_by_key(|letter| letter.shard);
        Ok(letters)
    }

    /// Returns the dead letter of a shard.
    ///
    /// # Errors
    /// [`NatsError::NoDeadLetter`] and those of [`NatsClient::dead_letters`].
    pub async fn dead_letter(&self, run: &str, shard: u32) -> Result<DeadLetter, NatsError> {
        let message = self.dead_letter_message(run, shard).await?;
        decode(run, shard, &message)
    }

    /// Queues shards again with all their attempts, and returns how many were not queued already. A dead letter is
    /// deleted once its job is queued, so an interruption loses nothing.
    ///
    /// # Errors
    /// Those of [`NatsClient::dead_letter`]; [`NatsError::BadDeadLetter`] if the message is not a job, which only
    /// publishing the run again corrects. Shards before the failed one are queued.
    pub async fn replay(&self, run: &str, shards: &[u32]) -> Result<u64, NatsError> {
        let mut new = 0;
        for &shard in shards {
            new += u64::from(self.replay_one(run, shard).await?);
        }
        Ok(new)
    }

    async fn replay_one(&self, run: &str, shard: u32) -> Result<bool, NatsError> {
        let message = self.dead_letter_message(run, shard).await?;
        let letter = decode(run, shard, &message)?;
        let job = JobMessage::decode(letter.message).map_err(|error| NatsError::BadDeadLetter {
            run: run.to_owned(),
            shard,
            reason: format!("{error}; run the coordinator again: it publishes what is missing"),
        })?;
        let new = self.enqueue(job.subject(&self.config.job_subjects()), encode(&job)).await?;
        let stream = self.stream(&self.config.dead_letters).await?;
        // Delete by sequence: a newer letter of the same shard is another message.
        let deleted = stream.delete_message(message.sequence).await;
        deleted.map_err(failed(format!("delete the dead letter of run {run}, shard {shard}")))?;
        Ok(new)
    }

    async fn dead_letter_message(&self, run: &str, shard: u32) -> Result<StreamMessage, NatsError> {
        check_run(run)?;
        let subject = subject(&self.config.dead_letter_subjects(), run, shard);
        self.patiently(|| async {
            let stream = self.stream(&self.config.dead_letters).await?;
            match stream.get_last_raw_message_by_subject(&subject).await {
                Ok(message) => Ok(message),
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                    Err(NatsError::NoDeadLetter { run: run.to_owned(), shard })
                }
                Err(error) => Err(failed(format!("read {subject}"))(error)),
            }
        })
        .await
    }
}

fn decode(run: &str, shard: u32, message: &StreamMessage) -> Result<DeadLetter, NatsError> {
    serde_json::from_slice(&message.payload).map_err(|error| NatsError::BadDeadLetter {
        run: run.to_owned(),
        shard,
        reason: error.to_string(),
    })
}
