//! Embeddings of texts that are there. Nothing is generated again.
//!
//! One pass in the order of the source. Each part is created once, under a name that its rows decide, so the same
//! command goes on wherever it was stopped: a part that exists is read back and checked, not encoded again. Memory is
//! that of one part; for a file that Laser did not write also its ids, to find one that occurs twice.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use laser_features::encoder::{Encoded, Encoder, EncoderFiles};
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::embedding_set::{EmbeddedEntity, EmbeddingPart, EmbeddingSet};
use laser_schema::knowledge::{SCHEMA_VERSION, WRITER};
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, Profiles, SUCCESS, Source};
use laser_schema::{Digest, EmbeddingSpec, Embeddings, EntityId, Kind, Progress};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter};
use laser_store::embedding_set::{decode_embeddings, encode_embeddings};
use laser_store::previous::{self, PreviousReader, PreviousSource, PreviousText};

use crate::config::Config;
use crate::derived::{Derived, Destination, ensure_complete};
use crate::encoder;

/// Rows of a part: 13 MB at 384 dimensions.
const PART_ROWS: usize = 8192;

/// Texts that are encoded at a time, enough for batches of like length; progress is shown after each.
const CHUNK_ROWS: usize = 512;

/// Texts of one kind and night.
#[derive(Debug)]
pub struct Texts {
    kind: Kind,
    date: Date,
    source: Source,
    /// The number of texts, if it is known.
    rows: Option<u64>,
    /// When the newest of them was generated; of a file, when it was written.
    created: Timestamp,
    /// Laser's own texts never have an entity twice.
    is_own: bool,
}

impl Texts {
    /// Finds the texts at `path` by kind: by default the newest night of the configuration's output.
    ///
    /// # Errors
    /// Naming what is missing and what to give instead.
    pub async fn find(config: &Config, path: Option<&str>, kind: Option<Kind>) -> Result<Vec<Self>> {
        let path = config.or_output(path, "SOURCE")?;
        let place = Location::parse(path)?;
        let of_kind = |texts: &Self| kind.is_none_or(|kind| kind == texts.kind);
        if matches!(place.extension().as_str(), "parquet" | "jsonl" | "ndjson") {
            let kind =
                kind.with_context(|| format!("{path}: whose texts are these? give --kind user or --kind item"))?;
            return Ok(vec![Self {
                kind,
                date: config.night(),
                source: Source { path: path.to_owned(), digest: place.fingerprint().await? },
                rows: None,
                created: place.modified().await?,
                is_own: false,
            }]);
        }
        if place.join(MANIFEST).exists().await? {
            let texts = Self::night(&place).await?;
            ensure!(of_kind(&texts), "{path}: holds {}s, not what --kind asks for", texts.kind);
            return Ok(vec![texts]);
        }
        let mut nights = Vec::new();
        for folder in previous::latest(&place, DataSet::Profiles, config.after_night()?).await? {
            nights.push(Self::night(&place.join(&folder)).await?);
        }
        nights.retain(of_kind);
        ensure!(
            !nights.is_empty(),
            "{path}: no complete night (no {SUCCESS} below profiles/); run one, or give a published folder, a .parquet \
             or a .jsonl"
        );
        Ok(nights)
    }

    async fn night(folder: &Location) -> Result<Self> {
        let file = folder.join(MANIFEST);
        let bytes = file.read().await?;
        let manifest = data_set::parse::<Profiles>(&file, &bytes)?;
        ensure_complete(folder).await?;
        Ok(Self {
            kind: manifest.kind,
            date: manifest.date,
            source: Source { path: folder.url().to_owned(), digest: Digest::of(&bytes) },
            rows: Some(manifest.rows),
            created: manifest.created,
            is_own: true,
        })
    }

    /// What is wrong if there are none.
    fn nothing(&self) -> String {
        format!("{}: no texts; there is nothing to encode", self.source.path)
    }
}

/// Writes embeddings of texts; the encoder is loaded when the first text needs it.
#[derive(Debug)]
pub struct Encoding<'a> {
    config: &'a Config,
    output: Location,
    files: Arc<EncoderFiles>,
    spec: EmbeddingSpec,
    encoder: Option<Arc<Encoder>>,
}

impl<'a> Encoding<'a> {
    /// Writes below `output`, by default the configuration's.
    ///
    /// # Errors
    /// Without an output or an encoder.
    pub async fn open(config: &'a Config, output: Option<&str>) -> Result<Self> {
        let output = Location::parse(config.or_output(output, "--output")?)?;
        let files = encoder::open(config).await?.context("[encoder]: not set")?;
        Ok(Self { config, output, spec: encoder::spec(&files), files, encoder: None })
    }

