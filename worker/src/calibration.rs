//! Online calibration of drafters' estimates by the actual texts.

use laser_decode::{DraftTree, ROOT_PARENT, Source};

/// Maps estimated probabilities to observed frequencies: σ(offset + slope · logit(p)) (Platt scaling), by stochastic
/// gradient descent on the log loss of every judged node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Calibration {
    offset: f32,
    slope: f32,
}

impl Default for Calibration {
    fn default() -> Self {
        Self { offset: 0.0, slope: 1.0 }
    }
}

impl Calibration {
    /// A judged draft has some 30 nodes, so a gross misestimate is corrected within about ten drafts.
    const OFFSET_RATE: f32 = 0.005;

    /// Smaller than the offset's rate by the mean square of a logit, about ten.
    const SLOPE_RATE: f32 = 0.0005;

    /// Returns the calibrated probability, which rises with the estimate.
    pub(crate) fn apply(&self, probability: f32) -> f32 {
        1.0 / (1.0 + (-self.offset - self.slope * logit(probability)).exp())
    }

    /// Learns whether a node with this estimate was part of the text.
    pub(crate) fn learn(&mut self, probability: f32, happened: bool) {
        let error = f32::from(u8::from(happened)) - self.apply(probability);
        self.offset = (self.offset + Self::OFFSET_RATE * error).clamp(-6.0, 6.0);
        let slope = self.slope + Self::SLOPE_RATE * error * logit(probability);
        self.slope = slope.clamp(0.2, 3.0);
    }
}

/// Returns the logit. An estimate that is too certain counts as the nearest one allowed.
fn logit(probability: f32) -> f32 {
    let p = probability.clamp(1e-4, 1.0 - 1e-4);
    (p / (1.0 - p)).ln()
}

/// A draft of a sequence, kept until its text is long enough to know of each node whether it was right.
///
/// The whole draft is judged, including the nodes that the budget cut. If only kept nodes were judged, a pool that
/// promises too little would be believed for ever, because its best nodes do keep their promise (from batch 16 on this
/// cost up to 30 % of the speed). One draft at a time is enough. A node that would have been accepted was right, even
/// if the text continued otherwise; the outcome of the nodes below it is unknown.
#[derive(Debug, Default)]
pub(crate) struct Hindsight {
    tree: DraftTree,
    /// Length of the text in tokens when it was drafted.
    from: usize,
    /// Length of the text in tokens when the outcome is known.
    until: usize,
    /// The tokens that the target would have accepted since, with their positions in the text, and whether of any
    /// source or of the prompt alone.
    accepted: Vec<(usize, u32, bool)>,
}

/// The outcome of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    InText,
    Accepted,
    Wrong,
    Unknown,
}

impl Hindsight {
    /// Watches a draft made when the text had `length` tokens, unless an earlier draft is being watched. Returns
    /// whether it does.
    pub(crate) fn watch(&mut self, tree: &DraftTree, length: usize) -> bool {
        let depth = tree.depths().iter().max().copied().unwrap_or_default();
        let watches = self.until == 0 && depth > 0;
        if watches {
            self.tree.clone_from(tree);
            self.from = length;
            self.until = length + depth as usize;
            self.accepted.clear();
        }
        watches
    }

    /// Records the tokens that the target would have accepted at a position of the text, and whether of any source or
    /// of the prompt alone.
    pub(crate) fn accepted(&mut self, place: usize, tokens: impl Iterator<Item = (u32, bool)>) {
        if (self.from..self.until).contains(&place) {
            self.accepted.extend(tokens.map(|(token, of_any)| (place, token, of_any)));
        }
    }

    /// Returns the nodes of the watched draft with their outcomes, once the text is long enough or has ended.
    pub(crate) fn judge(&mut self, text: &[u32], ended: bool) -> Vec<(f32, bool)> {
        if self.until == 0 || (text.len() < self.until && !ended) {
            return Vec::new();
        }
        self.until = 0;
        let mut fates: Vec<Fate> = Vec::with_capacity(self.tree.len());
        for node in 0..self.tree.len() {
            fates.push(self.fate(node, &fates, text));
        }
        let judged = self.tree.probabilities().iter().zip(fates).skip(1);
        judged
            .filter(|(_, fate)| *fate != Fate::Unknown)
            .map(|(probability, fate)| (*probability, fate != Fate::Wrong))
            .collect()
    }

