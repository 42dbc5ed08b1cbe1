//! A plan of a seeded sample of a night's rows, which tells what the night is going to cost.

use std::collections::BTreeMap;

use laser_schema::Kind;
use laser_schema::job::{Action, Plan, ShardRow};
use laser_schema::sample::{Sample, priority};
use laser_store::Location;
use laser_store::join::{Join, Joined};
use laser_store::run_store::RunStore;

use super::{PlanError, PlanRequest, Planner};

/// How a sample is taken.
#[derive(Debug)]
pub struct SampleRequest<'a> {
    /// Where the sample's shards and plan go: an output of its own.
    pub output: &'a Location,
    /// Most rows per kind.
    pub rows: usize,
    /// Most rows per kind that are also audited, if the night audits any.
    pub audited: usize,
}

/// A seeded sample of the rows to generate, by kind.
#[derive(Debug)]
pub(super) struct Samples {
    rows: usize,
    seed: u64,
    kinds: BTreeMap<Kind, Sample<ShardRow>>,
}

impl Samples {
    /// Offers a row that is to be generated.
    pub(super) fn offer(&mut self, kind: Kind, row: &ShardRow) {
        let name = row.entity_id.to_string();
        let priority = priority(self.seed, &[b"estimate", kind.as_str().as_bytes(), name.as_bytes()]);
        let sample = self.kinds.entry(kind).or_insert_with(|| Sample::new(self.rows));
        sample.offer(priority, || row.clone());
    }
}

/// Plans a night without writing it, and writes a plan of a sample of its rows. Returns both plans.
///
/// # Errors
/// Those of [`plan`](super::plan).
pub async fn plan_sample(
    sample: &SampleRequest<'_>,
    entities: Join,
    request: &PlanRequest<'_>,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<(Plan, Plan), PlanError> {
    let samples = Samples { rows: sample.rows, seed: request.seed, kinds: BTreeMap::new() };
    super::check(&entities, request)?;
    let joined = super::joined(entities, request).await?;
    let (whole, samples) = super::made(None, &joined, request, (None, Some(samples)), progress).await?;
    let kinds = samples.map(|samples| samples.kinds).unwrap_or_default();
    let plan = write(sample, &joined, request, kinds).await?;
    Ok((whole, plan))
}

/// Writes the plan of sampled rows: they are generated, and then some of them audited.
async fn write(
    sample: &SampleRequest<'_>,
    joined: &Joined,
    request: &PlanRequest<'_>,
    kinds: BTreeMap<Kind, Sample<ShardRow>>,
) -> Result<Plan, PlanError> {
    let store = RunStore::new(sample.output, &request.run);
    let mut planner = Planner::new(Some(store.folder()), joined.kinds(), request);
    let audited = if request.audit_share > 0.0 { sample.audited } else { 0 };
    for (kind, rows) in kinds {
        let counts = planner.counts.entry(kind).or_default();
        (counts.entities, counts.generate) = (rows.len() as u64, rows.len() as u64);
        for (at, (_, row)) in rows.iter().enumerate() {
            if at < audited {
                planner.push(Action::Audit, kind, row.clone()).await?;
            }
            planner.push(Action::Generate, kind, row.clone()).await?;
        }
    }
    // What guards say of a sample is not what they are going to say of the night.
    let plan = Plan { guards: None, ..planner.finish().await? };
    Ok(store.write_plan(plan).await?)
}
