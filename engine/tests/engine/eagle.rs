//! Features, and the layer that drafts from them.

use std::path::Path;

use candle_core::Tensor;
use laser_decode::{Candidate, TargetScores};
use laser_engine::{DTypeOption, Engine, EngineOptions, Segment, load, reads_features, selftest};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    models::{Random, TinyModel, VOCAB},
    support::{TOP_K, assert_same, assert_within, chain, path, random_tree},
};

/// A folder with a model.
pub(crate) fn folder(model: &TinyModel) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), false);
    directory
}

/// A layer as it is published: one decoder layer without the norm before attention, the projection `fc`, and a copy of
/// the target's embedding, which is not read. This one is another, so that it would be noticed.
pub(crate) fn layer(bias: bool) -> TinyModel {
    let mut layer = TinyModel::new("Llama", json!({"num_hidden_layers": 1}));
    // An embedding of twice the width is as good a projection as any.
    let wide = TinyModel::new("Llama", json!({"num_hidden_layers": 1, "hidden_size": 128}));
    let fusion = wide.tensors["model.embed_tokens.weight"].narrow(0, 0, 64).unwrap();
    let of_layer =
        |name: &str| name.strip_prefix("model.").filter(|name| name.starts_with("layers.")).map(String::from);
    let tensors = layer.tensors.drain().filter_map(|(name, tensor)| Some((of_layer(&name)?, tensor)));
    layer.tensors = tensors.filter(|(name, _)| !name.contains("input_layernorm")).collect();
    layer.tensors.insert("fc.weight".into(), (fusion * 0.2).unwrap());
    let embedding = wide.tensors["model.embed_tokens.weight"].narrow(1, 0, 64).unwrap().contiguous().unwrap();
    layer.tensors.insert("embed_tokens.weight".into(), embedding);
    if bias {
        layer.tensors.insert("fc.bias".into(), wide.tensors["model.norm.weight"].narrow(0, 0, 64).unwrap());
    }
    layer
}

pub(crate) fn options(target: &Path, layer: &Path) -> EngineOptions {
    EngineOptions { drafts: Some(layer.into()), ..EngineOptions::new(target) }
}

/// A model's projection to the vocabulary.
pub(crate) fn vocabulary(model: &TinyModel) -> &Tensor {
    model.tensors.get("lm_head.weight").unwrap_or(&model.tensors["model.embed_tokens.weight"])
}

/// The most probable tokens of a feature under the matrix of the vocabulary.
pub(crate) fn unembed(matrix: &Tensor, feature: &[f32]) -> Vec<Candidate> {
    let matrix = matrix.to_vec2::<f32>().unwrap();
    let logit = |row: &Vec<f32>| row.iter().zip(feature).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let logits: Vec<f64> = matrix.iter().map(logit).collect();
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum = most + logits.iter().map(|logit| (logit - most).exp()).sum::<f64>().ln();
    let mut all: Vec<Candidate> =
        (0..).zip(logits).map(|(token, logit)| Candidate { token, log_probability: (logit - sum) as f32 }).collect();
    all.sort_by(|a, b| b.log_probability.total_cmp(&a.log_probability));
    all.truncate(TOP_K);
    all
}

#[test]
fn the_feature_of_a_node_is_what_its_scores_are_made_of() {
    for (name, model) in TinyModel::all() {
        let folder = folder(&model);
        for (dtype, tolerance) in [(DTypeOption::F32, 2e-4), (DTypeOption::F16, 0.1)] {
            let mut options = EngineOptions::new(folder.path());
            options.dtype = dtype;
            let (mut engine, mut plain) = (load(&options).unwrap(), load(&options).unwrap());
            engine.keep_features();
            let mut random = Random::new(3);
            let (tokens, parents) = random_tree(&mut random, 12);
            let slots = [engine.open(32).unwrap(), engine.open(32).unwrap()];
            let plain_slot = plain.open(32).unwrap();
            let segment =
                Segment { slot: slots[0], tokens: &tokens, parents: &parents, scored_from: 0, ..Segment::default() };
            // The features of a chunk that is not scored come as well.
            let unscored = Segment { slot: slots[1], scored_from: 12, ..segment };
            let scores = engine.step(&[segment, unscored], TOP_K).unwrap();
            let expected = plain.step(&[Segment { slot: plain_slot, ..segment }], TOP_K).unwrap();
            for node in 0..12 {
                let what = format!("{name}, {dtype}, node {node}");
                assert_within(scores[0].top(node), expected[0].top(node), tolerance, &what);
                assert_within(
                    scores[0].top(node),
                    &unembed(vocabulary(&model), scores[0].feature(node)),
                    tolerance,
                    &what,
                );
                let pairs = scores[0].feature(node).iter().zip(scores[1].feature(node));
                assert!(pairs.clone().all(|(a, b)| (a - b).abs() < tolerance) && pairs.count() == 64, "{what}");
                assert!(expected[0].feature(node).is_empty() && scores[1].top(node).is_empty());
            }
        }
    }
}

