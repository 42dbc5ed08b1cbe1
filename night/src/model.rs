//! The configured model: its files, and what of it decides the texts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use laser_engine::{ACCEPTANCE_HEAD, DTypeOption, Engine, EngineOptions};
use laser_grammar::Grammar;
use laser_model::{Hub, ModelFiles, Weights, resolve};
use laser_schema::job::Spec;
use laser_schema::lists::ListSpec;
use laser_schema::{Constraint, Digest, Kind};
use laser_train::Belongs;
use laser_worker::cost::StepCost;
use laser_worker::generate::DraftModel;

use crate::config::{Config, DraftModelConfig, EngineKind, MedusaTree};
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
        let mut files = ModelFiles::open(&resolve(&model, &Hub::from_env())?)?;
        if let Weights::Gguf(file) = &files.weights {
            // The engine follows the header, and a config.json beside the file need not be there.
            files.max_positions = laser_engine::gguf_positions(file).or(files.max_positions);
        }
        anyhow::Ok(files)
    })
    .await?
    .context("[model] path")
}

/// The files of a draft model.
#[derive(Debug)]
pub struct DraftFiles {
    weights: DraftWeights,
    acceptance_head: Option<AcceptanceHead>,
    /// Whether trees follow what is measured of each of Medusa's heads.
    has_measured_tree: bool,
}

/// The folder of an acceptance head, and the scale and shift of the log odds that it corrects.
#[derive(Debug, Clone)]
struct AcceptanceHead {
    folder: PathBuf,
    scale: [f32; 2],
}

#[derive(Debug)]
enum DraftWeights {
    /// A whole model of the same tokenizer.
    Model(Box<ModelFiles>),
    /// The folder of what drafts from the model's features: EAGLE's layer, or so many heads of Medusa's.
    Features(PathBuf, Option<usize>),
}

impl DraftFiles {
    /// Opens a draft model, and its acceptance head if there is one, and checks that it belongs to `model`.
    ///
    /// # Errors
    /// Naming what is missing; if its tokenizer is not that of `model`, it drafts from features of another width, or
    /// Laser trained it for another model.
    pub async fn open(path: PathBuf, acceptance_head: Option<PathBuf>, model: &ModelFiles) -> Result<Self> {
        ensure!(
            !is_acceptance_head(&path),
            "an acceptance head, which drafts nothing; give the draft model that it was trained for, and the head as \
             acceptance_head"
        );
        check_target(&path, model)?;
        let weights = match path.is_dir() && laser_engine::reads_features(&path)? {
            true => DraftWeights::open_features(path, model)?,
            false => DraftWeights::open_model(path, model).await?,
        };
        let acceptance_head = acceptance_head.map(|folder| {
            let scale = weights.check_acceptance_head(&folder);
            let scale = scale.with_context(|| format!("acceptance_head = {}", folder.display()))?;
            anyhow::Ok(AcceptanceHead { folder, scale })
        });
        Ok(Self { acceptance_head: acceptance_head.transpose()?, weights, has_measured_tree: false })
    }

    /// Whether it is Medusa's heads.
    pub fn has_heads(&self) -> bool {
        matches!(self.weights, DraftWeights::Features(_, Some(_)))
    }

    /// The same with trees that follow what was measured of each head, as in Medusa's paper.
    ///
    /// # Errors
    /// If it has no heads.
    fn with_measured_tree(self) -> Result<Self> {
        ensure!(
            self.has_heads(),
            "medusa_tree = \"measured\": is for Medusa's heads, and this draft model has none; remove medusa_tree, or \
             give the folder of such heads as path"
        );
        Ok(Self { has_measured_tree: true, ..self })
    }

    /// What kind of draft model it is.
    pub fn describe(&self) -> &'static str {
        match (&self.weights, &self.acceptance_head) {
            (DraftWeights::Features(..), _) => "drafts from the model's features",
            (DraftWeights::Model(_), None) => "of the same tokenizer",
            (DraftWeights::Model(_), Some(_)) => "of the same tokenizer, with an acceptance head",
        }
    }

    /// Its files, if it is a whole model.
    pub(crate) fn into_model(self) -> Option<ModelFiles> {
        match self.weights {
            DraftWeights::Model(files) => Some(*files),
            DraftWeights::Features(..) => None,
        }
    }

    /// What loads it beside a target that is loaded with `target`.
    pub fn options(self, target: EngineOptions) -> DraftOptions {
        let engine = match self.weights {
            DraftWeights::Model(files) => EngineOptions { path: files.path().to_owned(), ..target },
            DraftWeights::Features(folder, _) => EngineOptions { drafts: Some(folder), ..target },
        };
        DraftOptions { engine, acceptance_head: self.acceptance_head, has_measured_tree: self.has_measured_tree }
    }
}

