//! Embeddings that a command is given: a published night, a table, or a matrix with a list of ids.

use anyhow::{Context, Result, bail, ensure};
use jiff::civil::Date;
use laser_schema::embedding::EmbeddingInfo;
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::entity::IdType;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{MANIFEST, Manifest, Profiles, SUCCESS};
use laser_schema::{Digest, Kind};
use laser_store::embeddings::{EmbeddingColumns, EmbeddingFiles, EmbeddingReader, NpyFiles};
use laser_store::{Location, data_set};
use serde::Deserialize;

use crate::config::Config;
use crate::derived::ensure_complete;

/// The entities of the rows of an `.npy`.
#[derive(Debug, Clone)]
pub struct IdList {
    /// The file, an id a line.
    pub file: String,
    /// Rows of the `.npy` before the first entity's.
    pub skip_rows: usize,
    /// The type of the ids.
    pub id_type: IdType,
}

/// Embeddings of one kind and night.
#[derive(Debug)]
pub struct EmbeddingSource {
    pub(crate) kind: Kind,
    pub(crate) date: Date,
    /// The place, for messages.
    pub(crate) path: String,
    /// Digest of the contents.
    pub(crate) digest: Digest,
    /// Digest of the encoder, where the source tells.
    pub(crate) encoder: Option<Digest>,
    files: EmbeddingFiles,
}

/// The details that manifests of texts and of embeddings share.
#[derive(Deserialize)]
struct Details {
    embedding: Option<EmbeddingInfo>,
}

impl EmbeddingSource {
    /// Finds the embeddings at `path` by kind: by default the newest night of the configuration's output, not after
    /// `[run] date`. Embeddings that Laser did not write need a `kind`, and an `.npy` its `ids`.
    ///
    /// # Errors
    /// Naming what is missing and what to give instead.
    pub async fn find(
        config: &Config,
        path: Option<&str>,
        kind: Option<Kind>,
        ids: Option<&IdList>,
    ) -> Result<Vec<Self>> {
        let path = config.or_output(path, "SOURCE")?;
        let place = Location::parse(path)?;
        let is_npy = place.extension() == "npy";
        ensure!(is_npy || ids.is_none(), "{path}: --ids is for an .npy; other sources have ids of their own");
        let date = config.night();
        match place.extension().as_str() {
            "npy" => Ok(vec![Self::npy(&place, date, kind, ids).await?]),
            "parquet" => Ok(vec![Self::table(place, date, kind).await?]),
            _ if place.join(MANIFEST).exists().await? => {
                let night = Self::night(&place).await?;
                ensure!(
                    kind.is_none_or(|kind| kind == night.kind),
                    "{path}: holds {}s, not what --kind asks for",
                    night.kind
                );
                Ok(vec![night])
            }
            _ => Self::newest_nights(&place, config, kind).await,
        }
    }

    /// The newest complete night of each kind: of its texts or, where `laser encode` has made them, of its embeddings.
    async fn newest_nights(root: &Location, config: &Config, asked: Option<Kind>) -> Result<Vec<Self>> {
        let before = config.after_night()?;
        let mut nights = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|kind| asked.is_none_or(|asked| asked == *kind)) {
            let texts = data_set::newest::<Profiles>(root, DataSet::Profiles, kind, before).await?;
            let texts = texts.map(|found| (found.manifest.date, found.folder));
            let embeddings = data_set::newest::<EmbeddingSet>(root, DataSet::Embeddings, kind, before).await?;
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

    /// A table that Laser did not write; of its own, folders tell kind, night and encoder.
    async fn table(place: Location, date: Date, kind: Option<Kind>) -> Result<Self> {
        Ok(Self {
            kind: kind.with_context(|| needs_kind(&place))?,
            date,
            path: place.url().to_owned(),
            digest: place.fingerprint().await?,
            encoder: None,
            files: EmbeddingFiles::Tables(vec![place], EmbeddingColumns::default()),
        })
    }

    async fn npy(place: &Location, date: Date, kind: Option<Kind>, ids: Option<&IdList>) -> Result<Self> {
        let path = place.url().to_owned();
        let Some(IdList { file, skip_rows, id_type }) = ids else {
            bail!("{path}: which entities are its rows? give --ids FILE, an id a line");
        };
        let kind = kind.with_context(|| needs_kind(place))?;
        let (skip_rows, id_type) = (*skip_rows, *id_type);
        let ids = Location::parse(file)?;
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

    /// Opens the files.
    ///
    /// # Errors
    /// Naming the file.
    pub(crate) async fn reader(&self) -> Result<EmbeddingReader> {
        Ok(EmbeddingReader::open(self.files.clone()).await?)
    }
}

fn needs_kind(place: &Location) -> String {
    let place = place.url();
    format!("{place}: whose embeddings are these? give --kind user or --kind item")
}
