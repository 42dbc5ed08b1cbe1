//! `laser encode`: embeddings of texts that are there. Nothing is generated again.
//!
//! One pass in the order of the source. Each part is created once, under a name that its rows decide, so the same
//! command goes on wherever it was stopped: what is there is read back and checked instead of encoded. Memory is that
//! of one part, and for a file of others than Laser's its ids, to find one that is there twice.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use laser_delta::Table;
use laser_features::encoder::{Encoded, Encoder, EncoderFiles};
use laser_night::{Config, Progress, encoder};
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::embedding_set::{EmbeddedEntity, EmbeddingManifest, EmbeddingPart, EmbeddingSet};
use laser_schema::knowledge::{SCHEMA_VERSION, WRITER};
use laser_schema::layout::{DataSet, dated_name};
use laser_schema::manifest::{MANIFEST, Manifest, Profiles, SUCCESS, Source};
use laser_schema::{Digest, EmbeddingSpec, Embeddings, EntityId, Kind};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter};
use laser_store::embedding_set::{decode_embeddings, encode_embeddings};
use laser_store::previous::{self, PreviousReader, PreviousSource, PreviousText};
use laser_terminal::{Display, print};

use crate::ConfigArgs;
use crate::embedding_source::{ensure_complete, kind};

/// Rows of a part: 13 MB at 384 dimensions.
const PART_ROWS: usize = 8192;

/// Texts that are encoded at a time, enough for batches of like length; the display moves after each.
const CHUNK_ROWS: usize = 512;

/// What `laser encode` is given.
#[derive(Debug, Args)]
pub(crate) struct EncodeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Texts: an output (its newest complete night is taken) or one published folder, or a .parquet or .jsonl with the
    /// columns id and text. By default the newest night of the configuration's output.
    source: Option<String>,
    /// Where the embeddings go: a folder or URL; by default the configuration's output.
    #[arg(short, long)]
    output: Option<String>,
    /// Only this kind; for a .parquet or .jsonl, whose texts these are.
    #[arg(long, value_parser = kind, value_name = "user|item")]
    kind: Option<Kind>,
    /// The type of the column, of fixed size or not: sets encoder.layout.
    #[arg(long, value_name = "fixed|list")]
    embedding_layout: Option<String>,
}

/// Texts of one kind and night.
struct Texts {
    kind: Kind,
    date: Date,
    source: Source,
    /// Where that is known.
    rows: Option<u64>,
    /// When the newest of them was generated; of a file, when it was written.
    created: Timestamp,
    /// Laser's own are known to have no entity twice.
    is_own: bool,
}

/// The embeddings of one kind and night, wherever they were left.
struct Embedding<'a> {
    texts: &'a Texts,
    files: &'a Arc<EncoderFiles>,
    spec: EmbeddingSpec,
    run: String,
    folder: Location,
    /// The Delta table that the embeddings enter, if there is to be one.
    table: Option<Table>,
}

/// `laser encode`.
pub(crate) async fn encode(mut args: EncodeArgs) -> Result<()> {
    let layout = args.embedding_layout.take();
    let settings = &mut args.config.settings;
    settings.extend(layout.map(|layout| format!("encoder.layout={layout}")));
    let config = Config::load_encoder(&args.config.file, settings)?;
    let texts = find(&config, args.source.as_deref(), args.kind).await?;
    let output = Location::parse(config.or_output(args.output.as_deref(), "--output")?)?;
    let files = encoder::open(&config).await?.context("[encoder]: not set")?;
    let mut display = Display::new();
    let mut loaded = None;
    for texts in &texts {
        let table = config.output.is_delta().then(|| Table::new(&output, DataSet::Embeddings, texts.kind));
        let embedding = Embedding::of(texts, &files, &output, table);
        let known = data_set::read_complete(&embedding.folder).await?;
        let is_new = known.is_none();
        let manifest = match known {
            Some(manifest) => {
                if let Some(table) = &embedding.table {
                    table.adopt(texts.date, &embedding.run).await?;
                }
                manifest
            }
            None => embedding.publish(&mut loaded, &mut display).await?,
        };
        let state = if is_new { "" } else { ", complete already" };
        let info = &manifest.embedding;
        print(&format!(
            "{}s, {}: {} embeddings of {} dimensions{state}; {} texts were cut off at {} tokens\n  {}\n",
            manifest.kind,
            manifest.date,
            manifest.rows,
            info.spec.encoder.dimensions,
            info.truncated,
            info.spec.encoder.max_tokens,
            embedding.folder.url()
        ))?;
    }
    Ok(())
}

