//! The configured model: its files, and what of it decides the texts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use laser_engine::EngineOptions;
use laser_model::{Hub, ModelFiles, resolve};
use laser_schema::job::Spec;
use laser_schema::{Digest, Kind};

use crate::config::{Config, DraftModelConfig, EngineKind};
use crate::encoder;

/// Finds the configured model, a path, a URL or a hub id, and opens its files.
///
/// # Errors
/// Naming what is missing.
pub async fn open_model(config: &Config) -> Result<ModelFiles> {
    let path = encoder::local_path(config, &config.model.path).await;
    open_local_model(&path.context("[model] path")?.to_string_lossy()).await
}

/// Resolves a path or hub id and opens the model's files.
///
/// # Errors
/// Naming what is missing.
pub async fn open_local_model(model: &str) -> Result<ModelFiles> {
    let model = model.to_owned();
    tokio::task::spawn_blocking(move || {
        let path = resolve(&model, &Hub::from_env())?;
        anyhow::Ok(ModelFiles::open(&path)?)
    })
    .await?
    .context("[model] path")
}

/// The files of a draft model.
#[derive(Debug)]
pub enum DraftFiles {
    /// A whole model of the same tokenizer.
    Model(Box<ModelFiles>),
    /// The folder of what drafts from the model's features: EAGLE's layer or Medusa's heads.
    Features(PathBuf),
}

impl DraftFiles {
    /// Opens a draft model and checks that it belongs to `model`.
    ///
    /// # Errors
    /// Naming what is missing; if its tokenizer is not that of `model`, or Laser trained it for another model.
    pub async fn open(path: PathBuf, model: &ModelFiles) -> Result<Self> {
        check_target(&path, model)?;
        if path.is_dir() && laser_engine::reads_features(&path)? {
            return Ok(Self::Features(path));
        }
        let files = tokio::task::spawn_blocking(move || ModelFiles::open(&path)).await??;
        let [own, target] = [&files, model].map(|files| Digest::from_bytes(files.tokenizer.fingerprint()));
        ensure!(
            own == target,
            "its tokenizer is {own}, that of the model {target}; a draft model must have the tokenizer of the model \
             that it drafts for"
        );
        Ok(Self::Model(Box::new(files)))
    }

    /// What loads it beside a target that is loaded with `target`.
    pub fn engine_options(self, target: EngineOptions) -> EngineOptions {
        match self {
            Self::Model(files) => EngineOptions { path: files.path().to_owned(), ..target },
            Self::Features(folder) => EngineOptions { drafts: Some(folder), ..target },
        }
    }
}

/// Refuses a draft model that Laser trained for another model than this.
fn check_target(folder: &Path, model: &ModelFiles) -> Result<()> {
    let Some(belongs) = laser_train::belongs(folder)? else {
        return Ok(());
    };
    let target = model.digest()?;
    ensure!(
        belongs.target == target.as_str(),
        "was trained for the model {}, not for {target}; train one for it with `laser train draft`",
        belongs.target
    );
    Ok(())
}

/// Opens the configured draft model, if one is configured.
///
/// # Errors
/// Those of [`DraftFiles::open`], naming the key.
pub(crate) async fn open_draft_model(config: &Config, model: &ModelFiles) -> Result<Option<DraftFiles>> {
    let Some(DraftModelConfig { path, .. }) = &config.draft.model else {
        return Ok(None);
    };
    let open = async { DraftFiles::open(encoder::local_path(config, path).await?, model).await };
    open.await.map(Some).with_context(|| format!("[draft.model] path = {path:?}"))
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
        sampling: config.generate.sampling(),
        max_new_tokens: config.generate.max_new_tokens,
        stop: config.generate.stop.clone(),
    })
}
