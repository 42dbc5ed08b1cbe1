//! The three families of files: 100k, 1M (and 10M), and the CSV archives from `latest` to 32M.

use std::collections::HashMap;
use std::num::NonZeroI64;
use std::path::Path;

use serde::Deserialize;

use super::MovieLens;
use super::codes::{age, gender, occupation, region};
use super::histories::Profile;
use super::items::split;
use crate::delimited::{Columns, for_each_line, for_each_record};
use crate::{PrepareError, Result};

/// Timestamps of some of 1M's ratings.
const PARTIAL_TIMESTAMPS: &str = "partial_timestamps.csv";

/// Reads the data set in `dir`, whose format is told by the files that are there.
pub(super) fn read(dir: &Path) -> Result<MovieLens> {
    let has = |name: &str| dir.join(name).is_file();
    if has("u.data") && has("u.item") {
        read_100k(dir)
    } else if has("movies.dat") && (has("ratings.dat") || has("ratings.csv")) {
        read_1m(dir)
    } else if has("movies.csv") && has("ratings.csv") {
        read_latest(dir)
    } else {
        let reason = "no MovieLens data set here; expected u.data with u.item (100k), movies.dat with ratings.dat or \
                      ratings.csv (1M, 10M), or movies.csv with ratings.csv (latest, 20M to 32M). Give the directory \
                      that the archive was unpacked to";
        Err(PrepareError::at(dir, reason))
    }
}

fn read_100k(dir: &Path) -> Result<MovieLens> {
    let columns = Columns::new("|", &["name", "number"]);
    let mut genres = Vec::new();
    for_each_line(&dir.join("u.genre"), |line| {
        let (name, _): (String, String) = columns.parse(line)?;
        genres.push(name);
        Ok(())
    })?;
    let mut data = MovieLens::default();
    let columns = Columns::new("|", &["id", "title"]);
    for_each_line(&dir.join("u.item"), |line| {
        let cells: Vec<&str> = line.split('|').collect();
        if cells.len() != 5 + genres.len() {
            return Err(format!(
                "{} cells; expected id|title|release date|video release date|URL and one flag for each of the {} \
                 genres of u.genre",
                cells.len(),
                genres.len()
            ));
        }
        let (id, title): (i64, String) = columns.read(cells[..2].to_vec())?;
        let flagged = genres.iter().zip(&cells[5..]).filter(|&(_, &flag)| flag == "1");
        let known = flagged.map(|(name, _)| name.clone()).filter(|name| name != "unknown");
        data.add_movie(id, &title, known.collect())
    })?;
    let columns = Columns::new("|", &["id", "age", "gender", "occupation", "zip"]);
    for_each_line(&dir.join("u.user"), |line| {
        let (id, years, sex, occupation, zip): (i64, u8, String, String, String) = columns.parse(line)?;
        let occupation = Some(occupation);
        let profile = Profile { gender: Some(gender(&sex)?), age: Some(age(years)), occupation, region: region(&zip) };
        data.add_user(id, profile)
    })?;
    read_ratings(&mut data, &dir.join("u.data"), "\t")?;
    Ok(data)
}

fn read_1m(dir: &Path) -> Result<MovieLens> {
    let mut data = MovieLens::default();
    let columns = Columns::new("::", &["id", "title", "genres"]);
    for_each_line(&dir.join("movies.dat"), |line| {
        // From both ends: a title may itself hold `::`.
        let (id, rest) = line.split_once("::").unwrap_or_default();
        let (title, genres) = rest.rsplit_once("::").ok_or("expected id::title::genre|genre")?;
        let (id, title, genres): (i64, String, String) = columns.read(vec![id, title, genres])?;
        data.add_movie(id, &title, split(&genres))
    })?;
    let users = dir.join("users.dat");
    if users.is_file() {
        let columns = Columns::new("::", &["id", "gender", "age", "occupation", "zip"]);
        for_each_line(&users, |line| {
            let (id, sex, years, code, zip): (i64, String, u8, usize, String) = columns.parse(line)?;
            let occupation = Some(occupation(code)?.to_owned());
            let profile =
                Profile { gender: Some(gender(&sex)?), age: Some(age(years)), occupation, region: region(&zip) };
            data.add_user(id, profile)
        })?;
    }
    let extended = dir.join("movies_extended.csv");
    if extended.is_file() {
        read_extended(&mut data, &extended)?;
    }
    if dir.join("ratings.dat").is_file() {
        read_ratings(&mut data, &dir.join("ratings.dat"), "::")?;
    } else {
        read_ratings_csv(&mut data, &dir.join("ratings.csv"))?;
    }
    Ok(data)
}

fn read_latest(dir: &Path) -> Result<MovieLens> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "movieId")]
        movie: i64,
        title: String,
        genres: String,
    }
    let mut data = MovieLens::default();
    for_each_record(&dir.join("movies.csv"), |line: Line| {
        data.add_movie(line.movie, &line.title, split(&line.genres))
    })?;
    read_ratings_csv(&mut data, &dir.join("ratings.csv"))?;
    Ok(data)
}

fn read_ratings(data: &mut MovieLens, path: &Path, separator: &'static str) -> Result<()> {
    let columns = Columns::new(separator, &["user", "movie", "rating", "timestamp"]);
    for_each_line(path, |line| {
        let (user, movie, stars, time) = columns.parse(line)?;
        data.add_rating(user, movie, stars, time)
    })
}

fn read_ratings_csv(data: &mut MovieLens, path: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(alias = "userId")]
        user: i64,
        #[serde(alias = "movieId")]
        movie: i64,
        rating: f32,
        timestamp: Option<i64>,
    }
    for_each_record(path, |line: Line| data.add_rating(line.user, line.movie, line.rating, line.timestamp.unwrap_or(0)))
}

/// Takes the times of those ratings that `partial_timestamps.csv` lists, if it is there.
pub(super) fn read_partial_timestamps(data: &mut MovieLens, dir: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        user: i64,
        movie: i64,
        timestamp: NonZeroI64,
    }
    let path = dir.join(PARTIAL_TIMESTAMPS);
    if !path.is_file() {
        return Ok(());
    }
    let mut times = HashMap::new();
    for_each_record(&path, |line: Line| {
        times.insert((line.user, data.position(line.movie)?), line.timestamp);
        Ok(())
    })?;
    for (&user, of_user) in &mut data.users {
        for rating in &mut of_user.ratings {
            rating.timestamp = times.get(&(user, rating.movie)).copied().or(rating.timestamp);
        }
    }
    Ok(())
}

/// Directors and actors, which stand beside 1M in some copies.
fn read_extended(data: &mut MovieLens, path: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "MovieID")]
        movie: i64,
        director: String,
        actors: String,
    }
    data.extended = true;
    for_each_record(path, |line: Line| data.extend_movie(line.movie, line.director, &line.actors))
}
