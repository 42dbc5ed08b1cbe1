//! The catalogue of a lists night: built from its table when a run begins, kept with the run, opened by workers.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use laser_coordinator::catalogue::CatalogueItem;
use laser_decode::{CodeShares, Stock, Trie, TrieItem, TrieMeta, build_trie};
use laser_model::Tokenizer;
use laser_schema::entity::{EntityTable, IdType};
use laser_schema::lists::{ListSpec, Ties};
use laser_schema::{Digest, EntityId, Progress};
use laser_store::catalogue::ItemTitle;
use laser_store::entities::EntityReader;
use laser_store::run_store::{CODES, COUNTED, OUT_OF_STOCK, PlannedRun, RunStore, TRIE};
use laser_store::{Cache, Location, catalogue};
use laser_worker::lists::{Catalogue, Counted};

use crate::config::{Config, HistoryFiles, ListsConfig};
use crate::counted;

/// The items of a night, and what a run keeps of them.
#[derive(Debug)]
pub(crate) struct Items {
    pub(crate) spec: ListSpec,
    trie: Trie,
    bytes: Bytes,
    out_of_stock: Option<Bytes>,
    titles: Vec<ItemTitle>,
}

impl Items {
    /// Builds the trie of the configured catalogue for a model's tokenizer.
    ///
    /// # Errors
    /// Naming the table and the row, with the code that the model does not have; or the item out of stock that the
    /// catalogue lacks.
    pub(crate) async fn build(lists: &ListsConfig, config: &Config, tokenizer: &Tokenizer) -> Result<Self> {
        lists.check(config)?;
        if let Some(column) = &lists.items_from {
            check_column(column, &config.input).await.context("[lists] items_from")?;
        }
        let mut table = catalogue::Catalogue::read(&lists.catalogue).await.context("[lists.catalogue]")?;
        check_codes(&table, tokenizer).context("[lists.catalogue]")?;
        let titles = std::mem::take(&mut table.titles);
        let bytes = tokio::task::spawn_blocking(move || build(&table)).await?.context("[lists.catalogue]")?;
        let trie = Trie::open(bytes.clone()).context("[lists.catalogue]")?;
        let out_of_stock = match &lists.out_of_stock {
            Some(path) => {
                let numbers = out_of_stock(path, &lists.catalogue.id, &trie).await.context("[lists] out_of_stock")?;
                Some(Bytes::from(serde_json::to_vec(&numbers)?))
            }
            None => None,
        };
        let digest = Digest::from_bytes(trie.digest());
        let spec = lists.spec(digest, out_of_stock.as_ref().map(|numbers| Digest::of(numbers)));
        Ok(Self { spec, trie, bytes, out_of_stock, titles })
    }

    /// An item of the catalogue by its id as text.
    pub(crate) fn find(&self, id: &str) -> Option<CatalogueItem> {
        let trie = &self.trie;
        let number = trie.find(id)?;
        let path = trie.path(trie.leaf_of_item(number));
        let codes = trie.meta().codes.iter().zip(path);
        let identifier = codes.filter_map(|(codes, node)| codes.get(usize::from(trie.code(node)))).cloned().collect();
        Some(CatalogueItem { number, identifier })
    }

    /// How many items there are, and how many of them the model cannot tell apart.
    pub(crate) fn describe(&self) -> String {
        let shared =
            (0..).take(self.trie.leaves()).map(|leaf| self.trie.items_of(leaf).len()).filter(|&items| items > 1);
        let (items, levels, shared) = (self.trie.items(), self.trie.levels(), shared.sum::<usize>());
        let ties = match self.spec.ties {
            Ties::All => "all of them are listed",
            Ties::First => "of each the first is listed",
        };
        match shared {
            0 => format!("{items} items, identifiers of {levels} codes"),
            _ => format!("{items} items, identifiers of {levels} codes; {shared} items share theirs, {ties}"),
        }
    }

    /// Codes of an identifier.
    pub(crate) fn codes(&self) -> usize {
        self.trie.levels()
    }

    /// The type of the items' ids.
    pub(crate) fn id_type(&self) -> IdType {
        if self.trie.meta().integer_ids { IdType::Int64 } else { IdType::String }
    }

    /// Writes what workers and reports need into a run's folder, unless it is there. Counts the histories if the drafts
    /// of `lists` need that.
    ///
    /// # Errors
    /// The store's, and histories that cannot be read.
    pub(crate) async fn keep(
        &self,
        (config, lists): (&Config, &ListsConfig),
        store: &RunStore,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let folder = store.folder();
        for (name, bytes) in [(TRIE, Some(&self.bytes)), (OUT_OF_STOCK, self.out_of_stock.as_ref())] {
            if let Some(bytes) = bytes {
                folder.join(name).create(bytes.clone()).await?;
            }
        }
        if !self.titles.is_empty() {
            catalogue::keep_titles(&folder, &self.titles).await?;
        }
        let (needed, there) = (lists.history_files(), history_files(store).await?);
        let missing = HistoryFiles { counted: needed.counted && !there.counted, codes: needed.codes && !there.codes };
        if missing != HistoryFiles::default() {
            progress.stage("counting histories");
            for (name, bytes) in counted::build(config, &lists.item, &self.trie, missing).await? {
                folder.join(name).create(bytes).await?;
            }
        }
        Ok(())
    }
}

