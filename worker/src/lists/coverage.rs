//! How many prefixes had to be drafted in earlier lists.

/// Bounds of numbers of candidates double from one class to the next.
const CLASSES: usize = 24;

/// More candidates than any draft has.
pub(super) const NEVER: usize = 1 << (CLASSES - 1);

/// Lists after which an earlier one counts half: about a thousand.
const DECAY: f64 = 0.9993;

/// Steps ahead that are learnt of, and so drafted for, at most: all of an identifier of four codes.
pub(super) const AHEAD: usize = 3;

/// What was learnt of the drafts of one depth, so many steps ahead.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// How often so many candidates had all beams among them, by class.
    widths: [f64; CLASSES],
    /// Their sum.
    lists: f64,
    /// Sum of the candidates that there were, and the most of a list.
    candidates: f64,
    most: usize,
    /// The number of the last list.
    last: u64,
}

impl Seen {
    /// Learns of the list of a number. Earlier ones count by theirs, too: the first lists are all learnt of, and by
    /// sources that go by other lists knew of few.
    fn learn(&mut self, number: u64, width: usize, candidates: usize) {
        let kept = DECAY * self.last.max(1) as f64 / number.max(self.last).max(1) as f64;
        self.last = number;
        self.widths.iter_mut().for_each(|lists| *lists *= kept);
        self.widths[class(width)] += 1.0;
        self.lists = self.lists * kept + 1.0;
        self.candidates = self.candidates * kept + candidates as f64;
        self.most = self.most.max(candidates);
    }

    /// Candidates that there are on average; as good as none are known before the first list.
    pub(super) fn candidates(&self) -> f64 {
        if self.lists > 0.0 { self.candidates / self.lists } else { f64::INFINITY }
    }

    /// The share of lists in which `width` candidates have all beams among them. All candidates always have.
    pub(super) fn share(&self, width: usize) -> f64 {
        if self.lists > 0.0 && width >= self.most {
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

/// The first lists, all of which a source drafts for if it has to be tried: what its drafts cover is learnt of them.
const FIRST: u64 = 32;

/// From then on it drafts for one of so many lists whether it pays or not, since it may pay again. At 0.7M parameters
/// such a list takes at least five times as long as others.
const TRIED: u64 = 1024;

/// From then on one of so many lists is foreseen. By item-kNN that takes a tenth of a list's time at 2.1M parameters.
const WATCHED: u64 = 16;

/// Rate at which the time of ranking is learnt: about a hundred of them, and all alike as long as they are fewer.
const RANKING_RATE: f64 = 0.01;

/// How well a source's drafts have covered the beams, by depth.
#[derive(Debug, Clone, Default)]
pub struct Coverage {
    seen: Vec<[Seen; AHEAD]>,
    lists: u64,
    /// Seconds in which the candidates of a list are ranked for one step ahead, and how often that was measured.
    ranking: f64,
    rankings: u32,
}

impl Coverage {
    /// Counts a list that the source may draft for.
    pub(super) fn begin(&mut self) {
        self.lists += 1;
    }

    /// Whether the source drafts for the list that was counted last whatever that costs.
    pub(super) fn is_tried(&self) -> bool {
        self.is_one_of(TRIED)
    }

    /// Whether the source foresees that list: ranks as far ahead as it may draft, whatever is drafted.
    pub(super) fn is_watched(&self) -> bool {
        self.is_one_of(WATCHED)
    }

    /// Learns that the candidates of a list were ranked in so many seconds.
    pub(super) fn learn_ranking(&mut self, seconds: f64) {
        self.rankings = self.rankings.saturating_add(1);
        // Whatever else happened meanwhile counts as twice the time at most.
        let seconds = if self.rankings > 1 { seconds.min(2.0 * self.ranking) } else { seconds };
        self.ranking += (seconds - self.ranking) * RANKING_RATE.max(1.0 / f64::from(self.rankings));
    }

    /// Seconds in which the candidates of a list are ranked for one step ahead.
    pub(super) fn ranking(&self) -> f64 {
        self.ranking
    }

    fn is_one_of(&self, lists: u64) -> bool {
        self.lists <= FIRST || self.lists.is_multiple_of(lists)
    }

    /// Learns that behind beams of `depth` codes so many of the candidates had to be drafted `ahead` steps ahead
    /// (counted from 0) to have all beams among them.
    pub fn learn(&mut self, (depth, ahead): (usize, usize), width: usize, candidates: usize) {
        if self.seen.len() <= depth {
            self.seen.resize_with(depth + 1, Default::default);
        }
        if let Some(seen) = self.seen[depth].get_mut(ahead) {
            seen.learn(self.lists, width, candidates);
        }
    }

    /// What was learnt of the drafts behind beams of `depth` codes, so many steps ahead.
    pub(super) fn seen(&self, depth: usize, ahead: usize) -> Option<&Seen> {
        self.seen.get(depth).and_then(|seen| seen.get(ahead))
    }
}
