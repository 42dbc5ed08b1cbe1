//! `[model]`, `[generate]`, `[verification]` and `[draft]`: what generates texts, and how.

use anyhow::{Context, Result};
use laser_decode::{Drafter, SourceWeights, Verification};
use laser_engine::DTypeOption;
use laser_schema::DeviceOption;
use laser_schema::job::Policy;
use serde::{Deserialize, Serialize};

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
    /// Threads of a forward on the CPU; if absent, one per core.
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

/// `[generate]`: the first two are part of the specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateConfig {
    /// Bound on a text's tokens.
    pub max_new_tokens: usize,
    /// Strings that end a text and are not part of it.
    pub stop: Vec<String>,
    /// Texts generated at a time.
    pub batch: usize,
    /// Bound on the tokens of one forward.
    pub step_tokens: usize,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self { max_new_tokens: 256, stop: Vec::new(), batch: 8, step_tokens: 512 }
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
}

impl Default for VerificationConfig {
    fn default() -> Self {
        Self { policy: PolicyKind::Relaxed, k: 2, p: 0.1 }
    }
}

/// How drafts are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// Only what plain greedy decoding gives.
    Strict,
    /// Top-k and above p (paper 3.4).
    Relaxed,
}

impl VerificationConfig {
    /// The policy as the specification has it.
    pub fn policy(self) -> Policy {
        match self.policy {
            PolicyKind::Strict => Policy::Strict,
            PolicyKind::Relaxed => Policy::Relaxed { k: self.k, p: self.p },
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
        }
    }
}

/// Nodes of a draft that measured costs cut: no fewer were faster at any batch size (docs/performance.md).
const ADAPTIVE_NODES: usize = 64;

/// Nodes of a draft that nothing cuts: more cost more than they gain from batch 8 on.
const FIXED_NODES: usize = 16;

/// `[draft]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DraftConfig {
    /// What drafts.
    pub method: DraftMethod,
    /// Bound on a text's drafted tokens per step; if absent, 64 where adaptive and 16 where not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
    /// Whether measured costs decide how much is drafted.
    pub adaptive: bool,
    /// The longest context that is looked up, in tokens.
    pub order: usize,
    /// Strength of the prior in blending context lengths.
    pub alpha: f32,
    /// Nodes that are less probable are not drafted.
    pub min_probability: f32,
    /// Weight of the text's own tokens against those of the pool.
    pub context_weight: f32,
    /// Weight of the entity's previous text against those of the pool.
    pub previous_weight: f32,
}

impl Default for DraftConfig {
    fn default() -> Self {
        let weights = SourceWeights::default();
        Self {
            method: DraftMethod::Blended,
            nodes: None,
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
pub enum DraftMethod {
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
    pub fn is_adaptive(self) -> bool {
        self.adaptive && self.method == DraftMethod::Blended
    }

    /// The bound on a text's drafted tokens per step.
    pub fn nodes(self) -> usize {
        self.nodes.unwrap_or(if self.is_adaptive() { ADAPTIVE_NODES } else { FIXED_NODES })
    }

    /// The drafter.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn drafter(self) -> Result<Drafter> {
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
