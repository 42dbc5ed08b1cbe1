//! Lookahead decoding, against plain decoding, and its window against the published code's, levels and all.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::draft::{DraftContext, Drafter};
use crate::pool::tests::pool_of;
use crate::verify::tests::Scores;
use crate::verify::{Candidate, Prediction, TargetScores, Verification, verify};

const END: Token = 0;

/// A target whose choice is a function of the text.
type Language = fn(&[Token]) -> Token;

/// A hash of the last two tokens, over seven tokens, ending now and then.
fn hashed(text: &[Token]) -> Token {
    let last = text.iter().rev().take(2);
    let hash = last.fold(11u32, |hash, &token| (hash ^ token).wrapping_mul(0x9E37_79B9).rotate_left(13));
    if hash % 41 == 0 { END } else { 1 + hash % 7 }
}

/// A sentence of nine tokens over and over, in which 4 is followed by several.
fn repetitive(text: &[Token]) -> Token {
    const SENTENCE: [Token; 9] = [4, 1, 2, 4, 5, 3, 4, 7, 6];
    let ends_so = |&at: &usize| (1..=2).all(|back| text[text.len() - back] == SENTENCE[(at + 9 - back) % 9]);
    let after_two = (0..9).find(|at| text.len() > 1 && ends_so(at));
    let after_one = (0..9).find(|at| text.last() == Some(&SENTENCE[(at + 8) % 9]));
    SENTENCE[after_two.or(after_one).unwrap_or(0)]
}

/// 1, 2, 3 and 1 again.
fn cyclic(text: &[Token]) -> Token {
    text.last().map_or(1, |last| 1 + last % 3)
}

fn lookahead(window: usize, ngram: usize, guesses: usize) -> Drafter {
    Drafter::Lookahead { window, ngram, guesses }
}

/// The text that ends in a node.
fn text_of(text: &[Token], tree: &DraftTree, node: usize) -> Vec<Token> {
    let path = crate::tree::tests::path_of(tree, node);
    let drafted = path.iter().skip(1).map(|&node| tree.tokens()[node]);
    text.iter().copied().chain(drafted).collect()
}

fn scores(language: Language, text: &[Token], tree: &DraftTree) -> Scores {
    let candidate = |node| Candidate { token: language(&text_of(text, tree, node)), log_probability: -0.1 };
    Scores((0..tree.len()).map(|node| vec![candidate(node)]).collect())
}

fn plain(language: Language, prompt: &[Token], length: usize) -> Vec<Token> {
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + length && text.last() != Some(&END) {
        text.push(language(&text));
    }
    text
}

/// A text under way, and the tree of its last step.
struct Run {
    language: Language,
    context: DraftContext,
    text: Vec<Token>,
    tree: DraftTree,
}

impl Run {
    fn new(language: Language, drafter: Drafter, prompt: &[Token]) -> Self {
        let mut context = DraftContext::new(drafter, None, END);
        context.extend(prompt);
        Self { language, context, text: prompt.to_vec(), tree: DraftTree::new() }
    }

    /// A step of `nodes`, of which `kept` are left: the accepted tokens.
    fn step(&mut self, nodes: usize, kept: usize) -> usize {
        self.context.draft(nodes, &mut self.tree);
        self.tree.truncate(kept);
        let scores = scores(self.language, &self.text, &self.tree);
        let step = verify(&self.tree, &scores, Verification::Strict, &[END]);
        self.context.observe(&self.tree, |node| scores.prediction(node).choice.token);
        self.context.extend(&step.tokens);
        self.text.extend(&step.tokens);
        step.path.len()
    }

    fn lookahead(&self) -> &Lookahead {
        self.context.lookahead().unwrap()
    }

    fn columns(&self) -> Vec<Vec<Token>> {
        self.lookahead().columns.iter().map(|column| column.iter().copied().collect()).collect()
    }
}

