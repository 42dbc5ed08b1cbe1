//! One night: from tables and last night's knowledge to a published data set, in one process.
//!
//! A run is named by its date and by what it depends on, so the same command finds the same run again and
//! goes on where it was: pools that are built stay, a plan that is written stays, a shard that is committed
//! is never generated twice.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::Stream;
use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};
use laser_coordinator::finalise::{self, Published, Terms};
use laser_coordinator::gate::Gate;
use laser_coordinator::ledger::LedgerLimits;
use laser_coordinator::local_queue::LocalQueue;
use laser_coordinator::plan::{PlanRequest, plan, plan_time, read_plan};
use laser_coordinator::prompt::PromptRenderer;
use laser_features::encoder::{Encoder, EncoderFiles};
use laser_model::{Hub, ModelFiles, resolve};
use laser_pool_builder::{
    OpenPools, POOL_SET_FILE, PoolRegistry, PoolTokenizer, ReadError, build_pools, join_embeddings,
};
use laser_schema::job::{Action, Plan, Spec};
use laser_schema::layout::dated_name;
use laser_schema::layout::run_folder;
use laser_schema::manifest::{Manifest, SUCCESS};
use laser_schema::{Digest, Entity, EntityTable, Kind};
use laser_store::Location;
use laser_store::join::Join;
use laser_store::pins::Pins;
use laser_store::previous::{self, PreviousReader, PreviousSource, PreviousText};
use laser_worker::generate::TextGenerator;
use laser_worker::progress::Progress;
use laser_worker::run::{RunContext, Stop, WorkerError, run_worker};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, instrument};

use crate::config::{Config, EngineKind};
use crate::encoder;
use crate::generator;
use crate::operate;
use crate::pool_sets;
use crate::progress::{Display, TICK};
use crate::telemetry;

/// Unfinished runs of this many nights back are taken up again by the same command.
const RESUME_NIGHTS: i64 = 2;

/// How a night ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Published.
    Complete(Finished),
    /// Everything is there but too many entities have no text.
    BelowCoverage(Finished),
    /// Everything is there but a pool breaches a guard.
    Breached(Finished),
    /// Shards were given up.
    Incomplete { dead: Vec<(u32, String)>, missing: usize },
    /// Somebody has cancelled it.
    Cancelled { run: String },
    /// Stopped by a signal; the same command goes on.
    Drained { committed: usize, shards: usize },
}

/// What there is to tell of a night that ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) plan: Plan,
    pub(crate) manifests: Vec<Manifest>,
    pub(crate) output: Location,
    pub(crate) model: ModelFiles,
    /// Seconds that this process spent generating; none if the run was complete already.
    pub(crate) seconds: Option<f64>,
    /// Why the speedup is what it is, where the engine cannot speculate.
    pub(crate) note: Option<String>,
}

/// How far a run is before anything is generated.
pub(crate) enum Ready {
    /// To its end, by an earlier process.
    Published(Plan),
    /// It was told to stop.
    Drained,
    /// Planned, with its pools.
    Planned(Plan, Box<OpenPools>),
}

/// When a run is published whatever is missing, if ever.
#[derive(Debug, Clone)]
pub(crate) struct Deadline(Option<Zoned>);

impl Deadline {
    /// Seconds left; negative after it.
    pub(crate) fn seconds_left(&self) -> Option<f64> {
        let at = self.0.as_ref()?;
        Some(at.timestamp().duration_since(Timestamp::now()).as_secs_f64())
    }

    /// Whether it lies behind.
    pub(crate) fn has_passed(&self) -> bool {
        self.seconds_left().is_some_and(|left| left <= 0.0)
    }

    /// A token that is cancelled with `drain` or at the deadline, whichever comes first.
    pub(crate) fn end(&self, drain: &CancellationToken) -> CancellationToken {
        let end = drain.child_token();
        if let Some(left) = self.seconds_left() {
            let end = end.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs_f64(left.max(0.0))).await;
                end.cancel();
            });
        }
        end
    }
}

/// The first moment from `from` on with this time of day.
fn first_after(from: Zoned, time: Time) -> Result<Zoned> {
    let today = from.with().time(time).build()?;
    Ok(match today < from {
        true => today.checked_add(1.day())?,
        false => today,
    })
}

