//! That stochastic beam search draws lists without replacement, and that no draft, order or company changes one.

use std::collections::HashSet;

use super::*;
use crate::list_sampling::tests::{DRAWS, deviation, ordered};

/// How many children each inner node has, breadth first: 11 leaves at depth 3, one of them behind only children.
const CHILDREN: [u32; 10] = [3, 3, 2, 1, 3, 1, 2, 2, 2, 1];

const DEPTH: usize = 3;

/// A model of the tree: nodes are numbered breadth first, the root is 0.
#[derive(Debug, Clone)]
struct Model {
    /// The children of each inner node with their log probabilities, which need a common term to sum to 1.
    children: Vec<Vec<(u32, f32)>>,
}

impl Model {
    fn new(slope: u32) -> Self {
        let mut next = 1;
        let mut child = || {
            next += 1;
            (next - 1, ((1 + next * next * slope % 7) as f32).ln())
        };
        Self { children: CHILDREN.map(|count| (0..count).map(|_| child()).collect()).to_vec() }
    }

    fn target() -> Self {
        Self::new(3)
    }

    fn children(&self, node: u32) -> &[(u32, f32)] {
        self.children.get(node as usize).map_or(&[], Vec::as_slice)
    }

    /// The leaves and their probabilities.
    fn leaves(&self) -> Vec<(u32, f64)> {
        let mut nodes = vec![(0, 1.0)];
        for _ in 0..DEPTH {
            let below = |(node, probability): (u32, f64)| {
                let children = self.children(node).iter();
                let weights: Vec<(u32, f64)> = children.map(|(child, log)| (*child, f64::from(*log).exp())).collect();
                let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
                weights.into_iter().map(move |(child, weight)| (child, probability * weight / total))
            };
            nodes = nodes.into_iter().flat_map(below).collect();
        }
        nodes
    }
}

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Flaw {
    /// Children have noise of their own, whatever their parent's score.
    NoMaximum,
    /// All children are moved alike, until the greatest is the parent's equal.
    Moved,
    /// The noise is that of the last code, the same behind every prefix.
    NoiseOfCode,
    /// Noise is added to the log probability of the last code.
    LastCode,
}

/// Who scores.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Ours,
    /// The rule in arrival times, which may have a bug.
    Naive(Option<Flaw>),
}

impl Rule {
    fn scores(self, noise: Noise, parent: Perturbed, children: &[(u32, f32)]) -> Vec<Perturbed> {
        match self {
            Self::Ours => perturbed_children(noise, parent, children),
            Self::Naive(flaw) => naive(flaw, noise, parent, children),
        }
    }

    /// The best `k` of the children of `beam`, each with its score.
    fn step(self, noise: Noise, model: &Model, beam: &[(u32, Perturbed)], k: usize) -> Vec<(u32, Perturbed)> {
        let below = |(node, prefix): &(u32, Perturbed)| {
            let children = model.children(*node);
            let scores = self.scores(noise, *prefix, children);
            children.iter().map(|(child, _)| *child).zip(scores).collect::<Vec<_>>()
        };
        let mut all: Vec<(u32, Perturbed)> = beam.iter().flat_map(below).collect();
        all.sort_by(|(a, x), (b, y)| y.score.total_cmp(&x.score).then(a.cmp(b)));
        all.truncate(k);
        all
    }

    fn list(self, model: &Model, key: u64, k: usize) -> Vec<(u32, Perturbed)> {
        let mut beam = vec![(0, Perturbed::ROOT)];
        for _ in 0..DEPTH {
            beam = self.step(Noise::new(key), model, &beam, k);
        }
        beam
    }
}

fn naive(flaw: Option<Flaw>, noise: Noise, parent: Perturbed, children: &[(u32, f32)]) -> Vec<Perturbed> {
    let total: f64 = children.iter().map(|(_, log)| f64::from(*log).exp()).sum();
    let own = |(at, (prefix, log)): (u32, &(u32, f32))| {
        let conditional = f64::from(*log) - total.ln();
        let log_probability = parent.log_probability + conditional;
        let rate = if flaw == Some(Flaw::LastCode) { conditional } else { log_probability };
        let word = noise.word(if flaw == Some(Flaw::NoiseOfCode) { at } else { *prefix });
        (log_probability, arrival(word, 1.0) / rate.exp())
    };
    let own: Vec<(f64, f64)> = (0..).zip(children).map(own).collect();
    let first = own.iter().map(|(_, time)| *time).fold(f64::INFINITY, f64::min);
    let after = (-parent.score).exp();
    let at = |time: f64| match flaw {
        Some(Flaw::NoMaximum) => time,
        Some(Flaw::Moved) => time * after / first,
        _ => after + (time - first),
    };
    own.into_iter().map(|(log_probability, time)| Perturbed { log_probability, score: -at(time).ln() }).collect()
}

fn nodes(list: &[(u32, Perturbed)]) -> Vec<u32> {
    list.iter().map(|(node, _)| *node).collect()
}

