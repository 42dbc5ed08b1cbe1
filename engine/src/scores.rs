//! The scores of a segment.

use laser_cpu::Predictions;
use laser_decode::{Candidate, Prediction, TargetScores};

/// Scores of the scored nodes of one segment.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    scored_from: usize,
    /// Tokens ahead that each scored node tells of.
    ahead: usize,
    width: usize,
    predictions: Predictions,
    hidden_size: usize,
    /// For each scored node where the log probabilities end that were asked for.
    ends: Vec<usize>,
}

impl Scores {
    /// `predictions` are of all scored nodes, for each so many tokens `ahead`, with `width` candidates each; the first
    /// ones are those of node `scored_from`. Their features are of all nodes, each of `hidden_size`.
    pub(super) fn new(
        (scored_from, ahead): (usize, usize),
        width: usize,
        predictions: Predictions,
        hidden_size: usize,
    ) -> Self {
        Self { scored_from, ahead, width, predictions, hidden_size, ends: Vec::new() }
    }

    /// With the ends of what was asked for at each scored node.
    pub(super) fn with_ends(self, ends: &[usize]) -> Self {
        Self { ends: ends.to_vec(), ..self }
    }

    /// The natural-log probabilities, over the whole vocabulary, of the tokens that were asked for at `node`; empty if
    /// none were.
    pub fn asked(&self, node: usize) -> &[f32] {
        let end = |row: usize| self.ends.get(row).copied();
        let of = |row: usize| Some((row.checked_sub(1).map_or(Some(0), end)?, end(row)?));
        let range = node.checked_sub(self.scored_from).and_then(of);
        range.and_then(|(start, end)| self.predictions.asked.get(start..end)).unwrap_or(&[])
    }

    /// The most probable tokens to come after `node` and `further` others; empty beyond what the engine
    /// [tells](crate::EngineInfo::ahead).
    pub fn ahead(&self, node: usize, further: usize) -> &[Candidate] {
        let row = node.checked_sub(self.scored_from).filter(|_| further < self.ahead);
        row.and_then(|row| self.predictions.candidates.chunks_exact(self.width.max(1)).nth(row * self.ahead + further))
            .unwrap_or(&[])
    }

    /// The feature of `node`, scored or not: what enters the projection to the vocabulary. Empty if the engine does not
    /// [keep features](crate::Engine::keep_features).
    pub fn feature(&self, node: usize) -> &[f32] {
        self.predictions.features.chunks_exact(self.hidden_size.max(1)).nth(node).unwrap_or(&[])
    }
}

impl TargetScores for Scores {
    /// The most probable next tokens after `node`, counted from the segment's first node:
    /// descending, ties by lower token id, natural logarithms over the whole vocabulary. Empty for
    /// a node that was not scored.
    fn top(&self, node: usize) -> &[Candidate] {
        self.ahead(node, 0)
    }

    /// The default for a node that was not scored.
    fn prediction(&self, node: usize) -> Prediction {
        let row = node.checked_sub(self.scored_from);
        row.and_then(|row| self.predictions.rows.get(row * self.ahead)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscored_nodes_have_no_candidates() {
        let candidate = Candidate { token: 1, log_probability: -0.5 };
        let row = |entropy| Prediction { choice: candidate, entropy, ..Prediction::default() };
        let rows = [0.1, 0.2, 0.3].map(row).to_vec();
        let features = (0..10_u8).map(f32::from).collect();
        let scores = Scores::new(
            (2, 1),
            1,
            Predictions { candidates: vec![candidate; 3], rows, features, ..Predictions::default() },
            2,
        );
        assert_eq!(
            (scores.feature(0), scores.feature(4), scores.feature(5).len()),
            (&[0.0, 1.0][..], &[8.0, 9.0][..], 0)
        );
        for (node, expected, entropy) in [(0, 0, 0.0), (1, 0, 0.0), (2, 1, 0.1), (4, 1, 0.3), (5, 0, 0.0)] {
            assert_eq!((scores.top(node).len(), scores.prediction(node).entropy), (expected, entropy), "node {node}");
            assert_eq!(scores.prediction(node).choice.log_probability.is_nan(), expected == 0);
            assert!(scores.asked(node).is_empty());
        }
    }
}