/// What a worker needs of a run. Nothing is drafted from a pool that was not read whole and found undamaged; that
/// takes a thread of its own, so that a model can be loaded meanwhile.
pub(crate) async fn run_context(
    plan: Plan,
    output: Location,
    pools: &OpenPools,
    encoder: Option<Arc<Encoder>>,
    worker: String,
) -> Result<Arc<RunContext>> {
    let unverified = pools.clone();
    tokio::task::spawn_blocking(move || unverified.verify()).await??;
    let names = pools.set().pools.iter().map(|p| p.name.clone());
    let pools: HashMap<_, _> = names.filter_map(|name| pools.pool(&name).map(|pool| (name, pool))).collect();
    Ok(Arc::new(RunContext { plan, output, pools, encoder, worker, progress: Arc::new(Progress::default()) }))
}

/// The shards that were given up and whose output is missed. An audit's is not: without it a pool has no measured
/// speedup, and that is all.
pub(crate) fn without_audits(plan: &Plan, dead: Vec<(u32, String)>) -> Vec<(u32, String)> {
    let is_audit = |shard: u32| {
        let job = plan.shards.get(shard as usize);
        job.is_some_and(|job| job.action == Action::Audit)
    };
    let (audits, dead) = dead.into_iter().partition::<Vec<_>, _>(|(s, _)| is_audit(*s));
    for (shard, reason) in audits {
        tracing::warn!(shard, reason, "an audit failed: its pool has no measured speedup");
    }
    dead
}

/// What a run was begun with.
struct Begun {
    date: Date,
    /// Without `latest`, which is resolved.
    previous: Vec<PreviousSource>,
    /// Where the pools are: below the output's root, or a URL.
    pools: String,
    /// Whether they are this run's own, to be built by it.
    builds_pools: bool,
}

/// What a night is made from, all of it checked.
pub(crate) struct Night<'a> {
    pub(crate) config: &'a Config,
    pub(crate) model: ModelFiles,
    pub(crate) prompts: PromptRenderer,
    pub(crate) spec: Spec,
    pub(crate) encoder: Option<Arc<EncoderFiles>>,
    pub(crate) output: Location,
}

impl<'a> Night<'a> {
    /// Opens the model's files and the templates, and derives the specification.
    pub(crate) async fn open(config: &'a Config) -> Result<Self> {
        let model = open_model(config).await?;
        let prompts = PromptRenderer::new(&config.prompt, &model).context("[prompt]")?;
        let digests = Kind::ALL.map(|kind| (kind, prompts.digest(kind)));
        let spec = model_spec(config, &model, digests.into())?;
        Ok(Self {
            config,
            model,
            prompts,
            spec,
            encoder: encoder::open(config).await?,
            output: Location::parse(&config.output.path)?,
        })
    }

    /// The name of the run on a date: what it depends on, so that it is found again.
    async fn run_id(&self, date: Date) -> Result<String> {
        let mut inputs = Vec::new();
        for table in &self.config.input {
            inputs.push(Location::parse(&table.path)?.fingerprint().await?);
        }
        let run = crate::config::RunConfig {
            date: None,
            attempts: 0,
            memory_mb: 0,
            deadline: None,
            ..self.config.run.clone()
        };
        let identity = Digest::of_json(&(
            self.spec.digest(),
            &self.config.input,
            inputs,
            previous::fingerprint(&self.config.previous, date).await?,
            &self.config.pools,
            run,
        ));
        let identity = match self.config.gate() {
            None => identity,
            Some(guards) => Digest::of_json(&(identity, guards)),
        };
        // Runs without embeddings keep the names that they had before there were any.
        let identity = match &self.encoder {
            None => identity,
            Some(files) => Digest::of_json(&(identity, encoder::spec(files))),
        };
        Ok(dated_name(date, &identity))
    }

    /// What the run was begun with, or would be now.
    async fn pins(&self, date: Date, run: &str) -> Result<Pins> {
        if let Some(pins) = Pins::read(&self.output, run).await? {
            return Ok(pins);
        }
        Ok(Pins {
            previous: latest(self.config, &self.output, date).await?,
            pools: pool_sets::choose(self.config, &self.output, run).await?,
        })
    }

