//! `laser encode`: embeddings of texts that are there. Nothing is generated again.
//!
//! One pass in the order of the source. Each part is created once, under a name that its rows decide, so the same
//! command goes on wherever it was stopped: what is there is read back and checked instead of encoded. Memory is that
//! of one part, and for a file of others than Laser's its ids, to find one that is there twice.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use laser_delta::Table;
use laser_features::encoder::{Encoded, Encoder, EncoderFiles};
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::embedding_set::{EMBEDDINGS_VERSION, EmbeddedEntity, EmbeddingManifest, EmbeddingPart, TextSource};
use laser_schema::knowledge::WRITER;
use laser_schema::layout::{EMBEDDINGS, dated_name, partition_of};
use laser_schema::manifest::{MANIFEST, Manifest, PartEntry, SUCCESS};
use laser_schema::{Digest, EmbeddingSpec, Embeddings, Kind};
use laser_store::Location;
use laser_store::data_set::read_manifest;
use laser_store::embedding_set::{decode_embeddings, encode_embeddings};
use laser_store::location::Created;
use laser_store::previous::{self, PreviousReader, PreviousSource, PreviousText};

use crate::ConfigArgs;
use crate::commands::print;
use crate::config::Config;
use crate::embedding_source::{ensure_complete, kind};
use crate::encoder;
use crate::progress::Display;

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
    source: TextSource,
    /// Where that is known.
    rows: Option<u64>,
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
        let embedding = Embedding::of(texts, &files, &output);
        let table = config.output.is_delta().then(|| Table::new(&output, EMBEDDINGS, texts.kind));
        let known = embedding.published().await?;
        let is_new = known.is_none();
        let manifest = match known {
            Some(manifest) => {
                if let Some(table) = &table {
                    table.adopt(texts.date, &embedding.run).await?;
                }
                manifest
            }
            None => embedding.publish(&mut loaded, table.as_ref(), &mut display).await?,
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
            source: TextSource { path: path.to_owned(), digest: place.fingerprint().await? },
            rows: None,
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
        "{path}: no complete night (no {SUCCESS} below profiles/); run one, or give a published folder, a .parquet or a .jsonl"
    );
    Ok(nights)
}

async fn night(folder: &Location) -> Result<Texts> {
    let file = folder.join(MANIFEST);
    let bytes = file.read().await?;
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .with_context(|| format!("{}: not the manifest of a night's texts", file.url()))?;
    ensure_complete(folder).await?;
    Ok(Texts {
        kind: manifest.kind,
        date: manifest.date,
        source: TextSource { path: folder.url().to_owned(), digest: Digest::of(&bytes) },
        rows: Some(manifest.rows),
        is_own: true,
    })
}

impl<'a> Embedding<'a> {
    /// Named, as a run is, by the date and by what the embeddings depend on.
    fn of(texts: &'a Texts, files: &'a Arc<EncoderFiles>, output: &Location) -> Self {
        let spec = encoder::spec(files);
        let identity = Digest::of_json(&(texts.kind, &texts.source.digest, &spec));
        let run = dated_name(texts.date, &identity);
        Self { folder: output.join(&partition_of(EMBEDDINGS, texts.kind, texts.date, &run)), texts, files, spec, run }
    }

    async fn published(&self) -> Result<Option<EmbeddingManifest>> {
        match self.folder.join(SUCCESS).exists().await? {
            true => Ok(read_manifest::<EmbeddingManifest>(&self.folder).await?),
            false => Ok(None),
        }
    }

    /// Writes what is missing. The encoder is loaded when the first text needs it.
    async fn publish(
        &self,
        encoder: &mut Option<Arc<Encoder>>,
        table: Option<&Table>,
        display: &mut Display,
    ) -> Result<EmbeddingManifest> {
        display.stage(&format!("encoding {}s", self.texts.kind));
        let source =
            PreviousSource { path: self.texts.source.path.clone(), kind: Some(self.texts.kind), id_type: None };
        let mut reader = PreviousReader::open(&[source], Date::MAX).await?;
        let mut writer =
            Writer { embedding: self, encoder, seen: HashSet::new(), parts: Vec::new(), rows: 0, truncated: 0 };
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
        let json = serde_json::to_vec_pretty(&manifest)?;
        self.folder.join(MANIFEST).write(json.into()).await?;
        if let Some(table) = table {
            table.publish(self.texts.date, &self.run).await?;
        }
        self.folder.join(SUCCESS).write(Vec::new().into()).await?;
        display.finish_with(&format!("{} texts", manifest.rows));
        Ok(manifest)
    }
}

/// Turns texts into parts.
struct Writer<'a> {
    embedding: &'a Embedding<'a>,
    encoder: &'a mut Option<Arc<Encoder>>,
    /// Ids of a source that may have one twice.
    seen: HashSet<laser_schema::EntityId>,
    parts: Vec<PartEntry>,
    rows: u64,
    truncated: u64,
}

impl Writer<'_> {
    /// Makes sure that the next part is there.
    async fn part(&mut self, texts: Vec<PreviousText>, display: &mut Display) -> Result<()> {
        let shard = u32::try_from(self.parts.len())?;
        let name = format!("part-{shard:05}.parquet");
        let rows = self.entities(&texts)?;
        let place = self.embedding.folder.join(&name);
        if !place.exists().await? {
            let texts = texts.into_iter().map(|text| text.text).collect();
            let encoded = self.encode(texts, display).await?;
            let bytes = self.bytes(&name, &rows, &encoded)?;
            if place.create(bytes).await? == Created::Exists {
                tracing::info!("{}: another process was first", place.url());
            }
        }
        // What is committed is what is there, whoever wrote it.
        let bytes = place.read().await?;
        let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
        let anew = || format!("remove {} and run again: it is made anew", place.url());
        let (found, part) = decode_embeddings(&name, bytes).with_context(anew)?;
        if found != rows || part.embedding.spec != self.embedding.spec {
            bail!("{}: not of these texts; {}", place.url(), anew());
        }
        self.rows += rows.len() as u64;
        self.truncated += part.embedding.truncated;
        self.parts.push(PartEntry { name, shard, rows: rows.len() as u64, bytes: size, digest });
        display.update(self.rows, self.embedding.texts.rows, "texts");
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
        let (mut values, mut truncated, mut done) = (Vec::new(), 0, self.rows);
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
            version: EMBEDDINGS_VERSION,
            run: embedding.run.clone(),
            kind: embedding.texts.kind,
            writer: WRITER.to_owned(),
            embedding: EmbeddingInfo::new(embedding.spec.clone(), encoded.truncated),
            rows_digest: Digest::of_json(&rows),
            embeddings_digest: encoded.embeddings.digest(),
        };
        Ok(encode_embeddings(name, rows, &encoded.embeddings, &part)?)
    }

    fn manifest(self) -> EmbeddingManifest {
        let Embedding { texts, spec, run, .. } = self.embedding;
        EmbeddingManifest {
            version: EMBEDDINGS_VERSION,
            run: run.clone(),
            kind: texts.kind,
            date: texts.date,
            writer: WRITER.to_owned(),
            source: texts.source.clone(),
            embedding: EmbeddingInfo::new(spec.clone(), self.truncated),
            rows: self.rows,
            parts: self.parts,
        }
    }
}
