//! Erases entities from everything that Laser wrote below an output: data sets, inputs and audits of runs, pools.
//!
//! What an erasure is going to do is found first and kept as one object, which also keeps every other command that
//! writes from the output. Then pools go first, because their texts are known by the rows of the nights; runs follow,
//! and data sets. All of it may be killed anywhere: the same command starts from what is there and goes on. At the end
//! everything is searched again, and a receipt takes the object's place.

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
use laser_schema::erasure::{ERASURE_VERSION, ErasedPlace, Erasure, Removed};
use laser_schema::knowledge::WRITER;
use laser_schema::layout::CANARIES;
use laser_schema::{Kind, Progress};
use laser_store::Location;
use laser_store::id_list::IdList;
use laser_store::run_store::{RunStore, run_folder};

use crate::config::Config;
use crate::model::open_model;
use pools::Texts;

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
        let is_known = !matches!(outcomes[0], Outcome::Absent(_));
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
        let erasure = match marker::unfinished(&self.output, self.kind, self.ids.digest()).await? {
            Some(erasure) if dry_run => return Ok(Outcome::Planned(Box::new(erasure))),
            Some(erasure) => erasure,
            None => {
                let erasure = self.plan(progress).await?;
                if dry_run {
                    return Ok(Outcome::Planned(Box::new(erasure)));
                }
                let is_doubtful = is_known && !erasure.removed.is_empty();
                if erasure.found == 0 && !is_doubtful {
                    return self.nothing(erasure).await;
                }
                self.begin(&erasure).await?;
                erasure
            }
        };
        self.apply(&erasure, progress).await?;
        self.end(erasure, progress).await
    }

    /// Finds what is to be done.
    async fn plan(&self, progress: &mut dyn Progress) -> Result<Erasure> {
        progress.stage("searching");
        let unfinished = self.settled().await?;
        let mut found = search::search(&self.output, self.kind, &self.ids).await?;
        let mut removed = unfinished::holding(&self.output, unfinished, &self.ids, &mut found.ids).await?;
        let mut places = Vec::new();
        if !self.output.join(POOLS_FOLDER).folders().await?.is_empty() {
            let (of_pools, doubtful) = pools::survey(&self.output, &self.texts(&found.places).await?).await?;
            places.extend(of_pools);
            removed.extend(doubtful);
        }
        places.extend(found.places);
        let digests = search::digests(&self.output, &places).await?;
        for (place, digests) in places.iter_mut().zip(digests) {
            place.objects.iter_mut().zip(digests).for_each(|(object, digest)| object.before = digest);
        }
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
            places,
            removed,
            elsewhere: ELSEWHERE.map(str::to_owned).to_vec(),
        };
        progress.finish_with(&self.told(&erasure, &found.ids));
        Ok(erasure)
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

    /// Says that the erasure is under way, and then looks again for a run that began meanwhile.
    async fn begin(&self, erasure: &Erasure) -> Result<()> {
        marker::begin(&self.output, erasure).await?;
        if let Err(error) = self.settled().await {
            marker::withdraw(&self.output, erasure).await?;
            return Err(error);
        }
        Ok(())
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

    /// Looks everywhere again and leaves the receipt.
    async fn end(&self, mut erasure: Erasure, progress: &mut dyn Progress) -> Result<Outcome> {
        progress.stage("checking");
        let left = search::search(&self.output, self.kind, &self.ids).await?;
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
