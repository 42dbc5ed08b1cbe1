//! `laser ids`: knowledge ids of a night's embeddings, and the codebook they are of.
//!
//! Two passes: a seeded sample to fit the codebook on, then all rows to ids. The codebook is created once and is the
//! commit of the first pass; parts are a function of it and the source, created once each, so the same command goes on
//! wherever it was stopped. Memory is that of the sample and of one part, and 40 bytes an entity to find one that is
//! there twice.

use std::collections::HashSet;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use laser_delta::Table;
use laser_features::{ChurnCounter, Codebook, Coded, FitInput, FitProgress, fit};
use laser_night::{Config, Progress};
use laser_schema::ids::{CODEBOOK, Churn, CodebookEntry, IdRecord, IdSet, IdsManifest};
use laser_schema::knowledge::{SCHEMA_VERSION, WRITER, ratio};
use laser_schema::layout::{DataSet, dated_name};
use laser_schema::manifest::{MANIFEST, Manifest, PartEntry, Source};
use laser_schema::sample::{Sample, priority};
use laser_schema::{Digest, EntityId};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter};
use laser_store::embeddings::EmbeddingBatch;
use laser_store::id_set::encode_ids;
use laser_store::location::Created;
use laser_store::table::TableReader;
use laser_terminal::{Display, print};
use rayon::prelude::*;
use serde_json::Value;

use crate::ConfigArgs;
use crate::embedding_source::{Embedded, EmbeddingSource};

/// Rows of a part: a few hundred kilobytes, so that a million entities are a handful of files.
const PART_ROWS: usize = 65_536;

/// What `laser ids` is given.
#[derive(Debug, Args)]
pub(crate) struct IdsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Embeddings: an output (its newest night is taken), one published folder of texts with embeddings or of
    /// embeddings, a .parquet with the columns id and embedding, or an .npy with --ids. By default the configuration's
    /// output.
    source: Option<String>,
    /// Where the ids go: a folder or URL; by default the configuration's output.
    #[arg(short, long)]
    output: Option<String>,
    /// The codebook to begin with, so that ids keep their meaning: that of the newest earlier night of the ids' output
    /// (on a first night there is none), of another output, folder or file, or none.
    #[arg(long, value_name = "latest|none|PATH", default_value = "latest")]
    previous: String,
    #[command(flatten)]
    embedded: Embedded,
}

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
    run: String,
    folder: Location,
    /// The Delta table that the ids enter, if there is to be one.
    table: Option<Table>,
}

/// What one pass over all rows leads to.
struct Assigned {
    parts: Vec<PartEntry>,
    distortion: f64,
    churn: Option<Churn>,
}

/// `laser ids`.
pub(crate) async fn ids(args: &IdsArgs) -> Result<()> {
    let config = Config::load_ids(&args.config.file, &args.config.settings)?;
    let source = args.source.as_deref();
    let sources = EmbeddingSource::find(&config, source, &args.embedded).await?;
    let output = Location::parse(config.or_output(args.output.as_deref(), "--output")?)?;
    let mut display = Display::new();
    for source in &sources {
        let parent = parent(&args.previous, &output, source).await?;
        let ids = Ids::of(&config, source, parent, &output);
        let (manifest, is_new) = ids.publish(&mut display).await?;
        print(&summary(&ids, &manifest, is_new)?)?;
    }
    Ok(())
}

