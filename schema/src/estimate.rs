//! What a night is going to take, estimated before it runs.

use std::iter::Sum;
use std::ops::Add;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::entity::Kind;
use crate::job::Price;

/// Half the width of an interval of 95 %, in standard errors of a normal distribution.
const STANDARD_ERRORS: f64 = 1.96;

/// An amount with its interval of 95 %.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The expected amount.
    pub mean: f64,
    /// The lower bound, at least 0.
    pub low: f64,
    /// The upper bound.
    pub high: f64,
}

impl Interval {
    /// The interval of a mean with a standard error.
    pub fn new(mean: f64, error: f64) -> Self {
        let half = STANDARD_ERRORS * error;
        Self { mean, low: (mean - half).max(0.0), high: mean + half }
    }

    /// The interval of so many times the amount.
    pub fn times(self, factor: f64) -> Self {
        Self { mean: factor * self.mean, low: factor * self.low, high: factor * self.high }
    }
}

impl Add for Interval {
    type Output = Self;

    /// Of amounts that err in the same direction, as those do that come from one sample.
    fn add(self, other: Self) -> Self {
        Self { mean: self.mean + other.mean, low: self.low + other.low, high: self.high + other.high }
    }
}

impl Sum for Interval {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::default(), Self::add)
    }
}

/// What the texts or lists of a kind and pool are going to take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupEstimate {
    /// Users or items.
    pub kind: Kind,
    /// The pool; empty for lists.
    pub pool: String,
    /// Texts or lists to generate.
    pub texts: u64,
    /// Tokens of the texts; 0 of lists.
    pub tokens: Interval,
    /// Seconds of the engine.
    pub seconds: Interval,
}

/// What a night is going to take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The run.
    pub run: String,
    /// When it was made.
    pub made: Timestamp,
    /// Texts or lists that were generated for it.
    pub sampled: u64,
    /// Texts of earlier nights that tell the length of tonight's.
    pub earlier: u64,
    /// By kind and pool.
    pub groups: Vec<GroupEstimate>,
    /// Seconds of the engine for the audit, by kind.
    pub audits: Vec<(Kind, Interval)>,
    /// The price of the engines' time, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
}

impl Estimate {
    /// Seconds of the engine for all texts and the audit.
    pub fn seconds(&self) -> Interval {
        let audits = self.audits.iter().map(|(_, seconds)| *seconds);
        self.groups.iter().map(|group| group.seconds).chain(audits).sum()
    }

    /// The price of so many seconds of the engine, if there is a price.
    pub fn price_of(&self, seconds: Interval) -> Option<Interval> {
        self.price.as_ref().map(|price| seconds.times(price.of_seconds(1.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_of_one_sample_add_with_their_bounds() {
        let one = Interval::new(100.0, 10.0);
        assert!((one.low - 80.4).abs() < 1e-9 && (one.high - 119.6).abs() < 1e-9);
        let sum: Interval = [one, one.times(2.0)].into_iter().sum();
        assert!((sum.mean - 300.0).abs() < 1e-9 && (sum.low - 241.2).abs() < 1e-9);
        assert!(Interval::new(1.0, 9.0).low.abs() < 1e-9);
    }
}
