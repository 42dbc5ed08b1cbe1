//! How the value of a night's entities was reached: which share had a text when.

use std::collections::HashMap;

use anyhow::Result;
use laser_schema::Kind;
use laser_schema::job::Action;
use laser_schema::knowledge::PartInfo;
use laser_store::run_store::PlannedRun;
use serde::Serialize;

/// Points of the lines, evenly over the time from the plan to the last commit.
const POINTS: u32 = 20;

/// The shares of value and entities that had a text at each of a few points in time.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Reached {
    /// From the plan to the last commit.
    pub(crate) seconds: f64,
    pub(crate) value: Vec<f64>,
    pub(crate) entities: Vec<f64>,
}

/// The rows of a kind's parts and the value that they lack, by their output.
#[derive(Debug, Default)]
pub(crate) struct Footers(HashMap<String, (u64, f64)>);

impl Footers {
    pub(crate) fn add(&mut self, output: String, info: &PartInfo) {
        self.0.insert(output, (info.rows, info.lost(None)));
    }

    /// What was reached, if the run has a priority.
    pub(crate) async fn reached(&self, run: &PlannedRun, kind: Kind) -> Result<Option<Reached>> {
        let counts = run.plan.counts.get(&kind);
        let Some((counts, all)) = counts.and_then(|counts| Some((counts, counts.value?))) else {
            return Ok(None);
        };
        let (times, began) = (run.commit_times().await?, run.store.planned_at().await?);
        let mut commits = Vec::new();
        for job in run.plan.shards.iter().filter(|job| job.kind == kind && job.action != Action::Audit) {
            if let Some((time, &(rows, lost))) = times.get(&job.output).zip(self.0.get(&job.output)) {
                let seconds = time.duration_since(began).as_secs_f64();
                let value = if rows == 0 { 0.0 } else { job.value.unwrap_or(0.0) - lost };
                commits.push((seconds, rows as f64, value));
            }
        }
        let seconds = commits.iter().map(|commit| commit.0).fold(0.0, f64::max);
        let mut reached = Reached { seconds, ..Reached::default() };
        for point in 1..=POINTS {
            let until = seconds * f64::from(point) / f64::from(POINTS);
            let there = || commits.iter().filter(|commit| commit.0 <= until);
            reached.entities.push(there().map(|commit| commit.1).sum::<f64>() / counts.entities.max(1) as f64);
            reached.value.push(if all > 0.0 { there().map(|commit| commit.2).sum::<f64>() / all } else { 1.0 });
        }
        Ok(Some(reached))
    }
}
