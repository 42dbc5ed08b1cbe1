//! Formats and precisions agree; what cannot be loaded is refused by name.

use std::{fs, path::Path};

use candle_core::quantized::GgmlDType;
use laser_engine::{DTypeOption, Engine, EngineError, EngineOptions, gguf_positions};
use laser_schema::DeviceOption;
use serde_json::json;

use crate::{
    models::{Random, TinyModel, fixture},
    support::{assert_same, assert_within, engine, extend, greedy, load, sequential},
};

#[test]
fn info_describes_the_model() {
    let engine = load(&fixture());
    let info = engine.info();
    assert_eq!((info.vocab_size, info.max_positions, info.parameters), (4096, 1024, 4_614_912));
    assert_eq!(info.architecture, "LlamaForCausalLM");
    assert_eq!((info.dtype.as_str(), info.device.as_str()), ("f32", "cpu"));
}

#[test]
fn the_header_of_a_gguf_file_tells_the_engines_positions() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    TinyModel::new("Llama", json!({})).write_gguf(&file, GgmlDType::F32);
    assert_eq!(gguf_positions(&file), Some(load(&file).info().max_positions));
    fs::write(&file, "GGUF").unwrap();
    assert_eq!(gguf_positions(&file), None);
}

#[test]
fn two_shards_equal_one_file() {
    let model = TinyModel::new("Llama", json!({}));
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), true);
    let tokens = Random::new(1).tokens(12);
    let got = sequential(load(directory.path()).as_mut(), &tokens);
    assert_eq!(got, sequential(engine(&model).as_mut(), &tokens));
}

#[test]
fn a_lone_file_of_weights_may_have_any_name() {
    let model = TinyModel::new("Llama", json!({}));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    model.write(path, false);
    let tokens = Random::new(1).tokens(20);
    let expected = sequential(load(path).as_mut(), &tokens);
    fs::rename(path.join("model.safetensors"), path.join("weights.safetensors")).unwrap();
    assert_eq!(sequential(load(path).as_mut(), &tokens), expected);
    fs::remove_file(path.join("weights.safetensors")).unwrap();
    let file = path.join("weights.gguf");
    model.write_gguf(&file, GgmlDType::F32);
    refused(path, &["weights.gguf: give the path of this file"]);
    assert!(!laser_engine::reads_features(path).unwrap(), "a whole model");
}

/// The model, loaded from a GGUF file.
fn gguf_engine(model: &TinyModel, dtype: GgmlDType) -> Box<dyn Engine> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    model.write_gguf(&file, dtype);
    load(&file)
}

#[test]
fn gguf_in_f32_equals_safetensors() {
    for (name, model) in TinyModel::all() {
        if name == "mistral" || name == "llama 3 rope" {
            continue; // Called llama in GGUF; the rope of Llama 3 is a tensor there, tested below.
        }
        let mut gguf = gguf_engine(&model, GgmlDType::F32);
        assert_eq!(gguf.info().dtype, "gguf");
        let mut safetensors = engine(&model);
        assert_eq!(gguf.info().parameters, safetensors.info().parameters, "{name}");
        let tokens = Random::new(1).tokens(20);
        let expected = sequential(safetensors.as_mut(), &tokens);
        assert_same(&sequential(gguf.as_mut(), &tokens), &expected, name);
    }
}

#[test]
fn quantised_gguf_equals_the_same_quantisation_while_loading() {
    for architecture in ["Llama", "Qwen2", "Qwen3"] {
        let model = TinyModel::new(architecture, json!({}));
        let directory = tempfile::tempdir().unwrap();
        model.write(directory.path(), false);
        let mut options = EngineOptions::new(directory.path());
        options.isq = Some("Q8_0".into());
        let mut quantised = laser_engine::load(&options).unwrap();
        assert_eq!(quantised.info().dtype, "f32+q8_0");
        let tokens = Random::new(1).tokens(20);
        let expected = sequential(quantised.as_mut(), &tokens);
        let got = sequential(gguf_engine(&model, GgmlDType::Q8_0).as_mut(), &tokens);
        assert_eq!(got, expected, "{architecture}");
    }
}

#[test]
fn rope_factors_of_a_gguf_file_are_used() {
    use candle_core::{Device, Tensor};
    // Factors of 8 throughout are linear scaling by 8.
    let scaled = TinyModel::new("Llama", json!({"rope_scaling": {"type": "linear", "factor": 8.0}}));
    let mut with_factors = TinyModel::new("Llama", json!({}));
    let factors = Tensor::full(8.0_f32, 8, &Device::Cpu).unwrap();
    with_factors.tensors.insert("rope_freqs.weight".into(), factors);
    let tokens = Random::new(1).tokens(40);
    let expected = sequential(engine(&scaled).as_mut(), &tokens);
    assert_same(&sequential(gguf_engine(&with_factors, GgmlDType::F32).as_mut(), &tokens), &expected, "factors");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("damaged.gguf");
    let too_few = Tensor::full(8.0_f32, 7, &Device::Cpu).unwrap();
    with_factors.tensors.insert("rope_freqs.weight".into(), too_few);
    with_factors.write_gguf(&file, GgmlDType::F32);
    refused(&file, &["damaged.gguf", "rope_freqs.weight: 7 factors, expected 8"]);
}