#[test]
fn strict_texts_equal_plain_decoding_whatever_the_sizes_and_the_room() {
    for language in [hashed as Language, repetitive, cyclic] {
        for (window, ngram, guesses) in [(1, 2, 1), (2, 3, 2), (5, 7, 7), (7, 5, 7), (4, 2, 3), (1, 6, 4), (32, 16, 32)]
        {
            for (nodes, kept) in [(0, 0), (1, 1), (2, 2), (5, 5), (9, 4), (64, 64), (1000, 30), (1000, 1000)] {
                let expected = plain(language, &[3, 1, 6, 2, 5], 60);
                let mut run = Run::new(language, lookahead(window, ngram, guesses), &[3, 1, 6, 2, 5]);
                let mut steps = 0;
                while run.text.len() < expected.len() {
                    run.step(nodes, kept);
                    steps += 1;
                }
                run.text.truncate(expected.len());
                assert_eq!(run.text, expected, "{window} {ngram} {guesses}, {nodes} nodes, {kept} kept");
                assert!(steps <= expected.len() - 5);
            }
        }
    }
}

#[test]
fn a_predictable_text_takes_fewer_steps_than_it_has_tokens() {
    for (language, prompt) in [(repetitive as Language, vec![4, 1]), (cyclic, vec![2]), (hashed, vec![1, 2, 3])] {
        for (window, ngram, guesses) in [(7, 5, 7), (5, 7, 7), (5, 3, 5)] {
            let drafter = lookahead(window, ngram, guesses);
            let mut run = Run::new(language, drafter, &prompt);
            let (mut steps, mut accepted) = (0, 0);
            while run.text.len() < 120 && run.text.last() != Some(&END) {
                accepted += run.step(drafter.most_nodes().unwrap(), usize::MAX - 1);
                steps += 1;
            }
            let tokens = run.text.len() - prompt.len();
            assert!(2 * accepted > steps && steps < tokens, "{drafter:?}: {tokens} tokens in {steps} steps");
        }
    }
}

/// Tokens and parents of the drafted nodes.
fn nodes(tree: &DraftTree) -> Vec<(Token, u32)> {
    tree.tokens().iter().copied().zip(tree.parents().iter().copied()).skip(1).collect()
}

#[test]
fn an_ngram_that_the_window_made_is_found() {
    // The prompt has only one token to fill the window with: columns 1, 1, 1, the first of them the root.
    let mut run = Run::new(cyclic, lookahead(2, 3, 2), &[1]);
    assert_eq!(run.step(100, 100), 0);
    assert_eq!(nodes(&run.tree), [(1, 0), (1, 1)]);
    // After each comes 2; the first column is dropped.
    assert_eq!(run.columns(), [[1, 2], [1, 2]]);
    assert_eq!(run.text, [1, 2]);

    // The root is 2. Column 0 is 2 2, the rest of it below the root; column 1 is 1 2. What the target chooses makes
    // 2 2 3 and 1 2 3 of them, and 2 3 is what both go on with.
    assert_eq!(run.step(100, 100), 0);
    assert_eq!(nodes(&run.tree), [(2, 0), (1, 0), (2, 2)]);
    assert_eq!(run.lookahead().ngrams[&2], [[2, 3]]);
    assert_eq!(run.lookahead().ngrams[&1], [[2, 3]]);
    assert_eq!(run.columns(), [[2, 3], [2, 3]]);

    // The root is 3, of which no n-gram is known. A newer one after 2 comes first.
    assert_eq!(run.step(100, 100), 0);
    assert_eq!(nodes(&run.tree), [(3, 0), (2, 0), (3, 2)]);
    assert_eq!(run.lookahead().ngrams[&3], [[3, 1]]);
    assert_eq!(run.lookahead().ngrams[&2], [[3, 1], [2, 3]]);
    assert_eq!(run.text, [1, 2, 3, 1]);

    // The root is 1: its n-gram 1 2 3 is drafted before the columns, and accepted.
    assert_eq!(run.step(100, 100), 2);
    assert_eq!(nodes(&run.tree), [(2, 0), (3, 1), (1, 0), (3, 0), (1, 4)]);
    assert_eq!(run.tree.probabilities(), [1.0, 1.0, 1.0, UNLIKELY, UNLIKELY, UNLIKELY]);
    assert_eq!(run.text, [1, 2, 3, 1, 2, 3, 1]);
}

#[test]
fn branches_that_begin_alike_share_nodes() {
    let mut run = Run::new(cyclic, lookahead(2, 3, 2), &[1]);
    for _ in 0..4 {
        run.step(100, 100);
    }
    // The root is 1 again, with 1 1 2 and 1 2 3 known; column 0 is 1 2, and column 1 is 1 2.
    assert_eq!(run.columns(), [[1, 2], [1, 2]]);
    run.step(100, 100);
    assert_eq!(nodes(&run.tree), [(1, 0), (2, 1), (2, 0), (3, 3)]);
}