    fn begun(&self, date: Date, run: &str, pins: Pins) -> Result<Begun> {
        let sources = &self.config.previous;
        Ok(Begun {
            date,
            previous: previous::resolve_latest(sources, &self.output, &pins.previous),
            builds_pools: pins.pools == PoolRegistry::place(run)?,
            pools: pins.pools,
        })
    }

    /// Tells what `latest` stands for.
    fn tell_previous(&self, begun: &Begun, display: &mut Display) {
        if !self.config.previous.iter().any(PreviousSource::is_latest) {
            return;
        }
        display.stage("previous knowledge");
        let paths: Vec<&str> = begun.previous.iter().map(|s| s.path.as_str()).collect();
        display.finish_with(&match paths.as_slice() {
            [] => format!(
                "a first night: no complete night before {} in {}, so no previous texts and no pools",
                begun.date,
                self.output.url()
            ),
            paths => paths.join(", "),
        });
    }

    /// The night to work on: the configured one, else an unfinished one of the last nights, else today.
    pub(crate) async fn choose_run(&self) -> Result<(Date, String)> {
        if let Some(date) = self.config.run.date {
            return Ok((date, self.run_id(date).await?));
        }
        let today = self.config.night();
        let known = self.output.join("runs").folders().await?;
        for back in 1..=RESUME_NIGHTS {
            let date = today.checked_sub(back.days())?;
            if !known.iter().any(|run| run.starts_with(&date.to_string())) {
                continue;
            }
            let run = self.run_id(date).await?;
            if let Some(plan) = read_plan(&self.output, &run).await?
                && !is_published(&self.output, &plan).await?
            {
                tracing::info!(run, "taking up an unfinished run");
                return Ok((date, run));
            }
        }
        Ok((today, self.run_id(today).await?))
    }

    /// Plans without writing: what `laser plan` tells.
    pub(crate) async fn dry_plan(&self, display: &mut Display) -> Result<(Plan, Vec<Manifest>)> {
        let (date, run) = self.choose_run().await?;
        let pins = self.pins(date, &run).await?;
        let begun = self.begun(date, &run, pins)?;
        self.tell_previous(&begun, display);
        let manifests = previous::manifests(&begun.previous, date).await?;
        let temporary = tempfile::tempdir().context("no temporary directory for the pools")?;
        let dir = match begun.builds_pools {
            true => Location::parse(&temporary.path().to_string_lossy())?,
            false => self.output.resolve(&begun.pools)?,
        };
        let pools = self.pools(&dir, &begun, display).await?;
        Ok((self.plan(None, &run, (&begun, &pools), display).await?, manifests))
    }

    /// Runs the night to its end in this process.
    pub(crate) async fn run(self, display: &mut Display, drain: &CancellationToken) -> Result<Outcome> {
        let (date, run) = self.choose_run().await?;
        let _lock = lock(&self.output.join(&run_folder(&run)), &run)?;
        let span = telemetry::run_span(&run);
        let work = async {
            match self.prepare(date, &run, display, drain).await? {
                Ready::Published(plan) => self.finish(plan, None).await,
                Ready::Drained => Ok(Outcome::Drained { committed: 0, shards: 0 }),
                Ready::Planned(plan, pools) => self.generate(plan, &pools, display, drain).await,
            }
        };
        work.instrument(span).await
    }

    /// Plans the run and builds its pools, or finds both where an earlier process left them.
    pub(crate) async fn prepare(
        &self,
        date: Date,
        run: &str,
        display: &mut Display,
        drain: &CancellationToken,
    ) -> Result<Ready> {
        let folder = self.output.join(&run_folder(run));
        let known = read_plan(&self.output, run).await?;
        if let Some(plan) = &known
            && is_published(&self.output, plan).await?
        {
            return Ok(Ready::Published(plan.clone()));
        }
        let prepared = async {
            let pins = self.pins(date, run).await?.begin(&self.output, run).await?;
            let begun = self.begun(date, run, pins)?;
            self.tell_previous(&begun, display);
            let dir = self.output.resolve(&begun.pools)?;
            let pools = self
                .pools(&dir, &begun, display)
                .await
                .with_context(|| format!("run {run}; to begin it anew, remove {}", folder.url()))?;
            let plan = match known {
                Some(plan) => plan,
                None => self.plan(Some(&self.output), run, (&begun, &pools), display).await?,
            };
            anyhow::Ok((pools, plan))
        };
        let (pools, plan) = tokio::select! {
            biased;
            () = drain.cancelled() => return Ok(Ready::Drained),
            prepared = prepared => prepared?,
        };
        if plan.pool_digest != *pools.digest() {
            bail!(
                "{}: these are not the pools that {}/plan.json was made with; remove {} to plan anew",
                self.output.resolve(&plan.pools)?.url(),
                folder.url(),
                folder.url()
            );
        }
        Ok(Ready::Planned(plan, Box::new(pools)))
    }