    /// Returns the outcome of a node, given those of the nodes before it.
    fn fate(&self, node: usize, before: &[Fate], text: &[u32]) -> Fate {
        let parent = self.tree.parents()[node];
        if parent == ROOT_PARENT {
            return Fate::InText;
        }
        let (token, depth) = (self.tree.tokens()[node], self.tree.depths()[node]);
        let place = self.from + depth as usize - 1;
        let of_prompt = self.tree.sources()[node] == Source::Prompt;
        let is_accepted =
            |&(at, other, of_any): &(usize, u32, bool)| (at, other) == (place, token) && (of_any || of_prompt);
        match before[parent as usize] {
            Fate::InText if text.get(place) == Some(&token) => Fate::InText,
            Fate::InText if self.accepted.iter().any(is_accepted) => Fate::Accepted,
            Fate::InText | Fate::Wrong => Fate::Wrong,
            Fate::Accepted | Fate::Unknown => Fate::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn estimates_are_bent_to_what_happens() {
        let mut calibration = Calibration::default();
        // Twice in three where three in ten were promised, and once in ten where one in five hundred was.
        for round in 0..20_000_u32 {
            calibration.learn(0.3, round % 3 != 0);
            calibration.learn(0.002, round % 10 == 0);
        }
        for (estimate, truth) in [(0.3, 0.667), (0.002, 0.1)] {
            let found = calibration.apply(estimate);
            assert!((found - truth).abs() < 0.03, "{estimate}: {found}");
        }
    }

    #[test]
    fn true_estimates_are_left_alone() {
        let mut calibration = Calibration::default();
        for round in 0..40_000_u32 {
            calibration.learn(0.75, round % 4 != 0);
            calibration.learn(0.05, round % 20 == 0);
        }
        for estimate in [0.05, 0.3, 0.75] {
            let off = calibration.apply(estimate) - estimate;
            assert!(off.abs() < 0.03, "{estimate}: {off}");
        }
    }

    proptest! {
        #[test]
        fn order_is_kept_whatever_was_learned(
            lessons in prop::collection::vec((0.0_f32..1.0, any::<bool>()), 0..500),
            low in 0.001_f32..0.99,
        ) {
            let mut calibration = Calibration::default();
            lessons.iter().for_each(|(p, happened)| calibration.learn(*p, *happened));
            let (low, high) = (calibration.apply(low), calibration.apply(low + 0.009));
            prop_assert!(low < high && low > 0.0 && high < 1.0, "{} {}", low, high);
        }
    }

    /// 1 then 2 or 3, and 4 below 2.
    fn tree() -> DraftTree {
        let mut tree = DraftTree::new();
        tree.reset(0);
        let one = tree.push(0, 1, 0.8, Source::Pool);
        let two = tree.push(one, 2, 0.5, Source::Pool);
        tree.push(one, 3, 0.2, Source::Pool);
        tree.push(two, 4, 0.1, Source::Pool);
        tree
    }

    #[test]
    fn nodes_are_judged_by_the_text_that_came() {
        let mut hindsight = Hindsight::default();
        hindsight.watch(&tree(), 2);
        assert_eq!(hindsight.judge(&[7, 7, 1, 2], false), []);
        // What is drafted meanwhile is not looked at.
        hindsight.watch(&DraftTree::chain(&[9, 9]), 4);
        let judged = hindsight.judge(&[7, 7, 1, 2, 5, 6], false);
        assert_eq!(judged, [(0.8, true), (0.5, true), (0.2, false), (0.1, false)]);
        assert_eq!(hindsight.judge(&[7, 7, 1, 2, 5, 6, 7], true), []);
    }

    #[test]
    fn a_node_that_would_have_been_accepted_was_right_and_below_it_nothing_is_known() {
        let mut hindsight = Hindsight::default();
        hindsight.watch(&tree(), 0);
        hindsight.accepted(0, [(1, true)].into_iter());
        hindsight.accepted(1, [(3, true), (2, true)].into_iter());
        let judged = hindsight.judge(&[1, 3, 5], false);
        assert_eq!(judged, [(0.8, true), (0.5, true), (0.2, true)]);
        // Of the prompt alone, and node 2 is the pool's.
        hindsight.watch(&tree(), 0);
        hindsight.accepted(1, [(3, true), (2, false)].into_iter());
        let judged = hindsight.judge(&[1, 3, 5], false);
        assert_eq!(judged, [(0.8, true), (0.5, false), (0.2, true), (0.1, false)]);
        // What was accepted is forgotten with the draft.
        hindsight.watch(&tree(), 3);
        let judged = hindsight.judge(&[1, 3, 5, 1, 3, 5], false);
        assert_eq!(judged, [(0.8, true), (0.5, false), (0.2, true), (0.1, false)]);
    }

    #[test]
    fn what_lies_behind_the_end_of_a_text_was_wrong() {
        let mut hindsight = Hindsight::default();
        hindsight.watch(&tree(), 0);
        let judged = hindsight.judge(&[1, 2], true);
        assert_eq!(judged, [(0.8, true), (0.5, true), (0.2, false), (0.1, false)]);
    }

    #[test]
    fn a_wrong_node_makes_what_is_below_it_wrong() {
        let mut hindsight = Hindsight::default();
        hindsight.watch(&tree(), 0);
        let judged = hindsight.judge(&[3, 2, 4], false);
        assert!(judged.iter().all(|(_, happened)| !happened), "{judged:?}");
    }
}
