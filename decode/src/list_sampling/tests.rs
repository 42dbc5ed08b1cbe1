//! That lists are what the definitions say, by enumeration, and how far the relaxed rules are from lists that the
//! target draws itself.

use std::collections::HashMap;
use std::hash::Hash;

use super::*;
use crate::rejection::tests::{pairs, uniforms};
use crate::rejection::{Trial, accept_sampled};

/// Draws for each measured distribution.
pub(crate) const DRAWS: u32 = 100_000;

/// Candidates of a step.
const CANDIDATES: usize = 10;

/// Pearson's χ² of what many seeds give, in standard deviations from its mean. What is expected fewer than 5 times is
/// counted together; what is not expected is infinitely wrong.
pub(crate) fn deviation<T: Eq + Hash>(expected: impl IntoIterator<Item = (T, f64)>, outcome: impl Fn(u64) -> T) -> f64 {
    let mut counts: HashMap<T, u32> = HashMap::new();
    for seed in 0..DRAWS {
        *counts.entry(outcome(u64::from(seed))).or_default() += 1;
    }
    let (mut cells, mut rest) = (Vec::new(), (0.0, 0.0));
    for (outcome, probability) in expected.into_iter().filter(|(_, probability)| *probability > 0.0) {
        let (found, expected) =
            (f64::from(counts.remove(&outcome).unwrap_or_default()), probability * f64::from(DRAWS));
        match expected < 5.0 {
            true => rest = (rest.0 + found, rest.1 + expected),
            false => cells.push((found, expected)),
        }
    }
    if !counts.is_empty() {
        return f64::INFINITY;
    }
    cells.extend((rest.1 >= 1.0).then_some(rest));
    let freedom = cells.len() as f64 - 1.0;
    (cells.iter().map(|(found, expected)| (found - expected).powi(2) / expected).sum::<f64>() - freedom)
        / (2.0 * freedom).sqrt()
}

/// The lists of `k` draws without replacement, with their probabilities.
pub(crate) fn ordered(p: &[f64], k: usize) -> Vec<(Vec<usize>, f64)> {
    let mut lists = vec![(Vec::new(), 1.0)];
    for _ in 0..k {
        let longer = |(list, probability): (Vec<usize>, f64)| {
            let left = 1.0 - list.iter().map(|x| p[*x]).sum::<f64>();
            let others = (0..p.len()).filter(|x| !list.contains(x)).collect::<Vec<_>>();
            others.into_iter().map(move |x| ([list.as_slice(), &[x]].concat(), probability * p[x] / left))
        };
        lists = lists.into_iter().flat_map(longer).collect();
    }
    lists
}

/// A probability for each set of candidates, whose bits they are.
type Sets = Vec<f64>;

fn has(set: usize, x: usize) -> bool {
    set >> x & 1 == 1
}

fn size(set: usize) -> usize {
    set.count_ones() as usize
}

fn set_of(list: &[usize]) -> usize {
    list.iter().map(|x| 1 << x).sum()
}

/// The weights of candidates outside of a set.
fn without(weights: &[f64], set: usize) -> Vec<f64> {
    weights.iter().enumerate().map(|(x, weight)| if has(set, x) { 0.0 } else { *weight }).collect()
}

/// The sets that so many draws without replacement give, all that has a weight if there is no more.
fn drawn(weights: &[f64], count: usize) -> Sets {
    let count = count.min(weights.iter().filter(|weight| **weight > 0.0).count());
    let mut sets = vec![0.0; 1 << weights.len()];
    sets[0] = 1.0;
    for set in (0..sets.len()).filter(|set| size(*set) < count) {
        let left = without(weights, set);
        let total: f64 = left.iter().sum();
        for x in (0..left.len()).filter(|x| left[*x] > 0.0) {
            sets[set | 1 << x] += sets[set] * left[x] / total;
        }
        sets[set] = 0.0;
    }
    sets
}

