//! How many prefixes to draft: what it took in earlier lists, and what a forward costs.

/// Bounds of numbers of candidates double from one class to the next.
const CLASSES: usize = 24;

/// Lists after which an earlier one counts half: about a thousand.
const DECAY: f64 = 0.9993;

/// Steps ahead that are drafted for, at most. A third one was never worth its nodes.
const AHEAD: usize = 2;

/// What was learnt of the drafts of one depth, so many steps ahead.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// How often so many candidates had all beams among them, by class.
    widths: [f64; CLASSES],
    /// Their sum.
    lists: f64,
    /// Sum of the candidates that there were.
    candidates: f64,
}

impl Seen {
    fn learn(&mut self, width: usize, candidates: usize) {
        self.widths.iter_mut().for_each(|lists| *lists *= DECAY);
        self.widths[class(width)] += 1.0;
        self.lists = self.lists * DECAY + 1.0;
        self.candidates = self.candidates * DECAY + candidates as f64;
    }

    /// Candidates that there are on average; as good as none are known before the first list.
    fn candidates(&self) -> f64 {
        if self.lists > 0.0 { self.candidates / self.lists } else { f64::INFINITY }
    }

    /// The share of lists in which `width` candidates have all beams among them. All candidates always have.
    fn share(&self, width: usize) -> f64 {
        if width as f64 >= self.candidates() {
            return 1.0;
        }
        // Only classes that end at `width` or below: between two bounds nobody knows on which side a list fell.
        let covered: f64 = self.widths[..=(width.max(1).ilog2() as usize).min(CLASSES - 1)].iter().sum();
        // One list that nothing was enough for, so that little evidence decides little.
        covered / (self.lists + 1.0)
    }
}

/// The class of widths up to the same power of two.
fn class(width: usize) -> usize {
    (width.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

/// What a step is decided by.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    /// Codes of an identifier.
    pub(super) levels: usize,
    /// Beams of a list.
    pub(super) width: usize,
    /// Drafted nodes of a user and step, at most.
    pub(super) nodes: usize,
    /// A user's share of the seconds of a step in which everybody has so many nodes.
    pub(super) seconds: &'a dyn Fn(usize) -> f64,
}

/// How well drafts have covered the beams, by depth.
#[derive(Debug, Clone, Default)]
pub struct Coverage {
    seen: Vec<[Seen; AHEAD]>,
}

impl Coverage {
    /// Learns that behind beams of `depth` codes so many of the candidates had to be drafted `ahead` steps ahead
    /// (counted from 0) to have all beams among them.
    pub fn learn(&mut self, (depth, ahead): (usize, usize), width: usize, candidates: usize) {
        if self.seen.len() <= depth {
            self.seen.resize_with(depth + 1, Default::default);
        }
        if let Some(seen) = self.seen[depth].get_mut(ahead) {
            seen.learn(width, candidates);
        }
    }

    /// How many candidates to draft for each step ahead, for beams of `depth` codes of which `missing` are computed in
    /// any case: what makes the expected seconds to the end of the list the fewest.
    pub(super) fn widths(&self, (depth, missing): (usize, usize), terms: &Terms<'_>) -> Vec<usize> {
        let mut rest = vec![0.0; terms.levels + AHEAD + 2];
        for later in (depth + 1..terms.levels).rev() {
            rest[later] = self.best((later, terms.width), &rest, terms).0;
        }
        self.best((depth, missing), &rest, terms).1
    }

    /// The expected seconds from a depth on, and the widths that give them; `rest` are those from later depths on.
    fn best(&self, (depth, missing): (usize, usize), rest: &[f64], terms: &Terms<'_>) -> (f64, Vec<usize>) {
        let none = Seen::default();
        let of = |ahead: usize| self.seen.get(depth).map_or(&none, |seen| &seen[ahead]);
        let mut best = ((terms.seconds)(missing) + rest[depth + 1], Vec::new());
        let first = if depth + 1 < terms.levels { options(of(0), terms) } else { Vec::new() };
        for width in first {
            let share = of(0).share(width);
            let one = (terms.seconds)(missing + width) + share * rest[depth + 2] + (1.0 - share) * rest[depth + 1];
            if one < best.0 {
                best = (one, vec![width]);
            }
            let second = if depth + 2 < terms.levels { options(of(1), terms) } else { Vec::new() };
            for further in second {
                let both = of(1).share(further);
                let two = (terms.seconds)(missing + width + further)
                    + share * (both * rest[depth + 3] + (1.0 - both) * rest[depth + 2])
                    + (1.0 - share) * rest[depth + 1];
                if two < best.0 {
                    best = (two, vec![width, further]);
                }
            }
        }
        best
    }
}

/// Numbers of candidates worth a thought: the bounds of classes from the number of beams on, and all.
fn options(seen: &Seen, terms: &Terms<'_>) -> Vec<usize> {
    let most = terms.nodes.min(whole(seen.candidates()));
    let fewest = terms.width.max(1).next_power_of_two();
    let mut options: Vec<usize> =
        std::iter::successors(Some(fewest), |width| width.checked_mul(2)).take_while(|&w| w < most).collect();
    options.push(most);
    options
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of counts; infinity saturates")]
fn whole(mean: f64) -> usize {
    mean.ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward costs 10, and each node 1.
    fn terms(seconds: &dyn Fn(usize) -> f64) -> Terms<'_> {
        Terms { levels: 4, width: 20, nodes: 256, seconds }
    }

    #[test]
    fn a_draft_is_made_where_it_saves_more_than_it_costs() {
        let mut coverage = Coverage::default();
        for _ in 0..200 {
            coverage.learn((2, 0), 60, 66);
            coverage.learn((1, 0), 1300, 1400);
        }
        let (dear, cheap) = (|nodes| 10.0 + nodes as f64, |nodes| 100.0 + nodes as f64);
        // 66 nodes for a forward of 10 and 20 nodes that would come anyway.
        assert!(coverage.widths((2, 20), &terms(&dear)).is_empty());
        let widths = coverage.widths((2, 20), &terms(&cheap));
        assert!(widths.len() == 1 && (64..=66).contains(&widths[0]), "{widths:?}");
        // Of 1,400 candidates 256 never had the beams among them.
        assert!(coverage.widths((1, 20), &terms(&cheap)).is_empty());
        // The last codes are never computed.
        assert!(coverage.widths((3, 20), &terms(&cheap)).is_empty());
    }

    #[test]
    fn few_candidates_are_enough_where_they_were() {
        let mut coverage = Coverage::default();
        for list in 0..400 {
            coverage.learn((0, 0), if list % 10 == 0 { 300 } else { 33 }, 5000);
            coverage.learn((0, 1), 50, 6000);
        }
        let cheap = |nodes| 1000.0 + nodes as f64;
        assert_eq!(coverage.widths((0, 1), &terms(&cheap)), [64, 64]);
    }

    #[test]
    fn nothing_is_drafted_before_it_is_known_what_it_takes() {
        let cheap = |nodes| 1000.0 + nodes as f64;
        assert!(Coverage::default().widths((1, 20), &terms(&cheap)).is_empty());
    }
}
