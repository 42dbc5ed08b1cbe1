//! One night: from tables and last night's knowledge to a published data set, in one process.
//!
//! A run is named by its date and by what it depends on, so the same command finds the same run again and goes on where
//! it was: pools that are built stay, a plan that is written stays, a shard that is committed is never generated twice.

mod estimate;
mod generate;
mod name;
mod outcome;
mod publish;

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use jiff::civil::Date;
use laser_coordinator::canary::CanaryEntities;
use laser_coordinator::catalogue::CatalogueItem;
use laser_coordinator::nats::NatsClient;
use laser_coordinator::plan::{PlanRequest, SampleRequest, plan, plan_sample};
use laser_coordinator::priority::Valuation;
use laser_coordinator::prompt::PromptRenderer;
use laser_features::encoder::EncoderFiles;
use laser_model::ModelFiles;
use laser_pool_builder::{OpenPools, POOL_SET_FILE, PoolTokenizer, build_pools, join_embeddings, write_sources};
use laser_schema::job::{KindCounts, Plan, Spec};
use laser_schema::layout::DataSet;
use laser_schema::lists::ListRows;
use laser_schema::manifest::Manifest;
use laser_schema::{Entity, Kind, Progress};
use laser_store::Location;
use laser_store::join::Join;
use laser_store::previous::{self, PreviousReader, PreviousSource};
use laser_store::run_store::{PlannedRun, RunStore};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, instrument};

pub(crate) use generate::{run_context, without_audits};
pub(crate) use name::planned;
pub use outcome::{Finished, Outcome};

use crate::config::Config;
use crate::encoder;
use crate::erasure::marker::ensure_none;
use crate::lists::Items;
use crate::model::{grammar, model_spec, open_draft_models, open_model};
use crate::pool_sets;
use crate::previous::previous_texts;
use crate::telemetry;

/// How far a run is before anything is generated.
pub(crate) enum Ready {
    /// To its end, by an earlier process.
    Published(PlannedRun),
    /// It was told to stop.
    Drained,
    /// Planned, with its pools.
    Planned(PlannedRun, Box<OpenPools>),
}

/// What a run was begun with.
struct Begun {
    store: RunStore,
    date: Date,
    /// Without `latest`, which is resolved.
    previous: Vec<PreviousSource>,
    /// Where the pools are: below the output's root, or a URL.
    pools: String,
    /// Whether they are this run's own, to be built by it.
    builds_pools: bool,
}

/// What a run is planned for.
#[derive(Clone, Copy)]
enum Purpose<'a> {
    /// To be run: shards and plan are written to the output, together with coordinators that are met at the queue.
    Run(Option<&'a NatsClient>),
    /// To be told about: nothing is written.
    Tell,
    /// To be estimated: a sample is written to an output of its own.
    Sample(&'a SampleRequest<'a>),
}

/// What a night is made from, all of it checked.
#[derive(Debug)]
pub struct Night<'a> {
    pub(crate) config: &'a Config,
    pub(crate) model: ModelFiles,
    pub(crate) prompts: PromptRenderer,
    pub(crate) spec: Spec,
    pub(crate) encoder: Option<Arc<EncoderFiles>>,
    /// The root of what it writes.
    pub(crate) output: Location,
    /// The output's root, where earlier nights and promoted pools are: for all but a canary the same.
    home: Location,
    /// The entities of a canary, if it is one.
    canary: Option<CanaryEntities>,
    /// Gives entities their value, if shards are ordered by it.
    valuation: Option<Valuation>,
    /// The items of lists, if the night makes these.
    pub(crate) items: Option<Items>,
}

impl<'a> Night<'a> {
    /// Opens the model's files and the templates, and derives the specification.
    ///
    /// # Errors
    /// The first thing that is missing or does not fit.
    pub async fn open(config: &'a Config) -> Result<Self> {
        let model = open_model(config).await?;
        let items = match &config.lists {
            Some(lists) => Some(Items::build(lists, config, &model.tokenizer).await?),
            None => None,
        };
        let valuation = config.run.valuation()?;
        if let Some(valuation) = &valuation {
            valuation.check(&config.input).await?;
        }
        let longest = items.as_ref().map_or(config.generate.max_new_tokens, Items::codes);
        let prompts = PromptRenderer::new(&config.prompt, &model, longest).context("[prompt]")?;
        let digests = Kind::ALL.map(|kind| (kind, prompts.digest(kind)));
        let spec = model_spec(config, &model, (digests.into(), items.as_ref().map(|items| items.spec.clone())))?;
        grammar(spec.constraint.as_ref(), &model)?;
        Ok(Self {
            config,
            model,
            prompts,
            spec,
            encoder: encoder::open(config).await?,
            output: config.run_output()?,
            home: config.output()?,
            canary: match &config.canary {
                Some(canary) => Some(canary.entities(&config.input).await?),
                None => None,
            },
            valuation,
            items,
        })
    }

