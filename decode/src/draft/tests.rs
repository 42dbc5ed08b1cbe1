//! Drafting, against a naive model of the blend and against naive decoding.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::pool::tests::{END, any_texts, continuations, ended, pool_of};
use crate::tree::Source;
use crate::verify::tests::Scores;
use crate::verify::{Candidate, TargetScores, Verification, verify};

const ALPHA: f32 = 3.0;
const WEIGHTS: SourceWeights = SourceWeights { context: 2.0, previous: 5.0 };

fn blended(order: usize, min_probability: f32) -> Drafter {
    Drafter::Blended { order, alpha: ALPHA, min_probability, weights: WEIGHTS }
}

fn drafters() -> [Drafter; 7] {
    [
        Drafter::None,
        Drafter::PromptLookup { max_ngram: 3 },
        Drafter::Lookahead { window: 3, ngram: 3, guesses: 2 },
        Drafter::RawFrequency { max_ngram: 4 },
        Drafter::default(),
        blended(3, 0.0),
        blended(1, 0.1),
    ]
}

/// The naive model: every text as it is, every count from the definition.
#[derive(Debug, Clone)]
struct Texts {
    pool: Vec<Vec<Token>>,
    previous: Vec<Vec<Token>>,
    context: Vec<Token>,
}

impl Texts {
    fn draft(&self, drafter: Drafter, max_nodes: usize) -> DraftTree {
        let mut context = DraftContext::new(drafter, Some(pool_of(&self.pool)), END);
        for text in &self.previous {
            context.add_previous(text);
        }
        context.extend(&self.context);
        let mut tree = DraftTree::new();
        context.draft(max_nodes, &mut tree);
        tree
    }

    /// The three sources with their weights, texts ended; the context is open at its end.
    fn sources(&self) -> [(f32, Vec<Vec<Token>>); 3] {
        let context = self.context.split_inclusive(|&token| token == END).map(<[_]>::to_vec);
        [(1.0, ended(&self.pool)), (WEIGHTS.previous, ended(&self.previous)), (WEIGHTS.context, context.collect())]
    }

    /// The last tokens of the context and `path`, from the last end of a text on.
    fn tail(&self, path: &[Token]) -> Vec<Token> {
        let text = [&self.context, path].concat();
        text.rsplit(|&token| token == END).next().unwrap().to_vec()
    }

    /// P(token | context, path) by the recursion of `blend`, from the shortest context up.
    fn blend(&self, order: usize, path: &[Token]) -> BTreeMap<Token, f32> {
        let (sources, tail) = (self.sources(), self.tail(path));
        let mut probabilities = BTreeMap::new();
        let mut shorter = Vec::new();
        for length in 1..=order.min(tail.len()) {
            let context = &tail[tail.len() - length..];
            let counts: Vec<_> = sources.iter().map(|(_, texts)| continuations(texts, context)).collect();
            if counts == shorter {
                continue;
            }
            let mut total: BTreeMap<Token, f32> = BTreeMap::new();
            for ((weight, _), counts) in sources.iter().zip(&counts) {
                for (&token, &count) in counts {
                    *total.entry(token).or_default() += weight * count as f32;
                }
            }
            let alpha = if length == 1 { ALPHA / 2.0 } else { ALPHA };
            let (n, smoothing) = (total.values().sum::<f32>(), alpha * total.len() as f32);
            if n == 0.0 {
                break;
            }
            probabilities.values_mut().for_each(|p| *p *= smoothing / (n + smoothing));
            for (token, count) in total {
                *probabilities.entry(token).or_insert(0.0) += count / (n + smoothing);
            }
            shorter = counts;
        }
        probabilities
    }

    /// Path probabilities of all branches above `floor`, by exhaustion.
    fn branches(&self, order: usize, floor: f32) -> BTreeMap<Vec<Token>, f32> {
        let mut found = BTreeMap::new();
        let mut open = vec![(Vec::new(), 1.0)];
        while let Some((path, probability)) = open.pop() {
            if path.last() == Some(&END) {
                continue;
            }
            for (token, p) in self.blend(order, &path) {
                if probability * p > floor {
                    let path: Vec<Token> = path.iter().copied().chain([token]).collect();
                    found.insert(path.clone(), probability * p);
                    open.push((path, probability * p));
                }
            }
        }
        found
    }

