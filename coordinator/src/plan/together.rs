//! Planning by several coordinators of one run.
//!
//! One of them is the planner: it makes the plan as if it were alone, but for prompts that others have rendered. The
//! others help: each reads the tables, takes the next range, renders it, and leaves the prompts in the run's folder.
//! Helpers join nothing, so they begin while the planner does. Ranges are taken one by one
//! ([`NatsClient::take_range`]), so a faster process takes more of them. A planner that is alone takes them all and
//! leaves nothing.
//!
//! Nothing depends on it. Prompts are a function of the entities, so the plan is the same whoever rendered them, as
//! long as all read the same tables: one that changes before the plan is made is refused. Without NATS a coordinator
//! plans alone. What a helper owes and does not bring within a lease, the planner renders. If the planner dies, a
//! helper becomes the planner and finds the prompts that are there.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use laser_schema::job::Plan;
use laser_schema::{Digest, EntityTable, Kind};
use laser_store::data_set::parts_in_flight;
use laser_store::entities::fingerprints;
use laser_store::join::{Join, JoinError, Joined};
use laser_store::run_store::{Prompt, RunStore, prompts_name};
use laser_store::{LocationError, TablesReader};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use super::earlier::write_plan;
use super::ranges::{Batches, Range, Ranges};
use super::{PlanError, PlanRequest};
use crate::nats::{NatsClient, NatsError, Planner};

/// Ranges that a planner reads ahead while it waits for the prompts of one: what a helper needs to bring them over an
/// object store. Of 1,024 entities with prompts of 1,000 tokens they take about 100 MB.
const AHEAD: usize = 16;

/// The wait before the store is asked again for prompts that a helper owes.
const PAUSE: Duration = Duration::from_millis(50);

/// Ranges in a row that no helper brought before the planner goes on alone.
const MISSED_MAX: u32 = 2;

