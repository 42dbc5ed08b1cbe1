//! Interactions of users with items: the table that recommender models learn from, and where time divides it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::value::seconds;

/// The `[interactions]` section: one row is one interaction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InteractionTable {
    /// A local path or object-store URL ending in `.parquet`, `.csv`, `.jsonl` or `.ndjson`.
    pub path: String,
    /// The column of the user's id: string or int64.
    pub user: String,
    /// The column of the item's id: string or int64.
    pub item: String,
    /// The column of how much the user liked it, a number.
    pub rating: String,
    /// The column of when it was: a number in any unit, or ISO 8601.
    pub timestamp: String,
}

impl Default for InteractionTable {
    fn default() -> Self {
        Self {
            path: String::new(),
            user: "user".into(),
            item: "item".into(),
            rating: "rating".into(),
            timestamp: "timestamp".into(),
        }
    }
}

/// Whose order of time divides interactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// One instant for all.
    #[default]
    Time,
    /// An instant for each user, at the same share of their interactions.
    User,
}

/// Where interactions are divided by time: `0.8` is before the last fifth, `1998-03-01` (or the timestamp as a number
/// from 1) an instant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UntilValue", into = "f64")]
pub enum Until {
    /// After this share of the interactions, above 0 and below 1.
    Share(f64),
    /// At this timestamp.
    Instant(f64),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a share such as 0.8, a timestamp, or ISO 8601 such as \"1998-03-01\"")]
enum UntilValue {
    Number(f64),
    Text(String),
}

impl TryFrom<UntilValue> for Until {
    type Error = String;

    fn try_from(value: UntilValue) -> Result<Self, String> {
        match value {
            UntilValue::Number(number) => number.to_string(),
            UntilValue::Text(text) => text,
        }
        .parse()
    }
}

impl From<Until> for f64 {
    fn from(until: Until) -> Self {
        match until {
            Until::Share(value) | Until::Instant(value) => value,
        }
    }
}

impl FromStr for Until {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match seconds(text) {
            Some(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            Some(instant) if instant >= 1.0 => Ok(Self::Instant(instant)),
            _ => Err(format!(
                "{text}: expected a share between 0 and 1, a timestamp from 1, or ISO 8601 such as 1998-03-01"
            )),
        }
    }
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

impl Until {
    /// The first instant that is not before the division, for each of `users`; `times` are users and timestamps.
    ///
    /// A share s divides n sorted timestamps at the one of index ⌊n s⌋, so that what has the same timestamp is on
    /// one side, the later one. A user without any is divided where nothing is before.
    pub fn instants(self, by: SplitBy, users: usize, times: impl Iterator<Item = (u32, f64)>) -> Vec<f64> {
        let share = match self {
            Self::Instant(instant) => return vec![instant; users],
            Self::Share(share) => share,
        };
        match by {
            SplitBy::Time => {
                let mut times: Vec<f64> = times.map(|(_, time)| time).collect();
                vec![at_share(&mut times, share); users]
            }
            SplitBy::User => {
                let mut of_user = vec![Vec::new(); users];
                times.for_each(|(user, time)| of_user[user as usize].push(time));
                of_user.iter_mut().map(|times| at_share(times, share)).collect()
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a length")]
fn at_share(times: &mut [f64], share: f64) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    let place = (times.len() as f64 * share) as usize;
    times.get(place).copied().unwrap_or(f64::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_division_is_a_share_or_an_instant() {
        let parse = |text: &str| text.parse::<Until>();
        assert_eq!(parse("0.8"), Ok(Until::Share(0.8)));
        assert_eq!(parse("891000000"), Ok(Until::Instant(891e6)));
        assert_eq!(parse("1998-03-01"), Ok(Until::Instant(888_710_400.0)));
        for bad in ["0", "-3", "1.0e400", "soon", ""] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let read = |json: &str| serde_json::from_str::<Until>(json);
        assert_eq!(read("0.5").unwrap(), Until::Share(0.5));
        assert_eq!(read("\"1998-03-01\"").unwrap(), Until::Instant(888_710_400.0));
        assert!(read("true").unwrap_err().to_string().contains("such as 0.8"));
    }

    #[test]
    fn shares_divide_all_or_each_user_and_ties_go_later() {
        let times = [(0, 5.0), (0, 1.0), (0, 3.0), (0, 3.0), (1, 10.0), (1, 20.0)];
        let at = |share, by| Until::Share(share).instants(by, 3, times.into_iter());
        assert_eq!(at(0.5, SplitBy::Time), [5.0; 3]);
        assert_eq!(at(0.5, SplitBy::User), [3.0, 20.0, f64::NEG_INFINITY]);
        let instants = Until::Instant(4.0).instants(SplitBy::User, 2, times.into_iter());
        assert_eq!(instants, [4.0; 2]);
    }
}