/// Share of the fixture's greedy text that another precision would have chosen too, token by token.
fn agreement(options: &EngineOptions) -> f64 {
    let mut exact = load(&fixture());
    let mut other = laser_engine::load(options).unwrap();
    let mut agreed = 0;
    for seed in 0..3 {
        let prompt = Random::new(seed).tokens(16);
        let text = greedy(exact.as_mut(), &prompt, 40);
        let slot = other.open(64).unwrap();
        let mut scores = extend(other.as_mut(), slot, &prompt);
        for token in text {
            agreed += usize::from(scores[0].token == token);
            scores = extend(other.as_mut(), slot, &[token]);
        }
        other.close(slot);
    }
    agreed as f64 / 120.0
}

#[test]
fn lower_precisions_mostly_agree_with_f32() {
    let options =
        |dtype, isq: Option<&str>| EngineOptions { dtype, isq: isq.map(Into::into), ..EngineOptions::new(fixture()) };
    for (options, least) in [
        (options(DTypeOption::F16, None), 0.98),
        (options(DTypeOption::F32, Some("q8_0")), 0.95),
        (options(DTypeOption::F32, Some("q4k")), 0.75),
        (options(DTypeOption::F16, Some("q8_0")), 0.95),
    ] {
        let share = agreement(&options);
        println!("{} {:?}: {share:.3}", options.dtype, options.isq);
        assert!(share >= least, "{options:?}: {share}");
    }
}

/// The path is refused with these words.
fn refused(path: &Path, expected: &[&str]) {
    let options = EngineOptions::new(path);
    let tree = laser_engine::load(&options).err().unwrap().to_string();
    for part in expected {
        assert!(tree.contains(part), "{part:?} is not in: {tree}");
    }
}

#[test]
fn what_cannot_be_loaded_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let model = TinyModel::new("Llama", json!({}));
    refused(&path.join("absent"), &["absent does not exist", "config.json", ".gguf"]);
    refused(Path::new("meta-llama/Llama-3.1-8B"), &["meta-llama/Llama-3.1-8B does not exist", "hub id"]);
    refused(path, &["has no config.json"]);
    model.write(path, false);

    let weights = path.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for (bytes, reason) in [
        (&whole[..whole.len() / 2], "unreadable weights"),
        (&whole[..4], "unreadable weights"),
        (&b""[..], "unreadable weights"),
        (&b"version https://git-lfs.github.com/spec/v1\n"[..], "unreadable weights"),
    ] {
        fs::write(&weights, bytes).unwrap();
        refused(path, &["model.safetensors", reason, "fetch the file again"]);
    }
    fs::remove_file(&weights).unwrap();
    refused(path, &["no weights", "*.safetensors"]);

    let text = path.join("notes.txt");
    fs::write(&text, "hello").unwrap();
    refused(&text, &["notes.txt is neither a directory nor a .gguf file"]);
    let gguf = path.join("broken.gguf");
    fs::write(&gguf, "GGUF").unwrap();
    refused(&gguf, &["broken.gguf", "unreadable weights"]);
}

#[test]
fn missing_shards_and_tensors_and_wrong_shapes_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut model = TinyModel::new("Llama", json!({}));
    model.write(path, true);
    fs::remove_file(path.join("model-00002-of-00002.safetensors")).unwrap();
    refused(path, &["model-00002-of-00002.safetensors is missing", "model.safetensors.index.json names it"]);
    fs::write(path.join("model.safetensors.index.json"), "{}").unwrap();
    refused(path, &["model.safetensors.index.json: weight_map must name"]);
    fs::remove_file(path.join("model.safetensors.index.json")).unwrap();

    let name = "model.layers.1.mlp.up_proj.weight";
    let tensor = model.tensors.remove(name).unwrap();
    model.write(path, false);
    refused(path, &["tensor model.layers.1.mlp.up_proj.weight is missing"]);
    let file = path.join("model.gguf");
    model.write_gguf(&file, GgmlDType::F32);
    refused(&file, &["model.gguf: tensor blk.1.ffn_up.weight is missing"]);
    model.tensors.insert(name.into(), tensor.t().unwrap().contiguous().unwrap());
    model.write(path, false);
    refused(path, &["up_proj.weight has shape [64, 96], expected [96, 64]"]);
    // Qwen2 weights need the biases that a Llama checkpoint does not have.
    model.config["architectures"] = json!(["Qwen2ForCausalLM"]);
    model.write(path, false);
    refused(path, &["tensor model.layers.0.self_attn.q_proj.bias is missing"]);
}

#[test]
fn truncated_gguf_and_unknown_gguf_architecture_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    let mut model = TinyModel::new("Llama", json!({}));
    model.write_gguf(&file, GgmlDType::F32);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    refused(&file, &["model.gguf: unreadable weights"]);
    model.config["model_type"] = json!("falcon");
    model.write_gguf(&file, GgmlDType::F32);
    refused(&file, &["architecture falcon is not supported by the tree engine", "engine = \"mistralrs\""]);
}

