//! What was ranked for steps ahead, to be judged by the beams to come.

use laser_decode::{Beam, Ranked};

use super::coverage::{NEVER, Taken};

/// Candidates that one of the offers ranked for the steps ahead of a list, whether any of them are computed or not.
pub(super) struct Foresight {
    pub(super) offer: usize,
    /// Codes of the beams that it looked ahead from.
    pub(super) depth: usize,
    /// By steps ahead.
    pub(super) ranked: Vec<Ranked>,
    /// What the steps would have taken that the list has gone since.
    pub(super) taken: Vec<Taken>,
    /// Whether all beams so far were drafted.
    is_covered: bool,
}

impl Foresight {
    pub(super) fn new(offer: usize, depth: usize, ranked: Vec<Ranked>) -> Self {
        Self { offer, depth, ranked, taken: Vec::new(), is_covered: true }
    }

    /// What it ranked for the step from beams of `depth` codes on, unless beams before that were not drafted.
    pub(super) fn next(&self, depth: usize) -> Option<&Ranked> {
        let ahead = depth.checked_sub(self.depth)?;
        self.ranked.get(ahead).filter(|ranked| self.is_covered && !ranked.is_empty())
    }

    /// Judges the step that led to these beams of `depth` codes. Where drafts are drawn it is told whether they were
    /// accepted.
    pub(super) fn judge(&mut self, beams: &[Beam], depth: usize, is_accepted: Option<bool>) {
        let Some(ranked) = depth.checked_sub(1).and_then(|before| self.next(before)) else { return };
        let candidates = ranked.len();
        let width = match is_accepted {
            Some(true) => 1,
            Some(false) => NEVER,
            None => ranked.width_for(beams).unwrap_or(candidates),
        };
        self.is_covered = width <= ranked.drafted().len();
        self.taken.push(Taken { width, candidates });
    }

    /// Whether no step is left to judge.
    pub(super) fn is_judged(&self) -> bool {
        !self.is_covered || self.taken.len() == self.ranked.len()
    }
}
