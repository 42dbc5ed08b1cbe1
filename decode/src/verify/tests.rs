//! Verification, against all root-to-node paths.

use proptest::prelude::*;

use super::*;
use crate::tree::tests::{any_tree, path_of};

const END: Token = 0;
const ALPHABET: Token = 4;

/// For every node its candidates, most probable first.
#[derive(Debug, Clone)]
pub(crate) struct Scores(pub(crate) Vec<Vec<Candidate>>);

impl TargetScores for Scores {
    fn top(&self, node: usize) -> &[Candidate] {
        &self.0[node]
    }

    fn prediction(&self, node: usize) -> Prediction {
        let entropy = self.0[node].iter().map(|c| -c.log_probability.exp() * c.log_probability).sum();
        Prediction { choice: self.0[node][0], entropy, ..Prediction::default() }
    }
}

/// A distribution for each of 24 nodes: weights of the tokens, normalised.
fn any_scores() -> impl Strategy<Value = Scores> {
    let node = prop::collection::vec(1..100u32, ALPHABET as usize).prop_map(|weights| {
        let total: u32 = weights.iter().sum();
        let log = |weight: u32| (weight as f32 / total as f32).ln();
        let mut top: Vec<_> = (0..ALPHABET)
            .zip(weights)
            .map(|(token, weight)| Candidate { token, log_probability: log(weight) })
            .collect();
        top.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
        top
    });
    prop::collection::vec(node, 24).prop_map(Scores)
}

fn any_policy() -> impl Strategy<Value = Verification> {
    let relaxed = (1..4usize, 0.0..0.6f32).prop_map(|(k, p)| Verification::relaxed(k, p).unwrap());
    let conditional = (0.0..0.4f32, 0.1..0.5f32, any::<bool>())
        .prop_map(|(alpha, beta, all)| Verification::conditional(alpha, beta, all).unwrap());
    let typical =
        (0.0..0.5f32, 0.0..1.0f32).prop_map(|(epsilon, delta)| Verification::typical(epsilon, delta).unwrap());
    prop_oneof![Just(Verification::Strict), relaxed, conditional, typical]
}

/// Whether every step of the path is acceptable, by the policy's definition.
fn acceptable(tree: &DraftTree, scores: &Scores, policy: Verification, path: &[usize]) -> bool {
    path.windows(2).all(|step| {
        let token = tree.tokens()[step[1]];
        let ends_before = step[0] != 0 && tree.tokens()[step[0]] == END;
        let top = scores.top(step[0]);
        let (k, p) = match policy {
            Verification::Strict => (1, -1.0),
            Verification::Relaxed { k, p } => (k, p),
            Verification::Conditional { all_sources, .. }
                if !all_sources && tree.sources()[step[1]] != Source::Prompt =>
            {
                (1, -1.0)
            }
            // The bound, which a token may meet.
            Verification::Conditional { alpha, beta, .. } => {
                let most = top[0].log_probability.exp();
                (usize::MAX, (alpha * scores.prediction(step[0]).entropy + beta).min(most).next_down())
            }
            Verification::Typical { epsilon, delta } => {
                (usize::MAX, epsilon.min(delta * (-scores.prediction(step[0]).entropy).exp()))
            }
        };
        let probable = |c: &Candidate| c.token == token && c.log_probability.exp() > p;
        !ends_before && (top[0].token == token || top.iter().take(k).any(probable))
    })
}

fn product(tree: &DraftTree, scores: &Scores, path: &[usize]) -> f32 {
    let log = |step: &[usize]| {
        let token = tree.tokens()[step[1]];
        scores.top(step[0]).iter().find(|c| c.token == token).unwrap().log_probability
    };
    path.windows(2).map(log).sum()
}

fn candidates(tokens: &[(Token, f32)]) -> Vec<Candidate> {
    let candidate = |&(token, p): &(Token, f32)| Candidate { token, log_probability: p.ln() };
    tokens.iter().map(candidate).collect()
}

