//! Medusa's heads for a target that is itself one of this crate's small models.

use laser_decode::chain_parents;
use laser_engine::{EngineOptions, Segment, load, target_parts};

use super::eagle_tests::{layer_job, target, train_layer, written};
use super::tests::{by_token, config};
use super::*;
use crate::lesson::read;

#[test]
fn heads_begin_as_the_targets_own_prediction_and_learn_to_look_ahead() {
    let (folder, mut engine) = target();
    let output = tempfile::tempdir().unwrap();
    let config = TrainConfig {
        kind: DraftKind::Medusa,
        medusa_heads: 3,
        epochs: 10,
        learning_rate: 0.02,
        ..config(output.path())
    };
    let mut job = layer_job(&config, &folder);
    // Only what the target writes itself can be foreseen further than one token.
    job.learned = written(engine.as_mut(), &job.learned, |token| token);
    job.held_out = written(engine.as_mut(), &job.held_out, |token| token);
    let parts = target_parts(&EngineOptions::new(folder.path())).unwrap();
    let own = job.tokens();
    let network = Network::medusa(&config, (&parts, own.tokens()), &Device::Cpu).unwrap();
    let example = &job.held_out[0];
    let lesson = read(engine.as_mut(), std::slice::from_ref(example), &mut ()).unwrap().remove(0);
    let trained = train_layer(&job, engine.as_mut(), usize::MAX).unwrap();
    let (first, last) = (&trained.history[0], trained.history.last().unwrap());
    assert!(last.held_out_loss < 0.8 * first.held_out_loss, "{:?}", trained.history);
    assert!(last.share("at depth 3").is_some() && last.share("at depth 4").is_none());
    assert!(last.share("first").unwrap() > 0.7, "{:?}", trained.history);
    let [first, last] = [first, last].map(|epoch| epoch.share("at depth 3").unwrap());
    assert!(last > first + 0.1, "{:?}", trained.history);

    // What is drafted with is what was trained: the heads of the engine say, of the same features, the same.
    let told = features(engine.as_mut(), &lesson).unwrap();
    let numbered = own.numbered(&lesson).unwrap();
    let batch = Batch::with_features(&[numbered], std::slice::from_ref(&told), 16, &Device::Cpu).unwrap();
    let tensors = candle_core::safetensors::load(output.path().join("medusa_lm_head.safetensors"), &Device::Cpu);
    let tensors = tensors.unwrap();
    for (name, weight) in network.weights() {
        weight.set(&tensors[&name]).unwrap();
    }
    assert_eq!(tensors.len(), 7);
    let passes = network.forward(&batch, 1).unwrap();
    let options = EngineOptions { drafts: Some(output.path().into()), ..EngineOptions::new(folder.path()) };
    let mut heads = load(&options).unwrap();
    let read = &lesson.tokens[1..lesson.tokens.len() - 1];
    let slot = heads.open(read.len()).unwrap();
    let parents: Vec<u32> = chain_parents(read.len()).collect();
    let before = &told[..16 * read.len()];
    let segment = Segment { slot, tokens: read, parents: &parents, scored_from: 0, before, ..Segment::default() };
    let scores = heads.step(&[segment], 5).unwrap().remove(0);
    for place in 3..lesson.places() - 1 {
        let row = lesson.prompt - 1 + place;
        for (further, pass) in passes.iter().enumerate() {
            let expected = by_token(&job, &pass.logits);
            for candidate in scores.ahead(row - further, further) {
                let trained = expected[place][&candidate.token];
                let difference = (trained - candidate.log_probability).abs();
                assert!(difference < 2e-4, "head {further}, place {place}: {trained} {candidate:?}");
            }
        }
    }
}
