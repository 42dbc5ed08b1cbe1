//! The gate of `[guards] action = "strict"`: no text of a pool is generated before its audit is judged.
//!
//! Audits are shards like others and come first. Once all audits of a pool are settled (committed or given up), the
//! pool is judged by them and the verdict is created as one object, if it does not exist. Whoever judges again, at the
//! same time or after a kill, continues with the existing verdict. Workers read it with each shard of the pool, so a
//! run verifies all texts of a pool alike, whoever generates them.

use std::collections::BTreeMap;

use laser_schema::Kind;
use laser_schema::audit::Audit;
use laser_schema::audit::AuditReport;
use laser_schema::guard::{GuardAction, Guards, Verdict};
use laser_schema::job::{Action, Plan, ShardJob};
use laser_schema::knowledge::Figures;
use laser_store::run_store::PlannedRun;
use laser_store::table::TableError;

use crate::finalise::FinaliseError;

type Pool = (Kind, String);

/// The pools of a run that may be generated; all of them without strict guards.
#[derive(Debug)]
pub struct Gate {
    /// Pools that are not judged yet, with their audit shards.
    closed: BTreeMap<Pool, Vec<u32>>,
}

impl Gate {
    /// The gate of a plan, closed for every pool if there is one.
    pub fn new(plan: &Plan) -> Self {
        let mut closed: BTreeMap<Pool, Vec<u32>> = BTreeMap::new();
        for job in plan.shards.iter().filter(|_| plan.guards.is_some()) {
            let pool = (job.kind, job.pool.clone());
            match job.action {
                Action::Generate => drop(closed.entry(pool).or_default()),
                Action::Audit => closed.entry(pool).or_default().push(job.shard),
                Action::Carry => {}
            }
        }
        Self { closed }
    }

    /// Whether a shard may be worked on.
    pub fn admits(&self, job: &ShardJob) -> bool {
        let is_closed = || self.closed.contains_key(&(job.kind, job.pool.clone()));
        job.action != Action::Generate || self.closed.is_empty() || !is_closed()
    }

    /// Judges the pools whose audits are all `settled`, and admits their shards from now on.
    ///
    /// # Errors
    /// The store's, and an audit that cannot be read.
    pub async fn poll(&mut self, run: &PlannedRun, settled: impl Fn(u32) -> bool) -> Result<(), FinaliseError> {
        let Some(guards) = &run.plan.guards else {
            return Ok(());
        };
        let ready = self.closed.iter();
        let ready = ready.filter(|(_, audits)| audits.iter().all(|shard| settled(*shard)));
        let ready: Vec<Pool> = ready.map(|(pool, _)| pool.clone()).collect();
        for pool in ready {
            let audits = self.closed.get(&pool).map_or(&[][..], Vec::as_slice);
            let verdict = judge(run, guards, audits).await?;
            let verdict = run.store.judge(pool.0, &pool.1, verdict).await?;
            for breach in &verdict.breaches {
                tracing::warn!(kind = %pool.0, pool = pool.1, "{breach}: verified strictly tonight");
            }
            self.closed.remove(&pool);
        }
        Ok(())
    }
}

/// The verdict by a pool's audits.
async fn judge(run: &PlannedRun, guards: &Guards, audits: &[u32]) -> Result<Verdict, FinaliseError> {
    let (mut figures, mut report) = (Figures::default(), AuditReport::default());
    for &shard in audits {
        let file = run.part(&run.plan.shards[shard as usize]);
        // An audit that was given up does not exist.
        let Some(bytes) = file.read_optional().await? else {
            continue;
        };
        let audit: Audit = serde_json::from_slice(&bytes)
            .map_err(|e| TableError::Unreadable { file: file.url().to_owned(), reason: e.to_string() })?;
        figures.add(&audit.figures);
        report.add(&audit.report);
    }
    let breaches = guards.breaches(&figures, &report);
    Ok(Verdict { texts: report.texts, strict: guards.action == GuardAction::Strict && !breaches.is_empty(), breaches })
}
