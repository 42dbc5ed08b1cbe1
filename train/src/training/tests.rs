//! Whole draft models: what they learn, that a training can be stopped, and what is refused.

use std::collections::HashMap;
use std::fs;

use laser_decode::{TargetScores as _, Token, chain_parents};
use laser_engine::{DTypeOption, Engine, EngineOptions, FakeEngine, FakeOptions, Segment, load};

use super::*;
use crate::course::CHECKPOINT;
use crate::lesson::read;
use crate::network::EMBEDDING;
use crate::output::{CONFIG, WEIGHTS, belongs};

const VOCABULARY: u32 = 40;

/// A language in which the last token decides.
fn target() -> FakeEngine {
    FakeEngine::new(FakeOptions { vocab_size: VOCABULARY, order: 1, ..FakeOptions::default() })
}

/// Texts that the target has not written: what it says of them is what counts.
fn examples(count: u32) -> Vec<Example> {
    let token = |seed: u32| 2 + seed.wrapping_mul(2_654_435_761) % (VOCABULARY - 2);
    let of = |index: u32| Example {
        prompt: (0..3 + index % 5).map(|at| token(index * 100 + at)).collect(),
        text: (0..10 + index % 7).map(|at| token(index * 100 + 50 + at)).collect(),
    };
    (0..count).map(of).collect()
}

pub(super) fn config(folder: &Path) -> TrainConfig {
    TrainConfig {
        output: folder.to_str().unwrap().to_owned(),
        hidden_size: 16,
        intermediate_size: 24,
        layers: 2,
        heads: 2,
        epochs: 2,
        batch_tokens: 200,
        learning_rate: 0.02,
        ..TrainConfig::default()
    }
}

fn job(config: &TrainConfig) -> Job<'_> {
    job_of(config, 80)
}

pub(super) fn job_of(config: &TrainConfig, texts: u32) -> Job<'_> {
    let examples = examples(texts);
    let (held_out, learned) = examples.split_at(16);
    let target = Target {
        digest: "the target".into(),
        tokenizer: "its tokenizer".into(),
        directory: "nowhere".into(),
        vocab_size: VOCABULARY as usize,
        max_positions: 64,
        end_of_text: vec![1],
        bos: Some(0),
    };
    Job {
        config,
        target,
        learned: learned.to_vec(),
        held_out: held_out.to_vec(),
        device: DeviceOption::Cpu,
        parts: None,
        draft: None,
    }
}

/// Runs the job until `steps` steps are made, or to its end.
pub(super) fn run(job: &Job<'_>, steps: usize) -> Result<Option<Trained>> {
    let [learned, held_out] =
        [&job.learned, &job.held_out].map(|examples| read(&mut target(), examples, &mut ()).unwrap());
    let left = std::cell::Cell::new(steps);
    let is_stopped = || {
        let stops = left.get() == 0;
        left.set(left.get().saturating_sub(1));
        stops
    };
    let lessons = Lessons { learned: &learned, held_out: &held_out, engine: None };
    train(job, lessons, &mut (), &is_stopped)
}

pub(super) fn weights(trained: &Trained) -> Vec<u8> {
    fs::read(trained.folder.join("model.safetensors")).unwrap()
}

#[test]
fn a_draft_model_learns_what_the_target_says() {
    for (loss, least) in [(Loss::Kl, 0.8), (Loss::Overlap, 0.8)] {
        let folder = tempfile::tempdir().unwrap();
        let config = TrainConfig { loss, epochs: 12, ..config(folder.path()) };
        let trained = run(&job_of(&config, 1000), usize::MAX).unwrap().unwrap();
        let last = trained.history.last().unwrap();
        assert!(
            ["overlap", "first"].iter().all(|share| last.share(share).unwrap() > least),
            "{loss:?}: {:?}",
            trained.history
        );
        assert!(last.held_out_loss < 0.7 * trained.history[0].held_out_loss, "{loss:?}: {:?}", trained.history);
    }
}

#[test]
fn a_training_that_is_stopped_again_and_again_gives_the_same_weights() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let configs = folders.each_ref().map(|folder| config(folder.path()));
    let whole = run(&job(&configs[0]), usize::MAX).unwrap().unwrap();
    let job = job(&configs[1]);
    let mut stops = 0;
    let stopped = loop {
        assert_eq!(job.finished().unwrap(), None);
        match run(&job, 3).unwrap() {
            Some(trained) => break trained,
            None => stops += 1,
        }
    };
    assert!(stops > 2, "{stops}");
    assert!(weights(&whole) == weights(&stopped));
    // But for the last digits, which JSON may change.
    let reports = |trained: &Trained| {
        let report = |epoch: &Epoch| format!("{:.9} {:.9} {:.9?}", epoch.loss, epoch.held_out_loss, epoch.shares);
        trained.history.iter().map(report).collect::<Vec<_>>()
    };
    assert_eq!(reports(&whole), reports(&stopped));
    assert!(!folders[1].path().join(CHECKPOINT).exists());
    // The same command finds it; another one is told.
    let found = job.finished().unwrap().unwrap();
    assert_eq!((reports(&found), found.kept.epoch, found.is_new), (reports(&stopped), stopped.kept.epoch, false));
    let belongs = belongs(folders[1].path()).unwrap().unwrap();
    assert_eq!((belongs.target.as_str(), belongs.tokenizer.as_str()), ("the target", "its tokenizer"));
    let other = TrainConfig { seed: 1, ..configs[1].clone() };
    let other_tokens = Target { tokenizer: "another".into(), ..job.target.clone() };
    for other in [Job { target: other_tokens, ..self::job(&configs[1]) }, Job { config: &other, ..job }] {
        let error = other.finished().unwrap_err().to_string();
        assert!(error.contains("holds a draft model of another training"), "{error}");
    }
}

