//! Looks at everything a night needs, before the night does, and says what to mend.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use jiff::Timestamp;
use jiff::civil::Date;
use laser_coordinator::nats::{self, NatsConfig, NatsWorker};
use laser_coordinator::prompt::PromptRenderer;
use laser_features::encoder::EncoderFiles;
use laser_model::ModelFiles;
use laser_schema::layout::DataSet;
use laser_schema::{EncoderInfo, Pooling};
use laser_store::location::Created;
use laser_store::previous::{self, PreviousReader, PreviousSource};
use laser_store::run_store::RunStore;
use laser_store::{EntityReader, Location};

use crate::config::{Config, EngineKind};
use crate::distributed::check_run;
use crate::lists::Items;
use crate::model::{grammar, open_draft_model, open_model};
use crate::{encoder, generator};

/// A clock further off than this moves deadlines and nights.
const SKEW_MAX_SECONDS: f64 = 5.0;

/// Remote stores are asked again for minutes, too long for somebody who waits.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What was found about one of the things that a night needs.
#[derive(Debug)]
pub struct Check {
    /// The thing.
    pub subject: String,
    /// What it is, or what to mend.
    pub found: Result<String>,
}

/// Checks everything, and tells `report` of each thing as soon as it is known.
pub async fn examine(config: &Config, report: &mut dyn FnMut(Check)) {
    let mut report = |subject: String, found: Result<String>| report(Check { subject, found });
    let model = open_model(config).await;
    let described = model.as_ref().map_err(|e| anyhow!("{e:#}"));
    report("model".to_owned(), described.and_then(|model| describe_model(config, model)));
    if let (Ok(model), EngineKind::Tree) = (&model, config.model.engine) {
        report(format!("device {}", config.model.device), generator::selftest(config, model).await);
    }
    if let (Ok(model), Some(key)) = (&model, config.generate.constraint_keys().first()) {
        let compiled = config.generate.constraint().and_then(|constraint| grammar(constraint.as_ref(), model));
        report(format!("[generate] {key}"), compiled.map(|_| "compiles for the model's tokenizer".to_owned()));
    }
    if let (Ok(model), Some(lists)) = (&model, &config.lists) {
        let items = Items::build(lists, config, &model.tokenizer).await;
        report(format!("catalogue {}", lists.catalogue.path), items.map(|items| items.describe()));
    }
    for (model, draft) in model.iter().flat_map(|model| config.draft.model.iter().map(move |draft| (model, draft))) {
        let opened = open_draft_model(config, draft, model).await;
        report(format!("draft model {}", draft.path), opened.map(|files| files.describe().to_owned()));
    }
    let encoder = encoder::open(config).await;
    if config.encoder.is_some() {
        report("encoder".to_owned(), describe_encoder(&encoder).await);
    }
    for table in &config.input {
        let opened = soon(async { Ok(EntityReader::open(table).await?) }).await;
        report(format!("input {}", table.path), opened.map(|_| "readable".into()));
    }
    if let Some(canary) = &config.canary {
        let chosen = canary.entities(&config.input).await;
        report("canary".to_owned(), chosen.map(|chosen| chosen.canary().to_string()).map_err(anyhow::Error::from));
    }
    for source in &config.previous {
        report(format!("previous {}", source.path), soon(previous(config, source)).await);
    }
    let reached = soon(output(config)).await;
    let is_reached = reached.is_ok();
    report(format!("output {}", config.output.path), reached);
    if let (Ok(model), Ok(encoder), true) = (&model, &encoder, is_reached) {
        let info = encoder.as_ref().map(|files| files.info());
        report("run".to_owned(), newest_run(config, (model, info)).await);
    }
    if let Ok(queue) = config.queue() {
        report(format!("queue {}", queue.url), connection(&queue).await);
    }
}

/// `laser selftest`: whether the configured device computes what the CPU computes.
///
/// # Errors
/// If it does not, or if the model's configuration cannot be read.
pub async fn selftest(config: &Config) -> Result<String> {
    generator::selftest(config, &open_model(config).await?).await
}

/// That there is no night yet is no fault of `latest`.
async fn previous(config: &Config, source: &PreviousSource) -> Result<String> {
    let data_set = if config.lists.is_some() { DataSet::Recommendations } else { DataSet::Profiles };
    if source.is_latest() {
        let output = config.output()?;
        let folders = previous::latest(&output, data_set, Date::MAX).await?;
        return Ok(match folders.as_slice() {
            [] => "nothing yet: a first night".to_owned(),
            folders => folders.join(", "),
        });
    }
    PreviousReader::open(std::slice::from_ref(source), data_set, Date::MAX).await?;
    Ok("readable".to_owned())
}

