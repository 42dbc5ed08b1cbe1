//! A BERT of random weights and 60 tokens, written as files: an encoder for tests that need no download.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

/// Values of its embeddings.
pub(super) const DIMENSIONS: usize = 8;
/// Tokens that it has positions for.
pub(super) const POSITIONS: usize = 32;

const LAYERS: usize = 2;
const INNER: usize = 16;

/// Writes config.json, tokenizer.json and model.safetensors into `directory`.
pub(super) fn write(directory: &Path, seed: u64) {
    write_renamed(directory, seed, |name| name.to_owned());
}

/// The same with other names of the tensors.
pub(super) fn write_renamed(directory: &Path, seed: u64, rename: impl Fn(&str) -> String) {
    fs::create_dir_all(directory).unwrap();
    let vocabulary = vocabulary();
    let config = json!({
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu",
        "vocab_size": vocabulary.len(), "hidden_size": DIMENSIONS, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "intermediate_size": INNER, "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
    });
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    fs::write(directory.join("tokenizer.json"), tokenizer(&vocabulary).to_string()).unwrap();
    fs::write(directory.join("model.safetensors"), weights(vocabulary.len(), seed, rename)).unwrap();
}

fn vocabulary() -> Vec<String> {
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"].map(str::to_owned);
    let letters = ('a'..='z').flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
    special.into_iter().chain(letters).collect()
}

/// A token a letter.
fn tokenizer(vocabulary: &[String]) -> Value {
    let ids: Map<String, Value> =
        (vocabulary.iter().zip(0..)).map(|(token, id): (_, u32)| (token.clone(), id.into())).collect();
    let added = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"].map(|token| {
        json!({
            "id": ids[token], "content": token, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    });
    let special = |token: &str| json!({"id": token, "ids": [ids[token]], "tokens": [token]});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "decoder": null,
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": special("[CLS]"), "[SEP]": special("[SEP]")},
        },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": ids,
        },
    })
}

fn shapes(vocabulary: usize) -> Vec<(String, Vec<usize>)> {
    let mut shapes = Vec::new();
    let mut add = |name: String, shape: &[usize]| shapes.push((name, shape.to_vec()));
    for (name, rows) in [("word", vocabulary), ("position", POSITIONS), ("token_type", 2)] {
        add(format!("embeddings.{name}_embeddings.weight"), &[rows, DIMENSIONS]);
    }
    let mut norms = vec!["embeddings.LayerNorm".to_owned()];
    for layer in 0..LAYERS {
        let layer = format!("encoder.layer.{layer}");
        for (name, outputs, inputs) in [
            ("attention.self.query", DIMENSIONS, DIMENSIONS),
            ("attention.self.key", DIMENSIONS, DIMENSIONS),
            ("attention.self.value", DIMENSIONS, DIMENSIONS),
            ("attention.output.dense", DIMENSIONS, DIMENSIONS),
            ("intermediate.dense", INNER, DIMENSIONS),
            ("output.dense", DIMENSIONS, INNER),
        ] {
            add(format!("{layer}.{name}.weight"), &[outputs, inputs]);
            add(format!("{layer}.{name}.bias"), &[outputs]);
        }
        norms.push(format!("{layer}.attention.output.LayerNorm"));
        norms.push(format!("{layer}.output.LayerNorm"));
    }
    for norm in norms {
        add(format!("{norm}.weight"), &[DIMENSIONS]);
        add(format!("{norm}.bias"), &[DIMENSIONS]);
    }
    shapes
}

/// The safetensors format: the length of a JSON header, the header, the values.
fn weights(vocabulary: usize, seed: u64, rename: impl Fn(&str) -> String) -> Vec<u8> {
    let (mut header, mut values) = (Map::new(), Vec::new());
    let mut state = seed;
    for (name, shape) in shapes(vocabulary) {
        let start = values.len();
        let centre = f32::from(name.ends_with("LayerNorm.weight"));
        for _ in 0..shape.iter().product() {
            // Knuth's linear congruential generator, of which the high bits are good.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = f32::from(u16::try_from(state >> 48).unwrap()) / 65536.0;
            values.extend((centre + unit - 0.5).to_le_bytes());
        }
        let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, values.len()]});
        header.insert(rename(&name), tensor);
    }
    let header = Value::from(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat()
}
