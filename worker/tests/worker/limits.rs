//! Bounds, ends of texts and requests that cannot be served.

use std::sync::{Arc, mpsc};

use laser_engine::{Engine, EngineError, FakeEngine, FakeOptions};
use laser_worker::cost::{StepCost, StepLoad};
use laser_worker::generate::{GenerateOptions, Generator, Request, StopReason, TextGenerator};
use rayon::{ThreadPoolBuilder, Yield};

use crate::support::*;
use crate::watch::Mischief;

#[test]
fn a_text_never_exceeds_its_bound() {
    let prompt = tokens(3, 10);
    let text = naive(&mut fake(), &prompt, &options()).tokens;
    for max_new_tokens in [1, 2, 3, 7, 8] {
        for drafter in drafters() {
            let options = GenerateOptions { drafter, max_new_tokens, nodes: 64, ..options() };
            let (mut generator, _) = watched(fake_options(), Mischief::default(), options.clone());
            let speculative = Request { previous: text.clone(), ..request(0, &prompt) };
            let got = run(&mut generator, [speculative]).remove(0).unwrap();
            assert_naive(&got, &naive(&mut fake(), &prompt, &options), "bound");
            assert_eq!((got.tokens.len(), got.stop), (max_new_tokens, StopReason::Length));
        }
    }
}

#[test]
fn a_text_ends_at_the_models_context() {
    let fake = FakeOptions { max_positions: 64, eos_probability: 0.0, ..fake_options() };
    let prompt = |length| tokens(8, length);
    let (mut generator, _) = watched(fake, Mischief::default(), options());
    let lengths = [24, 25, 60, 63, 64, 65];
    let requests =
        (0..).zip(lengths).map(|(id, length)| Request { previous: prompt(length), ..request(id, &prompt(length)) });
    let tokens: Vec<Option<usize>> =
        run(&mut generator, requests).into_iter().map(|result| result.ok().map(|text| text.tokens.len())).collect();
    assert_eq!(tokens, [Some(40), Some(39), Some(4), Some(1), None, None]);
}

#[test]
fn a_prompt_that_cannot_be_served_is_a_row_error() {
    let fake = FakeOptions { max_positions: 64, ..fake_options() };
    let (mut generator, log) = watched(fake, Mischief::default(), options());
    let requests = [&[][..], &tokens(1, 64), &tokens(2, 5)].map(|p| request(p.len() as u64, p));
    let results = run(&mut generator, requests);
    let error = |index: usize| results[index].as_ref().unwrap_err().to_string();
    assert_eq!(error(0), "the prompt is empty");
    assert!(results[1].is_ok());
    assert_eq!(error(2), "the prompt has 64 tokens, but the model's context is 64; lower [prompt] max_tokens");
    assert!(log.lock().unwrap().open.is_empty());
}

#[test]
fn texts_wait_for_caches_and_are_the_same() {
    let prompts: Vec<Vec<u32>> = (0..9).map(|seed| [tokens(0, 20), tokens(seed, 5)].concat()).collect();
    let requests = || (0..).zip(&prompts).map(|(id, prompt)| request(id, prompt));
    let expected: Vec<_> = run(&mut watched(fake_options(), Mischief::default(), options()).0, requests());
    // A text takes 25 + 40 + 16 tokens, the shared prefix 20: one, two or three texts at a time, instead of four.
    for cache_tokens in [100, 101, 182, 250] {
        let fake = FakeOptions { cache_tokens, ..fake_options() };
        let (mut generator, log) = watched(fake, Mischief::default(), options());
        generator.share_prefix(&prompts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        let texts = run(&mut generator, requests());
        for (text, expected) in texts.iter().zip(&expected) {
            assert_eq!(text.as_ref().unwrap().tokens, expected.as_ref().unwrap().tokens, "{cache_tokens}");
        }
        // The prefix alone, or nothing once it has made room for a text.
        assert_eq!(log.lock().unwrap().open.len(), usize::from(cache_tokens > 100), "{cache_tokens}");
    }
}

#[test]
fn a_text_that_no_cache_could_hold_is_a_row_error() {
    let fake = FakeOptions { cache_tokens: 90, ..fake_options() };
    let (mut generator, log) = watched(fake, Mischief::default(), options());
    let results = run(&mut generator, [60, 20].map(|length| request(length as u64, &tokens(1, length))));
    assert!(results[0].is_ok());
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("a sequence of 116 tokens needs 116 MB") && error.contains("[model] cache_mb"), "{error}");
    assert!(log.lock().unwrap().open.is_empty());
}

