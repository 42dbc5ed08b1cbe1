//! Models in GGUF's blocks, from files and quantised while loading, on the CPU's kernels.

use candle_core::{
    Device,
    quantized::{GgmlDType, QTensor},
};
use laser_engine::{Engine, EngineOptions};

use crate::{
    models::{Random, TinyModel, gguf_name},
    support::{assert_within, engine, extend, load, path, random_tree, sequential, step},
};

const TYPES: [(GgmlDType, &str); 4] =
    [(GgmlDType::Q4_0, "q4_0"), (GgmlDType::Q4K, "q4k"), (GgmlDType::Q5K, "q5k"), (GgmlDType::Q6K, "q6k")];

/// Difference of log probabilities that rounding x to 8 bits in blocks of 32 makes in these models.
const ROUNDING: f32 = 0.1;

/// The same where the embedding, which is wide, makes logits ten times as large.
const ROUNDING_TIED: f32 = 0.7;

/// The mixture that files called Q4_K_M are.
fn mixed(name: &str) -> GgmlDType {
    match name {
        name if ["token_embd", "output.", "attn_v", "ffn_down"].iter().any(|part| name.contains(part)) => {
            GgmlDType::Q6K
        }
        _ => GgmlDType::Q4K,
    }
}

fn quantised(model: &TinyModel, isq: &str) -> Box<dyn Engine> {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), false);
    let options = EngineOptions { isq: Some(isq.into()), ..EngineOptions::new(directory.path()) };
    laser_engine::load(&options).unwrap()
}

fn gguf(model: &TinyModel, dtype: impl Fn(&str) -> GgmlDType) -> Box<dyn Engine> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    model.write_mixed_gguf(&file, dtype);
    load(&file)
}

/// The model whose matrices are what their blocks stand for.
fn rounded(mut model: TinyModel, dtype: impl Fn(&str) -> GgmlDType) -> TinyModel {
    for (name, tensor) in &mut model.tensors {
        if tensor.rank() == 2 {
            let blocks = QTensor::quantize(tensor, dtype(&gguf_name(name))).unwrap();
            *tensor = blocks.dequantize(&Device::Cpu).unwrap();
        }
    }
    model
}

#[test]
fn a_file_of_blocks_equals_the_same_type_while_loading_to_the_bit() {
    for (dtype, isq) in TYPES {
        let model = TinyModel::wide("Llama", false);
        let of = |name: &str| if name.starts_with("token_embd") { GgmlDType::F32 } else { dtype };
        let (mut file, mut loaded) = (gguf(&model, of), quantised(&model, isq));
        assert_eq!(file.info().parameters, loaded.info().parameters);
        let tokens = Random::new(1).tokens(20);
        assert_eq!(sequential(file.as_mut(), &tokens), sequential(loaded.as_mut(), &tokens), "{isq}");
    }
}

#[test]
fn blocks_of_any_mixture_differ_from_their_f32_values_by_the_rounding_of_x() {
    let uniform = TYPES.map(|(dtype, _)| Box::new(move |_: &str| dtype) as Box<dyn Fn(&str) -> GgmlDType>);
    let mixtures = uniform.into_iter().chain([Box::new(mixed) as Box<dyn Fn(&str) -> GgmlDType>]);
    for (number, dtype) in mixtures.enumerate() {
        for (architecture, tied) in [("Llama", true), ("Llama", false), ("Qwen2", false), ("Qwen3", false)] {
            let model = || TinyModel::wide(architecture, tied);
            let mut exact = engine(&rounded(model(), &dtype));
            let mut blocks = gguf(&model(), &dtype);
            assert_eq!(blocks.info().parameters, exact.info().parameters, "{architecture}");
            let tokens = Random::new(2).tokens(20);
            let (got, expected) = (sequential(blocks.as_mut(), &tokens), sequential(exact.as_mut(), &tokens));
            let tolerance = if tied { ROUNDING_TIED } else { ROUNDING };
            assert_within(&got, &expected, tolerance, &format!("{architecture}, mixture {number}"));
        }
    }
}

#[test]
fn blocks_give_the_same_scores_for_every_tree_and_chunk_to_the_bit() {
    let model = TinyModel::wide("Llama", true);
    let engines = TYPES.map(|(_, isq)| quantised(&model, isq));
    for mut engine in engines.into_iter().chain([gguf(&model, mixed)]) {
        let mut random = Random::new(3);
        let context = random.tokens(20);
        for nodes in [7, 16, 33] {
            let (tokens, parents) = random_tree(&mut random, nodes);
            let slot = engine.open(64).unwrap();
            context.chunks(13).for_each(|chunk| drop(extend(engine.as_mut(), slot, chunk)));
            let scores = step(engine.as_mut(), slot, &tokens, &parents, 0);
            engine.close(slot);
            for (node, scores) in scores.iter().enumerate() {
                let path: Vec<u32> = path(&parents, node).into_iter().map(|node| tokens[node]).collect();
                let expected = sequential(engine.as_mut(), &[&context[..], &path].concat());
                assert_eq!(scores, &expected, "{nodes} nodes, node {node}");
            }
        }
    }
}

#[test]
fn blocks_that_the_kernels_do_not_know_run_on_tensors() {
    let model = TinyModel::wide("Llama", false);
    for dtype in [GgmlDType::Q3K, GgmlDType::Q5_0] {
        let of = |name: &str| if name.contains("ffn") { dtype } else { GgmlDType::Q4K };
        let (mut blocks, mut exact) = (gguf(&model, of), engine(&rounded(TinyModel::wide("Llama", false), of)));
        let tokens = Random::new(4).tokens(20);
        let (got, expected) = (sequential(blocks.as_mut(), &tokens), sequential(exact.as_mut(), &tokens));
        assert_within(&got, &expected, ROUNDING, &format!("{dtype:?}"));
    }
}
