//! Knowledge ids of a night's embeddings, and the codebook they are of.
//!
//! Two passes: a seeded sample to fit the codebook on, then all rows to ids. The codebook is created once and is the
//! commit of the first pass; parts are a function of it and the source, created once each, so the same command goes on
//! wherever it was stopped. Memory is that of the sample and of one part, and 40 bytes an entity to find one that
//! occurs twice.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use laser_features::{ChurnCounter, Codebook, Coded, FitInput, fit};
use laser_schema::ids::{CODEBOOK, Churn, CodebookEntry, IdRecord, IdSet};
use laser_schema::knowledge::{SCHEMA_VERSION, WRITER, ratio};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, PartEntry, Source};
use laser_schema::sample::{Sample, priority};
use laser_schema::{Digest, EntityId, Progress};
use laser_store::data_set::{self, PartWriter};
use laser_store::{
    Location, embeddings::EmbeddingBatch, id_set::encode_ids, location::Created, parallel, table::TableReader,
};
use rayon::prelude::*;
use serde_json::Value;

use crate::config::Config;
use crate::derived::{Derived, Destination};
use crate::embedding_source::EmbeddingSource;

/// Rows of a part: a few hundred kilobytes, so that a million entities are a handful of files.
const PART_ROWS: usize = 65_536;

/// The codebook of the night before.
struct Parent {
    codebook: Codebook,
    digest: Digest,
    /// Its ids, for the churn: name and place of the folder.
    night: Option<(String, Location)>,
}

/// The ids of one kind and night, wherever they were left.
struct Ids<'a> {
    config: &'a Config,
    source: &'a EmbeddingSource,
    parent: Option<Parent>,
    destination: Destination,
}

/// The result of one pass over all rows.
struct Assigned {
    parts: Vec<PartEntry>,
    distortion: f64,
    churn: Option<Churn>,
}

/// Writes what is missing of the ids of these embeddings, below `output`. The codebook begins with `previous`:
/// `latest`, `none`, or the path of another output, folder or file.
///
/// # Errors
/// Naming the source, the part, the previous codebook or the store.
pub async fn assign_ids(
    config: &Config,
    source: &EmbeddingSource,
    previous: &str,
    output: &Location,
    progress: &mut dyn Progress,
) -> Result<Derived<IdSet>> {
    let parent = parent(previous, output, source).await?;
    let parent_digest = parent.as_ref().map(|parent| &parent.digest);
    let identity = Digest::of_json(&(source.kind, &source.digest, &config.ids, parent_digest));
    let night = (source.kind, source.date);
    let destination = Destination::new(config, output, DataSet::KnowledgeIds, night, &identity);
    match destination.find().await? {
        Some(found) => Ok(found),
        None => {
            let ids = Ids { config, source, parent, destination };
            ids.destination.make(ids.publish(progress)).await
        }
    }
}

/// Finds the codebook to begin with.
async fn parent(previous: &str, output: &Location, source: &EmbeddingSource) -> Result<Option<Parent>> {
    let (kind, date) = (source.kind, source.date);
    let newest = |root: Location| async move {
        let newest = data_set::newest::<IdSet>(&root, DataSet::KnowledgeIds, kind, date).await?;
        anyhow::Ok(newest.map(|found| (root.join(&found.folder), found.folder)))
    };
    let found = match previous {
        "none" => None,
        "latest" => newest(output.clone()).await?,
        path => {
            let place = Location::parse(path)?;
            if place.extension() == "safetensors" {
                return read_parent(place, None).await.map(Some);
            }
            match place.join(MANIFEST).exists().await? {
                true => Some((place, path.to_owned())),
                false => Some(
                    newest(place)
                        .await?
                        .with_context(|| format!("--previous {path}: no complete {kind} ids before {date} there"))?,
                ),
            }
        }
    };
    let Some((folder, name)) = found else {
        return Ok(None);
    };
    let codebook = folder.join(CODEBOOK);
    read_parent(codebook, Some((name, folder))).await.map(Some)
}

async fn read_parent(file: Location, night: Option<(String, Location)>) -> Result<Parent> {
    let bytes = file.read().await?;
    Ok(Parent { codebook: Codebook::from_bytes(file.url(), &bytes)?, digest: Digest::of(&bytes), night })
}

