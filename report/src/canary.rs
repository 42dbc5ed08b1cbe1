//! A canary beside the night in force: figures over the same entities, how alike their rows are, and a few of them side
//! by side.
//!
//! The night's parts are read once per [`ROWS_AT_ONCE`] rows of the canary, part by part, so memory is that of these
//! rows (about 2 kB each, and 4 bytes per value of an embedding) and of one part.

mod agreement;
mod side;

use std::collections::HashMap;

use anyhow::Result;
use laser_schema::embedding::cosine;
use laser_schema::guard::{Breach, GuardReport};
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::layout::CANARIES;
use laser_schema::manifest::{Manifest, Profiles};
use laser_schema::sample::{Sample, priority};
use laser_schema::{EntityId, Kind};
use laser_store::Location;
use laser_store::data_set;
use laser_store::part::decode_embedded_part;
use serde::Serialize;

pub use agreement::Agreement;
use agreement::Tally;
use side::Side;

use crate::chart::Histogram;
use crate::lists::ListSample;

/// Rows of a canary that are compared per reading of the night.
const ROWS_AT_ONCE: usize = 65_536;

/// Pairs that are shown.
const PAIRS: usize = 6;

/// A canary's rows of a kind and those of the night in force.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Users or items.
    pub kind: Kind,
    /// The canary's run.
    pub run: String,
    /// The entities that the canary is of, in words.
    pub entities: String,
    /// The run of the night in force; none if the night has no complete run, and then nothing is compared.
    pub night: Option<String>,
    /// Whether both have the same specification, so that their rows differ by nothing that it decides.
    pub same_specification: bool,
    /// Rows of the canary.
    pub rows: u64,
    /// Those of them whose entity has a row in the night, too.
    pub compared: u64,
    /// Figures of both over the rows that are compared.
    pub figures: Vec<Figure>,
    /// How alike the rows of an entity are.
    pub agreement: Vec<Agreement>,
    /// Cosines of the embeddings of both texts, where both have them by the same encoder.
    pub(crate) similarities: Option<Histogram>,
    /// What breaches a guard.
    pub breaches: Vec<PoolBreach>,
    /// A seeded few of the rows.
    pub(crate) pairs: Vec<Pair>,
}

/// A figure of both sides; none where a side does not have it.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// What it is, with its unit.
    pub name: String,
    /// The canary's.
    pub canary: Option<f64>,
    /// The night's.
    pub night: Option<f64>,
    /// Digits behind the point that matter.
    pub digits: usize,
}

/// A breach of a guard by a pool of the canary or of the night.
#[derive(Debug, Serialize)]
pub struct PoolBreach {
    /// The run.
    pub run: String,
    /// The pool.
    pub pool: String,
    /// Figure and bound.
    pub breach: String,
}

/// The texts or lists of an entity.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    id: String,
    /// The canary's text and the night's.
    texts: Option<[String; 2]>,
    /// The canary's list and the night's.
    lists: Option<[ListSample; 2]>,
    similarity: Option<f64>,
}

impl Pair {
    fn new(canary: &Row, night: &Row, similarity: Option<f64>) -> Self {
        let both = [&canary.record, &night.record];
        let lists = both.map(ListSample::of);
        Self {
            id: canary.record.entity_id.to_string(),
            texts: canary.record.items.is_empty().then(|| both.map(|record| record.text.clone())),
            lists: match lists {
                [Some(canary), Some(night)] => Some([canary, night]),
                _ => None,
            },
            similarity,
        }
    }

    /// The lists, to be given titles.
    pub(crate) fn lists(&mut self) -> impl Iterator<Item = &mut ListSample> {
        self.lists.iter_mut().flatten()
    }
}

/// A row with its embedding.
#[derive(Debug)]
struct Row {
    record: KnowledgeRecord,
    embedding: Option<Vec<f32>>,
}

/// Compares a canary's kind with the night in force of its date. `canaries` is the root that it lies below; `None` of a
/// folder that was copied elsewhere.
///
/// # Errors
/// A part or a manifest that cannot be read.
pub async fn compare(
    canaries: Option<&Location>,
    folder: &Location,
    manifest: &Manifest,
) -> Result<Option<Comparison>> {
    let Some(canary) = &manifest.canary else {
        return Ok(None);
    };
    let night = match canaries.and_then(nights_of) {
        Some(output) => night_in_force(&output, manifest).await?,
        None => None,
    };
    let mut comparison = Comparison {
        kind: manifest.kind,
        run: manifest.run.clone(),
        entities: canary.to_string(),
        night: night.as_ref().map(|(_, night)| night.run.clone()),
        same_specification: night.as_ref().is_some_and(|(_, night)| night.spec_digest == manifest.spec_digest),
        rows: manifest.rows,
        compared: 0,
        figures: Vec::new(),
        agreement: Vec::new(),
        similarities: None,
        breaches: breaches(manifest),
        pairs: Vec::new(),
    };
    if let Some(night) = &night {
        let matched = Matched::read((folder, manifest), (&night.0, &night.1)).await?;
        comparison.breaches.extend(breaches(&night.1));
        matched.tell(&mut comparison, [manifest, &night.1]);
    }
    Ok(Some(comparison))
}

