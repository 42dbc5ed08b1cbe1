//! Lists against true items, user by user, and comparisons in pairs.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{CUTOFFS, ListsError, Measures, Quality};
use crate::statistics::{Comparison, standard_error};

/// Lists that were judged, user by user, so that they can be compared in pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// The true items of the users who have any, with the user's place among all.
    truths: Vec<(usize, BTreeSet<u32>)>,
    /// Of each of these users.
    measures: Vec<Measures<f64>>,
    coverage: [f64; CUTOFFS.len()],
}

/// The first maker of lists less the second, over the same users.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Paired {
    /// Standard error of the mean difference; `None` for a single user.
    pub error: Option<f64>,
    /// The mean difference with its 95 % confidence interval, and the tests by user.
    pub comparison: Comparison,
}

impl Judged {
    /// Judges one list per user, best item first, against the user's true items, in any order; a true item that is
    /// given twice counts once. `items` is the size of the catalogue. Lists of users without true items count for
    /// coverage only.
    ///
    /// # Errors
    /// If lists and true items differ in number, a list repeats an item, an item is outside the catalogue, or no user
    /// has a true item.
    pub fn new(lists: &[impl AsRef<[u32]>], truths: &[impl AsRef<[u32]>], items: usize) -> Result<Self, ListsError> {
        if lists.len() != truths.len() {
            return Err(ListsError::Users { lists: lists.len(), truths: truths.len() });
        }
        let mut judged = Self { truths: Vec::new(), measures: Vec::new(), coverage: [0.0; CUTOFFS.len()] };
        for (user, (list, truth)) in lists.iter().zip(truths).enumerate() {
            let (list, truth) = (list.as_ref(), truth.as_ref());
            check_items(list, user, "its list", items)?;
            check_items(truth, user, "its true items", items)?;
            check_distinct(list, user)?;
            if !truth.is_empty() {
                let truth = truth.iter().copied().collect();
                judged.measures.push(measure(list, &truth));
                judged.truths.push((user, truth));
            }
        }
        if judged.truths.is_empty() {
            return Err(ListsError::NoTruth(truths.len()));
        }
        judged.coverage = CUTOFFS.map(|cutoff| coverage(lists, cutoff, items));
        Ok(judged)
    }

    /// The seeds of one maker as one: every user has the mean of its measures over the seeds.
    ///
    /// # Errors
    /// If there is none, or they were judged on different users or true items.
    pub fn mean(seeds: &[Self]) -> Result<Self, ListsError> {
        let [first, rest @ ..] = seeds else {
            return Err(ListsError::Seeds { first: 0, second: 0 });
        };
        if rest.iter().any(|seed| seed.truths != first.truths) {
            return Err(ListsError::Unpaired);
        }
        let mean = |figure: &dyn Fn(&Self) -> f64| seeds.iter().map(figure).sum::<f64>() / seeds.len() as f64;
        let of_user = |user: usize| Measures::each(|figure| mean(&|seed| figure(&seed.measures[user])));
        Ok(Self {
            truths: first.truths.clone(),
            measures: (0..first.measures.len()).map(of_user).collect(),
            coverage: std::array::from_fn(|cut| mean(&|seed| seed.coverage[cut])),
        })
    }

    /// The means over users.
    #[must_use]
    pub fn quality(&self) -> Quality {
        let users = self.measures.len();
        let measures = Measures::each(|figure| self.measures.iter().map(figure).sum::<f64>() / users as f64);
        Quality { users, measures, coverage: self.coverage }
    }

    /// Compares these lists with others for the same users, by the users' differences: this less the other. The margin,
    /// above 0, is the difference of means below which two makers count as equivalent.
    ///
    /// Users vary, but a model's seed does not here: for models that are trained, see [`over_seeds`] as well.
    ///
    /// # Errors
    /// If the two were judged on different users or true items.
    pub fn compare(&self, other: &Self, margin: f64) -> Result<Measures<Paired>, ListsError> {
        if self.truths != other.truths {
            return Err(ListsError::Unpaired);
        }
        Ok(Measures::each(|figure| {
            let pairs = self.measures.iter().zip(&other.measures);
            let differences: Vec<f64> = pairs.map(|(this, other)| figure(this) - figure(other)).collect();
            Paired { error: standard_error(&differences), comparison: Comparison::of(&differences, margin) }
        }))
    }
}

/// Compares two makers of lists over seeds, paired by seed: the first less the second. The margin is as in
/// [`Judged::compare`].
///
/// # Errors
/// If the numbers of seeds differ or are 0.
pub fn over_seeds(first: &[Quality], second: &[Quality], margin: f64) -> Result<Measures<Comparison>, ListsError> {
    if first.len() != second.len() || first.is_empty() {
        return Err(ListsError::Seeds { first: first.len(), second: second.len() });
    }
    Ok(Measures::each(|figure| {
        let pairs = first.iter().zip(second);
        let differences: Vec<f64> = pairs.map(|(a, b)| figure(&a.measures) - figure(&b.measures)).collect();
        Comparison::of(&differences, margin)
    }))
}

fn check_items(found: &[u32], user: usize, place: &'static str, items: usize) -> Result<(), ListsError> {
    match found.iter().find(|&&item| item as usize >= items) {
        Some(&item) => Err(ListsError::Item { user, item, place, items }),
        None => Ok(()),
    }
}

fn check_distinct(list: &[u32], user: usize) -> Result<(), ListsError> {
    let mut found = BTreeSet::new();
    match list.iter().find(|&&item| !found.insert(item)) {
        Some(&item) => Err(ListsError::Repeated { user, item }),
        None => Ok(()),
    }
}

/// What a hit is worth at a rank from 0.
fn gain(rank: usize) -> f64 {
    1.0 / ((rank + 2) as f64).log2()
}

/// Measures a list of distinct items against at least one true item.
fn measure(list: &[u32], truth: &BTreeSet<u32>) -> Measures<f64> {
    let hits: Vec<usize> = (0..list.len()).filter(|&rank| truth.contains(&list[rank])).collect();
    let within = |cutoff: usize| hits.iter().copied().take_while(move |&rank| rank < cutoff);
    let ideal = |cutoff: usize| (0..truth.len().min(cutoff)).map(gain).sum::<f64>();
    Measures {
        recall: CUTOFFS.map(|cutoff| within(cutoff).count() as f64 / truth.len() as f64),
        ndcg: CUTOFFS.map(|cutoff| within(cutoff).map(gain).sum::<f64>() / ideal(cutoff)),
        hit: CUTOFFS.map(|cutoff| f64::from(u8::from(within(cutoff).next().is_some()))),
    }
}

/// The share of the catalogue that is among the first of any list.
fn coverage(lists: &[impl AsRef<[u32]>], cutoff: usize, items: usize) -> f64 {
    let mut listed = vec![false; items];
    for &item in lists.iter().flat_map(|list| list.as_ref().iter().take(cutoff)) {
        listed[item as usize] = true;
    }
    listed.iter().filter(|listed| **listed).count() as f64 / items as f64
}
