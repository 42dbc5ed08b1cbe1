//! Texts under a constraint equal those of the naive decoder that masks every place, and all of them can be read.

use laser_decode::{Candidate, Drafter, Noise, Sampling, Verification, arrival};
use laser_engine::{Engine, EngineOptions, FakeEngine, FakeOptions};
use laser_grammar::{Grammar, Next};
use laser_schema::Constraint;
use laser_schema::audit::Proposer;
use laser_worker::budget::Budget;
use laser_worker::cost::StepCost;
use laser_worker::generate::{DraftModel, GenerateOptions, Generated, Generator, Request, StopReason, TextError};
use serde_json::{Value, json};

use crate::support::*;

fn person() -> Constraint {
    Constraint::of_schema(json!({
        "type": "object",
        "properties": {
            "taste": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["drama", "comedy", "crime"]}, "maxItems": 3},
            "sure": {"type": "boolean"}
        },
        "required": ["taste", "age", "likes", "sure"],
        "additionalProperties": false
    }))
}

fn constraints() -> [Constraint; 3] {
    [
        person(),
        Constraint::Regex("(yes|no): [a-zA-Z ,]{3,40}\\.".into()),
        Constraint::Grammar("start: item (\", \" item)*\nitem: /[a-z]{1,8}/ | NUMBER\nNUMBER: /[0-9]{1,3}/\n".into()),
    ]
}

fn compile(constraint: &Constraint) -> Grammar {
    Grammar::compile(constraint, &tokenizer(), &[END]).unwrap()
}

fn long() -> GenerateOptions {
    GenerateOptions { max_new_tokens: 60, ..options() }
}

/// Forward by forward: the choice among all tokens that the mask has, and what is forced without a choice.
fn reference(
    grammar: &Grammar,
    key: u64,
    engine: &mut dyn Engine,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Result<Vec<u32>, usize> {
    let vocabulary = engine.info().vocab_size;
    let mut naive = Naive::new(engine, vocabulary);
    let mut parser = grammar.parser();
    let mut top = naive.feed_all(prompt);
    let mut text = Vec::new();
    loop {
        let token = match parser.next_token().unwrap() {
            Next::Forced(token) => token,
            Next::End => END,
            Next::Free => {
                let mask = parser.mask().unwrap();
                let has = |token: u32| mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1);
                top.retain(|candidate| has(candidate.token));
                // The fake gives its last tokens no probability at all.
                top.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability).then(a.token.cmp(&b.token)));
                choice(&top, options.sampling, Noise::new(key).after(text.len()))
            }
        };
        text.push(token);
        match advance(&mut parser, &mut text, options) {
            Some(end) => return end,
            None => top = naive.feed(token),
        }
    }
}

/// The most probable of the allowed tokens, or the first of them to arrive.
fn choice(allowed: &[Candidate], sampling: Option<Sampling>, noise: Noise) -> u32 {
    let Some(sampling) = sampling else {
        return allowed[0].token;
    };
    let drawn = &allowed[..allowed.len().min(sampling.top_k().map_or(usize::MAX, |k| k as usize))];
    let log = |candidate: &Candidate| candidate.log_probability.max(f32::MIN);
    let time = |candidate: &Candidate| {
        let weight = (log(candidate) - log(&allowed[0])) / sampling.temperature();
        arrival(noise.word(candidate.token), weight.exp())
    };
    drawn.iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap().token
}

/// The end of the text, if it ends with its last token.
fn advance(
    parser: &mut laser_grammar::Parser,
    text: &mut Vec<u32>,
    options: &GenerateOptions,
) -> Option<Result<Vec<u32>, usize>> {
    let last = *text.last().unwrap();
    if last == END {
        return Some(Ok(std::mem::take(text)));
    }
    parser.push(last).unwrap();
    let whole = parser.may_end().unwrap();
    let ends = text.len() == options.max_new_tokens;
    ends.then(|| if whole { Ok(std::mem::take(text)) } else { Err(text.len()) })
}

