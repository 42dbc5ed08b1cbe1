//! Draft models change how fast texts come to be, and never which.

use std::sync::{Arc, Mutex};

use laser_decode::{Drafter, Draw, Noise, Sampling};
use laser_engine::{Engine, FakeEngine, FakeOptions};
use laser_schema::audit::Proposer;
use laser_worker::budget::Budget;
use laser_worker::cost::StepCost;
use laser_worker::generate::{DraftModel, GenerateOptions, Generated, Generator, Request, TextGenerator as _};

use crate::support::*;
use crate::watch::{Log, Mischief, Watched};

/// A draft model of this language, watched.
fn model(fake: FakeOptions, mischief: Mischief, forwards: usize) -> (DraftModel, Arc<Mutex<Log>>) {
    let (engine, log) = Watched::new(FakeEngine::new(fake), mischief);
    (DraftModel::new(Box::new(engine), forwards, None), log)
}

/// A language that has nothing in common with the target's.
fn stranger() -> FakeOptions {
    FakeOptions { seed: 77, ..fake_options() }
}

/// The target's language, drafted from the target's features.
fn eagle() -> FakeOptions {
    FakeOptions { reads_features: true, ..fake_options() }
}

/// The same by heads of which each tells one token further ahead.
fn medusa(heads: usize) -> FakeOptions {
    FakeOptions { heads: Some(heads), ..fake_options() }
}

/// A head over a draft model's features that says anything, watched.
fn acceptance_head() -> (Box<dyn Engine>, Arc<Mutex<Log>>) {
    let head = FakeOptions { vocab_size: 2, heads: Some(1), eos_probability: 0.5, ..fake_options() };
    let (engine, log) = Watched::new(FakeEngine::new(head), Mischief::default());
    (Box::new(engine), log)
}

fn generator(model: DraftModel, options: GenerateOptions) -> Generator {
    Generator::new(Box::new(fake()), tokenizer(), options).with_draft_sources(vec![model.into_source()])
}

fn cost() -> StepCost {
    StepCost::new([1.0, 4.0, 16.0, 64.0].map(|tokens| (tokens, 1e-3 + 1e-5 * tokens)).to_vec(), 0.0)
}

/// Accepted tokens per forward.
fn aal(texts: &[Generated]) -> f64 {
    let steps: usize = texts.iter().map(|text| text.step_accepted.len()).sum();
    let accepted: u32 = texts.iter().flat_map(|text| &text.step_accepted).sum();
    f64::from(accepted) / steps as f64
}

