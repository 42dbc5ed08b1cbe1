//! Users and their ratings: order, where histories end, and the tables of users and of interactions.

use std::num::NonZeroI64;

use arrow::datatypes::{DataType, Field};
use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_schema::interactions::{SplitBy, Until};
use laser_store::Location;
use serde::Serialize;

use super::MovieLens;
use super::items::Movie;
use crate::Result;
use crate::table::{Written, float32, history, int64, text, texts, write, write_entities};

/// Which interactions are counted and become histories.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Histories {
    /// All: oldest first, or in the order of the file where it has no timestamps.
    All,
    /// Those that have a timestamp, oldest first.
    Timed,
    /// Of those that have a timestamp the ones before the division.
    Until {
        /// The instant or share.
        until: Until,
        /// Whether the share is of all interactions or of each user's.
        by: SplitBy,
    },
}

#[derive(Debug, Default)]
pub(super) struct User {
    profile: Profile,
    pub(super) ratings: Vec<Rating>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Profile {
    pub(super) gender: Option<&'static str>,
    pub(super) age: Option<&'static str>,
    pub(super) occupation: Option<String>,
    pub(super) region: Option<&'static str>,
}

/// 16 bytes, since the largest archive has 32 million of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rating {
    /// Seconds since 1970, if known.
    pub(super) timestamp: Option<NonZeroI64>,
    pub(super) movie: u32,
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

#[derive(Serialize)]
struct Interaction {
    user: i64,
    item: i64,
    rating: f32,
    timestamp: Option<NonZeroI64>,
}

impl MovieLens {
    pub(super) fn add_user(&mut self, id: i64, profile: Profile) -> Result<(), String> {
        self.users_listed = true;
        match self.users.insert(id, User { profile, ratings: Vec::new() }) {
            None => Ok(()),
            Some(_) => Err(format!("user {id} is there twice; remove one of the two")),
        }
    }

    pub(super) fn add_rating(&mut self, user: i64, movie: i64, stars: f32, time: i64) -> Result<(), String> {
        if !(0.5..=5.0).contains(&stars) {
            return Err(format!("rating {stars} is not between 0.5 and 5"));
        }
        let movie = self.position(movie)?;
        if self.users_listed && !self.users.contains_key(&user) {
            return Err(format!("user {user} is not in the list of users of this data set"));
        }
        self.movies[movie as usize].ratings += 1;
        let rating = Rating { timestamp: NonZeroI64::new(time), movie, stars };
        self.users.entry(user).or_default().ratings.push(rating);
        Ok(())
    }

    /// Removes the ratings without a timestamp and returns how many they were.
    pub(super) fn remove_untimed(&mut self) -> u64 {
        self.retain(|_, rating| rating.timestamp.is_some())
    }

    /// Leaves in histories and counts only what is before the division.
    pub(super) fn end_histories(&mut self, until: Until, by: SplitBy) {
        let users = (0u32..).zip(self.users.values());
        let times = users.flat_map(|(user, of_user)| of_user.ratings.iter().map(move |r| (user, r.seconds())));
        let ends = until.instants(by, self.users.len(), times);
        self.retain(|user, rating| rating.seconds() < ends[user]);
    }

    /// Keeps the ratings that `keep` wants, which is given the user's position, and returns how many were removed.
    fn retain(&mut self, keep: impl Fn(usize, &Rating) -> bool) -> u64 {
        let mut removed = 0;
        for (position, user) in self.users.values_mut().enumerate() {
            user.ratings.retain(|rating| {
                let kept = keep(position, rating);
                if !kept {
                    self.movies[rating.movie as usize].ratings -= 1;
                    removed += 1;
                }
                kept
            });
        }
        removed
    }

    /// Oldest first; stable, so that the order of the file stays where there are no timestamps.
    pub(super) fn sort(&mut self) {
        for user in self.users.values_mut() {
            user.ratings.sort_by_key(|rating| rating.timestamp);
        }
    }

    /// Writes one row per rating, by user and in their order.
    pub(super) async fn write_interactions(&self, location: &Location) -> Result<Written> {
        let columns = vec![
            Field::new("user", DataType::Int64, false),
            Field::new("item", DataType::Int64, false),
            float32("rating"),
            int64("timestamp"),
        ];
        let rows = self.users.iter().flat_map(|(&user, of_user)| {
            of_user.ratings.iter().map(move |rating| Interaction {
                user,
                item: self.movies[rating.movie as usize].id,
                rating: rating.stars,
                timestamp: rating.timestamp,
            })
        });
        write(location, columns, rows).await
    }

    pub(super) async fn write_users(&self, location: &Location) -> Result<Written> {
        let profile = [text("gender"), text("age"), text("occupation"), text("region")];
        let mut columns = if self.users_listed { profile.to_vec() } else { Vec::new() };
        let mut seen = vec![text("title"), texts("genres")];
        seen.extend(self.extended_columns());
        seen.extend([float32("rating"), int64("timestamp")]);
        columns.push(history(seen));
        let rows = self.users.iter().map(|(id, user)| {
            let profile = self.users_listed.then_some(&user.profile);
            let history = user.ratings.iter().map(|rating| Seen::new(&self.movies, rating)).collect();
            (id, UserColumns { profile, history }, user.ratings.len() as u64)
        });
        write_entities(location, (Kind::User, IdType::Int64), columns, rows).await
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
