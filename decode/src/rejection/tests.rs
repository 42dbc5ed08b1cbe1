//! That the rules are lossless and accept as often as theory says, and what keyed sampling loses against them.

use super::*;
use crate::sampling::tests::{LENGTH, TOKENS, deviation, first_to_arrive, target};
use crate::sampling::{Noise, arrival};
use crate::tree::{DraftTree, Source};

/// Uniform numbers in [0, 1): those of splitmix64.
pub(crate) fn uniforms(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The draft model's distribution behind a sequence: unlike the target's, and behind every second one without a token.
fn draft_model(sequence: &[u32]) -> Vec<f32> {
    let mut q = target(sequence);
    q.rotate_left(1);
    q[0] *= (sequence.len() % 2) as f32;
    probabilities(&q)
}

/// The children of each node of two levels.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Drafts {
    /// So many draws from the draft model: a chain if it is 1.
    Sampled(usize),
    /// The draft model's two most probable tokens. Random tokens would hide a bug: if each is drafted equally often, a
    /// forgotten residual cancels out.
    Given,
}

impl Drafts {
    fn after(self, sequence: &[u32], uniform: &mut impl FnMut() -> f64) -> Vec<u32> {
        let q = draft_model(sequence);
        match self {
            Self::Sampled(children) => (0..children).map(|_| sample(&q, uniform)).collect(),
            Self::Given => {
                let mut tokens: Vec<u32> = (0..TOKENS).collect();
                tokens.sort_by(|a, b| q[*b as usize].total_cmp(&q[*a as usize]));
                tokens[..2].to_vec()
            }
        }
    }

    /// A tree that is drafted before the target is asked; and what stands before the token after each node.
    fn tree(self, sequence: &[u32], uniform: &mut impl FnMut() -> f64) -> (DraftTree, Vec<Vec<u32>>) {
        let (mut tree, mut contexts) = (DraftTree::chain(&[0]), vec![sequence.to_vec()]);
        let mut node = 0;
        while tree.depths()[node] < 2 {
            for token in self.after(&contexts[node], uniform) {
                tree.push(node, token, 1.0, Source::Model);
                contexts.push([contexts[node].as_slice(), &[token]].concat());
            }
            node += 1;
        }
        (tree, contexts)
    }
}

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Flaw {
    /// Children are accepted with min(1, q / p).
    FlippedRatio,
    /// After the last rejection the token is drawn from p.
    NoResidual,
    /// Children after the first one are compared with p, not with what its rejection left.
    StaleResidual,
    /// The token after a leaf is drawn from q.
    DraftBonus,
}

/// Who decides.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Verifier {
    Ours,
    /// A naive version, which may have a bug.
    Naive(Option<Flaw>),
}

impl Verifier {
    /// Tries the children of one place.
    fn trial(self, drafts: Drafts, [p, q]: [&[f32]; 2], children: &[u32], uniform: &mut impl FnMut() -> f64) -> Trial {
        match (self, drafts) {
            (Self::Ours, Drafts::Sampled(_)) => accept_sampled(p, q, children, uniform),
            (Self::Ours, Drafts::Given) => accept_given(p, children, uniform),
            (Self::Naive(flaw), _) => naive(flaw, drafts, [p, q], children, uniform),
        }
    }

    /// A sequence, from a draft tree per step: down the accepted children to the first token that was not drafted.
    fn sequence(self, drafts: Drafts, key: u64) -> Vec<u32> {
        let mut uniform = uniforms(key);
        let mut sequence: Vec<u32> = Vec::new();
        while sequence.len() < LENGTH {
            let (tree, contexts) = drafts.tree(&sequence, &mut uniform);
            let mut node = 0;
            loop {
                let context = &contexts[node];
                let children: Vec<usize> = tree.children(node).collect();
                let tokens: Vec<u32> = children.iter().map(|child| tree.tokens()[*child]).collect();
                let (p, q) = (target(context), draft_model(context));
                match self.trial(drafts, [&p, &q], &tokens, &mut uniform) {
                    Trial::Accepted(child) => node = children[child],
                    Trial::Rejected(token) => {
                        sequence = [context.as_slice(), &[token]].concat();
                        break;
                    }
                }
            }
        }
        sequence.truncate(LENGTH);
        sequence
    }

