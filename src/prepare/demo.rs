//! The demo's data set: two nights of an invented film service, made from a seed.
//!
//! Users belong to four planted taste groups, which show in what they watch, in their attributes and in their
//! embeddings. How much they watch has a long tail; some have fewer than 5 interactions and no embedding (cold
//! start). `last-night/` is the state before the cutoff, `tonight/` the state a day later, after the workload of
//! LASER 4.1: a changed user has only the first m of n interactions last night, m drawn in (n/2, n). Half of
//! the films and a few of the users are new tonight; a share of the users is the same on both nights.
//!
//! One seed gives the same bytes on every machine of 64 bits: no function is used that a platform may round its own
//! way.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use rand::distributions::{Distribution, WeightedIndex};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

use super::Tables;
use super::catalogue::{Film, GROUPS, films};
use super::table::{TableWriter, embedding, float32, history, int64, text, texts};

/// Raised whenever the same options give other tables.
const VERSION: u32 = 1;
/// Written before the tables and after them: it tells that they are ours, which, and whether all are there.
const STAMP: &str = "demo.json";
const NIGHTS: [Night; 2] = [Night::Last, Night::Tonight];

/// Below this many interactions an entity is cold: nothing collaborative is known of it.
const COLD: usize = 5;
const EMBEDDING: usize = 16;
/// 2025-03-01 00:00 UTC, the end of last night's data.
const CUTOFF: i64 = 1_740_787_200;
const DAY: i64 = 86_400;
const YEARS_BEFORE: i64 = 2 * 365 * DAY;
/// Of the users who were there last night, those who watched something since, in percent.
const CHANGED_PERCENT: usize = 85;
const NEW_USERS_PERCENT: usize = 5;
const COLD_USERS_PERCENT: usize = 12;
/// The longest history, a quarter of the catalogue at most.
const HISTORY_MAX: usize = 200;
/// The fewest users and items that leave every planted property room.
const ENTITIES_MIN: usize = 20;

const AGES: [&str; 6] = ["under 18", "18-24", "25-34", "35-44", "45-55", "56 or older"];
const OCCUPATIONS: [&str; 8] =
    ["student", "engineer", "nurse", "teacher", "artist", "shopkeeper", "accountant", "retired"];
const REGIONS: [&str; 5] = ["Capital", "North Coast", "Highlands", "River Plain", "South Isles"];

/// What the demo data set is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DemoOptions {
    /// Users tonight, at least 20.
    pub(crate) users: usize,
    /// Items tonight, at least 20.
    pub(crate) items: usize,
    /// Seed of everything that is drawn.
    pub(crate) seed: u64,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self { users: 240, items: 120, seed: 1 }
    }
}

/// Where the demo's tables are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DemoPaths {
    /// The state that yesterday's knowledge was made from.
    pub(crate) last_night: Tables,
    /// The state that tonight's run is about.
    pub(crate) tonight: Tables,
    /// Whether the tables were made now; if not, they were there already.
    pub(crate) written: bool,
}