#[test]
fn relaxed_options_out_of_range_are_refused() {
    assert_eq!(Verification::relaxed(0, 0.1), Err(PolicyError::K));
    for p in [-0.1, 1.1, f32::NAN] {
        assert!(matches!(Verification::relaxed(2, p), Err(PolicyError::P(_))));
    }
    for alpha in [-0.1, f32::NAN, f32::INFINITY] {
        assert!(matches!(Verification::conditional(alpha, 0.1, false), Err(PolicyError::Alpha(_))));
    }
    for beta in [0.0, 0.01, 1.1, f32::NAN] {
        assert!(matches!(Verification::conditional(0.1, beta, false), Err(PolicyError::Beta(_))));
    }
    for (beta, k) in [(1.0, 1), (0.5, 2), (0.1, 10), (BETA_MIN, 50)] {
        assert_eq!(Verification::conditional(0.1, beta, false).unwrap().top_k(), k);
    }
    for epsilon in [-0.1, 1.1, f32::NAN] {
        assert!(matches!(Verification::typical(epsilon, 0.3), Err(PolicyError::Epsilon(_))));
    }
    for delta in [-0.1, f32::NAN, f32::INFINITY] {
        assert!(matches!(Verification::typical(0.09, delta), Err(PolicyError::Delta(_))));
    }
    assert_eq!(Verification::relaxed(2, 0.1).unwrap().top_k(), 2);
    assert_eq!(Verification::Strict.top_k(), 1);
}

#[test]
fn an_accepted_end_of_text_is_the_last_token() {
    let tree = DraftTree::chain(&[END, 1, END, 2]);
    let top = |token| candidates(&[(token, 0.9)]);
    let scores = Scores(vec![top(1), top(END), top(2), top(3)]);
    let verified = verify(&tree, &scores, Verification::Strict, &[END]);
    assert_eq!((verified.path, verified.tokens), (vec![1, 2], vec![1, END]));
    assert!(verified.ended);
    assert_eq!(verified.log_probabilities.len(), 2);
    // The same tree where nothing ends a text: all is accepted, and the bonus follows.
    let verified = verify(&tree, &scores, Verification::Strict, &[]);
    assert_eq!((verified.tokens, verified.ended), (vec![1, END, 2, 3], false));
}

#[test]
fn relaxed_accepts_the_second_choice_only_above_p() {
    let tree = DraftTree::chain(&[1, 2]);
    let scores = Scores(vec![candidates(&[(3, 0.7), (2, 0.2)]), candidates(&[(3, 1.0)])]);
    let tokens = |p| verify(&tree, &scores, Verification::Relaxed { k: 2, p }, &[END]);
    assert_eq!(tokens(0.1).tokens, [2, 3]);
    assert_eq!(tokens(0.1).relaxed, 1);
    assert_eq!(tokens(0.25).tokens, [3]);
    assert_eq!(tokens(0.25).relaxed, 0);
}

#[test]
fn conditional_accepts_what_only_the_prompt_has_above_a_bound_that_rises_with_entropy() {
    // Entropies of 0.80 and 1.29 nats; the second choice has 0.2 in both.
    let certain = candidates(&[(3, 0.7), (2, 0.2), (1, 0.1)]);
    let open = candidates(&[(3, 0.5), (2, 0.2), (1, 0.2), (0, 0.05), (7, 0.05)]);
    let tokens = |of: &[Candidate], source, (alpha, all)| {
        let mut tree = DraftTree::chain(&[9]);
        tree.push(0, 2, 1.0, source);
        let policy = Verification::conditional(alpha, 0.1, all).unwrap();
        verify(&tree, &Scores(vec![of.to_vec(), candidates(&[(4, 1.0)])]), policy, &[END]).tokens
    };
    for (source, all, is_eligible) in [
        (Source::Prompt, false, true),
        (Source::Pool, false, false),
        (Source::Context, false, false),
        (Source::Pool, true, true),
    ] {
        // The bounds are 0.18, 0.23 and 0.34.
        assert_eq!(tokens(&certain, source, (0.1, all)) == [2, 4], is_eligible);
        assert_eq!(tokens(&open, source, (0.1, all)), [3]);
        assert_eq!(tokens(&certain, source, (0.3, all)), [3]);
    }
}