/// Which of `n` drafted candidates are accepted.
fn accepted([p, q]: [&[f64]; 2], n: usize) -> Sets {
    let mut sets = vec![0.0; 1 << p.len()];
    for (draft, probability) in drawn(q, n).into_iter().enumerate().filter(|(_, probability)| *probability > 0.0) {
        for set in (0..=draft).filter(|set| set & !draft == 0) {
            let fate = |x: usize| {
                let rate = (p[x] / q[x]).min(1.0);
                if has(set, x) { rate } else { 1.0 - rate }
            };
            sets[set] += probability * (0..p.len()).filter(|x| has(draft, *x)).map(fate).product::<f64>();
        }
    }
    sets
}

/// The lists of `k` that `n` drafts make, from the definition.
fn listed([p, q]: [&[f64]; 2], n: usize, k: usize) -> Sets {
    let above: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    let mut lists = vec![0.0; 1 << p.len()];
    for (set, probability) in accepted([p, q], n).into_iter().enumerate().filter(|(_, share)| *share > 0.0) {
        if size(set) > k {
            let kept = drawn(&without(&vec![1.0; p.len()], !set), k);
            kept.iter().enumerate().for_each(|(list, share)| lists[list] += probability * share);
            continue;
        }
        let first = drawn(&without(&above, set), k - size(set));
        for (first, share) in first.into_iter().enumerate().filter(|(_, share)| *share > 0.0) {
            let rest = drawn(&without(p, set | first), k - size(set | first));
            rest.iter().enumerate().for_each(|(rest, also)| lists[set | first | rest] += probability * share * also);
        }
    }
    lists
}

/// The largest difference in the probability of a candidate to be in the list, over those that the target draws.
fn bias([p, q]: [&[f64]; 2], n: usize, k: usize) -> f64 {
    let inclusion =
        |lists: Sets, x: usize| lists.iter().enumerate().filter(|(list, _)| has(*list, x)).map(|(_, p)| p).sum::<f64>();
    let (made, right) = (listed([p, q], n, k), drawn(p, k));
    (0..p.len()).map(|x| (inclusion(made.clone(), x) - inclusion(right.clone(), x)).abs()).fold(0.0, f64::max)
}

/// Forty targets whose logits are standard normal, and drafts whose logits are off by so many standard deviations.
fn models(noise: f64) -> impl Iterator<Item = [Vec<f32>; 2]> {
    (0..40).map(move |pair| {
        let mut uniform = uniforms(pair << 32);
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        let logits: Vec<f64> = (0..CANDIDATES).map(|_| normal()).collect();
        let off: Vec<f64> = logits.iter().map(|logit| logit + noise * normal()).collect();
        [logits, off].map(|logits| list_weights(&logits.into_iter().map(narrow).collect::<Vec<_>>()))
    })
}

#[expect(clippy::cast_possible_truncation, reason = "of logits nothing but digits is lost")]
fn narrow(logit: f64) -> f32 {
    logit as f32
}

/// What K from N drafts makes.
fn trial([p, q]: [&[f32]; 2], n: usize, k: usize, seed: u64) -> ListTrial {
    let mut uniform = uniforms(seed << 20);
    let drafted = sample_list(q, n, &mut uniform);
    match n > k {
        true => accept_list_published(p, q, &drafted, k, &mut uniform),
        false => accept_list(p, q, &drafted, k, &mut uniform),
    }
}

#[test]
fn a_list_is_drawn_without_replacement_in_its_order() {
    for [p, _] in models(0.0).take(3) {
        let p = &p[..6];
        for k in [1, 2, 3] {
            let off = deviation(ordered(&normalised(p), k), |seed| sample_list(p, k, &mut uniforms(seed << 20)));
            assert!(off.abs() < 4.0, "{k}: {off}");
        }
    }
    // The two ways to enumerate agree.
    let (p, mut sets) = (normalised(&[3.0, 1.0, 4.0, 1.0, 5.0]), vec![0.0; 32]);
    ordered(&p, 3).into_iter().for_each(|(list, probability)| sets[set_of(&list)] += probability);
    assert!(sets.iter().zip(drawn(&p, 3)).all(|(a, b)| (a - b).abs() < 1e-12));
}