#[track_caller]
fn assert_is(got: &Result<Generated, TextError>, expected: &Result<Vec<u32>, usize>, what: &str) {
    match (got, expected) {
        (Ok(got), Ok(expected)) => {
            assert_eq!(got.tokens, *expected, "{what}");
            let forced = got.origins.iter().filter(|origin| origin.source == Proposer::Constraint).count();
            assert_eq!((got.forced, got.origins.len()), (forced as u64, got.tokens.len()), "{what}");
            let accepted = got.step_accepted.iter().sum::<u32>() as usize;
            let without_bonus = accepted + forced + got.step_accepted.len() - got.tokens.len();
            assert!(without_bonus <= 1, "{what}: {got:?}");
        }
        (Err(TextError::CutOff { tokens }), Err(expected)) => assert_eq!(tokens, expected, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

fn generator(engine: Box<dyn Engine>, options: GenerateOptions, grammar: &Grammar) -> Generator {
    Generator::new(engine, tokenizer(), options).with_grammar(Some(grammar.clone()))
}

fn real() -> Box<dyn Engine> {
    laser_engine::load(&EngineOptions::new(fixture())).unwrap()
}

/// The texts of a night before, so that drafts are accepted: those that were whole.
fn known(expected: &[Result<Vec<u32>, usize>]) -> Vec<Vec<u32>> {
    expected.iter().filter_map(|text| text.clone().ok()).collect()
}

#[test]
fn strict_texts_equal_masked_greedy_decoding_whatever_the_setting() {
    let prompts = prompts();
    for constraint in constraints() {
        let grammar = compile(&constraint);
        let expected: Vec<_> =
            prompts.iter().map(|prompt| reference(&grammar, 0, &mut fake(), prompt, &long())).collect();
        let pool = pool(&[known(&expected), vec![tokens(5, 40)]].concat());
        for drafter in drafters() {
            for (nodes, batch, step_tokens, with_pool) in
                [(0, 1, 64, false), (4, 3, 7, true), (16, 8, 64, true), (64, 4, 200, false), (64, 2, 64, true)]
            {
                let options = GenerateOptions { drafter, nodes, batch, step_tokens, ..long() };
                let what = format!("{constraint:?} {options:?}");
                let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                    pool: with_pool.then(|| pool.clone()),
                    previous: expected[id].clone().unwrap_or_default(),
                    ..request(id as u64, prompt)
                });
                let mut generator = generator(Box::new(fake()), options, &grammar);
                for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
                    assert_is(got, expected, &what);
                }
            }
        }
    }
}

#[test]
fn texts_of_a_model_are_the_masked_ones_greedy_and_drawn_in_every_tree_and_batch() {
    let mut engine = real();
    let prompt = |text: &str| tokenizer().encode(text, true).unwrap();
    let prompts: Vec<Vec<u32>> =
        ["This viewer", "Comedies and dramas:", "A film of 1994, crime", "x"].map(prompt).into();
    let draws = [Sampling::new(0.9, None, 1.0), Sampling::new(1.2, Some(20), 1.0)];
    let samplings = [None].into_iter().chain(draws.map(Result::unwrap).map(Some));
    for (sampling, constraint) in samplings.flat_map(|s| constraints().map(|constraint| (s, constraint))) {
        let grammar = compile(&constraint);
        let base = GenerateOptions { sampling, max_new_tokens: 90, step_tokens: 400, ..options() };
        let expected: Vec<_> =
            (0..).zip(&prompts).map(|(key, prompt)| reference(&grammar, key, engine.as_mut(), prompt, &base)).collect();
        assert!(expected.iter().any(Result::is_ok), "{constraint:?}: {expected:?}");
        let pool = pool(&[known(&expected), vec![tokens(5, 40)]].concat());
        for (nodes, batch, budget) in [(0, 1, false), (8, 2, false), (32, 4, true)] {
            let cost = || StepCost::new(vec![(1.0, 1e-3), (64.0, 3e-3)], 0.0);
            let options = GenerateOptions { nodes, batch, budget: budget.then(|| Budget::new(cost())), ..base.clone() };
            let what = format!("{constraint:?} {sampling:?} {nodes} {batch}");
            for plain in [false, true] {
                let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                    plain,
                    pool: Some(pool.clone()),
                    ..request(id, prompt)
                });
                let mut generator = generator(engine, options.clone(), &grammar);
                let got = run(&mut generator, requests);
                got.iter().zip(&expected).for_each(|(got, expected)| assert_is(got, expected, &what));
                engine = generator.into_engine();
            }
        }
    }
}