    /// Plans without writing; returns the manifests of the previous knowledge too.
    ///
    /// # Errors
    /// Those of a night until it is planned.
    pub async fn dry_plan(&self, progress: &mut dyn Progress) -> Result<(Plan, Vec<Manifest>)> {
        let temporary = tempfile::tempdir().context("no temporary directory for the pools")?;
        let temporary = Location::parse(&temporary.path().to_string_lossy())?;
        let (begun, manifests, pools) = self.dry_begin(&temporary, progress).await?;
        Ok((self.plan(Purpose::Tell, &begun, &pools, progress).await?.0, manifests))
    }

    /// Begins the run without writing to the output; pools of its own are built below `temporary`.
    async fn dry_begin(
        &self,
        temporary: &Location,
        progress: &mut dyn Progress,
    ) -> Result<(Begun, Vec<Manifest>, OpenPools)> {
        let (date, store) = self.choose_run().await?;
        let pins = self.pins(date, &store).await?;
        let begun = self.begun(date, store, pins)?;
        self.show_previous(&begun, progress);
        let manifests = previous::manifests(&begun.previous, self.spec.data_set(), date).await?;
        let dir = match begun.builds_pools {
            true => temporary.join("pools"),
            false => self.output.resolve(&begun.pools)?,
        };
        let pools = self.pools(&dir, &begun, progress).await?;
        Ok((begun, manifests, pools))
    }

    /// Runs the night to its end in this process.
    ///
    /// # Errors
    /// What keeps the night from going on; the same command goes on once it is mended.
    pub async fn run(self, progress: &mut dyn Progress, drain: &CancellationToken) -> Result<Outcome> {
        // A coordinator, which may not have them, leaves that to the workers.
        let drafts = open_draft_models(self.config, &self.model).await?;
        let (date, store) = self.choose_run().await?;
        let _lock = store.lock()?;
        let span = telemetry::run_span(store.name());
        let work = async {
            match self.prepare(date, &store, None, progress, drain).await? {
                Ready::Published(run) => self.publish(run, None).await,
                Ready::Drained => Ok(Outcome::Drained { committed: 0, shards: 0 }),
                Ready::Planned(run, pools) => self.generate(run, &pools, drafts, progress, drain).await,
            }
        };
        work.instrument(span).await
    }

    /// Plans the run and builds its pools, or finds both where an earlier process left them. Coordinators that meet at
    /// `queue` share the planning.
    pub(crate) async fn prepare(
        &self,
        date: Date,
        store: &RunStore,
        queue: Option<&NatsClient>,
        progress: &mut dyn Progress,
        drain: &CancellationToken,
    ) -> Result<Ready> {
        self.ensure_no_erasure().await?;
        let known = store.planned().await?;
        if let Some(run) = &known
            && run.is_published().await?
        {
            return Ok(Ready::Published(run.clone()));
        }
        let (run, pools) = tokio::select! {
            biased;
            () = drain.cancelled() => return Ok(Ready::Drained),
            prepared = self.begin((date, store), known, queue, progress) => prepared?,
        };
        if run.plan.pool_digest != *pools.digest() {
            let folder = store.folder();
            bail!(
                "{}: these are not the pools that {}/plan.json was made with; remove {} to plan anew",
                run.pools()?.url(),
                folder.url(),
                folder.url()
            );
        }
        Ok(Ready::Planned(run, Box::new(pools)))
    }

    /// Refuses to write while an erasure is under way; a canary reads the nights beside it, too.
    async fn ensure_no_erasure(&self) -> Result<()> {
        ensure_none(&self.home).await?;
        ensure_none(&self.output).await
    }

    /// Begins the run: pins, then pools, then a plan, each of them unless it is there.
    async fn begin(
        &self,
        (date, store): (Date, &RunStore),
        known: Option<PlannedRun>,
        queue: Option<&NatsClient>,
        progress: &mut dyn Progress,
    ) -> Result<(PlannedRun, OpenPools)> {
        let pins = store.begin(self.pins(date, store).await?).await?;
        // Again: an erasure that begins now sees a run under way, or is seen here.
        self.ensure_no_erasure().await?;
        if let Some(canary) = &self.canary {
            progress.stage("canary");
            let output = self.output.url();
            progress.finish_with(&format!("{} beside the night of {date}, into {output}", canary.canary()));
        }
        if let Some((items, lists)) = self.items.as_ref().zip(self.config.lists.as_ref()) {
            progress.stage("catalogue");
            progress.finish_with(&items.describe());
            items.keep((self.config, lists), store, progress).await?;
        }
        let begun = self.begun(date, store.clone(), pins)?;
        self.show_previous(&begun, progress);
        let dir = self.output.resolve(&begun.pools)?;
        let pools = self.pools(&dir, &begun, progress).await;
        let own_pools = || if begun.builds_pools { format!(" and {}", dir.url()) } else { String::new() };
        let pools = pools.with_context(|| {
            format!("run {}; to begin it anew, remove {}{}", store.name(), store.folder().url(), own_pools())
        })?;
        let run = match known {
            Some(run) => run,
            None => {
                let (plan, _) = self.plan(Purpose::Run(queue), &begun, &pools, progress).await?;
                PlannedRun::new(store.clone(), plan)
            }
        };
        Ok((run, pools))
    }

