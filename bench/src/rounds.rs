//! What is measured in several rounds: the mean, and how far chance may have moved it.

/// Returns the mean of the rounds' figures and its standard error. The error of a single one is not a number, since
/// nothing is known of how figures scatter.
pub(super) fn mean_and_error(figures: &[f64]) -> (f64, f64) {
    let rounds = figures.len() as f64;
    let mean = figures.iter().sum::<f64>() / rounds;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    (mean, (squares / (rounds - 1.0) / rounds).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_the_mean_and_a_single_round_has_none() {
        // The sample has a variance of 2.5, of which the mean of five has a fifth.
        let (mean, error) = mean_and_error(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!((mean - 3.0).abs() < 1e-12 && (error - 0.5_f64.sqrt()).abs() < 1e-12, "{mean} ± {error}");
        assert_eq!(mean_and_error(&[1.5, 1.5]), (1.5, 0.0));
        let (mean, error) = mean_and_error(&[1.25]);
        assert!(mean == 1.25 && error.is_nan(), "{mean} ± {error}");
    }
}
