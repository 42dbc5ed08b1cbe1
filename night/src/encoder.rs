//! From `[encoder]` to what makes embeddings.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use laser_features::encoder::{Encoder, EncoderFiles};
use laser_model::{Hub, ModelError, resolve, resolve_drafts};
use laser_schema::{EmbeddingSpec, EncoderInfo};
use laser_store::Location;
use serde::Serialize;
use serde_json::Value;

use crate::config::Config;

/// The directory that a path, a URL or a hub id names, on this machine.
///
/// # Errors
/// If it is not there.
pub async fn local_path(config: &Config, model: &str) -> Result<PathBuf> {
    located(config, model, resolve).await
}

/// The same of what drafts for a model: a whole model, or an EAGLE layer or heads.
///
/// # Errors
/// If it is not there.
pub async fn local_drafts(config: &Config, drafts: &str) -> Result<PathBuf> {
    located(config, drafts, resolve_drafts).await
}

/// What a URL names, in the cache, or what `resolve` finds.
async fn located(
    config: &Config,
    model: &str,
    resolve: fn(&str, &Hub) -> Result<PathBuf, ModelError>,
) -> Result<PathBuf> {
    if model.contains("://") {
        let folder = Location::parse(model)?;
        return Ok(config.worker.cache().folder(&folder).await?);
    }
    let model = model.to_owned();
    let resolved = tokio::task::spawn_blocking(move || resolve(&model, &Hub::from_env())).await?;
    Ok(resolved?)
}

/// What the configured encoder is, if one is configured; its weights are read for their digest alone.
///
/// # Errors
/// Naming what is missing.
pub async fn open(config: &Config) -> Result<Option<Arc<EncoderFiles>>> {
    let Some(encoder) = config.encoder.clone() else {
        return Ok(None);
    };
    let directory = local_path(config, &encoder.path).await.context("[encoder] path")?;
    let files = tokio::task::spawn_blocking(move || EncoderFiles::open(&directory, &encoder));
    Ok(Some(Arc::new(files.await??)))
}

/// Loads the encoder.
///
/// # Errors
/// Weights that do not fit.
pub async fn load(files: Arc<EncoderFiles>) -> Result<Arc<Encoder>> {
    let loaded = tokio::task::spawn_blocking(move || Encoder::load(&files)).await??;
    Ok(Arc::new(loaded))
}

/// The embeddings that a run's output is to have.
pub fn spec(files: &EncoderFiles) -> EmbeddingSpec {
    EmbeddingSpec { encoder: files.info().clone(), layout: files.config().layout }
}

/// The run's embeddings must be the coordinator's; a worker whose encoder a run does not ask for leaves it idle.
pub(crate) fn check(run: Option<&EmbeddingSpec>, worker: Option<&EncoderInfo>) -> Result<()> {
    let Some(run) = run else { return Ok(()) };
    let Some(worker) = worker else {
        bail!("its output has embeddings, and this configuration makes none; work with the coordinator's [encoder]");
    };
    if let Some((key, expected, found)) = difference(&run.encoder, worker)? {
        bail!(
            "its encoder has {key} = {expected}, but this configuration gives {found}; work with the coordinator's \
             [encoder]"
        );
    }
    Ok(())
}

/// Returns the first key whose value a worker has not as the run has it, with both values; null stands for a key that
/// one of them lacks.
pub(crate) fn difference<T: Serialize>(run: &T, worker: &T) -> Result<Option<(String, Value, Value)>> {
    let (run, worker) = (serde_json::to_value(run)?, serde_json::to_value(worker)?);
    let (Value::Object(mut run), Value::Object(mut worker)) = (run, worker) else { return Ok(None) };
    for key in worker.keys() {
        run.entry(key).or_insert(Value::Null);
    }
    let mut pairs = run.into_iter().map(|(key, expected)| {
        let found = worker.remove(&key).unwrap_or_default();
        (key, expected, found)
    });
    Ok(pairs.find(|(_, expected, found)| expected != found))
}