/// The published code's window: levels instead of columns, of which the first lacks the root, and no tree.
struct Levels {
    shape: Shape,
    levels: Vec<Vec<Token>>,
    ngrams: HashMap<Token, Vec<Vec<Token>>>,
}

impl Levels {
    fn step(&mut self, language: Language, text: &[Token]) {
        let (root, is_whole) = (text[text.len() - 1], self.levels.len() == self.shape.ngram - 1);
        let first: Vec<Token> = std::iter::once(root).chain(self.levels[0].iter().copied()).collect();
        let column = |at: usize| self.levels[1..].iter().map(move |level| level[at]);
        let result = |at: usize| {
            let seen: Vec<Token> = text.iter().chain(&first[1..=at]).copied().chain(column(at)).collect();
            language(&seen)
        };
        let results: Vec<Token> = (0..first.len()).map(result).collect();
        if !is_whole {
            self.levels.iter_mut().for_each(|level| *level = level[1..].to_vec());
            self.levels.push(results[1..].to_vec());
            return;
        }
        for (at, &key) in first.iter().enumerate() {
            let ngram: Vec<Token> = column(at).chain([results[at]]).collect();
            let known = self.ngrams.entry(key).or_default();
            known.retain(|other| *other != ngram);
            known.insert(0, ngram);
            known.truncate(self.shape.guesses);
        }
        self.levels.push(results);
        self.levels.remove(0);
        self.levels[0].remove(0);
    }
}

#[test]
fn window_and_ngrams_are_the_published_codes() {
    for (window, ngram, guesses) in [(1, 2, 1), (2, 3, 2), (5, 7, 7), (7, 5, 7), (4, 2, 3), (1, 6, 4), (6, 4, 1)] {
        for language in [repetitive as Language, cyclic] {
            let mut run = Run::new(language, lookahead(window, ngram, guesses), &[3, 1, 6, 2, 5, 4]);
            let shape = Shape { window, ngram, guesses };
            let mut levels: Option<Levels> = None;
            for step in 0..40 {
                let before = run.text.clone();
                let start = run.columns();
                run.step(1000, 1000);
                let begin = || {
                    // The columns are begun within the first step.
                    let mut fresh = Run::new(language, lookahead(window, ngram, guesses), &before);
                    fresh.context.draft(0, &mut fresh.tree);
                    let first = fresh.columns().iter().skip(1).map(|column| column[0]).collect();
                    Levels { shape, levels: vec![first], ngrams: HashMap::new() }
                };
                let levels = levels.get_or_insert_with(begin);
                levels.step(language, &before);
                let what = format!("{shape:?}, step {step}, from {start:?}");
                assert_eq!(run.lookahead().ngrams, levels.ngrams, "{what}");
                let column = |(at, column): (usize, &Vec<Token>)| {
                    let first = (at > 0).then(|| levels.levels[0][at - 1]);
                    let rest = levels.levels[1..].iter().map(|level| level[at]);
                    assert!(first.into_iter().chain(rest).eq(column[usize::from(at == 0)..].iter().copied()), "{what}");
                };
                run.columns().iter().enumerate().for_each(column);
            }
            assert_eq!(run.lookahead().columns.len(), window);
        }
    }
}

#[test]
fn columns_that_were_cut_stay_as_they_are() {
    let mut run = Run::new(repetitive, lookahead(4, 4, 3), &[4, 1, 2]);
    for _ in 0..3 {
        run.step(100, 100);
    }
    let whole = run.columns();
    assert!(whole.len() == 4 && whole.iter().all(|column| column.len() == 3));
    // Whatever is left of the tree, a column has either moved on by one place or not at all, and no later one has.
    for kept in 0..12 {
        let mut cut = Run { context: run.context.clone(), text: run.text.clone(), tree: DraftTree::new(), ..run };
        cut.step(100, kept);
        let moved: Vec<bool> = cut.columns().iter().zip(&whole).map(|(now, before)| now != before).collect();
        for (now, before) in cut.columns().iter().zip(&whole) {
            assert!(now == before || now[..2] == before[1..], "{kept}: {now:?} {before:?}");
        }
        assert!(moved.windows(2).all(|pair| pair[0] >= pair[1]), "{kept}: {moved:?}");
    }
}