/// The root of the nights that canaries lie beside.
fn nights_of(canaries: &Location) -> Option<Location> {
    let url = canaries.absolute_url();
    let root = url.trim_end_matches('/').strip_suffix(CANARIES)?.strip_suffix('/')?;
    Location::parse(root).ok()
}

async fn night_in_force(output: &Location, canary: &Manifest) -> Result<Option<(Location, Manifest)>> {
    let (data_set, kind, date) = (canary.data_set, canary.kind, canary.date);
    let Some(run) = data_set::in_force(output, data_set, kind, date).await? else {
        return Ok(None);
    };
    let folder = output.join(&data_set.folder(kind, date, &run));
    let manifest = data_set::read::<Profiles>(&folder).await?;
    Ok(manifest.map(|manifest| (folder, manifest)))
}

fn breaches(manifest: &Manifest) -> Vec<PoolBreach> {
    let breaches = manifest.guards.iter().flat_map(GuardReport::breaches);
    let told = |(pool, breach): (&String, &Breach)| PoolBreach {
        run: manifest.run.clone(),
        pool: pool.clone(),
        breach: breach.to_string(),
    };
    breaches.map(told).collect()
}

/// All that is summed over the entities that both sides have.
struct Matched {
    sides: [Side; 2],
    tally: Tally,
    pairs: Sample<Pair>,
    /// Whether embeddings of both can be compared.
    same_encoder: bool,
}

type Folder<'a> = (&'a Location, &'a Manifest);

impl Matched {
    async fn read((folder, canary): Folder<'_>, night: Folder<'_>) -> Result<Self> {
        let encoder = |manifest: &Manifest| manifest.embedding.as_ref().map(|info| info.spec.encoder.clone());
        let mut matched = Self {
            sides: [Side::default(), Side::default()],
            tally: Tally::default(),
            pairs: Sample::new(PAIRS),
            same_encoder: encoder(canary).is_some() && encoder(canary) == encoder(night.1),
        };
        let mut open: HashMap<EntityId, Row> = HashMap::new();
        for part in &canary.parts {
            for row in read_rows(folder, &part.name).await? {
                open.insert(row.record.entity_id.clone(), row);
            }
            if open.len() >= ROWS_AT_ONCE {
                matched.look_up(std::mem::take(&mut open), night).await?;
            }
        }
        matched.look_up(open, night).await?;
        Ok(matched)
    }

    /// Finds the rows of the night for some of the canary.
    async fn look_up(&mut self, mut open: HashMap<EntityId, Row>, (folder, night): Folder<'_>) -> Result<()> {
        for part in &night.parts {
            if open.is_empty() {
                break;
            }
            for row in read_rows(folder, &part.name).await? {
                if let Some(own) = open.remove(&row.record.entity_id) {
                    self.add(&own, &row);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, canary: &Row, night: &Row) {
        for (side, row) in self.sides.iter_mut().zip([canary, night]) {
            side.add(&row.record);
        }
        let embeddings = canary.embedding.as_ref().zip(night.embedding.as_ref()).filter(|_| self.same_encoder);
        let similarity = embeddings.map(|(canary, night)| cosine(canary, night));
        self.tally.add(&canary.record, &night.record, similarity);
        let priority = priority(0, &[canary.record.entity_id.to_string().as_bytes()]);
        self.pairs.offer(priority, || Pair::new(canary, night, similarity));
    }

    fn tell(self, comparison: &mut Comparison, manifests: [&Manifest; 2]) {
        comparison.compared = self.tally.rows();
        if comparison.compared == 0 {
            return;
        }
        comparison.figures = side::figures(&self.sides, manifests);
        comparison.similarities = self.tally.similarities();
        comparison.agreement = self.tally.agreement();
        comparison.pairs = self.pairs.into_items().collect();
    }
}

async fn read_rows(folder: &Location, part: &str) -> Result<Vec<Row>> {
    let file = folder.join(part);
    let (records, embeddings, _) = decode_embedded_part(file.url(), file.read().await?)?;
    let embedding = |at: usize| embeddings.as_ref().map(|embeddings| embeddings.row(at).to_vec());
    Ok(records.into_iter().enumerate().map(|(at, record)| Row { record, embedding: embedding(at) }).collect())
}