#[test]
fn a_model_of_somebody_else_is_not_replaced() {
    for file in [CONFIG, WEIGHTS] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(file), "{}").unwrap();
        let config = config(folder.path());
        let error = job(&config).finished().unwrap_err().to_string();
        assert!(error.contains("holds a model that this training has not made"), "{file}: {error}");
    }
}

#[test]
fn checkpoints_of_another_training_and_damaged_ones_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = config(folder.path());
    assert_eq!(run(&job(&first), 1).unwrap(), None);
    let other = TrainConfig { layers: 1, ..first.clone() };
    let error = run(&job(&other), 1).unwrap_err().to_string();
    assert!(error.contains("checkpoint.safetensors: of a training with other texts"), "{error}");
    fs::write(folder.path().join(CHECKPOINT), "none").unwrap();
    let error = run(&job(&first), 1).unwrap_err().to_string();
    assert!(error.contains("not a checkpoint of a training; remove it"), "{error}");
    let few = Job { held_out: Vec::new(), ..job(&first) };
    let error = run(&few, 1).unwrap_err().to_string();
    assert!(error.contains("64 texts to learn from and 0 to measure on: too few"), "{error}");
}

#[test]
fn a_loss_that_is_not_finite_ends_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { learning_rate: 1e30, ..config(folder.path()) };
    let error = run(&job(&config), usize::MAX).unwrap_err().to_string();
    assert!(error.contains("lower [train] learning_rate"), "{error}");
}

/// The engine that drafts computes what was trained.
#[test]
fn the_engine_computes_what_the_network_does() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let job = job(&config);
    run(&job, usize::MAX).unwrap().unwrap();
    for dtype in [DTypeOption::F32, DTypeOption::F16] {
        let mut options = EngineOptions::new(folder.path());
        options.dtype = dtype;
        let mut engine = load(&options).unwrap();
        let network = trained_network(&job);
        for example in &job.held_out[..4] {
            let lesson = read(&mut target(), std::slice::from_ref(example), &mut ()).unwrap().remove(0);
            let batch = Batch::new(&[job.tokens().numbered(&lesson).unwrap()], &Device::Cpu).unwrap();
            let expected = by_token(&job, &network.forward(&batch, 1).unwrap()[0].logits);
            let tolerance = if dtype == DTypeOption::F32 { 1e-4 } else { 0.05 };
            for (place, row) in scores(engine.as_mut(), example).into_iter().enumerate() {
                for (token, log_probability) in row {
                    let difference = (expected[place][&token] - log_probability).abs();
                    assert!(difference < tolerance, "{dtype}, place {place}, token {token}: {difference}");
                }
            }
        }
    }
}

/// By token the log probabilities of logits `[places, own tokens]`; none of tokens that the draft model does not know.
pub(super) fn by_token(job: &Job<'_>, logits: &Tensor) -> Vec<HashMap<Token, f32>> {
    let rows = candle_nn::ops::log_softmax(logits, 1).unwrap().to_vec2().unwrap();
    let own = job.tokens();
    rows.into_iter().map(|row: Vec<f32>| own.tokens().iter().copied().zip(row).collect()).collect()
}

/// The network with the weights that were written.
fn trained_network(job: &Job<'_>) -> Network {
    let own = job.tokens();
    let network = Network::model(model_shape(job.config), (own.len(), true), 0, &Device::Cpu).unwrap();
    let file = job.folder().join("model.safetensors");
    let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let rows = Tensor::new(own.tokens(), &Device::Cpu).unwrap();
    for (name, weight) in network.weights() {
        let written = &tensors[&name];
        let is_embedding = name == EMBEDDING;
        weight.set(&if is_embedding { written.index_select(&rows, 0).unwrap() } else { written.clone() }).unwrap();
    }
    network
}

/// The engine's most probable tokens at each place of a text.
fn scores(engine: &mut dyn Engine, example: &Example) -> Vec<Vec<(Token, f32)>> {
    let tokens = [example.prompt.as_slice(), &example.text].concat();
    let slot = engine.open(tokens.len()).unwrap();
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let scored_from = example.prompt.len() - 1;
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from, ..Segment::default() };
    let scores = engine.step(&[segment], 5).unwrap();
    let places = scored_from..tokens.len() - 1;
    let of = |node| scores[0].top(node).iter().map(|candidate| (candidate.token, candidate.log_probability)).collect();
    places.map(of).collect()
}
