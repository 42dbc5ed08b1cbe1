//! Strict texts equal the naive decoder's; relaxed ones keep their rule.

use std::collections::HashSet;

use laser_decode::{Candidate, Drafter, Draw, Noise, Sampling, Verification, arrival};
#[cfg(feature = "mistralrs")]
use laser_engine::MistralEngine;
use laser_engine::{Engine, EngineOptions, FakeEngine, FakeOptions};
use laser_worker::budget::Budget;
use laser_worker::cost::StepCost;
use laser_worker::generate::{GenerateOptions, Generated, Generator, Request, StopReason, TextGenerator};
#[cfg(feature = "mistralrs")]
use laser_worker::plain::PlainGenerator;
use proptest::prelude::*;

use crate::support::*;
use crate::watch::Mischief;

/// Each text with a word changed here and there, as a previous night's would be.
fn previous(text: &NaiveText) -> Vec<u32> {
    let changed = |(i, token): (usize, &u32)| if i % 11 == 10 { 7 } else { *token };
    text.tokens.iter().enumerate().map(changed).collect()
}

/// All settings that must not matter but for the drafter and the tree.
fn settings() -> Vec<(usize, usize, bool, bool, bool)> {
    let mut all = Vec::new();
    for batch in [1, 3, 8] {
        for step_tokens in [1, 7, 64] {
            for bits in 0..8 {
                all.push((batch, step_tokens, bits & 1 > 0, bits & 2 > 0, bits & 4 > 0));
            }
        }
    }
    all
}

#[test]
fn strict_texts_equal_the_naive_decoders_whatever_the_setting() {
    let prompts = prompts();
    let expected: Vec<NaiveText> = prompts.iter().map(|p| naive(&mut fake(), p, &options())).collect();
    let pool = pool(&expected.iter().map(|e| e.tokens.clone()).collect::<Vec<_>>());
    for drafter in drafters() {
        for nodes in [0, 1, 4, 16, 64] {
            let mut accepted = 0;
            for (batch, step_tokens, with_pool, with_previous, with_prefix) in settings() {
                let options = GenerateOptions { drafter, nodes, batch, step_tokens, ..options() };
                let what = format!("{options:?} {with_pool} {with_previous} {with_prefix}");
                let (mut generator, log) = watched(fake_options(), Mischief::default(), options);
                let long: Vec<&[u32]> = prompts[..6].iter().map(Vec::as_slice).filter(|p| p.len() > 18).collect();
                if with_prefix {
                    generator.share_prefix(&long).unwrap();
                    assert_eq!(log.lock().unwrap().open.len(), 1, "{what}");
                }
                let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                    previous: if with_previous { previous(&expected[id]) } else { Vec::new() },
                    pool: with_pool.then(|| pool.clone()),
                    ..request(id as u64, prompt)
                });
                for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
                    let got = got.as_ref().unwrap();
                    assert_naive(got, expected, &what);
                    accepted += got.step_accepted.iter().sum::<u32>();
                }
                let tokens_max = log.lock().unwrap().steps.iter().map(|s| s.iter().sum()).max();
                assert!(tokens_max <= Some(step_tokens), "{what}");
                generator.reset();
                assert!(log.lock().unwrap().open.is_empty(), "{what}: a cache was left open");
            }
            assert_speculates(drafter, nodes, accepted);
        }
    }
}

