//! Knowledge records: what Laser writes, and reads back the next night.
//!
//! One record is one text, or one list of items, with its provenance (what it was generated from) and its acceptance
//! figures (what speculation saved). `docs/output.md` lists the columns.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::iter::Sum;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::embedding::EmbeddingInfo;
use crate::entity::{EntityId, IdType, Kind};
use crate::layout::DataSet;
use crate::lists::ListRows;
use crate::parsed::ParsedField;

/// The version of an output's data sets: of their columns, their parts' footers and their manifests.
pub const SCHEMA_VERSION: u32 = 2;

/// One generated text or list. What is said of texts holds for lists, too, unless it says otherwise; what only texts
/// have is empty or 0 in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KnowledgeRecord {
    /// The entity, in the input's id type.
    pub entity_id: EntityId,
    /// The knowledge; empty where the record has a list.
    #[serde(default)]
    pub text: String,
    /// The items of a list, best first, in the catalogue's id type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<EntityId>,
    /// For each item the natural-log probability of its identifier.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<f64>,
    /// Tokens of the prompt.
    pub prompt_tokens: i64,
    /// Tokens of the text, with the end-of-text token where there is one; 0 of a list.
    #[serde(default)]
    pub text_tokens: i64,
    /// The pool that drafted; empty for a list.
    #[serde(default)]
    pub pool: String,
    /// The verification policy, such as `strict` or `relaxed(k=2,p=0.1)`.
    pub policy: String,
    /// Why the text ended: `end`, `stop` or `length`; empty for a list.
    #[serde(default)]
    pub stop_reason: String,
    /// Forwards of the model that this text took part in after its prompt. The first one of a list is the prompt's end.
    pub forwards: i64,
    /// Tokens that were drafted for it; of a list prefixes of identifiers.
    pub drafted_tokens: i64,
    /// Drafted tokens that are part of the text; of a list steps of the search that drafts saved a forward.
    pub accepted_tokens: i64,
    /// Accepted tokens that are not the target's argmax; 0 of a list.
    #[serde(default)]
    pub relaxed_tokens: i64,
    /// Accepted draft tokens of each forward, in order; of a list accepted steps.
    pub step_accepted: Vec<i64>,
    /// Mean natural-log probability of the text's tokens under the target; 0 of a list, which has scores.
    #[serde(default)]
    pub mean_log_probability: f64,
    /// Seconds spent retrieving drafts (the paper's ART).
    pub draft_seconds: f64,
    /// Seconds of the engine that this text took: its even share of every step it was part of.
    pub engine_seconds: f64,
    /// Digest of the prompt's tokens; of a list also of the history.
    pub prompt_digest: Digest,
    /// Digest of the specification.
    pub spec_digest: Digest,
    /// Digest of the model's weights.
    pub model_digest: Digest,
    /// Digest of the pool, or empty where there was none.
    #[serde(default)]
    pub pool_digest: String,
    /// The run that generated the text; an earlier one if it was carried forward.
    pub generated_by: String,
    /// The night the record stands for.
    pub event_timestamp: Timestamp,
    /// When the text was generated.
    pub created_timestamp: Timestamp,
    /// The entity's other texts, where several are drawn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<String>,
    /// The most probable tokens at the places of the text where the model was not sure; `None` where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runners_up: Option<Vec<RunnerUp>>,
}

/// One of the most probable tokens at a place of a text: the one that was written there, or one that it left behind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunnerUp {
    /// The place, counted in tokens from the text's beginning.
    pub place: u32,
    /// The token.
    pub token: u32,
    /// Its probability there, at temperature 1.
    pub probability: f32,
}

/// A row that could not be turned into knowledge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// The entity.
    pub entity_id: EntityId,
    /// Where it failed: `plan`, `generate` or `deadline`.
    pub stage: String,
    /// The fault.
    pub reason: String,
    /// What the entity is worth, if the night has a [`Priority`](crate::job::Priority).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
}

/// Sums over texts or lists; what every figure of a summary is derived from. Lists have no tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Generated texts.
    pub texts: u64,
    /// Generated tokens.
    pub tokens: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Forwards that texts took part in, summed over texts.
    pub forwards: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Accepted draft tokens.
    pub accepted: u64,
    /// Accepted tokens that are not the argmax.
    pub relaxed: u64,
    /// Tokens that took no forward of their own, because the constraint allowed nothing else.
    #[serde(default)]
    pub forced: u64,
    /// Seconds spent drafting.
    pub draft_seconds: f64,
    /// Seconds of the engine.
    pub engine_seconds: f64,
    /// Tokens of the texts whose entity had an earlier text.
    #[serde(default)]
    pub compared: u64,
    /// Tokens of those earlier texts.
    #[serde(default)]
    pub previous: u64,
    /// Runs of one, two and three tokens within the texts.
    #[serde(default)]
    pub ngrams: [u64; 3],
    /// How many of them are distinct within their text.
    #[serde(default)]
    pub distinct_ngrams: [u64; 3],
    /// Sum of the natural-log probabilities of the tokens; 0 where the engine tells none.
    #[serde(default)]
    pub log_probability: f64,
}