    /// Counts of all branches of up to 12 tokens after the last `ngram` ones, all sources alike.
    fn frequencies(&self, ngram: usize) -> BTreeMap<Vec<Token>, usize> {
        let (mut found, tail) = (BTreeMap::new(), self.tail(&[]));
        if tail.len() < ngram {
            return found;
        }
        let context = &tail[tail.len() - ngram..];
        for text in self.sources().iter().flat_map(|(_, texts)| texts) {
            for start in 0..text.len() {
                let Some(after) = text[start..].strip_prefix(context) else {
                    continue;
                };
                for len in 1..=after.len().min(12) {
                    *found.entry(after[..len].to_vec()).or_insert(0) += 1;
                }
            }
        }
        found
    }
}

fn any_world(alphabet: Token) -> impl Strategy<Value = Texts> {
    let context = prop::collection::vec(0..=alphabet, 1..20);
    let texts = (any_texts(alphabet, 4, 16), any_texts(alphabet, 2, 12), context);
    texts.prop_map(|(pool, previous, context)| Texts { pool, previous, context })
}

/// The root and the most nodes are these, siblings differ, nothing follows the end of a text, and probabilities fall.
fn well_formed(tree: &DraftTree, (root, max_nodes): (Option<&Token>, usize)) -> Result<(), TestCaseError> {
    prop_assert!(tree.drafted() <= max_nodes);
    prop_assert_eq!(tree.tokens().first(), root);
    for node in 0..tree.len() {
        let children: Vec<usize> = tree.children(node).collect();
        let tokens: BTreeSet<Token> = children.iter().map(|&c| tree.tokens()[c]).collect();
        prop_assert_eq!(tokens.len(), children.len(), "siblings differ");
        prop_assert!(node == 0 || tree.tokens()[node] != END || children.is_empty());
        let sum: f32 = children.iter().map(|&child| tree.probabilities()[child]).sum();
        prop_assert!(sum <= tree.probabilities()[node] * 1.0001, "{} below {}", sum, node);
    }
    let falling = tree.probabilities().windows(2).all(|p| p[0] >= p[1]);
    prop_assert!(falling, "{:?}", tree.probabilities());
    Ok(())
}

