//! Proposals against a language that is known, and scales against outcomes that are drawn from them.

use laser_engine::{FakeEngine, FakeOptions};

use super::*;

fn lesson(prompt: usize, text: usize) -> Lesson {
    let token = |at: u32| 2 + at.wrapping_mul(2_654_435_761) % 900;
    Lesson { tokens: (0..).map(token).take(prompt + text).collect(), prompt, likely: Vec::new() }
}

#[test]
fn proposals_are_what_the_draft_model_says_of_the_text_itself() {
    // In this language the last token decides, so what is proposed after a token is known without the text before it.
    let options = || FakeOptions { order: 1, ..FakeOptions::default() };
    let mut engine = FakeEngine::new(options());
    engine.keep_features();
    for (prompt, text) in [(1, 1), (3, 5), (CHUNK + 2, PLACES), (2, 2 * PLACES + 3)] {
        let mut lesson = lesson(prompt, text);
        // Half of the text is what the draft model would write.
        for at in (prompt..lesson.tokens.len()).step_by(2) {
            lesson.tokens[at] = after(options(), &lesson.tokens[..at])[0].token;
        }
        let mut verdicts = Verdicts::unsharpened();
        verdicts.add(&mut engine, &lesson).unwrap();
        assert_eq!(verdicts.outcomes.len(), text * PROPOSED);
        for (row, at) in (prompt..lesson.tokens.len()).flat_map(|at| [at; PROPOSED]).enumerate() {
            let proposal = after(options(), &lesson.tokens[..at])[row % PROPOSED];
            let accepted = proposal.token == lesson.tokens[at];
            assert_eq!(verdicts.outcomes[row] == ACCEPTED, accepted, "{row}");
            // The fake's tokens take equal shares of what is left: at a sharpness of 1 as they are.
            let q = proposal.log_probability.exp();
            assert!((verdicts.odds[row] - (q / (1.0 - q)).ln()).abs() < 1e-2, "{row}");
            // The fake's feature of a token: itself and where it is.
            assert_eq!(verdicts.features[2 * row..][..2], [proposal.token as f32, at as f32], "{row}");
        }
        assert!(verdicts.outcomes.iter().filter(|&&outcome| outcome == ACCEPTED).count() >= text / 2);
        assert!(SHARPNESS.contains(&verdicts.best_sharpness()));
    }
}

/// What the language proposes after a text.
fn after(options: FakeOptions, tokens: &[Token]) -> Vec<Candidate> {
    let mut engine = FakeEngine::new(options);
    let slot = engine.open(tokens.len()).unwrap();
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let scores = engine.step(&[segment(slot, tokens, &parents, tokens.len() - 1)], PROPOSED).unwrap();
    scores[0].top(tokens.len() - 1).to_vec()
}

#[test]
fn the_best_scale_is_found() {
    // What happens has the probability σ(2 odds - 1): the loss is its entropy.
    let (mut pairs, mut expected) = (Vec::new(), 0.0);
    for step in 1..100_u16 {
        let q = f32::from(step) / 100.0;
        let odds = (q / (1.0 - q)).ln();
        let p = 1.0 / (1.0 + (1.0 - 2.0 * f64::from(odds)).exp());
        pairs.extend((0..1000).map(|draw| (odds, f64::from(draw) < 1000.0 * p)));
        expected -= p * p.ln() + (1.0 - p) * (1.0 - p).ln();
    }
    let [scale, shift] = best_scale(&pairs);
    assert!((scale - 2.0).abs() < 0.02 && (shift + 1.0).abs() < 0.02, "{scale} {shift}");
    assert!((log_loss(&pairs, [scale, shift]) - expected / 99.0).abs() < 1e-3);
    assert!(log_loss(&pairs, [1.0, 0.0]) > expected / 99.0 + 0.01);
    // Nothing to learn, and everything.
    let loss = |pairs: &[(f32, bool)]| log_loss(pairs, best_scale(pairs));
    assert!((loss(&[(0.0, true), (0.0, false)]) - std::f64::consts::LN_2).abs() < 1e-6);
    assert!(loss(&[(2.0, true), (-2.0, false)]) < 1e-3);
}

#[test]
fn texts_that_take_the_first_token_always_are_most_probable_at_the_greatest_sharpness() {
    let candidates = [0.5_f32, 0.3]
        .map(f32::ln)
        .into_iter()
        .zip(7..)
        .map(|(log_probability, token)| Candidate { token, log_probability });
    let candidates: Vec<Candidate> = candidates.collect();
    let verdicts = |tokens: &[Token]| Verdicts {
        foresight: tokens.iter().map(|&token| SHARPNESS.map(|s| foresight(&candidates, token, s))).collect(),
        ..Verdicts::at(1.0)
    };
    assert_eq!(verdicts(&[7; 10]).best_sharpness(), 32.0);
    assert_eq!(verdicts(&[7, 7, 7, 7, 7, 8, 8, 8, 9, 9]).best_sharpness(), 1.0);
}