/// In a language where the last token alone decides, texts of few tokens soon repeat themselves.
#[test]
fn lookahead_drafts_what_the_model_wrote_in_its_window() {
    let fake = FakeOptions { vocab_size: 40, phrase_probability: 1.0, eos_probability: 0.0, ..fake_options() };
    let prompts: Vec<Vec<u32>> = (2..10).map(|first| vec![30, 31, first]).collect();
    let drafter = Drafter::Lookahead { window: 7, ngram: 5, guesses: 7 };
    let plain = GenerateOptions { step_tokens: 512, max_new_tokens: 100, ..options() };
    let expected: Vec<NaiveText> =
        prompts.iter().map(|p| naive(&mut FakeEngine::new(fake.clone()), p, &plain)).collect();
    for batch in [1, 4] {
        let nodes = drafter.most_nodes().unwrap();
        let options = GenerateOptions { drafter, nodes, batch, ..plain.clone() };
        let (mut generator, _) = watched(fake.clone(), Mischief::default(), options);
        let (mut accepted, mut steps) = (0, 0);
        for (got, expected) in
            run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p))).iter().zip(&expected)
        {
            let got = got.as_ref().unwrap();
            assert_naive(got, expected, "lookahead");
            accepted += got.step_accepted.iter().sum::<u32>();
            steps += got.step_accepted.len();
        }
        assert!(accepted as usize > steps, "{accepted} accepted in {steps} steps");
    }
}

/// In a language where the last token alone decides, the model's own continuation of every token of the prompt is that
/// of the text, and the prompt's is not.
#[test]
fn what_the_model_ranks_above_the_prompts_tokens_is_drafted() {
    let fake = FakeOptions { vocab_size: 40, phrase_probability: 1.0, eos_probability: 0.0, ..fake_options() };
    let prompts: Vec<Vec<u32>> = (0..6).map(|last| (2..40).chain(2..20 + last).collect()).collect();
    // Before they repeat themselves.
    let plain = GenerateOptions { max_new_tokens: 12, ..options() };
    let expected: Vec<NaiveText> =
        prompts.iter().map(|p| naive(&mut FakeEngine::new(fake.clone()), p, &plain)).collect();
    for drafter in [Drafter::default(), Drafter::PromptLookup { max_ngram: 3 }] {
        let accepted = |alignment, batch, step_tokens, shares: bool| {
            let options = GenerateOptions { drafter, alignment, batch, step_tokens, ..plain.clone() };
            let (mut generator, _) = watched(fake.clone(), Mischief::default(), options);
            if shares {
                generator.share_prefix(&prompts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            }
            let texts = run(&mut generator, (0..).zip(&prompts).map(|(id, p)| request(id, p)));
            let accepted = texts.iter().zip(&expected).map(|(got, expected)| {
                let got = got.as_ref().unwrap();
                assert_naive(got, expected, &format!("{drafter:?} {alignment} {batch} {step_tokens} {shares}"));
                got.step_accepted.iter().sum::<u32>()
            });
            accepted.sum::<u32>()
        };
        let whole = accepted(2, 1, 512, false);
        let copied = accepted(0, 1, 512, false);
        assert!(2 * whole > 3 * copied, "{drafter:?}: {whole} accepted, {copied} without");
        // The first draft comes along with the end of its prompt, and knows of what was computed before.
        assert!(accepted(2, 1, 40, false) > whole);
        assert!(accepted(2, 6, 512, true) > whole);
    }
}

#[test]
fn drawn_texts_equal_plain_sampling_whatever_the_setting() {
    let prompts = prompts();
    for sampling in [Sampling::new(1.0, None, 1.0), Sampling::new(0.7, Some(20), 0.9)] {
        let sampling = Some(sampling.unwrap());
        let of = |key, p: &Vec<u32>| naive_of(key, &mut fake(), p, &GenerateOptions { sampling, ..options() });
        let expected: Vec<NaiveText> = (0..).zip(&prompts).map(|(key, p)| of(key, p)).collect();
        // The noise is the text's own: another key is another text, and a text goes on alike behind another prompt.
        assert_ne!(of(8, &prompts[0]).tokens, expected[0].tokens);
        assert_ne!(naive(&mut fake(), &prompts[0], &options()).tokens, expected[0].tokens);
        let pool = pool(&expected.iter().map(|e| e.tokens.clone()).collect::<Vec<_>>());
        for drafter in drafters() {
            for nodes in [0, 4, 64] {
                let mut accepted = 0;
                for (batch, step_tokens, with_pool, with_previous, plain) in settings() {
                    let options = GenerateOptions { drafter, nodes, batch, step_tokens, sampling, ..options() };
                    let what = format!("{options:?} {with_pool} {with_previous} {plain}");
                    let (mut generator, _) = watched(fake_options(), Mischief::default(), options);
                    let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                        previous: if with_previous { previous(&expected[id]) } else { Vec::new() },
                        pool: with_pool.then(|| pool.clone()),
                        plain,
                        ..request(id as u64, prompt)
                    });
                    for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
                        let got = got.as_ref().unwrap();
                        assert_naive(got, expected, &what);
                        accepted += got.step_accepted.iter().sum::<u32>();
                    }
                }
                assert_speculates(drafter, nodes, accepted);
            }
        }
    }
}

