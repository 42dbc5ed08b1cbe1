//! Manifests of published folders: one header for all data sets, and what a folder of texts or lists says beside it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

use jiff::Timestamp;
use jiff::civil::Date;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::audit::AuditReport;
use crate::canary::Canary;
use crate::digest::Digest;
use crate::embedding::EmbeddingInfo;
use crate::entity::Kind;
use crate::guard::GuardReport;
use crate::job::{Price, Priority, Spec};
use crate::knowledge::{Figures, SCHEMA_VERSION, WRITER, ratio};
use crate::layout::DataSet;

/// The manifest's file name; readers of data sets ignore names that start with `_`.
pub const MANIFEST: &str = "_manifest.json";

/// Says that the data set is complete. Written last.
pub const SUCCESS: &str = "_SUCCESS";

/// Says that a data set which is made from a published one has been begun. It goes once that is complete.
pub const BEGUN: &str = "_begun";

/// The rows that have no text, one JSON object a line.
pub const ERRORS: &str = "_errors.jsonl";

/// One Parquet part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// File name within the folder.
    pub name: String,
    /// Its rows; where an entity has one for each item of its list, entities.
    pub rows: u64,
    /// The rows of the file, where they are more than entities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_rows: Option<u64>,
    /// Its size.
    pub bytes: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

impl PartEntry {
    /// The rows of the file.
    pub fn table_rows(&self) -> u64 {
        self.table_rows.unwrap_or(self.rows)
    }
}

/// The manifest of a published folder: a header that all data sets share, and what this one says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest<D = Profiles> {
    /// [`SCHEMA_VERSION`].
    pub version: u32,
    /// The data set.
    pub data_set: DataSet,
    /// The run.
    pub run: String,
    /// Users or items.
    pub kind: Kind,
    /// The night.
    pub date: Date,
    /// When the newest of the contents came to be; a function of the contents. Of two runs of one night the one with
    /// the greater `created` counts.
    pub created: Timestamp,
    /// The version of Laser that wrote it.
    pub writer: String,
    /// Rows of all parts.
    pub rows: u64,
    /// All that only this data set says; its fields can be read as if they were fields of the manifest.
    #[serde(flatten)]
    pub details: D,
    /// The parts, by name.
    pub parts: Vec<PartEntry>,
}

/// A manifest whose details are whatever is there: for all that the header is enough for.
pub type AnyManifest = Manifest<serde_json::Map<String, serde_json::Value>>;

/// The details of a data set's manifest.
pub trait Details: Serialize + DeserializeOwned {
    /// The data sets whose manifests have such details.
    const DATA_SETS: &'static [DataSet];

    /// The data set that these details are of.
    fn data_set(&self) -> DataSet;
}

impl<D: Details> Manifest<D> {
    /// The manifest of parts that are there; `rows` are theirs.
    pub fn new(run: &str, (kind, date): (Kind, Date), created: Timestamp, parts: Vec<PartEntry>, details: D) -> Self {
        Self {
            version: SCHEMA_VERSION,
            data_set: details.data_set(),
            run: run.to_owned(),
            kind,
            date,
            created,
            writer: WRITER.to_owned(),
            rows: parts.iter().map(|part| part.rows).sum(),
            details,
            parts,
        }
    }
}

impl<D> Deref for Manifest<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.details
    }
}

/// Where the rows of a data set are from that was made of another one or of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The folder or file.
    pub path: String,
    /// Digest of what it held.
    pub digest: Digest,
}

/// The details of a manifest of texts or lists: how they came to be, how good they are, and what they cost. Where only
/// texts are named, lists are meant as well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profiles {
    /// Which texts were acceptable.
    pub spec: Spec,
    /// Its digest.
    pub spec_digest: Digest,
    /// Digest of the pool set.
    pub pool_digest: Digest,
    /// Entities of the input.
    pub entities: u64,
    /// Rows that were carried forward.
    pub carried: u64,
    /// Entities without a text; `_errors.jsonl` says why.
    pub errors: u64,
    /// What the entities are worth, if the night has a priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Value>,
    /// Sums over the generated rows, by pool.
    pub figures: BTreeMap<String, Figures>,
    /// Plain decoding against speculation on the audit sample, by pool.
    pub audit: BTreeMap<String, AuditReport>,
    /// The guards' findings, if any are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guards: Option<GuardReport>,
    /// The cost, if the plan has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// The encoder and how many texts it cut off, if the parts have embeddings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingInfo>,
    /// That this is no night but a canary beside the night of its date, and of which entities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
}

/// What entities are worth, by the night's priority.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The priority.
    pub priority: Priority,
    /// The value of all entities.
    pub all: f64,
    /// The value of those without a text.
    pub lost: f64,
}

impl Value {
    /// The share of the value that has a text, from 0 to 1; 1 where nothing is worth anything.
    pub fn coverage(&self) -> f64 {
        1.0 - ratio(self.lost, self.all)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} % of the value by [run] priority = {:?}", self.coverage() * 100.0, self.priority.expression)
    }
}

impl Details for Profiles {
    const DATA_SETS: &'static [DataSet] = &DataSet::OF_RUNS;

    fn data_set(&self) -> DataSet {
        self.spec.data_set()
    }
}

/// The cost of a folder's texts: time of engines that had a shard in hand, not of idle ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The price of the engines' time.
    pub price: Price,
    /// Seconds of all engines that went into the texts.
    pub gpu_seconds: f64,
    /// Seconds of all engines that went into the audit.
    pub audit_gpu_seconds: f64,
    /// Price of 1,000 generated texts.
    pub per_1000_texts: f64,
    /// The same, by pool.
    pub per_1000_texts_by_pool: BTreeMap<String, f64>,
}

impl Cost {
    /// The cost of what figures and audits of all pools tell.
    pub fn of(price: &Price, figures: &BTreeMap<String, Figures>, audits: &BTreeMap<String, AuditReport>) -> Self {
        let all: Figures = figures.values().sum();
        let by_pool = figures.iter().map(|(pool, f)| (pool.clone(), per_1000(price, f)));
        Self {
            price: price.clone(),
            gpu_seconds: all.engine_seconds,
            audit_gpu_seconds: audits.values().map(|a| a.plain_seconds + a.seconds).sum(),
            per_1000_texts: per_1000(price, &all),
            per_1000_texts_by_pool: by_pool.collect(),
        }
    }

    /// The night's whole price, the audit included.
    pub fn total(&self) -> f64 {
        self.price.of_seconds(self.gpu_seconds + self.audit_gpu_seconds)
    }
}

/// The price of 1,000 texts such as those of the figures.
fn per_1000(price: &Price, figures: &Figures) -> f64 {
    ratio(price.of_seconds(figures.engine_seconds) * 1e3, figures.texts as f64)
}