fn branch(tree: &DraftTree, node: usize) -> Vec<Token> {
    let mut path = crate::tree::tests::path_of(tree, node);
    path.remove(0);
    path.iter().map(|&node| tree.tokens()[node]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    // 300 nodes of room keep every probability exact while the first 12 are expanded.
    #[test]
    fn the_tree_is_the_one_of_greatest_probability(world in any_world(4), order in 1..6usize) {
        let tree = world.draft(blended(order, 0.0), 300);
        let nodes = 1..tree.len().min(13);
        let Some(floor) = nodes.clone().map(|n| tree.probabilities()[n]).reduce(f32::min) else {
            prop_assert!(world.branches(order, 0.5).is_empty());
            return Ok(());
        };
        let best = world.branches(order, floor * 0.999);
        for node in nodes.clone() {
            let (path, found) = (branch(&tree, node), tree.probabilities()[node]);
            let expected = best[&path];
            prop_assert!((found - expected).abs() < 1e-4 * expected, "{path:?}: {found} {expected}");
        }
        let mut expected: Vec<f32> = best.into_values().collect();
        expected.sort_by(|a, b| b.total_cmp(a));
        for (node, expected) in nodes.zip(expected) {
            prop_assert!((tree.probabilities()[node] - expected).abs() < 1e-4 * expected);
        }
    }

    // Where the tree fills, wide matches are only probed; what that loses is bounded here.
    #[test]
    fn a_small_budget_loses_little_of_the_best_sum(world in any_world(4), max_nodes in 1..12usize) {
        let tree = world.draft(blended(4, 0.0), max_nodes);
        let wide = world.draft(blended(4, 0.0), 300);
        let sum = |tree: &DraftTree| tree.probabilities().iter().take(max_nodes + 1).sum::<f32>();
        prop_assert!(sum(&tree) <= sum(&wide) * 1.1);
        prop_assert!(sum(&tree) >= sum(&wide) * 0.9);
    }

    #[test]
    fn trees_are_well_formed(world in any_world(6), max_nodes in 0..40usize) {
        for drafter in drafters() {
            well_formed(&world.draft(drafter, max_nodes), (world.context.last(), max_nodes))?;
        }
    }

    #[test]
    fn aligned_tokens_are_siblings_like_others(
        world in any_world(6),
        ranked in prop::collection::vec((0..7u32, 0.01..1.0f32), 40),
        max_nodes in 0..40usize,
    ) {
        for drafter in [blended(3, 0.0), Drafter::default(), Drafter::RawFrequency { max_ngram: 4 }] {
            let mut context = DraftContext::new(drafter, Some(pool_of(&world.pool)), END);
            *context.alignment_mut() = Alignment::new(2);
            for ranked in ranked.chunks(2).take(world.context.len() - 1) {
                let candidate = |&(token, p): &(Token, f32)| Candidate { token, log_probability: p.ln() };
                context.alignment_mut().push(&ranked.iter().map(candidate).collect::<Vec<_>>());
            }
            context.extend(&world.context);
            let mut tree = DraftTree::new();
            context.draft(max_nodes, &mut tree);
            well_formed(&tree, (world.context.last(), max_nodes))?;
        }
    }

    #[test]
    fn a_context_in_pieces_drafts_as_a_whole_one(
        world in any_world(4),
        cuts in prop::collection::vec(1..6usize, 20),
    ) {
        // A lookahead window begins with the prompt, which is the first piece.
        for drafter in drafters().into_iter().filter(|drafter| !matches!(drafter, Drafter::Lookahead { .. })) {
            let mut context = DraftContext::new(drafter, Some(pool_of(&world.pool)), END);
            let (mut tree, mut rest) = (DraftTree::new(), world.context.as_slice());
            for cut in cuts.iter().chain([&100]) {
                let (piece, after) = rest.split_at(rest.len().min(*cut));
                context.extend(piece);
                context.draft(20, &mut tree);
                rest = after;
            }
            let whole = Texts { previous: Vec::new(), ..world.clone() }.draft(drafter, 20);
            // Of the context the first piece is the prompt, and so the sources differ.
            let but_sources = |tree: &DraftTree| {
                (tree.tokens().to_vec(), tree.parents().to_vec(), tree.probabilities().to_vec())
            };
            prop_assert_eq!(but_sources(&tree), but_sources(&whole));
        }
    }

    #[test]
    fn raw_frequency_takes_the_most_frequent_of_the_first_full_subtree(
        world in any_world(3),
        max_nodes in 1..30usize,
    ) {
        let world = Texts { previous: Vec::new(), context: world.context[..1].to_vec(), ..world };
        let context = [world.context.clone(), vec![1, 2, 1]].concat();
        let world = Texts { context, ..world };
        let tree = world.draft(Drafter::RawFrequency { max_ngram: 3 }, max_nodes);
        let subtrees = (1..=3).rev().map(|ngram| world.frequencies(ngram));
        let all: Vec<_> = subtrees.collect();
        let subtree = all.iter().find(|found| found.len() >= max_nodes).unwrap_or(&all[2]);
        let mut expected: Vec<usize> = subtree.values().copied().collect();
        expected.sort_by(|a, b| b.cmp(a));
        expected.truncate(max_nodes);
        let found: Vec<usize> = (1..tree.len()).map(|node| subtree[&branch(&tree, node)]).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn prompt_lookup_copies_what_followed_the_longest_match(world in any_world(3)) {
        let tree = world.draft(Drafter::PromptLookup { max_ngram: 4 }, 8);
        let (tail, text) = (world.tail(&[]), &world.context);
        let longest = |next: usize| {
            let before = text[..next].iter().rev();
            before.zip(tail.iter().rev().take(4)).take_while(|(a, b)| a == b).count()
        };
        let best = (1..text.len()).filter(|&next| longest(next) > 0).max_by_key(|&n| longest(n));
        let copied = best.map_or(&[][..], |next| &text[next..]);
        let end = copied.iter().position(|&token| token == END).map_or(copied.len(), |at| at + 1);
        prop_assert_eq!(&tree.tokens()[1..], &copied[..end.min(8)]);
    }

    #[test]
    fn what_was_private_to_one_text_is_never_drafted_for_another(world in any_world(4)) {
        let secret = |texts: &[Vec<Token>]| -> Vec<Vec<Token>> {
            texts.iter().map(|text| text.iter().map(|token| token + 50).collect()).collect()
        };
        for drafter in drafters() {
            let pool = pool_of(&world.pool);
            let mut tree = DraftTree::new();
            let mut first = DraftContext::new(drafter, Some(pool.clone()), END);
            for text in secret(&world.previous) {
                first.add_previous(&text);
            }
            first.extend(&secret(std::slice::from_ref(&world.context))[0]);
            first.draft(40, &mut tree);
            drop(first);
            let mut second = DraftContext::new(drafter, Some(pool), END);
            for &token in world.context.iter().chain(&[51]) {
                second.extend(&[token]);
                second.draft(40, &mut tree);
                prop_assert!(tree.tokens()[1..].iter().all(|&token| token < 50));
            }
        }
    }
}

/// A target model that follows a hash of the last two tokens, ending now and then.
struct Target {
    seed: u32,
}

impl Target {
    fn next(&self, text: &[Token]) -> Token {
        let before = text
            .iter()
            .rev()
            .take(2)
            .fold(self.seed, |hash, &token| (hash ^ token).wrapping_mul(0x9E37_79B9).rotate_left(13));
        if before % 31 == 0 { END } else { 1 + before % 7 }
    }

    /// One token a forward.
    fn greedy(&self, prompt: &[Token], max: usize) -> Vec<Token> {
        let mut text = prompt.to_vec();
        while text.len() < prompt.len() + max {
            text.push(self.next(&text));
            if text.last() == Some(&END) {
                break;
            }
        }
        text.split_off(prompt.len())
    }

    fn scores(&self, text: &[Token], tree: &DraftTree) -> Scores {
        let top = |node| {
            let token = self.next(&[text, &branch(tree, node)].concat());
            vec![Candidate { token, log_probability: -0.1 }]
        };
        Scores((0..tree.len()).map(top).collect())
    }

    /// Strict speculative decoding; the output and the number of forwards.
    fn speculate(&self, mut context: DraftContext, text: &[Token], nodes: usize, max: usize) -> (Vec<Token>, usize) {
        let (mut text, start) = (text.to_vec(), text.len());
        let (mut tree, mut forwards) = (DraftTree::new(), 0);
        context.extend(&text);
        while text.len() < start + max {
            context.draft(nodes, &mut tree);
            let scores = self.scores(&text, &tree);
            let step = verify(&tree, &scores, Verification::Strict, &[END]);
            context.observe(&tree, |node| scores.prediction(node).choice.token);
            context.extend(&step.tokens);
            text.extend(&step.tokens);
            forwards += 1;
            if step.ended {
                break;
            }
        }
        text.truncate(start + max);
        (text.split_off(start), forwards)
    }
}

#[test]
fn strict_output_is_greedy_output_for_every_drafter_tree_size_and_pool() {
    for seed in 0..40 {
        let target = Target { seed };
        let own: Vec<_> = (1..8).map(|first| target.greedy(&[first, 3], 60)).collect();
        let foreign: Vec<_> = (1..8).map(|first| Target { seed: !seed }.greedy(&[first], 60)).collect();
        let prompt = [1 + seed % 7, 2, 3, 1 + seed % 5];
        let greedy = target.greedy(&prompt, 80);
        for pool in [None, Some(pool_of(&foreign)), Some(pool_of(&own))] {
            for (drafter, nodes) in drafters().into_iter().flat_map(|d| [0, 1, 7, 32].map(|n| (d, n))) {
                let mut context = DraftContext::new(drafter, pool.clone(), END);
                context.add_previous(&foreign[0]);
                let (output, forwards) = target.speculate(context, &prompt, nodes, 80);
                assert_eq!(output, greedy, "{drafter:?}, {nodes} nodes, seed {seed}");
                assert!(forwards <= greedy.len());
            }
        }
    }
}

#[test]
fn better_ranked_tokens_are_drafted_beside_those_of_the_prompt() {
    let ranked = |tokens: &[Token]| -> Vec<Candidate> {
        (1u16..).zip(tokens).map(|(rank, &token)| Candidate { token, log_probability: -f32::from(rank) }).collect()
    };
    for drafter in [blended(3, 0.0), Drafter::PromptLookup { max_ngram: 3 }, Drafter::RawFrequency { max_ngram: 1 }] {
        let children = |most| {
            let mut context = DraftContext::new(drafter, None, END);
            *context.alignment_mut() = Alignment::new(most);
            context.extend(&[5, 6, 7, 8]);
            // In place of 7 the target has 9 and 10, in place of 8 nothing better.
            [&[6][..], &[9, 10, 7], &[8, 11]].iter().for_each(|top| context.alignment_mut().push(&ranked(top)));
            context.extend(&[6]);
            let mut tree = DraftTree::new();
            context.draft(20, &mut tree);
            let of = |node| tree.children(node).map(|child| (tree.tokens()[child], tree.sources()[child]));
            let seven = tree.children(0).find(|&child| tree.tokens()[child] == 7).unwrap();
            (of(0).collect::<BTreeMap<_, _>>(), of(seven).collect::<BTreeMap<_, _>>())
        };
        let prompts = |tokens: &[Token]| tokens.iter().map(|&token| (token, Source::Prompt)).collect();
        assert_eq!(children(0), (prompts(&[7]), prompts(&[8])), "{drafter:?}");
        assert_eq!(children(1), (prompts(&[7, 9]), prompts(&[8])), "{drafter:?}");
        assert_eq!(children(2), (prompts(&[7, 9, 10]), prompts(&[8])), "{drafter:?}");
    }
}

#[test]
fn aligned_tokens_save_forwards_where_a_text_departs_from_its_prompt() {
    let (mut copied, mut aligned) = ([0; 2], [0; 2]);
    for seed in 0..40 {
        let target = Target { seed };
        // Of another author, but of the same words.
        let prompt = Target { seed: !seed }.greedy(&[1 + seed % 7], 60);
        let prompt = prompt.strip_suffix(&[END]).unwrap_or(&prompt);
        let greedy = target.greedy(prompt, 60);
        for (at, drafter) in [Drafter::default(), Drafter::PromptLookup { max_ngram: 3 }].into_iter().enumerate() {
            for (most, forwards) in [(0, &mut copied), (2, &mut aligned)] {
                let mut context = DraftContext::new(drafter, None, END);
                *context.alignment_mut() = Alignment::new(most);
                for place in 1..prompt.len() {
                    let token = target.next(&prompt[..place]);
                    context.alignment_mut().push(&[Candidate { token, log_probability: -0.1 }]);
                }
                let (output, taken) = target.speculate(context, prompt, 16, 60);
                assert_eq!(output, greedy, "{drafter:?}, {most}, seed {seed}");
                forwards[at] += taken;
            }
        }
    }
    let fewer = copied.iter().zip(&aligned).all(|(copied, aligned)| 20 * aligned < 19 * copied);
    assert!(fewer, "{copied:?} forwards, {aligned:?} with alignment");
}

#[test]
fn drafting_saves_forwards_where_the_pool_knows_the_text() {
    let target = Target { seed: 5 };
    let prompt = [3, 2, 1];
    let greedy = target.greedy(&prompt, 80);
    let known = vec![[&prompt[..], &greedy].concat()];
    for drafter in [Drafter::default(), Drafter::RawFrequency { max_ngram: 4 }] {
        let context = DraftContext::new(drafter, Some(pool_of(&known)), END);
        let (output, forwards) = target.speculate(context, &prompt, 16, 80);
        assert_eq!(output, greedy);
        assert!(forwards * 3 < greedy.len(), "{forwards} forwards for {} tokens", greedy.len());
    }
}

#[test]
fn an_own_previous_text_outweighs_the_pool() {
    let pool = pool_of(&vec![vec![1, 2, 3]; 4]);
    let mut context = DraftContext::new(Drafter::default(), Some(pool), END);
    context.add_previous(&[1, 2, 5]);
    context.extend(&[1, 2]);
    let mut tree = DraftTree::new();
    context.draft(1, &mut tree);
    assert_eq!((tree.tokens(), tree.sources()[1]), (&[2, 5][..], Source::Previous));
}

#[test]
fn tokens_that_the_prompt_alone_has_are_told_apart() {
    // After 1 2: the prompt has 3 and 4, the text so far 4 and 5, the pool 6 and 3's twin in another pool.
    let tokens_of = |pool: &[Token], drafter| {
        let mut context = DraftContext::new(drafter, Some(pool_of(&[pool.to_vec()])), END);
        context.extend(&[1, 2, 3, 1, 2, 4, 7]);
        context.extend(&[1, 2, 4, 1, 2, 5, 1, 2]);
        let mut tree = DraftTree::new();
        context.draft(8, &mut tree);
        let children: Vec<usize> = tree.children(0).collect();
        let mut found: Vec<_> = children.iter().map(|&child| (tree.tokens()[child], tree.sources()[child])).collect();
        found.sort_by_key(|(token, _)| *token);
        found
    };
    let sources = |three| vec![(3, three), (4, Source::Context), (5, Source::Context), (6, Source::Pool)];
    let drafter = || Drafter::Blended { order: 2, alpha: 1.0, min_probability: 0.0, weights: SourceWeights::EQUAL };
    assert_eq!(tokens_of(&[1, 2, 6], drafter()), sources(Source::Prompt));
    let twin = tokens_of(&[1, 2, 6, 1, 2, 3], drafter());
    assert!(twin.contains(&(3, Source::Context)) || twin.contains(&(3, Source::Pool)), "{twin:?}");
    // Prompt lookup copies what came last: from the text.
    assert_eq!(tokens_of(&[1, 2, 6], Drafter::PromptLookup { max_ngram: 2 }), [(5, Source::Context)]);
    let mut context = DraftContext::new(Drafter::PromptLookup { max_ngram: 2 }, None, END);
    context.extend(&[1, 2, 3, 4, 1]);
    context.extend(&[2]);
    let mut tree = DraftTree::new();
    context.draft(4, &mut tree);
    let sources = [Source::Context, Source::Prompt, Source::Prompt, Source::Prompt, Source::Context];
    assert_eq!((tree.tokens(), tree.sources()), (&[2, 3, 4, 1, 2][..], &sources[..]));
}

#[test]
fn a_token_that_the_pool_has_but_rarely_is_not_the_prompts_alone() {
    // After 2 the prompt has 3, with the weight of eight occurrences, and the pool 5: so often that a single 3 of the
    // pool is not counted, among occurrences that are read one by one (9) and in a context with a table (39).
    let weights = SourceWeights { context: 8.0, previous: 1.0 };
    for (often, min_probability) in [(9, 0.25), (39, 0.1)] {
        let source_of_three = |rare: &[Vec<Token>]| {
            let texts = [vec![vec![2, 5]; often], rare.to_vec()].concat();
            let drafter = Drafter::Blended { order: 1, alpha: 1.0, min_probability, weights };
            let mut context = DraftContext::new(drafter, Some(pool_of(&texts)), END);
            context.extend(&[2, 3]);
            context.extend(&[2]);
            let mut tree = DraftTree::new();
            context.draft(8, &mut tree);
            let three = tree.children(0).find(|&child| tree.tokens()[child] == 3).unwrap();
            tree.sources()[three]
        };
        assert_eq!(source_of_three(&[]), Source::Prompt);
        assert_eq!(source_of_three(&[vec![2, 3]]), Source::Context);
    }
}

#[test]
fn an_empty_context_gives_an_empty_tree() {
    let mut tree = DraftTree::chain(&[1, 2]);
    DraftContext::new(Drafter::default(), None, END).draft(8, &mut tree);
    assert!(tree.is_empty());
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    for drafter in drafters() {
        assert_eq!(drafter.check(), Ok(()));
    }
    let weights = SourceWeights { previous: -1.0, ..WEIGHTS };
    let blend = |order, alpha, min_probability| Drafter::Blended { order, alpha, min_probability, weights };
    let lookahead = |window, ngram, guesses| Drafter::Lookahead { window, ngram, guesses };
    let cases = [
        (Drafter::PromptLookup { max_ngram: 0 }, "max_ngram must be 1 to 16, got 0"),
        (Drafter::RawFrequency { max_ngram: 17 }, "max_ngram must be 1 to 16, got 17"),
        (lookahead(0, 3, 2), "window must be 1 to 32, got 0"),
        (lookahead(33, 3, 2), "window must be 1 to 32, got 33"),
        (lookahead(2, 1, 2), "ngram must be 2 to 16, got 1"),
        (lookahead(2, 3, 0), "guesses must be 1 to 32, got 0"),
        (blend(0, 1.0, 0.0), "order must be 1 to 16, got 0"),
        (blend(2, f32::NAN, 0.0), "alpha must be 0.01 to 1000, got NaN"),
        (blend(2, 1.0, 2.0), "min_probability must be 0 to 1, got 2"),
        (blend(2, 1.0, 0.5), "weights.previous must be 0.01 to 1000, got -1"),
    ];
    for (drafter, expected) in cases {
        assert_eq!(drafter.check().unwrap_err().to_string(), format!("drafter: {expected}"));
    }
}
