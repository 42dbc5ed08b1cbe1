//! How many prefixes had to be drafted in earlier lists.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// More candidates than any draft has.
pub(super) const NEVER: usize = usize::MAX;

/// Steps ahead that are learnt of, and so drafted for, at most: all of an identifier of four codes.
pub(super) const AHEAD: usize = 3;

/// Lists that are remembered: the last 16 thousand where one of 64 is learnt of.
const REMEMBERED: usize = 256;

/// What a step ahead would have taken, in hindsight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Taken {
    /// Candidates that had to be drafted to have all beams among them.
    pub(super) width: usize,
    /// All of them.
    pub(super) candidates: usize,
}

/// What a list would have taken.
#[derive(Debug, Clone)]
struct Sample {
    /// The list's.
    number: u64,
    /// By steps ahead. Candidates come from the drafted ones of the step before, so nothing is known behind one that
    /// had too few.
    steps: Arc<[Taken]>,
}

/// What was learnt of a step ahead from those lists that all steps before it had enough drafts for.
#[derive(Debug)]
pub(super) struct Seen {
    samples: Vec<(f64, Arc<[Taken]>)>,
    ahead: usize,
    weight: f64,
}

impl Seen {
    fn new(samples: impl Iterator<Item = (f64, Arc<[Taken]>)>, ahead: usize) -> Option<Self> {
        let samples: Vec<_> = samples.filter(|(_, steps)| steps.len() > ahead).collect();
        let weight = samples.iter().map(|(weight, _)| weight).sum();
        (!samples.is_empty()).then_some(Self { samples, ahead, weight })
    }

    /// The lists with their weights.
    fn taken(&self) -> impl Iterator<Item = (f64, Taken)> {
        self.samples.iter().map(|(weight, steps)| (*weight, steps[self.ahead]))
    }

    /// Candidates that are drafted on average if at most `width` are.
    pub(super) fn drafted(&self, width: usize) -> f64 {
        self.taken().map(|(weight, taken)| weight * taken.candidates.min(width) as f64).sum::<f64>() / self.weight
    }

    /// The share of lists in which `width` candidates have all beams among them. All candidates always have.
    pub(super) fn share(&self, width: usize) -> f64 {
        if self.taken().all(|(_, taken)| taken.candidates <= width) {
            return 1.0;
        }
        let covered: f64 = self.taken().filter(|(_, taken)| taken.width <= width).map(|(weight, _)| weight).sum();
        // One list that nothing was enough for, so that little evidence decides little.
        covered / (self.weight + 1.0)
    }

    /// The same of the next step, where `width` candidates are drafted for this one; none if nothing is known of it.
    pub(super) fn next(&self, width: usize) -> Option<Self> {
        let covered = self.samples.iter().filter(|(_, steps)| steps[self.ahead].width <= width);
        Self::new(covered.cloned(), self.ahead + 1)
    }
}

/// The first lists, all of which a source drafts for if it has to be tried: what its drafts cover is learnt of them.
const FIRST: u64 = 32;

/// From then on it drafts for one of so many lists whether it pays or not, since it may pay again. At 0.7M parameters
/// such a list takes at least five times as long as others.
const TRIED: u64 = 1024;

/// One of so many lists is foreseen in the end, from the four thousandth on. At 2.1M parameters one of 16 would take a
/// hundredth of the time of lists of five items by what other lists had, and a tenth by item-kNN.
const WATCHED: u64 = 64;

/// Until then those are whose numbers are multiples of their number divided by this: all below 128, one of two below
/// 192, one of three below 256, and so on. After a thousand lists those seen count as much as the last 64 would.
const WATCHED_RATE: u64 = 64;

/// Rate at which the time of ranking is learnt: about a hundred of them, and all alike as long as they are fewer.
const RANKING_RATE: f64 = 0.01;

/// How well a source's drafts have covered the beams, by depth.
#[derive(Debug, Clone, Default)]
pub(super) struct Coverage {
    samples: Vec<VecDeque<Sample>>,
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
        self.lists <= FIRST || self.lists.is_multiple_of(TRIED)
    }

    /// Whether the source foresees that list: ranks as far ahead as it may draft, whatever is drafted.
    pub(super) fn is_watched(&self) -> bool {
        self.lists.is_multiple_of((self.lists / WATCHED_RATE).clamp(1, WATCHED))
    }

    /// Ranks the candidates of a list for one step ahead, and learns how long that takes.
    pub(super) fn time(&mut self, rank: impl FnOnce()) {
        let start = Instant::now();
        rank();
        self.learn_ranking(start.elapsed().as_secs_f64());
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

    /// Learns what the drafts of a list would have taken behind beams of `depth` codes, by steps ahead.
    pub(super) fn learn(&mut self, depth: usize, steps: Vec<Taken>) {
        if self.samples.len() <= depth {
            self.samples.resize_with(depth + 1, VecDeque::new);
        }
        let samples = &mut self.samples[depth];
        if samples.len() == REMEMBERED {
            samples.pop_front();
        }
        samples.push_back(Sample { number: self.lists, steps: steps.into() });
    }

    /// What was learnt of the drafts one step ahead of beams of `depth` codes; none if that is nothing.
    pub(super) fn seen(&self, depth: usize) -> Option<Seen> {
        // A list counts by its number: the first ones are all learnt of, and by sources that go by other lists knew of
        // few.
        let weight = |sample: &Sample| sample.number.max(1) as f64 / self.lists.max(1) as f64;
        Seen::new(self.samples.get(depth)?.iter().map(|sample| (weight(sample), sample.steps.clone())), 0)
    }
}