    /// The pools of the run: those that are there, or its own from last night's knowledge.
    #[instrument(name = "pools", target = "laser::trace", skip_all)]
    async fn pools(&self, dir: &Location, begun: &Begun, display: &mut Display) -> Result<OpenPools> {
        if begun.builds_pools && !dir.join(POOL_SET_FILE).exists().await? {
            display.stage("building pools");
            let pool_tokenizer = PoolTokenizer::of(&self.model)?;
            let previous = PreviousReader::open(&begun.previous, begun.date).await?;
            let mut progress = |p: laser_pool_builder::BuildProgress| {
                display.update(p.done, p.total, p.stage.as_str());
            };
            let (input, config) = (&self.config.input, &self.config.pools);
            let texts = previous_texts(previous);
            let memory = self.config.run.memory();
            let set = build_pools(input, texts, pool_tokenizer, config, memory, dir, &mut progress).await?;
            let tokens: usize = set.pools.iter().map(|p| p.tokens).sum();
            display.finish_with(&format!("{} pools, {} tokens from {} texts", set.pools.len(), tokens, set.texts.read));
        }
        Ok(OpenPools::open(dir, &self.model.tokenizer.fingerprint()).await?)
    }

    #[instrument(name = "plan", target = "laser::trace", skip_all)]
    async fn plan(
        &self,
        output: Option<&Location>,
        run: &str,
        (begun, pools): (&Begun, &OpenPools),
        display: &mut Display,
    ) -> Result<Plan> {
        display.stage("planning");
        let mut entities = Join::new(&self.config.input, self.config.run.memory()).await?;
        join_embeddings(&self.config.pools, &mut entities).await?;
        let route = |entity: &Entity| {
            let route = pools.route(entity, entity.embedding.as_deref());
            route.map_or_else(String::new, |route| route.pool.to_owned())
        };
        let request = PlanRequest {
            run: run.to_owned(),
            date: begun.date,
            spec: self.spec.clone(),
            previous: &begun.previous,
            carry_forward: self.config.run.carry_forward,
            shard_rows: self.config.run.shard_rows,
            audit_share: self.config.run.audit_share,
            seed: self.config.run.seed,
            limit: self.config.run.limit,
            pools: (begun.pools.clone(), pools.digest().clone()),
            price: self.config.price.clone(),
            guards: self.config.gate(),
            embedding: self.encoder.as_deref().map(encoder::spec),
            prompts: &self.prompts,
            route: &route,
        };
        let plan = plan(output, entities, &request, &mut |p| display.update(p.entities, None, "entities")).await?;
        let sum = |f: fn(&laser_schema::job::KindCounts) -> u64| plan.counts.values().map(f).sum::<u64>();
        display.finish_with(&format!(
            "{} entities: {} to generate, {} unchanged, {} failed; {} shards",
            sum(|c| c.entities),
            sum(|c| c.generate),
            sum(|c| c.carried),
            sum(|c| c.failed),
            plan.shards.len()
        ));
        Ok(plan)
    }