/// What a path holds, by kind.
async fn find(config: &Config, path: Option<&str>, kind: Option<Kind>) -> Result<Vec<Texts>> {
    let path = config.or_output(path, "SOURCE")?;
    let place = Location::parse(path)?;
    let of_kind = |texts: &Texts| kind.is_none_or(|kind| kind == texts.kind);
    if matches!(place.extension().as_str(), "parquet" | "jsonl" | "ndjson") {
        let kind = kind.with_context(|| format!("{path}: whose texts are these? give --kind user or --kind item"))?;
        return Ok(vec![Texts {
            kind,
            date: config.night(),
            source: Source { path: path.to_owned(), digest: place.fingerprint().await? },
            rows: None,
            created: place.modified().await?,
            is_own: false,
        }]);
    }
    if place.join(MANIFEST).exists().await? {
        let texts = night(&place).await?;
        ensure!(of_kind(&texts), "{path}: holds {}s, not what --kind asks for", texts.kind);
        return Ok(vec![texts]);
    }
    let mut nights = Vec::new();
    for folder in previous::latest(&place, config.after_night()?).await? {
        nights.push(night(&place.join(&folder)).await?);
    }
    nights.retain(of_kind);
    ensure!(
        !nights.is_empty(),
        "{path}: no complete night (no {SUCCESS} below profiles/); run one, or give a published folder, a .parquet or \
         a .jsonl"
    );
    Ok(nights)
}

async fn night(folder: &Location) -> Result<Texts> {
    let file = folder.join(MANIFEST);
    let bytes = file.read().await?;
    let manifest = data_set::parse::<Profiles>(&file, &bytes)?;
    ensure_complete(folder).await?;
    Ok(Texts {
        kind: manifest.kind,
        date: manifest.date,
        source: Source { path: folder.url().to_owned(), digest: Digest::of(&bytes) },
        rows: Some(manifest.rows),
        created: manifest.created,
        is_own: true,
    })
}

impl<'a> Embedding<'a> {
    /// Named, as a run is, by the date and by what the embeddings depend on.
    fn of(texts: &'a Texts, files: &'a Arc<EncoderFiles>, output: &Location, table: Option<Table>) -> Self {
        let spec = encoder::spec(files);
        let identity = Digest::of_json(&(texts.kind, &texts.source.digest, &spec));
        let run = dated_name(texts.date, &identity);
        let folder = output.join(&DataSet::Embeddings.folder(texts.kind, texts.date, &run));
        Self { folder, texts, files, spec, run, table }
    }

    /// Writes what is missing. The encoder is loaded when the first text needs it.
    async fn publish(&self, encoder: &mut Option<Arc<Encoder>>, display: &mut Display) -> Result<EmbeddingManifest> {
        display.stage(&format!("encoding {}s", self.texts.kind));
        let source =
            PreviousSource { path: self.texts.source.path.clone(), kind: Some(self.texts.kind), id_type: None };
        let mut reader = PreviousReader::open(&[source], Date::MAX).await?;
        let parts = PartWriter::new(&self.folder);
        let mut writer = Writer { embedding: self, encoder, seen: HashSet::new(), parts, truncated: 0 };
        let mut waiting = Vec::new();
        while let Some(batch) = reader.next_batch().await? {
            waiting.extend(batch);
            while waiting.len() >= PART_ROWS {
                let rest = waiting.split_off(PART_ROWS);
                writer.part(std::mem::replace(&mut waiting, rest), display).await?;
            }
        }
        if !waiting.is_empty() {
            writer.part(waiting, display).await?;
        }
        let manifest = writer.manifest();
        ensure!(manifest.rows > 0, "{}: no texts; there is nothing to encode", self.texts.source.path);
        data_set::write_manifest(&self.folder, &manifest).await?;
        if let Some(table) = &self.table {
            table.publish(self.texts.date, &self.run).await?;
        }
        data_set::complete(&self.folder).await?;
        display.finish_with(&format!("{} texts", manifest.rows));
        Ok(manifest)
    }
}

