//! The configuration: a TOML file, over it the environment, over that `--set` flags.
//!
//! `LASER_MODEL__PATH=…` and `--set model.path=…` both set `path` in `[model]`. A key that does not exist is
//! refused with the nearest one that does. What changes tokens is the *specification*; everything else only
//! says how the work is done.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use figment::error::Kind as FigmentKind;
use figment::providers::{Env, Format, Serialized, Toml};
use figment::value::{Dict, Value};
use figment::{Figment, Profile};
use jiff::Timestamp;
use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;
use laser_coordinator::nats::NatsConfig;
use laser_coordinator::prompt::PromptConfig;
use laser_decode::{Drafter, SourceWeights, Verification};
use laser_features::IdsConfig;
use laser_features::encoder::EncoderConfig;
use laser_pool_builder::PoolsConfig;
use laser_recommender::lightgcn::EmbedConfig;
use laser_schema::EntityTable;
use laser_schema::embedding::EmbeddingLayout;
use laser_schema::guard::{GuardAction, Guards};
use laser_schema::interactions::InteractionTable;
use laser_schema::job::{Policy, Price};
use laser_store::Cache;
use laser_store::previous::PreviousSource;
use laser_worker::engine::{DTypeOption, DeviceOption};
use serde::{Deserialize, Serialize};

use crate::eval::EvalConfig;
use crate::prepare::DemoOptions;

/// The whole configuration; `configs/production.toml` documents every key.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) model: ModelConfig,
    pub(crate) input: Vec<EntityTable>,
    pub(crate) previous: Vec<PreviousSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) demo: Option<DemoConfig>,
    pub(crate) output: OutputConfig,
    pub(crate) prompt: PromptConfig,
    pub(crate) generate: GenerateConfig,
    pub(crate) verification: VerificationConfig,
    pub(crate) draft: DraftConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) guards: Option<Guards>,
    pub(crate) pools: PoolsConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) encoder: Option<EncoderConfig>,
    pub(crate) ids: IdsConfig,
    pub(crate) run: RunConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) queue: Option<NatsConfig>,
    pub(crate) worker: WorkerConfig,
    pub(crate) metrics: MetricsConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) price: Option<Price>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) interactions: Option<InteractionTable>,
    pub(crate) embed: EmbedConfig,
    pub(crate) eval: EvalConfig,
}

/// `[model]`: part of the specification but for the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ModelConfig {
    pub(crate) path: String,
    pub(crate) engine: EngineKind,
    pub(crate) dtype: DTypeOption,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) isq: Option<String>,
    pub(crate) device: DeviceOption,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            engine: EngineKind::Tree,
            dtype: DTypeOption::default(),
            isq: None,
            device: DeviceOption::default(),
        }
    }
}

/// What runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineKind {
    /// Laser's tree attention on mistralrs' layers.
    Tree,
    /// mistralrs itself, without speculation.
    Mistralrs,
}

/// `[demo]`: makes its own input and two nights of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DemoConfig {
    pub(crate) data: String,
    pub(crate) users: usize,
    pub(crate) items: usize,
    pub(crate) seed: u64,
}

impl Default for DemoConfig {
    fn default() -> Self {
        let DemoOptions { users, items, seed } = DemoOptions::default();
        Self { data: "output/demo-data".into(), users, items, seed }
    }
}

impl DemoConfig {
    pub(crate) fn options(&self) -> DemoOptions {
        DemoOptions { users: self.users, items: self.items, seed: self.seed }
    }
}

/// `[output]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OutputConfig {
    pub(crate) path: String,
    pub(crate) min_coverage: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keep_nights: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) table: Option<TableFormat>,
}

/// What published data sets are besides folders of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TableFormat {
    /// Delta Lake tables, one per data set and kind.
    Delta,
}

impl OutputConfig {
    /// Whether each data set and kind is a Delta table too.
    pub(crate) fn is_delta(&self) -> bool {
        self.table == Some(TableFormat::Delta)
    }
}

impl Default for OutputConfig {
    fn default() -> Self {
        Self { path: "output".into(), min_coverage: 0.98, keep_nights: None, table: None }
    }
}

/// `[generate]`: the first two are part of the specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GenerateConfig {
    pub(crate) max_new_tokens: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) batch: usize,
    pub(crate) step_tokens: usize,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self { max_new_tokens: 256, stop: Vec::new(), batch: 8, step_tokens: 512 }
    }
}

/// `[verification]`: part of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct VerificationConfig {
    pub(crate) policy: PolicyKind,
    pub(crate) k: usize,
    pub(crate) p: f32,
}