#[test]
fn texts_are_the_naive_decoders_whatever_drafts() {
    let prompts = prompts();
    for sampling in [None, Some(Sampling::new(0.8, Some(50), 0.95).unwrap())] {
        let of = |key, p: &Vec<u32>| naive_of(key, &mut fake(), p, &GenerateOptions { sampling, ..options() });
        let expected: Vec<NaiveText> = (0..).zip(&prompts).map(|(key, p)| of(key, p)).collect();
        let pool = pool(&expected.iter().map(|e| e.tokens.clone()).collect::<Vec<_>>());
        let languages =
            [vec![fake_options()], vec![stranger()], vec![eagle()], vec![medusa(3)], vec![eagle(), stranger()]];
        for (languages, drafter) in languages.iter().flat_map(|l| drafters().map(move |d| (l, d))) {
            for (batch, step_tokens, nodes, forwards) in
                [(1, 64, 16, 1), (4, 64, 16, 3), (3, 7, 4, 2), (8, 200, 64, 20)]
            {
                for adapts in [false, true] {
                    let budget = adapts.then(|| Budget::new(cost()));
                    let options = GenerateOptions { drafter, nodes, batch, step_tokens, sampling, budget, ..options() };
                    let what = format!("{options:?} {forwards}");
                    let of = |language: &FakeOptions| model(language.clone(), Mischief::default(), forwards);
                    let (drafts, logs): (Vec<_>, Vec<_>) = languages.iter().map(of).unzip();
                    let mut generator = Generator::new(Box::new(fake()), tokenizer(), options);
                    generator = generator.with_draft_sources(drafts.into_iter().map(DraftModel::into_source).collect());
                    let requests = (0..)
                        .zip(&prompts)
                        .map(|(id, prompt)| Request { pool: Some(pool.clone()), ..request(id, prompt) });
                    for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
                        assert_naive(got.as_ref().unwrap(), expected, &what);
                    }
                    for log in logs {
                        let log = log.lock().unwrap();
                        assert!(log.open.is_empty() && !log.steps.is_empty(), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_model_that_drafts_for_itself_is_always_right() {
    let options = GenerateOptions { drafter: Drafter::None, nodes: 1, batch: 3, step_tokens: 512, ..options() };
    let prompts = prompts();
    let drafted = |language| {
        let mut generator = generator(model(language, Mischief::default(), 1).0, options.clone());
        let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p)));
        texts.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    for text in drafted(fake_options()) {
        // Every forward accepts its one node, but the last one of a text may have had none.
        let (_, all) = text.step_accepted.split_last().unwrap();
        assert!(all.iter().all(|&accepted| accepted == 1), "{:?}", text.step_accepted);
        let proposed = text.origins.iter().filter(|origin| origin.source == Proposer::DraftModel).count();
        assert_eq!(proposed, text.step_accepted.iter().sum::<u32>() as usize);
    }
    assert!(aal(&drafted(stranger())) < 0.02);
}

/// The fake fails where a feature is not that of the token before, and the generator then goes on without it.
#[test]
fn a_layer_that_reads_features_is_told_those_of_all_tokens() {
    let prompts: Vec<Vec<u32>> = prompts().iter().map(|prompt| [&tokens(5, 20), prompt.as_slice()].concat()).collect();
    for (step_tokens, forwards) in [(512, 1), (9, 1), (512, 3), (30, 3)] {
        let what = format!("{step_tokens} {forwards}");
        let (model, log) = model(eagle(), Mischief::default(), forwards);
        let options = GenerateOptions {
            drafter: Drafter::None,
            nodes: forwards,
            batch: 3,
            step_tokens,
            sampling: None,
            ..options()
        };
        let mut generator = generator(model, options);
        generator.share_prefix(&prompts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt)));
        let mut total = 0;
        for (text, prompt) in texts.into_iter().map(Result::unwrap).zip(&prompts) {
            assert_naive(&text, &naive(&mut fake(), prompt, &generator.options().clone()), &what);
            // The first step is that of the prompt, whose last feature is not known before; the last one ends a text.
            let accepted = &text.step_accepted;
            let between = accepted.get(1..accepted.len() - 1).unwrap_or_default();
            let sum: u32 = between.iter().sum();
            // Of several nodes one may be a sibling of the right one.
            let least = if forwards == 1 { 10 } else { 6 * forwards };
            assert!(step_tokens < 100 || sum as usize * 10 >= between.len() * least, "{what}: {accepted:?}");
            total += sum;
        }
        assert!(total > 20, "{what}: {total}");
        generator.reset();
        assert!(log.lock().unwrap().open.is_empty());
    }
}

/// Tokens that a draft model read, and for each of its sequences those that it read first.
fn read(log: &Mutex<Log>) -> (usize, Vec<Vec<u32>>) {
    let log = log.lock().unwrap();
    (log.steps.iter().flatten().sum(), log.fed.clone())
}

#[test]
fn samples_of_a_prompt_draft_from_all_of_it_and_a_model_reads_it_once() {
    let prompt = tokens(3, 30);
    let sampling = Some(Sampling::new(1.0, None, 1.0).unwrap());
    let options =
        GenerateOptions { drafter: Drafter::None, nodes: 1, batch: 8, step_tokens: 512, sampling, ..options() };
    let expected: Vec<NaiveText> = (0..5).map(|key| naive_of(key, &mut fake(), &prompt, &options)).collect();
    // Of what the target computed before there was a draft model, a layer is never told the features.
    let prefix = [&prompt[..20], &tokens(4, 10)].concat();
    let cases = [fake_options(), eagle(), medusa(3)].map(|language| [(language.clone(), false), (language, true)]);
    for (language, is_late) in cases.into_iter().flatten() {
        let what = format!("{language:?} {is_late}");
        let reads_features = language.reads_features || language.heads.is_some();
        let first = if reads_features { 1 + if is_late { 20 } else { 0 } } else { 0 };
        let (model, log) = model(language, Mischief::default(), 1);
        let mut generator = Generator::new(Box::new(fake()), tokenizer(), options.clone());
        if is_late {
            generator.share_prefix(&[&prompt, &prefix]).unwrap();
        }
        generator.swap_draft_sources(&mut vec![model.into_source()]);
        let texts = run(&mut generator, (0..5).map(|id| request(id, &prompt)));
        for (got, expected) in texts.iter().zip(&expected) {
            assert_naive(got.as_ref().unwrap(), expected, &what);
        }
        let (tokens, begun) = read(&log);
        assert!(begun.len() == 5 && begun.iter().all(|begun| begun.starts_with(&prompt[first..])), "{what}: {begun:?}");
        let texts: usize = expected.iter().map(|text| text.tokens.len()).sum();
        // The last token of the prompt is each text's own. A layer's first sample has read nothing when others begin.
        assert!(reads_features || tokens < prompt.len() + 4 + texts, "{what}: {tokens} of {texts}");
        assert!(log.lock().unwrap().open.is_empty());
    }
}

#[test]
fn what_prompts_begin_with_a_draft_model_reads_once() {
    let shared = tokens(5, 40);
    let prompts: Vec<Vec<u32>> = (0..4).map(|seed| [shared.clone(), tokens(seed, 6)].concat()).collect();
    for step_tokens in [512, 11] {
        let options =
            GenerateOptions { drafter: Drafter::None, nodes: 1, batch: 3, step_tokens, sampling: None, ..options() };
        for (language, first) in [(fake_options(), 0), (eagle(), 1), (medusa(3), 1)] {
            let (model, log) = model(language, Mischief::default(), 1);
            let mut generator = generator(model, options.clone());
            generator.share_prefix(&prompts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt)));
            let mut most = shared.len();
            for (got, prompt) in texts.iter().zip(&prompts) {
                let expected = naive(&mut fake(), prompt, &options);
                assert_naive(got.as_ref().unwrap(), &expected, &format!("{step_tokens} {first}"));
                most += 6 + expected.tokens.len();
            }
            let (tokens, begun) = read(&log);
            let expected = std::iter::once(&shared).chain(&prompts);
            assert!(begun.iter().zip(expected).all(|(begun, prompt)| begun.starts_with(&prompt[first..])), "{begun:?}");
            assert!(tokens <= most, "{tokens}, at most {most}");
            generator.reset();
            assert!(log.lock().unwrap().open.is_empty());
        }
    }
}

