//! Embeddings that a command is given: a published night, a table, or a matrix with a list of ids.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use jiff::civil::Date;
use laser_night::Config;
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::entity::IdType;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, Manifest, Profiles, SUCCESS};
use laser_schema::{Digest, Kind};
use laser_store::embeddings::{EmbeddingColumns, EmbeddingFiles, EmbeddingReader, NpyFiles};
use laser_store::{Location, data_set};
use serde::Deserialize;
use serde_json::Value;

/// How embeddings are read that Laser did not write.
#[derive(Debug, Args)]
pub(crate) struct Embedded {
    /// Only this kind; for a .parquet or .npy, whose embeddings these are.
    #[arg(long, value_parser = kind, value_name = "user|item")]
    kind: Option<Kind>,
    /// The entities of the rows of an .npy, an id a line.
    #[arg(long, value_name = "FILE")]
    ids: Option<String>,
    /// Rows of an .npy before the first entity's.
    #[arg(long, default_value_t = 0, requires = "ids")]
    skip_rows: usize,
    /// The type of the ids in --ids.
    #[arg(long, value_parser = id_type, default_value = "string", requires = "ids", value_name = "string|int64")]
    id_type: IdType,
}

pub(crate) fn kind(text: &str) -> Result<Kind, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "expected user or item".to_owned())
}

fn id_type(text: &str) -> Result<IdType, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "expected string or int64".to_owned())
}

/// Embeddings of one kind and night.
#[derive(Debug)]
pub(crate) struct EmbeddingSource {
    pub(crate) kind: Kind,
    pub(crate) date: Date,
    /// As in messages.
    pub(crate) path: String,
    /// Of what it holds.
    pub(crate) digest: Digest,
    /// Of the encoder, where the source tells.
    pub(crate) encoder: Option<Digest>,
    files: EmbeddingFiles,
}

/// The details of a manifest of texts or of embeddings, as far as they are needed.
#[derive(Deserialize)]
struct Details {
    embedding: Option<EmbeddingInfo>,
}

impl EmbeddingSource {
    /// What `path` holds, by kind: by default the newest night of the configuration's output, not after `[run] date`.
    ///
    /// # Errors
    /// Naming what is missing and what to give instead.
    pub(crate) async fn find(config: &Config, path: Option<&str>, embedded: &Embedded) -> Result<Vec<Self>> {
        let path = config.or_output(path, "SOURCE")?;
        let place = Location::parse(path)?;
        let is_npy = place.extension() == "npy";
        ensure!(is_npy || embedded.ids.is_none(), "{path}: --ids is for an .npy; other sources have ids of their own");
        let date = config.night();
        match place.extension().as_str() {
            "npy" => Ok(vec![Self::npy(&place, date, embedded).await?]),
            "parquet" => Ok(vec![Self::table(place, date, embedded).await?]),
            _ if place.join(MANIFEST).exists().await? => {
                let night = Self::night(&place).await?;
                ensure!(
                    embedded.kind.is_none_or(|kind| kind == night.kind),
                    "{path}: holds {}s, not what --kind asks for",
                    night.kind
                );
                Ok(vec![night])
            }
            _ => Self::newest_nights(&place, config, embedded).await,
        }
    }

    /// The newest complete night of each kind: of its texts or, where `laser encode` has made them, of its embeddings.
    async fn newest_nights(root: &Location, config: &Config, embedded: &Embedded) -> Result<Vec<Self>> {
        let before = config.after_night()?;
        let mut nights = Vec::new();
        for kind in Kind::ALL {
            if embedded.kind.is_some_and(|asked| asked != kind) {
                continue;
            }
            let texts = data_set::newest::<Profiles>(root, kind, before).await?;
            let texts = texts.map(|found| (found.manifest.date, found.folder));
            let embeddings = data_set::newest::<EmbeddingSet>(root, kind, before).await?;
            let embeddings = embeddings.map(|found| (found.manifest.date, found.folder));
            let newest = embeddings.filter(|e| texts.as_ref().is_none_or(|t| t.0 <= e.0));
            if let Some((_, folder)) = newest.or(texts) {
                nights.push(Self::night(&root.join(&folder)).await?);
            }
        }
        ensure!(
            !nights.is_empty(),
            "{}: no complete night (no {SUCCESS} below {}/ or {}/); run one, or give a published folder, a .parquet \
             or an .npy",
            root.url(),
            DataSet::Profiles,
            DataSet::Embeddings
        );
        Ok(nights)
    }

    async fn night(folder: &Location) -> Result<Self> {
        let file = folder.join(MANIFEST);
        let bytes = file.read().await?;
        let night: Manifest<Details> = data_set::parse_any(&file, &bytes)?;
        ensure_complete(folder).await?;
        let embedding = night.details.embedding.with_context(|| {
            format!(
                "{}: its texts have no embeddings; run `laser encode` on it first, and set [encoder] for nights to \
                 come",
                folder.url()
            )
        })?;
        let tables = night.parts.iter().map(|part| folder.join(&part.name));
        Ok(Self {
            kind: night.kind,
            date: night.date,
            path: folder.url().to_owned(),
            digest: Digest::of(&bytes),
            encoder: Some(embedding.encoder_digest),
            files: EmbeddingFiles::Tables(tables.collect(), EmbeddingColumns::default()),
        })
    }

    /// A file of others than Laser: of its own, folders tell kind, night and encoder.
    async fn table(place: Location, date: Date, embedded: &Embedded) -> Result<Self> {
        Ok(Self {
            kind: embedded.kind.with_context(|| needs_kind(&place))?,
            date,
            path: place.url().to_owned(),
            digest: place.fingerprint().await?,
            encoder: None,
            files: EmbeddingFiles::Tables(vec![place], EmbeddingColumns::default()),
        })
    }

    async fn npy(place: &Location, date: Date, embedded: &Embedded) -> Result<Self> {
        let path = place.url().to_owned();
        let Some(ids) = embedded.ids.clone() else {
            bail!("{path}: which entities are its rows? give --ids FILE, an id a line");
        };
        let kind = embedded.kind.with_context(|| needs_kind(place))?;
        let (skip_rows, id_type) = (embedded.skip_rows, embedded.id_type);
        let ids = Location::parse(&ids)?;
        let fingerprints = [place.fingerprint().await?, ids.fingerprint().await?];
        Ok(Self {
            kind,
            date,
            digest: Digest::of_json(&(fingerprints, skip_rows, id_type)),
            encoder: None,
            files: EmbeddingFiles::Npy(NpyFiles { npy: place.clone(), ids, skip_rows, id_type: Some(id_type) }),
            path,
        })
    }

    /// Begins to read it.
    ///
    /// # Errors
    /// Naming the file.
    pub(crate) async fn reader(&self) -> Result<EmbeddingReader> {
        Ok(EmbeddingReader::open(self.files.clone()).await?)
    }
}

/// Refuses the folder of a night that is still being made.
///
/// # Errors
/// If it has no `_SUCCESS`.
pub(crate) async fn ensure_complete(folder: &Location) -> Result<()> {
    ensure!(
        data_set::is_complete(folder).await?,
        "{}: no {SUCCESS}: the night is not complete; run it again first",
        folder.url()
    );
    Ok(())
}

fn needs_kind(place: &Location) -> String {
    let place = place.url();
    format!("{place}: whose embeddings are these? give --kind user or --kind item")
}
