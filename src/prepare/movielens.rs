//! MovieLens' own files: 100k, 1M (and 10M), and the CSV archives from `latest` to 32M.
//!
//! The format is told by the files that are there. Titles stay as MovieLens writes them, codes become the words
//! of GroupLens' READMEs, ages the ranges of 1M everywhere, US zip codes the region of their first digit.
//! Histories keep every rating: oldest first where the data has timestamps, in file order where it has not.
//! Beside 1M, `ratings.csv` (user,movie,rating) is accepted for `ratings.dat`, and `movies_extended.csv` adds
//! director and actors.
//!
//! With a [`Division`] histories and counts end at an instant, so that texts written from them know nothing of what
//! comes later, and interactions of unknown time are left out of everything. `partial_timestamps.csv`
//! (user,movie,timestamp) beside `ratings.csv` then tells the time of those that it lists.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroI64;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use arrow::datatypes::{DataType, Field};
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_schema::interactions::{SplitBy, Until};
use laser_store::Location;
use serde::{Deserialize, Serialize};

use super::table::{RowWriter, TableWriter, float32, history, int64, text, texts};
use super::{PrepareSummary, Tables, for_each_line, for_each_record};

/// Timestamps of some of 1M's ratings.
const PARTIAL_TIMESTAMPS: &str = "partial_timestamps.csv";

/// Users' ages: the first year of each range of 1M, and the range.
const AGES: [(u8, &str); 7] =
    [(0, "under 18"), (18, "18-24"), (25, "25-34"), (35, "35-44"), (45, "45-49"), (50, "50-55"), (56, "56 or older")];

/// The occupations of 1M by code.
const OCCUPATIONS: [&str; 21] = [
    "other",
    "academic or educator",
    "artist",
    "clerical or admin",
    "college or grad student",
    "customer service",
    "doctor or health care",
    "executive or managerial",
    "farmer",
    "homemaker",
    "K-12 student",
    "lawyer",
    "programmer",
    "retired",
    "sales or marketing",
    "scientist",
    "self-employed",
    "technician or engineer",
    "tradesman or craftsman",
    "unemployed",
    "writer",
];

/// The areas of the United States by the first digit of a zip code.
const REGIONS: [&str; 10] = [
    "Northeast",
    "Mid-Atlantic",
    "Upper South",
    "Deep South",
    "Great Lakes",
    "Upper Midwest",
    "Central Plains",
    "South Central",
    "Mountain West",
    "Pacific",
];

/// Where histories end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Division {
    /// The instant or share.
    pub(crate) until: Until,
    /// Whether the share is of all interactions or of each user's.
    pub(crate) by: SplitBy,
}

/// Reads the MovieLens archive unpacked in `dir` and writes `users.parquet`, `items.parquet` and
/// `interactions.parquet` to `output`.
///
/// # Errors
/// A directory that holds no known format, the first line that is wrong, and a division of ratings none of which has a
/// timestamp; nothing is written then.
pub(crate) async fn movielens(dir: &Path, output: &Location, division: Option<Division>) -> Result<PrepareSummary> {
    let mut data = read(dir)?;
    ensure!(!data.movies.is_empty(), "{}: the list of movies is empty", dir.display());
    let ratings: u64 = data.movies.iter().map(|movie| movie.ratings).sum();
    ensure!(ratings > 0, "{}: the list of ratings is empty", dir.display());
    let mut untimed = 0;
    if division.is_some() {
        if dir.join(PARTIAL_TIMESTAMPS).is_file() {
            read_partial_timestamps(&mut data, &dir.join(PARTIAL_TIMESTAMPS))?;
        }
        untimed = data.remove_untimed();
        ensure!(
            untimed < ratings,
            "{}: no rating has a timestamp, so there is nothing for --until to divide by; leave it out",
            dir.display()
        );
    }
    data.sort();
    let interactions = data.interactions()?;
    if let Some(division) = division {
        data.end_histories(division);
    }
    let users = data.users.len() as u64;
    let items = data.movies.len() as u64;
    let tables = Tables {
        users: data.write_users(&output.join("users.parquet")).await?,
        items: data.write_items(&output.join("items.parquet")).await?,
        interactions: Some(interactions.finish(&output.join("interactions.parquet")).await?),
    };
    Ok(PrepareSummary {
        users,
        items,
        interactions: ratings - untimed,
        in_histories: data.movies.iter().map(|movie| movie.ratings).sum(),
        untimed,
        tables,
    })
}

