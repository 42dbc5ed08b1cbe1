//! The contract between coordinator and worker: specification, plan, shards, and the queue they travel by.
//!
//! A run is named by what it depends on, so the same command finds the same run again. Its plan is one
//! object, its work is shards, and a shard's output is one object that exactly one writer creates.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::canary::Canary;
use crate::constraint::Constraint;
use crate::digest::Digest;
use crate::embedding::EmbeddingSpec;
use crate::entity::{EntityId, IdType, Kind};
use crate::guard::Guards;
use crate::knowledge::Content;
use crate::layout::DataSet;
use crate::lists::{ListRows, ListSpec};
use crate::parsed::ParsedField;
use crate::sample::priority;

/// The version of [`Plan`] and of the shard files.
pub const PLAN_VERSION: u32 = 1;

/// How drafted tokens are accepted (paper 3.4), as part of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "lowercase", deny_unknown_fields)]
pub enum Policy {
    /// Only the argmax: the text equals plain greedy decoding.
    Strict,
    /// Among the `k` most probable and more probable than `p`.
    Relaxed {
        /// Rank bound, at least 1.
        k: usize,
        /// Probability bound, in [0, 1].
        p: f32,
    },
    /// At least as probable as α times the entropy plus β (AASD).
    Conditional {
        /// Weight of the entropy in nats, at least 0.
        alpha: f32,
        /// Probability bound where the model is certain.
        beta: f32,
        /// The drafted tokens that this holds for; others are verified strictly.
        sources: ConditionalSources,
    },
    /// More probable than the smaller of ε and δ · exp(-entropy), at the temperature of sampling (Medusa).
    Typical {
        /// The probability that suffices whatever the entropy.
        epsilon: f32,
        /// The factor of exp(-entropy).
        delta: f32,
    },
    /// Of lists: AtSpeed's relaxed sampling, with as many drafts for a step as there are beams.
    AtSpeed,
    /// Of lists: relaxed sampling as AtSpeed's authors published it.
    #[serde(rename = "atspeed-published")]
    AtSpeedPublished {
        /// Prefixes that are drafted for a step, more than beams.
        drafted: usize,
    },
}

/// Drafted tokens that are verified conditionally.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConditionalSources {
    /// Those that only the prompt has.
    #[default]
    Prompt,
    /// All.
    All,
}

impl fmt::Display for ConditionalSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prompt => "prompt",
            Self::All => "all",
        })
    }
}

impl Default for Policy {
    /// The paper's setting.
    fn default() -> Self {
        Self::Relaxed { k: 2, p: 0.1 }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strict => f.write_str("strict"),
            Self::Relaxed { k, p } => write!(f, "relaxed(k={k},p={p})"),
            Self::Conditional { alpha, beta, sources } => {
                write!(f, "conditional(alpha={alpha},beta={beta},sources={sources})")
            }
            Self::Typical { epsilon, delta } => write!(f, "typical(epsilon={epsilon},delta={delta})"),
            Self::AtSpeed => f.write_str("atspeed"),
            Self::AtSpeedPublished { drafted } => write!(f, "atspeed-published(drafted={drafted})"),
        }
    }
}

/// Everything that decides which texts are acceptable for an entity. Two nights with the same
/// specification and the same prompt may share a text: that is what carry-forward rests on.
///
/// Pools are not part of it: they choose among texts that the policy accepts, and are new every night.
/// Each record names its pool by digest all the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The engine that runs the model: `tree`, `mistralrs` or `simulated`.
    pub engine: String,
    /// Digest of the weights.
    pub model: Digest,
    /// Fingerprint of the tokenizer.
    pub tokenizer: Digest,
    /// The tokens that end a text, in the order of precedence; none of lists, which end with their last code.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub end_of_text: Vec<u32>,
    /// Number format and quantisation, such as `f32` or `f16+q4k`.
    pub precision: String,
    /// Digest of the prompt template of each kind, with its budget and chat template.
    pub prompts: BTreeMap<Kind, Digest>,
    /// Acceptance of drafts.
    pub verification: Policy,
    /// How texts are drawn; greedy if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingSpec>,
    /// Bound on a text's tokens.
    pub max_new_tokens: usize,
    /// Strings that end a text.
    pub stop: Vec<String>,
    /// What every text follows, if anything is prescribed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constraint: Option<Constraint>,
    /// How lists are made, if the run makes lists and no texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lists: Option<ListSpec>,
}