#[test]
fn one_draft_is_speculative_sampling() {
    for [p, q] in pairs(5) {
        for (x, seed) in (0..5).flat_map(|x| (0..200).map(move |seed| (x, seed))) {
            let list = accept_list(&p, &q, &[x as usize], 1, &mut uniforms(seed << 20));
            let trial = accept_sampled(&p, &q, &[x], &mut uniforms(seed << 20));
            let expected = match trial {
                Trial::Accepted(_) => ListTrial { chosen: vec![x as usize], accepted: 1 },
                Trial::Rejected(token) => ListTrial { chosen: vec![token as usize], accepted: 0 },
            };
            assert_eq!(list, expected);
            assert_eq!(list.goes_on(), trial == Trial::Accepted(0));
        }
    }
}

/// Deviations of lists from those of the target, and from those that `n` drafts make by definition.
fn deviations([p, q]: [&[f32]; 2], n: usize, k: usize, list: impl Fn(u64) -> Vec<usize>) -> [f64; 2] {
    let [p, q] = [normalised(p), normalised(q)];
    [drawn(&p, k), listed([&p, &q], n, k)]
        .map(|sets| deviation(sets.into_iter().enumerate(), |seed| set_of(&list(seed))))
}

#[test]
fn lists_are_those_of_the_definition_and_for_one_draft_the_targets() {
    for (n, k) in [(1, 1), (2, 2), (4, 4), (3, 1), (8, 4)] {
        for [p, q] in models(1.0).take(2) {
            let [target, definition] = deviations([&p, &q], n, k, |seed| trial([&p, &q], n, k, seed).chosen);
            assert!(definition.abs() < 4.0, "{n} {k}: {definition}");
            assert_eq!(n == 1, target.abs() < 4.0, "{n} {k}: {target}");
            assert!(n == 1 || target > 50.0, "{n} {k}: {target}");
        }
    }
}

#[test]
fn a_forgotten_residual_is_found() {
    for (k, [p, q]) in [1, 2, 4].into_iter().zip(models(1.0)) {
        let from_p = |seed| {
            let (trial, mut uniform) = (trial([&p, &q], k, k, seed), uniforms(!seed));
            let mut chosen = trial.chosen[..trial.accepted].to_vec();
            fill(&mut chosen, [&normalised(&p), &[0.0; CANDIDATES]], [k, k], &mut uniform);
            chosen
        };
        let [_, definition] = deviations([&p, &q], k, k, from_p);
        assert!(definition > 100.0, "{k}: {definition}");
    }
}