impl Figures {
    /// One record's figures, given the tokens of its text. `previous` are those of the entity's earlier text, 0 if it
    /// had none.
    pub fn of(record: &KnowledgeRecord, tokens: &[u32], previous: u64) -> Self {
        let mut figures = Self::default();
        figures.add_record(record);
        figures.previous = previous;
        figures.compared = if previous > 0 { figures.tokens } else { 0 };
        for n in 1..=3 {
            figures.ngrams[n - 1] = tokens.windows(n).len() as u64;
            let distinct: HashSet<&[u32]> = tokens.windows(n).collect();
            figures.distinct_ngrams[n - 1] = distinct.len() as u64;
        }
        figures
    }

    /// Adds one record's figures.
    pub fn add_record(&mut self, record: &KnowledgeRecord) {
        self.add(&Self {
            texts: 1,
            tokens: record.text_tokens.unsigned_abs(),
            prompt_tokens: record.prompt_tokens.unsigned_abs(),
            forwards: record.forwards.unsigned_abs(),
            drafted: record.drafted_tokens.unsigned_abs(),
            accepted: record.accepted_tokens.unsigned_abs(),
            relaxed: record.relaxed_tokens.unsigned_abs(),
            draft_seconds: record.draft_seconds,
            engine_seconds: record.engine_seconds,
            log_probability: record.mean_log_probability * record.text_tokens as f64,
            ..Self::default()
        });
    }

    /// Adds other sums.
    pub fn add(&mut self, other: &Self) {
        self.texts += other.texts;
        self.tokens += other.tokens;
        self.prompt_tokens += other.prompt_tokens;
        self.forwards += other.forwards;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.relaxed += other.relaxed;
        self.forced += other.forced;
        self.draft_seconds += other.draft_seconds;
        self.engine_seconds += other.engine_seconds;
        self.compared += other.compared;
        self.previous += other.previous;
        for n in 0..3 {
            self.ngrams[n] += other.ngrams[n];
            self.distinct_ngrams[n] += other.distinct_ngrams[n];
        }
        self.log_probability += other.log_probability;
    }

    /// Share of the tokens that took no forward of their own.
    pub fn forced_share(&self) -> f64 {
        ratio(self.forced as f64, self.tokens as f64)
    }

    /// Average accepted length: accepted draft tokens a forward (paper 4.1).
    pub fn aal(&self) -> f64 {
        ratio(self.accepted as f64, self.forwards as f64)
    }

    /// Tokens a second of the engine; 0 of lists.
    pub fn tokens_per_second(&self) -> f64 {
        ratio(self.tokens as f64, self.engine_seconds)
    }

    /// Texts or lists a second of the engine.
    pub fn texts_per_second(&self) -> f64 {
        ratio(self.texts as f64, self.engine_seconds)
    }

    /// Forwards a text or list.
    pub fn forwards_per_text(&self) -> f64 {
        ratio(self.forwards as f64, self.texts as f64)
    }

    /// Average retrieval time: seconds of drafting a text (paper 4.1).
    pub fn art_seconds(&self) -> f64 {
        ratio(self.draft_seconds, self.texts as f64)
    }

    /// Share of the text's tokens that were accepted though not the argmax.
    pub fn relaxed_share(&self) -> f64 {
        ratio(self.relaxed as f64, self.tokens as f64)
    }

    /// Mean tokens a text.
    pub fn text_length(&self) -> f64 {
        ratio(self.tokens as f64, self.texts as f64)
    }

    /// Length of the texts over that of the same entities' earlier texts; 0 where there were none.
    pub fn length_drift(&self) -> f64 {
        ratio(self.compared as f64, self.previous as f64)
    }

    /// Distinct-n: the share of the texts' runs of `n` tokens, 1 to 3, that are distinct within their text (Li et al.,
    /// NAACL 2016); a loop drives it to 0. Longer texts weigh more. `None` where there is no such run.
    pub fn distinct(&self, n: usize) -> Option<f64> {
        let all = *self.ngrams.get(n.checked_sub(1)?)?;
        (all > 0).then(|| self.distinct_ngrams[n - 1] as f64 / all as f64)
    }

    /// Mean natural-log probability of a token under the target; `None` where the engine tells none.
    pub fn mean_log_probability(&self) -> Option<f64> {
        let is_known = self.log_probability < 0.0 && self.tokens > 0;
        is_known.then(|| self.log_probability / self.tokens as f64)
    }

    /// Share of drafted tokens that were accepted.
    pub fn draft_yield(&self) -> f64 {
        ratio(self.accepted as f64, self.drafted as f64)
    }
}

impl<'a> Sum<&'a Figures> for Figures {
    fn sum<I: Iterator<Item = &'a Figures>>(figures: I) -> Self {
        figures.fold(Self::default(), |mut sum, figures| {
            sum.add(figures);
            sum
        })
    }
}

