//! Draft models that tell of some tokens only, against the same models that tell of all.

use std::path::Path;

use candle_core::{Device, Tensor};
use laser_decode::{Candidate, TargetScores};
use laser_engine::{Asked, DRAFT_TOKENS, DTypeOption, Engine, EngineOptions, Segment, check_drafts, load};
use serde_json::json;

use crate::{
    eagle::{features, folder, layer, options},
    medusa,
    models::{Random, TinyModel, VOCAB},
    support::{TOP_K, assert_within, random_tree},
};

const NODES: usize = 9;

/// What an engine tells of a random tree: for each node and each token ahead.
fn told(engine: &mut dyn Engine, top_k: usize) -> Vec<Vec<Candidate>> {
    let mut random = Random::new(17);
    let (tokens, parents) = random_tree(&mut random, NODES);
    let before = if engine.info().reads_features { features(&mut random, NODES) } else { Vec::new() };
    let slot = engine.open(NODES).unwrap();
    let segment = Segment { slot, tokens: &tokens, parents: &parents, before: &before, ..Segment::default() };
    let scores = engine.step(&[segment], top_k).unwrap();
    let ahead = engine.info().ahead();
    for node in 0..NODES {
        assert_eq!(scores[0].prediction(node).choice.token, scores[0].top(node)[0].token);
    }
    (0..NODES * ahead).map(|at| scores[0].ahead(at / ahead, at % ahead).to_vec()).collect()
}

/// Candidates for these tokens alone, relative to each other.
fn among(all: &[Candidate], tokens: &[u32]) -> Vec<Candidate> {
    let mut kept: Vec<Candidate> =
        all.iter().filter(|found| tokens.binary_search(&found.token).is_ok()).copied().collect();
    let sum = kept.iter().map(|found| f64::from(found.log_probability).exp()).sum::<f64>().ln() as f32;
    kept.iter_mut().for_each(|found| found.log_probability -= sum);
    kept.truncate(TOP_K);
    kept
}

/// Holds weights against the same with some tokens: `of_tokens` are the options of the latter.
fn compare(whole: &EngineOptions, of_tokens: &EngineOptions, tokens: &[u32], what: &str) {
    for (dtype, isq, tolerance) in [
        (DTypeOption::F32, None, 2e-4),
        (DTypeOption::Bf16, None, 2e-4),
        (DTypeOption::F32, Some("q8_0"), 2e-4),
        // Blocks as GGUF stores them.
        (DTypeOption::F32, Some("q4_0"), 2e-4),
        (DTypeOption::F16, None, 0.1),
    ] {
        let isq = isq.map(str::to_owned);
        let [mut all, mut some] = [whole, of_tokens]
            .map(|options| load(&EngineOptions { dtype, isq: isq.clone(), ..options.clone() }).unwrap());
        assert_eq!(some.info().vocab_size, VOCAB);
        for (all, some) in told(all.as_mut(), VOCAB).iter().zip(told(some.as_mut(), TOP_K)) {
            assert_within(&some, &among(all, tokens), tolerance, &format!("{what}, {dtype}, {isq:?}"));
        }
    }
}

fn tokens() -> Vec<u32> {
    (0..VOCAB as u32).filter(|token| token % 7 == 3 || token % 11 == 0).collect()
}

fn tensor(tokens: &[u32]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu).unwrap()
}

#[test]
fn a_draft_model_of_some_tokens_tells_of_them_what_the_whole_one_does() {
    let tokens = tokens();
    for tied in [false, true] {
        let target = TinyModel::new("Llama", json!({"tie_word_embeddings": tied}));
        let mut of_tokens = target.clone();
        of_tokens.tensors.insert(DRAFT_TOKENS.into(), tensor(&tokens));
        let (whole, some) = (folder(&target), folder(&of_tokens));
        compare(&EngineOptions::new(whole.path()), &EngineOptions::new(some.path()), &tokens, "model");

        let mut of_tokens = layer(true);
        of_tokens.tensors.insert(DRAFT_TOKENS.into(), tensor(&tokens));
        let (all, some) = (folder(&layer(true)), folder(&of_tokens));
        let of = |layer: &Path| options(whole.path(), layer);
        compare(&of(all.path()), &of(some.path()), &tokens, "EAGLE's layer");

        for own in [false, true] {
            let mut heads = medusa::heads(2, 1, own);
            let all = medusa::write(&heads);
            heads.insert(DRAFT_TOKENS.into(), tensor(&tokens));
            let some = medusa::write(&heads);
            compare(&of(all.path()), &of(some.path()), &tokens, "Medusa's heads");
        }
    }
}

#[test]
fn fewer_tokens_than_are_asked_for_are_all_told() {
    let mut model = TinyModel::new("Llama", json!({}));
    model.tensors.insert(DRAFT_TOKENS.into(), tensor(&[5, 4000]));
    let folder = folder(&model);
    let mut engine = load(&EngineOptions::new(folder.path())).unwrap();
    for candidates in told(engine.as_mut(), TOP_K) {
        let mut found: Vec<u32> = candidates.iter().map(|candidate| candidate.token).collect();
        found.sort_unstable();
        assert_eq!(found, [5, 4000]);
    }
    let slot = engine.open(1).unwrap();
    let asked = Asked { tokens: &[5], ends: &[1] };
    let segment = Segment { slot, tokens: &[1], parents: &[u32::MAX], asked, ..Segment::default() };
    let error = engine.step(&[segment], 1).unwrap_err().to_string();
    assert!(error.contains("tells of some tokens only"), "{error}");
}

#[test]
fn tokens_that_are_none_are_refused() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    let models = [(TinyModel::new("Llama", json!({})), false), (layer(true), true)];
    for (mut model, reads_features) in models {
        for damaged in [&[][..], &[7, 7], &[9, 8], &[1, VOCAB as u32]] {
            model.tensors.insert(DRAFT_TOKENS.into(), tensor(damaged));
            let folder = folder(&model);
            let options = match reads_features {
                true => options(target.path(), folder.path()),
                false => EngineOptions::new(folder.path()),
            };
            for error in [load(&options).err(), check_drafts(&options).err()] {
                let error = error.unwrap().to_string();
                let expected = "draft_tokens: not token ids below 4096 in ascending order";
                assert!(error.contains(expected), "{damaged:?}: {error}");
            }
        }
    }
}
