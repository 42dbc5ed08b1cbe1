//! How many prefixes to draft, and by which source: what the measured costs of forwards say.

use std::cell::OnceCell;
use std::collections::HashMap;

use super::coverage::{AHEAD, Coverage, Seen};

/// How large a step is, by which plans are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StepSize {
    /// Lists.
    pub(super) lists: usize,
    /// Beams of a list, on average.
    pub(super) width: usize,
    /// Tokens of a prompt, on average.
    pub(super) prompt: usize,
}

/// What a step is decided by.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    /// Codes of an identifier.
    pub(super) levels: usize,
    pub(super) size: StepSize,
    /// Drafted prefixes of a user and step, at most.
    pub(super) nodes: usize,
    /// Steps ahead that are drafted for, at most.
    pub(super) steps: usize,
    /// What is drafted for each step, if that is not to be chosen.
    pub(super) drafted: Option<usize>,
    /// A user's share of the seconds of a step in which everybody has so many nodes.
    pub(super) seconds: &'a dyn Fn(usize) -> f64,
}

/// A source of drafts.
#[derive(Clone, Copy)]
pub(super) struct Offer<'a> {
    /// How well it has covered the beams.
    pub(super) coverage: &'a Coverage,
    /// A user's share of the seconds in which it reads so many tokens of everybody; nothing is read if absent.
    pub(super) reading: Option<&'a dyn Fn(usize) -> f64>,
}

/// What is drafted for a list in a step: by which of the offers, and how many prefixes for each step ahead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) offer: usize,
    pub(super) widths: Vec<usize>,
}

/// Lists for which plans are kept: of the thousand or so that count in what was learnt.
const KEPT: u64 = 128;

/// Plans that were made. To make them anew for every step of a single list took a tenth of the list's time at 0.7M
/// parameters, and a quarter of it with a draft model, and what they are made of changes slowly.
#[derive(Debug, Default)]
pub(super) struct Plans {
    made: HashMap<StepSize, Made>,
    /// What may be drafted for lists of so many beams, by offer and codes of the beams.
    choices: HashMap<usize, Vec<Vec<Option<Choices>>>>,
    /// The number of lists from which on they are made anew.
    until: u64,
}

/// Those of steps of one size.
#[derive(Debug, Default)]
struct Made {
    /// The expected seconds of a list from so many codes on.
    rest: Vec<f64>,
    plans: HashMap<PlanKey, Option<Plan>>,
}

/// Codes of the beams, and those of them that are computed in any case.
type PlanKey = (usize, usize);

/// The numbers of candidates that may be drafted for a step ahead, after those of the steps before it. Plans of steps
/// of all sizes choose among the same, which are weighed once: to do so for each plan took a quarter of the time of
/// drafting at 0.7M parameters.
#[derive(Debug)]
struct Choices {
    seen: Seen,
    /// Prefixes that are drafted for the steps before, on average.
    before: f64,
    choices: Vec<Choice>,
}

/// One of them.
#[derive(Debug)]
struct Choice {
    width: usize,
    /// The share of lists in which these have all beams among them.
    share: f64,
    /// Prefixes that are drafted for it, on average.
    drafted: f64,
    /// Those of the next step.
    next: OnceCell<Option<Choices>>,
}

impl Choices {
    /// After so many prefixes for the steps before; none if nothing is known of this one.
    fn new(seen: Option<Seen>, before: f64, terms: &Terms<'_>) -> Option<Self> {
        let seen = seen?;
        let choice =
            |width| Choice { width, share: seen.share(width), drafted: seen.drafted(width), next: OnceCell::new() };
        let choices = widths(&seen, before, terms).into_iter().map(choice).collect();
        Some(Self { seen, before, choices })
    }

    /// The next step's after one of these.
    fn after<'a>(&self, choice: &'a Choice, terms: &Terms<'_>) -> Option<&'a Self> {
        let next = || Self::new(self.seen.next(choice.width), self.before + choice.drafted, terms);
        choice.next.get_or_init(next).as_ref()
    }
}

/// Numbers of candidates worth a thought: powers of two from the number of beams on and one between each, and as many
/// as there is room for. Where a list has fewer these are all of its own, also where it has more than most.
fn widths(seen: &Seen, before: f64, terms: &Terms<'_>) -> Vec<usize> {
    let room = terms.nodes.saturating_sub(whole(before));
    if let Some(drafted) = terms.drafted {
        return Vec::from_iter((drafted <= room).then_some(drafted));
    }
    let fewest = terms.size.width.max(1).next_power_of_two();
    let powers = std::iter::successors(Some(fewest), |width| width.checked_mul(2));
    let bounds = powers.flat_map(|width| [width, width + width / 2]);
    let fewer = room.min(whole(seen.drafted(usize::MAX)));
    bounds.take_while(|&width| width < fewer).chain((room > 0).then_some(room)).collect()
}

