//! Erases entities from everything that Laser wrote below an output: data sets, inputs and audits of runs, pools.
//!
//! An erasure that finds anything says so by one object, which keeps every other command that writes from the output.
//! Now that nobody writes it searches again, and keeps in the object what it is going to do. Then pools go first,
//! because their texts are known by the rows of the nights; runs follow, and data sets. All of it may be killed
//! anywhere: the same command starts from what is there and goes on. At the end everything is searched once more, what
//! is found all the same is taken in, and a receipt takes the object's place.

pub mod marker;
mod pools;
mod rewrite;
mod search;
mod unfinished;

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use laser_coordinator::retention::{self, Outdated};
use laser_pool_builder::POOLS_FOLDER;
use laser_schema::erasure::{ERASURE_VERSION, ErasedObject, ErasedPlace, Erasure, Removed};
use laser_schema::knowledge::WRITER;
use laser_schema::layout::CANARIES;
use laser_schema::{Kind, Progress};
use laser_store::Location;
use laser_store::id_list::IdList;
use laser_store::run_store::{RunStore, run_folder};

use crate::config::Config;
use crate::model::open_model;
use pools::Texts;
use search::Found;

/// Where an erasure does not look.
const ELSEWHERE: [&str; 7] = [
    "the input tables, interactions and previous knowledge outside of the output: remove the entities there, or the \
     next night writes about them again",
    "the queue: dead letters and jobs name shards and no entities, and their reasons may quote one",
    "caches of workers ([worker] cache): pools of before; remove them, and start workers again",
    "versions, snapshots and backups of the store: a replaced object may live on there",
    "draft models, recommenders and lists.json that `laser train` made of the texts or histories, and pools outside of \
     the output",
    "feature stores and copies of what was published",
    "codebooks, routers, sums and measured figures: they are computed from many entities and name none",
];

/// Entities of which nothing was found that are named.
const MISSING_TOLD: usize = 10;

/// How an erasure ended.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing was changed: this would be done.
    Planned(Box<Erasure>),
    /// Everything is erased and was looked through again.
    Erased(Box<Erasure>, Location),
    /// Nothing is there of the entities; an earlier erasure has left this receipt.
    Nothing(Box<Erasure>),
    /// Nothing is there of the entities, and no earlier erasure is known.
    Absent(Box<Erasure>),
}

impl Outcome {
    /// What was found, and what was done or would be.
    pub fn erasure(&self) -> &Erasure {
        match self {
            Self::Planned(erasure) | Self::Erased(erasure, _) | Self::Nothing(erasure) | Self::Absent(erasure) => {
                erasure
            }
        }
    }
}

/// Erases the entities of a list, or only tells what would be done: in the output, and then in its canaries, which are
/// laid out as an output of their own. Returns how it ended in each of them.
///
/// # Errors
/// A list that cannot be read, an output in which something may be under way, that nothing was found of any entity, and
/// the store's. Once the erasure is under way the same call goes on.
pub async fn erase(
    config: &Config,
    (kind, ids): (Kind, &str),
    dry_run: bool,
    progress: &mut dyn Progress,
) -> Result<Vec<Outcome>> {
    let ids = IdList::read(ids).await.context("--ids")?;
    let output = config.output()?;
    let canaries = output.join(CANARIES);
    let work = |output: &Location, beside: &Location| {
        let (output, beside, ids) = (output.clone(), beside.clone(), ids.clone());
        Work { config, output, beside, kind, ids }
    };
    // Canaries last: those that begin meanwhile read of the nights what is left.
    let mut outcomes = vec![work(&output, &canaries).run(dry_run, false, progress).await?];
    if !canaries.folders().await?.is_empty() {
        let is_known = outcomes[0].erasure().found > 0;
        outcomes.push(work(&canaries, &output).run(dry_run, is_known, progress).await?);
    }
    if let [Outcome::Absent(erasure)] | [Outcome::Absent(erasure), Outcome::Absent(_)] = &outcomes[..] {
        return Err(absent(&output, erasure));
    }
    outcomes.retain(|outcome| !matches!(outcome, Outcome::Absent(_)));
    Ok(outcomes)
}

/// Why nothing was done: the list is another output's, or of the other kind.
fn absent(output: &Location, erasure: &Erasure) -> anyhow::Error {
    let doubtful: Vec<&str> = erasure.removed.iter().map(|set| set.name.as_str()).collect();
    let doubt = match doubtful.is_empty() {
        true => String::new(),
        false => format!("; nobody can tell whose texts the pool sets {} hold", doubtful.join(", ")),
    };
    anyhow::anyhow!(
        "{}: nothing is there of any of the {} {}s, so nothing was changed; check --kind and --ids{doubt}",
        output.url(),
        erasure.ids,
        erasure.kind
    )
}

/// An erasure from one output, or from the canaries of one.
struct Work<'a> {
    config: &'a Config,
    output: Location,
    /// The canaries of the output, or the output of the canaries: nothing may be under way there either.
    beside: Location,
    kind: Kind,
    ids: IdList,
}

