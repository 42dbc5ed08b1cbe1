//! The end of a night: sealed, published, and old nights removed.

use anyhow::Result;
use laser_coordinator::finalise::{self, Published, Terms};
use laser_store::run_store::PlannedRun;
use tracing::instrument;

use super::{Finished, Night, Outcome};
use crate::config::EngineKind;
use crate::deadline::Deadline;
use crate::retention::remove_outdated;

impl Night<'_> {
    /// The run's deadline: the first time of day `[run] deadline` after it was planned.
    pub(crate) async fn deadline(&self, run: &PlannedRun) -> Result<Deadline> {
        Deadline::new(self.config.run.deadline, run.store.planned_at().await?)
    }

    /// Publishes what there is, unless shards were given up that a later try may still make. After the deadline
    /// there is no later.
    pub(crate) async fn conclude(
        self,
        run: PlannedRun,
        dead: Vec<(u32, String)>,
        late: bool,
        seconds: Option<f64>,
    ) -> Result<Outcome> {
        if late {
            let sealed = finalise::seal(&run, "not generated before the deadline").await?;
            if sealed > 0 {
                tracing::warn!(shards = sealed, "the deadline has passed: publishing without them");
            }
        } else if !dead.is_empty() {
            let missing = dead.len();
            return Ok(Outcome::Incomplete { dead, missing });
        }
        self.publish(run, seconds).await
    }

    /// The conditions for writing `_SUCCESS`.
    pub(super) fn terms(&self) -> Terms {
        let output = &self.config.output;
        // A canary is nothing for readers of tables.
        let delta = output.is_delta() && self.canary.is_none();
        Terms { min_coverage: output.min_coverage, guards: self.config.guards, delta }
    }

    /// Publishes every kind, or finds what was published before.
    #[instrument(name = "publish", target = "laser::trace", skip_all)]
    pub(crate) async fn publish(self, run: PlannedRun, seconds: Option<f64>) -> Result<Outcome> {
        let mut manifests = Vec::new();
        let (mut covered, mut kept) = (true, true);
        let terms = self.terms();
        for &kind in run.plan.counts.keys() {
            let published = finalise::publish(&run, kind, &terms).await?;
            covered &= !matches!(published, Published::BelowCoverage(_));
            kept &= !matches!(published, Published::Breached(_));
            match published {
                Published::Complete(manifest) | Published::BelowCoverage(manifest) | Published::Breached(manifest) => {
                    manifests.push(*manifest);
                }
                Published::Incomplete { missing } => {
                    return Ok(Outcome::Incomplete { dead: Vec::new(), missing });
                }
            }
        }
        if covered && kept && self.canary.is_none() {
            self.remove_outdated(run.name()).await;
        }
        let note = (self.config.model.engine == EngineKind::Mistralrs)
            .then(|| "engine = \"mistralrs\" decodes plainly: no drafts, no speedup".to_owned());
        let finished = Finished { run, manifests, model: self.model, seconds, note };
        Ok(match (covered, kept) {
            (true, true) => Outcome::Complete(finished),
            (false, _) => Outcome::BelowCoverage(finished),
            (true, false) => Outcome::Breached(finished),
        })
    }

    /// Removes the nights that are not kept. The night is published; what cannot be removed now is so by the next.
    async fn remove_outdated(&self, published: &str) {
        let Some(nights) = self.config.output.keep_nights else {
            return;
        };
        match remove_outdated(&self.output, nights, published).await {
            Ok(runs) => tracing::info!(runs, "removed outdated runs"),
            Err(error) => tracing::warn!("outdated runs were not removed: {error:#}"),
        }
    }
}
