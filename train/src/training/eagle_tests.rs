//! EAGLE's layer for a target that is itself one of this crate's small models.

use std::fs;

use laser_decode::{TargetScores as _, Token, chain_parents};
use laser_engine::{Engine, EngineOptions, Segment, load, target_parts};
use tempfile::TempDir;

use super::tests::{by_token, config, job_of, run, weights};
use super::*;
use crate::lesson::read;

/// A target that has learned the fake's language, and its folder.
pub(super) fn target() -> (TempDir, Box<dyn Engine>) {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { epochs: 6, ..config(folder.path()) };
    run(&job_of(&config, 400), usize::MAX).unwrap().unwrap();
    let engine = load(&EngineOptions::new(folder.path())).unwrap();
    (folder, engine)
}

/// The same examples with texts that the engine writes, but for what `change` makes of its tokens.
pub(super) fn written(engine: &mut dyn Engine, examples: &[Example], change: impl Fn(Token) -> Token) -> Vec<Example> {
    let mut next = |tokens: &[Token]| {
        let slot = engine.open(tokens.len()).unwrap();
        let parents: Vec<u32> = chain_parents(tokens.len()).collect();
        let last = tokens.len() - 1;
        let segment = Segment { slot, tokens, parents: &parents, scored_from: last, ..Segment::default() };
        let scores = engine.step(&[segment], 1).unwrap();
        engine.close(slot);
        change(scores[0].top(last)[0].token)
    };
    let mut write = |Example { prompt, text }: &Example| {
        let mut tokens = prompt.clone();
        text.iter().for_each(|_| tokens.push(next(&tokens)));
        Example { prompt: prompt.clone(), text: tokens.split_off(prompt.len()) }
    };
    examples.iter().map(&mut write).collect()
}

/// A layer for it, on the texts of [`job_of`].
pub(super) fn layer_job<'a>(config: &'a TrainConfig, target: &TempDir) -> Job<'a> {
    let parts = target_parts(&EngineOptions::new(target.path())).unwrap();
    Job { parts: Some(parts), ..job_of(config, 400) }
}

fn layer_config(folder: &Path) -> TrainConfig {
    TrainConfig { kind: DraftKind::Eagle, learning_rate: 0.01, ..config(folder) }
}

/// Runs the job until `steps` steps are made, or to its end.
pub(super) fn train_layer(job: &Job<'_>, engine: &mut dyn Engine, steps: usize) -> Option<Trained> {
    let [learned, held_out] = [&job.learned, &job.held_out].map(|examples| read(engine, examples, &mut ()).unwrap());
    engine.keep_features();
    let left = std::cell::Cell::new(steps);
    let is_stopped = || left.replace(left.get().saturating_sub(1)) == 0;
    let lessons = Lessons { learned: &learned, held_out: &held_out, engine: Some(engine) };
    train(job, lessons, &mut (), &is_stopped).unwrap()
}

#[test]
fn a_layer_learns_what_its_target_says_and_can_be_stopped() {
    let (folder, mut engine) = target();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let configs = folders.each_ref().map(|folder| TrainConfig { epochs: 8, ..layer_config(folder.path()) });
    let whole = train_layer(&layer_job(&configs[0], &folder), engine.as_mut(), usize::MAX).unwrap();
    let (first, last) = (&whole.history[0], whole.history.last().unwrap());
    assert!(
        last.share("overlap").unwrap() > 0.7 && last.held_out_loss < 0.7 * first.held_out_loss,
        "{:?}",
        whole.history
    );
    assert!(["at depth 2", "at depth 3"].iter().all(|depth| last.share(depth).unwrap() > 0.5), "{last:?}");
    assert_eq!(last.share("at depth 4"), None);
    let job = layer_job(&configs[1], &folder);
    assert_eq!(train_layer(&job, engine.as_mut(), 20), None);
    let stopped = train_layer(&job, engine.as_mut(), usize::MAX).unwrap();
    assert!(weights(&whole) == weights(&stopped));
}

/// Appends tokens to a slot and commits them; the scores and features of all.
fn feed(engine: &mut dyn Engine, slot: usize, tokens: &[Token], before: &[f32]) -> laser_engine::Scores {
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let segment = Segment { slot, tokens, parents: &parents, scored_from: 0, before, ..Segment::default() };
    let scores = engine.step(&[segment], 5).unwrap().remove(0);
    engine.commit(slot, &(0..tokens.len()).collect::<Vec<_>>()).unwrap();
    scores
}

/// Of each pass: what the engine that drafts computes at a depth is what was trained there.
#[test]
fn drafting_computes_at_every_depth_what_was_trained() {
    let (target_folder, mut target) = target();
    let folder = tempfile::tempdir().unwrap();
    let config = layer_config(folder.path());
    let job = layer_job(&config, &target_folder);
    train_layer(&job, target.as_mut(), usize::MAX).unwrap();
    let options = EngineOptions { drafts: Some(folder.path().into()), ..EngineOptions::new(target_folder.path()) };
    let mut engine = load(&options).unwrap();
    engine.keep_features();
    let network = trained(&job);
    for example in &job.held_out[..3] {
        let lesson = read(target.as_mut(), std::slice::from_ref(example), &mut ()).unwrap().remove(0);
        let told = features(target.as_mut(), &lesson).unwrap();
        let numbered = job.tokens().numbered(&lesson).unwrap();
        let batch = Batch::with_features(&[numbered], std::slice::from_ref(&told), 16, &Device::Cpu).unwrap();
        let passes = network.forward(&batch, 3).unwrap();
        let read = &lesson.tokens[1..lesson.tokens.len() - 1];
        for place in 2..lesson.places() - 1 {
            // The row from which the place is foretold, and as many rows before it as the depth has own features.
            let row = lesson.prompt - 1 + place;
            for (depth, pass) in passes.iter().enumerate() {
                let slot = engine.open(read.len()).unwrap();
                let known = row - depth;
                let mut scores = feed(engine.as_mut(), slot, &read[..=known], &told[..16 * (known + 1)]);
                let mut own = scores.feature(known).to_vec();
                for at in known + 1..=row {
                    scores = feed(engine.as_mut(), slot, &read[at..=at], &own);
                    own = scores.feature(0).to_vec();
                }
                engine.close(slot);
                let last = if depth == 0 { known } else { 0 };
                let expected = by_token(&job, &pass.logits);
                for candidate in scores.top(last) {
                    let trained = expected[place][&candidate.token];
                    let difference = (trained - candidate.log_probability).abs();
                    assert!(difference < 2e-4, "depth {depth}, place {place}: {trained} {candidate:?}");
                }
            }
        }
    }
}

/// The layer with the weights that were written.
fn trained(job: &Job<'_>) -> Network {
    let own = job.tokens();
    let network = Network::eagle(job.config, (job.parts.as_ref().unwrap(), own.tokens()), &Device::Cpu).unwrap();
    let tensors = candle_core::safetensors::load(job.folder().join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, weight) in network.weights() {
        weight.set(&tensors[&name]).unwrap();
    }
    assert_eq!(tensors.len(), network.weights().len() + 1);
    let config = fs::read_to_string(job.folder().join("config.json")).unwrap();
    assert!(config.contains("\"num_hidden_layers\": 1"), "{config}");
    network
}
