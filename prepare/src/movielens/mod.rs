//! MovieLens' own files: 100k, 1M (and 10M), and the CSV archives from `latest` to 32M.
//!
//! Titles stay as MovieLens writes them, codes become the words of GroupLens' READMEs, ages the ranges of 1M
//! everywhere, US zip codes the region of their first digit. Beside 1M, `ratings.csv` (user,movie,rating) is accepted
//! for `ratings.dat`, and `movies_extended.csv` adds director and actors.
//!
//! The order of a file says nothing about time. Where `ratings.csv` has no timestamps, `partial_timestamps.csv`
//! (user,movie,timestamp) beside it tells those of some ratings; [`Histories::Timed`] and [`Histories::Until`] count
//! these alone, so that what is divided by time is divided by known times. With `Until` histories and counts end at an
//! instant, and texts written from them know nothing of what comes later.

mod codes;
mod formats;
mod histories;
mod items;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use arrow::datatypes::Field;
use laser_store::Location;

pub use histories::Histories;

use self::histories::User;
use self::items::Movie;
use crate::table::{text, texts};
use crate::{PrepareError, PrepareSummary, Result};

/// Reads the MovieLens archive unpacked in `dir` and writes `users.parquet`, `items.parquet` and
/// `interactions.parquet` to `output`.
///
/// # Errors
/// A directory that holds no known format, the first line that is wrong, and histories by time where no rating has a
/// timestamp; nothing is written then.
pub async fn movielens(dir: &Path, output: &Location, histories: Histories) -> Result<PrepareSummary> {
    let fault = |reason: &str| PrepareError::at(dir, reason);
    let mut data = formats::read(dir)?;
    if data.movies.is_empty() {
        return Err(fault("the list of movies is empty"));
    }
    if data.ratings() == 0 {
        return Err(fault("the list of ratings is empty"));
    }
    let mut untimed = 0;
    if histories != Histories::All {
        formats::read_partial_timestamps(&mut data, dir)?;
        untimed = data.remove_untimed();
        if data.ratings() == 0 {
            return Err(fault("no rating has a timestamp, which --until and --timed need; leave them out"));
        }
    }
    data.sort();
    let interactions = data.ratings();
    let interactions_table = data.write_interactions(&output.join("interactions.parquet")).await?;
    if let Histories::Until { until, by } = histories {
        data.end_histories(until, by);
    }
    Ok(PrepareSummary {
        users_table: data.write_users(&output.join("users.parquet")).await?.url,
        items_table: data.write_items(&output.join("items.parquet")).await?.url,
        interactions_table: Some(interactions_table.url),
        users: data.users.len() as u64,
        items: data.movies.len() as u64,
        interactions,
        in_histories: data.ratings(),
        untimed,
    })
}

#[derive(Debug, Default)]
struct MovieLens {
    /// In the order of the file, which is by id.
    movies: Vec<Movie>,
    index: HashMap<i64, u32>,
    users: BTreeMap<i64, User>,
    /// Whether there is a file of users, so that a rating by anybody else is a fault.
    users_listed: bool,
    /// Whether directors and actors are known.
    extended: bool,
}

impl MovieLens {
    /// Where a movie is in the list.
    fn position(&self, movie: i64) -> Result<u32, String> {
        let position = self.index.get(&movie).copied();
        position.ok_or_else(|| format!("movie {movie} is not in the list of movies of this data set"))
    }

    /// How many ratings there are.
    fn ratings(&self) -> u64 {
        self.movies.iter().map(|movie| movie.ratings).sum()
    }

    fn extended_columns(&self) -> Vec<Field> {
        if self.extended { vec![text("director"), texts("actors")] } else { Vec::new() }
    }
}
