//! Bounds, ends of texts and requests that cannot be served.

use laser_engine::FakeOptions;
use laser_worker::generate::{GenerateOptions, Request, StopReason};

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