/// What a remote store answers in time.
async fn soon<T>(check: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = tokio::time::timeout(ANSWER_MAX, check).await;
    answer.unwrap_or_else(|_| {
        Err(anyhow!(
            "the store did not answer for {} s; check the URL, the network and the store's endpoint in the environment",
            ANSWER_MAX.as_secs()
        ))
    })
}

fn describe_model(config: &Config, model: &ModelFiles) -> Result<String> {
    // A list has few codes, and whether they fit is seen when its items are read.
    let longest = config.lists.as_ref().map_or(config.generate.max_new_tokens, |_| 1);
    PromptRenderer::new(&config.prompt, model, longest).context("[prompt]")?;
    let digest = model.digest()?;
    Ok(format!("{} with digest {digest}", config.model.path))
}

/// An encoder that fits its files is loaded, and asked for the embedding of an empty text.
async fn describe_encoder(opened: &Result<Option<Arc<EncoderFiles>>>) -> Result<String> {
    let files = opened.as_ref().map_err(|e| anyhow!("{e:#}"))?;
    let files = files.clone().context("[encoder]: not set")?;
    let encoder = encoder::load(files).await?;
    encoder.encode(&[""])?;
    let info = encoder.info();
    Ok(format!(
        "{} dimensions of {} tokens, {} pooling, {}, digest {}",
        info.dimensions,
        info.max_tokens,
        match info.pooling {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
        },
        match info.normalise {
            true => "normalised",
            false => "not normalised",
        },
        info.digest()
    ))
}

/// Whoever works on the newest run, if it is not published, must have its model, its settings and its pools.
async fn newest_run(config: &Config, own: (&ModelFiles, Option<&EncoderInfo>)) -> Result<String> {
    let output = config.run_output()?;
    let Some(name) = RunStore::names(&output).await?.into_iter().next() else {
        return Ok("none yet".to_owned());
    };
    match RunStore::new(&output, &name).planned().await? {
        Some(run) if !run.is_published().await? => {
            let pools = check_run(config, own, &run).await;
            (pools.and_then(|pools| Ok(pools.verify()?))).context(name.clone())?;
            Ok(format!("{name} can be worked on"))
        }
        _ => Ok(format!("{name}, the newest, leaves nothing to do for a worker")),
    }
}

/// A conditional put must have one winner, and the store's clock must be ours.
async fn output(config: &Config) -> Result<String> {
    let folder = config.output()?;
    let name = format!("runs/.doctor-{}-{}", std::process::id(), Timestamp::now().as_nanosecond());
    let probe = folder.join(&name);
    let outcome = conditional_put(&probe).await;
    probe.remove().await?;
    outcome
}

async fn conditional_put(probe: &Location) -> Result<String> {
    ensure!(
        probe.create(Bytes::from_static(b"first")).await? == Created::Won,
        "an object that was never written exists already"
    );
    ensure!(
        probe.create(Bytes::from_static(b"second")).await? == Created::Exists && probe.read().await? == "first",
        "the store lets a second writer replace an object: it knows no conditional put, and rows would be doubled; \
         use a store that does (S3, GCS, Azure, MinIO, a local disk)"
    );
    let skew = Timestamp::now().duration_since(probe.modified().await?).as_secs_f64();
    ensure!(
        skew.abs() <= SKEW_MAX_SECONDS,
        "its clock and this machine's are {skew:.0} s apart; synchronise them (NTP)"
    );
    Ok(format!("conditional puts have one winner, clocks {skew:.1} s apart"))
}

/// Whoever may make the streams is taken for a coordinator, whoever may bind to the consumer for a worker.
async fn connection(config: &NatsConfig) -> Result<String> {
    let client = nats::connect(config, "laser-doctor").await?;
    let version = client.server_version();
    let Err(coordinator) = client.ensure_streams().await else {
        return Ok(format!("NATS {version}, streams and consumer are there, for a coordinator"));
    };
    NatsWorker::bind(client, None).await.with_context(|| {
        format!(
            "NATS {version} lets this user be neither coordinator ({coordinator}) nor worker; compare its rights with \
             those of deploy/nats/laser.conf"
        )
    })?;
    Ok(format!("NATS {version}, streams and consumer are there, for a worker"))
}
