//! `laser-bench plan`: how long pools and plan of a synthetic night take, and in how much memory.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;
use jiff::civil::{Date, date};
use laser_coordinator::nats::{self, NatsClient, NatsConfig};
use laser_coordinator::plan::{PlanRequest, plan};
use laser_coordinator::prompt::{PromptConfig, PromptRenderer};
use laser_model::ModelFiles;
use laser_night::config::RunConfig;
use laser_night::{Progress, open_local_model, previous_texts};
use laser_pool_builder::{
    Attributes, Clusters, Grouping, GroupingConfig, OpenPools, PoolTokenizer, PoolsConfig, build_pools, join_embeddings,
};
use laser_schema::job::{Plan, Spec};
use laser_schema::layout::DataSet;
use laser_schema::lists::ListRows;
use laser_schema::{Digest, Entity, Kind};
use laser_store::Location;
use laser_store::join::Join;
use laser_store::previous::PreviousReader;
use laser_store::run_store::PLAN;
use laser_terminal::{Display, Style, Table};
use serde::{Deserialize, Serialize};

use super::simulated::spec;
use super::stage::{Stage, Watch};
use super::synthetic::{self, Synthetic};
use super::{machine, remove_old};

/// `laser-bench plan`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct PlanArgs {
    /// How many users there are.
    #[arg(long, default_value_t = 100_000)]
    entities: u64,
    /// Memory before anything is spilled, as [run] memory_mb.
    #[arg(long, default_value_t = RunConfig::default().memory_mb)]
    memory_mb: usize,
    /// A model, for its tokenizer.
    #[arg(long)]
    model: String,
    /// Films of a user's history.
    #[arg(long, default_value_t = 3)]
    films: u64,
    /// Different titles of all histories: with more of them a line comes again less often.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    titles: u64,
    /// Bound on a prompt's tokens.
    #[arg(long, default_value_t = 512)]
    prompt_tokens: usize,
    /// Also time planning by one coordinator and by so many together, each a process on a core of its own (taskset).
    #[arg(long, requires = "url")]
    coordinators: Option<usize>,
    /// The NATS server at which they meet.
    #[arg(long, requires = "coordinators")]
    url: Option<String>,
    /// Be one of them, and plan the night that is there into this folder.
    #[arg(long, hide = true)]
    pub(super) into: Option<String>,
    /// Where the night and the figures are written: about 1 kB an entity.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct PlanReport {
    options: PlanArgs,
    machine: String,
    stages: Vec<Stage>,
}

impl PlanReport {
    pub(super) fn render(&self, style: Style) -> String {
        let mut table = Table::new(&["entities", "memory_mb", "stage", "s", "CPU s", "entities/s", "peak MB"]);
        for stage in &self.stages {
            table.push(vec![
                self.options.entities.to_string(),
                self.options.memory_mb.to_string(),
                stage.stage.clone(),
                format!("{:.1}", stage.seconds),
                format!("{:.1}", stage.cpu_seconds),
                format!("{:.0}", stage.rows_per_second),
                format!("{:.0}", stage.peak_mb),
            ]);
        }
        format!("{}\n{}", self.machine, table.render(style))
    }
}

/// Makes the night, then builds its pools and plans it.
pub(super) async fn run(options: &PlanArgs) -> Result<PlanReport> {
    let dir = options.output.join("plan");
    if options.into.is_none() {
        remove_old(&dir)?;
    }
    let model = open_local_model(&options.model).await?;
    let prompts =
        PromptConfig { user: "plain/films".into(), max_tokens: Some(options.prompt_tokens), ..PromptConfig::default() };
    let mut bench = Bench {
        options,
        prompts: PromptRenderer::new(&prompts, &model, 128)?,
        dir: Location::parse(&dir.to_string_lossy())?,
        memory: options.memory_mb << 20,
        model,
        display: Display::new(),
        stages: Vec::new(),
    };
    match (&options.into, &options.url) {
        (Some(into), Some(url)) => bench.coordinate(&dir, into, url).await?,
        _ => bench.run(&dir).await?,
    }
    Ok(PlanReport { options: options.clone(), machine: machine(), stages: bench.stages })
}

/// The digest of the shards' inputs.
fn shards(plan: &Plan) -> Digest {
    let inputs: Vec<_> = plan.shards.iter().map(|job| (&job.input, &job.input_digest)).collect();
    Digest::of_json(&inputs)
}

/// What a coordinator says of itself.
#[derive(Debug, Deserialize)]
struct Measured {
    stages: Vec<Stage>,
}

/// Tonight.
const NIGHT: Date = date(2026, 1, 2);

struct Bench<'a> {
    options: &'a PlanArgs,
    prompts: PromptRenderer,
    model: ModelFiles,
    dir: Location,
    memory: usize,
    display: Display,
    stages: Vec<Stage>,
}