/// How texts are drawn: as a function of seed and entity, so that the same specification and prompt give the same text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SamplingSpec {
    /// Exponent 1/T of the probabilities, above 0.
    pub temperature: f32,
    /// The most probable tokens that may be drawn; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// The probability that the tokens which may be drawn have at least; 1 keeps all.
    pub top_p: f32,
    /// Another seed draws other texts.
    pub seed: u64,
    /// Texts of an entity, at least 1.
    pub samples: u32,
}

impl SamplingSpec {
    /// The key of the noise of an entity's sample, counted from 0.
    pub fn key(&self, kind: Kind, id: &EntityId, sample: u32) -> u64 {
        let (id, sample) = (id.to_string(), sample.to_le_bytes());
        let key = priority(self.seed, &[kind.as_str().as_bytes(), id.as_bytes(), &sample]);
        u64::try_from(key & u128::from(u64::MAX)).unwrap_or_default()
    }
}

impl Spec {
    /// Texts of an entity, at least 1.
    pub fn samples(&self) -> u32 {
        self.sampling.map_or(1, |sampling| sampling.samples)
    }

    /// The fields of the column `parsed`, if texts are JSON objects by a schema.
    pub fn parsed(&self) -> Option<Vec<ParsedField>> {
        self.constraint.as_ref().and_then(Constraint::parsed)
    }

    /// What the rows of parts hold: of lists the ids of items are of type `items`, and `rows` are such; of texts there
    /// are runners-up or not.
    pub fn content(&self, (items, rows): (IdType, ListRows), has_runners_up: bool) -> Content {
        match self.lists {
            None => Content::Texts { has_samples: self.samples() > 1, has_runners_up },
            Some(_) => Content::Lists { items, rows },
        }
    }

    /// The data set that a run of this specification publishes.
    pub fn data_set(&self) -> DataSet {
        if self.lists.is_some() { DataSet::Recommendations } else { DataSet::Profiles }
    }

    /// The digest that every job, part and manifest carries.
    pub fn digest(&self) -> Digest {
        Digest::of_json(self)
    }
}

/// The work on a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Generate a text for each [`ShardRow`].
    Generate,
    /// Write last night's records again: nothing that they depend on has changed.
    Carry,
    /// Generate each row twice, plainly and with speculation, and report both
    /// ([`AuditReport`](crate::audit::AuditReport)).
    Audit,
}

/// One shard: the unit of leasing, failure and commit. It travels without payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardJob {
    /// The shard's number in its run.
    pub shard: u32,
    /// The work to do.
    pub action: Action,
    /// Users or items.
    pub kind: Kind,
    /// The pool that most rows draft from; shards are grouped by it so that a worker keeps it warm.
    pub pool: String,
    /// Rows of the input.
    pub rows: u64,
    /// Prompt tokens of all rows.
    pub prompt_tokens: u64,
    /// The value of all rows, if the plan has a [`Priority`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The input, relative to the run's folder.
    pub input: String,
    /// Digest of the input's bytes.
    pub input_digest: Digest,
    /// The output, relative to the output's root. Creating it is the commit.
    pub output: String,
}

