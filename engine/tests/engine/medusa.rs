//! Medusa's heads against their definition.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use laser_engine::{DTypeOption, EngineOptions, Segment, load, reads_features, selftest};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    eagle::{features, folder, options, unembed, vocabulary},
    models::{Random, TinyModel, VOCAB},
    support::{TOP_K, assert_within, chain, random_tree},
};

const HIDDEN: usize = 64;

/// The heads' weights by their published names.
pub(crate) fn heads(heads: usize, blocks: usize, own_vocabulary: bool) -> HashMap<String, Tensor> {
    let mut random = Random::new(11);
    let mut tensors = HashMap::new();
    for head in 0..heads {
        for block in 0..blocks {
            let name = |part: &str| format!("{head}.{block}.linear.{part}");
            tensors.insert(name("weight"), random.tensor(&[HIDDEN, HIDDEN], 0.3));
            tensors.insert(name("bias"), random.tensor(&[HIDDEN], 0.3));
        }
        if own_vocabulary {
            tensors.insert(format!("{head}.{blocks}.weight"), random.tensor(&[VOCAB, HIDDEN], 0.3));
        }
    }
    tensors
}

pub(crate) fn write(tensors: &HashMap<String, Tensor>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(tensors, folder.path().join("medusa_lm_head.safetensors")).unwrap();
    folder
}

/// The blocks of a head: x + SiLU(W x + b), one after the other.
fn blocks(tensors: &HashMap<String, Tensor>, head: usize, feature: &[f32]) -> Vec<f32> {
    let mut x = Tensor::new(feature, &Device::Cpu).unwrap();
    for block in 0.. {
        let Some(weight) = tensors.get(&format!("{head}.{block}.linear.weight")) else {
            break;
        };
        let bias = &tensors[&format!("{head}.{block}.linear.bias")];
        let y = (weight.matmul(&x.unsqueeze(1).unwrap()).unwrap().squeeze(1).unwrap() + bias).unwrap();
        x = (x + y.silu().unwrap()).unwrap();
    }
    x.to_vec1().unwrap()
}

#[test]
fn every_head_tells_by_its_definition_and_passes_the_self_test() {
    for (count, layers, own, tied) in
        [(3, 1, false, false), (2, 2, true, false), (4, 1, false, true), (1, 1, true, true)]
    {
        let target = TinyModel::new("Llama", json!({"tie_word_embeddings": tied}));
        let tensors = heads(count, layers, own);
        let (target_folder, heads_folder) = (folder(&target), write(&tensors));
        assert!(reads_features(heads_folder.path()).unwrap());
        for (dtype, tolerance) in [(DTypeOption::F32, 2e-4), (DTypeOption::F16, 0.1)] {
            let options = EngineOptions { dtype, ..options(target_folder.path(), heads_folder.path()) };
            selftest(&options).unwrap();
            let mut engine = load(&options).unwrap();
            assert_eq!((engine.info().heads, engine.info().ahead()), (Some(count), count));
            assert!(engine.info().reads_features);
            let mut random = Random::new(5);
            let (tokens, parents) = random_tree(&mut random, 7);
            let before = features(&mut random, 7);
            let slots = [engine.open(20).unwrap(), engine.open(20).unwrap()];
            let tree = Segment {
                slot: slots[0],
                tokens: &tokens,
                parents: &parents,
                scored_from: 0,
                before: &before,
                ..Segment::default()
            };
            // Of a chunk only the last token is asked about.
            let parents = chain(3);
            let chunk = Segment {
                slot: slots[1],
                tokens: &tokens[..3],
                parents: &parents,
                scored_from: 2,
                before: &before[..3 * HIDDEN],
                ..tree
            };
            let scores = engine.step(&[chunk, tree], TOP_K).unwrap();
            for (scores, node) in [(&scores[0], 2)].into_iter().chain((0..7).map(|node| (&scores[1], node))) {
                for head in 0..count {
                    let x = blocks(&tensors, head, &before[HIDDEN * node..][..HIDDEN]);
                    let own = tensors.get(&format!("{head}.{layers}.weight"));
                    let expected = unembed(own.unwrap_or(vocabulary(&target)), &x);
                    let what = format!("head {head} of {count}, {dtype}, node {node}");
                    assert_within(scores.ahead(node, head), &expected, tolerance, &what);
                }
                assert!(scores.ahead(node, count).is_empty());
            }
            assert!(scores[0].ahead(1, 0).is_empty());
            engine.commit(slots[1], &[0, 1, 2]).unwrap();
            assert_eq!(engine.cached(slots[1]), 3);
        }
    }
}

#[test]
fn heads_of_another_model_are_refused() {
    let target = folder(&TinyModel::new("Llama", json!({})));
    let refused = |tensors: &HashMap<String, Tensor>, words: &[&str]| {
        let folder = write(tensors);
        let error = load(&options(target.path(), folder.path())).err().unwrap().to_string();
        words.iter().for_each(|words| assert!(error.contains(words), "{error}"));
    };
    let with = |name: &str, shape: &[usize]| {
        let mut tensors = heads(2, 1, true);
        tensors.insert(name.to_owned(), Random::new(1).tensor(shape, 1.0));
        tensors
    };
    refused(&with("1.0.linear.weight", &[32, 32]), &["medusa_lm_head.safetensors", "1.0.linear.weight", "32", "64"]);
    refused(&with("0.1.weight", &[100, HIDDEN]), &["0.1.weight", "100", &VOCAB.to_string()]);
    let mut tensors = heads(2, 1, true);
    tensors.remove("1.1.weight");
    refused(&tensors, &["1.1.weight is missing"]);
    let none = HashMap::from([("fc.weight".to_owned(), Random::new(1).tensor(&[4], 1.0))]);
    refused(&none, &["0.0.linear.weight is missing", "not the heads of Medusa"]);
}