/// What a run's folder has of what the histories say.
///
/// # Errors
/// The store's.
pub async fn history_files(store: &RunStore) -> Result<HistoryFiles> {
    let folder = store.folder();
    Ok(HistoryFiles { counted: folder.join(COUNTED).exists().await?, codes: folder.join(CODES).exists().await? })
}

/// The catalogue of a run that makes lists, as its folder has it; with what the histories say as far as that is asked
/// for.
///
/// # Errors
/// The store's, and files that are not those that the run was planned with.
pub async fn catalogue_of_run(
    run: &PlannedRun,
    cache: Option<&Cache>,
    files: HistoryFiles,
    tokenizer: &Tokenizer,
) -> Result<Option<Arc<Catalogue>>> {
    let Some(spec) = &run.plan.spec.lists else {
        return Ok(None);
    };
    let folder = run.store.folder();
    let (file, digest) = (folder.join(TRIE), &spec.trie);
    let trie = open_trie(&file, digest, cache).await.with_context(|| file.url().to_owned())?;
    ensure!(
        Digest::from_bytes(trie.digest()) == *digest,
        "{}: it is not the trie that the run was planned with",
        file.url()
    );
    let out = match &spec.out_of_stock {
        None => None,
        Some(digest) => {
            let file = folder.join(OUT_OF_STOCK);
            let bytes = file.read().await?;
            ensure!(Digest::of(&bytes) == *digest, "{}: it was changed since the run was planned", file.url());
            Some(serde_json::from_slice::<Vec<u32>>(&bytes).with_context(|| file.url().to_owned())?)
        }
    };
    let said = said(&folder, &trie, files).await?;
    opened(trie, out.as_deref(), said, tokenizer).map(Some)
}

/// What the histories say, from a run's folder.
async fn said(folder: &Location, trie: &Trie, files: HistoryFiles) -> Result<(Option<Counted>, Option<CodeShares>)> {
    let damaged = |name| {
        let file = folder.join(name);
        format!("{}: remove the run's folder to begin it anew, or set [lists] draft = \"trie\"", file.url())
    };
    let counted = match files.counted {
        true => Some(counted::open(read(folder, COUNTED).await?, trie).with_context(|| damaged(COUNTED))?),
        false => None,
    };
    let codes = match files.codes {
        true => Some(counted::open_codes(read(folder, CODES).await?, trie).await.with_context(|| damaged(CODES))?),
        false => None,
    };
    Ok((counted, codes))
}

/// A file of what the histories say.
async fn read(folder: &Location, name: &str) -> Result<Bytes> {
    let file = folder.join(name);
    ensure!(
        file.exists().await?,
        "{}: missing, since the command that began the run has a [lists] draft without it; set the same draft, or \
         \"trie\"",
        file.url()
    );
    bytes_of(&file).await.with_context(|| file.url().to_owned())
}

/// The bytes of a file that never changes, mapped where it is local.
async fn bytes_of(file: &Location) -> Result<Bytes> {
    match file.local_path() {
        Some(path) => Ok(laser_store::map::map(&std::fs::File::open(path)?)?),
        None => Ok(file.read().await?),
    }
}

/// A trie of a store, mapped; verified once whole.
async fn open_trie(file: &Location, digest: &Digest, cache: Option<&Cache>) -> Result<Trie> {
    let bytes = match (file.local_path(), cache) {
        (None, Some(cache)) => laser_store::map::map(&std::fs::File::open(cache.file(file, digest).await?)?)?,
        _ => bytes_of(file).await?,
    };
    let trie = Trie::open(bytes)?;
    let unverified = trie.clone();
    tokio::task::spawn_blocking(move || unverified.verify()).await??;
    Ok(trie)
}

/// All items of a table whose codes are [checked](check_codes), none of them out of stock, for a model's tokenizer.
///
/// # Errors
/// A code that is no token, and a table that no trie can be built of.
pub(crate) fn all_items(table: &catalogue::Catalogue, tokenizer: &Tokenizer) -> Result<Arc<Catalogue>> {
    let trie = build(table).and_then(|bytes| Ok(Trie::open(bytes)?));
    opened(trie.context("[lists.catalogue]")?, None, (None, None), tokenizer)
}

