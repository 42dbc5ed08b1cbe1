//! Knowledge as the configuration names it, brought to the users and items of the interactions.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use jiff::civil::Date;
use laser_schema::embedding::EmbeddingSource;
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::ids::IdSet;
use laser_schema::manifest::{Details, SUCCESS};
use laser_schema::{EntityId, Kind};
use laser_store::Location;
use laser_store::data_set;
use laser_store::embeddings::{EmbeddingFiles, EmbeddingReader};
use laser_store::rows::RowReader;
use laser_store::table::Select;
use serde_json::Value;

use super::{IdsSource, KnowledgeConfig};
use crate::ctr::{Codes, Feature, Variant, Vectors};

/// Where users or items are, by their ids as text, since tables may keep them in different types.
pub(super) struct Places {
    ids: Vec<String>,
    places: HashMap<String, usize>,
}

impl Places {
    pub(super) fn new(ids: &[EntityId]) -> Self {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let places = ids.iter().cloned().zip(0..).collect();
        Self { ids, places }
    }

    pub(super) fn find(&self, id: &str) -> Option<usize> {
        self.places.get(id).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }
}

/// The users and the items of the interactions, by kind.
pub(super) type Entities = [Places; 2];

/// How knowledge is given to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Vectors of texts.
    Embedding,
    /// Knowledge ids.
    Ids,
}

/// The variants that are compared.
pub(super) struct Compared {
    pub(super) variants: Vec<Variant>,
    /// By variant: the texts that it consists of, if it does.
    pub(super) origins: Vec<Option<Origin>>,
    /// The variant of the attributes alone.
    pub(super) attributes: Option<usize>,
}

/// Texts in one form.
pub(super) struct Origin {
    pub(super) name: String,
    pub(super) form: Form,
}

impl Form {
    /// As reports name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Ids => "ids",
        }
    }
}

/// The variants of one origin: as embeddings, as ids, or both.
pub(super) async fn variants(config: &KnowledgeConfig, entities: &Entities) -> Result<Vec<(Form, Variant)>> {
    let mut variants = Vec::new();
    for form in [Form::Embedding, Form::Ids] {
        let mut variant = Variant { name: format!("{}, {}", config.name, form.as_str()), ..Variant::default() };
        for kind in Kind::ALL {
            let feature = feature(config, form, kind, &entities[kind as usize]).await?;
            variant.features[kind as usize].extend(feature.map(Arc::new));
        }
        if variant.features.iter().any(|features| !features.is_empty()) {
            variants.push((form, variant));
        }
    }
    Ok(variants)
}

/// A kind's knowledge in this form, if the configuration names it.
async fn feature(config: &KnowledgeConfig, form: Form, kind: Kind, places: &Places) -> Result<Option<Feature>> {
    let (embeddings, ids) = match kind {
        Kind::User => (&config.user_embeddings, &config.user_ids),
        Kind::Item => (&config.item_embeddings, &config.item_ids),
    };
    Ok(match (form, embeddings, ids) {
        (Form::Embedding, Some(source), _) => Some(vectors(source, kind, places).await?),
        (Form::Ids, _, Some(source)) => Some(codes(source, kind, places).await?),
        _ => None,
    })
}

async fn vectors(source: &EmbeddingSource, kind: Kind, places: &Places) -> Result<Feature> {
    let mut rows: Vec<Option<Vec<f32>>> = vec![None; places.ids.len()];
    let (mut dimension, mut twice) = (0, None);
    let mut source = source.clone();
    if let EmbeddingSource::Table { table, .. } = &mut source
        && let Some(newest) = newest::<EmbeddingSet>(&Location::parse(table)?, kind).await?
    {
        newest.url().clone_into(table);
    }
    let mut reader = EmbeddingReader::open(EmbeddingFiles::find(&source, kind).await?).await?;
    while let Some(batch) = reader.next_batch().await? {
        dimension = batch.dimension;
        for (id, vector) in batch.iter() {
            let id = id.to_string();
            if let Some(place) = places.find(&id)
                && rows[place].replace(vector.to_vec()).is_some()
            {
                twice = Some(id);
            }
        }
    }
    let name = match &source {
        EmbeddingSource::Npy { npy, .. } => npy,
        EmbeddingSource::Table { table, .. } => table,
    };
    check_rows(name, kind, &rows, twice)?;
    Ok(Feature::Vectors(Vectors::new(dimension, &rows)))
}