/// Plans a run with whoever else does.
pub(super) async fn plan(
    store: &RunStore,
    entities: Join,
    request: &PlanRequest<'_>,
    client: &NatsClient,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Plan, PlanError> {
    let tables = entities.tables().to_vec();
    let content = fingerprints(&tables).await?;
    let me = client.new_planner(input((&tables, &content), request));
    let planner = match become_planner(store, &tables, request, (client, &me), progress).await? {
        Part::Planned(plan) => return Ok(*plan),
        Part::Planner => Some(Shared::new(client, store, me).await?),
        Part::Alone => None,
    };
    let _renewal = planner.as_ref().map(Shared::renew);
    let joined = super::joined(entities, request).await?;
    let plan = super::made(Some(store), &joined, request, (planner, None), progress).await?.0;
    ensure_unchanged(&tables, &content).await?;
    let plan = write_plan(store, plan).await?;
    remove_prompts(store).await;
    Ok(plan)
}

/// A coordinator's part in planning.
enum Part {
    /// To make the plan.
    Planner,
    /// To make it without the others.
    Alone,
    /// It is made.
    Planned(Box<Plan>),
}

/// Helps as long as another coordinator plans the run.
async fn become_planner(
    store: &RunStore,
    tables: &[EntityTable],
    request: &PlanRequest<'_>,
    (client, me): (&NatsClient, &Planner),
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Part, PlanError> {
    let run = store.name();
    loop {
        if let Some(plan) = store.plan().await? {
            remove_prompts(store).await;
            return Ok(Part::Planned(Box::new(plan)));
        }
        let planner = match other_planner(client, run, me).await {
            Ok(None) => return Ok(Part::Planner),
            Ok(Some(planner)) => planner,
            Err(error) => return Ok(alone(&error)),
        };
        if planner.input != me.input {
            tracing::warn!(run, "another coordinator plans this run with other settings or tables; planning alone");
            return Ok(Part::Alone);
        }
        tracing::info!(run, "another coordinator plans this run; rendering prompts for it");
        let helper = Helper { client, store, planner, request };
        let helped = async {
            helper.render(tables, progress).await?;
            helper.wait().await
        };
        match helped.await {
            Ok(()) => {}
            Err(HelpError::Nats(error)) => return Ok(alone(&error)),
            Err(HelpError::Plan(error)) => return Err(error),
        }
    }
}

fn alone(error: &NatsError) -> Part {
    tracing::warn!(%error, "planning without other coordinators");
    Part::Alone
}

/// Another planner of the run; none if this one is, from now on.
async fn other_planner(client: &NatsClient, run: &str, me: &Planner) -> Result<Option<Planner>, NatsError> {
    loop {
        if client.hold_planning(run, me).await? {
            return Ok(None);
        }
        if let Some(planner) = client.planner(run).await? {
            return Ok(Some(planner));
        }
    }
}

/// What prompts and ranges depend on.
fn input(tables: (&[EntityTable], &[Digest]), request: &PlanRequest<'_>) -> Digest {
    let canary = request.canary.map(|entities| entities.canary());
    let field = request.catalogue.map(|catalogue| catalogue.field);
    let prompts = Kind::ALL.map(|kind| request.prompts.digest(kind));
    Digest::of_json(&(env!("CARGO_PKG_VERSION"), request.spec.digest(), prompts, request.limit, canary, field, tables))
}

/// Coordinators that read a table at different times have to read the same.
async fn ensure_unchanged(tables: &[EntityTable], before: &[Digest]) -> Result<(), PlanError> {
    let now = fingerprints(tables).await?;
    match tables.iter().zip(now.iter().zip(before)).find(|(_, (now, before))| now != before) {
        Some((table, _)) => Err(JoinError::Changed { file: table.path.clone() }.into()),
        None => Ok(()),
    }
}

/// They are of no use any more, and the run does not need them gone.
async fn remove_prompts(store: &RunStore) {
    if let Err(error) = store.remove_prompts().await {
        tracing::warn!(%error, "prompts that coordinators shared are left in the run's folder");
    }
}

#[derive(Debug, thiserror::Error)]
enum HelpError {
    #[error(transparent)]
    Nats(#[from] NatsError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

struct Helper<'a> {
    client: &'a NatsClient,
    store: &'a RunStore,
    planner: Planner,
    request: &'a PlanRequest<'a>,
}

impl Helper<'_> {
    /// Renders ranges until there are no more, or the planner is gone.
    async fn render(&self, tables: &[EntityTable], progress: &mut (dyn FnMut(u64) + Send)) -> Result<(), HelpError> {
        let mut ranges = Ranges::new(Batches::Entities(TablesReader::new(tables)), self.request);
        let mut writing: JoinSet<Result<(), LocationError>> = JoinSet::new();
        let (mut mine, mut read) = (None, 0);
        while let Some(range) = ranges.next().await? {
            read += range.entities.len() as u64;
            if mine.is_none_or(|mine| mine < range.number) {
                mine = self.client.take_range(self.store.name(), &self.planner, range.number).await?;
                if mine.is_none() {
                    break;
                }
            }
            if mine == Some(range.number) {
                let prompts = range.render(self.request.prompts).map_err(PlanError::from)?;
                let (store, input) = (self.store.clone(), self.planner.input.clone());
                written(&mut writing, parts_in_flight()).await?;
                writing.spawn(async move { store.write_prompts(range.number, &input, &prompts).await });
            }
            progress(read);
        }
        written(&mut writing, 1).await
    }

    /// Waits until there is a plan, or no planner.
    async fn wait(&self) -> Result<(), HelpError> {
        let run = self.store.name();
        while self.store.plan().await.map_err(PlanError::from)?.is_none()
            && self.client.planner(run).await?.as_ref() == Some(&self.planner)
        {
            sleep(self.client.planning_lease() / 10).await;
        }
        Ok(())
    }
}

/// Waits until fewer than `most` objects are being written.
async fn written(writing: &mut JoinSet<Result<(), LocationError>>, most: usize) -> Result<(), HelpError> {
    while writing.len() >= most
        && let Some(written) = writing.join_next().await
    {
        written.map_err(PlanError::from)?.map_err(PlanError::from)?;
    }
    Ok(())
}

/// The planner's side.
pub(super) struct Shared<'a> {
    client: &'a NatsClient,
    store: &'a RunStore,
    me: Planner,
    /// Prompts that were there before: of a planner that has died.
    known: HashSet<String>,
    /// The range that was taken last.
    mine: Option<u64>,
    /// Whether others are to help.
    is_open: bool,
    /// Ranges in a row that were not brought.
    missed: u32,
}

impl<'a> Shared<'a> {
    async fn new(client: &'a NatsClient, store: &'a RunStore, me: Planner) -> Result<Self, LocationError> {
        let known = store.known_prompts().await?;
        Ok(Self { client, store, me, known, mine: None, is_open: true, missed: 0 })
    }

    /// Stays the planner until the set is dropped.
    fn renew(&self) -> JoinSet<()> {
        let (client, run, me) = (self.client.clone(), self.store.name().to_owned(), self.me.clone());
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                sleep(client.planning_lease() / 4).await;
                // Whoever plans in our place writes the same.
                if let Err(error) = client.hold_planning(&run, &me).await {
                    tracing::warn!(%error, "cannot tell other coordinators that this one plans");
                }
            }
        });
        task
    }

    /// Whether the planner is to render a range itself. Ranges come in their order.
    async fn takes(&mut self, range: &Range) -> bool {
        let range = range.number;
        if self.known.contains(&prompts_name(range, &self.me.input)) {
            return false;
        }
        while self.is_open && self.mine.is_none_or(|mine| mine < range) {
            match self.client.take_range(self.store.name(), &self.me, range).await {
                Ok(taken) => {
                    self.is_open = taken.is_some();
                    self.mine = taken;
                }
                Err(error) => {
                    tracing::warn!(%error, "planning on without other coordinators");
                    self.is_open = false;
                }
            }
        }
        !self.is_open || self.mine == Some(range)
    }

    /// Waits in a task for the prompts of a range, for at most a lease.
    fn fetch(&self, range: &Range) -> JoinHandle<Option<Vec<Prompt>>> {
        let (store, number, count) = (self.store.clone(), range.number, range.entities.len());
        let input = self.me.input.clone();
        let until = Instant::now() + self.client.planning_lease();
        tokio::spawn(async move {
            loop {
                match store.prompts(number, &input, count).await {
                    Ok(Some(prompts)) => return Some(prompts),
                    Ok(None) if Instant::now() < until => sleep(PAUSE).await,
                    Ok(None) => return None,
                    Err(error) => {
                        tracing::warn!(%error, range = number, "cannot read prompts of another coordinator");
                        return None;
                    }
                }
            }
        })
    }

    /// Counts a range that was to be brought.
    fn note(&mut self, range: u64, is_brought: bool) {
        if is_brought {
            self.missed = 0;
            return;
        }
        self.missed += 1;
        self.is_open &= self.missed < MISSED_MAX;
        tracing::warn!(range, "another coordinator took a range and did not render it");
    }
}

