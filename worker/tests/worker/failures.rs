//! What an engine's failure costs.

use laser_engine::FakeOptions;
use laser_worker::generate::{GenerateError, GenerateOptions, Generated, Request, TextError, TextGenerator};

use crate::support::*;
use crate::watch::Mischief;

/// In no prompt and no text of these tests.
const POISON: u32 = 4095;

fn expected() -> Vec<NaiveText> {
    prompts().iter().map(|p| naive(&mut fake(), p, &options())).collect()
}

fn requests() -> Vec<Request> {
    (0..).zip(prompts()).map(|(id, prompt)| request(id, &prompt)).collect()
}

fn assert_all(results: &[Result<Generated, TextError>], what: &str) {
    assert_eq!(results.len(), prompts().len(), "{what}");
    for (got, expected) in results.iter().zip(expected()) {
        assert_naive(got.as_ref().unwrap(), &expected, what);
    }
}

#[test]
fn a_failing_row_costs_no_other_row() {
    let fake = FakeOptions { fail_on_token: Some(POISON), ..fake_options() };
    for batch in [1, 3, 8] {
        for bad in 0..prompts().len() {
            let options = GenerateOptions { batch, ..options() };
            let (mut generator, log) = watched(fake.clone(), Mischief::default(), options);
            let mut requests = requests();
            requests[bad].prompt.push(POISON);
            let mut results = run(&mut generator, requests);
            let error = std::mem::replace(&mut results[bad], Ok(Generated::default()));
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("engine: ") && error.contains("token 4095"), "{error}");
            for (row, (got, expected)) in results.iter().zip(expected()).enumerate() {
                if row != bad {
                    assert_naive(got.as_ref().unwrap(), &expected, "beside a failing row");
                }
            }
            assert!(log.lock().unwrap().open.is_empty());
        }
    }
}

#[test]
fn a_step_that_fails_once_costs_no_row() {
    for batch in [1, 4] {
        for step in 0..30 {
            let fake = FakeOptions { fail_on_step: Some(step), ..fake_options() };
            let options = GenerateOptions { batch, ..options() };
            let (mut generator, log) = watched(fake, Mischief::default(), options);
            assert_all(&run(&mut generator, requests()), &format!("step {step}, batch {batch}"));
            assert!(log.lock().unwrap().open.is_empty());
        }
    }
}

#[test]
fn a_commit_that_fails_once_costs_no_row() {
    for commit in 0..30 {
        let mischief = Mischief { fail_on_commit: Some(commit), ..Mischief::default() };
        let (mut generator, log) = watched(fake_options(), mischief, options());
        assert_all(&run(&mut generator, requests()), &format!("commit {commit}"));
        assert!(log.lock().unwrap().open.is_empty());
    }
}

#[test]
fn a_step_that_loses_all_keys_and_values_costs_no_row_whose_prefix_is_shared() {
    let prefix = tokens(99, 18);
    for batch in [1, 4] {
        // The first step is that of the prefix.
        for step in 1..8 {
            let mischief = Mischief { lose_on_step: Some(step), ..Mischief::default() };
            let options = GenerateOptions { batch, ..options() };
            let (mut generator, log) = watched(fake_options(), mischief, options);
            generator.share_prefix(&[&prefix, &prefix]).unwrap();
            assert_eq!(log.lock().unwrap().open.len(), 1);
            assert_all(&run(&mut generator, requests()), &format!("step {step}, batch {batch}"));
            assert!(log.lock().unwrap().open.is_empty());
        }
    }
}

#[test]
fn requests_wait_while_there_is_no_memory_for_their_caches() {
    let mischief = Mischief { slots_max: Some(2), ..Mischief::default() };
    let (mut generator, log) = watched(fake_options(), mischief, options());
    assert_all(&run(&mut generator, requests()), "two caches");
    assert!(log.lock().unwrap().open.is_empty());
}

#[test]
fn an_engine_that_only_fails_is_given_up() {
    for mischief in [
        Mischief { fail_from_step: Some(5), ..Mischief::default() },
        Mischief { slots_max: Some(0), ..Mischief::default() },
    ] {
        for batch in [1, 4] {
            let options = GenerateOptions { batch, ..options() };
            let (mut generator, log) = watched(fake_options(), mischief.clone(), options);
            let many = (0..4).flat_map(|_| requests());
            let error = try_run(&mut generator, many).unwrap_err();
            assert!(matches!(error, GenerateError::Engine(_)));
            let message = error.to_string();
            assert!(message.contains("8 sequences in a row") && message.contains("injected"));
            generator.reset();
            assert_eq!(generator.load(), 0);
            assert!(log.lock().unwrap().open.is_empty());
        }
    }
}

#[test]
fn failing_rows_among_good_ones_do_not_give_up_the_engine() {
    let fake = FakeOptions { fail_on_token: Some(POISON), ..fake_options() };
    let (mut generator, _) = watched(fake, Mischief::default(), options());
    let mut requests: Vec<Request> = (0..40).map(|id| request(id, &tokens(7, 6))).collect();
    for bad in requests.iter_mut().step_by(2) {
        bad.prompt.push(POISON);
    }
    let results = run(&mut generator, requests);
    let good: Vec<bool> = results.iter().map(Result::is_ok).collect();
    assert_eq!(good, [false, true].repeat(20));
}

#[test]
fn a_prefix_that_fails_leaves_no_cache() {
    let fake = FakeOptions { fail_on_token: Some(POISON), ..fake_options() };
    let (mut generator, log) = watched(fake, Mischief::default(), options());
    let prefix = [tokens(1, 30), vec![POISON]].concat();
    assert!(generator.share_prefix(&[&prefix, &prefix]).is_err());
    assert!(log.lock().unwrap().open.is_empty());
}

#[test]
fn prefixes_are_bounded() {
    let (mut generator, log) = watched(fake_options(), Mischief::default(), options());
    for seed in 0..9 {
        let prefix = tokens(seed, 30);
        generator.share_prefix(&[&prefix, &prefix]).unwrap();
        generator.share_prefix(&[&prefix, &prefix]).unwrap();
    }
    assert_eq!(log.lock().unwrap().open.len(), 4);
    assert_eq!(log.lock().unwrap().fed.len(), 9, "a known prefix is computed once");
}
