//! The catalogue of a lists night: built from its table when a run begins, kept with the run, opened by workers.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use laser_coordinator::catalogue::CatalogueItem;
use laser_decode::{Stock, Trie, TrieItem, TrieMeta, build_trie};
use laser_model::Tokenizer;
use laser_schema::entity::IdType;
use laser_schema::lists::ListSpec;
use laser_schema::{Digest, EntityId};
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::{Cache, Location, catalogue};
use laser_worker::lists::Catalogue;

use crate::config::{Config, ListDraftKind, ListsConfig};
use crate::counted;

/// The trie in a run's folder.
const TRIE: &str = "items.trie";

/// The items that are out of stock in a run's folder, by their numbers in the trie.
const OUT_OF_STOCK: &str = "out_of_stock.json";

/// What the histories say of the items, in a run's folder; drafts need it, and no list depends on it.
const COUNTED: &str = "items.counted";

/// The items of a night, and what a run keeps of them.
#[derive(Debug)]
pub(crate) struct Items {
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) spec: ListSpec,
    trie: Bytes,
    out_of_stock: Option<Bytes>,
    counted: Option<Bytes>,
}

impl Items {
    /// Builds the trie of the configured catalogue for a model's tokenizer.
    ///
    /// # Errors
    /// Naming the table and the row, the code that is no token, or the item out of stock that the catalogue lacks.
    pub(crate) async fn build(lists: &ListsConfig, config: &Config, tokenizer: &Tokenizer) -> Result<Self> {
        lists.check(config)?;
        let table = catalogue::Catalogue::read(&lists.catalogue).await.context("[lists.catalogue]")?;
        let bytes = tokio::task::spawn_blocking(move || build(&table)).await?.context("[lists.catalogue]")?;
        let trie = Trie::open(bytes.clone()).context("[lists.catalogue]")?;
        let out = match &lists.out_of_stock {
            Some(path) => Some(out_of_stock(path, &lists.catalogue.id, &trie).await.context("[lists] out_of_stock")?),
            None => None,
        };
        let numbers = out.as_ref().map(serde_json::to_vec).transpose()?.map(Bytes::from);
        let digest = Digest::from_bytes(trie.digest());
        let spec = lists.spec(digest, numbers.as_ref().map(|numbers| Digest::of(numbers)));
        let counted = match lists.draft.method() {
            Some(_) => Some(counted::count(config, &lists.item, &trie).await?),
            None => None,
        };
        let catalogue = opened(trie, (out.as_deref(), counted.clone()), tokenizer)?;
        Ok(Self { catalogue, spec, trie: bytes, out_of_stock: numbers, counted })
    }

    /// An item of the catalogue by its id as text.
    pub(crate) fn find(&self, id: &str) -> Option<CatalogueItem> {
        let trie = &self.catalogue.trie;
        let number = trie.find(id)?;
        let path = trie.path(trie.leaf_of_item(number));
        let codes = trie.meta().codes.iter().zip(path);
        let identifier = codes.filter_map(|(codes, node)| codes.get(usize::from(trie.code(node)))).cloned().collect();
        Some(CatalogueItem { number, identifier })
    }

    /// Codes of an identifier.
    pub(crate) fn codes(&self) -> usize {
        self.catalogue.trie.levels()
    }

    /// The type of the items' ids.
    pub(crate) fn id_type(&self) -> IdType {
        if self.catalogue.trie.meta().integer_ids { IdType::Int64 } else { IdType::String }
    }

    /// Writes what workers need into a run's folder, unless it is there.
    ///
    /// # Errors
    /// The store's.
    pub(crate) async fn keep(&self, store: &RunStore) -> Result<()> {
        let files =
            [(TRIE, Some(&self.trie)), (OUT_OF_STOCK, self.out_of_stock.as_ref()), (COUNTED, self.counted.as_ref())];
        for (name, bytes) in files {
            if let Some(bytes) = bytes {
                store.folder().join(name).create(bytes.clone()).await?;
            }
        }
        Ok(())
    }
}

/// The catalogue of a run that makes lists, as its folder has it; with what the histories say if drafts are counted.
///
/// # Errors
/// The store's, and files that are not those that the run was planned with.
pub(crate) async fn of_run(
    run: &PlannedRun,
    (cache, draft): (Option<&Cache>, ListDraftKind),
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
    let counted = match draft.method() {
        Some(_) => Some(folder.join(COUNTED).read().await.context("[lists] draft")?),
        None => None,
    };
    opened(trie, (out.as_deref(), counted), tokenizer).map(Some)
}

/// A trie of a store, mapped; verified once whole.
async fn open_trie(file: &Location, digest: &Digest, cache: Option<&Cache>) -> Result<Trie> {
    let path = match (file.local_path(), cache) {
        (Some(path), _) => Some(path),
        (None, Some(cache)) => Some(cache.file(file, digest).await?),
        (None, None) => None,
    };
    let bytes = match path {
        Some(path) => laser_store::map::map(&std::fs::File::open(path)?)?,
        None => file.read().await?,
    };
    let trie = Trie::open(bytes)?;
    let unverified = trie.clone();
    tokio::task::spawn_blocking(move || unverified.verify()).await??;
    Ok(trie)
}

/// All items of a table, none of them out of stock, for a model's tokenizer.
///
/// # Errors
/// A code that is no token, and a table that no trie can be built of.
pub(crate) fn all_items(table: &catalogue::Catalogue, tokenizer: &Tokenizer) -> Result<Arc<Catalogue>> {
    let trie = build(table).and_then(|bytes| Ok(Trie::open(bytes)?));
    opened(trie.context("[lists.catalogue]")?, (None, None), tokenizer)
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

/// The numbers in the trie of the items that a table names, in ascending order.
async fn out_of_stock(path: &str, column: &str, trie: &Trie) -> Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for id in catalogue::read_ids(path, column).await? {
        let number = trie.find(&id.to_string());
        numbers.push(number.with_context(|| format!("{path}: the catalogue has no item {id}"))?);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

fn opened(
    trie: Trie,
    (out_of_stock, counted): (Option<&[u32]>, Option<Bytes>),
    tokenizer: &Tokenizer,
) -> Result<Arc<Catalogue>> {
    let tokens = tokens(&trie, tokenizer)?;
    let stock = match out_of_stock {
        Some(out) => Stock::without(&trie, out.iter().copied()),
        None => Stock::all(&trie),
    };
    let counted = counted.map(|bytes| counted::open(bytes, &trie)).transpose().context(COUNTED)?;
    Ok(Arc::new(Catalogue { trie, tokens, stock, counted }))
}

/// The token of every code: the model writes a code as one token.
fn tokens(trie: &Trie, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let token = |code: &String| {
        let tokens = tokenizer.encode(code, false)?;
        ensure!(
            tokens.len() == 1,
            "[lists.catalogue] identifier: code {code:?} is {} tokens of the model's tokenizer, expected 1; give a \
             model that was trained on these codes (`laser train recommender`)",
            tokens.len()
        );
        Ok(tokens[0])
    };
    trie.meta().codes.iter().map(|codes| codes.iter().map(token).collect()).collect()
}
