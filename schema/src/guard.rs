//! Guards: bounds on what relaxed verification may do to texts, and what follows when a pool breaches one.
//!
//! A pool is judged by sums over its texts ([`Figures`]) and by its audit, which knows the same entities' plain texts
//! ([`AuditReport`]). Judging is a pure function of both, so it comes to the same wherever and however often it is
//! done.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::audit::AuditReport;
use crate::knowledge::Figures;

/// The consequence of a breach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuardAction {
    /// It is told.
    #[default]
    Warn,
    /// Audits are generated first, and tonight's texts of a pool whose audit breaches are verified strictly.
    Strict,
    /// `_SUCCESS` is withheld.
    Fail,
}

/// `[guards]`: bounds on the texts of a pool. One that is not set bounds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guards {
    /// The consequence of a breach.
    pub action: GuardAction,
    /// A pool of fewer texts is not judged: the figures of a few texts are chance.
    pub min_texts: u64,
    /// Bounds on the length of the texts over that of the same entities' plain texts, in the audit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_length_ratio: Option<f64>,
    /// See [`Self::min_length_ratio`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length_ratio: Option<f64>,
    /// Bounds on the length of the texts over that of the same entities' earlier texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_length_drift: Option<f64>,
    /// See [`Self::min_length_drift`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length_drift: Option<f64>,
    /// Bound on the share of a text's pairs of tokens that are distinct (distinct-2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_distinct_2: Option<f64>,
    /// Bound on the share of tokens that were accepted though not the most probable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_relaxed_share: Option<f64>,
    /// Bound on the mean natural-log probability of the texts' tokens under the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_log_probability: Option<f64>,
    /// Bound on the mean cosine of the embeddings of a text and of the same entity's plain text, in the audit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_similarity: Option<f64>,
}

impl Default for Guards {
    fn default() -> Self {
        Self {
            action: GuardAction::Warn,
            min_texts: 5,
            min_length_ratio: None,
            max_length_ratio: None,
            min_length_drift: None,
            max_length_drift: None,
            min_distinct_2: None,
            max_relaxed_share: None,
            min_log_probability: None,
            min_similarity: None,
        }
    }
}

/// A bound that was not kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Breach {
    /// The bound's key in `[guards]`.
    pub guard: String,
    /// Its value.
    pub limit: f64,
    /// The measured value.
    pub found: f64,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (side, figure) = match self.guard.split_once('_') {
            Some(("min", figure)) => ("below", figure),
            Some((_, figure)) => ("above", figure),
            None => ("beyond", self.guard.as_str()),
        };
        let figure = figure.replace('_', " ");
        write!(f, "{figure} {:.3} is {side} {} = {}", self.found, self.guard, self.limit)
    }
}

/// The findings about a pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The texts that it rests on.
    pub texts: u64,
    /// The bounds that were not kept.
    pub breaches: Vec<Breach>,
    /// Whether tonight's texts of the pool are verified strictly for it.
    pub strict: bool,
}

/// The guards of a night and what they found, by pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuardReport {
    /// The bounds.
    pub guards: Guards,
    /// The breaches.
    pub pools: BTreeMap<String, Verdict>,
}

impl GuardReport {
    /// Whether `_SUCCESS` is withheld for what was found.
    pub fn withholds(&self) -> bool {
        self.guards.action == GuardAction::Fail && self.breaches().next().is_some()
    }

    /// The pools that breach, with how.
    pub fn breaches(&self) -> impl Iterator<Item = (&String, &Breach)> {
        let pools = self.pools.iter();
        pools.flat_map(|(pool, verdict)| verdict.breaches.iter().map(move |breach| (pool, breach)))
    }
}

impl Guards {
    /// Key, value, and whether it is an upper bound, of every bound that is set.
    pub fn bounds(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let all = [
            ("min_length_ratio", self.min_length_ratio),
            ("max_length_ratio", self.max_length_ratio),
            ("min_length_drift", self.min_length_drift),
            ("max_length_drift", self.max_length_drift),
            ("min_distinct_2", self.min_distinct_2),
            ("max_relaxed_share", self.max_relaxed_share),
            ("min_log_probability", self.min_log_probability),
            ("min_similarity", self.min_similarity),
        ];
        all.into_iter().filter_map(|(key, limit)| Some((key, limit?)))
    }

    /// The values that a bound may have.
    pub fn range(key: &str) -> (f64, f64) {
        match key {
            "min_log_probability" => (-100.0, 0.0),
            "min_similarity" => (-1.0, 1.0),
            "min_distinct_2" | "max_relaxed_share" => (0.0, 1.0),
            _ => (0.0, 100.0),
        }
    }

    /// Whether a bound is on a comparison with plain texts.
    pub fn needs_audit(key: &str) -> bool {
        matches!(key, "min_length_ratio" | "max_length_ratio" | "min_similarity")
    }

    /// The bounds that a pool does not keep. A figure that is not known (no earlier texts, no encoder, too few texts)
    /// keeps every bound.
    pub fn breaches(&self, figures: &Figures, audit: &AuditReport) -> Vec<Breach> {
        let enough = figures.texts >= self.min_texts;
        let audited = audit.texts >= self.min_texts;
        let measured = |key: &str| match key {
            "min_length_ratio" | "max_length_ratio" => audited.then(|| audit.length_ratio()),
            "min_similarity" => audit.mean_similarity().filter(|_| audited),
            "min_length_drift" | "max_length_drift" => (enough && figures.previous > 0).then(|| figures.length_drift()),
            "min_distinct_2" => figures.distinct(2).filter(|_| enough),
            "max_relaxed_share" => enough.then(|| figures.relaxed_share()),
            "min_log_probability" => figures.mean_log_probability().filter(|_| enough),
            _ => None,
        };
        let breach = |(guard, limit): (&str, f64)| {
            let found = measured(guard)?;
            let kept = if guard.starts_with("max") { found <= limit } else { found >= limit };
            (!kept).then(|| Breach { guard: guard.to_owned(), limit, found })
        };
        self.bounds().filter_map(breach).collect()
    }
}
