//! The demo's invented films: titles, people and countries put together from word lists of our own.
//!
//! Every film belongs to one of four taste groups, which decides its likely genres, the words of its title
//! and who makes it, so that the tastes planted in the demo's users show in what they watch. No film and no
//! person here is real; a test holds that none of the titles or names is in MovieLens.

use rand::Rng;
use rand::seq::SliceRandom;
use serde::Serialize;

/// How many taste groups films and users fall into.
pub(super) const GROUPS: usize = 4;

/// What the films of one taste group are like.
struct Taste {
    /// The most frequent first. All groups together have the 18 genres of MovieLens.
    genres: &'static [&'static str],
    subjects: [&'static str; 10],
    qualities: [&'static str; 8],
    substances: [&'static str; 8],
}

const TASTES: [Taste; GROUPS] = [
    Taste {
        genres: &["Action", "Sci-Fi", "Adventure", "War", "Western"],
        subjects: [
            "Convoy", "Orbit", "Ridge", "Signal", "Meridian", "Drifter", "Beacon", "Outpost", "Engine", "Vanguard",
        ],
        qualities: ["Ninefold", "Rustbound", "Windward", "Unlit", "Farthest", "Ironclad", "Copper", "Skyless"],
        substances: [
            "Cinder",
            "Salt",
            "Thunderglass",
            "Cobalt",
            "the Ninth Moon",
            "Dustfall",
            "the Red Plateau",
            "Gravity",
        ],
    },
    Taste {
        genres: &["Drama", "Romance", "Documentary"],
        subjects: [
            "Harbour", "Orchard", "Letter", "Lantern", "Summer", "Window", "Ferry", "Almanac", "Bakery", "Quartet",
        ],
        qualities: ["Unsent", "Borrowed", "Late-Blooming", "Rain-Grey", "Patient", "Paper", "Half-Lit", "Homebound"],
        substances: [
            "Glass",
            "Plum Wine",
            "Quiet Rooms",
            "Linen",
            "the Lower Town",
            "Marigolds",
            "Slow Rivers",
            "Ordinary Light",
        ],
    },
    Taste {
        genres: &["Comedy", "Children's", "Animation", "Fantasy", "Musical"],
        subjects: [
            "Hedgehog",
            "Parade",
            "Teapot",
            "Wizardling",
            "Kite",
            "Carousel",
            "Badger",
            "Pancake",
            "Trombone",
            "Umbrella",
        ],
        qualities: [
            "Upside-Down",
            "Whistling",
            "Polka-Dot",
            "Sleepless",
            "Enormous",
            "Ticklish",
            "Musty",
            "Somersaulting",
        ],
        substances: [
            "Marmalade",
            "Feathers",
            "the Tumble Woods",
            "Sevenpence",
            "Clockwork",
            "Moonbeans",
            "Hiccups",
            "Grandmother Pim",
        ],
    },
    Taste {
        genres: &["Thriller", "Crime", "Mystery", "Horror", "Film-Noir"],
        subjects: [
            "Alibi",
            "Ledger",
            "Cellar",
            "Witness",
            "Ransom",
            "Verdict",
            "Staircase",
            "Informant",
            "Hollow",
            "Telegram",
        ],
        qualities: ["Unsigned", "Nameless", "Velvet", "Thirteenth", "Counterfeit", "Drowned", "Locked", "Colourless"],
        substances: [
            "Ash",
            "Nightshade",
            "the Old Quay",
            "Tar",
            "Whispers",
            "Black Chalk",
            "Mirrors",
            "the Fourth Floor",
        ],
    },
];

const PLACES: [&str; 12] = [
    "Quillhaven",
    "Dunmarrow",
    "Velmora",
    "Port Anselby",
    "Tarnwick",
    "Ostrelle",
    "Brindlemouth",
    "Kestrin",
    "Lower Saxmere",
    "Ullenvale",
    "Corrowby",
    "Mount Ferrin",
];

const GIVEN_NAMES: [&str; 16] = [
    "Ilsabet", "Oren", "Maribeth", "Tobiah", "Xanthe", "Casimo", "Wilhelma", "Ndiya", "Rafiq", "Saoira", "Emeric",
    "Yukari", "Bastien", "Élodine", "Torvald", "Zephine",
];

const FAMILY_NAMES: [&str; 25] = [
    "Harrowgale",
    "Quillbrook",
    "Vessarin",
    "Tallowmere",
    "Ashgrovel",
    "Brenlowe",
    "Kastanova",
    "Morvathi",
    "Pellandri",
    "Ravensworthy",
    "Sollivane",
    "Thornquay",
    "Umberlin",
    "Wexcombe",
    "Yarrowdale",
    "Zimmerhain",
    "Oskarelli",
    "Dorrickson",
    "Fenchapel",
    "Grünhalm",
    "Ibarrola-Vey",
    "Jessamund",
    "Lindqvarn",
    "Nakamori-Hale",
    "Castelbrun",
];

const COUNTRIES: [&str; 8] =
    ["United Kingdom", "France", "Japan", "Brazil", "India", "Nigeria", "Mexico", "South Korea"];

/// Directors of one group; each makes about one film in six of it.
const DIRECTORS: usize = 6;
/// Actors of one group.
const ACTORS: usize = 12;

/// One invented film.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Film {
    #[serde(skip)]
    pub(super) group: usize,
    pub(super) title: String,
    pub(super) genres: Vec<&'static str>,
    pub(super) year: u16,
    pub(super) country: &'static str,
    pub(super) director: String,
    pub(super) actors: Vec<String>,
}

/// `count` films, the groups in turn. Titles are unique: a title that is taken becomes its own sequel.
pub(super) fn films(count: usize, rng: &mut impl Rng) -> Vec<Film> {
    let mut taken = std::collections::HashMap::new();
    (0..count).map(|i| film(i % GROUPS, &mut taken, rng)).collect()
}

fn film(group: usize, taken: &mut std::collections::HashMap<String, u32>, rng: &mut impl Rng) -> Film {
    let year = rng.gen_range(1951..=2024);
    let name = name(&TASTES[group], rng);
    let times = taken.entry(name.clone()).or_insert(0);
    *times += 1;
    let sequel = if *times == 1 { String::new() } else { format!(" {times}") };
    Film {
        group,
        title: format!("{name}{sequel} ({year})"),
        genres: genres(group, rng),
        year,
        country: COUNTRIES[(2 * group + rng.gen_range(0..4)) % COUNTRIES.len()],
        director: person(group, rng.gen_range(0..DIRECTORS)),
        actors: actors(group, rng),
    }
}

fn name(taste: &Taste, rng: &mut impl Rng) -> String {
    let mut pick = |words: &[&'static str]| words[rng.gen_range(0..words.len())];
    let subject = pick(&taste.subjects);
    match pick(&["of", "at", "the", "the"]) {
        "of" => format!("{subject} of {}", pick(&taste.substances)),
        "at" => format!("{subject} at {}", pick(&PLACES)),
        _ => format!("The {} {subject}", pick(&taste.qualities)),
    }
}

/// One to three genres of the group, the first of its list most often, and now and then one of another group.
fn genres(group: usize, rng: &mut impl Rng) -> Vec<&'static str> {
    let own = TASTES[group].genres;
    let mut genres = Vec::new();
    for _ in 0..rng.gen_range(1..=3) {
        // The smaller of two draws favours the front of the list.
        let place = rng.gen_range(0..own.len()).min(rng.gen_range(0..own.len()));
        genres.push(own[place]);
    }
    if rng.gen_bool(0.2) {
        genres.push(TASTES[rng.gen_range(0..GROUPS)].genres[0]);
    }
    genres.sort_unstable();
    genres.dedup();
    genres
}

fn actors(group: usize, rng: &mut impl Rng) -> Vec<String> {
    let people: Vec<usize> = (DIRECTORS..DIRECTORS + ACTORS).collect();
    let count = rng.gen_range(2..=4);
    people.choose_multiple(rng, count).map(|&i| person(group, i)).collect()
}

/// The group's person of that number: 16 and 25 have no common divisor, so 400 numbers give 400 names.
fn person(group: usize, number: usize) -> String {
    let number = group * (DIRECTORS + ACTORS) + number;
    let given = GIVEN_NAMES[number % GIVEN_NAMES.len()];
    format!("{given} {}", FAMILY_NAMES[number % FAMILY_NAMES.len()])
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::super::testing::shared;
    use super::*;

    fn many() -> Vec<Film> {
        films(4_000, &mut Xoshiro256PlusPlus::seed_from_u64(1))
    }

    #[test]
    fn titles_are_unique_beyond_the_word_lists() {
        let films = many();
        let names: HashSet<&str> = films.iter().map(|f| f.title.as_str()).collect();
        assert_eq!(names.len(), films.len());
    }

    #[test]
    fn all_genres_of_movielens_occur() {
        let genres: BTreeSet<&str> = many().iter().flat_map(|f| f.genres.clone()).collect();
        let expected = [
            "Action",
            "Adventure",
            "Animation",
            "Children's",
            "Comedy",
            "Crime",
            "Documentary",
            "Drama",
            "Fantasy",
            "Film-Noir",
            "Horror",
            "Musical",
            "Mystery",
            "Romance",
            "Sci-Fi",
            "Thriller",
            "War",
            "Western",
        ];
        assert_eq!(genres, BTreeSet::from(expected));
    }

    #[test]
    fn people_are_distinct_across_groups_and_trades() {
        let names: HashSet<String> =
            (0..GROUPS).flat_map(|group| (0..DIRECTORS + ACTORS).map(move |i| person(group, i))).collect();
        assert_eq!(names.len(), GROUPS * (DIRECTORS + ACTORS));
    }

    #[test]
    fn no_title_or_name_is_in_movielens() {
        let Some(dir) = shared("data/ml-1m") else {
            return;
        };
        let mut real = String::new();
        for file in ["movies.dat", "movies_extended.csv"] {
            let bytes = std::fs::read(dir.join(file)).unwrap();
            real.push_str(&super::super::decode(&bytes).to_lowercase());
        }
        for film in many() {
            let name = film.title.split(" (").next().unwrap().trim_start_matches("The ");
            for name in film.actors.iter().map(String::as_str).chain([name, &film.director]) {
                assert!(!real.contains(&name.to_lowercase()), "{name} is real");
            }
        }
    }
}