#[test]
fn samples_of_a_prompt_compute_it_once() {
    let prompt = tokens(3, 30);
    let sampling = Some(Sampling::new(1.0, None, 1.0).unwrap());
    for (batch, step_tokens) in [(8, 512), (3, 512), (2, 7), (1, 64)] {
        let options = GenerateOptions { drafter: Drafter::None, nodes: 0, batch, step_tokens, sampling, ..options() };
        let expected: Vec<NaiveText> = (0..5).map(|key| naive_of(key, &mut fake(), &prompt, &options)).collect();
        let (mut generator, log) = watched(fake_options(), Mischief::default(), options.clone());
        let texts = run(&mut generator, (0..5).map(|id| request(id, &prompt)));
        for (got, expected) in texts.iter().zip(&expected) {
            assert_naive(got.as_ref().unwrap(), expected, &format!("{batch} {step_tokens}"));
        }
        let fed: usize = log.lock().unwrap().steps.iter().flatten().sum();
        let texts: usize = expected.iter().map(|text| text.tokens.len() - 1).sum();
        // A batch of one has none that it could begin from.
        let prompts = if batch == 1 { 5 * 30 } else { 30 + 4 };
        assert!(fed == texts + prompts || (batch == 2 && fed < texts + 5 * 30), "{batch}: {fed} of {texts}");
        assert!(log.lock().unwrap().open.is_empty());
        // What the first one learns of the prompt is the others', too.
        let options = GenerateOptions { drafter: Drafter::default(), alignment: 2, nodes: 16, ..options };
        let (mut generator, _) = watched(fake_options(), Mischief::default(), options);
        let texts = run(&mut generator, (0..5).map(|id| request(id, &prompt)));
        for (got, expected) in texts.iter().zip(&expected) {
            assert_naive(got.as_ref().unwrap(), expected, &format!("aligned, {batch} {step_tokens}"));
        }
    }
}

#[test]
fn typical_texts_are_drawn_where_they_were_not_drafted() {
    let prompts = prompts();
    let sampling = Sampling::new(1.2, None, 1.0).unwrap();
    let (epsilon, delta) = (0.09, 0.3);
    let verification = Verification::typical(epsilon, delta).unwrap();
    let greedy: Vec<_> = prompts.iter().map(|p| naive(&mut fake(), p, &options()).tokens).collect();
    let options = GenerateOptions { sampling: Some(sampling), verification, ..options() };
    let (mut generator, _) = watched(fake_options(), Mischief::default(), options);
    let requests = (0..).zip(&prompts).map(|(id, p)| Request { pool: Some(pool(&greedy)), ..request(id, p) });
    let mut relaxed = 0;
    for (got, (prompt, key)) in run(&mut generator, requests).iter().zip(prompts.iter().zip(0..)) {
        let got = got.as_ref().unwrap();
        assert_figures(got, "typical");
        let mut engine = fake();
        let mut naive =
            Naive::drawing(&mut engine, 64, Draw { sampling, noise: Noise::new(key).before(prompt.len() - 1) });
        let mut top = naive.feed_all(prompt);
        for (token, origin) in got.tokens.iter().zip(&got.origins) {
            let prediction = naive.prediction;
            assert_eq!(*token != prediction.choice.token, origin.relaxed);
            if origin.relaxed {
                let candidate = top.iter().find(|c| c.token == *token).unwrap();
                assert!(prediction.probability(*candidate) > epsilon.min(delta * (-prediction.entropy).exp()));
                relaxed += 1;
            }
            top = naive.feed(*token);
        }
    }
    assert!(relaxed > 10, "{relaxed}");
}

