//! The encoder against sentence-transformers (all-MiniLM-L6-v2, where LASER_MINILM names it) and against itself
//! (a tiny BERT of random weights).

mod tiny_bert;

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

fn tiny() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny_bert::write(dir.path(), 7);
    dir
}

fn open(dir: &Path, config: &EncoderConfig) -> Result<Encoder, EncoderError> {
    Encoder::load(&EncoderFiles::open(dir, config)?)
}

fn encode(dir: &Path, config: &EncoderConfig, texts: &[&str]) -> Encoded {
    open(dir, config).unwrap().encode(texts).unwrap()
}

fn edit(file: PathBuf, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut json);
    fs::write(file, json.to_string()).unwrap();
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn minilm() -> PathBuf {
    match std::env::var_os("LASER_MINILM") {
        Some(directory) => directory.into(),
        None => panic!("LASER_MINILM is not set: pass the tests with tests/run.sh, or `source tests/encoder.sh` first"),
    }
}

#[derive(Deserialize)]
struct Reference {
    text: String,
    mean_normalised: Vec<f32>,
    cls: Vec<f32>,
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let directory = minilm();
    let lines = include_str!("../../../fixtures/minilm-embeddings/embeddings.jsonl").lines();
    let cases: Vec<Reference> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<&str> = cases.iter().map(|case| case.text.as_str()).collect();
    let own = EncoderConfig::default();
    let cls = EncoderConfig { pooling: Some(Pooling::Cls), normalise: Some(false), ..own.clone() };
    type Expected = fn(&Reference) -> &[f32];
    let mean: Expected = |case| &case.mean_normalised;
    for (config, expected) in [(own, mean), (cls, |case| &case.cls)] {
        let encoded = encode(&directory, &config, &texts);
        assert_eq!(encoded.truncated, 1, "the fifth text has more than 256 tokens");
        for (case, row) in cases.iter().zip(encoded.embeddings.rows()) {
            let difference = largest_difference(row, expected(case));
            assert!(difference < 1e-4, "{difference} for {:?}", case.text);
        }
    }
}

