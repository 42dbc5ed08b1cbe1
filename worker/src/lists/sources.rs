//! The sources of drafts that need no draft model, and what was learnt of each.

use laser_decode::{Listed, Method};

use super::coverage::Coverage;
use super::options::ListDraft;
use super::plan::Offer;
use super::sequence::By;

/// A source of drafts.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) draft: ListDraft,
    pub(super) coverage: Coverage,
}

/// Those to choose from. They take turns at foreseeing lists: of each list one does at most.
#[derive(Debug)]
pub(super) struct Sources {
    all: Vec<Source>,
    /// Whose turn it is.
    next: usize,
    lists: u64,
    /// What the lists so far had, if one drafts by that.
    listed: Option<Listed>,
}

impl Sources {
    /// All where one is chosen by costs, else the one that is named, if there is one. Where drafts are `drawn` they
    /// decide what is listed, so none goes by other lists there: a list must not depend on what its worker made before.
    pub(super) fn new(draft: ListDraft, drawn: bool) -> Self {
        let counted = Method::ALL.map(ListDraft::Counted);
        let drafts = match draft {
            ListDraft::None => Vec::new(),
            ListDraft::Auto => {
                let listed = (!drawn).then_some(ListDraft::Listed);
                [ListDraft::Trie, ListDraft::Retrieval].into_iter().chain(listed).chain(counted).collect()
            }
            ListDraft::Listed if drawn => vec![ListDraft::Trie],
            draft => vec![draft],
        };
        let source = |draft| Source { draft, coverage: Coverage::default() };
        let listed = drafts.contains(&ListDraft::Listed).then(Listed::default);
        Self { all: drafts.into_iter().map(source).collect(), next: 0, lists: 0, listed }
    }

    /// Counts a list. Returns the source whose turn it is, if there is one.
    pub(super) fn begin(&mut self) -> Option<usize> {
        self.lists += 1;
        let turn = self.next;
        self.all.get_mut(turn)?.coverage.begin();
        self.next = (turn + 1) % self.all.len();
        Some(turn)
    }

    /// Lists that were counted.
    pub(super) fn lists(&self) -> u64 {
        self.lists
    }

    /// What they offer, by number.
    pub(super) fn offers(&self) -> impl Iterator<Item = Offer<'_>> {
        self.all.iter().map(|source| Offer { coverage: &source.coverage, reading: None })
    }

    pub(super) fn get(&self, source: usize) -> Option<&Source> {
        self.all.get(source)
    }

    /// What a source ranks by, and how well its drafts have covered the beams.
    pub(super) fn ranking(&mut self, source: usize) -> Option<(By<'_>, &mut Coverage)> {
        let Source { draft, coverage } = self.all.get_mut(source)?;
        Some(((*draft, self.listed.as_ref()), coverage))
    }

    /// What learns of the beams of lists, whatever drafted them.
    pub(super) fn listed(&mut self) -> Option<&mut Listed> {
        self.listed.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::coverage::Taken;
    use super::super::plan::{Plans, StepSize, Terms};
    use super::*;

    /// Whether it is learnt what the drafts of the source whose turn it is would have to be.
    fn is_watched(sources: &Sources, turn: usize) -> bool {
        sources.get(turn).is_some_and(|source| source.coverage.is_watched())
    }

    #[test]
    fn sources_take_turns() {
        let mut sources = Sources::new(ListDraft::Auto, false);
        let mut watched = vec![0; sources.all.len()];
        for _ in 0..6 * 320 {
            let turn = sources.begin().unwrap();
            watched[turn] += usize::from(is_watched(&sources, turn));
        }
        // Of 320 lists the first 127, then one of two, three, four and five.
        assert_eq!(watched, [127 + 32 + 22 + 16 + 1; 6]);
        assert_eq!(sources.lists(), 1920);
        let mut knn = Sources::new(ListDraft::Counted(Method::Knn), false);
        assert_eq!((knn.begin(), knn.begin()), (Some(0), Some(0)));
        let mut none = Sources::new(ListDraft::None, false);
        assert_eq!((none.begin(), none.lists(), none.offers().count()), (None, 1, 0));
    }

    #[test]
    fn drafts_that_decide_lists_go_by_no_other_list() {
        for (draft, sources) in [(ListDraft::Listed, 1), (ListDraft::Auto, 5)] {
            let drawn = Sources::new(draft, true);
            assert!(drawn.listed.is_none() && drawn.all.iter().all(|source| source.draft != ListDraft::Listed));
            assert_eq!(drawn.all.len(), sources);
            assert!(Sources::new(draft, false).listed.is_some());
        }
    }

    #[test]
    fn the_source_that_covers_the_beams_with_the_fewest_prefixes_is_settled_on() {
        let seconds = |nodes: usize| 1000.0 + nodes as f64;
        let size = StepSize { lists: 1, width: 20, prompt: 40 };
        let terms = Terms { levels: 4, size, nodes: 256, steps: 3, drafted: None, seconds: &seconds };
        for best in 0..6 {
            let (mut sources, mut plans) = (Sources::new(ListDraft::Auto, false), Plans::default());
            for list in 0..2000 {
                let turn = sources.begin();
                let watched = turn.filter(|turn| is_watched(&sources, *turn));
                plans.refresh(sources.lists());
                let offers: Vec<Offer<'_>> = sources.offers().collect();
                let plan = plans.planner(&offers, terms).plan(1, 20);
                if list >= 400 {
                    assert_eq!(plan.as_ref().map(|plan| (plan.offer, &plan.widths[..])), Some((best, &[32][..])));
                }
                for source in HashSet::from([plan.map(|plan| plan.offer), watched]).into_iter().flatten() {
                    // What it takes of each source to have all beams.
                    let width = if source == best { 25 } else { 60 + 30 * source };
                    let taken = Taken { width, candidates: 5000 };
                    sources.ranking(source).unwrap().1.learn(1, vec![taken]);
                }
            }
        }
    }
}