/// Features at random, `nodes` of them.
pub(crate) fn features(random: &mut Random, nodes: usize) -> Vec<f32> {
    (0..64 * nodes).map(|_| random.below(2000) as f32 / 1000.0 - 1.0).collect()
}

/// The feature and the scores of a path's last node, fed as a chain.
fn along(engine: &mut dyn Engine, tokens: &[u32], before: &[f32]) -> (Vec<f32>, Vec<Candidate>) {
    let slot = engine.open(tokens.len()).unwrap();
    let (parents, last) = (chain(tokens.len()), tokens.len() - 1);
    let segment = Segment { slot, tokens, parents: &parents, scored_from: last, before, ..Segment::default() };
    let scores = engine.step(&[segment], TOP_K).unwrap();
    engine.close(slot);
    (scores[0].feature(last).to_vec(), scores[0].top(last).to_vec())
}

#[test]
fn a_layer_reads_trees_as_it_reads_chains_and_passes_the_self_test() {
    for (bias, tied) in [(false, false), (true, true)] {
        let target = TinyModel::new("Llama", json!({"tie_word_embeddings": tied}));
        let (target_folder, layer_folder) = (folder(&target), folder(&layer(bias)));
        let options = options(target_folder.path(), layer_folder.path());
        assert!(reads_features(layer_folder.path()).unwrap() && !reads_features(target_folder.path()).unwrap());
        selftest(&options).unwrap();
        let mut engine = load(&options).unwrap();
        assert!(engine.info().reads_features && engine.info().hidden_size == 64);
        engine.keep_features();
        let mut random = Random::new(5);
        let (tokens, parents) = random_tree(&mut random, 20);
        let before = features(&mut random, 20);
        let slot = engine.open(20).unwrap();
        let segment =
            Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, before: &before, ..Segment::default() };
        let scores = engine.step(&[segment], TOP_K).unwrap();
        for node in 0..20 {
            let path = path(&parents, node);
            let tokens: Vec<u32> = path.iter().map(|&node| tokens[node]).collect();
            let before: Vec<f32> = path.iter().flat_map(|&node| before[64 * node..][..64].to_vec()).collect();
            let (feature, top) = along(engine.as_mut(), &tokens, &before);
            assert_same(scores[0].top(node), &top, "a chain");
            assert_same(scores[0].top(node), &unembed(vocabulary(&target), &feature), "its feature");
            assert!(scores[0].feature(node).iter().zip(&feature).all(|(a, b)| (a - b).abs() < 1e-4));
        }
    }
}

#[test]
fn layers_of_another_model_and_wrong_features_are_refused() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    let refused = |layer: &TinyModel, words: &str| {
        let folder = folder(layer);
        let error = load(&options(target.path(), folder.path())).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    };
    let with = |key: &str, value: usize| {
        let mut layer = layer(false);
        layer.config[key] = value.into();
        layer
    };
    refused(&with("hidden_size", 32), "hidden_size is 32, that of the model it is to draft for 64");
    refused(&with("vocab_size", 100), &format!("vocab_size is 100, that of the model it is to draft for {VOCAB}"));
    refused(&TinyModel::new("Llama", json!({})), "fc.weight is missing: not an EAGLE layer");
    refused(&with("num_hidden_layers", 2), "layers.1.input_layernorm.weight is missing");
    let layer = folder(&layer(false));
    let mut engines =
        [load(&options(target.path(), layer.path())).unwrap(), load(&EngineOptions::new(target.path())).unwrap()];
    for (engine, numbers) in engines.iter_mut().zip([63, 64]) {
        let slot = engine.open(4).unwrap();
        let before = vec![0.0; numbers];
        let segment =
            Segment { slot, tokens: &[3], parents: &chain(1), scored_from: 0, before: &before, ..Segment::default() };
        let error = engine.step(&[segment], 1).err().unwrap().to_string();
        assert!(error.contains(&format!("features of {numbers} numbers, expected ")), "{error}");
    }
}