#[test]
fn a_tree_of_another_kind_teaches_nothing() {
    let mut run = Run::new(cyclic, lookahead(2, 3, 2), &[1]);
    for _ in 0..3 {
        run.step(100, 100);
    }
    let before = run.columns();
    run.context.observe(&DraftTree::new(), |_| unreachable!("there is no node"));
    run.context.observe(&DraftTree::chain(&[3, 9, 9]), |_| unreachable!("no column is there"));
    assert_eq!(run.columns(), before);
    // Other drafters keep nothing.
    let mut other = DraftContext::new(Drafter::default(), None, END);
    other.observe(&DraftTree::chain(&[1]), |_| unreachable!("nobody asks"));
}

#[test]
fn a_prompt_of_nothing_to_draft_gives_no_window() {
    let mut context = DraftContext::new(lookahead(3, 3, 3), None, END);
    context.extend(&[END, END]);
    let mut tree = DraftTree::new();
    context.draft(50, &mut tree);
    assert_eq!(tree.drafted(), 0);
    context.observe(&tree, |_| 5);
    context.extend(&[5]);
    context.draft(50, &mut tree);
    assert_eq!(tree.drafted(), 0);
}

#[test]
fn the_window_is_filled_from_all_of_the_prompt() {
    let prompt: Vec<Token> = (1..=100).collect();
    let run = {
        let mut run = Run::new(cyclic, lookahead(8, 4, 3), &prompt);
        run.context.draft(0, &mut run.tree);
        run
    };
    let tokens: BTreeSet<Token> = run.columns().iter().map(|column| column[0]).collect();
    assert_eq!(tokens.len(), 10);
    for tenths in 0..5 {
        assert!(tokens.range(1 + 20 * tenths..=20 + 20 * tenths).next().is_some(), "{tokens:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    // The choices are anybody's, ends of texts and tokens beyond the vocabulary among them, as are the texts.
    #[test]
    fn trees_are_well_formed_whatever_is_observed(
        (window, ngram, guesses) in (0..9usize, 0..7usize, 0..5usize),
        prompt in prop::collection::vec(0..12u32, 1..12),
        steps in prop::collection::vec((0..50usize, 0..50usize, any::<u32>()), 1..20),
        has_pool in any::<bool>(),
    ) {
        // The pool's vocabulary.
        let pool = has_pool.then(|| pool_of(&[vec![1, 2, 3]]));
        let vocab_size = pool.as_ref().map_or(u32::MAX, |pool| pool.meta().vocab_size);
        let mut contexts = [(); 2].map(|()| DraftContext::new(lookahead(window, ngram, guesses), pool.clone(), END));
        contexts.iter_mut().for_each(|context| context.extend(&prompt));
        for (max_nodes, kept, seed) in steps {
            let mut trees = [(); 2].map(|()| DraftTree::new());
            contexts.iter_mut().zip(&mut trees).for_each(|(context, tree)| context.draft(max_nodes, tree));
            let [tree, twin] = &mut trees;
            prop_assert_eq!(&*tree, &*twin);
            prop_assert!(tree.drafted() <= max_nodes);
            prop_assert!(tree.probabilities().windows(2).all(|pair| pair[0] >= pair[1]));
            for node in 0..tree.len() {
                let children: Vec<usize> = tree.children(node).collect();
                let distinct: BTreeSet<Token> = children.iter().map(|&child| tree.tokens()[child]).collect();
                prop_assert_eq!(distinct.len(), children.len());
                if node > 0 {
                    prop_assert!(tree.tokens()[node] < vocab_size);
                    prop_assert!(tree.tokens()[node] != END || children.is_empty());
                }
            }
            tree.truncate(kept);
            let choice = |node: usize| match (seed >> (node % 8)) % 16 {
                15 => Prediction::default().choice.token,
                14 => vocab_size,
                token => token,
            };
            let next = choice(0).min(20);
            for context in &mut contexts {
                context.observe(tree, choice);
                context.extend(&[next]);
            }
            let lookahead = contexts[0].lookahead().unwrap();
            let Shape { window, ngram, guesses } = lookahead.shape;
            prop_assert!(lookahead.columns.len() <= window + ngram - 2);
            for known in lookahead.ngrams.values() {
                let distinct: BTreeSet<&Vec<Token>> = known.iter().collect();
                prop_assert_eq!(distinct.len(), known.len());
                prop_assert!(known.len() <= guesses && known.iter().all(|tokens| tokens.len() == ngram - 1));
            }
        }
    }
}
