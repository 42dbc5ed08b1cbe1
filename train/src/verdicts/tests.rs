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
        let mut verdicts = Verdicts::default();
        verdicts.add(&mut engine, &lesson).unwrap();
        assert_eq!(verdicts.outcomes.len(), text * PROPOSED);
        for (row, at) in (prompt..lesson.tokens.len()).flat_map(|at| [at; PROPOSED]).enumerate() {
            let proposal = after(options(), &lesson.tokens[..at])[row % PROPOSED];
            let accepted = proposal.token == lesson.tokens[at];
            assert_eq!(verdicts.outcomes[row] == ACCEPTED, accepted, "{row}");
            assert_eq!(verdicts.probabilities[row], proposal.log_probability.exp());
            // The fake's feature of a token: itself and where it is.
            assert_eq!(verdicts.features[2 * row..][..2], [proposal.token as f32, at as f32], "{row}");
        }
        assert!(verdicts.outcomes.iter().filter(|&&outcome| outcome == ACCEPTED).count() >= text / 2);
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
fn the_least_log_loss_is_that_of_the_best_scale_and_shift() {
    // What happens has the probability σ(2 logit(q) - 1): the loss is its entropy.
    let (mut pairs, mut expected) = (Vec::new(), 0.0);
    for step in 1..100_u16 {
        let q = f32::from(step) / 100.0;
        let p = 1.0 / (1.0 + (1.0 - 2.0 * f64::from(q / (1.0 - q)).ln()).exp());
        let happened = (p * 1000.0).round() as usize;
        pairs.extend((0..1000).map(|draw| (q, draw < happened)));
        expected -= p * p.ln() + (1.0 - p) * (1.0 - p).ln();
    }
    assert!((least_log_loss(&pairs) - expected / 99.0).abs() < 1e-3);
    // Nothing to learn, and everything.
    assert!((least_log_loss(&[(0.5, true), (0.5, false)]) - std::f64::consts::LN_2).abs() < 1e-6);
    assert!(least_log_loss(&[(0.9, true), (0.1, false)]) < 1e-3);
}
