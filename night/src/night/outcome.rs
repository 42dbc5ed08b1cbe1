//! How a night ends.

use laser_model::ModelFiles;
use laser_schema::manifest::Manifest;
use laser_store::run_store::PlannedRun;

/// How a night ended.
#[derive(Debug)]
pub enum Outcome {
    /// It is published.
    Complete(Finished),
    /// Everything is there but too many entities have no text.
    BelowCoverage(Finished),
    /// Everything is there but a pool breaches a guard.
    Breached(Finished),
    /// Shards were given up.
    Incomplete {
        /// Their numbers, with the reason of the last attempt.
        dead: Vec<(u32, String)>,
        /// How many are missing.
        missing: usize,
    },
    /// Somebody has cancelled it.
    Cancelled {
        /// The run.
        run: String,
    },
    /// Stopped by a signal; the same command goes on.
    Drained {
        /// Shards whose output is there.
        committed: usize,
        /// Shards of the plan.
        shards: usize,
    },
}

/// A night of which everything is there.
#[derive(Debug)]
pub struct Finished {
    /// The run.
    pub run: PlannedRun,
    /// The published manifests, by kind.
    pub manifests: Vec<Manifest>,
    /// The model.
    pub model: ModelFiles,
    /// Seconds that this process spent generating; none if the run was complete already.
    pub seconds: Option<f64>,
    /// Why the speedup is what it is, where the engine cannot speculate.
    pub note: Option<String>,
}