#[test]
fn pooling_is_that_of_naive_code() {
    let dir = tiny();
    let texts = ["a tale of two bakers", "noir", ""];
    for (pooling, normalise) in [(Pooling::Mean, false), (Pooling::Mean, true), (Pooling::Cls, true)] {
        let config = EncoderConfig { pooling: Some(pooling), normalise: Some(normalise), ..EncoderConfig::default() };
        let encoder = open(dir.path(), &config).unwrap();
        let embedded = encoder.encode(&texts).unwrap().embeddings;
        for (text, row) in texts.iter().zip(embedded.rows()) {
            let (tokens, _) = encoder.tokenise(&[text]).unwrap();
            let ids = Tensor::new(tokens[0].as_slice(), &Device::Cpu).unwrap();
            let ids = ids.unsqueeze(0).unwrap();
            let hidden = encoder.model.forward(&ids, &ids.zeros_like().unwrap(), None);
            let hidden: Vec<Vec<f32>> = hidden.unwrap().squeeze(0).unwrap().to_vec2().unwrap();
            let mut naive = hidden[0].clone();
            if pooling == Pooling::Mean {
                for (position, value) in naive.iter_mut().enumerate() {
                    *value = hidden.iter().map(|token| token[position]).sum::<f32>() / hidden.len() as f32;
                }
            }
            if normalise {
                let length = naive.iter().map(|value| value * value).sum::<f32>().sqrt();
                naive.iter_mut().for_each(|value| *value /= length);
            }
            assert!(largest_difference(row, &naive) < 1e-5, "{pooling:?} {text:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Also texts that are cut off, empty ones and unknown letters.
    #[test]
    fn a_text_has_the_same_embedding_alone_and_in_any_batch(
        texts in prop::collection::vec("[a-eé ]{0,60}", 1..12),
        batch_tokens in 1usize..200,
    ) {
        let dir = tiny();
        let config = EncoderConfig { batch_tokens, ..EncoderConfig::default() };
        let encoder = open(dir.path(), &config).unwrap();
        let together = encoder.encode(&texts).unwrap();
        prop_assert_eq!(together.embeddings.len(), texts.len());
        let mut truncated = 0;
        for (text, row) in texts.iter().zip(together.embeddings.rows()) {
            let alone = encoder.encode(&[text]).unwrap();
            truncated += alone.truncated;
            prop_assert!(largest_difference(row, alone.embeddings.row(0)) < 1e-5);
        }
        prop_assert_eq!(together.truncated, truncated);
    }

    #[test]
    fn batches_hold_every_text_once_and_are_bounded(
        lengths in prop::collection::vec(0usize..40, 0..50),
        batch_tokens in 1usize..120,
    ) {
        let tokens: Vec<Vec<u32>> = lengths.iter().map(|n| vec![0; *n]).collect();
        let batches = batches(&tokens, batch_tokens);
        for batch in &batches {
            let longest = batch.iter().map(|text| lengths[*text]).max().unwrap();
            prop_assert!(batch.len() == 1 || longest * batch.len() <= batch_tokens);
        }
        let mut all = batches.concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
    }
}

#[test]
fn a_long_text_is_cut_off_and_counted() {
    let dir = tiny();
    let config = EncoderConfig { max_tokens: Some(6), ..EncoderConfig::default() };
    let encoded = encode(dir.path(), &config, &["abcd", "abcdefgh", "ab"]);
    assert_eq!(encoded.truncated, 1);
    assert_eq!(encoded.embeddings.row(0), encoded.embeddings.row(1));
    assert_ne!(encoded.embeddings.row(0), encoded.embeddings.row(2));
}

#[test]
fn a_prefix_stands_before_every_text() {
    let dir = tiny();
    let prefixed = EncoderConfig { prefix: Some("query ".into()), ..EncoderConfig::default() };
    let with = encode(dir.path(), &prefixed, &["noir"]);
    let spelled_out = encode(dir.path(), &EncoderConfig::default(), &["query noir"]);
    assert_eq!(with.embeddings, spelled_out.embeddings);
}

#[test]
fn a_model_with_a_head_and_tensorflow_names_is_the_same_encoder() {
    let (plain, dir) = (tiny(), tempfile::tempdir().unwrap());
    tiny_bert::write_renamed(dir.path(), 7, |name| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        format!("bert.{}", name.replace("LayerNorm.bias", "LayerNorm.beta"))
    });
    let masked_lm = json!(["BertForMaskedLM"]);
    edit(dir.path().join("config.json"), |c| c["architectures"] = masked_lm);
    let config = EncoderConfig::default();
    let texts = ["noir", "a warm comedy"];
    assert_eq!(encode(dir.path(), &config, &texts), encode(plain.path(), &config, &texts));
}

/// The settings of a sentence-transformers directory.
fn write_settings(dir: &Path, pooling: &Value, modules: &[(&str, &str)]) {
    let modules: Vec<Value> = (modules.iter())
        .map(|(kind, path)| json!({"type": format!("sentence_transformers.models.{kind}"), "path": path}))
        .collect();
    fs::write(dir.join("modules.json"), Value::from(modules).to_string()).unwrap();
    fs::create_dir_all(dir.join("1_Pooling")).unwrap();
    fs::write(dir.join("1_Pooling/config.json"), pooling.to_string()).unwrap();
    let sentence_bert = json!({"max_seq_length": 12, "do_lower_case": true});
    fs::write(dir.join("sentence_bert_config.json"), sentence_bert.to_string()).unwrap();
    let prompts = json!({"prompts": {"q": "query: "}, "default_prompt_name": "q"});
    fs::write(dir.join("config_sentence_transformers.json"), prompts.to_string()).unwrap();
}

const MODULES: [(&str, &str); 3] = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")];

#[test]
fn the_directory_says_how_texts_are_pooled_and_the_configuration_overrides_it() {
    let dir = tiny();
    let plain = EncoderFiles::open(dir.path(), &EncoderConfig::default()).unwrap();
    let info = plain.info().clone();
    assert_eq!((info.pooling, info.normalise, info.max_tokens), (Pooling::Mean, false, tiny_bert::POSITIONS));
    assert_eq!((info.prefix.as_str(), info.dimensions), ("", tiny_bert::DIMENSIONS));
    for pooling in
        [json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}), json!({"pooling_mode": "cls"})]
    {
        write_settings(dir.path(), &pooling, &MODULES);
        let files = EncoderFiles::open(dir.path(), &EncoderConfig::default()).unwrap();
        let own = files.info();
        assert_eq!((own.pooling, own.normalise, own.max_tokens), (Pooling::Cls, true, 12));
        assert_eq!((own.prefix.as_str(), own.lower_case), ("query: ", true));
        assert_ne!(own.digest(), info.digest());
    }
    let config = EncoderConfig {
        pooling: Some(Pooling::Mean),
        normalise: Some(false),
        max_tokens: Some(20),
        prefix: Some(String::new()),
        ..EncoderConfig::default()
    };
    let files = EncoderFiles::open(dir.path(), &config).unwrap();
    let overridden = files.info();
    assert_eq!((overridden.pooling, overridden.normalise), (Pooling::Mean, false));
    assert_eq!((overridden.max_tokens, overridden.prefix.as_str()), (20, ""));
}