/// Ranges with their prompts, in order.
pub(super) struct Prompts<'a> {
    request: &'a PlanRequest<'a>,
    ranges: Ranges<'a>,
    shared: Option<Shared<'a>>,
    window: VecDeque<(Range, Source)>,
    is_ended: bool,
}

/// Where the prompts of a range come from.
enum Source {
    Rendered(Vec<Prompt>),
    Fetched(JoinHandle<Option<Vec<Prompt>>>),
}

impl<'a> Prompts<'a> {
    pub(super) fn new(joined: &Joined, request: &'a PlanRequest<'a>, shared: Option<Shared<'a>>) -> Self {
        let ranges = Ranges::new(Batches::Joined(joined.reader()), request);
        Self { request, ranges, shared, window: VecDeque::new(), is_ended: false }
    }

    /// The next range with its prompts, or `None` at the end. Reads and renders ahead while the prompts of a range are
    /// on their way.
    pub(super) async fn next(&mut self) -> Result<Option<(Range, Vec<Prompt>)>, PlanError> {
        while !self.is_ready() && self.window.len() < AHEAD && !self.is_ended {
            match self.ranges.next().await? {
                Some(range) => {
                    let source = self.source(&range).await?;
                    self.window.push_back((range, source));
                }
                None => self.is_ended = true,
            }
        }
        let Some((range, source)) = self.window.pop_front() else {
            return Ok(None);
        };
        let prompts = match source {
            Source::Rendered(prompts) => prompts,
            Source::Fetched(fetching) => self.fetched(&range, fetching).await?,
        };
        Ok(Some((range, prompts)))
    }

    /// Whether the first range's prompts are there.
    fn is_ready(&self) -> bool {
        self.window.front().is_some_and(|(_, source)| match source {
            Source::Rendered(_) => true,
            Source::Fetched(fetching) => fetching.is_finished(),
        })
    }

    async fn source(&mut self, range: &Range) -> Result<Source, PlanError> {
        if let Some(shared) = &mut self.shared
            && !shared.takes(range).await
        {
            return Ok(Source::Fetched(shared.fetch(range)));
        }
        Ok(Source::Rendered(range.render(self.request.prompts)?))
    }

    async fn fetched(
        &mut self,
        range: &Range,
        fetching: JoinHandle<Option<Vec<Prompt>>>,
    ) -> Result<Vec<Prompt>, PlanError> {
        let prompts = fetching.await?;
        if let Some(shared) = &mut self.shared {
            shared.note(range.number, prompts.is_some());
        }
        match prompts {
            Some(prompts) => Ok(prompts),
            None => Ok(range.render(self.request.prompts)?),
        }
    }
}