fn read(dir: &Path) -> Result<MovieLens> {
    let has = |name: &str| dir.join(name).is_file();
    if has("u.data") && has("u.item") {
        read_100k(dir)
    } else if has("movies.dat") && (has("ratings.dat") || has("ratings.csv")) {
        read_1m(dir)
    } else if has("movies.csv") && has("ratings.csv") {
        read_latest(dir)
    } else {
        bail!(
            "{}: no MovieLens data set here; expected u.data with u.item (100k), movies.dat with \
             ratings.dat or ratings.csv (1M, 10M), or movies.csv with ratings.csv (latest, 20M to \
             32M). Give the directory that the archive was unpacked to",
            dir.display()
        )
    }
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

#[derive(Debug, Serialize)]
struct Movie {
    #[serde(skip)]
    id: i64,
    #[serde(skip)]
    ratings: u64,
    title: String,
    genres: Option<Vec<String>>,
    year: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    director: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actors: Option<Vec<String>>,
}

#[derive(Debug, Default)]
struct User {
    profile: Profile,
    ratings: Vec<Rating>,
}

#[derive(Debug, Default, Serialize)]
struct Profile {
    gender: Option<&'static str>,
    age: Option<&'static str>,
    occupation: Option<String>,
    region: Option<&'static str>,
}

/// 16 bytes, since the largest archive has 32 million of them.
#[derive(Debug, Clone, Copy)]
struct Rating {
    /// Seconds since 1970, if known.
    timestamp: Option<NonZeroI64>,
    movie: u32,
    stars: f32,
}

impl Rating {
    /// The timestamp, exact as MovieLens' are far below 2^53; 0 if it is unknown.
    fn seconds(&self) -> f64 {
        self.timestamp.map_or(0.0, |time| time.get() as f64)
    }
}

#[derive(Serialize)]
struct UserColumns<'a> {
    #[serde(flatten)]
    profile: Option<&'a Profile>,
    history: Vec<Seen<'a>>,
}

#[derive(Serialize)]
struct Seen<'a> {
    title: &'a str,
    genres: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    director: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actors: Option<&'a [String]>,
    rating: f32,
    timestamp: Option<NonZeroI64>,
}

impl MovieLens {
    fn add_movie(&mut self, id: i64, title: &str, genres: Vec<String>) -> Result<(), String> {
        let position = u32::try_from(self.movies.len()).map_err(|e| e.to_string())?;
        if self.index.insert(id, position).is_some() {
            return Err(format!("movie {id} is there twice; remove one of the two"));
        }
        self.movies.push(Movie {
            id,
            ratings: 0,
            title: title.trim().to_owned(),
            genres: list(genres),
            year: year(title),
            director: None,
            actors: None,
        });
        Ok(())
    }

    fn add_user(&mut self, id: i64, profile: Profile) -> Result<(), String> {
        self.users_listed = true;
        match self.users.insert(id, User { profile, ratings: Vec::new() }) {
            None => Ok(()),
            Some(_) => Err(format!("user {id} is there twice; remove one of the two")),
        }
    }

    fn add_rating(&mut self, user: i64, movie: i64, stars: f32, time: i64) -> Result<(), String> {
        if !(0.5..=5.0).contains(&stars) {
            return Err(format!("rating {stars} is not between 0.5 and 5"));
        }
        let unknown = |what, id| format!("{what} {id} is not in the list of {what}s of this data set");
        let position = *self.index.get(&movie).ok_or_else(|| unknown("movie", movie))?;
        if self.users_listed && !self.users.contains_key(&user) {
            return Err(unknown("user", user));
        }
        self.movies[position as usize].ratings += 1;
        let rating = Rating { timestamp: NonZeroI64::new(time), movie: position, stars };
        self.users.entry(user).or_default().ratings.push(rating);
        Ok(())
    }

    /// Removes ratings without timestamp; how many they were.
    fn remove_untimed(&mut self) -> u64 {
        let mut removed = 0;
        for user in self.users.values_mut() {
            let before = user.ratings.len();
            user.ratings.retain(|rating| rating.timestamp.is_some());
            removed += (before - user.ratings.len()) as u64;
        }
        removed
    }

    /// Oldest first; stable, so that without timestamps file order stays.
    fn sort(&mut self) {
        for user in self.users.values_mut() {
            user.ratings.sort_by_key(|rating| rating.timestamp);
        }
    }