/// `a / b`, or 0 where there is nothing to divide by.
pub fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

/// This version of Laser, as parts and manifests name it.
pub const WRITER: &str = concat!("laser ", env!("CARGO_PKG_VERSION"));

/// The footer of a part: all that publishing needs of it but the ids. With the rows it is the whole commit of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartInfo {
    /// [`SCHEMA_VERSION`].
    pub version: u32,
    /// The run.
    pub run: String,
    /// The shard.
    pub shard: u32,
    /// Users or items.
    pub kind: Kind,
    /// The [`WRITER`].
    pub writer: String,
    /// Who wrote it, to tell one's own write from another's after an ambiguous error.
    pub attempt: String,
    /// Digest of the shard's input, by which a plan knows its own parts; none in parts of earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Digest>,
    /// Rows; where an entity has [one for each item](ListRows::Item), entities.
    pub rows: u64,
    /// How many of them were carried forward, not generated.
    pub carried: u64,
    /// When the newest of the texts was generated; none without rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Timestamp>,
    /// Rows of the shard that have no text.
    pub errors: Vec<ErrorRecord>,
    /// Sums over the generated rows, by pool.
    pub figures: BTreeMap<String, Figures>,
    /// How the embeddings were made, if there is a column of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingInfo>,
    /// Whether there is a column of the entities' other texts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_samples: bool,
    /// Whether there is a column of the texts' runners-up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_runners_up: bool,
    /// The fields of the column of parsed texts, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parsed: Option<Vec<ParsedField>>,
    /// The type of the items' ids, if the rows have lists in place of texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lists: Option<IdType>,
    /// What a row is, if the rows have lists.
    #[serde(default, skip_serializing_if = "ListRows::is_user")]
    pub list_rows: ListRows,
}

/// What the rows of a part hold, and so which columns they have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A text each.
    Texts {
        /// Whether there is a column of the entities' other texts.
        has_samples: bool,
        /// Whether there is one of the texts' runners-up.
        has_runners_up: bool,
    },
    /// A list of items each.
    Lists {
        /// The type of the items' ids.
        items: IdType,
        /// What a row of a part is.
        rows: ListRows,
    },
}

impl Content {
    /// The data set of parts of this content.
    pub fn data_set(self) -> DataSet {
        match self {
            Self::Texts { .. } => DataSet::Profiles,
            Self::Lists { .. } => DataSet::Recommendations,
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Texts { has_samples, has_runners_up } => {
                let with = [(*has_samples, "samples"), (*has_runners_up, "runners-up")];
                let with: Vec<&str> = with.into_iter().filter(|(has, _)| *has).map(|(_, what)| what).collect();
                f.write_str(if with.is_empty() { "texts" } else { "texts with " })?;
                f.write_str(&with.join(" and "))
            }
            Self::Lists { items, rows: ListRows::User } => write!(f, "lists of {items} ids"),
            Self::Lists { items, rows: ListRows::Item } => write!(f, "lists of {items} ids, a row for each item"),
        }
    }
}

impl PartInfo {
    /// The info of a part of these rows, of which none was carried, and without errors, figures, embeddings,
    /// samples and runners-up.
    pub fn new(run: &str, shard: u32, kind: Kind, attempt: &str, rows: &[KnowledgeRecord]) -> Self {
        Self {
            version: SCHEMA_VERSION,
            run: run.to_owned(),
            shard,
            kind,
            writer: WRITER.to_owned(),
            attempt: attempt.to_owned(),
            input: None,
            rows: rows.len() as u64,
            carried: 0,
            newest: rows.iter().map(|row| row.created_timestamp).max(),
            errors: Vec::new(),
            figures: BTreeMap::new(),
            embedding: None,
            has_samples: false,
            has_runners_up: false,
            parsed: None,
            lists: None,
            list_rows: ListRows::User,
        }
    }

    /// The value of the rows without a text, in the part of a shard whose rows have this value. Rows to be carried have
    /// none of their own; but a part that has no rows has lost all.
    pub fn lost(&self, value: Option<f64>) -> f64 {
        match self.rows {
            0 => value.unwrap_or(0.0),
            _ => self.errors.iter().filter_map(|error| error.value).sum(),
        }
    }

    /// What the rows hold.
    pub fn content(&self) -> Content {
        match self.lists {
            None => Content::Texts { has_samples: self.has_samples, has_runners_up: self.has_runners_up },
            Some(items) => Content::Lists { items, rows: self.list_rows },
        }
    }

    /// The info of a part whose rows hold this.
    pub fn with_content(self, content: Content) -> Self {
        match content {
            Content::Texts { has_samples, has_runners_up } => Self { has_samples, has_runners_up, lists: None, ..self },
            Content::Lists { items, rows } => {
                Self { has_samples: false, has_runners_up: false, lists: Some(items), list_rows: rows, ..self }
            }
        }
    }
}