/// The deviation of lists of three in their order from three draws without replacement.
fn list_deviation(rule: Rule) -> f64 {
    let model = Model::target();
    let (leaves, p): (Vec<u32>, Vec<f64>) = model.leaves().into_iter().unzip();
    let named = |(list, probability): (Vec<usize>, f64)| (list.iter().map(|x| leaves[*x]).collect(), probability);
    deviation(ordered(&p, 3).into_iter().map(named), |key| nodes(&rule.list(&model, key, 3)))
}

#[test]
fn lists_are_drawn_without_replacement_in_their_order() {
    for rule in [Rule::Ours, Rule::Naive(None)] {
        let right = list_deviation(rule);
        assert!(right.abs() < 4.0, "{rule:?}: {right}");
    }
}

#[test]
fn planted_bugs_are_found_in_whole_lists() {
    for flaw in [Flaw::NoMaximum, Flaw::Moved, Flaw::NoiseOfCode, Flaw::LastCode] {
        let wrong_by = list_deviation(Rule::Naive(Some(flaw)));
        assert!(wrong_by > 100.0, "{flaw:?} passes: {wrong_by}");
    }
}

#[test]
fn a_leaf_is_in_the_list_as_often_as_in_draws_without_replacement() {
    let model = Model::target();
    let (leaves, p): (Vec<u32>, Vec<f64>) = model.leaves().into_iter().unzip();
    for k in 1..=4 {
        let mut found = vec![0.0; leaves.len()];
        for key in 0..u64::from(DRAWS) {
            let list = Rule::Ours.list(&model, key, k);
            leaves.iter().zip(&mut found).for_each(|(leaf, found)| *found += f64::from(nodes(&list).contains(leaf)));
        }
        for (x, found) in found.into_iter().enumerate() {
            let with = ordered(&p, k).into_iter().filter(|(list, _)| list.contains(&x));
            let rate: f64 = with.map(|(_, probability)| probability).sum();
            let error = (rate * (1.0 - rate) / f64::from(DRAWS)).sqrt();
            assert!((found / f64::from(DRAWS) - rate).abs() < 4.0 * error, "{k} {x}: {found} {rate}");
        }
    }
}

/// The first of the children to arrive is the sample of keyed sampling.
#[test]
fn a_list_of_one_is_keyed_sampling() {
    let children: Vec<(u32, f32)> = (0..50).map(|x| (x * 1000, (x * x % 13) as f32 * 0.3)).collect();
    for key in 0..1000 {
        let scores = perturbed_children(Noise::new(key), Perturbed::ROOT, &children);
        let best = (0..50).max_by(|a, b| scores[*a].score.total_cmp(&scores[*b].score)).unwrap();
        let time = |x: usize| arrival(Noise::new(key).word(children[x].0), children[x].1.exp());
        let first = (0..50).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap();
        assert_eq!(best, first, "{key}");
        assert_eq!(scores[best].score, Perturbed::ROOT.score);
    }
}

#[test]
fn scores_depend_on_key_and_prefix_and_not_on_order_or_company() {
    let (model, noise) = (Model::target(), Noise::new(11));
    let mut turned = model.clone();
    turned.children.iter_mut().for_each(|children| children.reverse());
    // Another catalogue: the first of the root's children has lost its own.
    let mut pruned = model.clone();
    pruned.children[1].clear();
    let mut other_lists = 0;
    for key in 0..1000 {
        let list = Rule::Ours.list(&model, key, 4);
        assert_eq!(list, Rule::Ours.list(&turned, key, 4));
        // A shorter list is the beginning of a longer one.
        assert_eq!(list[..2], Rule::Ours.list(&model, key, 2));
        let kept: HashSet<u32> = nodes(&Rule::Ours.list(&pruned, key, 11)).into_iter().collect();
        let all = Rule::Ours.list(&model, key, 11).into_iter().filter(|(leaf, _)| kept.contains(leaf));
        assert_eq!(all.collect::<Vec<_>>(), Rule::Ours.list(&pruned, key, 11));
        other_lists += usize::from(nodes(&list) != nodes(&Rule::Ours.list(&model, key + 1_000_000, 4)));
    }
    assert!(other_lists > 900, "{other_lists}");
    // An order of forty children which sums differently.
    let children: Vec<(u32, f32)> = (0..40).map(|x| (x, ((x * 7919) % 40) as f32 * -0.37)).collect();
    let scores = perturbed_children(noise, Perturbed::ROOT, &children);
    let turned: Vec<(u32, f32)> = children.iter().rev().copied().collect();
    let again = perturbed_children(noise, Perturbed::ROOT, &turned);
    assert!(scores.iter().eq(again.iter().rev()));
}

/// The list of three that the target verifies strictly, and its calls: each scores the prefixes that are known and
/// those that the draft expects behind them.
fn verified(target: &Model, draft: &Model, [key, draft_key]: [u64; 2]) -> (Vec<(u32, Perturbed)>, u32) {
    let (mut beam, mut calls, mut scored) = (vec![(0, Perturbed::ROOT)], 0, HashSet::new());
    for depth in 0..DEPTH {
        if !beam.iter().all(|(node, _)| scored.contains(node)) {
            calls += 1;
            let mut drafted = beam.clone();
            for _ in depth..DEPTH {
                scored.extend(drafted.iter().map(|(node, _)| *node));
                drafted = Rule::Ours.step(Noise::new(draft_key), draft, &drafted, 3);
            }
        }
        beam = Rule::Ours.step(Noise::new(key), target, &beam, 3);
    }
    (beam, calls)
}