    /// All ratings, by user and in their order.
    fn interactions(&self) -> Result<RowWriter> {
        #[derive(Serialize)]
        struct Row {
            user: i64,
            item: i64,
            rating: f32,
            timestamp: Option<NonZeroI64>,
        }
        let columns = vec![
            Field::new("user", DataType::Int64, false),
            Field::new("item", DataType::Int64, false),
            float32("rating"),
            int64("timestamp"),
        ];
        let mut table = RowWriter::new("interactions", columns)?;
        for (&user, of_user) in &self.users {
            for rating in &of_user.ratings {
                table.push(&Row {
                    user,
                    item: self.movies[rating.movie as usize].id,
                    rating: rating.stars,
                    timestamp: rating.timestamp,
                })?;
            }
        }
        Ok(table)
    }

    /// Leaves in histories and counts only what is before the division.
    fn end_histories(&mut self, division: Division) {
        let users = (0u32..).zip(self.users.values());
        let times = users.flat_map(|(user, of_user)| {
            let ratings = of_user.ratings.iter();
            ratings.map(move |rating| (user, rating.seconds()))
        });
        let ends = division.until.instants(division.by, self.users.len(), times);
        self.movies.iter_mut().for_each(|movie| movie.ratings = 0);
        for (user, end) in self.users.values_mut().zip(ends) {
            user.ratings.retain(|rating| rating.seconds() < end);
            for rating in &user.ratings {
                self.movies[rating.movie as usize].ratings += 1;
            }
        }
    }

    async fn write_users(&self, location: &Location) -> Result<String> {
        let profile = [text("gender"), text("age"), text("occupation"), text("region")];
        let mut columns = if self.users_listed { profile.to_vec() } else { Vec::new() };
        let mut seen = vec![text("title"), texts("genres")];
        seen.extend(self.extended_columns());
        seen.extend([float32("rating"), int64("timestamp")]);
        columns.push(history(seen));
        let mut table = TableWriter::new(Kind::User, IdType::Int64, columns)?;
        for (id, user) in &self.users {
            let columns = UserColumns {
                profile: self.users_listed.then_some(&user.profile),
                history: user.ratings.iter().map(|r| Seen::new(&self.movies, r)).collect(),
            };
            table.push(id, &columns, user.ratings.len() as u64)?;
        }
        table.finish(location).await
    }

    async fn write_items(&self, location: &Location) -> Result<String> {
        let mut columns = vec![text("title"), texts("genres"), int64("year")];
        columns.extend(self.extended_columns());
        let mut table = TableWriter::new(Kind::Item, IdType::Int64, columns)?;
        for movie in &self.movies {
            table.push(movie.id, movie, movie.ratings)?;
        }
        table.finish(location).await
    }

    fn extended_columns(&self) -> Vec<Field> {
        if self.extended { vec![text("director"), texts("actors")] } else { Vec::new() }
    }
}

impl<'a> Seen<'a> {
    fn new(movies: &'a [Movie], rating: &Rating) -> Self {
        let movie = &movies[rating.movie as usize];
        Self {
            title: &movie.title,
            genres: movie.genres.as_deref(),
            director: movie.director.as_deref(),
            actors: movie.actors.as_deref(),
            rating: rating.stars,
            timestamp: rating.timestamp,
        }
    }
}

fn read_100k(dir: &Path) -> Result<MovieLens> {
    let mut genres = Vec::new();
    for_each_line(&dir.join("u.genre"), |line| {
        let [name, _] = cells(line, "|", "name|number")?;
        genres.push(name.to_owned());
        Ok(())
    })?;
    let mut data = MovieLens::default();
    for_each_line(&dir.join("u.item"), |line| {
        let cells: Vec<&str> = line.split('|').collect();
        if cells.len() != 5 + genres.len() {
            return Err(format!(
                "{} cells; expected id|title|release date|video release date|URL and one flag for \
                 each of the {} genres of u.genre",
                cells.len(),
                genres.len()
            ));
        }
        let flagged = genres.iter().zip(&cells[5..]).filter(|&(_, &flag)| flag == "1");
        let known = flagged.map(|(name, _)| name.clone()).filter(|name| name != "unknown");
        data.add_movie(number(cells[0], "movie id")?, cells[1], known.collect())
    })?;
    for_each_line(&dir.join("u.user"), |line| {
        let [id, years, gender, occupation, zip] = cells(line, "|", "id|age|gender|occupation|zip")?;
        let profile = Profile {
            gender: Some(self::gender(gender)?),
            age: Some(age(number(years, "age")?)),
            occupation: Some(occupation.to_owned()),
            region: region(zip),
        };
        data.add_user(number(id, "user id")?, profile)
    })?;
    read_ratings(&mut data, &dir.join("u.data"), "\t", "user, item, rating and timestamp by tabs")?;
    Ok(data)
}

