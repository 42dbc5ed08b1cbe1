//! The object that says that an erasure is under way, and the receipt that takes its place.
//!
//! ```text
//! OUTPUT/erasures/NAME.begun.json   the erasure, created before anything is changed; then it says what is going to be
//!                 NAME.json         its receipt, created when nothing is left; the other object is removed then
//! ```

use anyhow::{Context, Result, bail, ensure};
use jiff::civil::Date;
use laser_schema::erasure::{ERASURE_VERSION, Erasure};
use laser_schema::layout::dated_name;
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::location::Created;

/// The folder of erasures, below the output's root.
const FOLDER: &str = "erasures";

/// What the name of an erasure that is under way ends with.
const BEGUN: &str = ".begun.json";

/// What the name of a receipt ends with.
const RECEIPT: &str = ".json";

/// Refuses whatever writes to an output while an erasure is under way: it could bring back what is being erased.
pub(crate) async fn ensure_none(output: &Location) -> Result<()> {
    match begun(output).await? {
        None => Ok(()),
        Some(name) => bail!(
            "{}: an erasure is under way or was stopped; run its `laser erase` again, which ends it, then this command",
            output.join(FOLDER).join(&name).url()
        ),
    }
}

/// The object of the erasure that is under way, by its name in the folder.
async fn begun(output: &Location) -> Result<Option<String>> {
    let names = output.join(FOLDER).names_after(None).await?;
    Ok(names.into_iter().find(|name| name.ends_with(BEGUN)))
}

/// The erasure that was begun with these ids and has not ended.
///
/// # Errors
/// If another one is under way.
pub(super) async fn unfinished(output: &Location, kind: Kind, ids: &Digest) -> Result<Option<Erasure>> {
    let Some(name) = begun(output).await? else {
        return Ok(None);
    };
    let erasure = read(&output.join(FOLDER).join(&name)).await?;
    ensure!(
        erasure.kind == kind && erasure.ids_digest == *ids,
        "{}: another erasure, of {} {}s, is under way or was stopped; run `laser erase` with its --kind and --ids",
        output.join(FOLDER).join(&name).url(),
        erasure.ids,
        erasure.kind
    );
    Ok(Some(erasure))
}

/// The newest receipt of these ids.
pub(super) async fn receipt(output: &Location, kind: Kind, ids: &Digest) -> Result<Option<Erasure>> {
    let folder = output.join(FOLDER);
    let mut newest: Option<Erasure> = None;
    for name in folder.names_after(None).await?.into_iter().filter(|name| name.ends_with(RECEIPT)) {
        let receipt = read(&folder.join(&name)).await?;
        if receipt.kind == kind && receipt.ids_digest == *ids && newest.as_ref().is_none_or(|n| n.ended < receipt.ended)
        {
            newest = Some(receipt);
        }
    }
    Ok(newest)
}

/// A name that no receipt has.
pub(super) async fn name(output: &Location, date: Date, kind: Kind, ids: &Digest) -> Result<String> {
    let base = dated_name(date, &Digest::of_json(&(kind, ids)));
    let taken = output.join(FOLDER).names_after(None).await?;
    let mut name = base.clone();
    let mut number = 2;
    while taken.contains(&format!("{name}{RECEIPT}")) {
        name = format!("{base}-{number}");
        number += 1;
    }
    Ok(name)
}

/// Says that the erasure is under way.
///
/// # Errors
/// The store's, and that another process was first.
pub(super) async fn begin(output: &Location, erasure: &Erasure) -> Result<()> {
    let file = output.join(FOLDER).join(&format!("{}{BEGUN}", erasure.name));
    let created = file.create(encode(erasure).into()).await?;
    ensure!(created == Created::Won, "{}: another process has just begun this erasure", file.url());
    Ok(())
}

/// Says what the erasure that is under way changes.
pub(super) async fn replace(output: &Location, erasure: &Erasure) -> Result<()> {
    let file = output.join(FOLDER).join(&format!("{}{BEGUN}", erasure.name));
    Ok(file.write(encode(erasure).into()).await?)
}

/// Takes back that the erasure is under way, of which nothing was changed.
pub(super) async fn withdraw(output: &Location, erasure: &Erasure) -> Result<()> {
    Ok(output.join(FOLDER).join(&format!("{}{BEGUN}", erasure.name)).remove().await?)
}

/// Leaves the receipt; returns where.
pub(super) async fn end(output: &Location, erasure: &Erasure) -> Result<Location> {
    let receipt = output.join(FOLDER).join(&format!("{}{RECEIPT}", erasure.name));
    receipt.create(encode(erasure).into()).await?;
    withdraw(output, erasure).await?;
    Ok(receipt)
}

async fn read(file: &Location) -> Result<Erasure> {
    let erasure: Erasure = serde_json::from_slice(&file.read().await?)
        .with_context(|| format!("{}: not an erasure; restore it", file.url()))?;
    ensure!(
        erasure.version == ERASURE_VERSION,
        "{}: version {}, this Laser reads {ERASURE_VERSION}",
        file.url(),
        erasure.version
    );
    Ok(erasure)
}

fn encode(erasure: &Erasure) -> Vec<u8> {
    serde_json::to_vec_pretty(erasure).unwrap_or_default()
}
