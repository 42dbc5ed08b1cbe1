//! Counters of a running worker, for whoever displays progress.

use std::sync::{Mutex, PoisonError};

use laser_schema::Kind;
use laser_schema::knowledge::Figures;

use crate::telemetry;

/// The counts since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Snapshot {
    /// Sums over generated texts.
    pub figures: Figures,
    /// Rows carried forward.
    pub carried: u64,
    /// Rows that failed.
    pub errors: u64,
    /// Shards whose output exists.
    pub shards: u64,
    /// Attempts that failed.
    pub failed_attempts: u64,
}

/// Shared counters; an update takes one short lock per text.
#[derive(Debug, Default)]
pub struct Progress(Mutex<Snapshot>);

impl Progress {
    /// Returns the current counters.
    pub fn snapshot(&self) -> Snapshot {
        *self.lock()
    }

    pub(crate) fn text(&self, kind: Kind, pool: &str, figures: &Figures, fallback: bool) {
        telemetry::text(kind, pool, figures, fallback);
        self.lock().figures.add(figures);
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Snapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