#[test]
fn costs_are_measured_with_as_many_sequences_as_fit() {
    let mut fake = FakeEngine::new(FakeOptions { cache_tokens: 1_400, ..fake_options() });
    // The first sequence has a long context of its own, 1,040 tokens; the others take 81.
    let cost = StepCost::measure(&mut fake, 8, 8 * 17).unwrap();
    assert!(cost.seconds(StepLoad { tokens: 5 * 17, pairs: 0 }) >= cost.seconds(StepLoad { tokens: 1, pairs: 0 }));
    assert_eq!(fake.open(1_400).unwrap(), 0, "all are closed");
    let mut fake = FakeEngine::new(FakeOptions { cache_tokens: 100, ..fake_options() });
    assert!(matches!(StepCost::measure(&mut fake, 8, 8 * 17), Err(EngineError::CacheFull { .. })));
}

#[test]
fn a_previous_text_with_tokens_that_the_model_lacks_does_no_harm() {
    let prompt = tokens(4, 12);
    let expected = naive(&mut fake(), &prompt, &options());
    let previous = [&expected.tokens[..20], &[VOCABULARY + 3], &expected.tokens[20..]].concat();
    let (mut generator, _) = watched(fake_options(), Mischief::default(), options());
    let got = run(&mut generator, [Request { previous, ..request(0, &prompt) }]).remove(0).unwrap();
    assert_naive(&got, &expected, "foreign tokens");
    assert!(got.step_accepted.iter().sum::<u32>() > 10);
}

#[test]
fn nothing_follows_the_end_of_a_text() {
    let fake = FakeOptions { eos_probability: 0.2, ..fake_options() };
    let options = GenerateOptions { end_of_text: vec![END, 900], ..options() };
    let mut ended = 0;
    for seed in 0..30 {
        let prompt = tokens(seed, 8);
        let mut oracle = laser_engine::FakeEngine::new(fake.clone());
        let expected = naive(&mut oracle, &prompt, &options);
        let (mut generator, _) = watched(fake.clone(), Mischief::default(), options.clone());
        let speculative = Request {
            previous: expected.tokens.clone(),
            pool: Some(pool(&[[expected.tokens.clone(), tokens(5, 9)].concat()])),
            ..request(0, &prompt)
        };
        let got = run(&mut generator, [speculative]).remove(0).unwrap();
        assert_naive(&got, &expected, "end");
        ended += usize::from(got.stop == StopReason::End);
    }
    assert!(ended > 20, "only {ended} of 30 texts ended");
}

#[test]
fn texts_are_cut_before_the_first_stop_string() {
    let prompt = tokens(6, 10);
    let fake = FakeOptions { eos_probability: 0.0, ..fake_options() };
    let oracle = || laser_engine::FakeEngine::new(fake.clone());
    let whole = naive(&mut oracle(), &prompt, &options());
    let places: Vec<usize> = whole.text.char_indices().map(|(at, _)| at).collect();
    let mut stopped = 0;
    for start in (0..places.len() - 9).step_by(5) {
        for length in [1, 2, 4, 9] {
            let stop = whole.text[places[start]..places[start + length]].to_owned();
            // The tokenizer's mark for a part of a character, which is there until the rest follows.
            if stop.contains(char::REPLACEMENT_CHARACTER) {
                continue;
            }
            let options = GenerateOptions { stop: vec!["\u{0}".into(), stop], ..options() };
            let expected = naive(&mut oracle(), &prompt, &options);
            let (mut generator, _) = watched(fake.clone(), Mischief::default(), options.clone());
            let speculative = Request { previous: whole.tokens.clone(), ..request(0, &prompt) };
            let got = run(&mut generator, [speculative]).remove(0).unwrap();
            assert_naive(&got, &expected, &options.stop[1]);
            stopped += usize::from(got.stop == StopReason::Stop);
        }
    }
    assert!(stopped > 20, "only {stopped} stop strings were tried");
}

/// The engine's only thread asks for other work until it has had some.
#[test]
fn drafts_of_a_large_batch_are_made_on_the_engines_threads() {
    for (batch, expected) in [(15, false), (16, true)] {
        let threads = Arc::new(ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let options = GenerateOptions { batch, step_tokens: 512, ..options() };
        let fake = FakeEngine::new(FakeOptions { eos_probability: 0.0, ..fake_options() });
        let mut generator = Generator::new(Box::new(fake.with_threads(threads.clone())), tokenizer(), options);
        (0..16).for_each(|id| generator.submit(request(id, &tokens(9, 5))));
        let (ended, end) = mpsc::sync_channel::<()>(1);
        let (tell, told) = mpsc::sync_channel(1);
        threads.spawn(move || {
            let has_worked = || rayon::yield_now() == Some(Yield::Executed);
            // Whether there was work is asked once more after the step's end.
            let is_over = || end.try_recv().is_ok();
            let has = std::iter::repeat_with(|| (is_over(), has_worked())).find(|(is_over, has)| *is_over || *has);
            tell.send(has.is_some_and(|(_, has)| has)).unwrap_or_default();
        });
        generator.step().unwrap();
        ended.send(()).unwrap_or_default();
        assert_eq!((told.recv().unwrap(), generator.load()), (expected, 16), "batch {batch}");
    }
}