    fn deviation(self, drafts: Drafts) -> f64 {
        deviation(|key| self.sequence(drafts, key))
    }
}

/// Both rules from their definition, where a given child is one that is drawn from a distribution certain of it.
fn naive(
    flaw: Option<Flaw>,
    drafts: Drafts,
    [p, q]: [&[f32]; 2],
    children: &[u32],
    uniform: &mut impl FnMut() -> f64,
) -> Trial {
    if flaw == Some(Flaw::DraftBonus) && children.is_empty() {
        return Trial::Rejected(sample(q, uniform));
    }
    let mut left = p.to_vec();
    for (child, &token) in children.iter().enumerate() {
        let x = token as usize;
        let certain: Vec<f32> = (0..TOKENS).map(|other| f32::from(other == token)).collect();
        let q = if drafts == Drafts::Given { &certain } else { q };
        let ratio = match flaw {
            Some(Flaw::FlippedRatio) => q[x] / left[x],
            Some(Flaw::StaleResidual) => p[x] / q[x],
            _ => left[x] / q[x],
        };
        if uniform() < f64::from(ratio) {
            return Trial::Accepted(child);
        }
        left = left.iter().zip(q).map(|(left, q)| (left - q).max(0.0)).collect();
        let total: f32 = left.iter().sum();
        left = left.iter().map(|left| left / total).collect();
    }
    Trial::Rejected(sample(if flaw == Some(Flaw::NoResidual) { p } else { &left }, uniform))
}

#[test]
fn whole_sequences_have_the_targets_distribution_under_every_rule() {
    for drafts in [Drafts::Sampled(1), Drafts::Sampled(2), Drafts::Sampled(3), Drafts::Given] {
        let right = Verifier::Ours.deviation(drafts);
        assert!(right.abs() < 4.0, "{drafts:?}: {right}");
    }
    // Without a bug the doubles pass too, so it is their bugs that fail below.
    for drafts in [Drafts::Sampled(2), Drafts::Given] {
        let right = Verifier::Naive(None).deviation(drafts);
        assert!(right.abs() < 4.0, "{drafts:?}: {right}");
    }
}

#[test]
fn planted_bugs_are_found_in_whole_sequences() {
    for (flaw, drafts) in [
        (Flaw::FlippedRatio, Drafts::Sampled(1)),
        (Flaw::FlippedRatio, Drafts::Given),
        (Flaw::NoResidual, Drafts::Sampled(1)),
        (Flaw::NoResidual, Drafts::Sampled(3)),
        (Flaw::NoResidual, Drafts::Given),
        (Flaw::StaleResidual, Drafts::Sampled(2)),
        (Flaw::DraftBonus, Drafts::Sampled(1)),
        (Flaw::DraftBonus, Drafts::Given),
    ] {
        let wrong_by = Verifier::Naive(Some(flaw)).deviation(drafts);
        assert!(wrong_by > 100.0, "{flaw:?} of {drafts:?} passes: {wrong_by}");
    }
}

/// Draws for each measured rate.
const DRAWS: u64 = 20_000;

/// Pairs of a target's and a draft's distribution over so many tokens, from near to far. Some tokens have no
/// probability.
pub(crate) fn pairs(tokens: usize) -> impl Iterator<Item = [Vec<f32>; 2]> {
    (0..20).map(move |pair| {
        let mut uniform = uniforms(pair << 32);
        let mut weights = || -> Vec<f32> {
            let weight = |token| if token == 0 || uniform() > 0.2 { narrow(uniform().powi(3)) + 1e-3 } else { 0.0 };
            (0..tokens).map(weight).collect()
        };
        let (p, other) = (probabilities(&weights()), probabilities(&weights()));
        let mix = |(p, other): (&f32, &f32)| p + (other - p) * (pair + 1) as f32 / 20.0;
        let q = p.iter().zip(&other).map(mix).collect::<Vec<_>>();
        [p, q]
    })
}

fn probabilities(weights: &[f32]) -> Vec<f32> {
    normalised(weights).into_iter().map(narrow).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "of probabilities nothing but digits is lost")]
fn narrow(p: f64) -> f32 {
    p as f32
}

