//! The object of an audit shard: what was measured, and the texts it was measured on.
//!
//! Both texts of an entity are kept, the one that the night's verification gives with the origin of every piece, so
//! that what relaxed verification changes can be read (`laser report`).

use std::collections::BTreeMap;
use std::iter::Sum;

use serde::{Deserialize, Serialize};

use crate::entity::EntityId;
use crate::knowledge::{Figures, ratio};

/// The measurements of a shard's audit: the same rows, plainly and with speculation, in one process, in turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditReport {
    /// Texts compared, or lists.
    pub texts: u64,
    /// How many of them are the same token for token, or item for item with the same scores.
    pub identical: u64,
    /// Tokens of the plain texts.
    pub plain_tokens: u64,
    /// Seconds for them.
    pub plain_seconds: f64,
    /// Tokens of the texts with speculation.
    pub tokens: u64,
    /// Seconds for them.
    pub seconds: f64,
    /// Texts whose likeness to their plain text an encoder told.
    #[serde(default)]
    pub encoded: u64,
    /// Sum of the cosines of their embeddings and those of the plain texts.
    #[serde(default)]
    pub similarity: f64,
}

impl AuditReport {
    /// Adds another report.
    pub fn add(&mut self, other: &Self) {
        self.texts += other.texts;
        self.identical += other.identical;
        self.plain_tokens += other.plain_tokens;
        self.plain_seconds += other.plain_seconds;
        self.tokens += other.tokens;
        self.seconds += other.seconds;
        self.encoded += other.encoded;
        self.similarity += other.similarity;
    }

    /// Tokens a second with speculation over tokens a second without; of lists, which have no tokens, lists a second.
    pub fn speedup(&self) -> f64 {
        ratio(self.rate(), self.plain_rate())
    }

    /// Tokens a second with speculation, or lists a second.
    pub fn rate(&self) -> f64 {
        ratio(if self.is_of_lists() { self.texts } else { self.tokens } as f64, self.seconds)
    }

    /// Tokens a second without speculation, or lists a second.
    pub fn plain_rate(&self) -> f64 {
        ratio(if self.is_of_lists() { self.texts } else { self.plain_tokens } as f64, self.plain_seconds)
    }

    fn is_of_lists(&self) -> bool {
        self.tokens == 0 && self.plain_tokens == 0
    }

    /// Share of texts that plain greedy decoding gives token for token.
    pub fn identical_share(&self) -> f64 {
        ratio(self.identical as f64, self.texts as f64)
    }

    /// Mean cosine of the embeddings of a text and its plain text, from -1 to 1; `None` without an encoder.
    pub fn mean_similarity(&self) -> Option<f64> {
        (self.encoded > 0).then(|| self.similarity / self.encoded as f64)
    }

    /// Length of the texts over the length of the plain ones.
    pub fn length_ratio(&self) -> f64 {
        ratio(self.tokens as f64, self.plain_tokens as f64)
    }
}

impl<'a> Sum<&'a AuditReport> for AuditReport {
    fn sum<I: Iterator<Item = &'a AuditReport>>(reports: I) -> Self {
        reports.fold(Self::default(), |mut sum, report| {
            sum.add(report);
            sum
        })
    }
}

/// The output of an audit shard. Its JSON is that of the [`AuditReport`] with `pairs`; audits of earlier versions have
/// none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The measurements.
    #[serde(flatten)]
    pub report: AuditReport,
    /// Sums over the texts with speculation.
    #[serde(default)]
    pub figures: Figures,
    /// The texts that were compared, in the order of the shard's rows.
    #[serde(default)]
    pub pairs: Vec<AuditedText>,
}

