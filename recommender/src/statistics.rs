//! The measures of CTR models and the role of chance: AUC, log loss, intervals and tests over seeds.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// The error rate of all intervals and tests: 5 %.
pub const ALPHA: f64 = 0.05;

/// Returns the probability that a positive scores above a negative, ties counting half (Mann and Whitney 1947). It is
/// exact and takes O(n log n). `None` if there are no positives or no negatives.
pub fn auc(scores: &[f32], labels: &[bool]) -> Option<f64> {
    let mut ranked: Vec<(f32, bool)> = scores.iter().copied().zip(labels.iter().copied()).collect();
    ranked.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    // Count twice the number of pairs in order, so that a tie is an integer too.
    let (mut in_order, mut positives, mut negatives) = (0u128, 0u128, 0u128);
    for ties in ranked.chunk_by(|a, b| a.0 == b.0) {
        let positive = ties.iter().filter(|(_, label)| *label).count() as u128;
        let negative = ties.len() as u128 - positive;
        in_order += positive * (2 * negatives + negative);
        positives += positive;
        negatives += negative;
    }
    let pairs = positives * negatives;
    (pairs > 0).then(|| in_order as f64 / (2 * pairs) as f64)
}

/// Returns the mean of `-ln p(label)` in nats, for logits.
pub fn log_loss(logits: &[f32], labels: &[bool]) -> f64 {
    let losses = logits.iter().zip(labels).map(|(&logit, &label)| {
        let wrong = f64::from(if label { -logit } else { logit });
        wrong.max(0.0) + (-wrong.abs()).exp().ln_1p()
    });
    losses.sum::<f64>() / logits.len().max(1) as f64
}

/// A mean with its 95 % confidence interval by Student's t.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Half the width of the interval; `None` for a single value.
    pub half_width: Option<f64>,
}

impl Mean {
    /// Computes it from values, of which there must be at least one.
    pub fn of(values: &[f64]) -> Self {
        let sample = Sample::of(values);
        let half_width = sample.student().map(|student| student.inverse_cdf(1.0 - ALPHA / 2.0) * sample.error);
        Self { mean: sample.mean, half_width }
    }
}

/// Returns the standard error of the mean of values; `None` for fewer than two.
pub fn standard_error(values: &[f64]) -> Option<f64> {
    (values.len() > 1).then(|| Sample::of(values).error)
}

/// A mean, its standard error and the number of values.
struct Sample {
    mean: f64,
    error: f64,
    count: usize,
}

impl Sample {
    fn of(values: &[f64]) -> Self {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = (squares / (count.max(2) - 1) as f64 / count as f64).sqrt();
        Self { mean, error, count }
    }

    /// Returns Student's distribution of the mean; none for a single value.
    fn student(&self) -> Option<StudentsT> {
        let freedom = (self.count > 1).then(|| (self.count - 1) as f64)?;
        StudentsT::new(0.0, 1.0, freedom).ok()
    }

    /// Returns the probability of a mean this far above `bound` or farther, if the truth is `bound`.
    fn above(&self, bound: f64, student: &StudentsT) -> f64 {
        let distance = self.mean - bound;
        if self.error > 0.0 {
            return student.sf(distance / self.error);
        }
        // Without any variation nothing is left to chance.
        if distance > 0.0 { 0.0 } else { 1.0 }
    }
}

/// The verdict of a paired comparison at 5 %.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Both one-sided tests reject a difference of the margin or more (TOST).
    Equivalent,
    /// Not equivalent, and the difference is not chance.
    Different,
    /// Neither is shown: more seeds may decide.
    NotShown,
}

impl Verdict {
    /// The wording in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Equivalent => "equivalent within the margin",
            Self::Different => "different",
            Self::NotShown => "not shown",
        }
    }
}

/// A paired comparison: differences by seed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    /// Mean difference with its 95 % confidence interval.
    pub difference: Mean,
    /// The p-value of Student's two-sided paired test of no difference.
    pub p_different: Option<f64>,
    /// The p-value of two one-sided paired tests of a difference as large as the margin (Schuirmann 1987): the larger
    /// one.
    pub p_equivalent: Option<f64>,
    /// The verdict at 5 %.
    pub verdict: Verdict,
}

