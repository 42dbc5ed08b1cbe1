//! The error of the worker.

use laser_features::encoder::EncoderError;
use laser_schema::job::QueueError;
use laser_store::location::LocationError;
use laser_store::run_store::RunStoreError;
use laser_store::table::TableError;

use crate::generate::GenerateError;

/// Why a worker stopped before the work did, or why an attempt at a shard failed; see
/// [`ends_the_worker`](Self::ends_the_worker).
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The queue failed.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The store does not let the worker in: every shard would fail, and none is to blame.
    #[error(
        "{0}; check the credentials of this worker and what they allow. Its shards are given to others when their \
         leases end"
    )]
    Refused(#[source] LocationError),
    /// The engine failed for one shard after another: the device is more likely to be at fault than the shards.
    #[error(
        "device {device} fails for one shard after another and has finished no text in between ({reason}); the shards \
         in hand were given back. Run the same command again: a new process often recovers a device. If it fails \
         again, lower [generate] batch, choose another [model] device or check the model"
    )]
    Device {
        /// The device.
        device: String,
        /// Why the engine failed the last time.
        reason: String,
    },
    /// A task of the worker was lost.
    #[error("the worker's {0} ended unexpectedly; its shards are given to others when their leases end")]
    Lost(&'static str),
    /// The store failed for a shard.
    #[error(transparent)]
    Location(LocationError),
    /// A shard's input cannot be read or its part cannot be written.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The verdict of the guards cannot be read.
    #[error(transparent)]
    Run(#[from] RunStoreError),
    /// A shard's input is not what was planned.
    #[error("{file}: its bytes do not match the plan's digest: plan again")]
    Changed {
        /// The shard's input.
        file: String,
    },
    /// A shard came before the audit of its pool was judged.
    #[error("the guards have not judged pool {pool:?} yet: this shard was queued too early")]
    NotJudged {
        /// The pool's name.
        pool: String,
    },
    /// The engine failed for a whole shard.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The run's output has embeddings, and this worker cannot make them.
    #[error("the run's output has embeddings, and this worker has no [encoder]")]
    NoEncoder,
    /// The encoder refused the texts.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// A panic of the engine or the encoder fails the shards in hand, not the worker.
    #[error("the {0} panicked; its message is in the log")]
    Panicked(&'static str),
    /// An audit could not be written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The worker was told to end while it waited for the store.
    #[error("the worker ended while the store did not answer")]
    TooLate,
}

impl WorkerError {
    /// Whether no other shard can succeed either. Every other error is that of an attempt, and the queue is told of it.
    #[must_use]
    pub fn ends_the_worker(&self) -> bool {
        matches!(self, Self::Queue(_) | Self::Refused(_) | Self::Device { .. } | Self::Lost(_))
    }
}

impl From<LocationError> for WorkerError {
    fn from(error: LocationError) -> Self {
        if error.is_refusal() { Self::Refused(error) } else { Self::Location(error) }
    }
}