/// The fixture's checkpoint is bf16, so both precisions hold the same weights. Beside bf16 keys and values are rounded
/// to it, and rows as well where the processor multiplies pairs.
#[test]
fn bf16_weights_give_the_scores_of_the_same_weights_in_f32() {
    let tokens = Random::new(4).tokens(60);
    let expected = sequential(load(&fixture()).as_mut(), &tokens);
    let bf16 = EngineOptions { dtype: DTypeOption::Bf16, ..EngineOptions::new(fixture()) };
    let mut bf16 = laser_engine::load(&bf16).unwrap();
    assert_eq!(bf16.info().dtype, "bf16");
    let got = sequential(bf16.as_mut(), &tokens);
    assert_within(&got, &expected, 0.1, "bf16");
}

#[test]
fn scores_do_not_depend_on_the_number_of_threads() {
    let tokens = Random::new(5).tokens(40);
    let scores = |dtype, threads| {
        let options = EngineOptions { dtype, threads: Some(threads), ..EngineOptions::new(fixture()) };
        sequential(laser_engine::load(&options).unwrap().as_mut(), &tokens)
    };
    for dtype in [DTypeOption::F32, DTypeOption::Bf16] {
        let one = scores(dtype, 1);
        assert!([2, 3, 7].into_iter().all(|threads| scores(dtype, threads) == one), "{dtype}");
    }
}

#[test]
fn an_engine_tells_its_threads() {
    for threads in [1, 3] {
        let options = EngineOptions { threads: Some(threads), ..EngineOptions::new(fixture()) };
        let told = laser_engine::load(&options).unwrap().threads().unwrap();
        assert_eq!(told.current_num_threads(), threads);
    }
}

#[test]
fn caches_beyond_the_bound_are_refused_until_another_is_closed() {
    // Five layers of 128 keys and 128 values: 5 kB a token in f32, and 2.5 kB in f16, of which a quarter more is kept.
    for (dtype, tokens) in [(DTypeOption::F32, 512), (DTypeOption::F16, 800)] {
        let options = EngineOptions { dtype, cache_mb: Some(3), ..EngineOptions::new(fixture()) };
        let mut engine = laser_engine::load(&options).unwrap();
        let refused = |result: Result<usize, EngineError>| match result {
            Err(error @ EngineError::CacheFull { limit: 3, .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let first = engine.open(tokens / 2).unwrap();
        extend(engine.as_mut(), first, &[3, 4, 5]);
        let message = refused(engine.open(tokens));
        assert!(
            message.contains(&format!("a sequence of {tokens} tokens")) && message.contains("cache_mb"),
            "{message}"
        );
        refused(engine.fork(first, 2, tokens));
        let second = engine.fork(first, 2, tokens / 2).unwrap();
        refused(engine.open(tokens / 2));
        engine.close(second);
        let third = engine.open(tokens / 2).unwrap();
        extend(engine.as_mut(), third, &[3, 4, 5]);
        refused(engine.open(1_000_000));
    }
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    TinyModel::new("Llama", json!({})).write_gguf(&file, GgmlDType::F32);
    let check = |options: EngineOptions, expected: &str| {
        let error = laser_engine::load(&options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let fixture = || EngineOptions::new(fixture());
    let bf16 = EngineOptions { dtype: DTypeOption::Bf16, isq: Some("q8_0".into()), ..fixture() };
    check(bf16, "option dtype = \"bf16\": with isq the CPU has no bf16 activations");
    let isq = EngineOptions { isq: Some("q9".into()), ..fixture() };
    check(isq, "option isq = \"q9\": expected bits");
    let isq = EngineOptions { isq: Some("q4k".into()), ..EngineOptions::new(&file) };
    check(isq, "option isq = \"q4k\": a GGUF file has its own quantisation; leave it out");
    let f16 = EngineOptions { dtype: DTypeOption::F16, ..EngineOptions::new(&file) };
    check(f16, "option dtype = \"f16\": on a CPU a GGUF file runs with f32 activations; choose f32");
    check(EngineOptions { cache_mb: Some(0), ..fixture() }, "option cache_mb = \"0\": expected at least 1 MB");
    check(EngineOptions { threads: Some(0), ..fixture() }, "option threads = \"0\": expected at least 1");
    if cfg!(not(feature = "cuda")) {
        let cuda = EngineOptions { device: DeviceOption::Cuda(0), ..fixture() };
        check(cuda, "option device = \"cuda:0\"");
    }
}

#[cfg(feature = "mistralrs")]
#[tokio::test]
async fn mistralrs_never_sees_an_incomplete_model() {
    let directory = tempfile::tempdir().unwrap();
    let load = async |path: &Path| {
        laser_engine::MistralEngine::load(&EngineOptions::new(path), 1).await.unwrap_err().to_string()
    };
    let error = load(Path::new("meta-llama/Llama-3.1-8B")).await;
    assert!(error.contains("does not exist"), "{error}");
    TinyModel::new("Llama", json!({})).write(directory.path(), false);
    let error = load(directory.path()).await;
    assert!(error.contains("has no tokenizer.json"), "{error}");
}