/// Turns texts into parts.
struct Writer<'a> {
    embedding: &'a Embedding<'a>,
    encoder: &'a mut Option<Arc<Encoder>>,
    /// Ids of a source that may have one twice.
    seen: HashSet<EntityId>,
    parts: PartWriter<'a>,
    truncated: u64,
}

impl Writer<'_> {
    /// Makes sure that the next part is there.
    async fn part(&mut self, texts: Vec<PreviousText>, display: &mut Display) -> Result<()> {
        let (name, place) = (self.parts.name(), self.parts.place());
        let rows = self.entities(&texts)?;
        // What is committed is what is there, whoever wrote it.
        let bytes = match place.read_optional().await? {
            Some(bytes) => bytes,
            None => {
                let texts = texts.into_iter().map(|text| text.text).collect();
                let encoded = self.encode(texts, display).await?;
                self.parts.create(self.bytes(&name, &rows, &encoded)?).await?
            }
        };
        let anew = || format!("remove {} and run again: it is made anew", place.url());
        let (found, part) = decode_embeddings(&name, bytes.clone()).with_context(anew)?;
        if found != rows || part.embedding.spec != self.embedding.spec {
            bail!("{}: not of these texts; {}", place.url(), anew());
        }
        self.truncated += part.embedding.truncated;
        self.parts.add(rows.len() as u64, &bytes);
        display.update(self.parts.rows(), self.embedding.texts.rows, "texts");
        Ok(())
    }

    fn entities(&mut self, texts: &[PreviousText]) -> Result<Vec<EmbeddedEntity>> {
        let source = self.embedding.texts;
        let night = source.date.to_zoned(TimeZone::UTC)?.timestamp();
        let mut entities = Vec::with_capacity(texts.len());
        for text in texts {
            ensure!(
                source.is_own || self.seen.insert(text.id.clone()),
                "{}: {} {} is there twice; an entity has one text",
                source.source.path,
                source.kind,
                text.id
            );
            let record = text.record.as_ref();
            entities.push(EmbeddedEntity {
                entity_id: text.id.clone(),
                event_timestamp: record.map_or(night, |record| record.event_timestamp),
                created_timestamp: record.map(|record| record.created_timestamp),
            });
        }
        Ok(entities)
    }

    async fn encode(&mut self, mut texts: Vec<String>, display: &mut Display) -> Result<Encoded> {
        let encoder = match self.encoder {
            Some(encoder) => encoder.clone(),
            None => self.encoder.insert(encoder::load(self.embedding.files.clone()).await?).clone(),
        };
        let dimensions = encoder.info().dimensions;
        let (mut values, mut truncated, mut done) = (Vec::new(), 0, self.parts.rows());
        while !texts.is_empty() {
            let rest = texts.split_off(CHUNK_ROWS.min(texts.len()));
            let chunk = std::mem::replace(&mut texts, rest);
            let encoder = encoder.clone();
            done += chunk.len() as u64;
            let encoded = tokio::task::spawn_blocking(move || encoder.encode(&chunk)).await??;
            values.extend_from_slice(encoded.embeddings.values());
            truncated += encoded.truncated;
            display.update(done, self.embedding.texts.rows, "texts");
        }
        let embeddings = Embeddings::from_values(dimensions, values);
        Ok(Encoded { embeddings: embeddings.context("the encoder gave part of an embedding")?, truncated })
    }

    fn bytes(&self, name: &str, rows: &[EmbeddedEntity], encoded: &Encoded) -> Result<bytes::Bytes> {
        let embedding = self.embedding;
        let part = EmbeddingPart {
            version: SCHEMA_VERSION,
            run: embedding.run.clone(),
            kind: embedding.texts.kind,
            writer: WRITER.to_owned(),
            embedding: EmbeddingInfo::new(embedding.spec.clone(), encoded.truncated),
        };
        Ok(encode_embeddings(name, rows, &encoded.embeddings, &part)?)
    }

    fn manifest(self) -> EmbeddingManifest {
        let Embedding { texts, spec, run, .. } = self.embedding;
        let details =
            EmbeddingSet { source: texts.source.clone(), embedding: EmbeddingInfo::new(spec.clone(), self.truncated) };
        Manifest::new(run, (texts.kind, texts.date), texts.created, self.parts.finish(), details)
    }
}