    #[instrument(name = "generate", target = "laser::trace", skip_all)]
    async fn generate(
        self,
        plan: Plan,
        pools: &OpenPools,
        display: &mut Display,
        drain: &CancellationToken,
    ) -> Result<Outcome> {
        let committed = finalise::committed(&self.output, &plan).await?;
        let started = Instant::now();
        let deadline = self.deadline(&plan).await?;
        let end = deadline.end(drain);
        let mut dead = Vec::new();
        if committed.len() < plan.shards.len() {
            display.stage("loading the model");
            let worker = format!("local-{}", std::process::id());
            let encoder = match self.encoder.clone() {
                Some(files) => Some(encoder::load(files).await?),
                None => None,
            };
            let (context, generator) = tokio::try_join!(
                run_context(plan.clone(), self.output.clone(), pools, encoder, worker),
                generator::load(self.config, &self.model)
            )?;
            let worker = (context, generator);
            dead = self.work(&plan, committed, worker, display, &end).await?;
        }
        let seconds = started.elapsed().as_secs_f64();
        if drain.is_cancelled() {
            let (committed, shards) = (finalise::committed(&self.output, &plan).await?.len(), plan.shards.len());
            if committed + dead.len() < shards {
                return Ok(Outcome::Drained { committed, shards });
            }
        }
        let dead = without_audits(&plan, dead);
        self.conclude(plan, dead, deadline.has_passed(), Some(seconds)).await
    }

    /// Works on every shard that is not committed, first on those that the gate of the guards admits at once. Returns
    /// those that were given up.
    async fn work(
        &self,
        plan: &Plan,
        mut done: Vec<u32>,
        (context, mut generator): (Arc<RunContext>, Box<dyn TextGenerator>),
        display: &mut Display,
        end: &CancellationToken,
    ) -> Result<Vec<(u32, String)>> {
        let limits = LedgerLimits { attempts: self.config.run.attempts, ..LedgerLimits::default() };
        let mut gate = Gate::new(plan);
        let mut dead = Vec::new();
        loop {
            let settled: HashSet<u32> = done.iter().copied().collect();
            gate.look(&self.output, plan, |shard| settled.contains(&shard)).await?;
            let held = plan.shards.iter().filter(|job| !gate.admits(job));
            let held: Vec<u32> = held.map(|job| job.shard).collect();
            let not_now = [done.as_slice(), held.as_slice()].concat();
            let queue = Arc::new(LocalQueue::new(plan, &not_now, limits));
            let of_queue = (&queue, held.len());
            generator = work(of_queue, context.clone(), generator, display, end).await?;
            dead.extend(queue.dead());
            if held.is_empty() || !queue.is_done() {
                return Ok(dead);
            }
            done = finalise::committed(&self.output, plan).await?;
            done.extend(dead.iter().map(|(shard, _)| *shard));
        }
    }

    /// Publishes what there is, unless shards were given up that a later try may still make. After the deadline
    /// there is no later.
    pub(crate) async fn conclude(
        self,
        plan: Plan,
        dead: Vec<(u32, String)>,
        late: bool,
        seconds: Option<f64>,
    ) -> Result<Outcome> {
        if late {
            let sealed = finalise::seal(&self.output, &plan, "not generated before the deadline").await?;
            if sealed > 0 {
                tracing::warn!(shards = sealed, "the deadline has passed: publishing without them");
            }
        } else if !dead.is_empty() {
            let missing = dead.len();
            return Ok(Outcome::Incomplete { dead, missing });
        }
        self.finish(plan, seconds).await
    }

    /// The run's deadline: the first time of day `[run] deadline` after it was planned.
    pub(crate) async fn deadline(&self, plan: &Plan) -> Result<Deadline> {
        let Some(time) = self.config.run.deadline else {
            return Ok(Deadline(None));
        };
        let planned = plan_time(&self.output, &plan.run).await?;
        Ok(Deadline(Some(first_after(planned.to_zoned(TimeZone::system()), time)?)))
    }