impl Comparison {
    /// Compares pairs by their differences, against a margin above 0.
    pub fn of(differences: &[f64], margin: f64) -> Self {
        let sample = Sample::of(differences);
        let student = sample.student();
        let p_equivalent = student.as_ref().map(|student| {
            let too_low = sample.above(-margin, student);
            let too_high = 1.0 - sample.above(margin, student);
            too_low.max(too_high)
        });
        let p_different = student.as_ref().map(|student| {
            if sample.mean == 0.0 {
                return 1.0;
            }
            let above = sample.above(0.0, student);
            2.0 * above.min(1.0 - above)
        });
        let below_alpha = |p: Option<f64>| p.is_some_and(|p| p < ALPHA);
        let verdict = if below_alpha(p_equivalent) {
            Verdict::Equivalent
        } else if below_alpha(p_different) {
            Verdict::Different
        } else {
            Verdict::NotShown
        };
        Self { difference: Mean::of(differences), p_different, p_equivalent, verdict }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pair by pair.
    fn naive_auc(scores: &[f32], labels: &[bool]) -> Option<f64> {
        let of = |wanted: bool| {
            let all = scores.iter().zip(labels);
            all.filter(move |(_, label)| **label == wanted).map(|(score, _)| *score)
        };
        let (mut sum, mut pairs) = (0.0, 0.0);
        for positive in of(true) {
            for negative in of(false) {
                sum += match positive.total_cmp(&negative) {
                    std::cmp::Ordering::Greater => 1.0,
                    std::cmp::Ordering::Equal => 0.5,
                    std::cmp::Ordering::Less => 0.0,
                };
                pairs += 1.0;
            }
        }
        (pairs > 0.0).then(|| sum / pairs)
    }

    proptest! {
        #[test]
        fn auc_is_that_of_all_pairs(rows in proptest::collection::vec((0i8..6, any::<bool>()), 0..60)) {
            // Few scores, so that ties abound.
            let scores: Vec<f32> = rows.iter().map(|(score, _)| f32::from(*score) - 2.0).collect();
            let labels: Vec<bool> = rows.iter().map(|(_, label)| *label).collect();
            match (auc(&scores, &labels), naive_auc(&scores, &labels)) {
                (Some(found), Some(expected)) => prop_assert!((found - expected).abs() < 1e-12),
                (found, expected) => prop_assert_eq!(found, expected),
            }
        }
    }

    #[test]
    fn minus_zero_ties_with_zero() {
        assert_eq!(auc(&[-0.0, 0.0], &[true, false]), Some(0.5));
        assert_eq!(auc(&[0.0, -0.0], &[true, false]), Some(0.5));
    }

    #[test]
    fn log_loss_is_stable_and_that_of_the_definition() {
        let expected = -(0.5f64.ln() + (1.0 - 1.0 / (1.0 + (-2f64).exp())).ln()) / 2.0;
        assert!((log_loss(&[0.0, 2.0], &[true, false]) - expected).abs() < 1e-12);
        assert!((log_loss(&[200.0], &[false]) - 200.0).abs() < 1e-9);
    }

    #[test]
    fn the_interval_is_students() {
        // t(0.975, 4) = 2.776445; the sample has a standard deviation of 1.581139.
        let mean = Mean::of(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!((mean.mean - 3.0).abs() < 1e-12);
        let expected = 2.776_445 * 1.581_139 / 5f64.sqrt();
        assert!((mean.half_width.unwrap() - expected).abs() < 1e-5);
        assert_eq!(Mean::of(&[2.0]).half_width, None);
        let error = standard_error(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert!((error - 0.5f64.sqrt()).abs() < 1e-12);
        assert_eq!((standard_error(&[2.0]), standard_error(&[])), (None, None));
    }

    #[test]
    fn verdicts_are_those_of_the_two_tests() {
        let check = |differences: &[f64], verdict| {
            let found = Comparison::of(differences, 0.001);
            assert_eq!(found.verdict, verdict, "{differences:?}: {found:?}");
        };
        check(&[0.0001, -0.0001, 0.0002, 0.0, -0.0002], Verdict::Equivalent);
        // Surely not 0, and surely below the margin.
        check(&[0.0004, 0.00041, 0.00039, 0.0004, 0.0004], Verdict::Equivalent);
        check(&[0.004, 0.0041, 0.0039, 0.004, 0.0042], Verdict::Different);
        check(&[-0.004, -0.0041, -0.0039, -0.004, -0.0042], Verdict::Different);
        check(&[0.004, -0.004, 0.003, -0.003, 0.0], Verdict::NotShown);
        check(&[0.0; 5], Verdict::Equivalent);
        check(&[0.002; 5], Verdict::Different);
        check(&[0.0], Verdict::NotShown);
    }

    #[test]
    fn the_p_of_equivalence_is_that_of_the_nearer_bound() {
        // Mean 0.0005, error 0.0001: t = 5 from the upper bound, 15 from the lower, 4 degrees of freedom.
        let unit = 0.0001 * 5f64.sqrt() / 1.581_138_83;
        let differences: Vec<f64> = [-2.0, -1.0, 0.0, 1.0, 2.0].map(|d| 0.0005 + d * unit).to_vec();
        let found = Comparison::of(&differences, 0.001);
        assert!((found.p_equivalent.unwrap() - 0.003_745).abs() < 1e-5, "{found:?}");
        assert!((found.p_different.unwrap() - 2.0 * 0.003_745).abs() < 1e-5, "{found:?}");
    }
}