/// In a language in which the last token decides, heads know how a greedy text goes on.
#[test]
fn heads_draft_as_many_tokens_as_they_tell_ahead_in_one_forward() {
    let markov = |fake: FakeOptions| FakeOptions { order: 1, ..fake };
    let options = GenerateOptions { drafter: Drafter::None, batch: 3, step_tokens: 512, ..options() };
    let prompts = prompts();
    // With no more nodes than heads, siblings take some until it is known how sure the heads may be.
    let cases = [(1, 1, 1), (2, 2, 2), (5, 5, 3), (1, 20, 1), (2, 20, 2), (5, 20, 5)];
    for ((heads, nodes, least), is_measured) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let (mut draft, _) = model(markov(medusa(heads)), Mischief::default(), 7);
        if is_measured {
            draft = draft.with_measured_tree();
        }
        let target = Box::new(FakeEngine::new(markov(fake_options())));
        let options = GenerateOptions { nodes, ..options.clone() };
        let mut generator = Generator::new(target, tokenizer(), options).with_draft_sources(vec![draft.into_source()]);
        let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt)));
        for text in texts.into_iter().map(Result::unwrap) {
            let (last, accepted) = text.step_accepted.split_last().unwrap();
            let between = accepted.get(1..).unwrap_or_default();
            let is_foreseen = |&accepted: &u32| (least..=heads).contains(&(accepted as usize));
            assert!(between.iter().all(is_foreseen) && *last as usize <= heads, "{heads} {nodes}: {between:?} {last}");
        }
    }
}

#[test]
fn further_forwards_draft_deeper() {
    let prompts = prompts();
    let depth = |forwards| {
        let options = GenerateOptions { drafter: Drafter::None, nodes: 24, step_tokens: 200, ..options() };
        let mut generator = generator(model(fake_options(), Mischief::default(), forwards).0, options);
        let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p)));
        let texts: Vec<Generated> = texts.into_iter().map(Result::unwrap).collect();
        assert!(texts.iter().flat_map(|text| &text.step_accepted).all(|&accepted| accepted as usize <= forwards));
        aal(&texts)
    };
    let [one, two, four] = [1, 2, 4].map(depth);
    assert!(one > 0.9 && two > one + 0.5 && four > two + 0.3, "{one} {two} {four}");
}