impl DraftWeights {
    async fn open_model(path: PathBuf, model: &ModelFiles) -> Result<Self> {
        let files = tokio::task::spawn_blocking(move || {
            let files = ModelFiles::open(&path)?;
            laser_engine::check_drafts(&EngineOptions::new(files.path()))?;
            anyhow::Ok(files)
        });
        let files = files.await??;
        let [own, target] = [&files, model].map(|files| Digest::from_bytes(files.tokenizer.fingerprint()));
        ensure!(
            own == target,
            "its tokenizer is {own}, that of the model {target}; a draft model must have the tokenizer of the model \
             that it drafts for"
        );
        Ok(Self::Model(Box::new(files)))
    }

    /// What drafts from the features of `model`: of their width, and of its vocabulary.
    fn open_features(folder: PathBuf, model: &ModelFiles) -> Result<Self> {
        let options = EngineOptions { drafts: Some(folder.clone()), ..EngineOptions::new(model.path()) };
        let heads = laser_engine::check_drafts(&options)?;
        Ok(Self::Features(folder, heads))
    }

    /// The scale and shift of the log odds that the head in a folder corrects.
    fn check_acceptance_head(&self, head: &Path) -> Result<[f32; 2]> {
        let Self::Model(files) = self else {
            anyhow::bail!("it is for whole draft models; EAGLE's layer and Medusa's heads have none");
        };
        ensure!(is_acceptance_head(head), "no {ACCEPTANCE_HEAD} in it; train one with [train] kind = \"acceptance\"");
        let belongs = laser_train::belongs(head)?.context("config.json is missing")?;
        let own = files.digest()?;
        ensure!(
            belongs.draft.as_deref() == Some(own.as_str()),
            "was trained for the draft model {}, not for {own}; train one for it with [train] kind = \"acceptance\"",
            belongs.draft.as_deref().unwrap_or("none")
        );
        check_tokenizer(&belongs, files)?;
        let scale = belongs.scale.context("config.json has no scale")?;
        #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough")]
        let scale = scale.map(|number| number as f32);
        Ok(scale)
    }
}

fn is_acceptance_head(folder: &Path) -> bool {
    folder.join(ACCEPTANCE_HEAD).is_file()
}

/// What loads a draft model.
#[derive(Debug, Clone)]
pub struct DraftOptions {
    /// The model itself.
    pub engine: EngineOptions,
    acceptance_head: Option<AcceptanceHead>,
    has_measured_tree: bool,
}

impl DraftOptions {
    /// Loads it, to be given at most so many forwards per step; `measure` tells what they cost, if they have to pay.
    ///
    /// # Errors
    /// The engine's, and those of `measure`.
    pub fn load(
        &self,
        forwards: usize,
        measure: impl FnOnce(&mut dyn Engine) -> Result<Option<StepCost>>,
    ) -> Result<DraftModel> {
        let mut engine = laser_engine::load(&self.engine)?;
        let cost = measure(engine.as_mut())?;
        let mut model = DraftModel::new(engine, forwards, cost);
        if self.has_measured_tree {
            model = model.with_measured_tree();
        }
        let Some(AcceptanceHead { folder, scale }) = &self.acceptance_head else {
            return Ok(model);
        };
        // It has two outputs: whatever the draft model's precision, the head's is of no weight.
        let drafts = Some(folder.clone());
        let head = EngineOptions { drafts, dtype: DTypeOption::F32, isq: None, ..self.engine.clone() };
        Ok(model.with_acceptance_head(laser_engine::load(&head)?, *scale))
    }
}

/// Refuses a draft model that Laser trained for another model than this, or with another tokenizer.
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
    check_tokenizer(&belongs, model)
}

fn check_tokenizer(belongs: &Belongs, model: &ModelFiles) -> Result<()> {
    let tokenizer = Digest::from_bytes(model.tokenizer.fingerprint());
    ensure!(
        belongs.tokenizer == tokenizer.as_str(),
        "was trained with the tokenizer {}, not with {tokenizer}; train one for it with `laser train draft`",
        belongs.tokenizer
    );
    Ok(())
}

/// Opens a configured draft model.
///
/// # Errors
/// Those of [`DraftFiles::open`], naming the key.
pub(crate) async fn open_draft_model(
    config: &Config,
    draft: &DraftModelConfig,
    model: &ModelFiles,
) -> Result<DraftFiles> {
    let DraftModelConfig { path, acceptance_head, medusa_tree, .. } = draft;
    let open = async {
        let head = match acceptance_head {
            Some(head) => Some(encoder::local_drafts(config, head).await.context("acceptance_head")?),
            None => None,
        };
        let files = DraftFiles::open(encoder::local_drafts(config, path).await?, head, model).await?;
        match medusa_tree {
            MedusaTree::Dynamic => Ok(files),
            MedusaTree::Measured => files.with_measured_tree(),
        }
    };
    open.await.with_context(|| format!("[draft.model] path = {path:?}"))
}

/// Opens all configured draft models: those that are not for this model are refused before anything is made with it.
///
/// # Errors
/// Those of [`DraftFiles::open`], naming the key.
pub(crate) async fn open_draft_models(config: &Config, model: &ModelFiles) -> Result<Vec<DraftFiles>> {
    let mut all = Vec::with_capacity(config.draft.model.len());
    for draft in &config.draft.model {
        all.push(open_draft_model(config, draft, model).await?);
    }
    Ok(all)
}