/// An entity's text, plainly and with speculation; of a list only whether both are the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditedText {
    /// The entity.
    pub entity_id: EntityId,
    /// The text of plain greedy decoding.
    pub plain: String,
    /// Its tokens, with the end-of-text token where there is one.
    pub plain_tokens: u64,
    /// Tokens of the text with speculation.
    pub tokens: u64,
    /// How many of them were accepted though not the argmax.
    pub relaxed: u64,
    /// Tokens by who proposed them.
    pub proposed: BTreeMap<Proposer, u64>,
    /// Whether both are the same token for token, or item for item with the same scores.
    pub identical: bool,
    /// Cosine of the embeddings of both texts, where the run has an encoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub similarity: Option<f64>,
    /// The text with speculation, in pieces of one origin each.
    pub pieces: Vec<Piece>,
}

impl AuditedText {
    /// The text with speculation.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|piece| piece.text.as_str()).collect()
    }
}

impl Audit {
    /// Adds how alike the texts of a pair are.
    pub fn add_similarity(&mut self, pair: usize, cosine: f64) {
        // To six decimals, which every reader gives back bit for bit.
        let cosine = (cosine * 1e6).round() / 1e6;
        if let Some(pair) = self.pairs.get_mut(pair) {
            pair.similarity = Some(cosine);
            self.report.encoded += 1;
            self.report.similarity += cosine;
        }
    }
}

/// Consecutive tokens of one origin, as text. A character that ends in a later token belongs to that token's piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The text; the pieces of a text are the text.
    pub text: String,
    /// Where its tokens come from.
    #[serde(flatten)]
    pub origin: Origin,
}

/// Where a token of a text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Who proposed it.
    pub source: Proposer,
    /// It was accepted though it is not the target's most probable.
    pub relaxed: bool,
}

impl Origin {
    /// The target's own token.
    pub const TARGET: Self = Self { source: Proposer::Target, relaxed: false };

    /// A token without alternatives.
    pub const CONSTRAINT: Self = Self { source: Proposer::Constraint, relaxed: false };
}

/// Who proposed a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Proposer {
    /// Nobody: it is the target's own.
    Target,
    /// The pool.
    Pool,
    /// The entity's previous text.
    Previous,
    /// The prompt and the text so far.
    Context,
    /// The draft model.
    #[serde(rename = "draft-model")]
    DraftModel,
    /// The constraint, which allowed nothing else.
    Constraint,
}

impl Proposer {
    /// All, the target first.
    pub const ALL: [Self; 6] =
        [Self::Target, Self::Pool, Self::Previous, Self::Context, Self::DraftModel, Self::Constraint];

    /// The name, as it is written in audits.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Target => "target",
            Self::Pool => "pool",
            Self::Previous => "previous",
            Self::Context => "context",
            Self::DraftModel => "draft-model",
            Self::Constraint => "constraint",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audits_of_earlier_versions_have_no_texts() {
        let report = AuditReport { texts: 3, seconds: 0.5, ..AuditReport::default() };
        let json = serde_json::to_string(&report).unwrap();
        let audit: Audit = serde_json::from_str(&json).unwrap();
        assert_eq!((audit.report, audit.pairs), (report, Vec::new()));
    }

    #[test]
    fn the_report_of_an_audit_is_read_alone_too() {
        let piece = Piece { text: "x".into(), origin: Origin { source: Proposer::Pool, relaxed: true } };
        let audit = Audit {
            report: AuditReport { texts: 1, ..AuditReport::default() },
            figures: Figures { tokens: 2, ..Figures::default() },
            pairs: vec![AuditedText {
                entity_id: EntityId::Int(1),
                plain: "y".into(),
                plain_tokens: 2,
                tokens: 2,
                relaxed: 1,
                proposed: [(Proposer::Pool, 1), (Proposer::Target, 1)].into(),
                identical: false,
                similarity: None,
                pieces: vec![piece],
            }],
        };
        let json = serde_json::to_string(&audit).unwrap();
        assert!(json.contains(r#""source":"pool","relaxed":true"#), "{json}");
        assert_eq!(serde_json::from_str::<Audit>(&json).unwrap(), audit);
        let report: AuditReport = serde_json::from_str(&json).unwrap();
        assert_eq!(report, audit.report);
    }
}
