//! A worker that generates shards of whatever run has some.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use laser_coordinator::nats::{self, NatsWorker, RunRef};
use laser_features::encoder::Encoder;
use laser_model::ModelFiles;
use laser_pool_builder::OpenPools;
use laser_schema::job::Spec;
use laser_schema::{EncoderInfo, Progress};
use laser_store::Location;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_worker::run::{RunContext, Stop, run_worker};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::config::{Config, ListsConfig};
use crate::lists::catalogue_of_run;
use crate::model::{model_spec, open_draft_models, open_model};
use crate::night::{planned, run_context};
use crate::progress::show_work;
use crate::{encoder, generator, telemetry};

/// Time that the store has to answer a worker whose grace is over: less than a pod's grace goes beyond `[worker]
/// grace_seconds`.
const LAST_COMMIT: Duration = Duration::from_secs(2);

/// Generates shards of whatever run has some, until told to stop or idle for `[worker] idle_seconds`. `false`: told
/// to stop.
///
/// # Errors
/// What keeps this worker from working; what it has not finished is given to others.
pub async fn work(config: &Config, progress: &mut dyn Progress, drain: &CancellationToken) -> Result<bool> {
    let name = worker_name();
    let client = nats::connect(&config.queue()?, &name).await?;
    telemetry::watch_nats(client.events().clone());
    let idle = config.worker.idle_seconds.map(Duration::from_secs);
    let queue = NatsWorker::bind(client, idle).await?;
    progress.stage("loading the model");
    let model = open_model(config).await?;
    let encoder = match encoder::open(config).await? {
        Some(files) => Some(encoder::load(files).await?),
        None => None,
    };
    let drafts = open_draft_models(config, &model).await?;
    let mut generator = generator::load(config, &model, drafts).await?;
    let stop = Stop { drain: drain.clone(), ..Stop::default() };
    release_after(Duration::from_secs(config.worker.grace_seconds), &stop);
    loop {
        progress.stage("waiting for work");
        let run = tokio::select! {
            () = drain.cancelled() => return Ok(false),
            run = queue.next_run() => run,
        };
        let Some(run) = run else { return Ok(true) };
        let span = telemetry::run_span(&run.run);
        let opened = open_run(config, (&model, encoder.as_ref()), &run, &name).instrument(span.clone()).await;
        let context = match opened {
            Ok(context) => context,
            Err(error) => {
                queue.release().await;
                return Err(error.context(format!("run {}", run.run)));
            }
        };
        progress.stage("generating");
        let work = run_worker(Arc::new(queue.queue(&run)), context.clone(), generator, stop.clone());
        generator =
            show_work(work, (&context, None), progress, &|| format!("run {}", run.run)).instrument(span).await?;
        if drain.is_cancelled() {
            queue.release().await;
            return Ok(false);
        }
    }
}

/// What a draining worker has not finished by then it gives back. A finished shard is still committed to a store that
/// answers.
fn release_after(grace: Duration, stop: &Stop) {
    let Stop { drain, release, abandon } = stop.clone();
    tokio::spawn(async move {
        drain.cancelled().await;
        tokio::time::sleep(grace).await;
        release.cancel();
        tokio::time::sleep(LAST_COMMIT).await;
        abandon.cancel();
    });
}

/// Reads a run's plan and opens its pools, and makes sure that this worker may generate for it.
async fn open_run(
    config: &Config,
    (model, encoder): (&ModelFiles, Option<&Arc<Encoder>>),
    run: &RunRef,
    worker: &str,
) -> Result<Arc<RunContext>> {
    let store = RunStore::new(&Location::parse(&run.output)?, &run.run);
    let planned = planned(&store).await?;
    ensure!(
        planned.plan_digest() == run.plan_digest,
        "{}: plan.json is not the plan that was queued",
        store.folder().url()
    );
    let info = encoder.map(|encoder| encoder.info());
    let pools = check_run(config, (model, info), &planned).await?;
    let files = config.lists.as_ref().map(ListsConfig::history_files).unwrap_or_default();
    let catalogue = catalogue_of_run(&planned, Some(&config.worker.cache()), files, &model.tokenizer).await?;
    run_context(planned, (&pools, catalogue), encoder.cloned(), worker.to_owned()).await
}

/// Makes sure that this configuration may generate for a run, and opens the run's pools.
pub(crate) async fn check_run(
    config: &Config,
    (model, encoder): (&ModelFiles, Option<&EncoderInfo>),
    run: &PlannedRun,
) -> Result<OpenPools> {
    let plan = &run.plan;
    let lists = match (&config.lists, &plan.spec.lists) {
        (Some(lists), Some(spec)) => Some(lists.spec(spec.trie.clone(), spec.out_of_stock.clone())),
        (Some(_), None) => bail!("it makes texts, and this configuration has [lists]; remove the section"),
        (None, Some(_)) => bail!("it makes lists; give the coordinator's [lists]"),
        (None, None) => None,
    };
    check_spec(&plan.spec, &model_spec(config, model, (plan.spec.prompts.clone(), lists))?)?;
    encoder::check(plan.embedding.as_ref(), encoder)?;
    let dir = run.pools()?;
    let pools = OpenPools::open_with(&dir, &model.tokenizer.fingerprint(), Some(&config.worker.cache())).await?;
    ensure!(
        *pools.digest() == plan.pool_digest,
        "{}: these are not the pools that the run was planned with",
        dir.url()
    );
    Ok(pools)
}

/// Prompts come rendered; all else that decides a text must be the coordinator's.
fn check_spec(run: &Spec, worker: &Spec) -> Result<()> {
    if let Some((key, expected, found)) = encoder::difference(run, worker)? {
        bail!(
            "it wants {key} = {expected}, but this configuration gives {found}; work with the coordinator's [model], \
             [generate] and [verification]"
        );
    }
    Ok(())
}

/// Unique among the workers of a cluster: the host's name is the pod's.
fn worker_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "worker",
        host => host,
    };
    format!("{host}-{}", std::process::id())
}
