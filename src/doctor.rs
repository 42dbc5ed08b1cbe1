//! `laser doctor`: looks at everything a night needs, before the night does, and says what to mend.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use jiff::Timestamp;
use jiff::civil::Date;
use laser_coordinator::nats::{self, NatsConfig, NatsWorker};
use laser_coordinator::plan::read_plan;
use laser_coordinator::prompt::PromptRenderer;
use laser_features::encoder::EncoderFiles;
use laser_model::ModelFiles;
use laser_schema::{EncoderInfo, Pooling};
use laser_store::location::Created;
use laser_store::previous::{self, PreviousReader, PreviousSource};
use laser_store::{EntityReader, Location};

use crate::commands::print;
use crate::config::Config;
use crate::distributed::check_run;
use crate::encoder;
use crate::night::{is_published, open_model};

/// A clock further off than this moves deadlines and nights.
const SKEW_MAX_SECONDS: f64 = 5.0;

/// Remote stores are asked again for minutes, too long for somebody who waits.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Checks everything and prints a line on each. `false` if something is wrong.
pub(crate) async fn doctor(config: &Config) -> Result<bool> {
    let mut well = true;
    let model = open_model(config).await;
    let described = model.as_ref().map_err(|e| anyhow!("{e:#}"));
    well &= tell("model", described.and_then(|model| describe_model(config, model)))?;
    let encoder = encoder::open(config).await;
    if config.encoder.is_some() {
        well &= tell("encoder", describe_encoder(&encoder).await)?;
    }
    for table in &config.input {
        let opened = soon(async { Ok(EntityReader::open(table).await?) }).await;
        let found = opened.map(|_| "readable".into());
        well &= tell(&format!("input {}", table.path), found)?;
    }
    for source in &config.previous {
        let found = soon(previous(config, source)).await;
        well &= tell(&format!("previous {}", source.path), found)?;
    }
    let reached = soon(output(config)).await;
    let is_reached = reached.is_ok();
    well &= tell(&format!("output {}", config.output.path), reached)?;
    if let (Ok(model), Ok(encoder), true) = (&model, &encoder, is_reached) {
        let info = encoder.as_ref().map(|files| files.info());
        well &= tell("run", newest_run(config, (model, info)).await)?;
    }
    if let Some(queue) = &config.queue {
        well &= tell(&format!("queue {}", queue.url), connection(queue).await)?;
    }
    Ok(well)
}

fn tell(what: &str, found: Result<String>) -> Result<bool> {
    match &found {
        Ok(found) => print(&format!("ok    {what}: {found}\n"))?,
        Err(error) => print(&format!("WRONG {what}: {error:#}\n"))?,
    }
    Ok(found.is_ok())
}

/// That there is no night yet is no fault of `latest`.
async fn previous(config: &Config, source: &PreviousSource) -> Result<String> {
    if source.is_latest() {
        let output = Location::parse(&config.output.path)?;
        let folders = previous::latest(&output, Date::MAX).await?;
        return Ok(match folders.as_slice() {
            [] => "nothing yet: a first night".to_owned(),
            folders => folders.join(", "),
        });
    }
    PreviousReader::open(std::slice::from_ref(source), Date::MAX).await?;
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
    PromptRenderer::new(&config.prompt, model, config.generate.max_new_tokens).context("[prompt]")?;
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
    let output = Location::parse(&config.output.path)?;
    let Some(run) = output.join("runs").folders().await?.into_iter().max() else {
        return Ok("none yet".to_owned());
    };
    match read_plan(&output, &run).await? {
        Some(plan) if !is_published(&output, &plan).await? => {
            let pools = check_run(config, own, &output, &plan).await;
            (pools.and_then(|pools| Ok(pools.verify()?))).context(run.clone())?;
            Ok(format!("{run} can be worked on"))
        }
        _ => Ok(format!("{run}, the newest, leaves nothing to do for a worker")),
    }
}

/// A conditional put must have one winner, and the store's clock must be ours.
async fn output(config: &Config) -> Result<String> {
    let folder = Location::parse(&config.output.path)?;
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
        "the store lets a second writer replace an object: it knows no conditional put, and rows would be doubled; use a \
         store that does (S3, GCS, Azure, MinIO, a local disk)"
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
