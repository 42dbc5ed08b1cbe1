//! Tiny models with seeded random weights, written to disk the way real ones come.

use std::{collections::HashMap, fs, path::Path};

use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use serde_json::{Value, json};

/// The shape shared by all tiny models; four query heads share two key heads.
const HIDDEN: usize = 64;
const INNER: usize = 96;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
/// The fixture tokenizer's, so that mistralrs can load these models with it.
pub(crate) const VOCAB: usize = 4096;

/// The fixture model of the repository.
pub(crate) fn fixture() -> std::path::PathBuf {
    std::path::absolute("../fixtures/profile-lm").unwrap()
}

/// A sequence of pseudo-random numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    pub(crate) fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(VOCAB) as u32).collect()
    }

    /// Uniform in ±`scale`.
    pub(crate) fn tensor(&mut self, shape: &[usize], scale: f32) -> Tensor {
        let count = shape.iter().product();
        let uniform = |_| (self.next() as f32 / (1_u64 << 30) as f32 - 1.0) * scale;
        let values: Vec<f32> = (0..count).map(uniform).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }
}

/// A model that is not yet on disk.
#[derive(Clone)]
pub(crate) struct TinyModel {
    pub(crate) config: Value,
    pub(crate) tensors: HashMap<String, Tensor>,
}