impl Plans {
    /// Forgets all plans where so many `lists` have been begun that others may be better by now: at first after every
    /// one.
    pub(super) fn refresh(&mut self, lists: u64) {
        if lists >= self.until {
            self.made.clear();
            self.choices.clear();
            self.until = lists + (lists / 8).clamp(1, KEPT);
        }
    }

    /// What decides in steps of the terms' size.
    pub(super) fn planner<'a>(&'a mut self, offers: &'a [Offer<'a>], terms: Terms<'a>) -> Planner<'a> {
        let choices = self.choices.entry(terms.size.width).or_insert_with(|| {
            let of = |offer: &Offer<'_>, depth| Choices::new(offer.coverage.seen(depth), 0.0, &terms);
            offers.iter().map(|offer| (0..terms.levels).map(|depth| of(offer, depth)).collect()).collect()
        });
        let Made { rest, plans } = self.made.entry(terms.size).or_default();
        let planner = Planner { offers, terms, choices, rest, plans };
        if planner.rest.is_empty() {
            planner.rest.resize(terms.levels + 1, 0.0);
            for depth in (1..terms.levels).rev() {
                planner.rest[depth] = planner.best((depth, terms.size.width)).0;
            }
        }
        planner
    }
}

/// Decides for all lists of a step.
pub(super) struct Planner<'a> {
    offers: &'a [Offer<'a>],
    terms: Terms<'a>,
    /// By offer and codes of the beams.
    choices: &'a [Vec<Option<Choices>>],
    rest: &'a mut Vec<f64>,
    plans: &'a mut HashMap<PlanKey, Option<Plan>>,
}

impl Planner<'_> {
    /// What to draft behind beams of `depth` codes of which `missing` are computed in any case: what makes the expected
    /// seconds to the end of the list the fewest; none if that is no draft.
    pub(super) fn plan(&mut self, depth: usize, missing: usize) -> Option<Plan> {
        let key = (depth, missing);
        if let Some(plan) = self.plans.get(&key) {
            return plan.clone();
        }
        let (_, plan) = self.best(key);
        self.plans.insert(key, plan.clone());
        plan
    }

    /// The expected seconds from a depth on, and the plan that gives them.
    fn best(&self, (depth, missing): PlanKey) -> (f64, Option<Plan>) {
        let mut best = (self.seconds(depth, missing) + self.rest[depth + 1], None);
        for (offer, choices) in self.choices.iter().enumerate() {
            let read = if depth == 0 { self.terms.size.prompt } else { self.terms.size.width };
            let so_far = SoFar { offer, depth, missing, reached: 1.0, fallen: 0.0, read, reading: 0.0 };
            if let Some(choices) = choices[depth].as_ref().filter(|_| self.may_draft(depth, 0)) {
                self.extend(so_far, choices, &mut Vec::with_capacity(AHEAD), &mut best);
            }
        }
        best
    }

    /// Whether there is one more step behind so many ahead of beams of a depth.
    fn may_draft(&self, depth: usize, ahead: usize) -> bool {
        ahead < self.terms.steps && depth + 1 + ahead < self.terms.levels
    }

    /// Tries every number of candidates for one more step ahead.
    fn extend(&self, so_far: SoFar, choices: &Choices, widths: &mut Vec<usize>, best: &mut (f64, Option<Plan>)) {
        let SoFar { offer, depth, missing, .. } = so_far;
        let (ahead, Offer { coverage, reading }) = (widths.len(), self.offers[offer]);
        let reading = so_far.reading + coverage.ranking() + reading.map_or(0.0, |seconds| seconds(so_far.read));
        for choice in &choices.choices {
            let &Choice { width, share, drafted, .. } = choice;
            let fallen = so_far.fallen + so_far.reached * (1.0 - share) * self.rest[depth + 1 + ahead];
            let spent = self.seconds(depth, missing + whole(choices.before + drafted)) + reading + fallen;
            // More steps only add to that. Without this plans took a tenth of a list's time at 0.7M parameters.
            if spent >= best.0 {
                continue;
            }
            widths.push(width);
            let reached = so_far.reached * share;
            let seconds = spent + reached * self.rest[depth + 2 + ahead];
            if seconds < best.0 {
                *best = (seconds, Some(Plan { offer, widths: widths.clone() }));
            }
            // Asked first: what is known behind the last step would be weighed in vain.
            if self.may_draft(depth, ahead + 1)
                && let Some(choices) = choices.after(choice, &self.terms)
            {
                let next = SoFar { reached, fallen, read: whole(drafted), reading, ..so_far };
                self.extend(next, choices, widths, best);
            }
            widths.pop();
        }
    }

    /// The seconds of a step behind beams of a depth that computes so many nodes; the first one has the prompt, too.
    fn seconds(&self, depth: usize, nodes: usize) -> f64 {
        (self.terms.seconds)(if depth == 0 { self.terms.size.prompt + nodes } else { nodes })
    }
}

