//! The pool sets that hold, or may hold, texts of erased entities.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Result, bail};
use jiff::Timestamp;
use laser_model::ModelFiles;
use laser_pool_builder::{
    POOL_SET_FILE, POOLS_FOLDER, PoolRegistry, PoolSet, TextCounter, find_texts, purge_texts, read_pool_set,
    read_sources,
};
use laser_schema::erasure::{ErasedObject, ErasedPlace, Removed};
use laser_schema::layout::DataSet;
use laser_schema::{Digest, Kind};
use laser_store::id_list::IdList;
use laser_store::part::decode_part;
use laser_store::{Location, data_set};

use super::rewrite::parse_folder;

/// The texts of the entities, as pools hold them.
#[derive(Debug)]
pub(super) struct Texts {
    kind: Kind,
    tokenizer: Digest,
    /// By the folder of the night.
    nights: HashMap<String, TextCounter>,
}

impl Texts {
    /// Reads them from the parts that hold the entities.
    pub(super) async fn read(
        output: &Location,
        (kind, ids): (Kind, &IdList),
        places: &[ErasedPlace],
        model: &ModelFiles,
    ) -> Result<Self> {
        let (end, mut nights) = (model.end_of_text[0], HashMap::new());
        let is_of_texts = |place: &&ErasedPlace| {
            parse_folder(kind, &place.folder).is_some_and(|(data_set, ..)| data_set == DataSet::Profiles)
        };
        for place in places.iter().filter(is_of_texts) {
            let night: &mut TextCounter = nights.entry(place.folder.clone()).or_default();
            for object in place.objects.iter().filter(|object| object.name.ends_with(".parquet")) {
                let part = output.join(&place.folder).join(&object.name);
                for row in decode_part(part.url(), part.read().await?)?.0 {
                    if ids.contains(&row.entity_id) {
                        let text = model.tokenizer.encode(&row.text, false)?;
                        *night.entry(text.into_iter().take_while(|token| *token != end).collect()).or_default() += 1;
                    }
                }
            }
        }
        Ok(Self { kind, tokenizer: Digest::from_bytes(model.tokenizer.fingerprint()), nights })
    }

    /// Those that a set can have which was built from these nights.
    fn of(&self, sources: &BTreeSet<String>) -> TextCounter {
        let mut all = TextCounter::new();
        for (text, count) in sources.iter().filter_map(|source| self.nights.get(source)).flatten() {
            *all.entry(text.clone()).or_default() += count;
        }
        all
    }
}

/// Finds the sets that hold any of the texts, and those of which nobody can tell, which have to go.
///
/// # Errors
/// The store's, a damaged set, and that nobody can tell of the set in force.
pub(super) async fn survey(output: &Location, texts: &Texts) -> Result<(Vec<ErasedPlace>, Vec<Removed>)> {
    let registry = PoolRegistry::new(output);
    let in_force = registry.history().await?.pop().map(|promotion| promotion.choice.version);
    let (mut places, mut removed) = (Vec::new(), Vec::new());
    for version in registry.versions().await? {
        let folder = format!("{POOLS_FOLDER}/{version}");
        let dir = output.join(&folder);
        let set = read_pool_set(&dir).await?;
        if !set.pools.iter().any(|pool| pool.kind == texts.kind) {
            continue;
        }
        match sources(output, &dir, &set, texts).await? {
            Err(doubt) if in_force.as_ref() == Some(&version) => bail!(
                "{}: {doubt}, so nobody can tell whose texts it holds, and it is promoted; build and promote another \
                 set with `laser pools`, then erase again",
                dir.url()
            ),
            Err(doubt) => {
                let reason = format!("{doubt}, so nobody can tell whose texts it holds");
                removed.push(Removed { name: version, folders: vec![folder], reason });
            }
            Ok(sources) => {
                let found = find_texts(&dir, &set, texts.kind, &texts.of(&sources)).await?;
                let mut objects: Vec<ErasedObject> = found.into_iter().map(object).collect();
                if !objects.is_empty() {
                    objects.push(object((POOL_SET_FILE.to_owned(), 0)));
                    places.push(ErasedPlace { folder, objects });
                }
            }
        }
    }
    Ok((places, removed))
}

fn object((name, rows): (String, u64)) -> ErasedObject {
    ErasedObject { name, rows, before: None, after: None }
}

/// What a set was built from, or why the texts that it holds cannot be told from what is there.
async fn sources(
    output: &Location,
    dir: &Location,
    set: &PoolSet,
    texts: &Texts,
) -> Result<Result<BTreeSet<String>, String>> {
    if set.tokenizer != texts.tokenizer {
        return Ok(Err("it was built with another tokenizer than the model's".to_owned()));
    }
    let Some(sources) = read_sources(dir).await? else {
        return Ok(Err("it does not say what it was built from".to_owned()));
    };
    for source in &sources {
        if parse_any(source).is_none() {
            return Ok(Err(format!("it was built from {source}, which is no night of this output")));
        }
        if !data_set::is_complete(&output.join(source)).await? {
            return Ok(Err(format!("it was built from {source}, which is gone")));
        }
    }
    Ok(Ok(sources))
}

fn parse_any(folder: &str) -> Option<DataSet> {
    Kind::ALL.into_iter().find_map(|kind| parse_folder(kind, folder)).map(|(data_set, ..)| data_set)
}

/// Takes the texts out of these sets. A promoted one stays in force, with its new digest.
pub(super) async fn purge(output: &Location, places: &[&ErasedPlace], texts: &Texts) -> Result<()> {
    for place in places {
        let dir = output.join(&place.folder);
        let texts_of_set = texts.of(&read_sources(&dir).await?.unwrap_or_default());
        let before = place.objects.iter().filter_map(|object| Some((object.name.as_str(), object.before.as_ref()?)));
        purge_texts(&dir, texts.kind, &texts_of_set, &before.collect()).await?;
    }
    if !places.is_empty() {
        PoolRegistry::new(output).renew(Timestamp::now()).await?;
    }
    Ok(())
}