    /// Publishes every kind, or shows what was published before.
    #[instrument(name = "publish", target = "laser::trace", skip_all)]
    pub(crate) async fn finish(self, plan: Plan, seconds: Option<f64>) -> Result<Outcome> {
        let note = (self.config.model.engine == EngineKind::Mistralrs)
            .then(|| "engine = \"mistralrs\" decodes plainly: no drafts, no speedup".to_owned());
        let mut manifests = Vec::new();
        let (mut covered, mut kept) = (true, true);
        let output = &self.config.output;
        let terms = Terms { min_coverage: output.min_coverage, guards: self.config.guards, delta: output.is_delta() };
        for &kind in plan.counts.keys() {
            match finalise::publish(&self.output, &plan, kind, &terms).await? {
                Published::Complete(manifest) => manifests.push(*manifest),
                Published::BelowCoverage(manifest) => {
                    covered = false;
                    manifests.push(*manifest);
                }
                Published::Breached(manifest) => {
                    kept = false;
                    manifests.push(*manifest);
                }
                Published::Incomplete { missing } => {
                    return Ok(Outcome::Incomplete { dead: Vec::new(), missing });
                }
            }
        }
        if covered
            && kept
            && let Some(nights) = self.config.output.keep_nights
        {
            // The night is published; what could not be removed is so by the next.
            match operate::remove_outdated(&self.output, nights).await {
                Ok(runs) => tracing::info!(runs, "removed outdated runs"),
                Err(error) => tracing::warn!("outdated runs were not removed: {error:#}"),
            }
        }
        let (output, model) = (self.output, self.model);
        let finished = Finished { plan, manifests, output, model, seconds, note };
        Ok(match (covered, kept) {
            (true, true) => Outcome::Complete(finished),
            (false, _) => Outcome::BelowCoverage(finished),
            (true, false) => Outcome::Breached(finished),
        })
    }
}

/// Drives a worker over the in-process queue, in which so many shards only seem committed: they are held back.
async fn work(
    (queue, held): (&Arc<LocalQueue>, usize),
    context: Arc<RunContext>,
    generator: Box<dyn TextGenerator>,
    display: &mut Display,
    drain: &CancellationToken,
) -> Result<Box<dyn TextGenerator>> {
    display.stage("generating");
    let rows = context.plan.counts.values().map(|c| c.entities).sum();
    let shards = context.plan.shards.len();
    let stop = Stop { drain: drain.clone(), ..Stop::default() };
    let worker = run_worker(queue.clone(), context.clone(), generator, stop);
    let detail = || {
        let draining = match drain.is_cancelled() {
            true => "; finishing the shards in hand",
            false => "",
        };
        let committed = queue.counts().committed - held;
        format!("{committed} of {shards} shards{draining}")
    };
    show_work(worker, &context.progress, Some(rows), display, &detail).await
}

/// Drives a worker to its end and shows what it generates, of `rows` if that is known.
pub(crate) async fn show_work<G>(
    worker: impl Future<Output = Result<G, WorkerError>>,
    progress: &Progress,
    rows: Option<u64>,
    display: &mut Display,
    detail: &dyn Fn() -> String,
) -> Result<G> {
    let started = Instant::now();
    tokio::pin!(worker);
    let mut ticks = tokio::time::interval(TICK);
    let generator = loop {
        tokio::select! {
            ended = &mut worker => break ended?,
            _ = ticks.tick() => {
                let now = progress.snapshot();
                let done = now.figures.texts + now.carried + now.errors;
                let rate = now.figures.tokens as f64 / started.elapsed().as_secs_f64();
                display.update(done, rows, &format!(
                    "texts, {rate:.0} tokens/s, {:.1} accepted a forward, {}",
                    now.figures.aal(), detail()
                ));
            }
        }
    };
    let now = progress.snapshot();
    display.finish_with(&format!(
        "{} texts, {} tokens, {} carried forward, {} errors; {}",
        now.figures.texts,
        now.figures.tokens,
        now.carried,
        now.errors,
        detail()
    ));
    Ok(generator)
}

/// Finds the configured model, a path, a URL or a hub id, and opens its files.
pub(crate) async fn open_model(config: &Config) -> Result<ModelFiles> {
    let path = encoder::local_path(config, &config.model.path).await;
    open_local_model(&path.context("[model] path")?.to_string_lossy()).await
}

/// Resolves a path or hub id and opens the model's files.
pub(crate) async fn open_local_model(model: &str) -> Result<ModelFiles> {
    let model = model.to_owned();
    tokio::task::spawn_blocking(move || {
        let path = resolve(&model, &Hub::from_env())?;
        anyhow::Ok(ModelFiles::open(&path)?)
    })
    .await?
    .context("[model] path")
}