impl Default for VerificationConfig {
    fn default() -> Self {
        Self { policy: PolicyKind::Relaxed, k: 2, p: 0.1 }
    }
}

/// How drafts are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PolicyKind {
    /// Only what plain greedy decoding gives.
    Strict,
    /// Top-k and above p (paper 3.4).
    Relaxed,
}

impl VerificationConfig {
    pub(crate) fn policy(self) -> Policy {
        match self.policy {
            PolicyKind::Strict => Policy::Strict,
            PolicyKind::Relaxed => Policy::Relaxed { k: self.k, p: self.p },
        }
    }

    pub(crate) fn verification(self) -> Result<Verification> {
        match self.policy {
            PolicyKind::Strict => Ok(Verification::Strict),
            PolicyKind::Relaxed => Verification::relaxed(self.k, self.p).context("[verification]"),
        }
    }
}

/// `[draft]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DraftConfig {
    pub(crate) method: DraftMethod,
    pub(crate) nodes: usize,
    pub(crate) adaptive: bool,
    pub(crate) order: usize,
    pub(crate) alpha: f32,
    pub(crate) min_probability: f32,
    pub(crate) context_weight: f32,
    pub(crate) previous_weight: f32,
}

impl Default for DraftConfig {
    fn default() -> Self {
        let weights = SourceWeights::default();
        Self {
            method: DraftMethod::Blended,
            nodes: 16,
            adaptive: true,
            order: 8,
            alpha: 4.0,
            min_probability: 0.002,
            context_weight: weights.context,
            previous_weight: weights.previous,
        }
    }
}

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DraftMethod {
    /// Best-first over blended context lengths.
    Blended,
    /// The paper's rule: the most frequent nodes below the longest match.
    RawFrequency,
    /// Copies from the prompt and the output alone.
    PromptLookup,
    /// Plain decoding.
    None,
}

impl DraftConfig {
    /// Only blended drafts carry probabilities to weigh against costs.
    pub(crate) fn is_adaptive(self) -> bool {
        self.adaptive && self.method == DraftMethod::Blended
    }

    pub(crate) fn drafter(self) -> Result<Drafter> {
        let drafter = match self.method {
            DraftMethod::None => Drafter::None,
            DraftMethod::PromptLookup => Drafter::PromptLookup { max_ngram: self.order },
            DraftMethod::RawFrequency => Drafter::RawFrequency { max_ngram: self.order },
            DraftMethod::Blended => Drafter::Blended {
                order: self.order,
                alpha: self.alpha,
                min_probability: self.min_probability,
                weights: SourceWeights { context: self.context_weight, previous: self.previous_weight },
            },
        };
        drafter.check().context("[draft]")?;
        Ok(drafter)
    }
}

/// `[run]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RunConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) date: Option<Date>,
    pub(crate) pools: PoolChoice,
    pub(crate) carry_forward: bool,
    pub(crate) shard_rows: usize,
    pub(crate) attempts: u32,
    pub(crate) memory_mb: usize,
    pub(crate) audit_share: f64,
    pub(crate) seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deadline: Option<Time>,
}

impl RunConfig {
    /// Bytes that planning and pool building hold before they spill.
    pub(crate) fn memory(&self) -> usize {
        self.memory_mb.saturating_mul(1 << 20)
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            date: None,
            pools: PoolChoice::Nightly,
            carry_forward: true,
            shard_rows: 256,
            attempts: 3,
            memory_mb: 512,
            audit_share: 0.01,
            seed: 1,
            limit: None,
            deadline: None,
        }
    }
}

/// Which pools a run drafts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub(crate) enum PoolChoice {
    /// Its own, built from previous knowledge when it begins.
    Nightly,
    /// The set that is promoted when it begins.
    Promoted,
    /// A version of the output, or a folder or URL.
    Set(String),
}

impl From<String> for PoolChoice {
    fn from(text: String) -> Self {
        match text.as_str() {
            "nightly" => Self::Nightly,
            "promoted" => Self::Promoted,
            _ => Self::Set(text),
        }
    }
}

impl From<PoolChoice> for String {
    fn from(choice: PoolChoice) -> Self {
        match choice {
            PoolChoice::Nightly => "nightly".to_owned(),
            PoolChoice::Promoted => "promoted".to_owned(),
            PoolChoice::Set(text) => text,
        }
    }
}

/// `[metrics]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct MetricsConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) listen: Option<SocketAddr>,
}

