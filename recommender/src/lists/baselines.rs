//! The lists of recommenders that only count.

use laser_decode::{Method, Neighbours};
use rayon::prelude::*;

/// What becomes of the items that a user has already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// They are left out of the list, as of lists that are shown to users.
    LeftOut,
    /// They may be listed, as in AtSpeed's lists.
    Listed,
}

/// Returns the `length` best items for each history, oldest item first, by counting alone.
pub fn baseline(
    neighbours: &Neighbours,
    method: Method,
    histories: &[impl AsRef<[u32]> + Sync],
    seen: Seen,
    length: usize,
) -> Vec<Vec<u32>> {
    let list = |scores: &mut Vec<(u32, f32)>, history: &[u32]| {
        let left_out = if seen == Seen::LeftOut { history } else { &[] };
        neighbours.best(method, history, left_out, length, scores);
        scores.iter().map(|&(item, _)| item).collect()
    };
    histories.par_iter().map_init(Vec::new, |scores, history| list(scores, history.as_ref())).collect()
}