/// Σ min(p, q).
fn overlap(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| p.min(*q)).sum()
}

/// That something happens as often as it should, within 4 standard errors.
fn check_rate(rate: f64, happens: impl Fn(u64) -> bool) {
    let found = (0..DRAWS).filter(|seed| happens(*seed)).count() as f64 / DRAWS as f64;
    let error = (rate * (1.0 - rate) / DRAWS as f64).max(0.0).sqrt();
    assert!((found - rate).abs() <= 4.0 * error + 1e-6, "{found} in place of {rate}");
}

/// What becomes of so many children drawn from q. The first ones are the same whatever their number, and so are the
/// numbers that accept them.
fn trial_of_sampled(p: &[f32], q: &[f32], children: usize, seed: u64) -> Trial {
    let (mut drafting, mut uniform) = (uniforms(seed << 20), uniforms(!(seed << 20)));
    let children: Vec<u32> = (0..children).map(|_| sample(q, &mut drafting)).collect();
    accept_sampled(p, q, &children, &mut uniform)
}

#[test]
fn one_child_is_accepted_as_often_as_the_distributions_overlap() {
    for [p, q] in pairs(5) {
        let rate = overlap(&normalised(&p), &normalised(&q));
        let is_accepted = |seed| matches!(trial_of_sampled(&p, &q, 1, seed), Trial::Accepted(0));
        check_rate(rate, is_accepted);
    }
}

/// A rejection leaves the same of p whichever child it was, so the share that k children accept is
/// 1 - Π (1 - Σ min(p_i, q)).
#[test]
fn every_further_sampled_child_is_accepted_by_its_overlap_with_the_residual() {
    for [p, q] in pairs(5) {
        let (mut left, q64, mut rejected) = (normalised(&p), normalised(&q), 1.0);
        for children in 1..=4 {
            rejected *= 1.0 - overlap(&left, &q64);
            left = residual(left, |token, p| p - q64[token]);
            let is_accepted = |seed| {
                let trial = trial_of_sampled(&p, &q, children, seed);
                let fewer = trial_of_sampled(&p, &q, children - 1, seed);
                // What fewer children accept, more accept too.
                assert!(matches!(fewer, Trial::Rejected(_)) || trial == fewer, "{fewer:?} {trial:?}");
                matches!(trial, Trial::Accepted(_))
            };
            check_rate(1.0 - rejected, is_accepted);
        }
    }
}

#[test]
fn one_of_the_given_children_is_accepted_as_often_as_it_is_drawn() {
    for [p, _] in pairs(5) {
        // The second 3 is one too many.
        for (children, distinct) in [(vec![2], 1), (vec![3, 1], 2), (vec![3, 0, 3], 2), (vec![4, 3, 2, 1, 0], 5)] {
            let rate = children.iter().take(distinct).map(|x| normalised(&p)[*x as usize]).sum();
            let trial = |seed| accept_given(&p, &children, &mut uniforms(seed << 20));
            check_rate(rate, |seed| matches!(trial(seed), Trial::Accepted(_)));
            let repeated = (0..DRAWS).any(|seed| distinct < children.len() && trial(seed) == Trial::Accepted(distinct));
            assert!(!repeated);
        }
    }
}

/// Under shared noise x is the sample of p and of q with the probability 1 / Σ_y max(p(y) / p(x), q(y) / q(x)), which
/// summed over x is between (1 - TV) / (1 + TV) and 1 - TV (arXiv:2408.07978). Rejection sampling accepts 1 - TV.
#[test]
fn keyed_samples_agree_as_often_as_their_bounds_say_and_no_more_than_rejection_sampling_accepts() {
    for [p, q] in pairs(TOKENS as usize) {
        let (p64, q64) = (normalised(&p), normalised(&q));
        let both = |x: usize| {
            let quotient = |(p, q): (&f64, &f64)| (p / p64[x]).max(q / q64[x]);
            1.0 / p64.iter().zip(&q64).map(quotient).sum::<f64>()
        };
        let rate: f64 = (0..p.len()).filter(|x| p[*x] > 0.0 && q[*x] > 0.0).map(both).sum();
        let most = overlap(&p64, &q64);
        assert!((most / (2.0 - most) - 1e-12..=most + 1e-12).contains(&rate), "{rate} {most}");
        let keyed = |of: &[f32], key| {
            let words = Noise::new(key).block(0);
            first_to_arrive(of.iter().zip(words).map(|(weight, word)| arrival(word, *weight)))
        };
        check_rate(rate, |key| keyed(&p, key) == keyed(&q, key));
    }
}