/// What decides the texts of a configuration and a model, given the prompts' digests.
pub(crate) fn model_spec(config: &Config, model: &ModelFiles, prompts: BTreeMap<Kind, Digest>) -> Result<Spec> {
    let isq = config.model.isq.as_ref().map_or_else(String::new, |isq| format!("+{isq}"));
    Ok(Spec {
        engine: match config.model.engine {
            EngineKind::Tree => "tree".to_owned(),
            EngineKind::Mistralrs => "mistralrs".to_owned(),
        },
        model: model.digest().context("[model] path")?,
        tokenizer: Digest::from_bytes(model.tokenizer.fingerprint()),
        precision: format!("{}{isq}", config.model.dtype),
        prompts,
        verification: config.verification.policy(),
        max_new_tokens: config.generate.max_new_tokens,
        stop: config.generate.stop.clone(),
    })
}

/// The batches of a reader as a stream.
pub(crate) fn previous_texts(reader: PreviousReader) -> impl Stream<Item = Result<Vec<PreviousText>, ReadError>> {
    futures::stream::try_unfold(reader, |mut reader| async move {
        let texts = reader.next_batch().await.map_err(|e| Box::new(e) as ReadError)?;
        Ok(texts.map(|texts| (texts, reader)))
    })
}

/// What `latest` of [[previous]] stands for tonight; nothing if it is not asked for.
async fn latest(config: &Config, output: &Location, date: Date) -> Result<Vec<String>> {
    match config.previous.iter().any(PreviousSource::is_latest) {
        true => Ok(previous::latest(output, date).await?),
        false => Ok(Vec::new()),
    }
}

/// The previous knowledge of a configuration outside a run, `latest` resolved.
pub(crate) async fn previous_sources(config: &Config, before: Date) -> Result<Vec<PreviousSource>> {
    let output = Location::parse(&config.output.path)?;
    let folders = latest(config, &output, before).await?;
    let sources = previous::resolve_latest(&config.previous, &output, &folders);
    ensure!(
        !sources.is_empty(),
        "no previous knowledge: [[previous]] gives none, or there is no complete night in {} yet",
        output.url()
    );
    Ok(sources)
}

/// Whether every kind of the run is published.
pub(crate) async fn is_published(output: &Location, plan: &Plan) -> Result<bool> {
    for &kind in plan.counts.keys() {
        if !output.join(&plan.partition(kind)).join(SUCCESS).exists().await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Keeps a second process off a run on a local disk for as long as the file is open. On a remote store the
/// commit alone decides; two processes would waste work, never double a row.
fn lock(folder: &Location, run: &str) -> Result<Option<File>> {
    let Some(path) = folder.local_path() else {
        return Ok(None);
    };
    let name = path.join("lock");
    std::fs::create_dir_all(&path).with_context(|| format!("{}: the output is not writable", path.display()))?;
    let file = File::create(&name).with_context(|| format!("{}: not writable", name.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => {
            bail!(
                "{}: another process is working on run {run}; wait for it, or give another [output] path",
                path.display()
            )
        }
        Err(std::fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("{}: cannot be locked", name.display()))
        }
    }
}

/// The demo: makes its data set, runs last night (a cold start), then returns the configuration of tonight.
pub(crate) async fn demo_nights(config: &Config) -> Result<Option<(Config, Config)>> {
    let Some(demo) = &config.demo else {
        return Ok(None);
    };
    let data = Location::parse(&demo.data)?;
    let paths = crate::prepare::demo(&data, &demo.options()).await.context("[demo]")?;
    let tables = |tables: crate::prepare::Tables| {
        [tables.users, tables.items].map(|path| EntityTable { path, kind: None, columns: Default::default() }).to_vec()
    };
    let date = config.night();
    let tonight = Config {
        demo: None,
        input: tables(paths.tonight),
        previous: vec![previous::PreviousSource { path: config.output.path.clone(), kind: None, id_type: None }],
        run: crate::config::RunConfig { date: Some(date), ..config.run.clone() },
        ..config.clone()
    };
    let last_night = Config {
        input: tables(paths.last_night),
        previous: Vec::new(),
        run: crate::config::RunConfig { date: Some(date.yesterday()?), audit_share: 0.0, ..config.run.clone() },
        ..tonight.clone()
    };
    Ok(Some((last_night, tonight)))
}