/// One row of a [`Action::Generate`] or [`Action::Audit`] shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardRow {
    /// The entity.
    pub entity_id: EntityId,
    /// The pool to draft from.
    pub pool: String,
    /// The prompt; empty if planning failed.
    pub prompt: Vec<u32>,
    /// Digest of the prompt's tokens; of a list also of the history, and of the number of its items if it has its own.
    pub prompt_digest: Digest,
    /// The entity's own last text: the best source of drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,
    /// Why planning failed; such a row becomes an error record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Of lists: the user's items, oldest first, by their number in the trie; other items are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<u32>,
    /// Of lists: the items of the user's previous list, best first, by their number in the trie; other items are left
    /// out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub previous_items: Vec<u32>,
    /// Of lists: the items of this user's list, if the specification has a column for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<u32>,
    /// What the entity is worth, if the plan has a [`Priority`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
}

/// How many entities of a kind the plan holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct KindCounts {
    /// All entities of the input.
    pub entities: u64,
    /// How many of them are unchanged and carried forward.
    pub carried: u64,
    /// How many of them are to be generated.
    pub generate: u64,
    /// How many of them failed while planning.
    pub failed: u64,
    /// Interactions of lists' histories whose items are not in the catalogue; they are left out.
    #[serde(default)]
    pub unknown_items: u64,
    /// Prompt tokens to be processed.
    pub prompt_tokens: u64,
    /// The value of all entities, if the plan has a [`Priority`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
}

/// By what shards are ordered, the most valuable first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Priority {
    /// The expression over an entity's columns that gives its value.
    pub expression: String,
    /// Bands of equal size; within a band shards are ordered by kind and pool.
    pub bands: usize,
}

/// A run: one object, written once, from which any process can go on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// The run's name.
    pub run: String,
    /// The night.
    pub date: Date,
    /// Which texts are acceptable.
    pub spec: Spec,
    /// Where the pools are: below the output's root, or a URL.
    pub pools: String,
    /// Digest of the pool set.
    pub pool_digest: Digest,
    /// The price of the engines' time, if one was configured when the run was planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// The bounds that a pool's audit must keep before its texts are generated as the specification says; those of a
    /// pool that does not are verified strictly. Only those of
    /// [`GuardAction::Strict`](crate::guard::GuardAction::Strict) are part of a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guards: Option<Guards>,
    /// The embeddings that the output has, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingSpec>,
    /// What a row of the output is, if the run makes lists.
    #[serde(default, skip_serializing_if = "ListRows::is_user")]
    pub list_rows: ListRows,
    /// The tokens that each place of a text keeps beside the one that was written there; none if 0.
    #[serde(default, skip_serializing_if = "is_none_kept")]
    pub runners_up: u32,
    /// By what shards are ordered; by kind and pool if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// The entities of a canary, if the run is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
    /// The type of each kind's ids; in a run of lists that of the listed items, too.
    pub ids: BTreeMap<Kind, IdType>,
    /// The work to do.
    pub counts: BTreeMap<Kind, KindCounts>,
    /// The work.
    pub shards: Vec<ShardJob>,
}

/// Whether a plan has no [runners-up](Plan::runners_up).
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
fn is_none_kept(runners_up: &u32) -> bool {
    *runners_up == 0
}

impl Plan {
    /// The folder of a kind's published output, relative to the output's root.
    pub fn partition(&self, kind: Kind) -> String {
        self.spec.data_set().folder(kind, self.date, &self.run)
    }

    /// The share of each kind's value that has a text once a share of the rows to generate have one, 0 to 1, in the
    /// order of the shards. Only kinds that have a value are told.
    pub fn value_after(&self, share: f64) -> BTreeMap<Kind, f64> {
        let to_generate = |job: &&ShardJob| job.action == Action::Generate;
        let rows: u64 = self.shards.iter().filter(to_generate).map(|job| job.rows).sum();
        let mut left = share * rows as f64;
        let mut reached: BTreeMap<Kind, f64> = BTreeMap::new();
        for job in self.shards.iter().filter(|job| job.action != Action::Audit) {
            let mut part = 1.0;
            if job.action == Action::Generate {
                part = (left / job.rows.max(1) as f64).clamp(0.0, 1.0);
                left -= job.rows as f64;
            }
            *reached.entry(job.kind).or_default() += part * job.value.unwrap_or(0.0);
        }
        self.shares_of_value(&reached)
    }

