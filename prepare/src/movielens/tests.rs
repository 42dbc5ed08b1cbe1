//! MovieLens' formats and divisions, from small files and from the archives where they are there.

use std::path::Path;

use laser_schema::Entity;
use laser_schema::interactions::{InteractionTable, SplitBy};
use laser_store::interactions::{Interactions, Needs};
use serde_json::json;

use super::*;
use crate::testing::{files, location, read_table, shared};

/// A file's name and content.
type File = (&'static str, &'static [u8]);

const GENRES: &[u8] = b"unknown|0\nAction|1\nDrama|2\n\n";

/// What was prepared, read back.
struct Prepared {
    summary: PrepareSummary,
    users: Vec<Entity>,
    items: Vec<Entity>,
    interactions: Interactions,
}

async fn read(dir: &Path, histories: Histories) -> Result<Prepared> {
    let output = tempfile::tempdir().unwrap();
    let summary = movielens(dir, &location(output.path()), histories).await?;
    let (users, items) = (read_table(&summary.users_table).await, read_table(&summary.items_table).await);
    let table = InteractionTable { path: summary.interactions_table.clone().unwrap(), ..InteractionTable::default() };
    let needs = Needs { rating: true, timestamp: false };
    let interactions = Interactions::read(&table, needs).await.unwrap();
    Ok(Prepared { summary, users, items, interactions })
}

async fn divide(input: &[File], histories: Histories) -> Result<Prepared> {
    read(files(input).path(), histories).await
}

async fn prepare(input: &[File]) -> Result<Prepared> {
    divide(input, Histories::All).await
}

const DIVIDED: [File; 4] = [
    ("movies.dat", b"1::Ash (1995)::Action\n2::Birch (1975)::Action\n3::Cedar (1996)::Crime\n"),
    ("users.dat", b"1::F::1::10::48067\n2::M::56::16::70072\n3::M::56::16::70072\n"),
    ("ratings.csv", b"user,movie,rating\n1,1,5\n1,2,4\n1,3,3\n2,1,2\n2,3,1\n3,3,1\n"),
    ("partial_timestamps.csv", b"user,movie,timestamp\n1,1,300\n1,2,100\n1,3,200\n2,1,400\n"),
];

fn until(until: &str, by: SplitBy) -> Histories {
    Histories::Until { until: until.parse().unwrap(), by }
}

#[tokio::test]
async fn histories_and_counts_end_where_they_are_divided() {
    let Prepared { summary, users, items, interactions } = divide(&DIVIDED, until("250", SplitBy::Time)).await.unwrap();
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
    let Prepared { users, .. } = divide(&DIVIDED, until("0.5", SplitBy::Time)).await.unwrap();
    assert_eq!(titles(&users[0]), ["Birch (1975)", "Cedar (1996)"]);
    let Prepared { users, .. } = divide(&DIVIDED, until("0.5", SplitBy::User)).await.unwrap();
    assert_eq!(titles(&users[0]), ["Birch (1975)"]);
}

#[tokio::test]
async fn by_time_only_interactions_with_a_timestamp_count() {
    let Prepared { summary, users, items, interactions } = divide(&DIVIDED, Histories::Timed).await.unwrap();
    assert_eq!((summary.interactions, summary.in_histories, summary.untimed), (4, 4, 2));
    assert_eq!(titles(&users[0]), ["Birch (1975)", "Cedar (1996)", "Ash (1995)"]);
    assert_eq!((titles(&users[1]), users[1].interactions), (vec!["Ash (1995)".to_owned()], 1));
    assert!(users[2].history.is_empty() && users[2].interactions == 0);
    assert_eq!(items.iter().map(|item| item.interactions).collect::<Vec<_>>(), [2, 1, 1]);
    assert!(interactions.rows.iter().all(|row| row.timestamp.is_some()));
}

#[tokio::test]
async fn the_shares_of_1m_are_of_its_known_times() {
    let Some(dir) = shared("data/ml-1m") else { return };
    let Prepared { summary, users, .. } = read(&dir, until("0.8", SplitBy::Time)).await.unwrap();
    assert_eq!((summary.interactions, summary.untimed), (185_225, 1_000_209 - 185_225));
    let share = summary.in_histories as f64 / summary.interactions as f64;
    assert!((0.799..=0.8).contains(&share), "{share}");
    assert!(users.iter().all(in_order));
}