fn read_1m(dir: &Path) -> Result<MovieLens> {
    let mut data = MovieLens::default();
    for_each_line(&dir.join("movies.dat"), |line| {
        // From both ends: a title may itself hold `::`.
        let (id, rest) = line.split_once("::").unwrap_or_default();
        let (title, genres) = rest.rsplit_once("::").ok_or("expected id::title::genre|genre")?;
        data.add_movie(number(id, "movie id")?, title, split_genres(genres))
    })?;
    let users = dir.join("users.dat");
    if users.is_file() {
        for_each_line(&users, |line| {
            let [id, gender, years, occupation, zip] = cells(line, "::", "id::gender::age::occupation::zip")?;
            let profile = Profile {
                gender: Some(self::gender(gender)?),
                age: Some(age(number(years, "age")?)),
                occupation: Some(self::occupation(occupation)?.to_owned()),
                region: region(zip),
            };
            data.add_user(number(id, "user id")?, profile)
        })?;
    }
    if dir.join("movies_extended.csv").is_file() {
        read_extended(&mut data, &dir.join("movies_extended.csv"))?;
    }
    if dir.join("ratings.dat").is_file() {
        read_ratings(&mut data, &dir.join("ratings.dat"), "::", "user::movie::rating::timestamp")?;
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
        data.add_movie(line.movie, &line.title, split_genres(&line.genres))
    })?;
    read_ratings_csv(&mut data, &dir.join("ratings.csv"))?;
    Ok(data)
}

fn read_ratings(data: &mut MovieLens, path: &Path, separator: &str, format: &str) -> Result<()> {
    for_each_line(path, |line| {
        let [user, movie, stars, time] = cells(line, separator, format)?;
        data.add_rating(
            number(user, "user id")?,
            number(movie, "movie id")?,
            number(stars, "rating")?,
            number(time, "timestamp")?,
        )
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

fn read_partial_timestamps(data: &mut MovieLens, path: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        user: i64,
        movie: i64,
        timestamp: NonZeroI64,
    }
    let mut times = HashMap::new();
    for_each_record(path, |line: Line| {
        let unknown = || format!("movie {} is not in movies.dat", line.movie);
        let position = *data.index.get(&line.movie).ok_or_else(unknown)?;
        times.insert((line.user, position), line.timestamp);
        Ok(())
    })?;
    for (&user, of_user) in &mut data.users {
        for rating in &mut of_user.ratings {
            rating.timestamp = times.get(&(user, rating.movie)).copied().or(rating.timestamp);
        }
    }
    Ok(())
}

fn read_extended(data: &mut MovieLens, path: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "MovieID")]
        movie: i64,
        director: String,
        actors: String,
    }
    data.extended = true;
    for_each_record(path, |line: Line| {
        let position =
            *data.index.get(&line.movie).ok_or_else(|| format!("movie {} is not in movies.dat", line.movie))?;
        let movie = &mut data.movies[position as usize];
        movie.director = Some(line.director).filter(|name| !name.is_empty());
        movie.actors = list(split_list(&line.actors));
        Ok(())
    })
}

fn cells<'a, const N: usize>(line: &'a str, separator: &str, format: &str) -> Result<[&'a str; N], String> {
    let cells: Vec<&str> = line.split(separator).collect();
    let found = cells.len();
    cells.try_into().map_err(|_| format!("{found} cells; expected {N}: {format}"))
}

fn number<T: std::str::FromStr>(cell: &str, what: &str) -> Result<T, String> {
    cell.trim().parse().map_err(|_| format!("{what} {cell:?} is not a number of its range"))
}

