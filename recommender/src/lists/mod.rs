//! How good recommendation lists are: recall, NDCG, hit rate and coverage, whoever made the lists; two makers compared
//! in pairs; and the lists of those that only count (popularity, a Markov chain, item-kNN).
//!
//! A list is the numbers of items, the best first. It is judged against the user's *true items*: those that the user
//! took later. The conventions are those of AtSpeed (Lin et al. 2025) and of the code that it evaluates with:
//!
//! - Users without true items are left out, and every other user weighs the same.
//! - Recall@K is hits among the first K, divided by *all* true items. So with more than K of them it stays below 1.
//! - NDCG@K weighs a hit at rank r by `1 / log2(r + 1)`, divided by that of the first min(K, true items) ranks.
//! - The hit rate is the share of users with any hit.
//! - A list that is shorter than K misses at the ranks that it lacks.
//! - Items that share an identifier are different items here, since a list names items. AtSpeed compares identifiers,
//!   so that there either item is a hit.
//!
//! AtSpeed's own lists may hold items of the user's history, which are hardly ever true items. Leaving them out makes a
//! large difference, most of all to item-kNN, so compare lists that treat the history alike ([`Seen`]).

mod baselines;
mod judged;

#[cfg(test)]
mod tests;

use serde::Serialize;

pub use baselines::{Seen, baseline};
pub use judged::{Judged, Paired, over_seeds};

/// The lengths K that lists are judged at.
pub const CUTOFFS: [usize; 3] = [5, 10, 20];

/// A figure of each measure, at each of [`CUTOFFS`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measures<T> {
    /// Of recall, the share of the true items that the list has.
    pub recall: [T; CUTOFFS.len()],
    /// Of normalised discounted cumulative gain.
    pub ndcg: [T; CUTOFFS.len()],
    /// Of the hit rate, the share of users whose list has a true item.
    pub hit: [T; CUTOFFS.len()],
}

/// Reads one figure off the measures of a user or of a seed.
pub(crate) type Figure<'f> = dyn Fn(&Measures<f64>) -> f64 + 'f;

impl<T> Measures<T> {
    /// Makes every figure by a function of how to read it.
    pub(crate) fn each(make: impl Fn(&Figure<'_>) -> T) -> Self {
        let row =
            |row: fn(&Measures<f64>) -> &[f64; CUTOFFS.len()]| std::array::from_fn(|cut| make(&|of| row(of)[cut]));
        Self { recall: row(|of| &of.recall), ndcg: row(|of| &of.ndcg), hit: row(|of| &of.hit) }
    }
}

/// How good lists are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quality {
    /// Number of users with true items.
    pub users: usize,
    /// Means over these users.
    #[serde(flatten)]
    pub measures: Measures<f64>,
    /// Share of the catalogue's items that are among the first K of any list, at each of [`CUTOFFS`].
    pub coverage: [f64; CUTOFFS.len()],
}

/// Why lists cannot be judged or compared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListsError {
    /// Lists and true items are not of the same users.
    #[error("{lists} lists for {truths} users: give one list per user, in the order of the users' true items")]
    Users {
        /// Number of lists.
        lists: usize,
        /// Number of users.
        truths: usize,
    },
    /// An item that the catalogue lacks.
    #[error("user {user} has item {item} in {place}, expected less than the catalogue's {items}: number items from 0")]
    Item {
        /// The user's place among all, from 0.
        user: usize,
        /// The item.
        item: u32,
        /// Where it was found.
        place: &'static str,
        /// Number of items of the catalogue.
        items: usize,
    },
    /// An item twice in a list.
    #[error("the list of user {user} has item {item} twice: list every item once, or hits would count twice")]
    Repeated {
        /// The user's place among all, from 0.
        user: usize,
        /// The item.
        item: u32,
    },
    /// Nobody to judge by.
    #[error("none of {0} users has a true item: hold out some interactions")]
    NoTruth(usize),
    /// Two makers that were judged on different users.
    #[error("the two makers of lists were judged on other users or true items: judge both on the same ones")]
    Unpaired,
    /// Numbers of seeds that do not make pairs.
    #[error("{first} seeds against {second}: give both makers of lists the same seeds, at least one")]
    Seeds {
        /// Seeds of the first maker.
        first: usize,
        /// Seeds of the second.
        second: usize,
    },
}