#[test]
fn a_draft_like_the_target_is_never_rejected() {
    let p = probabilities(&[3.0, 0.1, 7.0, 1e-30]);
    for child in 0..4 {
        let trial = accept_sampled(&p, &p, &[child], &mut || 1.0_f64.next_down());
        assert_eq!(trial, Trial::Accepted(0), "{child}");
    }
    // Nor is what the target is certain of, and what it has not is never accepted.
    assert_eq!(accept_given(&[0.0, 5.0], &[0, 1], &mut || 1.0_f64.next_down()), Trial::Accepted(1));
    assert_eq!(accept_given(&[0.0, 5.0], &[0, 0], &mut || 0.0), Trial::Rejected(1));
}

#[test]
fn a_child_that_the_draft_cannot_have_drawn_is_passed_over() {
    let (p, q) = ([0.5, 0.25, 0.25], [0.0, 0.5, 0.5]);
    for number in [0.0, 0.3, 0.6, 0.8, 1.0_f64.next_down()] {
        assert_eq!(accept_sampled(&p, &q, &[0], &mut || number), Trial::Rejected(sample(&p, &mut || number)));
    }
    // The next child has its own chance, and a rejection leaves token 0 alone.
    assert_eq!(accept_sampled(&p, &q, &[0, 2], &mut || 0.49), Trial::Accepted(1));
    assert_eq!(accept_sampled(&p, &q, &[0, 2], &mut || 0.51), Trial::Rejected(0));
}

#[test]
fn an_empty_residual_is_the_distribution_itself() {
    let p = vec![0.25, 0.75];
    assert_eq!(residual(p.clone(), |_, p| p - 0.75), p);
    assert_eq!(residual(p, |_, p| p - 0.5), [0.0, 1.0]);
}

#[test]
fn weights_need_no_sum_of_1_and_tokens_without_weight_are_not_drawn() {
    let weights = [0.0, 2.0, 0.0, 6.0, 0.0];
    for (number, token) in [(0.0, 1), (0.24, 1), (0.26, 3), (1.0_f64.next_down(), 3)] {
        assert_eq!(sample(&weights, &mut || number), token);
        assert_eq!(accept_given(&weights, &[], &mut || number), Trial::Rejected(token));
        assert_eq!(accept_sampled(&weights, &[1.0; 5], &[], &mut || number), Trial::Rejected(token));
    }
    // Where the sum falls short of 1 by rounding, the last token that has a weight is drawn.
    assert_eq!(draw(&[0.5, 0.25, 0.0], &mut || 0.8), 1);
    let (mut p, mut q) = ([0.2, 0.8], [0.6, 0.4]);
    for scale in [1.0, 3.0, 1e-20] {
        p = p.map(|weight| weight * scale);
        q = q.map(|weight| weight / scale);
        assert_eq!(accept_sampled(&p, &q, &[0], &mut || 0.33), Trial::Accepted(0));
        assert_eq!(accept_sampled(&p, &q, &[0], &mut || 0.34), Trial::Rejected(1));
    }
}

#[test]
fn what_is_no_distribution_panics() {
    let panics = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
    for weights in [vec![], vec![0.0, 0.0], vec![1.0, -0.1], vec![1.0, f32::NAN], vec![1.0, f32::INFINITY]] {
        assert!(panics(&|| _ = sample(&weights, &mut || 0.5)), "{weights:?}");
        assert!(panics(&|| _ = accept_given(&weights, &[0], &mut || 0.5)), "{weights:?}");
    }
    assert!(panics(&|| _ = accept_sampled(&[1.0, 1.0], &[1.0], &[0], &mut || 0.5)));
    assert!(panics(&|| _ = accept_sampled(&[1.0, 1.0], &[1.0, 1.0], &[2], &mut || 0.5)));
    assert!(panics(&|| _ = accept_given(&[1.0, 1.0], &[2], &mut || 0.5)));
}