/// Finds a column that no user has among the first of each table, before a night makes all lists alike.
async fn check_column(column: &str, tables: &[EntityTable]) -> Result<()> {
    for table in tables {
        let users = EntityReader::open_counting(table).await?.next_batch().await?.unwrap_or_default();
        let available: BTreeSet<&str> =
            users.iter().flat_map(|user| user.attributes.keys()).map(String::as_str).collect();
        ensure!(
            users.is_empty() || available.contains(column),
            "{}: none of the first {} users has {column:?}; there are {available:?}",
            table.path,
            users.len()
        );
    }
    Ok(())
}

fn build(table: &catalogue::Catalogue) -> Result<Bytes> {
    let ids: Vec<String> = table.ids.iter().map(EntityId::to_string).collect();
    let meta = TrieMeta {
        name: "items".to_owned(),
        integer_ids: table.ids.iter().all(|id| matches!(id, EntityId::Int(_))),
        codes: table.codes.clone(),
    };
    let codes = table.identifiers.chunks_exact(table.levels().max(1));
    let rows = ids.iter().zip(codes).map(|(id, codes)| TrieItem { id, codes });
    Ok(build_trie(&meta, rows)?.into())
}

/// The numbers in the trie of the items that a table names, in ascending order. A shop's table may name items that the
/// catalogue lacks, such as those without an identifier.
///
/// # Errors
/// A table none of whose items is in the catalogue: its ids are others, and everything out of stock would be listed.
async fn out_of_stock(path: &str, column: &str, trie: &Trie) -> Result<Vec<u32>> {
    let ids = catalogue::read_ids(path, column).await?;
    let found: Vec<Option<u32>> = ids.iter().map(|id| trie.find(&id.to_string())).collect();
    let numbers: BTreeSet<u32> = found.iter().flatten().copied().collect();
    let unknown = found.iter().filter(|number| number.is_none()).count();
    match ids.first() {
        Some(first) if unknown == ids.len() => bail!(
            "{path}: none of its {unknown} items is in the catalogue, the first is {first}; are its ids those of \
             [lists.catalogue] id?"
        ),
        _ if unknown > 0 => tracing::warn!(path, unknown, of = ids.len(), "items out of stock, not in the catalogue"),
        _ => {}
    }
    Ok(numbers.into_iter().collect())
}

fn opened(
    trie: Trie,
    out_of_stock: Option<&[u32]>,
    (counted, codes): (Option<Counted>, Option<CodeShares>),
    tokenizer: &Tokenizer,
) -> Result<Arc<Catalogue>> {
    let tokens = tokens(&trie, tokenizer)?;
    let stock = match out_of_stock {
        Some(out) => Stock::without(&trie, out.iter().copied()),
        None => Stock::all(&trie),
    };
    Ok(Arc::new(Catalogue { trie, tokens, stock, counted, codes }))
}

/// Checks that a model can write every code of a table.
///
/// # Errors
/// Naming a code that it cannot, and the row of the first item that has it.
pub(crate) fn check_codes(table: &catalogue::Catalogue, tokenizer: &Tokenizer) -> Result<()> {
    for (level, codes) in table.codes.iter().enumerate() {
        for (place, code) in codes.iter().enumerate() {
            if token(code, tokenizer)?.is_none() {
                let mut identifiers = table.identifiers.chunks_exact(table.levels());
                let item = identifiers.position(|codes| usize::from(codes[level]) == place).unwrap_or_default();
                return Err(table.row_error(item, no_token(code, &table.ids[item].to_string())).into());
            }
        }
    }
    Ok(())
}

/// The token of every code.
fn tokens(trie: &Trie, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let of_code = |(level, place, code): (usize, u16, &String)| {
        let why = || format!("[lists.catalogue] identifier: {}", no_token(code, item_with(trie, level, place)));
        token(code, tokenizer)?.with_context(why)
    };
    let of_level = |(level, codes): (usize, &Vec<String>)| {
        (0..).zip(codes).map(|(place, code)| of_code((level, place, code))).collect::<Result<_>>()
    };
    trie.meta().codes.iter().enumerate().map(of_level).collect()
}

/// The one token as which a model writes a code, if there is one.
fn token(code: &str, tokenizer: &Tokenizer) -> Result<Option<u32>> {
    let [token] = tokenizer.encode(code, false)?[..] else { return Ok(None) };
    // Many tokenizers have one token for whatever they do not know.
    let is_code = tokenizer.token_to_id(code) == Some(token) || tokenizer.decode(&[token])?.trim() == code;
    Ok(is_code.then_some(token))
}

fn no_token(code: &str, item: &str) -> String {
    format!(
        "code {code:?} of item {item} is no token of the model; leave the item out, or give a model that was trained \
         on these codes (`laser train recommender`)"
    )
}

/// The id of the first item that has a level's code.
fn item_with(trie: &Trie, level: usize, code: u16) -> &str {
    let node = trie.level(level + 1).find(|&node| trie.code(node) == code);
    node.map_or("", |node| trie.item_id(trie.items_of(trie.leaves_below(node).start).start))
}
