//! Published parts as Delta Lake tables, whose readers see a night whole or not at all.
//!
//! Each data set and kind is a table: its root is `DATA_SET/kind=KIND`, its files are the parts that are there, and its
//! partition columns are `kind`, `dt` and `run`. A night is one commit, made with put-if-absent before `_SUCCESS` is
//! written.
//!
//! Each commit carries a transaction id per run, so a night is published once whatever happens: a process that was
//! killed after the commit, a second coordinator and a rerun all read the id and leave the table alone. The id's
//! version is odd while the run is in the table and even once [`Table::remove`] has taken it out; a run that another
//! one of the same night has replaced keeps its odd version, so it does not come back by itself, but only by
//! [`Table::follow`], once it is promoted.
//!
//! The table says what readers see; the parts and manifests stay what Laser itself reads. Nothing else may write the
//! table, and nothing else may remove files from its folder (no `VACUUM`): retention is `laser prune`'s.

mod columns;
mod log;
mod night;
mod table;
#[cfg(test)]
mod tests;
mod verify;

pub use table::{DeltaError, Table};
