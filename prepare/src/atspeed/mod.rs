//! Data sets of generative recommenders as AtSpeed (Lin et al., ICLR 2025) divides them: one sequence of items per user
//! in three parts, and the items with LC-Rec's semantic identifiers.
//!
//! A directory holds `items.jsonl` (`recid` from 0 in the order of the lines, `sid` with the codes of the identifier,
//! `title`, `brand`, `category`), and AtSpeed's own files `sequential_train.txt`, `sequential_valid.txt` and
//! `sequential_test.txt`. Each of these has one line per user, `user item item …`, oldest first; item n is the one with
//! the recid n - 1, and a user alone has no item in that part. Items keep the numbers of the sequences.
//!
//! Histories end with the part that [`UntilPart`] names, and the part behind it is the truth that lists are measured
//! against. Numbers of interactions end there too, so that texts know nothing of what comes later. 4 bytes per
//! interaction are held in memory.

mod read;
mod tables;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use laser_store::Location;
use serde::{Deserialize, Serialize};

use crate::table::Written;
use crate::{PrepareError, Result};

/// The last part of a sequence that belongs to a user's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UntilPart {
    /// What is trained on. The truth is the validation's part.
    Train,
    /// That and the validation's part. The truth is the test's part.
    #[default]
    Valid,
}

impl UntilPart {
    /// How many parts are in histories.
    fn parts(self) -> usize {
        match self {
            Self::Train => 1,
            Self::Valid => 2,
        }
    }
}

/// What a data set of sequences was found to hold, and its tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtSpeedSummary {
    /// Users with their histories.
    pub users: Written,
    /// Users left out of that table, and of the truth, because nothing is in their histories.
    pub without_history: u64,
    /// Items in the histories.
    pub in_histories: u64,
    /// Items with their identifiers.
    pub items: Written,
    /// The items of the histories, one a row.
    pub interactions: Written,
    /// Sequences to train on, each with its part for validation.
    pub sequences: Written,
    /// What users with a history took next.
    pub truth: Written,
}

/// Reads the data set in `dir` and writes `items.parquet`, `users.parquet`, `interactions.parquet`, `sequences.parquet`
/// and `truth.parquet` to `output`.
///
/// # Errors
/// A file that is missing, the first line that is wrong, a user whom not all parts have, and histories that are all
/// empty; nothing is written then.
pub async fn atspeed(dir: &Path, output: &Location, until: UntilPart) -> Result<AtSpeedSummary> {
    let data = read::read(dir)?;
    let parts = until.parts();
    let lengths = data.users.values().map(|user| user.first(parts).count() as u64);
    let (without_history, in_histories) =
        lengths.fold((0, 0), |(none, items), length| (none + u64::from(length == 0), items + length));
    if in_histories == 0 {
        return Err(PrepareError::at(dir, "no user has an item before the truth; all histories would be empty"));
    }
    Ok(AtSpeedSummary {
        items: data.write_items(&output.join("items.parquet"), parts).await?,
        users: data.write_users(&output.join("users.parquet"), parts).await?,
        interactions: data.write_interactions(&output.join("interactions.parquet"), parts).await?,
        sequences: data.write_sequences(&output.join("sequences.parquet")).await?,
        truth: data.write_truth(&output.join("truth.parquet"), parts).await?,
        without_history,
        in_histories,
    })
}

#[derive(Debug, Default)]
struct AtSpeed {
    /// Item n of the sequences is at n - 1.
    items: Vec<Item>,
    users: BTreeMap<i64, Sequence>,
}

#[derive(Debug, Serialize)]
struct Item {
    identifier: Vec<String>,
    title: Option<String>,
    brand: Option<String>,
    categories: Option<Vec<String>>,
}

/// Training, validation and test of a user, in numbers of items; none until its line is read.
#[derive(Debug, Default)]
struct Sequence([Option<Vec<u32>>; 3]);

impl Sequence {
    /// The items of the first parts, oldest first.
    fn first(&self, parts: usize) -> impl Iterator<Item = u32> {
        self.0.iter().take(parts).flatten().flatten().copied()
    }

    /// The items of a part.
    fn part(&self, part: usize) -> &[u32] {
        self.0.get(part).and_then(Option::as_deref).unwrap_or_default()
    }
}