#[test]
fn drafts_of_a_large_batch_leave_its_texts_as_they_are() {
    let prompts: Vec<Vec<u32>> = (0..40).map(|seed| tokens(seed % 7, 10)).collect();
    let expected: Vec<NaiveText> = prompts.iter().map(|p| naive(&mut fake(), p, &options())).collect();
    let pool = pool(&expected.iter().map(|e| e.tokens.clone()).collect::<Vec<_>>());
    for (step_tokens, adapts) in [(512, false), (512, true), (50, false), (13, true)] {
        let budget = adapts.then(|| Budget::new(StepCost::new(vec![(1.0, 1e-3), (500.0, 2e-3)], 1e-8)));
        let options = GenerateOptions { nodes: 16, batch: 32, step_tokens, budget, ..options() };
        let (mut generator, log) = watched(fake_options(), Mischief::default(), options);
        let requests = (0..).zip(&prompts).map(|(id, p)| Request { pool: Some(pool.clone()), ..request(id, p) });
        let (mut accepted, mut drafting, mut seconds) = (0, 0.0, 0.0);
        for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
            let got = got.as_ref().unwrap();
            assert_naive(got, expected, &format!("{step_tokens} {adapts}"));
            accepted += got.step_accepted.iter().sum::<u32>();
            (drafting, seconds) = (drafting + got.draft_seconds, seconds + got.engine_seconds);
        }
        assert!(step_tokens < 32 || accepted > 0);
        // What drafts take is part of the steps, however many threads made them.
        assert!(drafting <= seconds, "{drafting} of {seconds}");
        let tokens_max = log.lock().unwrap().steps.iter().map(|s| s.iter().sum()).max();
        assert!(tokens_max <= Some(step_tokens), "{step_tokens}");
    }
}

#[test]
fn drafts_that_the_budget_cuts_keep_no_prompt_waiting() {
    let prompts: Vec<Vec<u32>> = (0..30).map(|seed| tokens(seed, 20 + seed as usize)).collect();
    let pool = pool(&prompts);
    // Every token takes as long as a step of one: no draft pays.
    let first_steps = |nodes: usize| {
        let budget = Some(Budget::new(StepCost::new(vec![(1.0, 1e-3), (500.0, 0.5)], 0.0)));
        let options = GenerateOptions { nodes, batch: 8, step_tokens: 64, budget, ..options() };
        let (mut generator, log) = watched(fake_options(), Mischief::default(), options);
        let requests = (0..).zip(&prompts).map(|(id, p)| Request { pool: Some(pool.clone()), ..request(id, p) });
        drop(run(&mut generator, requests));
        log.lock().unwrap().steps[..3].to_vec()
    };
    assert_eq!(first_steps(0), [vec![20, 21, 22, 1], vec![1, 1, 1, 22, 24, 15], vec![1, 1, 1, 1, 1, 10, 26, 23]]);
    assert_eq!(first_steps(64), first_steps(0));
}