/// Makes the demo data set below `output`, or leaves it as it is if the same one is there.
///
/// # Errors
/// Options out of range, tables there that this function did not write, and a place that cannot be written.
pub(crate) async fn demo(output: &Location, options: &DemoOptions) -> Result<DemoPaths> {
    for (name, count) in [("users", options.users), ("items", options.items)] {
        ensure!(count >= ENTITIES_MIN, "{name} = {count}: the demo needs at least {ENTITIES_MIN} {name}");
    }
    let written = !is_complete(output, options).await?;
    if written {
        write(output, options).await?;
    }
    let tables = |night: Night| Tables {
        users: night.table(output, Kind::User).url().to_owned(),
        items: night.table(output, Kind::Item).url().to_owned(),
        interactions: None,
    };
    Ok(DemoPaths { last_night: tables(Night::Last), tonight: tables(Night::Tonight), written })
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    laser_demo: u32,
    options: DemoOptions,
    /// False while the tables are being written: what is there may be cut short, but is ours to replace.
    complete: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Night {
    Last,
    Tonight,
}

impl Night {
    fn table(self, output: &Location, kind: Kind) -> Location {
        let night = if self == Self::Last { "last-night" } else { "tonight" };
        output.join(&format!("{night}/{kind}s.parquet"))
    }
}

async fn is_complete(output: &Location, options: &DemoOptions) -> Result<bool> {
    let tables = NIGHTS.iter().flat_map(|night| Kind::ALL.map(|kind| night.table(output, kind)));
    let mut present = Vec::new();
    for table in tables {
        if table.exists().await? {
            present.push(table);
        }
    }
    let stamp = output.join(STAMP);
    match stamp.read_optional().await? {
        Some(bytes) => {
            let found: Stamp = serde_json::from_slice(&bytes)
                .with_context(|| format!("{}: not the demo's own file; choose another directory", stamp.url()))?;
            let expected = Stamp { laser_demo: VERSION, options: *options, complete: true };
            Ok(found == expected && present.len() == NIGHTS.len() * Kind::ALL.len())
        }
        None => match present.first() {
            None => Ok(false),
            Some(table) => bail!(
                "{}: was not written by the demo (there is no {STAMP} in {}), so it is not \
                 overwritten; choose another directory or remove it",
                table.url(),
                output.url()
            ),
        },
    }
}

async fn write(output: &Location, options: &DemoOptions) -> Result<()> {
    let stamp = async |complete| {
        let stamp = Stamp { laser_demo: VERSION, options: *options, complete };
        output.join(STAMP).write(serde_json::to_vec_pretty(&stamp)?.into()).await?;
        anyhow::Ok(())
    };
    stamp(false).await?;
    let world = World::new(options)?;
    for night in NIGHTS {
        world.write_users(night, &night.table(output, Kind::User)).await?;
        world.write_items(night, &night.table(output, Kind::Item)).await?;
    }
    stamp(true).await
}

type Embedding = [f32; EMBEDDING];

struct World {
    items: Vec<Item>,
    users: Vec<User>,
}

struct Item {
    film: Film,
    /// Whether it is in the catalogue from tonight only.
    new: bool,
    popularity: u32,
    embedding: Embedding,
}

struct User {
    attributes: Attributes,
    embedding: Embedding,
    /// Oldest first.
    watched: Vec<Watched>,
    /// How many of those were watched before the cutoff; `None` for a user who is new tonight.
    before: Option<usize>,
}

#[derive(Clone, Copy, Serialize)]
struct Attributes {
    age: &'static str,
    occupation: &'static str,
    region: &'static str,
}

struct Watched {
    item: usize,
    rating: f32,
    timestamp: i64,
}

/// How many interactions each user has before and after the cutoff.
struct Plan {
    before: Option<usize>,
    after: usize,
}

impl World {
    fn new(options: &DemoOptions) -> Result<Self> {
        let rng = &mut Xoshiro256PlusPlus::seed_from_u64(options.seed);
        let items = make_items(options.items, rng);
        let periods =
            [
                Period::new(&items, CUTOFF - YEARS_BEFORE..CUTOFF, |item| if item.new { 0 } else { item.popularity })?,
                // What is new draws attention.
                Period::new(&items, CUTOFF..CUTOFF + DAY, |item| {
                    if item.new { 4 * item.popularity } else { item.popularity }
                })?,
            ];
        let plans = make_plans(options, rng);
        let users = plans.iter().map(|plan| make_user(plan, &items, &periods, rng)).collect();
        Ok(Self { items, users })
    }

    async fn write_users(&self, night: Night, location: &Location) -> Result<()> {
        let seen = vec![text("title"), texts("genres"), text("director"), float32("rating"), int64("timestamp")];
        let columns = vec![text("age"), text("occupation"), text("region"), history(seen), embedding()];
        let mut table = TableWriter::new(Kind::User, IdType::Int64, columns)?;
        for (user, id) in self.users.iter().zip(1u64..) {
            let Some(watched) = user.watched_by(night) else {
                continue;
            };
            let row = UserColumns {
                attributes: user.attributes,
                history: watched.iter().map(|w| Seen::new(&self.items[w.item].film, w)).collect(),
                embedding: (watched.len() >= COLD).then_some(user.embedding),
            };
            table.push(id, &row, watched.len() as u64)?;
        }
        table.finish(location).await?;
        Ok(())
    }

    async fn write_items(&self, night: Night, location: &Location) -> Result<()> {
        let columns = vec![
            text("title"),
            texts("genres"),
            int64("year"),
            text("country"),
            text("director"),
            texts("actors"),
            embedding(),
        ];
        let mut counts = vec![0; self.items.len()];
        for watched in self.users.iter().filter_map(|user| user.watched_by(night)).flatten() {
            counts[watched.item] += 1;
        }
        let mut table = TableWriter::new(Kind::Item, IdType::Int64, columns)?;
        for ((item, &count), id) in self.items.iter().zip(&counts).zip(1u64..) {
            if item.new && night == Night::Last {
                continue;
            }
            let embedding = (count >= COLD).then_some(item.embedding);
            table.push(id, &ItemColumns { film: &item.film, embedding }, count as u64)?;
        }
        table.finish(location).await?;
        Ok(())
    }
}

impl User {
    /// `None` where the user is not there yet.
    fn watched_by(&self, night: Night) -> Option<&[Watched]> {
        match night {
            Night::Last => self.before.map(|before| &self.watched[..before]),
            Night::Tonight => Some(&self.watched),
        }
    }
}

#[derive(Serialize)]
struct UserColumns<'a> {
    #[serde(flatten)]
    attributes: Attributes,
    history: Vec<Seen<'a>>,
    embedding: Option<Embedding>,
}