impl Bench<'_> {
    async fn run(&mut self, dir: &Path) -> Result<()> {
        let PlanArgs { entities: users, films, titles, .. } = *self.options;
        let (counts, spec) = (synthetic::Counts { users, films, titles }, spec());
        let watch = self.watch("making the night")?;
        let data = synthetic::write(dir, counts, NIGHT.yesterday()?, &self.prompts, &spec).await?;
        self.done(watch)?;
        let config = pools_config(&data);
        let watch = self.watch("building pools")?;
        let pools = self.pools(&data, &config).await?;
        self.done(watch)?;
        let watch = self.watch("planning")?;
        let plan = self.plan((&data, "out"), &config, &pools, (spec, None)).await?;
        self.done(watch)?;
        let counts = plan.counts[&Kind::User];
        ensure!(
            (counts.entities, counts.carried) == (users, data.unchanged),
            "planned {counts:?}, of which {} should have been carried",
            data.unchanged
        );
        if let Some(coordinators) = self.options.coordinators {
            let one = self.coordinators(dir, 1)?;
            let all = self.coordinators(dir, coordinators)?;
            ensure!(one == all && one == shards(&plan), "coordinators wrote other shards together");
        }
        Ok(())
    }

    /// Times so many coordinators, and returns the digest of their plan.
    fn coordinators(&mut self, dir: &Path, count: usize) -> Result<Digest> {
        // A name of its own, so that no process of an earlier measurement is waited for.
        let into = format!("by-{count}-{}", std::process::id());
        let start = |core: usize| {
            let mut command = Command::new("taskset");
            command.arg("-c").arg(core.to_string()).arg(std::env::current_exe()?);
            command.args(std::env::args_os().skip(1)).args(["--into", &into]);
            command.envs([("RAYON_NUM_THREADS", "1"), ("TOKIO_WORKER_THREADS", "1")]);
            command.stdout(Stdio::piped()).spawn().context("taskset")
        };
        let children: Vec<Child> = (0..count).map(start).collect::<Result<_>>()?;
        let mut stages = Vec::new();
        for child in children {
            let output = child.wait_with_output()?;
            ensure!(output.status.success(), "a coordinator ended with {}", output.status);
            stages
                .extend(serde_json::from_slice::<Measured>(&output.stdout).context("a coordinator's figures")?.stages);
        }
        // The planner is the first that is done. The others find the plan within a tenth of a lease.
        let seconds = stages.iter().map(|stage| stage.seconds).fold(f64::INFINITY, f64::min);
        self.stages.push(Stage {
            stage: if count == 1 {
                "planning, 1 coordinator, 1 core".into()
            } else {
                format!("planning, {count} coordinators, 1 core each")
            },
            seconds,
            cpu_seconds: stages.iter().map(|stage| stage.cpu_seconds).sum(),
            rows_per_second: self.options.entities as f64 / seconds,
            peak_mb: stages.iter().map(|stage| stage.peak_mb).fold(0.0, f64::max),
        });
        let plan = std::fs::read(dir.join(&into).join("runs").join(into).join(PLAN)).context("the plan")?;
        Ok(shards(&serde_json::from_slice(&plan)?))
    }

    /// Plans a night that is there, with whoever else does.
    async fn coordinate(&mut self, dir: &Path, into: &str, url: &str) -> Result<()> {
        let data = Synthetic::below(dir, self.options.entities);
        let pools = OpenPools::open(&self.dir.join("pools"), &self.model.tokenizer.fingerprint()).await?;
        let config = NatsConfig { url: url.to_owned(), ..NatsConfig::default() };
        let client = nats::connect(&config, "laser-bench").await?;
        client.ensure_streams().await?;
        let watch = self.watch("planning")?;
        self.plan((&data, into), &pools_config(&data), &pools, (spec(), Some(&client))).await?;
        self.done(watch)
    }

    async fn pools(&mut self, data: &Synthetic, config: &PoolsConfig) -> Result<OpenPools> {
        let dir = self.dir.join("pools");
        let texts = previous_texts(PreviousReader::open(&data.previous, DataSet::Profiles, NIGHT).await?);
        let display = &mut self.display;
        let mut progress = |done, total, stage: &str| display.update(done, total, stage);
        build_pools(&data.tables, texts, PoolTokenizer::of(&self.model)?, config, self.memory, &dir, &mut progress)
            .await?;
        Ok(OpenPools::open(&dir, &self.model.tokenizer.fingerprint()).await?)
    }

    async fn plan(
        &mut self,
        (data, into): (&Synthetic, &str),
        config: &PoolsConfig,
        pools: &OpenPools,
        (spec, queue): (Spec, Option<&NatsClient>),
    ) -> Result<Plan> {
        let mut entities = Join::new(&data.tables, self.memory).await?;
        join_embeddings(config, &mut entities).await?;
        let route = |entity: &Entity| pools.route(entity, entity.embedding.as_deref()).unwrap_or_default().to_owned();
        let run = RunConfig::default();
        let request = PlanRequest {
            run: into.to_owned(),
            date: NIGHT,
            spec,
            previous: &data.previous,
            carry_forward: true,
            shard_rows: run.shard_rows,
            audit_share: run.audit_share,
            seed: run.seed,
            limit: None,
            pools: ("pools".into(), pools.digest().clone()),
            price: None,
            guards: None,
            embedding: None,
            prompts: &self.prompts,
            route: &route,
            valuation: None,
            memory: self.memory,
            catalogue: None,
            list_rows: ListRows::default(),
            runners_up: 0,
            canary: None,
            queue,
        };
        let (display, total) = (&mut self.display, Some(self.options.entities));
        let mut progress = |entities: u64| display.update(entities, total, "entities");
        let output = self.dir.join(into);
        Ok(plan(Some(&output), entities, &request, &mut progress).await?)
    }

    fn watch(&mut self, stage: &'static str) -> Result<Watch> {
        self.display.stage(stage);
        Watch::start(stage)
    }

    fn done(&mut self, watch: Watch) -> Result<()> {
        self.stages.push(watch.stop(self.options.entities)?);
        Ok(())
    }
}

/// 132 groups whatever the number of users: five clusters, and ages by genres.
fn pools_config(data: &Synthetic) -> PoolsConfig {
    PoolsConfig {
        user: GroupingConfig {
            grouping: Some(Grouping::Router),
            clusters: Clusters::Fixed(5),
            attributes: Attributes::Order(vec!["age".into(), "genre".into()]),
            max_texts: 500,
            embeddings: Some(data.embeddings.clone()),
            ..GroupingConfig::default()
        },
        ..PoolsConfig::default()
    }
}