impl TinyModel {
    /// `architecture` without `ForCausalLM`; `changes` go into config.json.
    pub(crate) fn new(architecture: &str, changes: Value) -> Self {
        let mut config = json!({
            "architectures": [format!("{architecture}ForCausalLM")],
            "model_type": architecture.to_lowercase(),
            "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 256, "tie_word_embeddings": false, "attention_bias": false,
            "bos_token_id": 0, "eos_token_id": 1,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let tensors = weights(&config, architecture);
        Self { config, tensors }
    }

    /// One of whole blocks of 256 inputs.
    pub(crate) fn wide(architecture: &str, tied: bool) -> Self {
        let sizes = json!({"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": tied});
        Self::new(architecture, sizes)
    }

    /// One per supported architecture, and the variants that differ in the forward.
    pub(crate) fn all() -> Vec<(&'static str, Self)> {
        let llama3 = json!({"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }});
        let qwen2 = json!({
            "sliding_window": 128, "use_sliding_window": false, "max_window_layers": 2,
        });
        let qwen3 = json!({
            "head_dim": 32, "sliding_window": null, "use_sliding_window": false,
            "max_window_layers": 2,
        });
        vec![
            ("llama", Self::new("Llama", json!({}))),
            ("llama, tied", Self::new("Llama", json!({"tie_word_embeddings": true}))),
            ("llama 3 rope", Self::new("Llama", llama3)),
            ("mistral", Self::new("Mistral", json!({"sliding_window": 128}))),
            ("qwen2", Self::new("Qwen2", qwen2)),
            ("qwen3", Self::new("Qwen3", qwen3)),
        ]
    }

    fn head_dim(&self) -> usize {
        head_dim(&self.config)
    }

    /// Writes config.json and the weights, in two shards with an index if `sharded`.
    pub(crate) fn write(&self, directory: &Path, sharded: bool) {
        fs::write(directory.join("config.json"), self.config.to_string()).unwrap();
        if !sharded {
            let file = directory.join("model.safetensors");
            candle_core::safetensors::save(&self.tensors, file).unwrap();
            return;
        }
        let name = |shard: usize| format!("model-0000{}-of-00002.safetensors", shard + 1);
        let mut shards = [HashMap::new(), HashMap::new()];
        let mut map = serde_json::Map::new();
        for (key, tensor) in &self.tensors {
            let shard = usize::from(key.contains("layers.1"));
            shards[shard].insert(key.clone(), tensor.clone());
            map.insert(key.clone(), name(shard).into());
        }
        for (shard, tensors) in shards.iter().enumerate() {
            candle_core::safetensors::save(tensors, directory.join(name(shard))).unwrap();
        }
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// Also the fixture's tokenizer, which mistralrs needs.
    #[cfg(feature = "mistralrs")]
    pub(crate) fn write_with_tokenizer(&self, directory: &Path) {
        self.write(directory, false);
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(fixture().join(file), directory.join(file)).unwrap();
        }
    }

    /// Writes a GGUF file as llama.cpp's converter would: its names, and for Llama the rows of q and k interleaved.
    pub(crate) fn write_gguf(&self, file: &Path, dtype: GgmlDType) {
        self.write_mixed_gguf(file, |name| if name.starts_with("token_embd") { GgmlDType::F32 } else { dtype });
    }

    /// Each matrix in the type for its name in the file.
    pub(crate) fn write_mixed_gguf(&self, file: &Path, dtype: impl Fn(&str) -> GgmlDType) {
        let architecture = self.config["model_type"].as_str().unwrap();
        let mut tensors: Vec<(String, QTensor)> = Vec::new();
        for (name, tensor) in &self.tensors {
            let name = gguf_name(name);
            let heads = match (architecture, name.split('.').nth(2)) {
                ("llama", Some("attn_q")) => HEADS,
                ("llama", Some("attn_k")) => KV_HEADS,
                _ => 0,
            };
            let tensor = if heads == 0 { tensor.clone() } else { interleave(tensor, heads) };
            let dtype = if tensor.rank() == 1 { GgmlDType::F32 } else { dtype(&name) };
            tensors.push((name, QTensor::quantize(&tensor, dtype).unwrap()));
        }
        let metadata = self.gguf_metadata(architecture);
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        gguf_file::write(&mut fs::File::create(file).unwrap(), &metadata, &tensors).unwrap();
    }

    fn gguf_metadata(&self, architecture: &str) -> Vec<(String, gguf_file::Value)> {
        use gguf_file::Value;
        let sizes = [
            ("embedding_length", size(&self.config, "hidden_size")),
            ("feed_forward_length", size(&self.config, "intermediate_size")),
            ("block_count", size(&self.config, "num_hidden_layers")),
            ("context_length", 256),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", self.head_dim()),
            ("attention.value_length", self.head_dim()),
            ("rope.dimension_count", self.head_dim()),
        ];
        let floats = [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 10_000.0)];
        let key = |key: &str| format!("{architecture}.{key}");
        let mut metadata = vec![("general.architecture".to_owned(), Value::String(architecture.to_owned()))];
        metadata.extend(sizes.map(|(name, size)| (key(name), Value::U32(size as u32))));
        metadata.extend(floats.map(|(name, value)| (key(name), Value::F32(value))));
        metadata
    }
}

fn size(config: &Value, key: &str) -> usize {
    config[key].as_u64().unwrap() as usize
}

fn head_dim(config: &Value) -> usize {
    config["head_dim"].as_u64().map_or(size(config, "hidden_size") / HEADS, |dim| dim as usize)
}

fn weights(config: &Value, architecture: &str) -> HashMap<String, Tensor> {
    let mut random = Random::new(7);
    let mut tensors = HashMap::new();
    let (hidden, inner, head_dim) = (size(config, "hidden_size"), size(config, "intermediate_size"), head_dim(config));
    let (queries, keys) = (HEADS * head_dim, KV_HEADS * head_dim);
    let mut add = |name: String, shape: &[usize]| {
        let tensor = match shape {
            [_] if name.ends_with("bias") => random.tensor(shape, 0.5),
            [_] => (random.tensor(shape, 0.2) + 1.0).unwrap(),
            _ if name.contains("embed") => random.tensor(shape, 1.0),
            [_, inputs] => random.tensor(shape, 1.7 / (*inputs as f32).sqrt()),
            _ => unreachable!(),
        };
        tensors.insert(name, tensor);
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, hidden]);
    add("model.norm.weight".into(), &[hidden]);
    if config["tie_word_embeddings"] == false {
        add("lm_head.weight".into(), &[VOCAB, hidden]);
    }
    for layer in 0..size(config, "num_hidden_layers") {
        let mut add = |part: &str, shape: &[usize]| add(format!("model.layers.{layer}.{part}"), shape);
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for (part, outputs) in [("q", queries), ("k", keys), ("v", keys)] {
            add(&format!("self_attn.{part}_proj.weight"), &[outputs, hidden]);
            if architecture == "Qwen2" {
                add(&format!("self_attn.{part}_proj.bias"), &[outputs]);
            }
            if architecture == "Qwen3" && part != "v" {
                add(&format!("self_attn.{part}_norm.weight"), &[head_dim]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden, queries]);
        add("mlp.gate_proj.weight", &[inner, hidden]);
        add("mlp.up_proj.weight", &[inner, hidden]);
        add("mlp.down_proj.weight", &[hidden, inner]);
    }
    tensors
}

pub(crate) fn gguf_name(name: &str) -> String {
    [
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("_proj", ""),
        ("mlp.", "ffn_"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ]
    .iter()
    .fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs))
}

/// The permutation of llama.cpp's converter: halves of a head become pairs.
fn interleave(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, columns) = tensor.dims2().unwrap();
    let halves = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    halves.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
}