async fn codes(source: &IdsSource, kind: Kind, places: &Places) -> Result<Feature> {
    let IdsSource { table, id, ids } = source;
    let mut rows: Vec<Option<Vec<i64>>> = vec![None; places.ids.len()];
    let mut twice = None;
    for part in parts(table, kind).await? {
        let mut reader = RowReader::open(&part, Select::Only(&[id, ids])).await?;
        if let Some(available) = reader.columns()? {
            for (key, column) in [("id", id), ("ids", ids)] {
                ensure!(
                    available.contains(column),
                    "{part}: no column {column:?}; it has {}. Set {key} of [[eval.knowledge]] {kind}_ids to the right \
                     name",
                    available.join(", ")
                );
            }
        }
        while let Some(batch) = reader.next_batch().await? {
            for (row, mut values) in batch {
                let found = text_of(values.remove(id));
                let found = found.map_err(|reason| reader.error(row, format!("column {id:?} {reason}")))?;
                let Some(place) = places.find(&found) else {
                    continue;
                };
                let list = list_of(values.remove(ids));
                let list = list.map_err(|reason| reader.error(row, format!("column {ids:?} {reason}")))?;
                if rows[place].replace(list).is_some() {
                    twice = Some(found);
                }
            }
        }
    }
    check_rows(table, kind, &rows, twice)?;
    let codes = Codes::new(&rows).map_err(|error| {
        let entity = &places.ids[error.entity];
        anyhow::anyhow!(error).context(format!("{table}: {kind} {entity}"))
    })?;
    Ok(Feature::Codes(codes))
}

fn text_of(value: Option<Value>) -> Result<String, String> {
    match value {
        Some(Value::String(text)) if !text.is_empty() => Ok(text),
        Some(Value::Number(number)) if number.is_i64() => Ok(number.to_string()),
        other => Err(format!("holds {}; an id is a string or int64", other.unwrap_or_default())),
    }
}

fn list_of(value: Option<Value>) -> Result<Vec<i64>, String> {
    let value = value.unwrap_or_default();
    let list = value.as_array().filter(|list| !list.is_empty());
    let list = list.and_then(|list| list.iter().map(Value::as_i64).collect());
    list.ok_or_else(|| format!("holds {value}; knowledge ids are a list of int64"))
}

fn check_rows<T>(name: &str, kind: Kind, rows: &[Option<T>], twice: Option<String>) -> Result<()> {
    if let Some(id) = twice {
        bail!("{name}: {kind} {id} is there twice; remove one of the two");
    }
    ensure!(
        rows.iter().any(Option::is_some),
        "{name}: none of its ids is a {kind} of [interactions]; are these the ids of the same data set?"
    );
    Ok(())
}

/// The newest data set of an output; none of what is no output: a file or a published folder.
async fn newest<T: Details>(place: &Location, kind: Kind) -> Result<Option<Location>> {
    if !place.extension().is_empty() || place.join(SUCCESS).exists().await? {
        return Ok(None);
    }
    let newest = data_set::newest::<T>(place, kind, Date::MAX).await?;
    Ok(newest.map(|newest| place.join(&newest.folder)))
}

/// A table of knowledge ids as it is, or the parts of a published folder, or of the newest one of an output.
async fn parts(table: &str, kind: Kind) -> Result<Vec<String>> {
    let location = Location::parse(table)?;
    if !location.extension().is_empty() {
        return Ok(vec![table.to_owned()]);
    }
    let location = newest::<IdSet>(&location, kind).await?.unwrap_or(location);
    let parts = data_set::parts(&location).await?.with_context(|| {
        format!(
            "{table}: neither a table (.parquet, .csv, .jsonl), nor a published folder of knowledge ids (with a \
             _SUCCESS), such as OUTPUT/knowledge_ids/kind=user/dt=DATE/run=RUN, nor an OUTPUT that has one"
        )
    })?;
    Ok(parts.iter().map(|part| part.url().to_owned()).collect())
}
