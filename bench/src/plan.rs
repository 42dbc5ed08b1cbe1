//! `laser-bench plan`: how long pools and plan of a synthetic night take, and in how much memory.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use jiff::civil::{Date, date};
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
use laser_schema::{Entity, Kind};
use laser_store::Location;
use laser_store::join::Join;
use laser_store::previous::PreviousReader;
use laser_terminal::{Display, Style, Table};
use serde::Serialize;

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
                stage.stage.to_owned(),
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
    remove_old(&dir)?;
    let model = open_local_model(&options.model).await?;
    let prompts = PromptConfig { user: "plain/films".into(), max_tokens: Some(512), ..PromptConfig::default() };
    let mut bench = Bench {
        options,
        prompts: PromptRenderer::new(&prompts, &model, 128)?,
        dir: Location::parse(&dir.to_string_lossy())?,
        memory: options.memory_mb << 20,
        model,
        display: Display::new(),
        stages: Vec::new(),
    };
    bench.run(&dir).await?;
    Ok(PlanReport { options: options.clone(), machine: machine(), stages: bench.stages })
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
        let (users, spec) = (self.options.entities, spec());
        let watch = self.watch("making the night")?;
        let data = synthetic::write(dir, users, NIGHT.yesterday()?, &self.prompts, &spec).await?;
        self.done(watch)?;
        let config = pools_config(&data);
        let watch = self.watch("building pools")?;
        let pools = self.pools(&data, &config).await?;
        self.done(watch)?;
        let watch = self.watch("planning")?;
        let plan = self.plan(&data, &config, &pools, spec).await?;
        self.done(watch)?;
        let counts = plan.counts[&Kind::User];
        ensure!(
            (counts.entities, counts.carried) == (users, data.unchanged),
            "planned {counts:?}, of which {} should have been carried",
            data.unchanged
        );
        Ok(())
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

    async fn plan(&mut self, data: &Synthetic, config: &PoolsConfig, pools: &OpenPools, spec: Spec) -> Result<Plan> {
        let mut entities = Join::new(&data.tables, self.memory).await?;
        join_embeddings(config, &mut entities).await?;
        let route = |entity: &Entity| pools.route(entity, entity.embedding.as_deref()).unwrap_or_default().to_owned();
        let run = RunConfig::default();
        let request = PlanRequest {
            run: "bench".into(),
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
            canary: None,
        };
        let (display, total) = (&mut self.display, Some(self.options.entities));
        let mut progress = |entities: u64| display.update(entities, total, "entities");
        let output = self.dir.join("out");
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
