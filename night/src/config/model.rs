//! `[model]`, `[generate]`, `[verification]` and `[draft]`: what generates texts, and how.

use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use laser_decode::{Drafter, Sampling, SourceWeights, Verification};
use laser_engine::DTypeOption;
use laser_schema::job::{ConditionalSources, Policy, SamplingSpec};
use laser_schema::{Constraint, DeviceOption};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// `[model]`: part of the specification but for the device, its threads and its cache.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory, a `.gguf` file, a hub id, or the URL of a directory.
    pub path: String,
    /// What runs the model.
    pub engine: EngineKind,
    /// The precision of weights and products.
    pub dtype: DTypeOption,
    /// The quantisation that is applied while loading, if any.
    pub isq: Option<String>,
    /// Where the model runs.
    pub device: DeviceOption,
    /// Threads of forwards on the CPU and of drafts; if absent, one per core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Megabytes that keys and values may take; if absent, on a GPU four fifths of the free memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_mb: Option<usize>,
}

/// What runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// Laser's tree attention on mistralrs' layers.
    #[default]
    Tree,
    /// mistralrs itself, without speculation.
    Mistralrs,
}

/// Most texts of an entity: they are in memory until their row's shard is whole.
const SAMPLES_MAX: u32 = 64;

/// `[generate]`: part of the specification, but for the last two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// Bound on a text's tokens.
    pub max_new_tokens: usize,
    /// Strings that end a text and are not part of it.
    pub stop: Vec<String>,
    /// The temperature that tokens are drawn at; texts are greedy if it is 0.
    pub temperature: f32,
    /// The most probable tokens that may be drawn; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// The probability that the tokens which may be drawn have at least; 1 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Decides which texts are drawn; 0 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Texts of an entity.
    pub samples: u32,
    /// A file with the JSON schema that every text follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<PathBuf>,
    /// The regular expression that every text matches as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regex: Option<String>,
    /// A file with the grammar that every text follows, in llguidance's dialect of Lark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<PathBuf>,
    /// Texts generated at a time.
    pub batch: usize,
    /// Bound on the tokens of one forward; if absent, what [`GenerateConfig::step_tokens`] says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_tokens: Option<usize>,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            stop: Vec::new(),
            temperature: 0.0,
            top_k: None,
            top_p: None,
            seed: None,
            samples: 1,
            schema: None,
            regex: None,
            grammar: None,
            batch: 8,
            step_tokens: None,
        }
    }
}

impl GenerateConfig {
    /// Bound on the tokens of one forward. On a GPU the default leaves 256 texts seven nodes each. With 512 they had
    /// one, and a model of 886M parameters on an H200 wrote fewer tokens per second than with 64 texts at a time.
    pub fn step_tokens(&self, device: DeviceOption) -> usize {
        self.step_tokens.unwrap_or(match device {
            DeviceOption::Cpu => 512,
            DeviceOption::Cuda(_) => 2048,
        })
    }

    /// The keys that say what texts follow, of those that are set.
    pub fn constraint_keys(&self) -> Vec<&'static str> {
        let keys =
            [("schema", self.schema.is_some()), ("regex", self.regex.is_some()), ("grammar", self.grammar.is_some())];
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect()
    }

    /// What every text follows, if anything; reads the file.
    ///
    /// # Errors
    /// Naming the key and the file that cannot be read or is no JSON.
    pub fn constraint(&self) -> Result<Option<Constraint>> {
        let read = |key: &str, path: &Path| {
            let name = format!("[generate] {key} = {:?}", path.display().to_string());
            fs::read_to_string(path).map(|text| (text, name.clone())).with_context(|| format!("{name}: cannot be read"))
        };
        if let Some(path) = &self.schema {
            let (text, name) = read("schema", path)?;
            let schema = serde_json::from_str(&text).with_context(|| format!("{name}: not JSON"))?;
            return Ok(Some(Constraint::of_schema(schema)));
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(Constraint::Grammar(read("grammar", path)?.0)));
        }
        Ok(self.regex.clone().map(Constraint::Regex))
    }

    /// How texts are drawn, for the specification; none if they are greedy.
    pub fn sampling(&self) -> Option<SamplingSpec> {
        (self.temperature != 0.0).then(|| SamplingSpec {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p.unwrap_or(1.0),
            seed: self.seed.unwrap_or_default(),
            samples: self.samples,
        })
    }

    /// How tokens are drawn.
    ///
    /// # Errors
    /// Naming the section and the value that is out of its range, or that nothing would come of.
    pub fn drawn(&self) -> Result<Option<Sampling>> {
        ensure!((1..=SAMPLES_MAX).contains(&self.samples), "[generate] samples: expected 1 to {SAMPLES_MAX}");
        let Some(spec) = self.sampling() else {
            let keys = [
                ("top_k", self.top_k.is_some()),
                ("top_p", self.top_p.is_some()),
                ("seed", self.seed.is_some()),
                ("samples", self.samples > 1),
            ];
            for (key, is_set) in keys {
                ensure!(!is_set, "[generate] {key}: greedy texts are not drawn; set temperature above 0, or remove it");
            }
            return Ok(None);
        };
        Sampling::new(spec.temperature, spec.top_k, spec.top_p).map(Some).context("[generate]")
    }
}

