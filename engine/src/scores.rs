//! The scores of a segment.

use laser_cpu::Predictions;
use laser_decode::{Candidate, Prediction, TargetScores};

/// Scores of the scored nodes of one segment.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    scored_from: usize,
    width: usize,
    predictions: Predictions,
}

impl Scores {
    /// `predictions` are of all scored nodes, with `width` candidates each; the first one is node `scored_from`.
    pub(super) fn new(scored_from: usize, width: usize, predictions: Predictions) -> Self {
        Self { scored_from, width, predictions }
    }
}

impl TargetScores for Scores {
    /// The most probable next tokens after `node`, counted from the segment's first node:
    /// descending, ties by lower token id, natural logarithms over the whole vocabulary. Empty for
    /// a node that was not scored.
    fn top(&self, node: usize) -> &[Candidate] {
        node.checked_sub(self.scored_from)
            .and_then(|row| self.predictions.candidates.chunks_exact(self.width.max(1)).nth(row))
            .unwrap_or(&[])
    }

    /// The default for a node that was not scored.
    fn prediction(&self, node: usize) -> Prediction {
        let row = node.checked_sub(self.scored_from);
        row.and_then(|row| self.predictions.rows.get(row)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscored_nodes_have_no_candidates() {
        let candidate = Candidate { token: 1, log_probability: -0.5 };
        let row = |entropy| Prediction { choice: candidate, entropy, ..Prediction::default() };
        let predictions = Predictions { candidates: vec![candidate; 3], rows: [0.1, 0.2, 0.3].map(row).to_vec() };
        let scores = Scores::new(2, 1, predictions);
        for (node, expected, entropy) in [(0, 0, 0.0), (1, 0, 0.0), (2, 1, 0.1), (4, 1, 0.3), (5, 0, 0.0)] {
            assert_eq!((scores.top(node).len(), scores.prediction(node).entropy), (expected, entropy), "node {node}");
            assert_eq!(scores.prediction(node).choice.log_probability.is_nan(), expected == 0);
        }
    }
}