/// How logs are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// `[worker]`: of `laser worker`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct WorkerConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_seconds: Option<u64>,
    pub(crate) grace_seconds: u64,
    pub(crate) cache: PathBuf,
    pub(crate) cache_gb: u64,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { idle_seconds: None, grace_seconds: 25, cache: std::env::temp_dir().join("laser-cache"), cache_gb: 50 }
    }
}

impl WorkerConfig {
    /// Where files of remote stores are kept on this machine.
    pub(crate) fn cache(&self) -> Cache {
        Cache::new(self.cache.clone(), self.cache_gb * 1_000_000_000)
    }
}

impl Config {
    /// Reads file, environment and `KEY=VALUE` settings, and checks every value.
    ///
    /// # Errors
    /// Naming the file, variable or flag, the key, and what to write instead.
    pub(crate) fn load(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.validate()?;
        Ok(config)
    }

    /// As [`load`](Self::load) for commands that learn from interactions and need neither model nor entities.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(crate) fn load_learning(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.validate_learning()?;
        Ok(config)
    }

    /// As [`Self::load`], for a command that needs `[encoder]` and nothing of what a night needs.
    ///
    /// # Errors
    /// Those of [`Self::load`], and if there is no encoder.
    pub(crate) fn load_encoder(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        ensure!(config.encoder.is_some(), "{}: no [encoder]; give one, or --set encoder.path=…", path.display());
        config.validate_encoder()?;
        Ok(config)
    }

    /// As [`Self::load`], for a command that needs `[ids]` and nothing of what a night needs.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub(crate) fn load_ids(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.ids.validate()?;
        Ok(config)
    }

    /// What the command line gives, else the output.
    ///
    /// # Errors
    /// If there is neither; `option` would give it.
    pub(crate) fn or_output<'a>(&'a self, given: Option<&'a str>, option: &str) -> Result<&'a str> {
        let path = given.unwrap_or(&self.output.path);
        ensure!(!path.is_empty(), "[output] path: not set; set it, or give {option}");
        Ok(path)
    }

    /// The date of the night: `[run] date`, or today in UTC.
    pub(crate) fn night(&self) -> Date {
        let today = || Timestamp::now().to_zoned(TimeZone::UTC).date();
        self.run.date.unwrap_or_else(today)
    }

    /// The day after `[run] date`, for what may be of that night too; without a date any night may.
    ///
    /// # Errors
    /// After the last day of the calendar.
    pub(crate) fn after_night(&self) -> Result<Date> {
        Ok(match self.run.date {
            Some(date) => date.tomorrow()?,
            None => Date::MAX,
        })
    }

    fn read(path: &Path, settings: &[String]) -> Result<Self> {
        ensure!(path.is_file(), "{}: no such configuration file", path.display());
        let env = Env::prefixed("LASER_").filter(|key| key.as_str().contains("__")).split("__");
        let mut figment = Figment::new().merge(Toml::file_exact(path)).merge(env);
        for setting in settings {
            figment = figment.merge(setting_provider(setting)?);
        }
        figment.extract().map_err(|error| explain(&error))
    }

    /// Checks what recommender models are trained by.
    fn validate_learning(&self) -> Result<()> {
        self.embed.validate().map_err(|reason| anyhow!(reason))?;
        self.eval.validate()
    }

    /// The table that recommender models learn from.
    pub(crate) fn interactions(&self) -> Result<&InteractionTable> {
        let table = self.interactions.as_ref();
        table.filter(|table| !table.path.is_empty()).ok_or_else(|| {
            anyhow!(
                "[interactions] path: not set; give a table of who interacted with what (`laser prepare movielens` \
                 writes one)"
            )
        })
    }

    /// Checks what the types leave open, before anything is done.
    fn validate(&self) -> Result<()> {
        ensure!(!self.model.path.is_empty(), "[model] path: not set; give a model directory, a .gguf file or a hub id");
        ensure!(!self.output.path.is_empty(), "[output] path: not set; give a directory or an object-store URL");
        match &self.demo {
            Some(_) if !self.input.is_empty() || !self.previous.is_empty() => {
                bail!("[demo] makes its own input: remove [[input]] and [[previous]], or [demo]")
            }
            None if self.input.is_empty() => {
                bail!("[[input]]: no table; give the path of at least one")
            }
            _ => {}
        }
        let share = |key: &str, value: f64| {
            ensure!((0.0..=1.0).contains(&value), "{key} = {value}: expected a share from 0 to 1");
            Ok(())
        };
        share("[output] min_coverage", self.output.min_coverage)?;
        share("[run] audit_share", self.run.audit_share)?;
        let positive = |key: &str, value: usize| {
            ensure!(value > 0, "{key} = 0: expected at least 1");
            Ok(())
        };
        positive("[generate] max_new_tokens", self.generate.max_new_tokens)?;
        positive("[generate] batch", self.generate.batch)?;
        positive("[generate] step_tokens", self.generate.step_tokens)?;
        positive("[run] shard_rows", self.run.shard_rows)?;
        positive("[run] attempts", self.run.attempts as usize)?;
        if let Some(nights) = self.output.keep_nights {
            ensure!(
                nights >= 2,
                "[output] keep_nights = {nights}: expected at least 2, tonight and the night it is made from"
            );
        }
        if let Some(price) = &self.price {
            ensure!(
                price.gpu_hour > 0.0 && price.gpu_hour.is_finite(),
                "[price] gpu_hour = {}: expected a price above 0",
                price.gpu_hour
            );
        }
        ensure!(
            !self.generate.stop.iter().any(String::is_empty),
            "[generate] stop: an empty string would end every text at once"
        );
        self.verification.verification()?;
        self.validate_guards()?;
        self.draft.drafter()?;
        self.pools.validate()?;
        self.ids.validate()?;
        if let Some(queue) = &self.queue {
            queue.validate()?;
        }
        self.validate_learning()?;
        self.validate_encoder()
    }

    fn validate_encoder(&self) -> Result<()> {
        ensure!(
            self.encoder.as_ref().is_none_or(|e| !e.path.is_empty()),
            "[encoder] path: not set; give a BERT model's directory, a hub id or a URL, or remove [encoder]"
        );
        ensure!(
            !self.output.is_delta() || self.encoder.as_ref().is_none_or(|e| e.layout == EmbeddingLayout::List),
            "[encoder] layout: with [output] table = \"delta\" it must be \"list\": readers of Delta tables take no lists of \
             fixed size"
        );
        Ok(())
    }

    /// Bounds that could never be kept, or that nothing would be measured for.
    fn validate_guards(&self) -> Result<()> {
        let Some(guards) = &self.guards else {
            return Ok(());
        };
        ensure!(
            guards.bounds().next().is_some(),
            "[guards]: no bound is set; give at least one, such as min_distinct_2, or remove the section"
        );
        for (key, limit) in guards.bounds() {
            let (from, to) = Guards::range(key);
            ensure!((from..=to).contains(&limit), "[guards] {key} = {limit}: expected {from} to {to}");
            ensure!(
                self.run.audit_share > 0.0 || !Guards::needs_audit(key),
                "[guards] {key} compares with plain texts, which the audit gives: set [run] audit_share above 0"
            );
        }
        ensure!(
            guards.min_similarity.is_none() || self.encoder.is_some(),
            "[guards] min_similarity compares embeddings: set [encoder], or remove it"
        );
        if guards.action == GuardAction::Strict {
            ensure!(
                self.verification.policy == PolicyKind::Relaxed,
                "[guards] action = \"strict\": [verification] policy is strict already; use \"warn\" or \"fail\""
            );
            ensure!(
                self.run.audit_share > 0.0,
                "[guards] action = \"strict\" judges a pool by its audit: set [run] audit_share above 0"
            );
        }
        Ok(())
    }

    /// The guards that decide how texts are generated, and so are part of a run.
    pub(crate) fn gate(&self) -> Option<Guards> {
        self.guards.filter(|guards| guards.action == GuardAction::Strict)
    }

    /// The effective configuration as TOML.
    pub(crate) fn to_toml(&self) -> Result<String> {
        toml::to_string(self).context("the configuration has no TOML form")
    }
}