/// `[verification]`: part of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerificationConfig {
    /// How drafts are accepted.
    pub policy: PolicyKind,
    /// With `relaxed`: the most probable tokens that are eligible.
    pub k: usize,
    /// With `relaxed`: the probability to exceed.
    pub p: f32,
    /// With `conditional`: the weight of the entropy.
    pub alpha: f32,
    /// With `conditional`: the probability that a token needs where the model is certain.
    pub beta: f32,
    /// With `conditional`: the drafted tokens that are verified so.
    pub sources: ConditionalSources,
    /// With `typical`: the probability that suffices whatever the entropy.
    pub epsilon: f32,
    /// With `typical`: the factor of exp(-entropy) that a probability has to exceed.
    pub delta: f32,
}

impl Default for VerificationConfig {
    fn default() -> Self {
        let sources = ConditionalSources::default();
        let policy = PolicyKind::Relaxed;
        Self { policy, k: 2, p: 0.1, alpha: 0.1, beta: 0.1, sources, epsilon: 0.09, delta: 0.3 }
    }
}

/// How drafts are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// Only what plain decoding gives.
    Strict,
    /// Top-k and above p (paper 3.4).
    Relaxed,
    /// A bound that rises with the entropy (AASD), for tokens copied from the prompt.
    Conditional,
    /// A bound that falls with the entropy (Medusa), for texts drawn at a temperature.
    Typical,
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Strict => "strict",
            Self::Relaxed => "relaxed",
            Self::Conditional => "conditional",
            Self::Typical => "typical",
        })
    }
}

impl VerificationConfig {
    /// The policy as the specification has it.
    pub fn policy(self) -> Policy {
        match self.policy {
            PolicyKind::Strict => Policy::Strict,
            PolicyKind::Relaxed => Policy::Relaxed { k: self.k, p: self.p },
            PolicyKind::Conditional => {
                Policy::Conditional { alpha: self.alpha, beta: self.beta, sources: self.sources }
            }
            PolicyKind::Typical => Policy::Typical { epsilon: self.epsilon, delta: self.delta },
        }
    }

    /// The policy as decoding has it.
    ///
    /// # Errors
    /// Bounds that make no sense.
    pub fn verification(self) -> Result<Verification> {
        match self.policy {
            PolicyKind::Strict => Ok(Verification::Strict),
            PolicyKind::Relaxed => Verification::relaxed(self.k, self.p).context("[verification]"),
            PolicyKind::Conditional => {
                let all_sources = self.sources == ConditionalSources::All;
                Verification::conditional(self.alpha, self.beta, all_sources).context("[verification]")
            }
            PolicyKind::Typical => Verification::typical(self.epsilon, self.delta).context("[verification]"),
        }
    }
}

/// Nodes of a draft that measured costs cut: no fewer were faster at any batch size (docs/performance.md).
const ADAPTIVE_NODES: usize = 64;

/// Nodes of a draft that nothing cuts: more cost more than they gain from batch 8 on. Lookahead has as many as its
/// window needs.
const FIXED_NODES: usize = 16;

/// `[draft]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DraftConfig {
    /// What drafts.
    pub method: DraftMethod,
    /// Bound on a text's drafted tokens per step; if absent, 64 where adaptive and 16 where not, and with lookahead all
    /// of its window and guesses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
    /// Whether measured costs decide how much is drafted.
    pub adaptive: bool,
    /// The longest context that is looked up, in tokens; with lookahead the length of an n-gram.
    pub order: usize,
    /// With lookahead: the columns of its window, and how many n-grams are verified in a step, at most.
    pub window: usize,
    /// Strength of the prior in blending context lengths.
    pub alpha: f32,
    /// Nodes that are less probable are not drafted.
    pub min_probability: f32,
    /// Weight of the text's own tokens against those of the pool.
    pub context_weight: f32,
    /// Weight of the entity's previous text against those of the pool.
    pub previous_weight: f32,
    /// Tokens that the model ranks above one copied from the prompt which are drafted beside it, at most.
    pub alignment: usize,
    /// Further models that judge and extend drafts, each those of the one before it: a table, or an array of tables.
    #[serde(deserialize_with = "one_or_several", skip_serializing_if = "Vec::is_empty")]
    pub model: Vec<DraftModelConfig>,
}