    /// Writes what is missing of the embeddings of these texts.
    ///
    /// # Errors
    /// Naming the source, the part or the store.
    pub async fn encode(&mut self, texts: &Texts, progress: &mut dyn Progress) -> Result<Derived<EmbeddingSet>> {
        let identity = Digest::of_json(&(texts.kind, &texts.source.digest, &self.spec));
        let night = (texts.kind, texts.date);
        let destination = Destination::new(self.config, &self.output, DataSet::Embeddings, night, &identity);
        if let Some(found) = destination.find().await? {
            return Ok(found);
        }
        ensure!(texts.rows != Some(0), "{}", texts.nothing());
        destination.make(self.publish(texts, &destination, progress)).await
    }

    async fn publish(
        &mut self,
        texts: &Texts,
        destination: &Destination,
        progress: &mut dyn Progress,
    ) -> Result<Derived<EmbeddingSet>> {
        progress.stage(&format!("encoding {}s", texts.kind));
        let source = PreviousSource { path: texts.source.path.clone(), kind: Some(texts.kind), id_type: None };
        let mut reader = PreviousReader::open(&[source], DataSet::Profiles, Date::MAX).await?;
        let parts = PartWriter::new(&destination.folder);
        let mut writer =
            Writer { encoding: self, texts, run: &destination.run, seen: HashSet::new(), parts, truncated: 0 };
        let mut waiting = Vec::new();
        while let Some(batch) = reader.next_batch().await? {
            waiting.extend(batch);
            while waiting.len() >= PART_ROWS {
                let rest = waiting.split_off(PART_ROWS);
                writer.part(std::mem::replace(&mut waiting, rest), progress).await?;
            }
        }
        if !waiting.is_empty() {
            writer.part(waiting, progress).await?;
        }
        let (rows, parts, truncated) = (writer.parts.rows(), writer.parts.finish(), writer.truncated);
        ensure!(rows > 0, "{}", texts.nothing());
        let embedding = EmbeddingInfo::new(self.spec.clone(), truncated);
        let details = EmbeddingSet { source: texts.source.clone(), embedding };
        let published = destination.publish(texts.created, parts, details).await?;
        progress.finish_with(&format!("{rows} texts"));
        Ok(published)
    }

    async fn encoder(&mut self) -> Result<Arc<Encoder>> {
        let encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => encoder::load(self.files.clone()).await?,
        };
        Ok(self.encoder.insert(encoder).clone())
    }
}

/// Turns texts into parts.
struct Writer<'a, 'c> {
    encoding: &'a mut Encoding<'c>,
    texts: &'a Texts,
    run: &'a str,
    /// Ids of a source that may have one twice.
    seen: HashSet<EntityId>,
    parts: PartWriter<'a>,
    truncated: u64,
}

impl Writer<'_, '_> {
    /// Makes sure that the next part is there.
    async fn part(&mut self, texts: Vec<PreviousText>, progress: &mut dyn Progress) -> Result<()> {
        let (name, place) = (self.parts.name(), self.parts.place());
        let rows = self.entities(&texts)?;
        // What is committed is what is there, whoever wrote it.
        let bytes = match place.read_optional().await? {
            Some(bytes) => bytes,
            None => {
                let texts = texts.into_iter().map(|text| text.text).collect();
                let encoded = self.encode(texts, progress).await?;
                self.parts.create(self.bytes(&name, &rows, &encoded)?).await?
            }
        };
        let anew = || format!("remove {} and run again: it is made anew", place.url());
        let (found, part) = decode_embeddings(&name, bytes.clone()).with_context(anew)?;
        if found != rows || part.embedding.spec != self.encoding.spec {
            bail!("{}: not of these texts; {}", place.url(), anew());
        }
        self.truncated += part.embedding.truncated;
        self.parts.add(rows.len() as u64, &bytes);
        progress.update(self.parts.rows(), self.texts.rows, "texts");
        Ok(())
    }

    fn entities(&mut self, texts: &[PreviousText]) -> Result<Vec<EmbeddedEntity>> {
        let Texts { kind, date, source, is_own, .. } = self.texts;
        let night = date.to_zoned(TimeZone::UTC)?.timestamp();
        let mut entities = Vec::with_capacity(texts.len());
        for text in texts {
            ensure!(
                *is_own || self.seen.insert(text.id.clone()),
                "{}: {kind} {} is there twice; an entity has one text",
                source.path,
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

    async fn encode(&mut self, mut texts: Vec<String>, progress: &mut dyn Progress) -> Result<Encoded> {
        let encoder = self.encoding.encoder().await?;
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
            progress.update(done, self.texts.rows, "texts");
        }
        let embeddings = Embeddings::from_values(dimensions, values);
        Ok(Encoded { embeddings: embeddings.context("the encoder gave part of an embedding")?, truncated })
    }

    fn bytes(&self, name: &str, rows: &[EmbeddedEntity], encoded: &Encoded) -> Result<Bytes> {
        let part = EmbeddingPart {
            version: SCHEMA_VERSION,
            run: self.run.to_owned(),
            kind: self.texts.kind,
            writer: WRITER.to_owned(),
            embedding: EmbeddingInfo::new(self.encoding.spec.clone(), encoded.truncated),
        };
        Ok(encode_embeddings(name, rows, &encoded.embeddings, &part)?)
    }
}