/// A plan under way.
#[derive(Clone, Copy)]
struct SoFar {
    offer: usize,
    /// Codes of the beams, and those of them that are computed in any case.
    depth: usize,
    missing: usize,
    /// The chance that all beams of the steps so far are drafted.
    reached: f64,
    /// The expected seconds behind those steps where they are not.
    fallen: f64,
    /// Tokens that the source reads next.
    read: usize,
    /// Seconds that it has read and ranked for.
    reading: f64,
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of counts")]
fn whole(mean: f64) -> usize {
    mean.ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::super::coverage::Taken;
    use super::*;

    /// 20 beams of four codes.
    fn terms(seconds: &dyn Fn(usize) -> f64) -> Terms<'_> {
        Terms { levels: 4, size: SIZE, nodes: 256, steps: 3, drafted: None, seconds }
    }

    /// The plan for beams of a depth.
    fn plan(offers: &[Offer<'_>], terms: Terms<'_>, (depth, missing): (usize, usize)) -> Option<Plan> {
        Plans::default().planner(offers, terms).plan(depth, missing)
    }

    const SIZE: StepSize = StepSize { lists: 1, width: 20, prompt: 40 };

    fn free(coverage: &Coverage) -> Offer<'_> {
        Offer { coverage, reading: None }
    }

    /// Learns how many candidates each step ahead took of how many.
    fn learn(coverage: &mut Coverage, depth: usize, steps: &[(usize, usize)]) {
        let taken = steps.iter().map(|&(width, candidates)| Taken { width, candidates });
        coverage.learn(depth, taken.collect());
    }

    #[test]
    fn lists_that_took_little_at_one_step_tend_to_at_the_next() {
        let mut coverage = Coverage::default();
        // For every other list 32 candidates are enough at either step.
        for list in 0..200 {
            let width = if list % 2 == 0 { 20 } else { 100 };
            learn(&mut coverage, 1, &[(width, 5000), (width, 5000)]);
        }
        let seen = coverage.seen(1).unwrap();
        assert!((seen.share(32) - 100.0 / 201.0).abs() < 1e-9);
        assert!(seen.next(32).unwrap().share(32) > 0.99 && seen.next(16).is_none());
        assert!(seen.next(100).unwrap().share(32) < 0.5);
        // So both steps are as likely as one. They would not pay at a quarter.
        let seconds = |nodes: usize| 100.0 + nodes as f64;
        let few = Terms { nodes: 64, ..terms(&seconds) };
        assert_eq!(plan(&[free(&coverage)], few, (1, 20)).unwrap().widths, [32, 32]);
        // No more are planned than are drafted, also where fewer beams than usual are computed beside them.
        let fewer = Terms { nodes: 63, ..terms(&seconds) };
        assert_eq!(plan(&[free(&coverage)], fewer, (1, 1)).unwrap().widths, [32, 31]);
    }

    #[test]
    fn a_draft_is_made_where_it_saves_more_than_it_costs() {
        let mut coverage = Coverage::default();
        for _ in 0..200 {
            learn(&mut coverage, 2, &[(60, 66)]);
            learn(&mut coverage, 1, &[(1300, 1400)]);
        }
        let (dear, cheap) = (|nodes| 10.0 + nodes as f64, |nodes| 100.0 + nodes as f64);
        let offers = [free(&coverage)];
        // 66 nodes for a forward of 10 and 20 nodes that would come anyway.
        assert_eq!(plan(&offers, terms(&dear), (2, 20)), None);
        let mut plans = Plans::default();
        let mut planner = plans.planner(&offers, terms(&cheap));
        let plan = planner.plan(2, 20).unwrap();
        assert!(plan.widths.len() == 1 && (64..=66).contains(&plan.widths[0]), "{plan:?}");
        assert_eq!(planner.plan(2, 20).unwrap(), plan);
        // Of 1,400 candidates 256 never had the beams among them.
        assert_eq!(planner.plan(1, 20), None);
        // The last codes are never computed.
        assert_eq!(planner.plan(3, 20), None);
    }

    #[test]
    fn few_candidates_are_enough_where_they_were() {
        let mut coverage = Coverage::default();
        for list in 0..400 {
            learn(&mut coverage, 0, &[(if list % 10 == 0 { 300 } else { 33 }, 5000), (50, 6000)]);
        }
        let cheap = |nodes| 1000.0 + nodes as f64;
        let offers = [free(&coverage)];
        assert_eq!(plan(&offers, terms(&cheap), (0, 1)).unwrap().widths, [48, 64]);
        let one = Terms { steps: 1, ..terms(&cheap) };
        assert_eq!(plan(&offers, one, (0, 1)).unwrap().widths, [48]);
    }