fn any_request() -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
    // Few different tokens, so that prompts repeat themselves and each other.
    let token = || prop_oneof![3u32..20, 3u32..VOCABULARY];
    (prop::collection::vec(token(), 1..60), prop::collection::vec(token(), 0..60))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..Default::default() })]
    #[test]
    fn strict_texts_equal_the_naive_decoders_for_any_prompt(
        requests in prop::collection::vec(any_request(), 1..6),
        drafter in prop::sample::select(drafters().to_vec()),
        (nodes, batch, step_tokens, alignment) in (0usize..40, 1usize..6, 1usize..80, 0usize..4),
        (max_new_tokens, with_pool, seed) in (1usize..50, any::<bool>(), 0u64..1000),
        costs in prop::option::of(prop::collection::vec(1e-6..1e-3f64, 1..5)),
    ) {
        let points = |costs: Vec<f64>| (0..).map(|i| f64::from(1 << i)).zip(costs).collect();
        let budget = costs.map(|costs| Budget::new(StepCost::new(points(costs), 1e-8)));
        let options = GenerateOptions {
            drafter, alignment, nodes, batch, step_tokens, max_new_tokens, budget, ..options()
        };
        let fake = FakeOptions { seed, max_positions: 90, ..fake_options() };
        let mut oracle = FakeEngine::new(fake.clone());
        let expected: Vec<NaiveText> =
            requests.iter().map(|(prompt, _)| naive(&mut oracle, prompt, &options)).collect();
        let pool = with_pool.then(|| pool(&[expected[0].tokens.clone(), tokens(5, 30)]));
        let (mut generator, log) = watched(fake, Mischief::default(), options);
        let prompts: Vec<&[u32]> = requests.iter().map(|(p, _)| p.as_slice()).collect();
        generator.share_prefix(&prompts).unwrap();
        let requests = (0..).zip(&requests).map(|(id, (prompt, previous))| Request {
            previous: previous.clone(),
            pool: pool.clone(),
            runners_up: usize::from(id != 1),
            ..request(id, prompt)
        });
        let none = Vec::new();
        for ((got, expected), id) in run(&mut generator, requests).iter().zip(&expected).zip(0..) {
            let got = got.as_ref().unwrap();
            assert_naive(got, expected, "any");
            let runners_up: Vec<_> = got.runners_up.iter().map(|other| (other.place as usize, other.token)).collect();
            prop_assert_eq!(&runners_up, if id == 1 { &none } else { &expected.runners_up });
        }
        generator.reset();
        prop_assert!(log.lock().unwrap().open.is_empty());
    }
}

/// Tokens may differ from the first place on where the two best are closer than rounding: then says so.
fn check_naive_up_to_ties(got: &Generated, expected: &NaiveText, what: &str) -> Option<String> {
    assert_figures(got, what);
    let pairs = got.tokens.iter().zip(&expected.tokens);
    let Some(at) = pairs.enumerate().position(|(_, (a, b))| a != b) else {
        assert_eq!((&got.tokens, &got.text), (&expected.tokens, &expected.text), "{what}");
        assert_eq!(got.stop, expected.stop, "{what}");
        return None;
    };
    let gap = expected.gaps[at];
    assert!(gap < 1e-3, "{what}: token {at} differs, and the two best are {gap} apart");
    Some(format!("{what}: near-tie at token {at}, {gap} apart"))
}

fn real_prompts() -> [Vec<u32>; 3] {
    [
        "Film: The Long Night (1999). Genres: Drama, War. Profile:",
        "Film: The Long Day (2001). Genres: Comedy. Profile:",
        "User: age 25-34, liked Heat, Alien and Solaris. Profile:",
    ]
    .map(|text| tokenizer().encode(text, true).unwrap())
}

fn real_engine() -> Box<dyn Engine> {
    laser_engine::load(&EngineOptions::new(fixture())).unwrap()
}

/// The text of this key at temperature 1 by a race of the whole vocabulary, of which the engine tells nothing but the
/// log probabilities.
fn raced(key: u64, engine: &mut dyn Engine, prompt: &[u32], options: &GenerateOptions) -> NaiveText {
    let mut naive = Naive::new(engine, VOCABULARY as usize);
    let mut top = naive.feed_all(prompt);
    let (mut tokens, mut gaps, mut log_probability) = (Vec::new(), Vec::new(), 0.0);
    let stop = loop {
        assert_eq!(top.len(), VOCABULARY as usize);
        let noise = Noise::new(key).after(tokens.len());
        let time = |c: &Candidate| (arrival(noise.word(c.token), c.log_probability.exp()), *c);
        let mut times: Vec<(f64, Candidate)> = top.iter().map(time).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (first, winner) = times[0];
        #[expect(clippy::cast_possible_truncation, reason = "a few digits are enough")]
        let gap = (times[1].0 / first).ln() as f32;
        gaps.push(gap);
        tokens.push(winner.token);
        log_probability += f64::from(winner.log_probability);
        if winner.token == END {
            break StopReason::End;
        }
        if tokens.len() == options.max_new_tokens {
            break StopReason::Length;
        }
        top = naive.feed(winner.token);
    };
    let text = tokenizer().decode(tokens.strip_suffix(&[END]).unwrap_or(&tokens)).unwrap();
    NaiveText { tokens, text, stop, log_probability, gaps, runners_up: Vec::new() }
}