fn split_list(cell: &str) -> Vec<String> {
    let names = cell.split('|').map(str::trim).filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

fn split_genres(cell: &str) -> Vec<String> {
    if cell == "(no genres listed)" { Vec::new() } else { split_list(cell) }
}

/// An empty list says that nothing is known, which the contract writes as null.
fn list(names: Vec<String>) -> Option<Vec<String>> {
    Some(names).filter(|names| !names.is_empty())
}

/// The year that a title ends with: `Heat (1995)`, `Heat (1995) (V)`, or the first of `Dekalog (1989-1990)`.
fn year(title: &str) -> Option<u16> {
    title.rsplit('(').find_map(|part| {
        let digits = part.get(..4).filter(|d| d.bytes().all(|b| b.is_ascii_digit()))?;
        let ends = part[4..].starts_with([')', '-', '–']);
        digits.parse().ok().filter(|_| ends)
    })
}

fn gender(code: &str) -> Result<&'static str, String> {
    match code {
        "F" => Ok("female"),
        "M" => Ok("male"),
        _ => Err(format!("gender {code:?} is neither F nor M")),
    }
}

fn age(years: u8) -> &'static str {
    let below = AGES.partition_point(|&(first, _)| first <= years);
    AGES[below - 1].1
}

fn occupation(code: &str) -> Result<&'static str, String> {
    let place: usize = number(code, "occupation")?;
    OCCUPATIONS
        .get(place)
        .copied()
        .ok_or_else(|| format!("occupation {place} is unknown; expected 0 to {}", OCCUPATIONS.len() - 1))
}

/// `None` for what is no US zip code (100k has some of Canada).
fn region(zip: &str) -> Option<&'static str> {
    let all_digits = zip.len() >= 5 && zip[..5].bytes().all(|b| b.is_ascii_digit());
    let first = zip.chars().next()?.to_digit(10)?;
    REGIONS.get(first as usize).copied().filter(|_| all_digits)
}

#[cfg(test)]
mod tests {
    use laser_schema::Entity;
    use laser_schema::interactions::InteractionTable;
    use laser_store::interactions::{Interactions, Needs};
    use serde_json::json;

    use super::super::testing::{files, location, read_table, shared};
    use super::*;

    const GENRES: &[u8] = b"unknown|0\nAction|1\nDrama|2\n\n";

    async fn prepare(input: &[(&str, &[u8])]) -> Result<(PrepareSummary, Vec<Entity>, Vec<Entity>)> {
        let dir = files(input);
        let output = tempfile::tempdir().unwrap();
        let summary = movielens(dir.path(), &location(output.path()), None).await?;
        let users = read_table(&summary.tables.users).await;
        let items = read_table(&summary.tables.items).await;
        Ok((summary, users, items))
    }

    const DIVIDED: [(&str, &[u8]); 4] = [
        ("movies.dat", b"1::Ash (1995)::Action\n2::Birch (1975)::Action\n3::Cedar (1996)::Crime\n"),
        ("users.dat", b"1::F::1::10::48067\n2::M::56::16::70072\n3::M::56::16::70072\n"),
        ("ratings.csv", b"user,movie,rating\n1,1,5\n1,2,4\n1,3,3\n2,1,2\n2,3,1\n3,3,1\n"),
        ("partial_timestamps.csv", b"user,movie,timestamp\n1,1,300\n1,2,100\n1,3,200\n2,1,400\n"),
    ];

    async fn divide(
        input: &[(&str, &[u8])],
        until: &str,
        by: SplitBy,
    ) -> Result<(PrepareSummary, Vec<Entity>, Vec<Entity>, Interactions)> {
        let (dir, output) = (files(input), tempfile::tempdir()?);
        let until = until.parse().unwrap();
        let division = Some(Division { until, by });
        let summary = movielens(dir.path(), &location(output.path()), division).await?;
        let users = read_table(&summary.tables.users).await;
        let items = read_table(&summary.tables.items).await;
        let table =
            InteractionTable { path: summary.tables.interactions.clone().unwrap(), ..InteractionTable::default() };
        let needs = Needs { rating: true, timestamp: true };
        Ok((summary, users, items, Interactions::read(&table, needs).await?))
    }

    #[tokio::test]
    async fn histories_and_counts_end_where_they_are_divided() {
        let (summary, users, items, interactions) = divide(&DIVIDED, "250", SplitBy::Time).await.unwrap();
        assert_eq!((summary.interactions, summary.in_histories, summary.untimed), (4, 2, 2));
        assert_eq!(titles(&users[0]), ["Birch (1975)", "Cedar (1996)"]);
        assert!(users[1].history.is_empty() && users[1].interactions == 0);
        let counts: Vec<u64> = items.iter().map(|item| item.interactions).collect();
        assert_eq!(counts, [0, 1, 1]);
        // All that have a time, also what comes later.
        let times: Vec<Option<f64>> = interactions.rows.iter().map(|row| row.timestamp).collect();
        assert_eq!(times, [100.0, 200.0, 300.0, 400.0].map(Some));
        assert_eq!(interactions.rows[0].rating, Some(4.0));
    }

