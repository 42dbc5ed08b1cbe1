//! The configuration: a TOML file, over it the environment, over that `--set` flags.
//!
//! `LASER_MODEL__PATH=…` and `--set model.path=…` both set `path` in `[model]`. A key that does not exist is
//! refused with the nearest one that does. What changes tokens is the *specification*; everything else only
//! says how the work is done.

mod canary;
mod lists;
mod model;
mod recommender;
mod run;
mod source;
mod validate;

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use figment::providers::Serialized;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use laser_coordinator::nats::NatsConfig;
use laser_coordinator::prompt::PromptConfig;
use laser_features::IdsConfig;
use laser_features::encoder::EncoderConfig;
use laser_pool_builder::PoolsConfig;
use laser_recommender::evaluate::{EvalConfig, ListsEvalConfig, ListsSource};
use laser_recommender::lightgcn::EmbedConfig;
use laser_schema::EntityTable;
use laser_schema::guard::{GuardAction, Guards};
use laser_schema::interactions::InteractionTable;
use laser_schema::job::Price;
use laser_schema::layout::CANARIES;
use laser_store::previous::PreviousSource;
use laser_store::{Location, LocationError};
use laser_train::TrainConfig;
use serde::{Deserialize, Serialize};

pub use canary::CanaryConfig;
pub use lists::{HistoryFiles, ListDraftKind, ListsConfig};
pub use model::{
    DraftConfig, DraftMethod, DraftModelConfig, EngineKind, GenerateConfig, MedusaTree, ModelConfig, PolicyKind,
    VerificationConfig,
};
pub use recommender::{RecommenderConfig, RecommenderDraftConfig};
pub use run::{DemoConfig, MetricsConfig, OutputConfig, PoolChoice, RunConfig, TableFormat, WorkerConfig};

/// The whole configuration; `configs/production.toml` documents every key.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model.
    pub model: ModelConfig,
    /// The entity tables.
    pub input: Vec<EntityTable>,
    /// The previous knowledge.
    pub previous: Vec<PreviousSource>,
    /// The night before a demo.
    pub demo: Option<DemoConfig>,
    /// Where the output goes.
    pub output: OutputConfig,
    /// How prompts are made.
    pub prompt: PromptConfig,
    /// How texts are generated.
    pub generate: GenerateConfig,
    /// That lists of items are made in place of texts.
    pub lists: Option<ListsConfig>,
    /// How drafts are accepted.
    pub verification: VerificationConfig,
    /// What is drafted.
    pub draft: DraftConfig,
    /// Bounds on the texts of a pool.
    pub guards: Option<Guards>,
    /// How pools are grouped.
    pub pools: PoolsConfig,
    /// What makes embeddings.
    pub encoder: Option<EncoderConfig>,
    /// How knowledge ids are made.
    pub ids: IdsConfig,
    /// How a night is run.
    pub run: RunConfig,
    /// That the run is a canary beside the night.
    pub canary: Option<CanaryConfig>,
    /// The queue between coordinator and workers.
    pub queue: Option<NatsConfig>,
    /// How a worker lives.
    pub worker: WorkerConfig,
    /// Where metrics are served.
    pub metrics: MetricsConfig,
    /// What the engines' time costs.
    pub price: Option<Price>,
    /// Who interacted with what.
    pub interactions: Option<InteractionTable>,
    /// How collaborative embeddings are trained.
    pub embed: EmbedConfig,
    /// What is measured on recommender models.
    pub eval: EvalConfig,
    /// How a draft model is trained.
    pub train: TrainConfig,
    /// How a model is trained that makes lists.
    pub recommender: RecommenderConfig,
}

impl Config {
    /// Reads file, environment and `KEY=VALUE` settings, and checks every value.
    ///
    /// # Errors
    /// Naming the file, variable or flag, the key, and what to write instead.
    pub fn load(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.validate()?;
        Ok(config)
    }