    #[test]
    fn all_candidates_are_drafted_however_many_a_list_has() {
        let mut coverage = Coverage::default();
        // 115 of them on average, which are too few for every other list.
        for list in 0..400 {
            let all = if list % 2 == 0 { 90 } else { 140 };
            learn(&mut coverage, 2, &[(all, all)]);
        }
        let seconds = |nodes| 1000.0 + nodes as f64;
        let widths = plan(&[free(&coverage)], terms(&seconds), (2, 20)).unwrap().widths;
        assert!(widths.len() == 1 && widths[0] >= 140, "{widths:?}");
        // They cost what they come to on average: 115 nodes more than a forward of 20.
        let dear = |nodes| 130.0 + nodes as f64;
        assert!(plan(&[free(&coverage)], terms(&dear), (2, 20)).is_some());
        let too_dear = |nodes| 90.0 + nodes as f64;
        assert_eq!(plan(&[free(&coverage)], terms(&too_dear), (2, 20)), None);
    }

    #[test]
    fn plans_are_made_anew_when_enough_lists_have_been_learnt_of() {
        let seconds = |nodes| 1000.0 + nodes as f64;
        let (mut coverage, mut plans) = (Coverage::default(), Plans::default());
        let mut planned = |coverage: &Coverage, lists: u64| {
            plans.refresh(lists);
            plans.planner(&[free(coverage)], terms(&seconds)).plan(1, 20)
        };
        assert_eq!(planned(&coverage, 800), None);
        (0..400).for_each(|_| learn(&mut coverage, 1, &[(30, 5000)]));
        assert_eq!(planned(&coverage, 899), None);
        assert_eq!(planned(&coverage, 900).unwrap().widths, [32]);
        // Early ones are made anew for each list.
        let mut plans = Plans::default();
        let kept = |plans: &Plans| plans.made.len();
        for lists in 0..8 {
            plans.refresh(lists);
            assert_eq!(kept(&plans), 0, "{lists}");
            plans.planner(&[free(&coverage)], terms(&seconds)).plan(1, 20);
        }
    }

    #[test]
    fn ranking_has_to_be_saved_too() {
        let seconds = |nodes| 100.0 + nodes as f64;
        let mut coverage = Coverage::default();
        (0..400).for_each(|_| learn(&mut coverage, 2, &[(20, 30)]));
        let widths = plan(&[free(&coverage)], terms(&seconds), (2, 20)).unwrap().widths;
        assert!(widths.len() == 1 && widths[0] >= 30, "{widths:?}");
        // A forward of 120 is saved for 30 nodes.
        coverage.learn_ranking(89.0);
        assert!(plan(&[free(&coverage)], terms(&seconds), (2, 20)).is_some());
        (0..400).for_each(|_| coverage.learn_ranking(92.0));
        assert_eq!(plan(&[free(&coverage)], terms(&seconds), (2, 20)), None);
    }

    #[test]
    fn the_first_step_has_the_prompt() {
        let mut coverage = Coverage::default();
        (0..400).for_each(|_| learn(&mut coverage, 0, &[(30, 5000)]));
        // Up to 60 tokens a forward costs the same, and the prompt has 40.
        let seconds = |nodes: usize| 100.0 + 50.0 * nodes.saturating_sub(60) as f64;
        let offers = [free(&coverage)];
        assert_eq!(plan(&offers, terms(&seconds), (0, 1)), None);
        let short = Terms { size: StepSize { prompt: 10, ..SIZE }, ..terms(&seconds) };
        assert_eq!(plan(&offers, short, (0, 1)).unwrap().widths, [32]);
    }

    #[test]
    fn nothing_is_drafted_before_it_is_known_what_it_takes() {
        let cheap = |nodes| 1000.0 + nodes as f64;
        let coverage = Coverage::default();
        assert_eq!(plan(&[free(&coverage)], terms(&cheap), (1, 20)), None);
    }

    #[test]
    fn of_two_sources_the_one_that_saves_more_than_it_reads_for_drafts() {
        let (mut wide, mut narrow) = (Coverage::default(), Coverage::default());
        for _ in 0..400 {
            learn(&mut wide, 1, &[(250, 5000)]);
            learn(&mut narrow, 1, &[(30, 5000)]);
        }
        let seconds = |nodes| 1000.0 + nodes as f64;
        let chosen = |reading: f64| {
            let reading = move |_| reading;
            let offers = [free(&wide), Offer { coverage: &narrow, reading: Some(&reading) }];
            plan(&offers, terms(&seconds), (1, 20)).unwrap()
        };
        assert_eq!(chosen(100.0), Plan { offer: 1, widths: vec![32] });
        // 224 nodes more cost less than that.
        assert_eq!(chosen(300.0), Plan { offer: 0, widths: vec![256] });
    }
}
