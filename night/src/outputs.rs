//! The runs of an output's nights, and which of them are in force: listing, promoting and rolling back.

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_delta::Table;
use laser_schema::Kind;
use laser_schema::layout::{CANARIES, DataSet, name_date};
use laser_schema::manifest::{AnyManifest, MANIFEST, Profiles, SUCCESS};
use laser_store::Location;
use laser_store::data_set::{self, NightRuns, PromotedRun, RunPromotion};
use laser_store::promotions;
use serde::Serialize;

use crate::erasure::marker::ensure_none;

/// A run of a night.
#[derive(Debug, Serialize)]
pub struct ListedRun {
    /// The night.
    pub date: Date,
    /// What it published.
    pub data_set: DataSet,
    /// Users or items.
    pub kind: Kind,
    /// Its name.
    pub run: String,
    /// Its rows; none before it has a manifest.
    pub rows: Option<u64>,
    /// When the newest of its contents came to be; none before it has a manifest.
    pub created: Option<Timestamp>,
    /// How its rows were made, in a few words.
    pub made: String,
    /// Whether it is in force, and why.
    pub state: RunState,
    /// When it was promoted, each time.
    pub promotions: Vec<Timestamp>,
}

/// Whether a run is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// It is, by this promotion.
    Promoted {
        /// The promotion's number.
        promotion: u64,
    },
    /// It is, since it was created last of the complete runs of the night.
    Newest,
    /// Another run of the night is.
    Superseded,
    /// It has no `_SUCCESS`.
    Incomplete,
}

/// All runs of an output, by data set, kind and night, the oldest night first.
///
/// # Errors
/// The store's, a manifest or a promotion that cannot be read.
pub async fn list(output: &Location) -> Result<Vec<ListedRun>> {
    let mut listed = Vec::new();
    for data_set in DataSet::ALL {
        for kind in Kind::ALL {
            for date in data_set::nights(output, data_set, kind).await?.into_iter().rev() {
                listed.extend(list_night(&Night { output, data_set, kind, date }).await?);
            }
        }
    }
    Ok(listed)
}

async fn list_night(night: &Night<'_>) -> Result<Vec<ListedRun>> {
    let &Night { output, data_set, kind, date } = night;
    let history = night.history().await?;
    let of_night = NightRuns::read(output, data_set, kind, date).await?;
    let in_force = night.in_force().await?;
    let mut listed = Vec::new();
    for run in data_set::runs(output, data_set, kind, date).await? {
        let state = match of_night.promotion.as_ref().filter(|p| p.run.as_ref() == Some(&run)) {
            Some(promotion) => RunState::Promoted { promotion: promotion.number },
            None if in_force.as_ref() == Some(&run) => RunState::Newest,
            None if of_night.complete.contains(&run) => RunState::Superseded,
            None => RunState::Incomplete,
        };
        let file = output.join(&data_set.folder(kind, date, &run)).join(MANIFEST);
        let manifest = file.read_optional().await?;
        let manifest = manifest.map(|bytes| data_set::parse_any(&file, &bytes)).transpose()?;
        let promotions = history.iter().filter(|p| p.run.as_ref() == Some(&run)).map(|p| p.time).collect();
        listed.push(ListedRun {
            date,
            data_set,
            kind,
            rows: manifest.as_ref().map(|m| m.rows),
            created: manifest.as_ref().map(|m| m.created),
            made: manifest.map(made).unwrap_or_default(),
            run,
            state,
            promotions,
        });
    }
    Ok(listed)
}

/// How the rows of a manifest were made: their specification, or what they were made from.
fn made(manifest: AnyManifest) -> String {
    let details = manifest.details;
    if let Some(source) = details.get("source").and_then(|source| source["path"].as_str()) {
        return source.rsplit_once("/run=").map_or_else(|| source.to_owned(), |(_, run)| format!("from {run}"));
    }
    match serde_json::from_value::<Profiles>(details.into()) {
        Ok(Profiles { spec, spec_digest, .. }) => {
            let (digest, model) = (spec_digest.short(), spec.model.short());
            format!("spec {digest}: model {model}, {}, {}", spec.precision, spec.verification)
        }
        Err(_) => String::new(),
    }
}

/// What has become of a night.
#[derive(Debug, Serialize)]
pub struct Changed {
    /// The night.
    pub date: Date,
    /// The data set.
    pub data_set: DataSet,
    /// Users or items.
    pub kind: Kind,
    /// The promotion in force.
    pub promotion: u64,
    /// The run in force.
    pub in_force: Option<String>,
}

/// A night of a data set and kind.
struct Night<'a> {
    output: &'a Location,
    data_set: DataSet,
    kind: Kind,
    date: Date,
}

impl<'a> Night<'a> {
    /// The nights of all data sets and kinds that have a run.
    async fn of_run(output: &'a Location, run: &str) -> Result<Vec<Self>> {
        let date =
            name_date(run).with_context(|| format!("{run:?}: not the name of a run; see `laser outputs list`"))?;
        let mut nights = Vec::new();
        for data_set in DataSet::ALL {
            for kind in Kind::ALL {
                let runs = data_set::runs(output, data_set, kind, date).await?;
                nights.extend(runs.iter().any(|name| name == run).then_some(Night { output, data_set, kind, date }));
            }
        }
        Ok(nights)
    }

    fn folder(&self, run: &str) -> Location {
        self.output.join(&self.data_set.folder(self.kind, self.date, run))
    }

    async fn history(&self) -> Result<Vec<RunPromotion>> {
        Ok(data_set::promotions(self.output, self.data_set, self.kind, self.date).history().await?)
    }

