//! Which run a night is, and what it is begun with.

use anyhow::{Context, Result, ensure};
use jiff::ToSpan;
use jiff::civil::Date;
use laser_coordinator::finalise;
use laser_pool_builder::PoolRegistry;
use laser_schema::layout::{Pins, dated_name, name_date};
use laser_schema::lists::ListRows;
use laser_schema::{Digest, Progress};
use laser_store::entities::fingerprints;
use laser_store::previous::{self, PreviousSource};
use laser_store::run_store::{PlannedRun, RunStore};

use super::{Begun, Night};
use crate::config::RunConfig;
use crate::encoder;
use crate::pool_sets;
use crate::previous::latest;

/// Unfinished runs of this many nights back are taken up again by the same command.
const RESUME_NIGHTS: i64 = 2;

/// A run that must be planned.
pub(crate) async fn planned(store: &RunStore) -> Result<PlannedRun> {
    let missing = || {
        let (output, run) = (store.output().url(), store.name());
        format!("{output}: no run {run:?} here; `laser status` lists those that there are")
    };
    store.planned().await?.with_context(missing)
}

impl Night<'_> {
    /// The night to work on: the configured one, else an unfinished one of the last nights, else today.
    pub(crate) async fn choose_run(&self) -> Result<(Date, RunStore)> {
        if let Some(date) = self.config.run.date {
            return Ok((date, self.run_of(date).await?));
        }
        let today = self.config.night();
        let known = RunStore::names(&self.output).await?;
        for back in 1..=RESUME_NIGHTS {
            let date = today.checked_sub(back.days())?;
            if !known.iter().any(|run| run.starts_with(&date.to_string())) {
                continue;
            }
            let store = self.run_of(date).await?;
            if self.is_open(&store).await? {
                tracing::info!(run = store.name(), "taking up an unfinished run");
                return Ok((date, store));
            }
        }
        Ok((today, self.run_of(today).await?))
    }

    /// Whether a run of an earlier night is to be finished. One that was cancelled, or that would only be withheld once
    /// more, is not: every night would come to it again, and never to its own.
    async fn is_open(&self, store: &RunStore) -> Result<bool> {
        let Some(run) = store.planned().await? else {
            return Ok(false);
        };
        if run.is_published().await? || store.is_cancelled().await? {
            return Ok(false);
        }
        Ok(!finalise::is_withheld(&run, &self.terms()).await?)
    }

    /// The run `expected`, which must be what the configuration makes of its night. That it was cancelled is taken
    /// back.
    pub(crate) async fn resume_run(&self, expected: &str) -> Result<(Date, RunStore)> {
        planned(&RunStore::new(&self.output, expected)).await?;
        // On a later day, too, which has a night of its own.
        let date = self.config.run.date.or(name_date(expected)).unwrap_or_else(|| self.config.night());
        let store = self.run_of(date).await?;
        let run = store.name();
        ensure!(
            run == expected,
            "run {expected} was begun with another configuration, another --previous or other inputs: these make run \
             {run}"
        );
        store.resume().await?;
        Ok((date, store))
    }

    /// The run on a date, named by what it depends on, so that it is found again.
    async fn run_of(&self, date: Date) -> Result<RunStore> {
        let inputs = fingerprints(&self.config.input).await?;
        let run = RunConfig { date: None, attempts: 0, memory_mb: 0, deadline: None, ..self.config.run.clone() };
        let identity = Digest::of_json(&(
            self.spec.digest(),
            &self.config.input,
            inputs,
            previous::fingerprint(&self.config.previous, self.spec.data_set(), date).await?,
            &self.config.pools,
            run,
        ));
        let identity = pool_sets::with_embeddings(identity, &self.config.pools).await?;
        let identity = match &self.config.lists {
            None => identity,
            Some(lists) => Digest::of_json(&(identity, &lists.item)),
        };
        let identity = match self.list_rows() {
            ListRows::User => identity,
            rows @ ListRows::Item => Digest::of_json(&(identity, rows)),
        };
        let identity = match self.config.output.runners_up {
            0 => identity,
            runners_up => Digest::of_json(&(identity, "runners_up", runners_up)),
        };
        let identity = match self.config.gate() {
            None => identity,
            Some(guards) => Digest::of_json(&(identity, guards)),
        };
        // Runs without embeddings keep the names that they had before there were any.
        let identity = match &self.encoder {
            None => identity,
            Some(files) => Digest::of_json(&(identity, encoder::spec(files))),
        };
        let identity = match &self.canary {
            None => identity,
            Some(entities) => Digest::of_json(&(identity, entities.canary())),
        };
        Ok(RunStore::new(&self.output, dated_name(date, &identity)))
    }

    /// What the run was begun with, or would be now.
    pub(super) async fn pins(&self, date: Date, store: &RunStore) -> Result<Pins> {
        if let Some(pins) = store.pins().await? {
            return Ok(pins);
        }
        Ok(Pins {
            previous: latest(self.config, &self.home, self.spec.data_set(), date).await?,
            pools: pool_sets::choose(self.config, &self.home, store.name()).await?,
        })
    }

    pub(super) fn begun(&self, date: Date, store: RunStore, pins: Pins) -> Result<Begun> {
        Ok(Begun {
            date,
            previous: previous::resolve_latest(&self.config.previous, &self.home, &pins.previous),
            builds_pools: pins.pools == PoolRegistry::place(store.name())?,
            pools: pins.pools,
            store,
        })
    }

    /// Shows what `latest` stands for.
    pub(super) fn show_previous(&self, begun: &Begun, progress: &mut dyn Progress) {
        if !self.config.previous.iter().any(PreviousSource::is_latest) {
            return;
        }
        progress.stage("previous knowledge");
        let paths: Vec<&str> = begun.previous.iter().map(|s| s.path.as_str()).collect();
        progress.finish_with(&match paths.as_slice() {
            [] => format!(
                "a first night: no complete night before {} in {}, so no previous texts and no pools; tonight's texts \
                 draft from those before them",
                begun.date,
                self.home.url()
            ),
            paths => paths.join(", "),
        });
    }
}
