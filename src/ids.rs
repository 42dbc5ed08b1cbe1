//! `laser ids`: knowledge ids of a night's embeddings, and the codebook they are of.
//!
//! Two passes: a seeded sample to fit the codebook on, then all rows to ids. The codebook is created once and is the
//! commit of the first pass; parts are a function of it and the source, created once each, so the same command goes on
//! wherever it was stopped. Memory is that of the sample and of one part, and 40 bytes an entity to find one that is
//! there twice.

use std::collections::HashSet;
use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use laser_delta::Table;
use laser_features::{ChurnCounter, Codebook, Coded, FitInput, FitProgress, fit};
use laser_schema::ids::{CODEBOOK, Churn, CodebookEntry, IDS_VERSION, IdRecord, IdsManifest, IdsPart, IdsSource};
use laser_schema::knowledge::{WRITER, ratio};
use laser_schema::layout::{KNOWLEDGE_IDS, dated_name, partition_of};
use laser_schema::manifest::{MANIFEST, SUCCESS};
use laser_schema::sample::{Sample, priority};
use laser_schema::{Digest, EntityId};
use laser_store::Location;
use laser_store::data_set::read_manifest;
use laser_store::embedding_table::EmbeddingBatch;
use laser_store::id_set::{ids_schema, newest_ids};
use laser_store::location::Created;
use laser_store::table::{self, TableReader};
use rayon::prelude::*;

use crate::ConfigArgs;
use crate::commands::print;
use crate::config::Config;
use crate::embedding_source::{Embedded, EmbeddingSource};
use crate::progress::Display;

/// Rows of a part: a few hundred kilobytes, so that a million entities are a handful of files.
const PART_ROWS: usize = 65_536;

/// The footer key of what a part is of.
const IDS_KEY: &str = "laser.ids";

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
}

/// What one pass over all rows leads to.
struct Assigned {
    parts: Vec<IdsPart>,
    rows: u64,
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
        let table = config.output.is_delta().then(|| Table::new(&output, KNOWLEDGE_IDS, source.kind));
        let (manifest, is_new) = ids.publish(table.as_ref(), &mut display).await?;
        print(&summary(&ids, &manifest, is_new)?)?;
    }
    Ok(())
}

/// Finds the codebook to begin with.
async fn parent(previous: &str, output: &Location, source: &EmbeddingSource) -> Result<Option<Parent>> {
    let (kind, date) = (source.kind, source.date);
    let newest = |root: Location| async move {
        let name = newest_ids(&root, kind, date).await?;
        anyhow::Ok(name.map(|name| (root.join(&name), name)))
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
        let name = partition_of(KNOWLEDGE_IDS, source.kind, source.date, &run);
        Self { config, source, parent, run, folder: output.join(&name) }
    }

    /// The manifest, and whether there was none before.
    async fn publish(&self, table: Option<&Table>, display: &mut Display) -> Result<(IdsManifest, bool)> {
        if self.folder.join(SUCCESS).exists().await?
            && let Some(manifest) = read_manifest::<IdsManifest>(&self.folder).await?
        {
            if let Some(table) = table {
                table.adopt(self.source.date, &self.run).await?;
            }
            return Ok((manifest, false));
        }
        let (codebook, digest) = self.codebook(display).await?;
        let assigned = self.assign(&codebook, &digest, display).await?;
        let source = self.source;
        let manifest = IdsManifest {
            version: IDS_VERSION,
            run: self.run.clone(),
            kind: source.kind,
            date: source.date,
            writer: WRITER.to_owned(),
            source: IdsSource { path: source.path.clone(), digest: source.digest.clone() },
            codebook: CodebookEntry { digest, info: codebook.info().clone() },
            distortion: assigned.distortion,
            churn: assigned.churn,
            rows: assigned.rows,
            parts: assigned.parts,
        };
        let json = serde_json::to_vec_pretty(&manifest)?;
        self.folder.join(MANIFEST).write(json.into()).await?;
        if let Some(table) = table {
            table.publish(source.date, &self.run).await?;
        }
        self.folder.join(SUCCESS).write(Vec::new().into()).await?;
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
        let mut reader = self.source.reader();
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
            "version": IDS_VERSION, "run": self.run, "kind": kind, "writer": WRITER, "codebook": digest,
        });
        let mut writer =
            PartWriter { folder: &self.folder, footer: footer.to_string(), rows: Vec::new(), parts: Vec::new() };
        let event_timestamp = self.source.date.to_zoned(TimeZone::UTC)?.timestamp();
        let created_timestamp = codebook.info().created;
        let (mut rows, mut distortion) = (0, 0.0);
        let mut reader = self.source.reader();
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
        Ok(Assigned { parts, rows, distortion: ratio(distortion, rows as f64), churn: churn.map(ChurnCounter::finish) })
    }

    /// The ids of the night before, ready to be compared with tonight's.
    async fn churn(&self, codebook: &Codebook) -> Result<Option<ChurnCounter>> {
        let night = self.parent.as_ref().and_then(|parent| parent.night.as_ref());
        let Some((name, folder)) = night else {
            return Ok(None);
        };
        let manifest = read_manifest::<IdsManifest>(folder).await?;
        let manifest = manifest
            .with_context(|| format!("{}: its {MANIFEST} cannot be read; take another --previous", folder.url()))?;
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
    let EmbeddingBatch { ids, values, dimension } = batch;
    let rows = ids.into_par_iter().zip(values.par_chunks_exact(dimension));
    let coded = rows.map(|(id, embedding)| {
        let coded = codebook.code(&id, embedding)?;
        Ok((id, coded))
    });
    coded.collect()
}

/// Cuts rows into parts.
struct PartWriter<'a> {
    folder: &'a Location,
    footer: String,
    rows: Vec<IdRecord>,
    parts: Vec<IdsPart>,
}

impl PartWriter<'_> {
    async fn push(&mut self, record: IdRecord) -> Result<()> {
        self.rows.push(record);
        if self.rows.len() == PART_ROWS {
            self.flush().await?;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<Vec<IdsPart>> {
        if !self.rows.is_empty() {
            self.flush().await?;
        }
        Ok(self.parts)
    }

    /// Creates the next part. One that an earlier process left must be the same.
    async fn flush(&mut self) -> Result<()> {
        let name = format!("part-{:05}.parquet", self.parts.len());
        let rows = std::mem::take(&mut self.rows);
        let id_type = rows[0].entity_id.id_type();
        let metadata = [(IDS_KEY, self.footer.clone())];
        let bytes = table::encode(&name, ids_schema(table::id_type(id_type)), &rows, &metadata)?;
        let digest = Digest::of(&bytes);
        let part = self.folder.join(&name);
        let size = bytes.len() as u64;
        if part.create(bytes).await? == Created::Exists && Digest::of(&part.read().await?) != digest {
            bail!(
                "{}: not what the source and the codebook lead to; remove {} and run again",
                part.url(),
                self.folder.url()
            );
        }
        self.parts.push(IdsPart { name, rows: rows.len() as u64, bytes: size, digest });
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
        "  codebook {}: {} x {} levels of {} ids, fitted on {} embeddings of {} values; {} of the variance explained, {empty} ids unused",
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