    async fn in_force(&self) -> Result<Option<String>> {
        Ok(data_set::in_force(self.output, self.data_set, self.kind, self.date).await?)
    }

    /// Refuses a run that readers must not get: one without `_SUCCESS`, or with any fault.
    async fn check(&self, run: &str) -> Result<()> {
        let folder = self.folder(run);
        ensure!(
            data_set::is_complete(&folder).await?,
            "{}: no {SUCCESS}: the run is not complete; finish it by the command that began it",
            folder.url()
        );
        let faults = data_set::verify(&folder).await?.faults;
        if let Some(fault) = faults.first() {
            bail!("{}: {fault}; a damaged run is not promoted: `laser verify` tells all faults", folder.url());
        }
        Ok(())
    }

    /// Puts a run in force, unless it is so already.
    async fn promote(&self, run: &str, now: Timestamp) -> Result<Changed> {
        let history = self.history().await?;
        let promotion = match history.last().filter(|last| last.run.as_deref() == Some(run)) {
            Some(last) => last.number,
            None => self.record(&history, Some(run.to_owned()), (now, None)).await?,
        };
        self.tell_readers(promotion).await
    }

    /// Puts in force what was so before a run, unless a history ends with that.
    async fn roll_back(&self, history: &[RunPromotion], run: &str, now: Timestamp) -> Result<Changed> {
        let promotion = match history.last().filter(|_| was_rolled_back(history, run)) {
            Some(last) => last.number,
            None => {
                let restored = restored(history);
                let (number, before) = restored.context("a promoted run has a promotion")?;
                self.record(history, before, (now, Some(number))).await?
            }
        };
        self.tell_readers(promotion).await
    }

    async fn record(
        &self,
        history: &[RunPromotion],
        run: Option<String>,
        restoring: (Timestamp, Option<u64>),
    ) -> Result<u64> {
        let promotions = data_set::promotions(self.output, self.data_set, self.kind, self.date);
        Ok(promotions.promote(history, PromotedRun { run }, restoring).await?.number)
    }

    /// Has the Delta table and the list of runs in force follow. Repeated after a kill, it does what is left to do.
    async fn tell_readers(&self, promotion: u64) -> Result<Changed> {
        let &Self { output, data_set, kind, date } = self;
        Table::new(output, data_set, kind).follow(date).await?;
        data_set::write_in_force(output, data_set, kind, &Default::default()).await?;
        Ok(Changed { date, data_set, kind, promotion, in_force: self.in_force().await? })
    }
}

/// The promotion that a rollback restores, and its run; promotion 0 stands for none.
fn restored(history: &[RunPromotion]) -> Option<(u64, Option<String>)> {
    let number = promotions::before(history)?;
    let run = history.iter().find(|promotion| promotion.number == number).and_then(|p| p.run.clone());
    Some((number, run))
}

/// Whether a history ends with the rollback of a run, which may have been killed before readers were told.
fn was_rolled_back(history: &[RunPromotion], run: &str) -> bool {
    matches!(history, [.., of_run, last] if last.restores.is_some() && of_run.run.as_deref() == Some(run))
}

/// Puts a run in force for its night, in every data set and kind that it has published. All of its parts are read and
/// checked before.
///
/// # Errors
/// An unknown run, a canary, one that is not complete or damaged, and a promotion that another process has made at the
/// same time.
pub async fn promote(output: &Location, run: &str) -> Result<Vec<Changed>> {
    ensure_none(output).await?;
    let nights = Night::of_run(output, run).await?;
    if nights.is_empty() {
        return Err(unknown(output, run).await?);
    }
    for night in &nights {
        night.check(run).await?;
    }
    let mut changed = Vec::new();
    for night in &nights {
        changed.push(night.promote(run, Timestamp::now()).await?);
    }
    Ok(changed)
}

/// Takes back the promotion of a run, in every data set and kind: what was in force before it is so again. Repeated
/// after a kill, it does what is left to do.
///
/// # Errors
/// A run that is not promoted, and one to go back to that is not complete any more.
pub async fn rollback(output: &Location, run: &str) -> Result<Vec<Changed>> {
    ensure_none(output).await?;
    let mut promoted = Vec::new();
    for night in Night::of_run(output, run).await? {
        let history = night.history().await?;
        if history.last().is_some_and(|last| last.run.as_deref() == Some(run)) {
            if let Some((_, Some(before))) = restored(&history) {
                let is_complete = data_set::is_complete(&night.folder(&before)).await?;
                ensure!(
                    is_complete,
                    "{before} was in force before {run} and is not complete any more; promote another"
                );
            }
            promoted.push((night, history));
        } else if was_rolled_back(&history, run) {
            promoted.push((night, history));
        }
    }
    ensure!(!promoted.is_empty(), "{run} is not promoted; `laser outputs list` tells which runs are");
    let mut changed = Vec::new();
    for (night, history) in promoted {
        changed.push(night.roll_back(&history, run, Timestamp::now()).await?);
    }
    Ok(changed)
}

/// Why a run cannot be promoted that has published nothing.
async fn unknown(output: &Location, run: &str) -> Result<anyhow::Error> {
    if !Night::of_run(&output.join(CANARIES), run).await?.is_empty() {
        return Ok(anyhow::anyhow!(
            "run {run} is a canary, which has a part of the entities; to put its configuration in force, run the \
             night with it"
        ));
    }
    Ok(anyhow::anyhow!(
        "{}: run {run} has published nothing here; `laser outputs list` tells which runs there are",
        output.url()
    ))
}