/// A table or an array of tables, with the errors of the table.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DraftModelConfig>, D::Error> {
    struct Tables;
    impl<'de> Visitor<'de> for Tables {
        type Value = Vec<DraftModelConfig>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table [draft.model], or several as [[draft.model]]")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            Ok(vec![Deserialize::deserialize(MapAccessDeserializer::new(map))?])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
            Deserialize::deserialize(SeqAccessDeserializer::new(seq))
        }
    }
    deserializer.deserialize_any(Tables)
}

/// `[draft.model]`: it runs where `[model]` runs, by the engine `tree`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftModelConfig {
    /// As [`ModelConfig::path`]; its tokenizer must be that model's.
    pub path: String,
    /// The folder of an acceptance head that was trained for this draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptance_head: Option<String>,
    /// The precision of weights and products.
    #[serde(default)]
    pub dtype: DTypeOption,
    /// The quantisation that is applied while loading, if any.
    #[serde(default)]
    pub isq: Option<String>,
    /// Forwards of it per step, at most.
    #[serde(default = "DraftModelConfig::default_forwards")]
    pub forwards: usize,
    /// What the trees of Medusa's heads follow.
    #[serde(default)]
    pub medusa_tree: MedusaTree,
    /// The probability that the target rejects a token of a path beyond which nothing more is drafted of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_threshold: Option<f32>,
}

/// What the trees of Medusa's heads follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MedusaTree {
    /// The probabilities that the heads give their tokens, step by step.
    #[default]
    Dynamic,
    /// How often the tokens of each head and rank have been right.
    Measured,
}

impl DraftModelConfig {
    fn default_forwards() -> usize {
        4
    }
}

impl Default for DraftConfig {
    fn default() -> Self {
        let weights = SourceWeights::default();
        Self {
            method: DraftMethod::Blended,
            nodes: None,
            adaptive: true,
            order: 8,
            window: 5,
            alpha: 4.0,
            min_probability: 0.002,
            context_weight: weights.context,
            previous_weight: weights.previous,
            alignment: 0,
            model: Vec::new(),
        }
    }
}

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftMethod {
    /// Best-first over blended context lengths.
    Blended,
    /// The paper's rule: the most frequent nodes below the longest match.
    RawFrequency,
    /// Copies from the prompt and the output alone.
    PromptLookup,
    /// N-grams that the model makes beside the text (lookahead decoding).
    Lookahead,
    /// Plain decoding.
    None,
}

impl fmt::Display for DraftMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Blended => "blended",
            Self::RawFrequency => "raw-frequency",
            Self::PromptLookup => "prompt-lookup",
            Self::Lookahead => "lookahead",
            Self::None => "none",
        })
    }
}

impl DraftConfig {
    /// Only blended drafts, and those of a draft model, carry probabilities to weigh against costs.
    pub fn is_adaptive(&self) -> bool {
        self.adaptive && (self.method == DraftMethod::Blended || !self.model.is_empty())
    }

    /// The bound on a text's drafted tokens per step.
    pub fn nodes(&self) -> usize {
        let usual = if self.is_adaptive() { ADAPTIVE_NODES } else { FIXED_NODES };
        self.nodes.or_else(|| self.unchecked().most_nodes()).unwrap_or(usual)
    }

    /// The drafter.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn drafter(&self) -> Result<Drafter> {
        let drafter = self.unchecked();
        drafter.check().context("[draft]")?;
        Ok(drafter)
    }

    fn unchecked(&self) -> Drafter {
        match self.method {
            DraftMethod::None => Drafter::None,
            DraftMethod::PromptLookup => Drafter::PromptLookup { max_ngram: self.order },
            DraftMethod::Lookahead => {
                Drafter::Lookahead { window: self.window, ngram: self.order, guesses: self.window }
            }
            DraftMethod::RawFrequency => Drafter::RawFrequency { max_ngram: self.order },
            DraftMethod::Blended => Drafter::Blended {
                order: self.order,
                alpha: self.alpha,
                min_probability: self.min_probability,
                weights: SourceWeights { context: self.context_weight, previous: self.previous_weight },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_gpu_take_more_tokens_by_default() {
        let (default, set) =
            (GenerateConfig::default(), GenerateConfig { step_tokens: Some(40), ..Default::default() });
        let of = |config: &GenerateConfig| [DeviceOption::Cpu, DeviceOption::Cuda(1)].map(|d| config.step_tokens(d));
        assert_eq!((of(&default), of(&set)), ([512, 2048], [40, 40]));
    }
}