/// Finds the codebook to begin with.
async fn parent(previous: &str, output: &Location, source: &EmbeddingSource) -> Result<Option<Parent>> {
    let (kind, date) = (source.kind, source.date);
    let newest = |root: Location| async move {
        let newest = data_set::newest::<IdSet>(&root, kind, date).await?;
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

impl<'a> Ids<'a> {
    /// Named, as a run is, by the date and by what the ids depend on.
    fn of(config: &'a Config, source: &'a EmbeddingSource, parent: Option<Parent>, output: &Location) -> Self {
        let parent_digest = parent.as_ref().map(|parent| &parent.digest);
        let identity = Digest::of_json(&(source.kind, &source.digest, &config.ids, parent_digest));
        let run = dated_name(source.date, &identity);
        let name = DataSet::KnowledgeIds.folder(source.kind, source.date, &run);
        let table = config.output.is_delta().then(|| Table::new(output, DataSet::KnowledgeIds, source.kind));
        Self { config, source, parent, run, folder: output.join(&name), table }
    }

    /// The manifest, and whether there was none before.
    async fn publish(&self, display: &mut Display) -> Result<(IdsManifest, bool)> {
        if let Some(manifest) = data_set::read_complete(&self.folder).await? {
            if let Some(table) = &self.table {
                table.adopt(self.source.date, &self.run).await?;
            }
            return Ok((manifest, false));
        }
        let (codebook, digest) = self.codebook(display).await?;
        let assigned = self.assign(&codebook, &digest, display).await?;
        let source = self.source;
        let created = codebook.info().created;
        let details = IdSet {
            source: Source { path: source.path.clone(), digest: source.digest.clone() },
            codebook: CodebookEntry { digest, info: codebook.info().clone() },
            distortion: assigned.distortion,
            churn: assigned.churn,
        };
        let manifest = Manifest::new(&self.run, (source.kind, source.date), created, assigned.parts, details);
        data_set::write_manifest(&self.folder, &manifest).await?;
        if let Some(table) = &self.table {
            table.publish(source.date, &self.run).await?;
        }
        data_set::complete(&self.folder).await?;
        Ok((manifest, true))
    }

    /// The run's codebook with its digest: that which is there, or a new one. Of two processes one creates it.
    async fn codebook(&self, display: &mut Display) -> Result<(Codebook, Digest)> {
        let file = self.folder.join(CODEBOOK);
        if !file.exists().await? {
            let bytes = self.fit(display).await?.to_bytes()?;
            if file.create(bytes.into()).await? == Created::Exists {
                tracing::info!("{}: another process was first", file.url());
            }
        }
        let bytes = file.read().await?;
        let codebook = Codebook::from_bytes(file.url(), &bytes)
            .with_context(|| format!("remove {} and run again: it is made anew", self.folder.url()))?;
        Ok((codebook, Digest::of(&bytes)))
    }

    async fn fit(&self, display: &mut Display) -> Result<Codebook> {
        let kind = self.source.kind;
        display.stage(&format!("reading {kind}s"));
        let sample = self.sample(display).await?;
        let sample: Vec<&[f32]> = sample.iter().map(|(_, e)| e.as_slice()).collect();
        display.stage(&format!("clustering {kind}s"));
        let input = FitInput {
            kind,
            sample: &sample,
            encoder: self.source.encoder.as_ref(),
            parent: self.parent.as_ref().map(|p| (&p.codebook, &p.digest)),
            now: Timestamp::from_microsecond(Timestamp::now().as_microsecond())?,
        };
        let mut progress = |p: FitProgress| {
            let message = format!("mean squared distance {:.4}", p.inertia);
            display.update(p.done, Some(p.total), &message);
        };
        Ok(fit(input, &self.config.ids, &mut progress)?)
    }

    /// A seeded sample of all embeddings, whatever their order.
    async fn sample(&self, display: &mut Display) -> Result<Sample<Vec<f32>>> {
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
            display.update(seen.len() as u64, None, "");
        }
        Ok(sample)
    }

    /// Writes the ids of all rows in the order of the source.
    async fn assign(&self, codebook: &Codebook, digest: &Digest, display: &mut Display) -> Result<Assigned> {
        let kind = self.source.kind;
        let mut churn = self.churn(codebook).await?;
        display.stage(&format!("ids of {kind}s"));
        let footer = serde_json::json!({
            "version": SCHEMA_VERSION, "run": self.run, "kind": kind, "writer": WRITER, "codebook": digest,
        });
        let mut writer =
            RowWriter { parts: PartWriter::new(&self.folder), folder: &self.folder, footer, rows: Vec::new() };
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
                let record = IdRecord { entity_id, knowledge_ids: coded.ids, event_timestamp, created_timestamp };
                writer.push(record).await?;
            }
            display.update(rows, None, "");
        }
        let parts = writer.finish().await?;
        display.finish_with(&format!("{rows} entities"));
        Ok(Assigned { parts, distortion: ratio(distortion, rows as f64), churn: churn.map(ChurnCounter::finish) })
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
    coded.collect()
}

/// Cuts rows into parts.
struct RowWriter<'a> {
    parts: PartWriter<'a>,
    folder: &'a Location,
    footer: Value,
    rows: Vec<IdRecord>,
}

impl RowWriter<'_> {
    async fn push(&mut self, record: IdRecord) -> Result<()> {
        self.rows.push(record);
        if self.rows.len() == PART_ROWS {
            self.flush().await?;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<Vec<PartEntry>> {
        if !self.rows.is_empty() {
            self.flush().await?;
        }
        Ok(self.parts.finish())
    }

    /// Creates the next part. One that an earlier process left must be the same.
    async fn flush(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.rows);
        let bytes = encode_ids(&self.parts.name(), &rows, &self.footer)?;
        let part = self.parts.place();
        ensure!(
            self.parts.create(bytes.clone()).await? == bytes,
            "{}: not what the source and the codebook lead to; remove {} and run again",
            part.url(),
            self.folder.url()
        );
        self.parts.add(rows.len() as u64, &bytes);
        Ok(())
    }
}

/// What came of a kind.
fn summary(ids: &Ids<'_>, manifest: &IdsManifest, is_new: bool) -> Result<String> {
    let info = &manifest.codebook.info;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut out = String::new();
    let state = if is_new { "" } else { ", complete already" };
    writeln!(out, "{}s, {}: {} entities{state}\n  {}", manifest.kind, manifest.date, manifest.rows, ids.folder.url())?;
    let last = info.inertia.last().copied().unwrap_or_default();
    let empty: u64 = info.empty.iter().sum();
    writeln!(
        out,
        "  codebook {}: {} x {} levels of {} ids, fitted on {} embeddings of {} values; {} of the variance explained, \
         {empty} ids unused",
        manifest.codebook.digest.short(),
        info.codebooks,
        info.levels,
        info.clusters,
        info.fitted_on,
        info.dimension,
        percent(1.0 - ratio(last, info.variance)),
    )?;
    if let Some(parent) = &info.parent {
        let moved = info.drift.iter().map(|drift| format!("{drift:.4}"));
        let fate = match info.kept {
            true => "its centroids are kept".to_owned(),
            false => format!("fitted again, centroids moved by {}", moved.collect::<Vec<_>>().join(", ")),
        };
        writeln!(out, "  begun with {}: {fate}", parent.short())?;
    }
    if let Some(churn) = &manifest.churn {
        let places = churn.changed_by_place.iter();
        let places = places.map(|changed| percent(ratio(*changed as f64, churn.common as f64)));
        writeln!(
            out,
            "  churn: {} of {} entities of both nights have another id (by place: {})",
            percent(churn.share()),
            churn.common,
            places.collect::<Vec<_>>().join(", ")
        )?;
    }
    Ok(out)
}
