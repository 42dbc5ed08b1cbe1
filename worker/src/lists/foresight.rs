//! What was ranked for steps ahead, to be judged by the beams to come.

use laser_decode::{Beam, Ranked};

/// Candidates that one of the offers ranked for the steps ahead of a list, whether any of them are computed or not.
pub(super) struct Foresight {
    pub(super) offer: usize,
    /// Codes of the beams that it looked ahead from.
    pub(super) depth: usize,
    /// By steps ahead.
    pub(super) ranked: Vec<Ranked>,
    /// Whether all beams so far were drafted.
    is_covered: bool,
}

/// What a step ahead would have taken, in hindsight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Judged {
    pub(super) offer: usize,
    /// Codes of the beams that it looked ahead from, and the step counted from 0.
    pub(super) step: (usize, usize),
    /// Candidates that had to be drafted to have all beams among them.
    pub(super) width: usize,
    /// All of them.
    pub(super) candidates: usize,
}

impl Foresight {
    pub(super) fn new(offer: usize, depth: usize, ranked: Vec<Ranked>) -> Self {
        Self { offer, depth, ranked, is_covered: true }
    }

    /// Judges the step that led to these beams of `depth` codes. Candidates of a step come from the drafted ones of the
    /// step before, so that nothing can be said once a beam was not among those.
    pub(super) fn judge(&mut self, beams: &[Beam], depth: usize) -> Option<Judged> {
        let ahead = depth.checked_sub(self.depth + 1)?;
        let ranked = self.ranked.get(ahead).filter(|ranked| self.is_covered && !ranked.is_empty())?;
        let candidates = ranked.len();
        let width = ranked.width_for(beams).unwrap_or(candidates);
        self.is_covered = width <= ranked.drafted().len();
        Some(Judged { offer: self.offer, step: (self.depth, ahead), width, candidates })
    }
}