    /// The pools of the run: those that are there, or its own from last night's knowledge.
    #[instrument(name = "pools", target = "laser::trace", skip_all)]
    async fn pools(&self, dir: &Location, begun: &Begun, progress: &mut dyn Progress) -> Result<OpenPools> {
        if begun.builds_pools && !dir.join(POOL_SET_FILE).exists().await? {
            // Lists are nothing to draft from: their set is empty, and nothing to show.
            let (sources, progress): (_, &mut dyn Progress) = match self.spec.lists {
                None => (&*begun.previous, progress),
                Some(_) => (&[], &mut ()),
            };
            progress.stage("building pools");
            let pool_tokenizer = PoolTokenizer::of(&self.model)?;
            let previous = PreviousReader::open(sources, DataSet::Profiles, begun.date).await?;
            write_sources(dir, &pool_sets::sources(&self.output, &previous)).await?;
            let mut show = |done, total, stage: &str| progress.update(done, total, stage);
            let (input, config) = (&self.config.input, &self.config.pools);
            let texts = previous_texts(previous);
            let memory = self.config.run.memory();
            let set = build_pools(input, texts, pool_tokenizer, config, memory, dir, &mut show).await?;
            let tokens: usize = set.pools.iter().map(|p| p.tokens).sum();
            progress.finish_with(&format!(
                "{} pools, {} tokens from {} texts",
                set.pools.len(),
                tokens,
                set.texts.read
            ));
        }
        Ok(OpenPools::open(dir, &self.model.tokenizer.fingerprint()).await?)
    }

    /// What a row of the output is, if it is one of lists.
    fn list_rows(&self) -> ListRows {
        self.config.lists.as_ref().map_or_else(ListRows::default, |lists| lists.rows)
    }

    /// Plans the run for a purpose. Returns the plan of a sample, too, if that is the purpose.
    #[instrument(name = "plan", target = "laser::trace", skip_all)]
    async fn plan(
        &self,
        purpose: Purpose<'_>,
        begun: &Begun,
        pools: &OpenPools,
        progress: &mut dyn Progress,
    ) -> Result<(Plan, Option<Plan>)> {
        progress.stage("planning");
        let mut entities = Join::new(&self.config.input, self.config.run.memory()).await?;
        join_embeddings(&self.config.pools, &mut entities).await?;
        let route = |entity: &Entity| pools.route(entity, entity.embedding.as_deref()).unwrap_or_default().to_owned();
        let find = |id: &str| self.items.as_ref().and_then(|items| items.find(id));
        let catalogue = self.items.as_ref().zip(self.config.lists.as_ref());
        let catalogue = catalogue.map(|(items, lists)| planned_catalogue(items, &lists.item, &find));
        let run = &self.config.run;
        let request = PlanRequest {
            run: begun.store.name().to_owned(),
            date: begun.date,
            spec: self.spec.clone(),
            previous: &begun.previous,
            carry_forward: run.carry_forward,
            shard_rows: run.shard_rows,
            audit_share: run.audit_share,
            seed: run.seed,
            limit: run.limit,
            pools: (begun.pools.clone(), pools.digest().clone()),
            price: self.config.price.clone(),
            guards: self.config.gate(),
            embedding: self.encoder.as_deref().map(encoder::spec),
            prompts: &self.prompts,
            route: &route,
            valuation: self.valuation.as_ref(),
            memory: run.memory(),
            catalogue,
            list_rows: self.list_rows(),
            runners_up: self.config.output.runners_up,
            canary: self.canary.as_ref(),
            queue: match purpose {
                Purpose::Run(queue) => queue,
                Purpose::Tell | Purpose::Sample(_) => None,
            },
        };
        let mut show = |entities| progress.update(entities, None, "entities");
        let (plan, sampled) = match purpose {
            Purpose::Run(_) => (plan(Some(&self.output), entities, &request, &mut show).await?, None),
            Purpose::Tell => (plan(None, entities, &request, &mut show).await?, None),
            Purpose::Sample(sample) => {
                let (plan, sampled) = plan_sample(sample, entities, &request, &mut show).await?;
                (plan, Some(sampled))
            }
        };
        let sum = |f: fn(&KindCounts) -> u64| plan.counts.values().map(f).sum::<u64>();
        progress.finish_with(&format!(
            "{} entities: {} to generate, {} unchanged, {} failed; {} shards{}",
            sum(|c| c.entities),
            sum(|c| c.generate),
            sum(|c| c.carried),
            sum(|c| c.failed),
            plan.shards.len(),
            match sum(|c| c.unknown_items) {
                0 => String::new(),
                unknown => format!("; {unknown} interactions with items that are not in the catalogue"),
            }
        ));
        Ok((plan, sampled))
    }
}

/// The items as planning sees them.
fn planned_catalogue<'a>(
    items: &Items,
    field: &'a str,
    find: &'a (dyn Fn(&str) -> Option<CatalogueItem> + Sync),
) -> laser_coordinator::catalogue::Catalogue<'a> {
    laser_coordinator::catalogue::Catalogue { ids: items.id_type(), field, find }
}