/// Every text of a policy that accepts more than the model's own choices is one of the grammar.
#[test]
fn relaxed_texts_stay_within_the_grammar() {
    let prompts = prompts();
    let policies = [
        (Verification::relaxed(4, 0.0).unwrap(), None),
        (Verification::conditional(0.0, 0.02, true).unwrap(), None),
        (Verification::typical(0.01, 0.3).unwrap(), Some(Sampling::new(1.3, None, 1.0).unwrap())),
    ];
    for (verification, sampling) in policies {
        let mut relaxed = 0;
        for constraint in constraints() {
            let grammar = compile(&constraint);
            let options = GenerateOptions { verification, sampling, nodes: 64, step_tokens: 256, ..long() };
            let drawn = GenerateOptions { sampling: Some(Sampling::new(1.0, None, 1.0).unwrap()), ..long() };
            let drafts: Vec<_> = (0..)
                .zip(&prompts)
                .map(|(key, prompt)| reference(&grammar, key, &mut fake(), prompt, &drawn))
                .collect();
            let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                pool: Some(pool(&[known(&drafts), vec![tokens(5, 40)]].concat())),
                ..request(id, prompt)
            });
            let mut generator = generator(Box::new(fake()), options, &grammar);
            for text in run(&mut generator, requests).into_iter().flatten() {
                relaxed += text.relaxed;
                let mut parser = grammar.parser();
                for &token in &text.tokens {
                    assert!(parser.allows(token).unwrap(), "{verification:?} {constraint:?}: {}", text.text);
                    if token != END {
                        parser.push(token).unwrap();
                    }
                }
                assert!(parser.may_end().unwrap(), "{}", text.text);
            }
        }
        assert!(relaxed > 0, "{verification:?}");
    }
}

#[test]
fn a_draft_model_changes_no_text_under_a_constraint() {
    let prompts = prompts();
    let grammar = compile(&person());
    let expected: Vec<_> = prompts.iter().map(|prompt| reference(&grammar, 0, &mut fake(), prompt, &long())).collect();
    for options_of_draft in [fake_options(), FakeOptions { reads_features: true, ..fake_options() }] {
        let draft = DraftModel::new(Box::new(FakeEngine::new(options_of_draft)), 3, None);
        let options = GenerateOptions { nodes: 16, batch: 3, step_tokens: 128, ..long() };
        let mut generator =
            generator(Box::new(fake()), options, &grammar).with_draft_sources(vec![draft.into_source()]);
        let requests = (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt));
        for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
            assert_is(got, expected, "draft model");
        }
    }
}

#[test]
fn every_text_of_a_schema_can_be_read_and_forced_tokens_take_no_forward() {
    let grammar = compile(&person());
    let options = GenerateOptions { max_new_tokens: 120, drafter: Drafter::None, ..options() };
    let mut generator = generator(real(), options, &grammar);
    let prompt = tokenizer().encode("This viewer", true).unwrap();
    let text = run(&mut generator, [request(0, &prompt)]).remove(0).unwrap();
    let value: Value = serde_json::from_str(&text.text).unwrap();
    assert!(value["taste"].is_string() && value["sure"].is_boolean(), "{value}");
    assert!(value["age"].as_u64().is_some_and(|age| age <= 120), "{value}");
    assert_eq!(value.as_object().unwrap().keys().collect::<Vec<_>>(), ["taste", "age", "likes", "sure"]);
    assert_eq!(text.stop, StopReason::End);
    assert!(text.forced > 10, "{text:?}");
    assert_eq!(text.step_accepted.len() + usize::try_from(text.forced).unwrap(), text.tokens.len());
}

#[test]
fn a_text_without_choices_takes_one_forward() {
    let grammar = compile(&Constraint::of_schema(json!({"const": {"kind": "film", "n": 3}})));
    let mut generator = generator(Box::new(fake()), long(), &grammar);
    for text in run(&mut generator, prompts().iter().map(|prompt| request(0, prompt))) {
        let text = text.unwrap();
        assert_eq!((text.text.as_str(), text.step_accepted.len()), ("{\"kind\": \"film\", \"n\": 3}", 1));
    }
}

#[test]
fn a_text_that_is_cut_off_where_it_may_end_is_whole() {
    let grammar = compile(&Constraint::Regex("[a-z ]+".into()));
    let options = GenerateOptions { max_new_tokens: 5, ..options() };
    let mut generator = generator(Box::new(fake()), options, &grammar);
    for text in run(&mut generator, prompts().iter().map(|prompt| request(0, prompt))) {
        let text = text.unwrap();
        assert!(text.stop == StopReason::End || text.tokens.len() == 5, "{text:?}");
    }
}
