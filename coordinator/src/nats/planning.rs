//! Which coordinator plans a run, and which range of its entities is rendered next.
//!
//! Two messages of the planning stream: `laser.planning.RUN.planner` names the planner, `laser.planning.RUN.next` the
//! next range. Whoever replaces a message says which one it has seen (the expected last sequence of the subject), so of
//! two that saw the same, one wins. A message that nobody replaces is gone after [`NatsClient::planning_lease`].
//!
//! That is all there is to lose: without the stream, or with it and two planners, coordinators render prompts twice and
//! write the same bytes.

use std::time::Duration;

use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use laser_schema::Digest;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::message::{check_run, encode};
use super::{NatsClient, NatsError, failed};

/// A coordinator that plans a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planner {
    /// Different for each planning.
    pub id: String,
    /// The digest of what it plans. Only who plans the same can help it.
    pub input: Digest,
}

/// The range that is rendered next.
#[derive(Debug, Serialize, Deserialize)]
struct Next {
    /// The id of the planner whose ranges these are.
    planner: String,
    range: u64,
}

impl NatsClient {
    /// A planner of this process.
    pub fn new_planner(&self, input: Digest) -> Planner {
        Planner { id: self.client.new_inbox(), input }
    }

    /// How long a planner, or a range, is waited for.
    pub fn planning_lease(&self) -> Duration {
        self.config.planning_lease()
    }

    /// The planner of a run, if there is one.
    ///
    /// # Errors
    /// [`NatsError::RunName`], [`NatsError::Away`], [`NatsError::Request`].
    pub async fn planner(&self, run: &str) -> Result<Option<Planner>, NatsError> {
        let (_, planner) = self.last(&self.planning_subject(run, "planner")?).await?;
        Ok(planner)
    }

    /// Makes `planner` the planner of a run for another lease; `false` if somebody else is.
    ///
    /// # Errors
    /// As [`Self::planner`].
    pub async fn hold_planning(&self, run: &str, planner: &Planner) -> Result<bool, NatsError> {
        let subject = self.planning_subject(run, "planner")?;
        loop {
            let (sequence, found) = self.last::<Planner>(&subject).await?;
            if found.is_some_and(|found| found != *planner) {
                return Ok(false);
            }
            if self.replace(&subject, sequence, planner).await? {
                return Ok(true);
            }
        }
    }

    /// Takes the next range of a planner's run, `from` or a later one; `None` if another plans the run, or nobody.
    ///
    /// # Errors
    /// As [`Self::planner`].
    pub async fn take_range(&self, run: &str, planner: &Planner, from: u64) -> Result<Option<u64>, NatsError> {
        let subject = self.planning_subject(run, "next")?;
        loop {
            if self.planner(run).await?.as_ref() != Some(planner) {
                return Ok(None);
            }
            let (sequence, next) = self.last::<Next>(&subject).await?;
            let next = next.filter(|next| next.planner == planner.id).map_or(0, |next| next.range);
            let range = next.max(from);
            let after = Next { planner: planner.id.clone(), range: range + 1 };
            if self.replace(&subject, sequence, &after).await? {
                return Ok(Some(range));
            }
        }
    }

    fn planning_subject(&self, run: &str, what: &str) -> Result<String, NatsError> {
        check_run(run)?;
        Ok(format!("{}.{run}.{what}", self.config.planning_subjects()))
    }

    /// The sequence and the content of a subject's message; 0 and nothing if there is none. What cannot be read is of
    /// another release, whose planner is none of ours.
    async fn last<T: DeserializeOwned>(&self, subject: &str) -> Result<(u64, Option<T>), NatsError> {
        let message = self.patiently(|| async {
            let stream = self.stream(&self.config.planning).await?;
            match stream.get_last_raw_message_by_subject(subject).await {
                Ok(message) => Ok(Some(message)),
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
                Err(error) => Err(failed(format!("read {subject}"))(error)),
            }
        });
        Ok(match message.await? {
            Some(message) => (message.sequence, serde_json::from_slice(&message.payload).ok()),
            None => (0, None),
        })
    }

    /// Publishes in place of the message of a sequence; `false` if another one is there. So it is if the answer to a
    /// first attempt is lost: what it took is rendered by who misses it.
    async fn replace(&self, subject: &str, sequence: u64, content: &impl Serialize) -> Result<bool, NatsError> {
        let payload = encode(content);
        self.patiently(|| async {
            let message = PublishMessage::build().payload(payload.clone()).expected_last_subject_sequence(sequence);
            let sent = async { self.jetstream.send_publish(subject.to_owned(), message).await?.await };
            match sent.await {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => Ok(false),
                Err(error) => Err(failed(format!("publish {subject}"))(error)),
            }
        })
        .await
    }
}
