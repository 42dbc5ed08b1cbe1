//! Data sets that are made from a published one: embeddings and knowledge ids.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use bytes::Bytes;
use jiff::Timestamp;
use jiff::civil::Date;
use laser_delta::Table;
use laser_schema::layout::{DataSet, dated_name};
use laser_schema::manifest::{BEGUN, Details, Manifest, PartEntry, SUCCESS};
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::data_set::{self, ManifestError};

use crate::config::Config;
use crate::erasure::marker::ensure_none;
use crate::failure::may_pass;

/// A data set of one kind and night that is complete.
#[derive(Debug, Clone)]
pub struct Derived<D> {
    /// Its manifest.
    pub manifest: Manifest<D>,
    /// Its folder.
    pub folder: Location,
    /// Whether it was not complete before.
    pub is_new: bool,
}

/// Where a data set of one kind and night goes.
pub(crate) struct Destination {
    output: Location,
    data_set: DataSet,
    kind: Kind,
    date: Date,
    pub(crate) run: String,
    pub(crate) folder: Location,
    /// The Delta table that it enters, if there is to be one.
    table: Option<Table>,
}

impl Destination {
    /// Named, as a run is, by the date and by what the contents depend on.
    pub(crate) fn new(
        config: &Config,
        output: &Location,
        data_set: DataSet,
        (kind, date): (Kind, Date),
        identity: &Digest,
    ) -> Self {
        let run = dated_name(date, identity);
        let folder = output.join(&data_set.folder(kind, date, &run));
        let table = config.output.is_delta().then(|| Table::new(output, data_set, kind));
        Self { output: output.clone(), data_set, kind, date, run, folder, table }
    }

    /// The data set, if it is complete. A Delta table that does not know it yet takes it in.
    pub(crate) async fn find<D: Details>(&self) -> Result<Option<Derived<D>>> {
        ensure_none(&self.output).await?;
        let Some(manifest) = data_set::read_complete(&self.folder).await? else {
            return Ok(None);
        };
        if let Some(table) = &self.table {
            table.adopt(self.date, &self.run).await?;
        }
        self.tell_readers().await?;
        Ok(Some(Derived { manifest, folder: self.folder.clone(), is_new: false }))
    }

    /// Makes the data set by `work`, which reads nothing before it is polled. That it is being made is said before: an
    /// erasure that begins from now on sees it and is refused, and one that has begun is seen here. Parts would not do,
    /// since the first may come much later. Where nothing can be made of the input, nothing is left.
    pub(crate) async fn make<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let begun = self.folder.join(BEGUN);
        begun.write(Bytes::new()).await?;
        let made = async {
            ensure_none(&self.output).await?;
            work.await
        };
        let made = made.await;
        // Whoever else makes it fails by the same input. After what may pass, another one may be at it.
        if made.as_ref().is_err_and(|error| !may_pass(error)) {
            begun.remove().await?;
        }
        made
    }

    /// Completes the data set, which was begun and whose parts are there.
    pub(crate) async fn publish<D: Details>(
        &self,
        created: Timestamp,
        parts: Vec<PartEntry>,
        details: D,
    ) -> Result<Derived<D>> {
        let manifest = Manifest::new(&self.run, (self.kind, self.date), created, parts, details);
        data_set::write_manifest(&self.folder, &manifest).await?;
        if let Some(table) = &self.table {
            table.publish(self.date, &self.run).await?;
        }
        data_set::complete(&self.folder).await?;
        self.folder.join(BEGUN).remove().await?;
        self.tell_readers().await?;
        Ok(Derived { manifest, folder: self.folder.clone(), is_new: true })
    }

    /// Tells readers of the complete data set, and whoever made it where they get another one: what is made twice of
    /// the same texts, by two encoders, is as new as the texts both times.
    async fn tell_readers(&self) -> Result<()> {
        data_set::write_in_force(&self.output, self.data_set, self.kind, &BTreeSet::new()).await?;
        let in_force = match data_set::in_force(&self.output, self.data_set, self.kind, self.date).await {
            Err(ManifestError::Location(error)) => return Err(error.into()),
            // A night whose manifests cannot be read was warned of just now.
            found => found.ok().flatten(),
        };
        let Some(other) = in_force.filter(|run| *run != self.run) else {
            return Ok(());
        };
        if let Some(table) = &self.table {
            table.follow(self.date).await?;
        }
        let Self { data_set, kind, date, run, .. } = self;
        tracing::warn!(
            "{data_set} of {kind}s on {date}: readers get {other} and not {run}; to put this one in force, \
             `laser outputs promote` it"
        );
        Ok(())
    }
}

/// Refuses the folder of a night that is still being made.
pub(crate) async fn ensure_complete(folder: &Location) -> Result<()> {
    ensure!(
        data_set::is_complete(folder).await?,
        "{}: no {SUCCESS}: the night is not complete; run it again first",
        folder.url()
    );
    Ok(())
}