#[test]
fn strict_texts_equal_the_naive_decoders_on_the_real_model() {
    let prompts = real_prompts();
    let mut oracle = real_engine();
    let mut generator = Generator::new(real_engine(), tokenizer(), options());
    for sampling in [None, Some(Sampling::new(1.0, None, 1.0).unwrap())] {
        let options = GenerateOptions { max_new_tokens: 24, sampling, ..options() };
        let mut plain = |key, prompt: &Vec<u32>| match sampling {
            None => naive(oracle.as_mut(), prompt, &options),
            Some(_) => raced(key, oracle.as_mut(), prompt, &options),
        };
        let expected: Vec<NaiveText> = (0..).zip(&prompts).map(|(key, prompt)| plain(key, prompt)).collect();
        let pool = pool(&expected.iter().map(previous).collect::<Vec<_>>());
        for drafter in drafters() {
            for (nodes, batch, step_tokens) in [(0, 3, 64), (4, 1, 5), (16, 1, 64), (16, 3, 24)] {
                let mut options = GenerateOptions { drafter, nodes, batch, step_tokens, ..options.clone() };
                let what = format!("{sampling:?} {drafter:?} {nodes} {batch} {step_tokens}");
                generator.swap_options(&mut options);
                let requests =
                    (0..).zip(&prompts).map(|(id, prompt)| Request { pool: Some(pool.clone()), ..request(id, prompt) });
                for (got, expected) in run(&mut generator, requests).iter().zip(&expected) {
                    if let Some(tie) = check_naive_up_to_ties(got.as_ref().unwrap(), expected, &what) {
                        println!("{tie}");
                    }
                }
            }
        }
    }
}

/// mistralrs by itself, for the architectures that the tree engine does not know. Two prompts are of equal length:
/// run at once, one of them would go on with the other's text.
#[cfg(feature = "mistralrs")]
#[test]
fn mistralrs_texts_equal_the_naive_decoders() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for stop in [vec![], vec![" the".to_owned()]] {
        let options = GenerateOptions { max_new_tokens: 24, stop, ..options() };
        let mut requests: Vec<Request> = (0..).zip(real_prompts()).map(|(id, p)| request(id, &p)).collect();
        let expected: Vec<NaiveText> =
            real_prompts().iter().map(|p| naive(real_engine().as_mut(), p, &options)).collect();
        // More rows at fault than a failing engine is granted.
        requests.extend((3..15).map(|id| request(id, &[])));
        let handle = runtime.handle().clone();
        let engine = runtime.block_on(MistralEngine::load(&EngineOptions::new(fixture()), 4));
        let mut generator = PlainGenerator::new(engine.unwrap(), handle, tokenizer(), options);
        requests.into_iter().for_each(|request| generator.submit(request));
        let mut results = Vec::new();
        while generator.load() > 0 {
            results.extend(generator.step().unwrap().into_iter().map(|f| f.result));
        }
        for (got, expected) in results.iter().zip(&expected) {
            if let Some(tie) = check_naive_up_to_ties(got.as_ref().unwrap(), expected, "mistralrs") {
                println!("{tie}");
            }
        }
        assert_eq!(results[3..].iter().filter(|result| result.is_err()).count(), 12);
    }
}