    #[tokio::test]
    async fn a_share_divides_all_or_each_user() {
        let (_, users, ..) = divide(&DIVIDED, "0.5", SplitBy::Time).await.unwrap();
        assert_eq!(titles(&users[0]), ["Birch (1975)", "Cedar (1996)"]);
        let (_, users, ..) = divide(&DIVIDED, "0.5", SplitBy::User).await.unwrap();
        assert_eq!(titles(&users[0]), ["Birch (1975)"]);
    }

    #[tokio::test]
    async fn ratings_without_any_time_cannot_be_divided() {
        let error = divide(&DIVIDED[..3], "0.5", SplitBy::Time).await.unwrap_err();
        assert!(error.to_string().contains("no rating has a timestamp"), "{error}");
    }

    #[tokio::test]
    async fn without_a_division_nothing_is_left_out() {
        let (summary, users, _) = prepare(&DIVIDED).await.unwrap();
        assert_eq!((summary.interactions, summary.in_histories, summary.untimed), (6, 6, 0));
        // In file order: the times of some of the ratings order none.
        let in_file = ["Ash (1995)", "Birch (1975)", "Cedar (1996)"];
        assert_eq!(titles(&users[0]), in_file);
    }

    fn titles(user: &Entity) -> Vec<&str> {
        user.history.iter().map(|i| i.fields["title"].as_str().unwrap()).collect()
    }

    #[tokio::test]
    async fn the_100k_format_is_read_whole() {
        let (summary, users, items) = prepare(&[
            ("u.genre", GENRES),
            ("u.item", b"1|Caf\xe9 Noir (1995)|01-Jan-1995||http://x|0|1|1\n2|unknown||||1|0|0\n"),
            ("u.user", b"7|24|M|technician|85711\n3|70|F|none|V3N4P\n"),
            ("u.data", b"7\t1\t3\t900\n7\t2\t5\t100\n"),
        ])
        .await
        .unwrap();
        assert_eq!((summary.users, summary.items, summary.interactions), (2, 2, 2));
        let ids: Vec<String> = users.iter().map(|u| u.id.to_string()).collect();
        assert_eq!(ids, ["3", "7"]);
        assert_eq!(
            serde_json::Value::from(users[1].attributes.clone()),
            json!({"age": "18-24", "gender": "male", "occupation": "technician", "region": "Mountain West"})
        );
        assert_eq!(titles(&users[1]), ["unknown", "Café Noir (1995)"]);
        assert!(!users[0].attributes.contains_key("region") && users[0].history.is_empty());
        assert_eq!(
            serde_json::Value::from(items[0].attributes.clone()),
            json!({"genres": ["Action", "Drama"], "title": "Café Noir (1995)", "year": 1995})
        );
        assert_eq!(json!(items[1].attributes), json!({"title": "unknown"}));
        assert_eq!(items[1].interactions, 1);
    }

    #[tokio::test]
    async fn the_1m_format_is_read_whole() {
        let (summary, users, items) = prepare(&[
            ("movies.dat", b"1::Mis\xe9rables, Les (1995)::Drama|Musical\n2::Odd:: One: Two (1980)::Action\n"),
            ("users.dat", b"1::F::1::10::48067\n2::M::56::16::70072-1234\n"),
            ("ratings.dat", b"1::2::5::978300760\n1::1::4::978300000\n"),
        ])
        .await
        .unwrap();
        assert_eq!((summary.users, summary.items, summary.interactions), (2, 2, 2));
        assert_eq!(titles(&users[0]), ["Misérables, Les (1995)", "Odd:: One: Two (1980)"]);
        let first = json!(users[0].history[0].fields);
        assert_eq!(
            first,
            json!({"title": "Misérables, Les (1995)", "genres": ["Drama", "Musical"],
                   "rating": 4.0, "timestamp": 978_300_000})
        );
        assert_eq!(
            json!(users[1].attributes),
            json!({"age": "56 or older", "gender": "male", "occupation": "self-employed",
                   "region": "South Central"})
        );
        assert_eq!(items[1].attributes["genres"], json!(["Action"]));
    }

