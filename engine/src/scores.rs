//! The scores of a segment.

use laser_decode::{Candidate, TargetScores};

/// Scores of the scored nodes of one segment.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    scored_from: usize,
    width: usize,
    candidates: Vec<Candidate>,
}

impl Scores {
    /// `candidates` holds `width` per scored node, the first of which is node `scored_from`.
    pub(super) fn new(scored_from: usize, width: usize, candidates: Vec<Candidate>) -> Self {
        Self { scored_from, width, candidates }
    }
}

impl TargetScores for Scores {
    /// The most probable next tokens after `node`, counted from the segment's first node:
    /// descending, ties by lower token id, natural logarithms over the whole vocabulary. Empty for
    /// a node that was not scored.
    fn top(&self, node: usize) -> &[Candidate] {
        node.checked_sub(self.scored_from)
            .and_then(|row| self.candidates.chunks_exact(self.width.max(1)).nth(row))
            .unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscored_nodes_have_no_candidates() {
        let candidate = Candidate { token: 1, log_probability: -0.5 };
        let scores = Scores::new(2, 1, vec![candidate; 3]);
        for (node, expected) in [(0, 0), (1, 0), (2, 1), (4, 1), (5, 0)] {
            assert_eq!(scores.top(node).len(), expected, "node {node}");
        }
    }
}