#[derive(Serialize)]
struct Seen<'a> {
    title: &'a str,
    genres: &'a [&'static str],
    director: &'a str,
    rating: f32,
    timestamp: i64,
}

#[derive(Serialize)]
struct ItemColumns<'a> {
    #[serde(flatten)]
    film: &'a Film,
    embedding: Option<Embedding>,
}

impl<'a> Seen<'a> {
    fn new(film: &'a Film, watched: &Watched) -> Self {
        Self {
            title: &film.title,
            genres: &film.genres,
            director: &film.director,
            rating: watched.rating,
            timestamp: watched.timestamp,
        }
    }
}

fn make_items(count: usize, rng: &mut impl Rng) -> Vec<Item> {
    let films = films(count, rng);
    let mut ranks: Vec<u32> = (0..).take(count).collect();
    ranks.shuffle(rng);
    let item = |((film, rank), i): ((Film, u32), usize)| Item {
        // Whole rounds of the groups alternate, so that each group has old and new films.
        new: (i / GROUPS) % 2 == 1,
        // A power law with a flat head: no film is in every history, and some are in almost none.
        popularity: 1 + 1_000_000_000 / (rank + 30).saturating_pow(3),
        embedding: around_centre(film.group, rng),
        film,
    };
    films.into_iter().zip(ranks).zip(0..).map(item).collect()
}

/// Draws who is new, who is cold, and how much of each history lies after the cutoff.
fn make_plans(options: &DemoOptions, rng: &mut impl Rng) -> Vec<Plan> {
    let longest = (options.items / 4).clamp(COLD, HISTORY_MAX);
    let new = options.users * NEW_USERS_PERCENT / 100;
    let cold = options.users * COLD_USERS_PERCENT / 100;
    let mut plans: Vec<Plan> = (0..options.users)
        .map(|i| {
            // New users come first here; half of them are cold, as most new users are.
            let is_cold = i >= new / 2 && i < new / 2 + cold;
            let n = if is_cold { rng.gen_range(1..COLD) } else { long_tailed(longest, rng) };
            if i < new { Plan { before: None, after: n } } else { Plan { before: Some(n), after: 0 } }
        })
        .collect();
    let changed = (options.users - new) * CHANGED_PERCENT / 100;
    plans.shuffle(rng);
    // With fewer than 3 interactions no m lies strictly between n/2 and n.
    let splittable = plans.iter_mut().filter(|plan| plan.before >= Some(3));
    for plan in splittable.take(changed) {
        let n = plan.before.unwrap_or_default();
        let m = rng.gen_range(n / 2 + 1..n);
        *plan = Plan { before: Some(m), after: n - m };
    }
    plans
}

