//! The target of a draft recommender, and the lists that it makes to be learned from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use laser_model::ModelFiles;
use laser_schema::{Digest, Progress};
use laser_store::{Location, catalogue};
use laser_train::{Catalogue, History, RecommenderBelongs};
use laser_worker::generate::{Request, TextError, TextGenerator as _};
use laser_worker::lists::{Catalogue as Listed, ListDraft, ListGenerator, ListOptions};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::items::{Items, Sets};
use crate::config::{Config, ListsConfig};
use crate::generator::{engine_options, tested};
use crate::lists::{all_items, check_codes};

/// The file beside the checkpoint that keeps the lists.
const LISTS: &str = "lists.json";

/// The model that a draft is trained for.
#[derive(Debug)]
pub(super) struct Target {
    files: ModelFiles,
    folder: PathBuf,
    digest: String,
}

/// Lists of all histories, by the items' numbers in the catalogue, and what they are a function of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lists {
    made_of: Digest,
    pub(super) learned: Vec<Vec<u32>>,
    pub(super) measured: Vec<Vec<u32>>,
}

/// The settings that decide lists beside the target, the items and the histories.
pub(super) fn made_by(config: &Config) -> String {
    let lists = config.lists.as_ref().map(|lists| (lists.normalisation, lists.repeat));
    let options = (config.model.dtype.to_string(), &config.model.isq, config.recommender.draft.options.max_items);
    Digest::of_json(&(lists, options)).to_string()
}

/// Removes the lists that a training has kept.
pub(super) async fn forget(folder: &Path) -> Result<()> {
    let file = kept(folder)?;
    if file.exists().await? {
        file.remove().await?;
    }
    Ok(())
}

fn kept(folder: &Path) -> Result<Location> {
    Ok(Location::parse(&folder.to_string_lossy())?.join(LISTS))
}

impl Target {
    /// Opens the model in `[recommender] output`.
    ///
    /// # Errors
    /// If there is none, if it is of other codes than the catalogue's, naming the row of an item that it does not know,
    /// or if it reads fewer items than the draft.
    pub(super) fn open(config: &Config, (table, catalogue): (&catalogue::Catalogue, &Catalogue)) -> Result<Self> {
        let folder = PathBuf::from(&config.recommender.output);
        let belongs = if folder.is_dir() { RecommenderBelongs::open(&folder)? } else { None };
        let belongs = belongs.with_context(|| {
            format!("{}: no recommender to draft for; train it first with `laser train recommender`", folder.display())
        })?;
        let files = ModelFiles::open(&folder)?;
        check_codes(table, &files.tokenizer)?;
        catalogue.vocabulary().check(&folder)?;
        let max_items = config.recommender.draft.options.max_items;
        ensure!(
            max_items <= belongs.max_items,
            "{}: reads {} items, and [recommender.draft.model] max_items = {max_items}; lower it",
            folder.display(),
            belongs.max_items
        );
        let digest = files.digest()?.to_string();
        Ok(Self { files, folder, digest })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    /// The items that the target lists in place of the last one of each history, from those before it: kept ones if
    /// they are of the same, else new ones. None if it is stopped before the end.
    pub(super) async fn lists(
        &self,
        config: &Config,
        (table, items, sets): (&catalogue::Catalogue, &Items, &Sets),
        progress: &mut dyn Progress,
        drain: &CancellationToken,
    ) -> Result<Option<Lists>> {
        let draft = &config.recommender.draft;
        let histories = Digest::of_json(&[&sets.learned, &sets.measured]);
        let settings = (made_by(config), draft.lists, &self.digest);
        let made_of = Digest::of_json(&(settings, items.catalogue.digest(), histories));
        let file = kept(Path::new(&draft.output))?;
        if let Some(bytes) = file.read_optional().await?
            && let Some(lists) = serde_json::from_slice::<Lists>(&bytes).ok().filter(|lists| lists.made_of == made_of)
        {
            return Ok(Some(lists));
        }
        progress.stage("the target makes lists");
        let mut maker = self.maker(config, (table, items)).await?;
        let [learned, measured] = tokio::task::block_in_place(|| {
            maker.total = sets.learned.len() + sets.measured.len();
            anyhow::Ok([maker.lists(&sets.learned, progress, drain)?, maker.lists(&sets.measured, progress, drain)?])
        })?;
        let (Some(learned), Some(measured)) = (learned, measured) else {
            return Ok(None);
        };
        progress.finish_with(&format!("{} lists of {} items", maker.total, draft.lists));
        let lists = Lists { made_of, learned, measured };
        std::fs::create_dir_all(&draft.output).with_context(|| format!("[recommender.draft] {}", draft.output))?;
        file.write(serde_json::to_vec(&lists)?.into()).await?;
        Ok(Some(lists))
    }

    async fn maker<'a>(&self, config: &Config, of: (&catalogue::Catalogue, &'a Items)) -> Result<ListMaker<'a>> {
        let lists = config.lists.as_ref().context("[lists.catalogue]: not set")?;
        let (table, items) = of;
        let catalogue = all_items(table, &self.files.tokenizer)?;
        let engine = engine_options(config, &self.files);
        tested(engine.clone()).await?;
        let engine = tokio::task::spawn_blocking(move || laser_engine::load(&engine)).await??;
        let generator = ListGenerator::new(engine, self.files.tokenizer.clone(), plain(lists, config));
        let number = |id: &laser_schema::EntityId| {
            catalogue.trie.find(&id.to_string()).with_context(|| format!("item {id} is not in the trie"))
        };
        let numbers: Vec<u32> = table.ids.iter().map(number).collect::<Result<_>>()?;
        let mut items_of = vec![0; numbers.len()];
        (0..).zip(&numbers).for_each(|(item, &number)| items_of[number as usize] = item);
        let max_items = config.recommender.draft.options.max_items;
        Ok(ListMaker { generator, catalogue, items, numbers, items_of, max_items, total: 0, done: 0 })
    }
}