    #[tokio::test]
    async fn ratings_csv_and_the_extended_file_serve_beside_1m() {
        let (_, users, items) = prepare(&[
            ("movies.dat", b"1::One (1995)::Drama\n2::Two (1980)::Action\n"),
            ("users.dat", b"1::F::25::10::48067\n"),
            ("ratings.csv", b"user,movie,rating\n1,2,5\n1,1,4\n"),
            (
                "movies_extended.csv",
                "MovieID,overview,director,actors\n1,\"two\nlines, \"\"quoted\"\"\",Ana \u{17d}ile,Bo Ek|Cy Um\n2,,,\n"
                    .as_bytes(),
            ),
        ])
        .await
        .unwrap();
        assert_eq!(titles(&users[0]), ["Two (1980)", "One (1995)"]);
        assert!(users[0].history[0].timestamp().is_none());
        assert!(!users[0].history[0].fields.contains_key("director"));
        assert_eq!(users[0].history[1].fields["director"], "Ana Žile");
        assert_eq!(items[0].attributes["actors"], json!(["Bo Ek", "Cy Um"]));
        assert_eq!(json!(items[1].attributes), json!({"genres": ["Action"], "title": "Two (1980)", "year": 1980}));
    }

    #[tokio::test]
    async fn the_10m_format_has_no_users_file_and_half_stars() {
        let (summary, users, _) = prepare(&[
            ("movies.dat", "122::Café (1992)::Comedy|Romance\n".as_bytes()),
            ("ratings.dat", b"9::122::4.5::838985046\n"),
        ])
        .await
        .unwrap();
        assert_eq!(summary.users, 1);
        assert!(users[0].attributes.is_empty());
        assert_eq!(users[0].history[0].fields["rating"], 4.5);
        assert_eq!(titles(&users[0]), ["Café (1992)"]);
    }

    #[tokio::test]
    async fn the_latest_format_is_read_whole() {
        let (summary, users, items) = prepare(&[
            (
                "movies.csv",
                "movieId,title,genres\r\n5,\"Say \"\"Aye\"\", Captain (1996)\",Comedy|IMAX\r\n6,Señal,(no genres listed)\r\n"
                    .as_bytes(),
            ),
            (
                "ratings.csv",
                b"userId,movieId,rating,timestamp\r\n4,5,0.5,1200\r\n1,6,4.0,100\r\n1,5,3.5,90\r\n",
            ),
        ])
        .await
        .unwrap();
        assert_eq!((summary.users, summary.items, summary.interactions), (2, 2, 3));
        assert_eq!(titles(&users[0]), ["Say \"Aye\", Captain (1996)", "Señal"]);
        assert_eq!(json!(items[1].attributes), json!({"title": "Señal"}));
        assert_eq!(items[0].interactions, 2);
    }

    /// Each case replaces or adds one file of a good archive.
    async fn check_refused(good: &[(&str, &[u8])], cases: &[(&str, &[u8], &str)]) {
        for &(name, content, expected) in cases {
            let mut input = good.to_vec();
            input.push((name, content));
            let error = format!("{:#}", prepare(&input).await.unwrap_err());
            assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
        }
    }

    #[tokio::test]
    async fn bad_records_of_the_csv_archives_are_named_by_file_and_line() {
        let good: [(&str, &[u8]); 2] =
            [("movies.csv", b"movieId,title,genres\n5,Five,Drama\n"), ("ratings.csv", b"userId,movieId,rating\n")];
        let cases: [(&str, &[u8], &str); 8] = [
            ("ratings.csv", b"user,movie,rating\n1,5,x\n", "ratings.csv, line 2: column \"rating\""),
            ("ratings.csv", b"user,movie,rating\n1,5,4\n1,5\n", "ratings.csv, line 3"),
            ("ratings.csv", b"user,film,rating\n1,5,4\n", "missing field `movie` (the header is user,film"),
            ("ratings.csv", b"user,movie,rating\n1,6,4\n", "ratings.csv, line 2: movie 6 is not in the list"),
            ("ratings.csv", b"user,movie,rating\n1,5,50\n", "line 2: rating 50 is not between 0.5 and 5"),
            ("ratings.csv", b"user,movie,rating\n", "the list of ratings is empty"),
            ("movies.csv", b"movieId,title,genres\n", "the list of movies is empty"),
            ("movies.csv", b"movieId,title,genres\n1,A,B\n1,A,B\n", "line 3: movie 1 is there twice"),
        ];
        check_refused(&good, &cases).await;
    }