/// What texts of a specification and a model follow, compiled.
///
/// # Errors
/// Naming the key, and what is wrong with what it prescribes.
pub(crate) fn grammar(spec: Option<&Constraint>, model: &ModelFiles) -> Result<Option<Grammar>> {
    let compile = |constraint: &Constraint| {
        let grammar = Grammar::compile(constraint, &model.tokenizer, &model.end_of_text);
        grammar.with_context(|| format!("[generate] {}", constraint.key()))
    };
    spec.map(compile).transpose()
}

/// What decides the texts of a configuration and a model, given the prompts' digests, or its lists.
pub(crate) fn model_spec(
    config: &Config,
    model: &ModelFiles,
    (prompts, lists): (BTreeMap<Kind, Digest>, Option<ListSpec>),
) -> Result<Spec> {
    let isq = config.model.isq.as_ref().map_or_else(String::new, |isq| format!("+{isq}"));
    let is_list = lists.is_some();
    Ok(Spec {
        lists,
        engine: match config.model.engine {
            EngineKind::Tree => "tree".to_owned(),
            EngineKind::Mistralrs => "mistralrs".to_owned(),
        },
        model: model.digest().context("[model] path")?,
        tokenizer: Digest::from_bytes(model.tokenizer.fingerprint()),
        // A list ends with its last code.
        end_of_text: if is_list { Vec::new() } else { model.end_of_text.clone() },
        precision: format!("{}{isq}", config.model.dtype),
        prompts,
        verification: match &config.lists {
            Some(lists) if is_list => lists.policy(),
            _ => config.verification.policy(),
        },
        sampling: config.generate.sampling(),
        max_new_tokens: if is_list { 0 } else { config.generate.max_new_tokens },
        constraint: config.generate.constraint()?,
        stop: if is_list { Vec::new() } else { config.generate.stop.clone() },
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::config::ListsConfig;

    /// A folder with these of the fixture's files.
    fn folder(files: &[&str]) -> TempDir {
        let (fixture, folder) = (Path::new("../fixtures/profile-lm"), tempfile::tempdir().unwrap());
        for file in files {
            fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
        }
        folder
    }

    #[test]
    fn end_of_text_is_in_the_specification_of_texts_and_not_of_lists() {
        let spec = |end_of_text: &str, lists: Option<ListSpec>| {
            let folder = folder(&["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
            let generation = format!("{{\"eos_token_id\": {end_of_text}}}");
            fs::write(folder.path().join("generation_config.json"), generation).unwrap();
            let model = ModelFiles::open(folder.path()).unwrap();
            model_spec(&Config::default(), &model, (BTreeMap::new(), lists)).unwrap()
        };
        let (texts, with_another) = (spec("1", None), spec("[1, 2]", None));
        assert_eq!((texts.end_of_text.as_slice(), with_another.end_of_text.as_slice()), (&[1][..], &[1, 2][..]));
        assert_eq!((&texts.model, &texts.tokenizer), (&with_another.model, &with_another.tokenizer));
        assert_ne!(texts.digest(), with_another.digest());
        let lists = ListsConfig::default().spec(Digest::of(b"trie"), None);
        assert_eq!(spec("1", Some(lists.clone())), spec("[1, 2]", Some(lists)));
    }

    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend(u64::try_from(text.len()).unwrap().to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    /// The header of a GGUF file of a model with 1,024 positions and a sliding window of 64.
    fn gguf_header() -> Vec<u8> {
        let (is_u32, is_f32, is_text) = (4_u32.to_le_bytes(), 6_u32.to_le_bytes(), 8_u32.to_le_bytes());
        let sizes = [
            ("embedding_length", 8_u32),
            ("feed_forward_length", 16),
            ("block_count", 1),
            ("attention.head_count", 2),
            ("context_length", 1024),
            ("attention.sliding_window", 64),
        ];
        let mut bytes = b"GGUF".to_vec();
        // Version 3, one tensor, and as many keys as follow.
        bytes.extend([3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        text(&mut bytes, "general.architecture");
        bytes.extend(is_text);
        text(&mut bytes, "llama");
        text(&mut bytes, "llama.attention.layer_norm_rms_epsilon");
        bytes.extend(is_f32);
        bytes.extend(1e-5_f32.to_le_bytes());
        for (key, size) in sizes {
            text(&mut bytes, &format!("llama.{key}"));
            bytes.extend(is_u32);
            bytes.extend(size.to_le_bytes());
        }
        text(&mut bytes, "token_embd.weight");
        // Two dimensions, width and vocabulary; f32, from the first byte on.
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend([8_u64, 10].map(u64::to_le_bytes).concat());
        bytes.extend([0; 12]);
        bytes
    }

    #[tokio::test]
    async fn the_header_of_a_gguf_file_bounds_the_positions() {
        let folder = folder(&["generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
        let file = folder.path().join("model.gguf");
        fs::write(&file, gguf_header()).unwrap();
        let model = open_local_model(file.to_str().unwrap()).await.unwrap();
        assert_eq!(model.max_positions, Some(64), "tokenizer_config.json says 1,024");
    }
}
