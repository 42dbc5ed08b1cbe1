//! Impressions, their parts, and the interactions that a model may see as a user's history.
//!
//! By time, a history is what the user did before the impression. By item, nothing is before anything else: a history
//! holds the user's other training interactions, so nothing that is held out is ever seen.

use std::ops::Range;

use anyhow::{Result, ensure};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
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
    /// When: seconds, or any unit. A split by item ignores it.
    pub time: f64,
}

/// Holds items out: some have no training interaction at all, and of the others some interactions are held out too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ItemSplit {
    /// The share of the items that are only tested on; half as many are only validated on.
    pub share: f64,
    /// The share of the other items' interactions that trains.
    pub train: f64,
    /// The share of them that trains or validates; the rest tests.
    pub validation: f64,
    /// Chooses the items and the interactions.
    pub seed: u64,
}

/// What an impression serves for.
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

/// Impressions by user, with their parts.
#[derive(Debug)]
pub struct Data {
    /// By user; then by time, or the training impressions first.
    impressions: Vec<Impression>,
    pasts: Pasts,
    /// Positions by part.
    parts: [Vec<usize>; 3],
    /// Number per user: 0 unless it is in training, otherwise its own from 1.
    user_tokens: Vec<u32>,
    /// By item: its training impressions.
    item_counts: Vec<u32>,
}

/// The impressions that a history is taken from.
#[derive(Debug)]
enum Pasts {
    /// By impression: the user's impressions before its time.
    Earlier(Vec<Range<usize>>),
    /// By user: the training impressions.
    Training(Vec<Range<usize>>),
}

impl Data {
    /// Sorts impressions into parts. A user's impressions before the first of `cuts` are for training, before the
    /// second for validation, the rest for the test. `cuts` has one pair per user.
    ///
    /// # Errors
    /// A part without impressions, or whose labels are all equal.
    pub fn new(items: usize, mut impressions: Vec<Impression>, cuts: &[[f64; 2]]) -> Result<Self> {
        // The sort is stable: events of the same time stay in the table's order.
        impressions.sort_by(|a, b| (a.user, a.time).partial_cmp(&(b.user, b.time)).unwrap_or(a.user.cmp(&b.user)));
        let part = |impression: &Impression| {
            let [train, validation] = cuts[impression.user as usize];
            match impression.time {
                time if time < train => Part::Train,
                time if time < validation => Part::Validation,
                _ => Part::Test,
            }
        };
        let parts: Vec<Part> = impressions.iter().map(part).collect();
        let pasts = Pasts::Earlier(earlier(&impressions));
        Self::of_parts((cuts.len(), items), impressions, &parts, pasts)
    }

    /// Holds out items and interactions, see [`ItemSplit`].
    ///
    /// # Errors
    /// A part without impressions, or whose labels are all equal.
    pub fn by_item((users, items): (usize, usize), impressions: Vec<Impression>, split: &ItemSplit) -> Result<Self> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(split.seed);
        let held_out = held_out_items(items, split.share, &mut rng);
        let part = |impression: Impression| {
            let place = rng.r#gen::<f64>();
            let part = held_out[impression.item as usize].unwrap_or(match place {
                place if place < split.train => Part::Train,
                place if place < split.validation => Part::Validation,
                _ => Part::Test,
            });
            (impression, part)
        };
        let mut rows: Vec<(Impression, Part)> = impressions.into_iter().map(part).collect();
        // The table's order may be that of time or of ratings.
        rows.shuffle(&mut rng);
        rows.sort_by_key(|(impression, part)| (impression.user, *part as usize));
        let mut training = vec![0..0; users];
        for (position, (impression, part)) in rows.iter().enumerate() {
            let range = &mut training[impression.user as usize];
            match part {
                Part::Train if range.start == range.end => *range = position..position + 1,
                Part::Train => range.end = position + 1,
                Part::Validation | Part::Test => {}
            }
        }
        let (impressions, parts): (Vec<Impression>, Vec<Part>) = rows.into_iter().unzip();
        Self::of_parts((users, items), impressions, &parts, Pasts::Training(training))
    }

    fn of_parts(
        (users, items): (usize, usize),
        impressions: Vec<Impression>,
        of_impressions: &[Part],
        pasts: Pasts,
    ) -> Result<Self> {
        let mut parts: [Vec<usize>; 3] = Default::default();
        let (mut user_tokens, mut item_counts) = (vec![0; users], vec![0; items]);
        for (position, (impression, &part)) in impressions.iter().zip(of_impressions).enumerate() {
            parts[part as usize].push(position);
            if part == Part::Train {
                user_tokens[impression.user as usize] = impression.user + 1;
                item_counts[impression.item as usize] += 1;
            }
        }
        let data = Self { impressions, pasts, parts, user_tokens, item_counts };
        data.check_labels()?;
        Ok(data)
    }

    fn check_labels(&self) -> Result<()> {
        for part in Part::ALL {
            let (labels, part) = (self.labels(part), part.as_str());
            let positive = labels.iter().filter(|label| **label).count();
            ensure!(
                !labels.is_empty(),
                "the {part} part has no interactions: change [eval] train_until, validation_until or item_share"
            );
            ensure!(
                (1..labels.len()).contains(&positive),
                "all {} interactions of the {part} part are {}: AUC needs both; change [eval] positive_rating, or \
                 train_until and validation_until",
                labels.len(),
                if positive > 0 { "positive" } else { "negative" }
            );
        }
        Ok(())
    }

    /// Number of users.
    pub fn users(&self) -> usize {
        self.user_tokens.len()
    }

    /// Number of items.
    pub fn items(&self) -> usize {
        self.item_counts.len()
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
            share(&|impression| self.item_counts[impression.item as usize]),
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

    /// At most `length` impressions of its user: the latest before its time, oldest first; or other training ones,
    /// beginning where `position` says, none of the same item.
    pub(super) fn history(&self, position: usize, length: usize) -> Vec<&Impression> {
        let impression = &self.impressions[position];
        match &self.pasts {
            Pasts::Earlier(ranges) => {
                let Range { start, end } = ranges[position];
                self.impressions[start.max(end.saturating_sub(length))..end].iter().collect()
            }
            Pasts::Training(ranges) => {
                let range = ranges[impression.user as usize].clone();
                let training = &self.impressions[range.clone()];
                // After a training impression comes the next one, after a held-out one any.
                let begin = position.abs_diff(range.start) + 1;
                let others = (0..training.len()).map(|step| &training[(begin + step) % training.len()]);
                others.filter(|other| other.item != impression.item).take(length).collect()
            }
        }
    }

    /// Returns the user's number, 0 if it is not in training.
    pub(super) fn user_token(&self, user: u32) -> u32 {
        self.user_tokens[user as usize]
    }

    /// Returns the item's number, 0 if it is not in training.
    pub(super) fn item_token(&self, item: u32) -> u32 {
        if self.item_counts[item as usize] > 0 { item + 1 } else { 0 }
    }

    /// The number of an item's training impressions.
    pub(super) fn item_count(&self, item: u32) -> u32 {
        self.item_counts[item as usize]
    }
}

/// By item, the part that all of its impressions belong to, if it is held out.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a length")]
fn held_out_items(items: usize, share: f64, rng: &mut Xoshiro256PlusPlus) -> Vec<Option<Part>> {
    let count = |share: f64| (items as f64 * share) as usize;
    let mut parts = vec![None; items];
    let (tested, validated) = (count(share), count(share / 2.0));
    parts[..tested].fill(Some(Part::Test));
    parts[tested..tested + validated].fill(Some(Part::Validation));
    parts.shuffle(rng);
    parts
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
