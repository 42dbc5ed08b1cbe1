//! Knowledge as the configuration names it, brought to the users and items of the interactions.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;
use laser_schema::layout::DataSet;
use laser_schema::manifest::{Details, Profiles, SUCCESS};
use laser_schema::{EntityId, Kind};
use laser_schema::{embedding::EmbeddingSource, embedding_set::EmbeddingSet, ids::IdSet};
use laser_store::embeddings::{EmbeddingFiles, EmbeddingReader};
use laser_store::previous::{PreviousReader, PreviousSource};
use laser_store::{Location, data_set, rows::RowReader, table::Select};
use serde_json::Value;

use super::{IdsSource, KnowledgeConfig};
use crate::ctr::{Bags, Codes, Feature, Variant, Vectors};

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
    /// Words of texts.
    Words,
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
            Self::Words => "words",
            Self::Embedding => "embedding",
            Self::Ids => "ids",
        }
    }
}

/// The variants of one origin: one for each of its forms.
pub(super) async fn variants(config: &KnowledgeConfig, entities: &Entities) -> Result<Vec<(Form, Variant)>> {
    let mut variants = Vec::new();
    for form in [Form::Words, Form::Embedding, Form::Ids] {
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
    let (texts, embeddings, ids) = match kind {
        Kind::User => (&config.user_texts, &config.user_embeddings, &config.user_ids),
        Kind::Item => (&config.item_texts, &config.item_embeddings, &config.item_ids),
    };
    Ok(match (form, texts, embeddings, ids) {
        (Form::Words, Some(path), _, _) => {
            let key = || format!("[[eval.knowledge]] {:?}: {kind}_texts", config.name);
            Some(bags(path, kind, places).await.with_context(key)?)
        }
        (Form::Embedding, _, Some(source), _) => Some(vectors(source, kind, places).await?),
        (Form::Ids, _, _, Some(source)) => Some(codes(source, kind, places).await?),
        _ => None,
    })
}

async fn bags(path: &str, kind: Kind, places: &Places) -> Result<Feature> {
    let mut found = Found::new(path, kind, places);
    let source = PreviousSource { path: path.to_owned(), kind: Some(kind), id_type: None };
    let mut reader = PreviousReader::open(&[source], DataSet::Profiles, Date::MAX).await?;
    while let Some(batch) = reader.next_batch().await? {
        for text in batch {
            found.insert(&text.id.to_string(), || Ok(text.text))?;
        }
    }
    let bags = Feature::Bags(Bags::of_texts(&found.rows()?).into());
    ensure!(bags.known() > 0, "{path}: no word is in three texts; give texts of more {kind}s");
    Ok(bags)
}

async fn vectors(source: &EmbeddingSource, kind: Kind, places: &Places) -> Result<Feature> {
    let mut source = source.clone();
    if let EmbeddingSource::Table { table, .. } = &mut source {
        let place = Location::parse(table)?;
        let newest = match newest::<EmbeddingSet>(&place, DataSet::Embeddings, kind).await? {
            None => newest::<Profiles>(&place, DataSet::Profiles, kind).await?,
            found => found,
        };
        if let Some(newest) = newest {
            newest.url().clone_into(table);
        }
    }
    let name = match &source {
        EmbeddingSource::Npy { npy, .. } => npy,
        EmbeddingSource::Table { table, .. } => table,
    };
    let (mut dimension, mut found) = (0, Found::new(name, kind, places));
    let mut reader = EmbeddingReader::open(EmbeddingFiles::find(&source, kind).await?).await?;
    while let Some(batch) = reader.next_batch().await? {
        dimension = batch.dimension;
        for (id, vector) in batch.iter() {
            found.insert(&id.to_string(), || Ok(vector.to_vec()))?;
        }
    }
    Ok(Feature::Vectors(Vectors::new(dimension, &found.rows()?)))
}

async fn codes(source: &IdsSource, kind: Kind, places: &Places) -> Result<Feature> {
    let IdsSource { table, id, ids } = source;
    let mut found = Found::new(table, kind, places);
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
                let error = |column: &String, reason| reader.error(row, format!("column {column:?} {reason}"));
                let entity = text_of(values.remove(id)).map_err(|reason| error(id, reason))?;
                found.insert(&entity, || Ok(list_of(values.remove(ids)).map_err(|reason| error(ids, reason))?))?;
            }
        }
    }
    let codes = Codes::new(&found.rows()?).map_err(|error| {
        let entity = &places.ids[error.entity];
        anyhow::anyhow!(error).context(format!("{table}: {kind} {entity}"))
    })?;
    Ok(Feature::Codes(codes))
}

/// What a table says about the users or items of the interactions.
struct Found<'a, T> {
    table: &'a str,
    kind: Kind,
    places: &'a Places,
    rows: Vec<Option<T>>,
}

impl<'a, T> Found<'a, T> {
    fn new(table: &'a str, kind: Kind, places: &'a Places) -> Self {
        Self { table, kind, places, rows: places.ids.iter().map(|_| None).collect() }
    }

    /// Takes a row, if it is of an entity that has interactions.
    fn insert(&mut self, id: &str, value: impl FnOnce() -> Result<T>) -> Result<()> {
        let Some(place) = self.places.find(id) else {
            return Ok(());
        };
        let Self { table, kind, rows, .. } = self;
        ensure!(rows[place].is_none(), "{table}: {kind} {id} is there twice; remove one of the two");
        rows[place] = Some(value()?);
        Ok(())
    }

    fn rows(self) -> Result<Vec<Option<T>>> {
        let Self { table, kind, rows, .. } = self;
        ensure!(
            rows.iter().any(Option::is_some),
            "{table}: none of its ids is a {kind} of [interactions]; are these the ids of the same data set?"
        );
        Ok(rows)
    }
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

/// The newest data set of an output; none of what is no output: a file or a published folder.
async fn newest<T: Details>(place: &Location, data_set: DataSet, kind: Kind) -> Result<Option<Location>> {
    if !place.extension().is_empty() || place.join(SUCCESS).exists().await? {
        return Ok(None);
    }
    let newest = data_set::newest::<T>(place, data_set, kind, Date::MAX).await?;
    Ok(newest.map(|newest| place.join(&newest.folder)))
}

/// A table of knowledge ids as it is, or the parts of a published folder, or of the newest one of an output.
async fn parts(table: &str, kind: Kind) -> Result<Vec<String>> {
    let location = Location::parse(table)?;
    if !location.extension().is_empty() {
        return Ok(vec![table.to_owned()]);
    }
    let location = newest::<IdSet>(&location, DataSet::KnowledgeIds, kind).await?.unwrap_or(location);
    let parts = data_set::parts(&location).await?.with_context(|| {
        format!(
            "{table}: neither a table (.parquet, .csv, .jsonl), nor a published folder of knowledge ids (with a \
             _SUCCESS), such as OUTPUT/knowledge_ids/kind=user/dt=DATE/run=RUN, nor an OUTPUT that has one"
        )
    })?;
    Ok(parts.iter().map(|part| part.url().to_owned()).collect())
}