/// At least [`COLD`]; half of all draws are below 9, a quarter above 12, cut at `longest`.
fn long_tailed(longest: usize, rng: &mut impl Rng) -> usize {
    let uniform = f64::from(rng.gen_range(1..=1_000_000u32)) / 1e6;
    #[expect(clippy::cast_possible_truncation, reason = "from 6 to 6,000: the fraction is dropped")]
    let n = (6.0 / uniform.sqrt()) as usize;
    n.min(longest)
}

/// A stretch of time: when things are watched, and what the users of each group choose from.
struct Period {
    choice: [WeightedIndex<u32>; GROUPS],
    times: Range<i64>,
}

impl Period {
    /// Items of a user's own group weigh nine times as much: three in four interactions are with them.
    fn new(items: &[Item], times: Range<i64>, weight: impl Fn(&Item) -> u32) -> Result<Self> {
        let of_group = |group| {
            WeightedIndex::new(items.iter().map(|item| {
                let own = if item.film.group == group { 9 } else { 1 };
                own * weight(item)
            }))
        };
        Ok(Self { choice: [of_group(0)?, of_group(1)?, of_group(2)?, of_group(3)?], times })
    }

    /// Adds `count` items that were not watched before, in the order of time.
    fn watch(&self, count: usize, group: usize, items: &[Item], watched: &mut Vec<Watched>, rng: &mut impl Rng) {
        let mut times: Vec<i64> = (0..count).map(|_| rng.gen_range(self.times.clone())).collect();
        times.sort_unstable();
        for timestamp in times {
            // Histories end at a quarter of the catalogue, so few draws hit what was watched already.
            let item = loop {
                let item = self.choice[group].sample(rng);
                if watched.iter().all(|w| w.item != item) {
                    break item;
                }
            };
            let ratings: &[u8] = if items[item].film.group == group { &[3, 4, 4, 5, 5] } else { &[1, 2, 3, 3, 4] };
            let rating = f32::from(ratings[rng.gen_range(0..ratings.len())]);
            watched.push(Watched { item, rating, timestamp });
        }
    }
}

fn make_user(plan: &Plan, items: &[Item], [before, after]: &[Period; 2], rng: &mut impl Rng) -> User {
    let group = rng.gen_range(0..GROUPS);
    let mut watched = Vec::new();
    before.watch(plan.before.unwrap_or(0), group, items, &mut watched, rng);
    after.watch(plan.after, group, items, &mut watched, rng);
    let attributes = Attributes {
        age: lean(&AGES, group, rng),
        occupation: lean(&OCCUPATIONS, group, rng),
        region: lean(&REGIONS, group, rng),
    };
    User { attributes, embedding: around_centre(group, rng), watched, before: plan.before }
}