/// The table of the module's documentation: N, K, and median and maximum for each noise.
#[test]
fn the_rules_are_as_biased_as_the_documentation_says() {
    let table = [
        (1, 1, [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        (2, 2, [[0.0, 0.0], [0.008, 0.024], [0.021, 0.065], [0.053, 0.209]]),
        (4, 4, [[0.0, 0.0], [0.037, 0.112], [0.105, 0.244], [0.234, 0.501]]),
        (3, 1, [[0.049, 0.246], [0.045, 0.251], [0.056, 0.262], [0.114, 0.277]]),
        (8, 4, [[0.321, 0.490], [0.332, 0.501], [0.363, 0.540], [0.446, 0.643]]),
    ];
    for (n, k, rows) in table {
        for (noise, said) in [0.0, 0.1, 0.3, 1.0].into_iter().zip(rows) {
            let mut found: Vec<f64> =
                models(noise).map(|[p, q]| bias([&normalised(&p), &normalised(&q)], n, k)).collect();
            found.sort_by(f64::total_cmp);
            let close = |(found, said): (f64, f64)| (found - said).abs() < if said == 0.0 { 1e-6 } else { 6e-4 };
            assert!([found[20], found[39]].into_iter().zip(said).all(close), "{noise} {n} {k}: {found:?}");
        }
    }
}

#[test]
fn distances_of_the_models_are_those_of_the_documentation() {
    for (noise, said) in [(0.0, 0.0), (0.1, 0.04), (0.3, 0.11), (1.0, 0.35)] {
        let above = |[p, q]: [Vec<f32>; 2]| {
            let [p, q] = [normalised(&p), normalised(&q)];
            p.iter().zip(&q).map(|(p, q)| (p - q).max(0.0)).sum::<f64>()
        };
        let found = models(noise).map(above).sum::<f64>() / 40.0;
        assert!((found - said).abs() < 0.005, "{noise}: {found}");
    }
}

/// The published rule's bias in what it draws: with the target itself for a draft, a candidate is in the list of K with
/// K / N times the probability that it is in a list of N. Ours has no bias there.
#[test]
fn the_published_rule_is_biased_even_if_the_draft_is_the_target() {
    let p = models(0.0).next().unwrap()[0].clone();
    for (n, k) in [(3, 1), (8, 4)] {
        let [target, _] = deviations([&p, &p], n, k, |seed| trial([&p, &p], n, k, seed).chosen);
        assert!(target > 100.0, "{n} {k}: {target}");
        let with = |lists: &Sets, x| lists.iter().enumerate().filter(|(l, _)| has(*l, x)).map(|(_, p)| p).sum::<f64>();
        let p64 = normalised(&p);
        let (kept, drafted) = (listed([&p64, &p64], n, k), drawn(&p64, n));
        for x in 0..CANDIDATES {
            assert!((with(&kept, x) - with(&drafted, x) * k as f64 / n as f64).abs() < 1e-9, "{x}");
        }
        let [target, _] = deviations([&p, &p], k, k, |seed| trial([&p, &p], k, k, seed).chosen);
        assert!(target.abs() < 4.0, "{k}: {target}");
    }
}

#[test]
fn lists_are_distinct_and_full_and_begin_with_what_was_accepted() {
    for (pair, [p, q]) in pairs(CANDIDATES).enumerate() {
        let candidates = p.iter().filter(|p| **p > 0.0).count();
        for (seed, (n, k)) in (0..2000).zip([(1, 1), (4, 4), (3, 1), (8, 4), (20, 20), (2, 5)].into_iter().cycle()) {
            let seed = seed << 8 | pair as u64;
            let drafted = sample_list(&q, n, &mut uniforms(seed << 20));
            let ListTrial { chosen, accepted } = trial([&p, &q], n, k, seed);
            assert_eq!(chosen.len(), k.min(candidates), "{n} {k}");
            assert_eq!(size(chosen.iter().fold(0, |set, x| set | 1 << x)), chosen.len(), "{chosen:?}");
            assert!(chosen.iter().all(|x| p[*x] > 0.0));
            let from_draft: Vec<usize> = chosen.iter().copied().take(accepted).collect();
            let in_draft: Vec<usize> = drafted.iter().copied().filter(|x| from_draft.contains(x)).collect();
            assert_eq!(from_draft, in_draft);
        }
    }
}

#[test]
fn a_round_goes_on_while_all_is_accepted() {
    let p = [3.0, 0.1, 7.0, 1e-30];
    let always = |drafted: &[usize], k| accept_list(&p, &p, drafted, k, &mut || 1.0_f64.next_down());
    assert_eq!(always(&[3, 0], 2), ListTrial { chosen: vec![3, 0], accepted: 2 });
    assert!(always(&[3, 0], 2).goes_on());
    // One draft too few, and the list has to be filled; but not if the target has no more.
    assert_eq!(always(&[2, 0], 3), ListTrial { chosen: vec![2, 0, 1], accepted: 2 });
    assert!(!always(&[2, 0], 3).goes_on());
    assert!(always(&[3, 0, 1, 2], 9).goes_on());
    let published = accept_list_published(&p, &p, &[2, 0, 1], 2, &mut || 0.0);
    assert_eq!(published, ListTrial { chosen: vec![2, 0], accepted: 3 });
    assert!(published.goes_on());
}

#[test]
fn where_the_residual_runs_out_the_target_draws() {
    // Candidate 2 is rejected, and the residual has candidate 0 alone, which is accepted: candidate 1 has 0.4 of p and
    // candidate 2 has 0.1.
    let (p, q) = ([0.5, 0.4, 0.1], [0.1, 0.4, 0.5]);
    let after = |last| {
        let mut numbers = [0.9, 0.9, last].into_iter();
        accept_list(&p, &q, &[0, 2], 2, &mut || numbers.next().unwrap())
    };
    assert_eq!(after(0.79), ListTrial { chosen: vec![0, 1], accepted: 1 });
    assert_eq!(after(0.81), ListTrial { chosen: vec![0, 2], accepted: 1 });
    // If both are rejected it is candidate 0 and then one of the others.
    let (p, q) = ([1.0, 0.0, 0.0, 1e-6], [0.0, 0.5, 0.5, 0.0]);
    let trial = accept_list(&p, &q, &[1, 2], 2, &mut || 0.5);
    assert_eq!(trial, ListTrial { chosen: vec![0, 3], accepted: 0 });
}

#[test]
fn a_candidate_that_the_draft_cannot_have_drawn_is_passed_over() {
    let (p, q) = ([0.5, 0.25, 0.25], [0.0, 0.5, 0.5]);
    for number in [0.0, 0.3, 0.6, 0.8, 1.0_f64.next_down()] {
        let alone = accept_list(&p, &q, &[0], 1, &mut || number);
        assert_eq!(alone, ListTrial { chosen: sample_list(&p, 1, &mut || number), accepted: 0 });
    }
    assert_eq!(accept_list(&p, &q, &[0, 2], 2, &mut || 0.49), ListTrial { chosen: vec![2, 0], accepted: 1 });
}

#[test]
fn weights_are_relative_to_the_most_probable_candidate() {
    let weights = list_weights(&[-1000.0, -1000.0 - std::f32::consts::LN_2, f32::NEG_INFINITY]);
    assert!((weights[1] - 0.5).abs() < 1e-4, "{weights:?}");
    assert_eq!((weights[0], weights[2]), (1.0, 0.0));
    assert!(list_weights(&[]).is_empty());
    assert_eq!(list_weights(&[f32::NEG_INFINITY; 2]), [1.0, 1.0], "where all are impossible they are alike");
    assert_eq!(sample_list(&weights, 3, &mut || 0.7), [1, 0]);
}

#[test]
fn what_is_no_distribution_or_no_draft_panics() {
    let panics = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
    for weights in [vec![], vec![0.0, 0.0], vec![1.0, -0.1], vec![1.0, f32::NAN]] {
        assert!(panics(&|| _ = sample_list(&weights, 1, &mut || 0.5)), "{weights:?}");
    }
    let accept = |p: &[f32], q: &[f32], drafted: &[usize], k| _ = accept_list(p, q, drafted, k, &mut || 0.5);
    assert!(panics(&|| accept(&[1.0, 1.0], &[1.0], &[0], 1)));
    assert!(panics(&|| accept(&[1.0, 1.0], &[1.0, 1.0], &[2], 1)));
    assert!(panics(&|| accept(&[1.0, 1.0], &[1.0, 1.0], &[1, 1], 2)));
    assert!(panics(&|| accept(&[1.0, 1.0], &[1.0, 1.0], &[1, 0], 1)));
    assert!(panics(&|| _ = accept_list_published(&[1.0], &[1.0], &[0, 0], 1, &mut || 0.5)));
}