fn in_order(user: &Entity) -> bool {
    user.history.iter().is_sorted_by(|a, b| a.timestamp().unwrap() <= b.timestamp().unwrap())
}

#[tokio::test]
async fn ratings_without_any_time_cannot_be_divided() {
    for histories in [until("0.5", SplitBy::Time), Histories::Timed] {
        let error = divide(&DIVIDED[..3], histories).await.err().unwrap();
        assert!(error.to_string().contains("no rating has a timestamp"), "{error}");
    }
}

#[tokio::test]
async fn without_a_division_nothing_is_left_out() {
    let Prepared { summary, users, .. } = prepare(&DIVIDED).await.unwrap();
    assert_eq!((summary.interactions, summary.in_histories, summary.untimed), (6, 6, 0));
    // In file order: the times of some of the ratings order none.
    let in_file = ["Ash (1995)", "Birch (1975)", "Cedar (1996)"];
    assert_eq!(titles(&users[0]), in_file);
}

fn titles(user: &Entity) -> Vec<String> {
    user.history.iter().map(|i| i.item("title").unwrap()).collect()
}

#[tokio::test]
async fn the_100k_format_is_read_whole() {
    let Prepared { summary, users, items, .. } = prepare(&[
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
    let Prepared { summary, users, items, .. } = prepare(&[
        ("movies.dat", b"1::Mis\xe9rables, Les (1995)::Drama|Musical\n2::Odd:: One: Two (1980)::Action\n"),
        ("users.dat", b"1::F::1::10::48067\n2::M::56::16::70072-1234\n"),
        ("ratings.dat", b"1::2::5::978300760\n1::1::4::978300000\n"),
    ])
    .await
    .unwrap();
    assert_eq!((summary.users, summary.items, summary.interactions), (2, 2, 2));
    assert_eq!(titles(&users[0]), ["Misérables, Les (1995)", "Odd:: One: Two (1980)"]);
    let first = json!(users[0].history.iter().next());
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
    let Prepared { users, items, .. } = prepare(&[
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
    let history: Vec<_> = users[0].history.iter().collect();
    assert!(history[0].timestamp().is_none() && history[0].field("director").is_none());
    assert_eq!(history[1].fields()["director"], "Ana Žile");
    assert_eq!(items[0].attributes["actors"], json!(["Bo Ek", "Cy Um"]));
    assert_eq!(json!(items[1].attributes), json!({"genres": ["Action"], "title": "Two (1980)", "year": 1980}));
}

#[tokio::test]
async fn the_10m_format_has_no_users_file_and_half_stars() {
    let Prepared { summary, users, .. } = prepare(&[
        ("movies.dat", "122::Café (1992)::Comedy|Romance\n".as_bytes()),
        ("ratings.dat", b"9::122::4.5::838985046\n"),
    ])
    .await
    .unwrap();
    assert_eq!(summary.users, 1);
    assert!(users[0].attributes.is_empty());
    assert_eq!(users[0].history.iter().next().unwrap().fields()["rating"], 4.5);
    assert_eq!(titles(&users[0]), ["Café (1992)"]);
}

#[tokio::test]
async fn the_latest_format_is_read_whole() {
    let Prepared { summary, users, items, .. } = prepare(&[
        (
            "movies.csv",
            "movieId,title,genres\r\n5,\"Say \"\"Aye\"\", Captain (1996)\",Comedy|IMAX\r\n6,Señal,(no genres \
             listed)\r\n"
                .as_bytes(),
        ),
        ("ratings.csv", b"userId,movieId,rating,timestamp\r\n4,5,0.5,1200\r\n1,6,4.0,100\r\n1,5,3.5,90\r\n"),
    ])
    .await
    .unwrap();
    assert_eq!((summary.users, summary.items, summary.interactions), (2, 2, 3));
    assert_eq!(titles(&users[0]), ["Say \"Aye\", Captain (1996)", "Señal"]);
    assert_eq!(json!(items[1].attributes), json!({"title": "Señal"}));
    assert_eq!(items[0].interactions, 2);
}

#[tokio::test]
async fn bad_records_are_named_by_file_and_line() {
    const LATEST: &[File] =
        &[("movies.csv", b"movieId,title,genres\n5,Five,Drama\n"), ("ratings.csv", b"userId,movieId,rating\n")];
    const ML_1M: &[File] = &[("movies.dat", b"1::One (1995)::Drama\n"), ("ratings.dat", b"2::1::5::1\n")];
    const ML_100K: &[File] = &[("u.genre", GENRES), ("u.item", b""), ("u.data", b"")];
    // Each case replaces or adds one file of a good archive.
    let cases: [(&[File], File, &str); 18] = [
        (LATEST, ("ratings.csv", b"user,movie,rating\n1,5,x\n"), "ratings.csv, line 2: column \"rating\""),
        (LATEST, ("ratings.csv", b"user,movie,rating\n1,5,4\n1,5\n"), "ratings.csv, line 3"),
        (LATEST, ("ratings.csv", b"user,film,rating\n1,5,4\n"), "missing field `movie` (the columns are user,film"),
        (LATEST, ("ratings.csv", b"user,movie,rating\n1,6,4\n"), "ratings.csv, line 2: movie 6 is not in the list"),
        (LATEST, ("ratings.csv", b"user,movie,rating\n1,5,50\n"), "line 2: rating 50 is not between 0.5 and 5"),
        (LATEST, ("ratings.csv", b"user,movie,rating\n"), "the list of ratings is empty"),
        (LATEST, ("movies.csv", b"movieId,title,genres\n"), "the list of movies is empty"),
        (LATEST, ("movies.csv", b"movieId,title,genres\n1,A,B\n1,A,B\n"), "line 3: movie 1 is there twice"),
        (ML_1M, ("ratings.dat", b"\n1::1::5\n"), "ratings.dat, line 2: 3 cells; expected 4: user::movie"),
        (ML_1M, ("ratings.dat", b"1::1::5::soon\n"), "ratings.dat, line 1: column \"timestamp\": invalid digit"),
        (ML_1M, ("movies.dat", b"1::One\n"), "movies.dat, line 1: expected id::title"),
        (ML_1M, ("users.dat", b"1::X::1::2::3\n"), "users.dat, line 1: gender \"X\""),
        (ML_1M, ("users.dat", b"1::F::1::21::3\n"), "users.dat, line 1: occupation 21"),
        (ML_1M, ("users.dat", b"1::F::1::2::3\n"), "ratings.dat, line 1: user 2 is not in the list"),
        (ML_1M, ("movies_extended.csv", b"MovieID,director,actors\n9,,\n"), "line 2: movie 9 is not in"),
        (ML_100K, ("u.item", b"1|T||||0|1\n"), "u.item, line 1: 7 cells"),
        (ML_100K, ("u.genre", b"Drama\n"), "u.genre, line 1: 1 cells; expected 2: name|number"),
        (ML_100K, ("u.user", b"1|old|F|none|1\n"), "u.user, line 1: column \"age\": invalid digit"),
    ];
    for (good, file, expected) in cases {
        let error = prepare(&[good, &[file]].concat()).await.err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
    }
}

#[tokio::test]
async fn a_directory_without_a_known_format_is_refused() {
    for input in [&[][..], &[("u.data", &b""[..])], &[("movies.csv", &b""[..])]] {
        let error = prepare(input).await.err().unwrap().to_string();
        assert!(error.contains("no MovieLens data set here; expected u.data with u.item"), "{error}");
    }
}

/// An archive as a whole, if it is there: counts of users, movies and ratings, and whether the movies' counts add up to
/// the ratings.
async fn check_archive(folder: &str, expected: (u64, u64, u64)) -> Option<Prepared> {
    let found = read(&shared(folder)?, Histories::All).await.unwrap();
    assert_eq!((found.summary.users, found.summary.items, found.summary.interactions), expected);
    assert_eq!(found.items.len() as u64, expected.1);
    assert_eq!(found.items.iter().map(|i| i.interactions).sum::<u64>(), expected.2);
    Some(found)
}

#[tokio::test]
async fn the_archives_give_their_known_counts() {
    check_archive("data/ml-1m", (6_040, 3_883, 1_000_209)).await;
    let Some(found) = check_archive("data/ml-100k", (943, 1_682, 100_000)).await else { return };
    // Every rating is in a history, in the order of time.
    assert_eq!(found.users.iter().map(|u| u.history.len()).sum::<usize>(), 100_000);
    assert!(found.users.iter().all(|user| in_order(user) && user.history.len() as u64 == user.interactions));
}