#[test]
fn strictly_verified_lists_are_the_same_whatever_is_drafted() {
    let (target, other) = (Model::target(), Model::new(5));
    let (mut shared, mut apart) = (0, 0);
    for key in 0..2000 {
        let list = Rule::Ours.list(&target, key, 3);
        let (own, calls) = verified(&target, &target, [key, key]);
        assert_eq!((own, calls), (list.clone(), 1));
        let (with_noise, calls) = verified(&target, &other, [key, key]);
        shared += calls;
        let (without, calls) = verified(&target, &other, [key, key + 1_000_000]);
        apart += calls;
        assert_eq!(with_noise, list);
        assert_eq!(without, list);
    }
    assert!(f64::from(shared) < 0.8 * f64::from(apart), "{shared} {apart}");
}

#[test]
fn no_child_beats_its_parent_and_one_equals_it() {
    for (key, log_probability) in (0..2000).zip([0.0, -3.0, -80.0, -800.0, -1e5].into_iter().cycle()) {
        let parent = Perturbed { log_probability, score: log_probability + (key % 7) as f64 * 5.0 - 15.0 };
        let children: Vec<(u32, f32)> = (0..9).map(|x| (x, -((x * x * 9) as f32))).collect();
        let scores = perturbed_children(Noise::new(key), parent, &children);
        assert!(scores.iter().all(|child| child.score.is_finite() && child.score <= parent.score), "{scores:?}");
        assert_eq!(scores.iter().filter(|child| child.score == parent.score).count(), 1);
        let total: f64 = scores.iter().map(|child| (child.log_probability - log_probability).exp()).sum();
        assert!((total - 1.0).abs() < 1e-9, "{total}");
    }
}

#[test]
fn an_only_child_is_its_parents_equal_whatever_is_left_out() {
    let (noise, parent) = (Noise::new(3), Perturbed { log_probability: -7.3, score: -2.1 });
    for log in [0.0, -1.7, 0.1, -50.0] {
        assert_eq!(perturbed_children(noise, parent, &[(9, log)]), [parent]);
        let beside = perturbed_children(noise, parent, &[(8, f32::NEG_INFINITY), (9, log)]);
        assert_eq!(beside, [Perturbed::IMPOSSIBLE, parent]);
    }
    assert!(perturbed_children(noise, parent, &[]).is_empty());
    let none = perturbed_children(noise, parent, &[(8, f32::NEG_INFINITY), (9, f32::NEG_INFINITY)]);
    assert_eq!(none, [Perturbed::IMPOSSIBLE; 2]);
    assert_eq!(perturbed_children(noise, Perturbed::IMPOSSIBLE, &[(8, 0.0)]), [Perturbed::IMPOSSIBLE]);
}

/// Where nothing overflows, the stable form is the equation.
#[test]
fn the_stable_form_is_the_equation() {
    for (score, greatest, bound) in [(-1.0, 0.5, 0.0), (0.499_999, 0.5, 3.0), (-30.0, -2.0, -5.0), (2.0, 9.0, -3.0)] {
        let time = |score: f64| (-score).exp();
        let plain = -(time(bound) - time(greatest) + time(score)).ln();
        let found = conditioned(score, greatest, bound);
        assert!((found - plain).abs() < 1e-9, "{found} {plain}");
    }
    for x in [-1e-12_f64, -0.3, -0.69, -0.7, -5.0, -40.0] {
        assert!(((1.0 - x.exp()).ln() - log_1m_exp(x)).abs() < 1e-3, "{x}");
    }
    // Where exponentials overflow it is still a number, and the order is that of the scores.
    let far: Vec<f64> = [-900.0, -2000.0, -2001.0].map(|score| conditioned(score, -900.0, -910.0)).to_vec();
    assert_eq!(far, [-910.0, -2000.0, -2001.0]);
}

#[test]
fn what_is_no_parent_or_no_distribution_panics() {
    let panics = |parent: Perturbed, children: &[(u32, f32)]| {
        std::panic::catch_unwind(|| perturbed_children(Noise::new(0), parent, children)).is_err()
    };
    for number in [f64::NAN, f64::INFINITY] {
        assert!(panics(Perturbed { log_probability: number, ..Perturbed::ROOT }, &[(0, 0.0)]));
        assert!(panics(Perturbed { score: number, ..Perturbed::ROOT }, &[(0, 0.0)]));
    }
    for log in [f32::NAN, -f32::NAN, f32::INFINITY] {
        assert!(panics(Perturbed::ROOT, &[(0, log)]));
        assert!(panics(Perturbed::ROOT, &[(0, -1.0), (1, log)]));
    }
}
