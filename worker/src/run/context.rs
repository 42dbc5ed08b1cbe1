//! The run, the output and the signals to stop, which every part of a worker needs.

use std::collections::HashMap;
use std::sync::Arc;

use laser_decode::{Pool, Trie};
use laser_features::encoder::Encoder;
use laser_schema::job::ShardJob;
use laser_store::run_store::PlannedRun;
use tokio_util::sync::CancellationToken;
use tracing::{Span, error_span};

use crate::catalogue::Catalogue;
use crate::progress::Progress;

/// Everything that the shards of a run share.
#[derive(Debug)]
pub struct RunContext {
    /// The run.
    pub run: PlannedRun,
    /// The pools by name.
    pub pools: HashMap<String, Pool>,
    /// The items, which a plan of lists needs.
    pub catalogue: Option<Arc<Catalogue>>,
    /// The encoder, which a plan with embeddings needs.
    pub encoder: Option<Arc<Encoder>>,
    /// The worker's name, unique among those that may work on the run.
    pub worker: String,
    /// Counters for whoever shows progress.
    pub progress: Arc<Progress>,
}

impl RunContext {
    /// The identifiers of the items of a run of lists.
    pub(crate) fn trie(&self) -> Option<&Trie> {
        self.catalogue.as_deref().map(|catalogue| &catalogue.trie)
    }

    /// The span around all work on a shard, for the log and the trace. It has the level of errors, so that no filter
    /// drops it.
    pub(super) fn span(&self, job: &ShardJob) -> Span {
        error_span!("shard", run = self.run.name(), shard = job.shard, pool = job.pool)
    }
}

/// How a worker is told to end before the work does; each token leaves it less to finish.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// Nothing more is leased; the shards that were begun are finished, the others given back.
    pub drain: CancellationToken,
    /// The shards that were begun are given back too, after the step in hand; those that are finished are committed.
    pub release: CancellationToken,
    /// A commit that the store has not answered is given up.
    pub abandon: CancellationToken,
}

impl Stop {
    /// Tokens that are cancelled along with these, and whose own cancellation these do not notice.
    pub(super) fn child(&self) -> Self {
        let Self { drain, release, abandon } = self;
        Self { drain: drain.child_token(), release: release.child_token(), abandon: abandon.child_token() }
    }

    /// Nothing more is leased, and the shards that were begun are given back.
    pub(super) fn give_back(&self) {
        self.drain.cancel();
        self.release.cancel();
    }
}