impl Work<'_> {
    /// Erases what is found. If the entities are known to have been in the output, pool sets of which nobody can tell
    /// whose texts they hold go as well, although nothing else is found.
    async fn run(&self, dry_run: bool, is_known: bool, progress: &mut dyn Progress) -> Result<Outcome> {
        let erasure = match self.begun(dry_run).await? {
            Some(erasure) if dry_run => return Ok(Outcome::Planned(Box::new(erasure))),
            Some(erasure) => erasure,
            None => {
                let erasure = self.plan(progress).await?;
                if dry_run {
                    return Ok(Outcome::Planned(Box::new(erasure)));
                }
                let is_doubtful = is_known && !erasure.removed.is_empty();
                // Histories of a run, which name nobody, are a place of which no entity is found.
                if erasure.found == 0 && erasure.places.is_empty() && !is_doubtful {
                    return self.nothing(erasure).await;
                }
                self.begin(erasure).await?
            }
        };
        self.end(erasure, progress).await
    }

    /// The erasure that was stopped, if there is one to go on with. One that did not yet say what it changes has
    /// changed nothing, and is begun anew.
    async fn begun(&self, dry_run: bool) -> Result<Option<Erasure>> {
        match marker::unfinished(&self.output, self.kind, self.ids.digest()).await? {
            Some(begun) if begun.places.is_empty() && begun.removed.is_empty() => {
                if !dry_run {
                    marker::withdraw(&self.output, &begun).await?;
                }
                Ok(None)
            }
            begun => Ok(begun),
        }
    }

    /// Finds what is to be done.
    async fn plan(&self, progress: &mut dyn Progress) -> Result<Erasure> {
        progress.stage("searching");
        let (found, removed) = self.find().await?;
        let digest = self.ids.digest();
        let erasure = Erasure {
            version: ERASURE_VERSION,
            name: marker::name(&self.output, self.config.night(), self.kind, digest).await?,
            writer: WRITER.to_owned(),
            kind: self.kind,
            ids: self.ids.len() as u64,
            ids_digest: digest.clone(),
            found: found.ids.len() as u64,
            begun: Timestamp::now(),
            ended: None,
            places: found.places,
            removed,
            elsewhere: ELSEWHERE.map(str::to_owned).to_vec(),
        };
        progress.finish_with(&self.told(&erasure, &found.ids));
        Ok(erasure)
    }

    /// What there is of the entities, and what is removed whole.
    async fn find(&self) -> Result<(Found, Vec<Removed>)> {
        let unfinished = self.settled().await?;
        let mut found = search::search(&self.output, self.kind, &self.ids).await?;
        let mut removed = unfinished::holding(&self.output, unfinished, &self.ids, &mut found.ids).await?;
        removed.extend(self.add_pools(&mut found.places).await?);
        Ok((found, removed))
    }

    /// Puts the pool sets that hold texts of these places before them, and tells the digests of all. Returns the sets
    /// of which nobody can tell.
    async fn add_pools(&self, places: &mut Vec<ErasedPlace>) -> Result<Vec<Removed>> {
        let mut doubtful = Vec::new();
        if !self.output.join(POOLS_FOLDER).folders().await?.is_empty() {
            let (of_pools, others) = pools::survey(&self.output, &self.texts(places).await?).await?;
            places.splice(..0, of_pools);
            doubtful = others;
        }
        let digests = search::digests(&self.output, places).await?;
        for (place, digests) in places.iter_mut().zip(digests) {
            place.objects.iter_mut().zip(digests).for_each(|(object, digest)| object.before = digest);
        }
        Ok(doubtful)
    }

    /// What is unfinished here; nothing may be under way, here or beside.
    async fn settled(&self) -> Result<unfinished::Unfinished> {
        unfinished::settled(&self.beside).await?;
        unfinished::settled(&self.output).await
    }

    /// How many were found, and some of those who were not.
    fn told(&self, erasure: &Erasure, found: &BTreeSet<String>) -> String {
        let missing = self.ids.without(found);
        let told = format!("{} of {} {}s found", erasure.found, erasure.ids, self.kind);
        match missing.len() {
            0 => told,
            1..=MISSING_TOLD => format!("{told}; nothing of {}", missing.join(", ")),
            more => {
                format!("{told}; nothing of {} and {} others", missing[..MISSING_TOLD].join(", "), more - MISSING_TOLD)
            }
        }
    }

    async fn texts(&self, places: &[ErasedPlace]) -> Result<Texts> {
        let model = open_model(self.config).await?;
        Texts::read(&self.output, (self.kind, &self.ids), places, &model).await
    }

    /// Says that the erasure is under way, and then looks again: something may have begun meanwhile, or have ended and
    /// hold the entities. Nobody writes from now on, so what is found is all, and the erasure says that it changes it.
    async fn begin(&self, planned: Erasure) -> Result<Erasure> {
        let begun = Erasure { places: Vec::new(), removed: Vec::new(), ..planned };
        marker::begin(&self.output, &begun).await?;
        match self.find().await {
            Ok((Found { ids, places }, removed)) => {
                let erasure = Erasure { found: ids.len() as u64, places, removed, ..begun };
                marker::replace(&self.output, &erasure).await?;
                Ok(erasure)
            }
            Err(error) => {
                marker::withdraw(&self.output, &begun).await?;
                Err(error)
            }
        }
    }

    /// Whether an earlier erasure left nothing.
    async fn nothing(&self, erasure: Erasure) -> Result<Outcome> {
        let receipt = marker::receipt(&self.output, self.kind, self.ids.digest()).await?;
        Ok(receipt.map_or_else(|| Outcome::Absent(Box::new(erasure)), |receipt| Outcome::Nothing(Box::new(receipt))))
    }

    async fn apply(&self, erasure: &Erasure, progress: &mut dyn Progress) -> Result<()> {
        progress.stage("erasing");
        let (sets, others): (Vec<&ErasedPlace>, Vec<_>) =
            erasure.places.iter().partition(|place| place.folder.starts_with(POOLS_FOLDER));
        if !sets.is_empty() {
            pools::purge(&self.output, &sets, &self.texts(&erasure.places).await?).await?;
        }
        for removed in &erasure.removed {
            self.remove(removed).await?;
        }
        let total = others.len() as u64;
        for (done, place) in (0..).zip(others) {
            progress.update(done, Some(total), &place.folder);
            retention::remove_staged(&self.output.join(&place.folder)).with_context(|| place.folder.clone())?;
            match place.folder.strip_prefix(&run_folder("")) {
                Some(run) => rewrite::rewrite_run(&RunStore::new(&self.output, run), place, &self.ids).await?,
                None => rewrite::rewrite_folder(&self.output, self.kind, place, &self.ids).await?,
            }
        }
        Ok(())
    }

    /// Removes a run or a pool set as retention does.
    async fn remove(&self, Removed { name, folders, .. }: &Removed) -> Result<()> {
        let _lock = match folders.contains(&run_folder(name)) {
            true => RunStore::new(&self.output, name).lock()?,
            false => None,
        };
        let outdated = [Outdated { run: name.clone(), folders: folders.clone() }];
        retention::withdraw(&self.output, &outdated).await?;
        for folder in folders {
            retention::remove_staged(&self.output.join(folder)).with_context(|| folder.clone())?;
        }
        for outdated in &outdated {
            retention::remove(&self.output, outdated).await?;
        }
        Ok(())
    }

    /// Does what the erasure says, looks everywhere again, and returns what is left all the same.
    async fn apply_and_check(&self, erasure: &Erasure, progress: &mut dyn Progress) -> Result<Found> {
        self.apply(erasure, progress).await?;
        progress.stage("checking");
        search::search(&self.output, self.kind, &self.ids).await
    }

    /// Has the erasure change more. All that it knew of is gone, so what is found now is nothing of that.
    async fn take_in(&self, erasure: &mut Erasure, mut left: Found) -> Result<()> {
        erasure.removed.extend(self.add_pools(&mut left.places).await?);
        erasure.found = erasure.found.max(left.ids.len() as u64);
        merge(&mut erasure.places, left.places);
        marker::replace(&self.output, erasure).await
    }

    /// Does it all and leaves the receipt. If something is left once more, the same command goes on from there.
    async fn end(&self, mut erasure: Erasure, progress: &mut dyn Progress) -> Result<Outcome> {
        let mut left = self.apply_and_check(&erasure, progress).await?;
        if !left.places.is_empty() {
            self.take_in(&mut erasure, left).await?;
            left = self.apply_and_check(&erasure, progress).await?;
        }
        if let Some(place) = left.places.first() {
            bail!(
                "{}: it holds {} rows of the entities that were not there before; stop what writes to the output and \
                 run the same command again",
                self.output.join(&place.folder).url(),
                place.rows()
            );
        }
        let digests = search::digests(&self.output, &erasure.places).await?;
        for (place, digests) in erasure.places.iter_mut().zip(digests) {
            place.objects.iter_mut().zip(digests).for_each(|(object, digest)| object.after = digest);
        }
        erasure.ended = Some(Timestamp::now());
        let receipt = marker::end(&self.output, &erasure).await?;
        progress.finish_with("nothing is left");
        Ok(Outcome::Erased(Box::new(erasure), receipt))
    }
}

/// Adds places to those that an erasure knows of.
fn merge(known: &mut Vec<ErasedPlace>, found: Vec<ErasedPlace>) {
    for place in found {
        match known.iter_mut().find(|known| known.folder == place.folder) {
            Some(known) => merge_objects(&mut known.objects, place.objects),
            None => known.push(place),
        }
    }
}

/// A pool is purged where it is as before, so one that is to be purged again has its digest of now.
fn merge_objects(known: &mut Vec<ErasedObject>, found: Vec<ErasedObject>) {
    for object in found {
        match known.iter_mut().find(|known| known.name == object.name) {
            Some(known) => (known.rows, known.before) = (known.rows + object.rows, object.before),
            None => known.push(object),
        }
    }
}