/// Whoever knows the target's distribution knows under its noise what it is going to draw.
#[test]
fn drawn_texts_are_foreseen_by_a_model_that_drafts_for_itself() {
    let sampling = Sampling::new(1.0, None, 1.0).unwrap();
    let options = GenerateOptions { drafter: Drafter::None, nodes: 1, sampling: Some(sampling), batch: 8, ..options() };
    let prompt = tokens(5, 4);
    let drafted = |language| {
        let mut generator = generator(model(language, Mischief::default(), 1).0, options.clone());
        let texts = run(&mut generator, (0..200).map(|id| request(id, &prompt)));
        texts.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let (mut steps, mut accepted, mut most) = (0.0, 0.0, 0.0);
    for (text, key) in drafted(fake_options()).iter().zip(0..) {
        let mut engine = fake();
        let noise = Noise::new(key).before(prompt.len() - 1);
        let mut naive = Naive::drawing(&mut engine, 1, Draw { sampling, noise });
        let mut top = naive.feed_all(&prompt);
        let mut rest = text.tokens.as_slice();
        for &step in &text.step_accepted {
            // Nothing is drafted where one token ends the text.
            if text.tokens.len() - rest.len() + 1 < 40 {
                most += f64::from(top[0].log_probability.exp());
                accepted += f64::from(step);
                steps += 1.0;
            }
            let emitted = (step as usize + 1).min(rest.len());
            for &token in &rest[..emitted] {
                top = naive.feed(token);
            }
            rest = &rest[emitted..];
        }
    }
    // The most probable token would be drawn in `most` of the steps.
    assert!(accepted > 0.8 * steps && most < 0.75 * steps && steps > 700.0, "{accepted} {most} of {steps}");
    assert!(aal(&drafted(stranger())) < 0.1);
}

#[test]
fn without_room_or_after_a_failure_texts_come_without_the_draft_model() {
    let prompts = prompts();
    let small = FakeOptions { max_positions: 20, ..fake_options() };
    let cases = [
        (fake_options(), Mischief { fail_from_step: Some(3), ..Mischief::default() }),
        (fake_options(), Mischief { fail_on_commit: Some(5), ..Mischief::default() }),
        (fake_options(), Mischief { slots_max: Some(2), ..Mischief::default() }),
        (small, Mischief::default()),
    ];
    for (language, mischief) in cases {
        let what = format!("{mischief:?}");
        let mut generator = generator(model(language, mischief, 2).0, options());
        let requests = (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt));
        for (got, prompt) in run(&mut generator, requests).iter().zip(&prompts) {
            assert_naive(got.as_ref().unwrap(), &naive(&mut fake(), prompt, &options()), &what);
        }
    }
}

/// What a head says may be anything: it decides how much is drafted, and no text.
#[test]
fn an_acceptance_head_is_asked_of_what_the_draft_model_reads_and_changes_no_text() {
    let prompts = prompts();
    for (batch, step_tokens, nodes, forwards) in [(1, 64, 16, 1), (4, 200, 16, 3), (3, 9, 5, 2)] {
        let what = format!("{batch} {step_tokens} {nodes} {forwards}");
        let (draft, read) = model(fake_options(), Mischief::default(), forwards);
        let (head, judged) = acceptance_head();
        let options = GenerateOptions { nodes, batch, step_tokens, ..options() };
        let mut generator = generator(draft.with_acceptance_head(head, [1.2, 0.1]), options.clone());
        let requests = (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt));
        for (got, prompt) in run(&mut generator, requests).iter().zip(&prompts) {
            assert_naive(got.as_ref().unwrap(), &naive(&mut fake(), prompt, &options), &what);
        }
        let [read, judged] = [read, judged].map(|log| log.lock().unwrap().steps.concat().into_iter().sum::<usize>());
        let texts: usize = prompts.iter().map(|prompt| prompt.len() + 40).sum();
        // All that is read but the texts themselves.
        assert!(judged > 0 && judged < read && read - judged <= texts, "{what}: {judged} of {read}, {texts}");
    }
}

#[test]
fn the_trees_of_several_draft_models_are_merged() {
    let prompts = prompts();
    let options = GenerateOptions { drafter: Drafter::None, nodes: 4, batch: 3, step_tokens: 512, ..options() };
    let accepted = |languages: &[FakeOptions]| {
        let of = |language: &FakeOptions| model(language.clone(), Mischief::default(), 1).0;
        let drafts = languages.iter().map(of).map(DraftModel::into_source).collect();
        let mut generator = Generator::new(Box::new(fake()), tokenizer(), options.clone()).with_draft_sources(drafts);
        let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p)));
        aal(&texts.into_iter().map(Result::unwrap).collect::<Vec<_>>())
    };
    let [own, wrong, both] = [&[fake_options()][..], &[stranger()], &[stranger(), fake_options()]].map(accepted);
    // A wrong one takes some of the nodes until it is known to be wrong.
    assert!(wrong < 0.1 && own > 0.9 && both > 0.8 * own, "{own} {wrong} {both}");
}

#[test]
fn of_several_draft_models_the_one_that_fails_is_dropped() {
    let prompts = prompts();
    let options = GenerateOptions { drafter: Drafter::None, nodes: 4, batch: 3, step_tokens: 512, ..options() };
    let (good, log) = model(fake_options(), Mischief::default(), 1);
    let (bad, _) = model(stranger(), Mischief { fail_from_step: Some(2), ..Mischief::default() }, 1);
    let mut generator = Generator::new(Box::new(fake()), tokenizer(), options)
        .with_draft_sources(vec![bad.into_source(), good.into_source()]);
    let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p)));
    for (got, prompt) in texts.iter().zip(&prompts) {
        assert_naive(got.as_ref().unwrap(), &naive(&mut fake(), prompt, &generator.options().clone()), "dropped");
    }
    assert!(aal(&texts.into_iter().map(Result::unwrap).collect::<Vec<_>>()) > 0.9);
    assert!(log.lock().unwrap().open.is_empty());
}