/// Any of the values, but in three of five cases one of the two that the group leans to.
fn lean(values: &[&'static str], group: usize, rng: &mut impl Rng) -> &'static str {
    let place = if rng.gen_bool(0.6) {
        group * values.len() / GROUPS + rng.gen_range(0..2)
    } else {
        rng.gen_range(0..values.len())
    };
    values[place % values.len()]
}

/// Rows of the Hadamard matrix: all centres are equally far (5.7) from each other.
fn centre(group: usize) -> Embedding {
    std::array::from_fn(|dimension| if (dimension & group).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 })
}

/// The group's centre and noise of standard deviation 0.7 in each dimension.
fn around_centre(group: usize, rng: &mut impl Rng) -> Embedding {
    centre(group).map(|value| {
        // A sum of 12 uniform draws is near enough to normal and, unlike a logarithm, the same everywhere.
        let sum: i16 = (0..12).map(|_| rng.gen_range(-1000..=1000i16)).sum();
        value + f32::from(sum) * 3.5e-4
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use laser_schema::Entity;

    use super::super::testing::{location, read_table};
    use super::*;

    struct Made {
        users: [HashMap<String, Entity>; 2],
        items: [HashMap<String, Entity>; 2],
    }

    async fn by_id(path: &str) -> HashMap<String, Entity> {
        read_table(path).await.into_iter().map(|e| (e.id.to_string(), e)).collect()
    }

    /// Last night and tonight.
    async fn make(options: &DemoOptions) -> Made {
        let dir = tempfile::tempdir().unwrap();
        let paths = demo(&location(dir.path()), options).await.unwrap();
        Made {
            users: [by_id(&paths.last_night.users).await, by_id(&paths.tonight.users).await],
            items: [by_id(&paths.last_night.items).await, by_id(&paths.tonight.items).await],
        }
    }

    async fn bytes(root: &Location) -> Vec<(String, Vec<u8>)> {
        let mut files = Vec::new();
        for listed in root.list().await.unwrap() {
            let content = root.join(&listed.name).read().await.unwrap().to_vec();
            files.push((listed.name, content));
        }
        files
    }

    #[tokio::test]
    async fn a_seed_gives_the_same_bytes_and_another_seed_others() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| location(dir.path()).join(name));
        let options = DemoOptions::default();
        demo(&a, &options).await.unwrap();
        demo(&b, &options).await.unwrap();
        demo(&c, &DemoOptions { seed: 2, ..options }).await.unwrap();
        let (a, b, c) = (bytes(&a).await, bytes(&b).await, bytes(&c).await);
        assert_eq!(a.len(), 5);
        assert_eq!(a, b);
        assert!(a.iter().zip(&c).all(|(a, c)| a.0 == c.0 && a.1 != c.1));
    }

    #[tokio::test]
    async fn users_change_as_planned_between_the_nights() {
        let options = DemoOptions::default();
        let made = make(&options).await;
        let [last, tonight] = &made.users;
        assert_eq!(tonight.len(), options.users);
        let returning = options.users - options.users * NEW_USERS_PERCENT / 100;
        assert_eq!(last.len(), returning);
        let mut changed = 0;
        for (id, before) in last {
            let after = &tonight[id];
            let (m, n) = (before.history.len(), after.history.len());
            assert_eq!(before.history, after.history[..m], "user {id}");
            assert_eq!(before.attributes, after.attributes);
            assert!(after.history[m..].iter().all(|i| i.timestamp() >= Some(CUTOFF as f64)));
            if m == n {
                assert_eq!(before, after);
            } else {
                assert!(2 * m > n && m < n, "user {id}: {m} of {n}");
                changed += 1;
            }
        }
        assert_eq!(changed, returning * CHANGED_PERCENT / 100);
    }

    #[tokio::test]
    async fn half_of_the_items_are_new_tonight_and_watched_only_then() {
        let made = make(&DemoOptions::default()).await;
        let [last, tonight] = &made.items;
        assert_eq!((last.len(), tonight.len()), (60, 120));
        assert!(last.iter().all(|(id, item)| item.attributes == tonight[id].attributes));
        for (users, items) in made.users.iter().zip(&made.items) {
            let mut counts: HashMap<&str, u64> = HashMap::new();
            for interaction in users.values().flat_map(|u| &u.history) {
                *counts.entry(interaction.fields["title"].as_str().unwrap()).or_default() += 1;
            }
            for item in items.values() {
                let title = item.attributes["title"].as_str().unwrap();
                assert_eq!(item.interactions, counts.remove(title).unwrap_or(0), "{title}");
            }
            assert!(counts.is_empty(), "watched, but not in the catalogue: {counts:?}");
        }
    }

    #[tokio::test]
    async fn cold_entities_have_no_embedding_and_all_others_one() {
        let made = make(&DemoOptions::default()).await;
        for entities in made.users.iter().chain(&made.items) {
            let cold = entities.values().filter(|e| e.embedding.is_none()).count();
            assert!(20 * cold >= entities.len() && 2 * cold < entities.len(), "{cold} cold");
            for entity in entities.values() {
                let length = entity.embedding.as_ref().map(Vec::len);
                assert_eq!(length, (entity.interactions >= COLD as u64).then_some(EMBEDDING));
            }
        }
    }

    #[tokio::test]
    async fn histories_have_a_long_tail_and_no_film_twice() {
        let made = make(&DemoOptions::default()).await;
        let mut lengths: Vec<usize> = Vec::new();
        for user in made.users[1].values() {
            let titles: std::collections::HashSet<&str> =
                user.history.iter().map(|i| i.fields["title"].as_str().unwrap()).collect();
            assert_eq!(titles.len(), user.history.len());
            lengths.push(titles.len());
        }
        lengths.sort_unstable();
        let median = lengths[lengths.len() / 2];
        assert!((6..=10).contains(&median), "median {median}");
        assert!(lengths[lengths.len() - 1] >= 3 * median, "longest {:?}", lengths.last());
    }

    #[tokio::test]
    async fn embeddings_tell_the_planted_groups() {
        let made = make(&DemoOptions::default()).await;
        let centres: [Embedding; GROUPS] = std::array::from_fn(centre);
        let nearest = |e: &[f32]| {
            let dot = |c: &Embedding| c.iter().zip(e).map(|(a, b)| a * b).sum::<f32>();
            (0..GROUPS).max_by(|&a, &b| dot(&centres[a]).total_cmp(&dot(&centres[b]))).unwrap()
        };
        let warm = |entities: &HashMap<String, Entity>| -> Vec<Entity> {
            entities.values().filter(|e| e.embedding.is_some()).cloned().collect()
        };
        let groups: HashMap<String, usize> = warm(&made.items[1])
            .iter()
            .map(|i| (i.attributes["title"].to_string(), nearest(i.embedding.as_ref().unwrap())))
            .collect();
        let (mut own, mut all) = (0, 0);
        for user in warm(&made.users[1]) {
            let group = nearest(user.embedding.as_ref().unwrap());
            for watched in &user.history {
                let Some(&of_item) = groups.get(&watched.fields["title"].to_string()) else {
                    continue;
                };
                own += usize::from(of_item == group);
                all += 1;
            }
        }
        assert!(own * 10 > all * 6, "{own} of {all} interactions are within the group");
    }

    #[tokio::test]
    async fn sizes_other_than_the_default_keep_the_shares() {
        for (users, items) in [(20, 20), (21, 23), (1000, 500)] {
            let made = make(&DemoOptions { users, items, seed: 7 }).await;
            let last = &made.users[0];
            let changed = last.iter().filter(|(id, u)| **u != made.users[1][*id]).count();
            assert_eq!(made.users[1].len(), users);
            assert_eq!(made.items[1].len(), items);
            assert_eq!(changed, last.len() * CHANGED_PERCENT / 100, "{users} users");
        }
    }

    #[tokio::test]
    async fn the_same_demo_is_not_written_again_and_another_one_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = location(dir.path());
        let options = DemoOptions::default();
        assert!(demo(&root, &options).await.unwrap().written);
        assert!(!demo(&root, &options).await.unwrap().written);
        let before = bytes(&root).await;
        assert!(demo(&root, &DemoOptions { seed: 3, ..options }).await.unwrap().written);
        assert_ne!(before, bytes(&root).await);
        root.join("tonight/items.parquet").remove().await.unwrap();
        assert!(demo(&root, &DemoOptions { seed: 3, ..options }).await.unwrap().written);
    }

    #[tokio::test]
    async fn an_interrupted_demo_is_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let root = location(dir.path());
        let options = DemoOptions::default();
        demo(&root, &options).await.unwrap();
        let stamp = Stamp { laser_demo: VERSION, options, complete: false };
        root.join(STAMP).write(serde_json::to_vec(&stamp).unwrap().into()).await.unwrap();
        assert!(demo(&root, &options).await.unwrap().written);
        assert!(!demo(&root, &options).await.unwrap().written);
    }

    #[tokio::test]
    async fn foreign_files_and_options_out_of_range_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = location(dir.path());
        let foreign = root.join("tonight/users.parquet");
        foreign.write("mine".into()).await.unwrap();
        let options = DemoOptions::default();
        let error = demo(&root, &options).await.unwrap_err().to_string();
        assert!(error.contains("tonight/users.parquet: was not written by the demo"), "{error}");
        assert_eq!(foreign.read().await.unwrap(), "mine");
        root.join(STAMP).write("{}".into()).await.unwrap();
        let error = demo(&root, &options).await.unwrap_err().to_string();
        assert!(error.contains("demo.json: not the demo's own file"), "{error}");
        let error = demo(&root, &DemoOptions { items: 19, ..options }).await.unwrap_err();
        assert!(error.to_string().contains("items = 19: the demo needs at least 20"), "{error}");
    }
}
