//! Impressions in the order of time, their parts, and the past that a model may see.

use std::ops::Range;

use serde::Serialize;

/// A user was shown an item.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Impression {
    /// Index of the user.
    pub user: u32,
    /// Index of the item.
    pub item: u32,
    /// Whether they liked it.
    pub label: bool,
    /// The time in seconds, or any unit.
    pub time: f64,
}

/// The use of an impression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// For training.
    Train,
    /// Decides when training ends.
    Validation,
    /// For the reported result.
    Test,
}

impl Part {
    /// All parts in the order of time.
    pub const ALL: [Self; 3] = [Self::Train, Self::Validation, Self::Test];

    /// The name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// The reasons why models cannot learn from the impressions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// A part is empty.
    #[error("the {} part has no interactions: move [eval] train_until or validation_until", part.as_str())]
    Empty {
        /// The part.
        part: Part,
    },
    /// All labels of a part are equal.
    #[error(
        "all {rows} interactions of the {} part are {}: AUC needs both; change [eval] positive_rating, or train_until and \
         validation_until", part.as_str(), if *label { "positive" } else { "negative" }
    )]
    ConstantLabel {
        /// The part.
        part: Part,
        /// The only label.
        label: bool,
        /// Number of impressions.
        rows: usize,
    },
}

/// Impressions by user and time, with their parts.
#[derive(Debug)]
pub struct Data {
    /// Impressions by user, then by time.
    impressions: Vec<Impression>,
    /// The user's impressions before each impression's time.
    earlier: Vec<Range<usize>>,
    /// Positions per part.
    parts: [Vec<usize>; 3],
    /// Number per user: 0 unless it is in training, otherwise its own from 1.
    user_tokens: Vec<u32>,
    /// Number per item, likewise.
    item_tokens: Vec<u32>,
}

impl Data {
    /// Sorts impressions into parts. A user's impressions before the first of `cuts` are for training, before the
    /// second for validation, the rest for the test. `cuts` has one pair per user.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn new(items: usize, mut impressions: Vec<Impression>, cuts: &[[f64; 2]]) -> Result<Self, DataError> {
        // The sort is stable: events of the same time stay in the table's order.
        impressions.sort_by(|a, b| (a.user, a.time).partial_cmp(&(b.user, b.time)).unwrap_or(a.user.cmp(&b.user)));
        let mut data = Self {
            earlier: earlier(&impressions),
            parts: Default::default(),
            user_tokens: vec![0; cuts.len()],
            item_tokens: vec![0; items],
            impressions,
        };
        for (position, impression) in data.impressions.iter().enumerate() {
            let [train, validation] = cuts[impression.user as usize];
            let part = match impression.time {
                time if time < train => Part::Train,
                time if time < validation => Part::Validation,
                _ => Part::Test,
            };
            data.parts[part as usize].push(position);
            if part == Part::Train {
                data.user_tokens[impression.user as usize] = impression.user + 1;
                data.item_tokens[impression.item as usize] = impression.item + 1;
            }
        }
        data.check_labels()?;
        Ok(data)
    }

    fn check_labels(&self) -> Result<(), DataError> {
        for part in Part::ALL {
            let labels = self.labels(part);
            let label = *labels.first().ok_or(DataError::Empty { part })?;
            if labels.iter().all(|other| *other == label) {
                let rows = labels.len();
                return Err(DataError::ConstantLabel { part, label, rows });
            }
        }
        Ok(())
    }

    /// Number of users.
    pub fn users(&self) -> usize {
        self.user_tokens.len()
    }

    /// Number of items.
    pub fn items(&self) -> usize {
        self.item_tokens.len()
    }

    /// Returns the labels of a part, in the order of its positions.
    pub fn labels(&self, part: Part) -> Vec<bool> {
        let positions = self.positions(part).iter();
        positions.map(|&position| self.impressions[position].label).collect()
    }

    /// Returns the shares of a part's impressions whose users and items are in training.
    pub fn known(&self, part: Part) -> [f64; 2] {
        let positions = self.positions(part);
        let share = |known: &dyn Fn(&Impression) -> u32| {
            let count = positions.iter().filter(|&&p| known(&self.impressions[p]) > 0).count();
            count as f64 / positions.len() as f64
        };
        [
            share(&|impression| self.user_tokens[impression.user as usize]),
            share(&|impression| self.item_tokens[impression.item as usize]),
        ]
    }

    /// Returns the positions of a part's impressions.
    pub(super) fn positions(&self, part: Part) -> &[usize] {
        &self.parts[part as usize]
    }

    /// An impression.
    pub(super) fn impression(&self, position: usize) -> &Impression {
        &self.impressions[position]
    }

    /// Returns the latest `length` impressions of its user before its time, oldest first.
    pub(super) fn history(&self, position: usize, length: usize) -> &[Impression] {
        let Range { start, end } = self.earlier[position];
        &self.impressions[start.max(end.saturating_sub(length))..end]
    }

    /// Returns the user's number, 0 if it is not in training.
    pub(super) fn user_token(&self, user: u32) -> u32 {
        self.user_tokens[user as usize]
    }

    /// Returns the item's number, 0 if it is not in training.
    pub(super) fn item_token(&self, item: u32) -> u32 {
        self.item_tokens[item as usize]
    }
}

/// Finds per impression those of its user before its time; impressions with the same time may be later.
fn earlier(sorted: &[Impression]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::with_capacity(sorted.len());
    for (position, impression) in sorted.iter().enumerate() {
        let range = match position.checked_sub(1).map(|last| (&sorted[last], &ranges[last])) {
            Some((last, range)) if last.user == impression.user => {
                let same_time = last.time.total_cmp(&impression.time).is_eq();
                range.start..if same_time { range.end } else { position }
            }
            _ => position..position,
        };
        ranges.push(range);
    }
    ranges
}