/// The plain search that `[lists]` describes, without drafts, for lists of the draft's length of distinct identifiers.
/// It searches the best ones, also where nights draw lists: those of one user under one noise say little.
fn plain(lists: &ListsConfig, config: &Config) -> ListOptions {
    let count = config.recommender.draft.lists;
    let options = lists.options(config);
    ListOptions { items: count, width: count, all_ties: false, draft: ListDraft::None, temperature: None, ..options }
}

/// Makes lists of histories.
struct ListMaker<'a> {
    generator: ListGenerator,
    catalogue: Arc<Listed>,
    items: &'a Items,
    /// By item of the catalogue its number in the trie, and the other way round.
    numbers: Vec<u32>,
    items_of: Vec<u32>,
    /// Items of a prompt.
    max_items: usize,
    /// Lists to be made, and those that are.
    total: usize,
    done: usize,
}

impl ListMaker<'_> {
    /// Lists in the order of the histories; none if it is stopped before the end.
    fn lists(
        &mut self,
        histories: &[History],
        progress: &mut dyn Progress,
        drain: &CancellationToken,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        let mut lists = vec![Vec::new(); histories.len()];
        let (mut next, mut ended) = (0, 0);
        while ended < histories.len() {
            if drain.is_cancelled() {
                return Ok(None);
            }
            while next < histories.len() && self.generator.load() < 2 * self.generator.batch() {
                let request = self.request(next as u64, &histories[next])?;
                self.generator.submit(request);
                next += 1;
            }
            for finished in self.generator.step()? {
                lists[usize::try_from(finished.id)?] = match finished.result {
                    Ok(list) => list.items.iter().map(|&(number, _)| self.items_of[number as usize]).collect(),
                    Err(TextError::NothingToList) => Vec::new(),
                    Err(error) => bail!(anyhow!(error).context(format!("history {}", finished.id))),
                };
                ended += 1;
            }
            progress.update((self.done + ended) as u64, Some(self.total as u64), "lists");
        }
        self.done += ended;
        Ok(Some(lists))
    }

    fn request(&self, id: u64, history: &History) -> Result<Request> {
        let before = &history.items[..history.items.len() - 1];
        Ok(Request {
            id,
            prompt: self.items.catalogue.prompt(before, self.max_items)?,
            history: before.iter().map(|&item| self.numbers[item as usize]).collect(),
            catalogue: Some(self.catalogue.clone()),
            ..Request::default()
        })
    }
}