/// Scores of a target that draws: of every node the choice and the distribution at its temperature.
struct Drawn(Scores, Vec<Prediction>);

impl TargetScores for Drawn {
    fn top(&self, node: usize) -> &[Candidate] {
        self.0.top(node)
    }

    fn prediction(&self, node: usize) -> Prediction {
        self.1[node]
    }
}

#[test]
fn strict_accepts_the_sample_and_nothing_else() {
    let top = candidates(&[(3, 0.7), (2, 0.2), (1, 0.1)]);
    let drawn = |token: usize| Prediction { choice: top[token], ..Prediction::default() };
    let scores = Drawn(Scores(vec![top.clone(); 2]), vec![drawn(1), drawn(2)]);
    let tokens = |draft| verify(&DraftTree::chain(&[9, draft]), &scores, Verification::Strict, &[END]);
    assert_eq!((tokens(2).tokens, tokens(2).relaxed), (vec![2, 1], 0));
    assert_eq!((tokens(3).tokens, tokens(3).relaxed), (vec![2], 0));
    assert_eq!(tokens(2).log_probabilities, [top[1].log_probability, top[2].log_probability]);
}

#[test]
fn typical_accepts_above_a_bound_that_falls_with_entropy_at_the_temperature() {
    // At T = 2 the weights are √p: 0.837, 0.447 and 0.316 of 1.600, so 0.523, 0.280 and 0.198, with 1.02 nats.
    let top = candidates(&[(3, 0.7), (2, 0.2), (1, 0.1)]);
    let sum: f32 = top.iter().map(|c| (c.log_probability / 2.0).exp()).sum();
    let prediction = Prediction { choice: top[0], entropy: 1.02, sharpness: 0.5, log_normaliser: sum.ln() };
    assert!((prediction.probability(top[2]) - 0.198).abs() < 1e-3);
    let scores = Drawn(Scores(vec![top.clone(); 2]), vec![prediction; 2]);
    let tokens = |epsilon, delta| {
        let policy = Verification::typical(epsilon, delta).unwrap();
        verify(&DraftTree::chain(&[9, 1]), &scores, policy, &[END])
    };
    assert_eq!((tokens(0.19, 1.0).tokens, tokens(0.19, 1.0).relaxed), (vec![1, 3], 1));
    assert_eq!(tokens(0.20, 1.0).tokens, [3]);
    // δ · exp(-1.02) is 0.197 and 0.202.
    assert_eq!(tokens(0.5, 0.546).tokens, [1, 3]);
    assert_eq!(tokens(0.5, 0.560).tokens, [3]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_best_of_all_acceptable_paths_is_taken(
        tree in any_tree(ALPHABET),
        scores in any_scores(),
        policy in any_policy(),
    ) {
        let verified = verify(&tree, &scores, policy, &[END]);
        let mut path = vec![0];
        path.extend(&verified.path);
        prop_assert!(acceptable(&tree, &scores, policy, &path));
        let won = (path.len(), product(&tree, &scores, &path));
        for node in 0..tree.len() {
            let other = path_of(&tree, node);
            if acceptable(&tree, &scores, policy, &other) {
                prop_assert!((other.len(), product(&tree, &scores, &other)) <= won);
            }
        }
        let last = path[path.len() - 1];
        let mut tokens: Vec<Token> = verified.path.iter().map(|&node| tree.tokens()[node]).collect();
        if tokens.last() != Some(&END) {
            tokens.push(scores.top(last)[0].token);
        }
        prop_assert_eq!(verified.ended, tokens.last() == Some(&END));
        prop_assert_eq!(verified.tokens, tokens);
        let relaxed = |step: &&[usize]| scores.top(step[0])[0].token != tree.tokens()[step[1]];
        prop_assert_eq!(verified.relaxed, path.windows(2).filter(relaxed).count());
        let sum: f32 = verified.log_probabilities.iter().take(path.len() - 1).sum();
        prop_assert!((sum - won.1).abs() < 1e-4);
    }

    #[test]
    fn top_1_emits_a_beginning_of_what_strict_emits(
        tree in any_tree(ALPHABET),
        scores in any_scores(),
        p in 0.0..1.0f32,
    ) {
        let strict = verify(&tree, &scores, Verification::Strict, &[END]);
        let top_1 = verify(&tree, &scores, Verification::Relaxed { k: 1, p }, &[END]);
        prop_assert!(strict.tokens.starts_with(&top_1.tokens));
        prop_assert_eq!(top_1.relaxed, 0);
    }
}

/// Where a draft ends.
#[derive(Debug, Clone, Copy)]
enum Stop {
    /// Before the first token that would be rejected.
    Oracle,
    /// After it.
    OneLate,
    /// At a length that knows nothing of the target.
    Fixed(usize),
}

/// Writes `text` greedily with drafts of chains. Returns how often the target ran and how many drafted tokens were
/// discarded; in the places where `agrees` is false the draft model says another token.
fn write(text: &[Token], agrees: &[bool], stop: Stop) -> (usize, usize) {
    let (mut calls, mut discarded, mut written) = (0, 0, Vec::new());
    while written.len() < text.len() {
        let (rest, agrees) = (&text[written.len()..], &agrees[written.len()..]);
        let agreed = agrees.iter().take_while(|agrees| **agrees).count();
        let length = match stop {
            Stop::Oracle => agreed,
            Stop::OneLate => agreed + 1,
            Stop::Fixed(length) => length,
        };
        // Texts have tokens of 1 to 3.
        let say = |(token, agrees): (&Token, &bool)| if *agrees { *token } else { 1 + token % 3 };
        let said: Vec<Token> = rest.iter().zip(agrees).map(say).take(length).collect();
        let tree = DraftTree::chain(&[&[9], said.as_slice()].concat());
        let choice = |token| vec![Candidate { token, log_probability: -0.1 }];
        let scores = Scores((0..tree.len()).map(|at| choice(*rest.get(at).unwrap_or(&END))).collect());
        let found = verify(&tree, &scores, Verification::Strict, &[END]);
        assert_eq!(found.path.len(), agreed.min(length), "{found:?}");
        discarded += said.len() - found.path.len();
        written.extend(found.tokens);
        calls += 1;
    }
    assert_eq!(&written[..text.len()], text);
    (calls, discarded)
}

/// Lemma 2.1 of SpecDec++ (arXiv:2405.19715): a draft that always ends where the target begins to disagree needs one
/// forward of the target for each disagreement and one for the end, and nothing that it drafts is discarded. The last
/// forward is saved if the text ends in a disagreement. No other draft needs fewer forwards.
#[test]
fn an_oracle_of_when_to_stop_needs_a_forward_per_disagreement_and_discards_nothing() {
    let mut random = 1_u64;
    for _ in 0..500 {
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % limit
        };
        let agrees: Vec<bool> = (0..=below(30)).map(|_| below(4) > 0).collect();
        let text: Vec<Token> = agrees.iter().map(|_| 1 + u32::try_from(below(3)).unwrap()).collect();
        let disagreements = agrees.iter().filter(|agrees| !**agrees).count();
        let calls = disagreements + usize::from(agrees.last() == Some(&true));
        assert_eq!(write(&text, &agrees, Stop::Oracle), (calls, 0), "{agrees:?}");
        // Every disagreement is drafted once, and nothing is gained by it.
        assert_eq!(write(&text, &agrees, Stop::OneLate), (calls, disagreements), "{agrees:?}");
        for length in 0..8 {
            assert!(write(&text, &agrees, Stop::Fixed(length)).0 >= calls, "{length}: {agrees:?}");
        }
        // Without drafts every token is a forward.
        assert_eq!(write(&text, &agrees, Stop::Fixed(0)), (text.len(), 0));
    }
}