/// Opening or loading the encoder of a damaged directory fails with these words.
#[track_caller]
fn assert_refused(damage: impl FnOnce(&Path), expected: &str) {
    let dir = tiny();
    damage(dir.path());
    let error = open(dir.path(), &EncoderConfig::default()).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}\nlacks\n{expected}");
}

#[test]
fn a_model_that_the_encoder_cannot_run_is_refused_by_file_and_key() {
    for (key, value, expected) in [
        ("model_type", json!("xlm-roberta"), "config.json: model_type is \"xlm-roberta\"; expected \"bert\""),
        ("hidden_act", json!("silu"), "config.json: hidden_act is \"silu\"; expected \"gelu\""),
        ("is_decoder", json!(true), "config.json: is_decoder is true; expected false"),
        ("hidden_size", Value::Null, "config.json: hidden_size is not there; expected a number"),
        ("num_attention_heads", json!(3), "num_attention_heads is 3; expected a divisor of hidden_size = 8"),
        ("vocab_size", json!(50), "has tokens up to 55, but vocab_size of config.json is 50"),
        ("intermediate_size", json!(32), "its weights do not fit config.json"),
    ] {
        assert_refused(|d| edit(d.join("config.json"), |c| c[key] = value), expected);
    }
    let remove = |d: &Path| fs::remove_file(d.join("config.json")).unwrap();
    assert_refused(remove, "no config.json; give the directory of a BERT model");
}

#[test]
fn a_tokenizer_or_settings_that_the_encoder_cannot_use_are_refused_by_file_and_key() {
    type Damage = fn(&Path);
    let cases: [(Damage, &str); 7] = [
        (|d| fs::remove_file(d.join("tokenizer.json")).unwrap(), "no tokenizer.json; convert the model's tokenizer"),
        (
            |d| edit(d.join("tokenizer.json"), |t| t["post_processor"] = Value::Null),
            "puts no [CLS] and [SEP] around a text",
        ),
        (|d| edit(d.join("tokenizer.json"), |t| t["model"]["type"] = json!("Mystery")), "not a tokenizer"),
        (|d| fs::rename(d.join("model.safetensors"), d.join("m.gguf")).unwrap(), "reads no GGUF"),
        (
            |d| write_settings(d, &json!({"pooling_mode_max_tokens": true}), &MODULES),
            "1_Pooling/config.json: pooling_mode is \"max_tokens\"; the encoder knows mean and cls",
        ),
        (
            |d| write_settings(d, &json!({}), &[("Dense", "2_Dense")]),
            "modules.json: [0].type is \"sentence_transformers.models.Dense\"",
        ),
        (
            |d| write_settings(d, &json!({}), &[("Pooling", "3_Pooling")]),
            "no 3_Pooling/config.json; modules.json names it",
        ),
    ];
    for (damage, expected) in cases {
        assert_refused(damage, expected);
    }
}

#[test]
fn a_configuration_that_does_not_fit_is_refused() {
    let dir = tiny();
    let own = EncoderConfig::default;
    for (config, expected) in [
        (EncoderConfig { max_tokens: Some(33), ..own() }, "[encoder] max_tokens = 33: expected 3 to 32"),
        (EncoderConfig { max_tokens: Some(2), ..own() }, "[encoder] max_tokens = 2: expected 3 to 32"),
        (EncoderConfig { batch_tokens: 0, ..own() }, "[encoder] batch_tokens = 0: expected at least 1"),
    ] {
        let error = EncoderFiles::open(dir.path(), &config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let pooling = json!({"pooling_mode": "mean", "include_prompt": false});
    write_settings(dir.path(), &pooling, &MODULES);
    let error = EncoderFiles::open(dir.path(), &own()).unwrap_err().to_string();
    assert!(error.contains("[encoder] prefix = \"query: \": the model's pooling leaves"), "{error}");
}

#[test]
fn embeddings_that_are_not_finite_are_refused() {
    let dir = tiny();
    let file = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let encoder = open(dir.path(), &EncoderConfig::default()).unwrap();
    let error = encoder.encode(&["noir"]).unwrap_err().to_string();
    assert!(error.contains("the embedding of text 1 is not finite"), "{error}");
}

#[test]
fn no_texts_have_no_embeddings() {
    let encoded = encode(tiny().path(), &EncoderConfig::default(), &[]);
    assert!(encoded.embeddings.is_empty() && encoded.truncated == 0);
}