impl Ids<'_> {
    async fn publish(&self, progress: &mut dyn Progress) -> Result<Derived<IdSet>> {
        let (codebook, digest) = self.codebook(progress).await?;
        let Assigned { parts, distortion, churn } = self.assign(&codebook, &digest, progress).await?;
        let source = Source { path: self.source.path.clone(), digest: self.source.digest.clone() };
        let info = codebook.info().clone();
        let created = info.created;
        let details = IdSet { source, codebook: CodebookEntry { digest, info }, distortion, churn };
        self.destination.publish(created, parts, details).await
    }

    /// The run's codebook with its digest: that which is there, or a new one. Of two processes one creates it.
    async fn codebook(&self, progress: &mut dyn Progress) -> Result<(Codebook, Digest)> {
        let file = self.destination.folder.join(CODEBOOK);
        if !file.exists().await? {
            let bytes = self.fit(progress).await?.to_bytes()?;
            if file.create(bytes.into()).await? == Created::Exists {
                tracing::info!("{}: another process was first", file.url());
            }
        }
        let bytes = file.read().await?;
        let codebook = Codebook::from_bytes(file.url(), &bytes)
            .with_context(|| format!("remove {} and run again: it is made anew", self.destination.folder.url()))?;
        Ok((codebook, Digest::of(&bytes)))
    }

    async fn fit(&self, progress: &mut dyn Progress) -> Result<Codebook> {
        let kind = self.source.kind;
        progress.stage(&format!("reading {kind}s"));
        let sample = self.sample(progress).await?;
        let sample: Vec<&[f32]> = sample.iter().map(|(_, e)| e.as_slice()).collect();
        progress.stage(&format!("clustering {kind}s"));
        let input = FitInput {
            kind,
            sample: &sample,
            encoder: self.source.encoder.as_ref(),
            parent: self.parent.as_ref().map(|p| (&p.codebook, &p.digest)),
            now: Timestamp::from_microsecond(Timestamp::now().as_microsecond())?,
        };
        Ok(fit(input, &self.config.ids, progress)?)
    }

    /// A seeded sample of all embeddings, whatever their order.
    async fn sample(&self, progress: &mut dyn Progress) -> Result<Sample<Vec<f32>>> {
        let ids = &self.config.ids;
        let mut sample = Sample::new(ids.sample);
        let mut seen = HashSet::new();
        let mut reader = self.source.reader().await?;
        while let Some(batch) = reader.next_batch().await? {
            for (id, embedding) in batch.iter() {
                let priority = priority(ids.seed, &[id.to_string().as_bytes()]);
                ensure!(
                    seen.insert(priority),
                    "{}: {} {id} is there twice; an entity has one embedding",
                    self.source.path,
                    self.source.kind
                );
                sample.offer(priority, || embedding.to_vec());
            }
            progress.update(seen.len() as u64, None, "");
        }
        Ok(sample)
    }

    /// Writes the ids of all rows in the order of the source.
    async fn assign(&self, codebook: &Codebook, digest: &Digest, progress: &mut dyn Progress) -> Result<Assigned> {
        let kind = self.source.kind;
        let mut churn = self.churn(codebook).await?;
        progress.stage(&format!("ids of {kind}s"));
        let footer = serde_json::json!({
            "version": SCHEMA_VERSION, "run": self.destination.run, "kind": kind, "writer": WRITER, "codebook": digest,
        });
        let (mut parts, mut waiting) = (PartWriter::new(&self.destination.folder), Vec::new());
        let event_timestamp = self.source.date.to_zoned(TimeZone::UTC)?.timestamp();
        let created_timestamp = codebook.info().created;
        let (mut rows, mut distortion) = (0, 0.0);
        let mut reader = self.source.reader().await?;
        while let Some(batch) = reader.next_batch().await? {
            for (entity_id, coded) in code(codebook, batch)? {
                if let Some(churn) = &mut churn {
                    churn.compare(&entity_id, &coded.ids);
                }
                rows += 1;
                distortion += coded.distortion;
                waiting.push(IdRecord { entity_id, knowledge_ids: coded.ids, event_timestamp, created_timestamp });
                if waiting.len() == PART_ROWS {
                    self.part(&mut parts, std::mem::take(&mut waiting), &footer).await?;
                }
            }
            progress.update(rows, None, "");
        }
        if !waiting.is_empty() {
            self.part(&mut parts, waiting, &footer).await?;
        }
        progress.finish_with(&format!("{rows} entities"));
        Ok(Assigned {
            parts: parts.finish(),
            distortion: ratio(distortion, rows as f64),
            churn: churn.map(ChurnCounter::finish),
        })
    }

    /// Creates the next part. One that an earlier process left must be the same.
    async fn part(&self, parts: &mut PartWriter<'_>, rows: Vec<IdRecord>, footer: &Value) -> Result<()> {
        let (bytes, place) = (encode_ids(&parts.name(), &rows, footer)?, parts.place());
        ensure!(
            parts.create(bytes.clone()).await? == bytes,
            "{}: not what the source and the codebook lead to; remove {} and run again",
            place.url(),
            self.destination.folder.url()
        );
        parts.add(rows.len() as u64, &bytes);
        Ok(())
    }

    /// The ids of the night before, ready to be compared with tonight's.
    async fn churn(&self, codebook: &Codebook) -> Result<Option<ChurnCounter>> {
        let night = self.parent.as_ref().and_then(|parent| parent.night.as_ref());
        let Some((name, folder)) = night else {
            return Ok(None);
        };
        let manifest = data_set::read::<IdSet>(folder).await?;
        let manifest =
            manifest.with_context(|| format!("{}: it has no {MANIFEST}; take another --previous", folder.url()))?;
        let mut churn = ChurnCounter::new(name.clone(), codebook.info().places());
        for part in &manifest.parts {
            let mut reader = TableReader::open(&folder.join(&part.name)).await?;
            while let Some(records) = reader.next::<IdRecord>().await? {
                for record in records {
                    churn.remember(&record.entity_id, record.knowledge_ids);
                }
            }
        }
        Ok(Some(churn))
    }
}

/// The ids of a batch, in order.
fn code(codebook: &Codebook, batch: EmbeddingBatch) -> Result<Vec<(EntityId, Coded)>> {
    let EmbeddingBatch { ids, values, dimension, .. } = batch;
    let rows = ids.into_par_iter().zip(values.par_chunks_exact(dimension));
    let coded = rows.map(|(id, embedding)| {
        let coded = codebook.code(&id, embedding)?;
        Ok((id, coded))
    });
    parallel::try_collect(coded)
}