    #[tokio::test]
    async fn bad_lines_of_1m_are_named_by_file_and_line() {
        let good: [(&str, &[u8]); 2] = [("movies.dat", b"1::One (1995)::Drama\n"), ("ratings.dat", b"2::1::5::1\n")];
        let cases: [(&str, &[u8], &str); 7] = [
            ("ratings.dat", b"\n1::1::5\n", "ratings.dat, line 2: 3 cells; expected 4: user::movie"),
            ("ratings.dat", b"1::1::5::soon\n", "ratings.dat, line 1: timestamp \"soon\""),
            ("movies.dat", b"1::One\n", "movies.dat, line 1: expected id::title"),
            ("users.dat", b"1::X::1::2::3\n", "users.dat, line 1: gender \"X\""),
            ("users.dat", b"1::F::1::21::3\n", "users.dat, line 1: occupation 21"),
            ("users.dat", b"1::F::1::2::3\n", "ratings.dat, line 1: user 2 is not in the list"),
            ("movies_extended.csv", b"MovieID,director,actors\n9,,\n", "line 2: movie 9 is not in"),
        ];
        check_refused(&good, &cases).await;
    }

    #[tokio::test]
    async fn bad_lines_of_100k_are_named_by_file_and_line() {
        let good: [(&str, &[u8]); 3] = [("u.genre", GENRES), ("u.item", b""), ("u.data", b"")];
        let cases: [(&str, &[u8], &str); 3] = [
            ("u.item", b"1|T||||0|1\n", "u.item, line 1: 7 cells"),
            ("u.genre", b"Drama\n", "u.genre, line 1: 1 cells; expected 2: name|number"),
            ("u.user", b"1|old|F|none|1\n", "u.user, line 1: age \"old\""),
        ];
        check_refused(&good, &cases).await;
    }

    #[tokio::test]
    async fn a_directory_without_a_known_format_is_refused() {
        for input in [&[][..], &[("u.data", &b""[..])], &[("movies.csv", &b""[..])]] {
            let error = prepare(input).await.unwrap_err().to_string();
            assert!(error.contains("no MovieLens data set here; expected u.data with u.item"), "{error}");
        }
    }

    #[test]
    fn years_are_parsed_from_titles() {
        let cases = [
            ("Heat (1995)", Some(1995)),
            ("Land (That Was) Time (1995) (V)", Some(1995)),
            ("Dekalog (1989–1990)", Some(1989)),
            ("2001: A Space Odyssey (1968) ", Some(1968)),
            ("Babylon 5", None),
            ("Nineteen (198)", None),
            ("Série (é)", None),
        ];
        for (title, expected) in cases {
            assert_eq!(year(title), expected, "{title}");
        }
    }

    #[test]
    fn ages_fall_into_the_ranges_of_1m() {
        let cases = [(1, "under 18"), (17, "under 18"), (18, "18-24"), (49, "45-49"), (99, "56 or older")];
        for (years, expected) in cases {
            assert_eq!(age(years), expected, "{years}");
        }
    }

    /// Counts of users, movies and ratings, and whether the movies' counts add up to the ratings.
    async fn check_archive(folder: &str, expected: (u64, u64, u64)) {
        let Some(dir) = shared(folder) else { return };
        let output = tempfile::tempdir().unwrap();
        let summary = movielens(&dir, &location(output.path()), None).await.unwrap();
        assert_eq!((summary.users, summary.items, summary.interactions), expected);
        let items = read_table(&summary.tables.items).await;
        assert_eq!(items.len() as u64, expected.1);
        assert_eq!(items.iter().map(|i| i.interactions).sum::<u64>(), expected.2);
    }

    #[tokio::test]
    async fn the_archives_give_their_known_counts() {
        check_archive("data/ml-1m", (6_040, 3_883, 1_000_209)).await;
        check_archive("data/ml-100k", (943, 1_682, 100_000)).await;
    }

    #[tokio::test]
    async fn every_rating_of_100k_is_in_a_history_in_the_order_of_time() {
        let Some(dir) = shared("data/ml-100k") else {
            return;
        };
        let output = tempfile::tempdir().unwrap();
        let summary = movielens(&dir, &location(output.path()), None).await.unwrap();
        let users = read_table(&summary.tables.users).await;
        assert_eq!(users.iter().map(|u| u.history.len()).sum::<usize>(), 100_000);
        for user in users {
            assert_eq!(user.history.len() as u64, user.interactions);
            assert!(user.history.is_sorted_by(|a, b| a.timestamp().unwrap() <= b.timestamp().unwrap()));
        }
    }
}