    /// Reads a configuration as [`Self::load`] does, for commands that learn from interactions and need neither model
    /// nor entities.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub fn load_learning(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.validate_learning()?;
        Ok(config)
    }

    /// Reads a configuration as [`Self::load`] does, for a command that needs `[encoder]` and nothing of what a night
    /// needs.
    ///
    /// # Errors
    /// Those of [`Self::load`], and if there is no encoder.
    pub fn load_encoder(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        ensure!(config.encoder.is_some(), "{}: no [encoder]; give one, or --set encoder.path=…", path.display());
        config.validate_encoder()?;
        Ok(config)
    }

    /// Reads a configuration as [`Self::load`] does, for a command that learns from histories and needs no model.
    ///
    /// # Errors
    /// Those of [`Self::load`], and if there is neither an input nor a table of sequences.
    pub fn load_histories(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        ensure!(
            !config.input.is_empty() || config.recommender.sequences.is_some(),
            "[[input]]: no table; give the path of at least one, or [recommender] sequences"
        );
        Ok(config)
    }

    /// Reads a configuration as [`Self::load`] does, for a command that needs `[ids]` and nothing of what a night
    /// needs.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub fn load_ids(path: &Path, settings: &[String]) -> Result<Self> {
        let config = Self::read(path, settings)?;
        config.ids.validate()?;
        Ok(config)
    }

    /// Reads a configuration and checks no value. A draft recommender is by default of other sizes than a recommender.
    fn read(path: &Path, settings: &[String]) -> Result<Self> {
        let draft = RecommenderDraftConfig::default().options;
        source::read(path, settings, Serialized::default("recommender.draft.model", draft))
    }

    /// Returns the path that the command line gives, else the output's.
    ///
    /// # Errors
    /// If there is neither; `option` would give it.
    pub fn or_output<'a>(&'a self, given: Option<&'a str>, option: &str) -> Result<&'a str> {
        let path = given.unwrap_or(&self.output.path);
        ensure!(!path.is_empty(), "[output] path: not set; set it, or give {option}");
        Ok(path)
    }

    /// The output's root.
    ///
    /// # Errors
    /// If its path names no store.
    pub fn output(&self) -> Result<Location, LocationError> {
        Location::parse(&self.output.path)
    }

    /// The root of what runs of this configuration write: the output's, or that of its canaries.
    ///
    /// # Errors
    /// If its path names no store.
    pub fn run_output(&self) -> Result<Location, LocationError> {
        let output = self.output()?;
        Ok(if self.canary.is_some() { output.join(CANARIES) } else { output })
    }

    /// The date of the night: `[run] date`, or today in UTC.
    pub fn night(&self) -> Date {
        let today = || Timestamp::now().to_zoned(TimeZone::UTC).date();
        self.run.date.unwrap_or_else(today)
    }

    /// The day after `[run] date`, for what may be of that night too; without a date any night may.
    ///
    /// # Errors
    /// After the last day of the calendar.
    pub fn after_night(&self) -> Result<Date> {
        Ok(match self.run.date {
            Some(date) => date.tomorrow()?,
            None => Date::MAX,
        })
    }

    /// The table that recommender models learn from.
    ///
    /// # Errors
    /// If there is none.
    pub fn interactions(&self) -> Result<&InteractionTable> {
        let table = self.interactions.as_ref();
        table.filter(|table| !table.path.is_empty()).ok_or_else(|| {
            anyhow!(
                "[interactions] path: not set; give a table of who interacted with what (`laser prepare movielens` \
                 writes one)"
            )
        })
    }

    /// What `laser eval lists` judges, and by what: `[eval.lists]`, with the input and what `[lists]` says of items.
    ///
    /// # Errors
    /// Naming the key that is not set.
    pub fn lists_evaluation(&self) -> Result<(ListsSource<'_>, &ListsEvalConfig)> {
        let lists = self.lists.as_ref();
        let lists = lists.context("[lists.catalogue] path: not set; give a table of items with their identifiers")?;
        lists.validate()?;
        ensure!(!self.input.is_empty(), "[[input]]: no table; give the path of at least one");
        let eval = self.eval.lists.as_ref();
        let eval =
            eval.context("[eval.lists] truth: not set; give a table of users with the items that they took later")?;
        let ListsConfig { catalogue, item, repeat, .. } = lists;
        Ok((ListsSource { catalogue, input: &self.input, item, repeat: *repeat }, eval))
    }

    /// The queue's section; for a canary that of canaries beside it.
    ///
    /// # Errors
    /// If there is none.
    pub fn queue(&self) -> Result<NatsConfig> {
        let queue = self.queue.as_ref();
        let queue =
            queue.context("[queue]: not set; give the url of a NATS server, or use `laser run` for one process");
        queue.map(|queue| if self.canary.is_some() { queue.of_canaries() } else { queue.clone() })
    }

    /// The guards that decide how texts are generated, and so are part of a run.
    pub fn gate(&self) -> Option<Guards> {
        self.guards.filter(|guards| guards.action == GuardAction::Strict)
    }

    /// The effective configuration as TOML.
    ///
    /// # Errors
    /// If a value has no form in TOML.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).context("the configuration has no TOML form")
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
            ("[demo]\nlast_night = []", "[demo] last_night: no table"),
            ("[demo]\nusers = 30", "there is no key \"demo.users\""),
            ("[run]\ndate = \"yesterday\"", "run.date"),
            ("[canary]", "give share or ids"),
            ("[canary]\nshare = 0.1\nids = \"ids.csv\"", "give share or ids"),
            ("[canary]\nshare = 0.0", "[canary] share = 0: expected above 0 and at most 1"),
            ("[canary]\nshare = 1.5", "[canary] share = 1.5: expected above 0 and at most 1"),
            ("[canary]\nids = \"\"", "[canary] ids: not set"),
            (
                "[canary]\nshare = 0.1\n[demo]\nlast_night = [\"u.parquet\"]",
                "[demo]: runs nights, and [canary] is beside one",
            ),
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
    fn an_unknown_key_of_a_setting_is_named_by_its_option() {
        let error = load(MINIMAL, &["generate.foo=1"]).unwrap_err().to_string();
        let expected = "--set generate.foo: there is no key \"generate.foo\"; did you mean";
        assert!(error.starts_with(expected), "{error}");
        let error = load(MINIMAL, &["generate.batch=many"]).unwrap_err().to_string();
        assert!(error.starts_with("--set generate.batch: generate.batch: "), "{error}");
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