#[test]
fn plain_requests_draft_nothing_and_are_strict_whatever_the_policy() {
    let verification = Verification::relaxed(4, 0.0).unwrap();
    let (mut generator, _) =
        watched(fake_options(), Mischief::default(), GenerateOptions { verification, ..options() });
    let expected = naive(&mut fake(), &tokens(1, 9), &options());
    let plain = Request { plain: true, strict: false, previous: expected.tokens.clone(), ..request(0, &tokens(1, 9)) };
    let got = run(&mut generator, [plain]).remove(0).unwrap();
    assert_naive(&got, &expected, "plain");
    assert_eq!(got.drafted, 0);
    assert_eq!(got.step_accepted, vec![0; got.tokens.len()]);
}

/// Of each emitted token its rank among the target's candidates at its place; it is probable enough.
fn ranks(prompt: &[u32], got: &Generated, p: f32) -> Vec<usize> {
    let mut engine = fake();
    let mut naive = Naive::new(&mut engine, 8);
    let mut top = naive.feed_all(prompt);
    let mut ranks = Vec::new();
    for &token in &got.tokens {
        let rank = top.iter().position(|c| c.token == token).unwrap();
        let probability = top[rank].log_probability.exp();
        assert!(rank == 0 || probability > p, "rank {rank} with probability {probability}");
        ranks.push(rank);
        top = naive.feed(token);
    }
    ranks
}

#[test]
fn relaxed_texts_hold_only_tokens_that_the_policy_accepts() {
    let prompts = prompts();
    // Texts to draft from that leave the greedy path: other seeds' and second choices.
    let texts: Vec<Vec<u32>> = prompts.iter().map(|p| second_choices(p, 40)).collect();
    let pool = pool(&texts);
    for (k, p) in [(1, 0.0), (2, 0.1), (2, 0.0), (3, 0.05), (4, 1.0)] {
        let verification = Verification::relaxed(k, p).unwrap();
        let mut relaxed = 0;
        for drafter in drafters() {
            let options = GenerateOptions { drafter, verification, ..options() };
            let (mut generator, _) = watched(fake_options(), Mischief::default(), options);
            let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
                previous: texts[id].clone(),
                pool: Some(pool.clone()),
                ..request(id as u64, prompt)
            });
            for (got, prompt) in run(&mut generator, requests).iter().zip(&prompts) {
                let got = got.as_ref().unwrap();
                let ranks = ranks(prompt, got, p);
                assert!(ranks.iter().all(|rank| *rank < k), "{k} {p} {ranks:?}");
                let not_argmax = ranks.iter().filter(|rank| **rank > 0).count() as u64;
                assert_eq!(got.relaxed, not_argmax, "{k} {p}");
                assert_figures(got, "relaxed");
                relaxed += got.relaxed;
                if k == 1 {
                    assert_naive(got, &naive(&mut fake(), prompt, &crate::support::options()), "k = 1");
                }
            }
        }
        assert_eq!(relaxed > 0, k > 1 && p < 0.25, "k = {k}, p = {p}");
    }
}

#[test]
fn conditional_texts_take_from_the_prompt_what_meets_its_bound() {
    let starts: Vec<Vec<u32>> = (0..8).map(|seed| tokens(40 + seed, 6)).collect();
    let texts: Vec<Vec<u32>> = starts.iter().map(|start| second_choices(start, 40)).collect();
    // Its beginning and its text, and the beginning again.
    let copied: Vec<Vec<u32>> = starts.iter().zip(&texts).map(|(s, t)| [&s[..], t, s].concat()).collect();
    let pool = pool(&copied);
    let relaxed = |prompts: &[Vec<u32>], (alpha, all): (f32, bool), with_pool: bool| {
        let verification = Verification::conditional(alpha, 0.05, all).unwrap();
        let (mut generator, _) =
            watched(fake_options(), Mischief::default(), GenerateOptions { verification, ..options() });
        let requests = (0..)
            .zip(prompts)
            .map(|(id, prompt)| Request { pool: with_pool.then(|| pool.clone()), ..request(id, prompt) });
        let mut relaxed = 0;
        for (got, prompt) in run(&mut generator, requests).iter().zip(prompts) {
            let got = got.as_ref().unwrap();
            let mut engine = fake();
            let mut naive = Naive::new(&mut engine, 20);
            let mut top = naive.feed_all(prompt);
            for &token in &got.tokens {
                let rank = top.iter().position(|candidate| candidate.token == token).unwrap();
                let bound = alpha * naive.prediction.entropy + 0.05;
                assert!(rank == 0 || top[rank].log_probability.exp() >= bound, "rank {rank}, bound {bound}");
                relaxed += u64::from(rank > 0);
                top = naive.feed(token);
            }
            assert_figures(got, "conditional");
        }
        relaxed
    };
    assert!(relaxed(&copied, (0.05, false), false) > 0);
    assert_eq!(relaxed(&copied, (10.0, false), false), 0);
    // What the pool has too is not the prompt's alone.
    assert_eq!(relaxed(&copied, (0.05, false), true), 0);
    assert_eq!(relaxed(&starts, (0.05, false), true), 0);
    assert!(relaxed(&starts, (0.05, true), true) > 0);
}