    /// The share of each kind's value that these shards have. Only kinds that have a value are told.
    pub fn value_of<'a>(&self, shards: impl Iterator<Item = &'a ShardJob>) -> BTreeMap<Kind, f64> {
        let mut values: BTreeMap<Kind, f64> = BTreeMap::new();
        for shard in shards.filter(|shard| shard.action != Action::Audit) {
            *values.entry(shard.kind).or_default() += shard.value.unwrap_or(0.0);
        }
        self.shares_of_value(&values)
    }

    /// Values as shares of all that a kind has, from 0 to 1; 1 where nothing is worth anything.
    fn shares_of_value(&self, values: &BTreeMap<Kind, f64>) -> BTreeMap<Kind, f64> {
        let all = self.counts.iter().filter_map(|(kind, counts)| Some((*kind, counts.value?)));
        all.map(|(kind, all)| (kind, if all > 0.0 { values.get(&kind).unwrap_or(&0.0) / all } else { 1.0 })).collect()
    }

    /// What the rows of the run's parts hold.
    pub fn content(&self) -> Content {
        let items = self.ids.get(&Kind::Item).copied().unwrap_or(IdType::String);
        self.spec.content((items, self.list_rows), self.runners_up > 0)
    }
}

/// The price of the engines' time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// The price of one engine (a GPU) for an hour.
    pub gpu_hour: f64,
    /// The currency of `gpu_hour`.
    #[serde(default = "Price::default_currency")]
    pub currency: String,
}

impl Price {
    fn default_currency() -> String {
        "USD".to_owned()
    }

    /// Returns the price of `seconds` of one engine.
    pub fn of_seconds(&self, seconds: f64) -> f64 {
        seconds / 3600.0 * self.gpu_hour
    }
}

/// A shard handed to one worker for a time.
#[derive(Debug, Clone, PartialEq)]
pub struct Lease {
    /// The work.
    pub job: ShardJob,
    /// Counted from 1.
    pub attempt: u32,
    /// Names this lease; a later lease of the same shard has another.
    pub token: u64,
}

/// Why a queue could not answer.
#[derive(Debug, thiserror::Error)]
#[error("queue: {0}")]
pub struct QueueError(pub String);

/// Where workers get shards from. Delivery is at least once; the commit makes the output exactly once.
///
/// The in-process queue of the coordinator implements it, and so will every broker.
pub trait Queue: Send + Sync {
    /// The next shard, waiting for one while others are being worked on; `None` once nothing is left
    /// to do or the queue is closed.
    fn lease(&self) -> impl Future<Output = Result<Option<Lease>, QueueError>> + Send;

    /// How long a lease lasts without a heartbeat.
    fn lease_duration(&self) -> Duration;

    /// Tells that the shard is being worked on. `false`: the lease is lost; the work may go on, but
    /// another worker has the shard too.
    fn heartbeat(&self, lease: &Lease) -> impl Future<Output = Result<bool, QueueError>> + Send;

    /// Tells that the shard's output exists, whoever wrote it.
    fn committed(&self, lease: &Lease) -> impl Future<Output = Result<(), QueueError>> + Send;

    /// Gives the shard back: the attempt failed for `reason`.
    fn failed(&self, lease: &Lease, reason: &str) -> impl Future<Output = Result<(), QueueError>> + Send;

    /// Gives the shard back untouched: the worker is draining. The in-process queue does not count it as an
    /// attempt; a broker that counts deliveries does.
    fn released(&self, lease: &Lease) -> impl Future<Output = Result<(), QueueError>> + Send;
}
