//! Acceptance heads for a draft model that is one of this crate's small models.

use laser_decode::{TargetScores as _, Token};
use laser_engine::{ACCEPTED, EngineOptions, Segment, load};

use super::eagle_tests::{target, written};
use super::tests::{config, job_of};
use super::*;
use crate::lesson::unread;

/// What somebody writes who agrees with the draft model but for the tokens of the upper half.
fn changed(token: Token) -> Token {
    if token < 20 { token } else { token - 11 }
}

#[test]
fn a_head_learns_what_the_draft_models_probabilities_do_not_tell() {
    let (draft_folder, mut draft) = target();
    let folder = tempfile::tempdir().unwrap();
    let config =
        TrainConfig { kind: DraftKind::Acceptance, draft: "draft".into(), epochs: 20, ..config(folder.path()) };
    let mut job = Job { draft: Some("the draft model".into()), ..job_of(&config, 200) };
    draft.keep_features();
    job.learned = written(draft.as_mut(), &job.learned, changed);
    job.held_out = written(draft.as_mut(), &job.held_out, changed);
    let [learned, held_out] = [&job.learned, &job.held_out].map(|examples| unread(examples, 64));
    let lessons = Lessons { learned: &learned, held_out: &held_out, engine: Some(draft.as_mut()) };
    let trained = train(&job, lessons, &mut (), &|| false).unwrap().unwrap();
    let own = trained.kept.own_loss.unwrap();
    assert!(
        trained.kept.held_out_loss < 0.5 * own && trained.kept.share("first").unwrap() > 0.9,
        "{:?}",
        trained.history
    );
    assert_eq!(output::belongs(folder.path()).unwrap().unwrap().draft.as_deref(), Some("the draft model"));
    assert_eq!(job.finished().unwrap().unwrap().kept.epoch, trained.kept.epoch);

    // What judges is what was trained.
    let mut verdicts = Verdicts::at(1.0);
    verdicts.add(draft.as_mut(), &held_out[0]).unwrap();
    let network = Network::acceptance(&config, 16, &Device::Cpu).unwrap();
    let tensors = candle_core::safetensors::load(folder.path().join("acceptance_head.safetensors"), &Device::Cpu);
    let tensors = tensors.unwrap();
    assert_eq!(tensors.len(), 5);
    for (name, weight) in network.weights() {
        weight.set(&tensors[&name]).unwrap();
    }
    // The head's own logits, without what they correct.
    let batch = Batch::of_verdicts(&verdicts, [0.0, 0.0], &Device::Cpu).unwrap();
    let passes = network.forward(&batch, 1).unwrap();
    let expected = candle_nn::ops::log_softmax(&passes[0].logits, 1).unwrap().to_vec2::<f32>().unwrap();
    let options = EngineOptions { drafts: Some(folder.path().into()), ..EngineOptions::new(draft_folder.path()) };
    let mut head = load(&options).unwrap();
    let nodes = verdicts.outcomes.len();
    let slot = head.open(nodes).unwrap();
    let parents = vec![laser_decode::ROOT_PARENT; nodes];
    let tokens = vec![ACCEPTED; nodes];
    let before = &verdicts.features;
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, before, ..Segment::default() };
    let scores = head.step(&[segment], 2).unwrap().remove(0);
    for (node, expected) in expected.iter().enumerate() {
        for outcome in scores.top(node) {
            let difference = (expected[outcome.token as usize] - outcome.log_probability).abs();
            assert!(difference < 2e-4, "node {node}: {expected:?} {outcome:?}");
        }
    }
}