/// A text in which every fifth token is the target's second choice.
fn second_choices(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut engine = fake();
    let mut naive = Naive::new(&mut engine, 2);
    let mut top = naive.feed_all(prompt);
    let mut text = Vec::new();
    for place in 0..count {
        let token = top[usize::from(place % 5 == 2)].token;
        if token == END {
            break;
        }
        text.push(token);
        top = naive.feed(token);
    }
    text
}

#[test]
fn nothing_of_one_text_is_drafted_for_another() {
    let secret: Vec<u32> = tokens(1, 400).into_iter().filter(|t| *t >= 2000).collect();
    let prompt_of = |first: u32, rest: &[u32]| [&[first, 10, 11, 12], rest, &[10, 11, 12]].concat();
    // Both end alike, so that whatever follows 10, 11, 12 in one would be drafted for the other.
    let (a, b) = (prompt_of(20, &secret), prompt_of(21, &[13, 14]));
    let of_b: HashSet<u32> = naive(&mut fake(), &b, &options()).tokens.into_iter().collect();
    let unique: HashSet<u32> = secret.iter().copied().filter(|t| !of_b.contains(t)).collect();
    for drafter in drafters() {
        for batch in [1, 2] {
            let options = GenerateOptions { drafter, batch, step_tokens: 512, ..options() };
            let fed_beside = |others: Vec<Request>| {
                let (mut generator, log) = watched(fake_options(), Mischief::default(), options.clone());
                run(&mut generator, others.into_iter().chain([request(1, &b)]));
                let log = log.lock().unwrap();
                log.fed.iter().find(|fed| fed[0] == 21).unwrap().clone()
            };
            let fed = fed_beside(vec![Request { previous: secret.clone(), ..request(0, &a) }]);
            assert_eq!(fed, fed_beside(Vec::new()), "{drafter:?} {batch}");
            assert!(fed.len() > b.len());
            // Lookahead asks the target of unlikely contexts, and so may come upon any token.
            let is_any = matches!(drafter, Drafter::Lookahead { .. });
            assert!(is_any || fed.iter().all(|token| !unique.contains(token)), "{drafter:?} {batch}");
        }
    }
}

#[test]
fn trees_share_a_step_evenly() {
    let prompts: Vec<Vec<u32>> = (0..4).map(|seed| tokens(seed, 1)).collect();
    let texts: Vec<Vec<u32>> = prompts.iter().map(|p| naive(&mut fake(), p, &options()).tokens).collect();
    let options = GenerateOptions { nodes: 64, step_tokens: 16, ..options() };
    let (mut generator, log) = watched(fake_options(), Mischief::default(), options);
    let requests = (0..).zip(&prompts).map(|(id, prompt)| Request {
        previous: [prompt.clone(), texts[id].clone()].concat(),
        ..request(id as u64, prompt)
    });
    requests.for_each(|request| generator.submit(request));
    generator.step().unwrap();
    assert_eq!(log.lock().unwrap().steps[0], [4, 4, 4, 4]);
}