/// `a.b=value`, the value in TOML or else taken as text.
fn setting_provider(setting: &str) -> Result<Serialized<Value>> {
    let (key, text) =
        setting.split_once('=').ok_or_else(|| anyhow!("--set {setting}: expected KEY=VALUE, such as run.limit=100"))?;
    let parsed: Option<Dict> = Toml::from_str(&format!("value = {text}")).ok();
    // A date is a date in TOML, and in the file it is text.
    let is_date = |value: &Value| value.as_dict().is_some() && !text.starts_with('{');
    let value = parsed
        .and_then(|mut dict| dict.remove("value"))
        .filter(|value| !is_date(value))
        .unwrap_or_else(|| Value::from(text));
    Ok(Serialized::from(value, Profile::Default).key(key))
}

/// One line: where, which key, what is wrong, and the nearest key where one does not exist.
fn explain(error: &figment::Error) -> anyhow::Error {
    let source = error.metadata.as_ref().map_or_else(
        || "configuration".to_owned(),
        |m| m.source.as_ref().map_or_else(|| m.name.to_string(), ToString::to_string),
    );
    let key = error.path.join(".");
    match &error.kind {
        FigmentKind::UnknownField(field, known) => {
            let full = match key.is_empty() || key.ends_with(field.as_str()) {
                true if key.is_empty() => field.clone(),
                true => key,
                false => format!("{key}.{field}"),
            };
            let nearest =
                known.iter().map(|name| (strsim::jaro_winkler(field, name), *name)).max_by(|a, b| a.0.total_cmp(&b.0));
            let hint = nearest.map_or_else(String::new, |(_, name)| format!("; did you mean {name:?}?"));
            anyhow!("{source}: there is no key {full:?}{hint} The keys here: {}", known.join(", "))
        }
        kind => anyhow!("{source}: {key}: {kind}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "[model]\npath = \"m\"\n[[input]]\npath = \"u.parquet\"\n";

    fn load(text: &str, settings: &[&str]) -> Result<Config> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("laser.toml");
        std::fs::write(&path, text)?;
        let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
        Config::load(&path, &settings)
    }

    #[test]
    fn flags_override_the_file() {
        let config =
            load(MINIMAL, &["run.limit=5", "model.path=other", "verification.p=0.3", "run.date=2026-01-02"]).unwrap();
        assert_eq!(config.run.date, Some(jiff::civil::date(2026, 1, 2)));
        assert_eq!(config.run.limit, Some(5));
        assert_eq!(config.model.path, "other");
        assert!((config.verification.p - 0.3).abs() < 1e-6);
    }

    #[test]
    fn wrong_keys_and_values_are_refused_by_name() {
        let cases = [
            ("[generate]\nmax_new_token = 3", "did you mean \"max_new_tokens\""),
            ("[generates]\nbatch = 3", "did you mean \"generate\""),
            ("[verification]\np = 1.5", "p must be in 0..=1, got 1.5"),
            ("[verification]\nk = 0", "k must be at least 1, got 0"),
            ("[pools.user]\nclusters = 0", "[pools.user] clusters: must be at least 1, got 0"),
            ("[generate]\nbatch = 0", "[generate] batch = 0"),
            ("[generate]\nbatch = \"many\"", "generate.batch"),
            ("[draft]\norder = 99", "order must be 1 to 16, got 99"),
            ("[run]\naudit_share = 2.0", "[run] audit_share = 2"),
            ("[output]\nkeep_nights = 1", "[output] keep_nights = 1: expected at least 2"),
            ("[price]\ngpu_hour = 0.0", "[price] gpu_hour = 0"),
            ("[price]\ngpu_hours = 2.0", "did you mean \"gpu_hour\""),
            ("[guards]", "no bound is set"),
            ("[guards]\nmin_distinct = 0.5", "did you mean \"min_distinct_2\""),
            ("[guards]\naction = \"stop\"", "guards.action"),
            ("[guards]\nmin_distinct_2 = 1.5", "[guards] min_distinct_2 = 1.5: expected 0 to 1"),
            ("[guards]\nmin_similarity = 0.9", "compares embeddings: set [encoder]"),
            ("[run]\naudit_share = 0.0\n[guards]\nmax_length_ratio = 1.1", "set [run] audit_share above 0"),
            (
                "[verification]\npolicy = \"strict\"\n[guards]\naction = \"strict\"\nmin_distinct_2 = 0.5",
                "policy is strict already",
            ),
            ("[demo]\nusers = 30", "remove [[input]]"),
            ("[run]\ndate = \"yesterday\"", "run.date"),
            ("[encoder]\npooling = \"cls\"", "[encoder] path: not set"),
            ("[encoder]\nnormalize = true", "did you mean \"normalise\""),
        ];
        for (section, part) in cases {
            let error = load(&format!("{MINIMAL}{section}\n"), &[]).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(part), "{section:?} gave {error:?}");
        }
    }

    #[test]
    fn a_bad_setting_and_a_missing_file_are_refused() {
        assert!(load(MINIMAL, &["limit"]).unwrap_err().to_string().contains("KEY=VALUE"));
        let error = Config::load(Path::new("no/such.toml"), &[]).unwrap_err().to_string();
        assert!(error.contains("no/such.toml: no such configuration file"), "{error}");
    }

    #[test]
    fn the_effective_configuration_reads_back_as_itself() {
        let config = load(MINIMAL, &["prompt.system=Be brief"]).unwrap();
        assert_eq!(load(&config.to_toml().unwrap(), &[]).unwrap(), config);
    }
}
