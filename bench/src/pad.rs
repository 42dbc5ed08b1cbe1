//! `laser-bench pad`: the same model in a larger shape.
//!
//! A padded model computes what the small one does, so its texts and acceptance are the small one's, while a forward
//! costs what the larger shape costs: kernels do not skip zeros.
//!
//! Dimensions that are added to the residual stream stay zero: embeddings and the weights that write the stream
//! (`o_proj`, `down_proj`) are zero there, and the outputs of added heads, neurons and layers are multiplied by zero.
//! All else that is added is random. RMSNorm over D dimensions of which d are used equals that over d if its weights
//! are multiplied by √(d/D) and ε by d/D. Heads keep their width, which rotation depends on, and the number of query
//! heads for each key head.
//!
//! A wider vocabulary needs logits that never win: one dimension of the stream is a constant c, a power of two whose
//! square is at most ε·d/2. Only the final norm lets it through and only the added tokens read it, with a large
//! negative weight. The norms count c² in: their ε is (ε·d − c²)/D.
//!
//! What drafts from the small model's features, EAGLE's layer or Medusa's heads, drafts the same for the padded model
//! once it is padded too: the features of a padded model are those of the small one and zeros, and the constant where
//! the vocabulary is wider. EAGLE's layer has no norm in front of attention and vocabulary, so its projections ignore
//! the constant, which its bias writes. A whole draft model needs no more than the vocabulary, and an acceptance head
//! follows its draft model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_engine::{ACCEPTANCE_HEAD, DRAFT_TOKENS};
use laser_model::ModelFiles;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use serde_json::{Value, json};

/// Bounds of random weights, as of initial ones.
const RANDOM: f32 = 0.02;

/// What an added token has at the constant dimension. Times c, over the stream's length, it is still far below any
/// logit.
const NEVER: f32 = -1e6;

/// Dimensions that a draft model of fewer tokens gets for the constant: kernels want whole panels.
const CONSTANT: usize = 32;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const HEADS: &str = "medusa_lm_head.safetensors";

/// EAGLE's projection of embedding and feature.
const FUSION: &str = "fc.weight";
const FUSION_BIAS: &str = "fc.bias";
const EMBEDDINGS: &str = "model.embed_tokens.weight";
const UNEMBEDDING: &str = "lm_head.weight";
const FINAL_NORM: &str = "model.norm.weight";

/// `laser-bench pad`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct PadArgs {
    /// The model: a directory of a Llama with one model.safetensors in f32 or bf16, or a draft model, an EAGLE layer
    /// or Medusa's heads for such a model, or an acceptance head.
    #[arg(long)]
    pub(super) model: PathBuf,
    /// The padded model that the padded drafts are for; it has the sizes. For an acceptance head, the draft model that
    /// was padded for it.
    #[arg(long, conflicts_with_all = ["hidden", "layers", "heads", "intermediate", "vocabulary"])]
    pub(super) target: Option<PathBuf>,
    /// The folder to write, which must not exist.
    #[arg(long, short)]
    pub(super) output: PathBuf,
    /// Dimensions of the residual stream.
    #[arg(long, required_unless_present = "target", default_value_t = 0, hide_default_value = true)]
    pub(super) hidden: usize,
    /// Layers.
    #[arg(long, required_unless_present = "target", default_value_t = 0, hide_default_value = true)]
    pub(super) layers: usize,
    /// Query heads; key heads in proportion.
    #[arg(long, required_unless_present = "target", default_value_t = 0, hide_default_value = true)]
    pub(super) heads: usize,
    /// Neurons of a layer.
    #[arg(long, required_unless_present = "target", default_value_t = 0, hide_default_value = true)]
    pub(super) intermediate: usize,
    /// Tokens of the vocabulary; those that are added are never generated.
    #[arg(long)]
    pub(super) vocabulary: Option<usize>,
}

/// The shape of a model.
#[derive(Debug, Clone, Copy)]
struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocabulary: usize,
}

impl Shape {
    fn of(config: &Value) -> Result<Self> {
        let number = |key: &str| {
            let value = config.get(key).and_then(Value::as_u64).and_then(|value| usize::try_from(value).ok());
            value.with_context(|| format!("config.json: no {key}"))
        };
        let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        Ok(Self {
            hidden,
            layers: number("num_hidden_layers")?,
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            head_dim: number("head_dim").unwrap_or(hidden / heads),
            intermediate: number("intermediate_size")?,
            vocabulary: number("vocab_size")?,
        })
    }

    /// Output and input rows of a layer's matrix.
    fn of_matrix(&self, part: &str) -> Option<[usize; 2]> {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Some(match part {
            "self_attn.q_proj" => [queries, self.hidden],
            "self_attn.k_proj" | "self_attn.v_proj" => [keys, self.hidden],
            "self_attn.o_proj" => [self.hidden, queries],
            "mlp.gate_proj" | "mlp.up_proj" => [self.intermediate, self.hidden],
            "mlp.down_proj" => [self.hidden, self.intermediate],
            _ => return None,
        })
    }
}

const MATRICES: [&str; 7] = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
];

/// What writes the stream is zero where it is added; what reads it may be anything.
const WRITING: [&str; 2] = ["self_attn.o_proj", "mlp.down_proj"];

const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];

/// A tensor that is written.
struct Padded {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

struct Padding<'a> {
    weights: SafeTensors<'a>,
    dtype: Dtype,
    from: Shape,
    to: Shape,
    rng: Xoshiro256PlusPlus,
    written: BTreeMap<String, Padded>,
}

/// Writes the padded model and returns its number of parameters.
///
/// # Errors
/// A model that is no Llama without biases, a shape that is smaller than the model's, and an output that exists.
pub(super) fn pad(args: &PadArgs) -> Result<usize> {
    ensure!(!args.output.exists(), "--output {}: exists; remove it or name another folder", args.output.display());
    match &args.target {
        None => {
            let config = read_config(&args.model)?;
            let to = target(args, &Shape::of(&config)?)?;
            pad_model(args, config, &to)
        }
        Some(target) => pad_draft(args, target),
    }
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    fs::read(&path).with_context(|| path.display().to_string())
}

fn read_config(folder: &Path) -> Result<Value> {
    serde_json::from_slice(&read(folder, CONFIG)?).with_context(|| folder.join(CONFIG).display().to_string())
}

fn write_config(folder: &Path, config: &Value) -> Result<()> {
    Ok(fs::write(folder.join(CONFIG), serde_json::to_vec_pretty(config)?)?)
}

/// The same for what drafts, in the sizes of `target`.
fn pad_draft(args: &PadArgs, target: &Path) -> Result<usize> {
    let mut config = read_config(&args.model)?;
    let of_target = read_config(target)?;
    let digest = json!(ModelFiles::open(target)?.digest()?);
    if args.model.join(ACCEPTANCE_HEAD).exists() {
        config["laser_draft"]["draft"] = digest;
        config["laser_draft"]["target"] = of_target["laser_draft"]["target"].clone();
        return pad_heads(args, ACCEPTANCE_HEAD, &config, &Shape { vocabulary: 2, ..Shape::of(&of_target)? });
    }
    if let Some(belongs) = config.get_mut("laser_draft") {
        belongs["target"] = digest;
    }
    let to = Shape::of(&of_target)?;
    if args.model.join(HEADS).exists() {
        config["vocab_size"] = json!(to.vocabulary);
        return pad_heads(args, HEADS, &config, &to);
    }
    let bytes = read(&args.model, WEIGHTS)?;
    let weights = SafeTensors::deserialize(&bytes).context(WEIGHTS)?;
    if weights.tensor(FUSION).is_err() {
        return widen(args, config, to.vocabulary);
    }
    let epsilon = epsilon(&config)?;
    let mut padding = Padding::new(weights, (Shape::of(&config)?, Shape { layers: 1, ..to }))?;
    padding.of_features(epsilon).with_context(|| args.model.join(WEIGHTS).display().to_string())?;
    padding.describe(&mut config, epsilon);
    fs::create_dir_all(&args.output)?;
    let count = padding.write(&args.output.join(WEIGHTS))?;
    write_config(&args.output, &config)?;
    Ok(count)
}

/// Heads over features, for those of `to`, whose outcomes may be more.
fn pad_heads(args: &PadArgs, file: &str, config: &Value, to: &Shape) -> Result<usize> {
    let bytes = read(&args.model, file)?;
    let weights = SafeTensors::deserialize(&bytes).context(file.to_owned())?;
    let block = weights.tensor("0.0.linear.weight").with_context(|| args.model.join(file).display().to_string())?;
    let hidden = *block.shape().last().context("0.0.linear.weight is no matrix")?;
    let outcomes = |name: &str| match weights.tensor(name).ok()?.shape() {
        [outcomes, _] if !name.contains("linear") => Some(*outcomes),
        _ => None,
    };
    let vocabulary = weights.names().into_iter().find_map(outcomes).unwrap_or(to.vocabulary);
    let mut padding = Padding::new(weights, (Shape { hidden, vocabulary, ..*to }, *to))?;
    padding.of_features(0.0).with_context(|| args.model.join(file).display().to_string())?;
    fs::create_dir_all(&args.output)?;
    let count = padding.write(&args.output.join(file))?;
    write_config(&args.output, config)?;
    Ok(count)
}

/// A whole draft model is what it is, whatever the model that it drafts for, but for the vocabulary.
fn widen(args: &PadArgs, config: Value, vocabulary: usize) -> Result<usize> {
    ensure!(
        config.get("laser_draft").is_some(),
        "--model {}: no draft model of `laser train draft`, no EAGLE layer and no Medusa heads, which --target is for",
        args.model.display()
    );
    let from = Shape::of(&config)?;
    let more = if vocabulary > from.vocabulary { CONSTANT } else { 0 };
    pad_model(args, config, &Shape { vocabulary, hidden: from.hidden + more, ..from })
}

fn copy_files(args: &PadArgs, names: &[&str]) -> Result<()> {
    for name in names.iter().filter(|name| args.model.join(name).exists()) {
        fs::copy(args.model.join(name), args.output.join(name))?;
    }
    Ok(())
}

fn epsilon(config: &Value) -> Result<f64> {
    config["rms_norm_eps"].as_f64().context("config.json: no rms_norm_eps")
}

fn pad_model(args: &PadArgs, mut config: Value, to: &Shape) -> Result<usize> {
    let from = Shape::of(&config)?;
    let bytes = read(&args.model, WEIGHTS)?;
    let weights = SafeTensors::deserialize(&bytes).context(WEIGHTS)?;
    let mut padding = Padding::new(weights, (from, *to))?;
    let epsilon = epsilon(&config)?;
    let is_tied = config["tie_word_embeddings"] == json!(true);
    let padded = padding.layers().and_then(|()| padding.vocabulary(is_tied, epsilon));
    padded.and_then(|()| padding.ensure_all_read()).with_context(|| args.model.join(WEIGHTS).display().to_string())?;
    padding.describe(&mut config, epsilon);
    fs::create_dir_all(&args.output)?;
    let count = padding.write(&args.output.join(WEIGHTS))?;
    copy_files(args, &["tokenizer.json", "tokenizer_config.json", "generation_config.json"])?;
    write_config(&args.output, &config)?;
    Ok(count)
}

fn target(args: &PadArgs, from: &Shape) -> Result<Shape> {
    let to = Shape {
        hidden: args.hidden,
        layers: args.layers,
        heads: args.heads,
        kv_heads: args.heads * from.kv_heads / from.heads,
        intermediate: args.intermediate,
        vocabulary: args.vocabulary.unwrap_or(from.vocabulary),
        ..*from
    };
    let group = from.heads / from.kv_heads;
    ensure!(to.heads.is_multiple_of(group), "--heads {}: expected a multiple of {group}, as in the model", to.heads);
    let sizes = [
        ("hidden", from.hidden, to.hidden),
        ("layers", from.layers, to.layers),
        ("heads", from.heads, to.heads),
        ("intermediate", from.intermediate, to.intermediate),
        ("vocabulary", from.vocabulary, to.vocabulary),
    ];
    for (option, least, size) in sizes {
        ensure!(size >= least, "--{option} {size}: expected at least {least}, which the model has");
    }
    ensure!(
        to.vocabulary == from.vocabulary || to.hidden > from.hidden,
        "--vocabulary {}: needs a dimension of its own; set --hidden to more than {}",
        to.vocabulary,
        from.hidden
    );
    Ok(to)
}

impl<'a> Padding<'a> {
    fn new(weights: SafeTensors<'a>, (from, to): (Shape, Shape)) -> Result<Self> {
        let first = weights.names().into_iter().find(|name| *name != DRAFT_TOKENS).context("no tensors")?;
        let dtype = weights.tensor(first)?.dtype();
        ensure!(matches!(dtype, Dtype::F32 | Dtype::BF16), "{dtype:?} weights; expected F32 or BF16");
        let rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let tokens = weights.tensor(DRAFT_TOKENS).ok().map(|tokens| {
            let (shape, bytes) = (tokens.shape().to_vec(), tokens.data().to_vec());
            (DRAFT_TOKENS.to_owned(), Padded { dtype: tokens.dtype(), shape, bytes })
        });
        Ok(Self { weights, dtype, from, to, rng, written: tokens.into_iter().collect() })
    }

    /// What drafts from features. It takes embeddings and features in, of which what is added is zero or the constant,
    /// and gives features out.
    fn of_features(&mut self, epsilon: f64) -> Result<()> {
        let names = self.weights.names().into_iter().filter(|name| *name != DRAFT_TOKENS);
        for name in names.map(str::to_owned).collect::<Vec<_>>() {
            let part = name.strip_prefix("layers.0.").and_then(|name| name.strip_suffix(".weight"));
            let shape = part.and_then(|part| self.to.of_matrix(part));
            let padded = match (part, shape) {
                (Some(part), Some(shape)) => {
                    let mut matrix = self.matrix(Some(&name), shape, !WRITING.contains(&part))?;
                    let reads_constant = self.is_wider() && part.starts_with("self_attn") && !WRITING.contains(&part);
                    (0..if reads_constant { shape[0] } else { 0 }).for_each(|row| self.set(&mut matrix, row, 0.0));
                    matrix
                }
                (Some(_), None) => self.norm(Some(&name), 0.0)?,
                _ => self.beside_layer(&name)?,
            };
            self.written.insert(name, padded);
        }
        if self.is_wider() && self.written.contains_key(FUSION) {
            self.write_constant(epsilon);
        }
        Ok(())
    }

    /// A bias, or a matrix over one or two features, side by side.
    fn beside_layer(&mut self, name: &str) -> Result<Padded> {
        let tensor = self.weights.tensor(name)?;
        let (from, to, shape) = (self.from, self.to, tensor.shape().to_vec());
        match shape[..] {
            [_] => {
                let size = self.element().len();
                let mut bytes = tensor.data().to_vec();
                bytes.resize(to.hidden * size, 0);
                Ok(Padded { dtype: self.dtype, shape: vec![to.hidden], bytes })
            }
            [_, _] if name == FUSION => self.blocks(Some(name), [to.hidden, 2 * to.hidden], 2, false),
            [_, _] if name.contains("linear") => self.matrix(Some(name), [to.hidden, to.hidden], false),
            [_, _] => {
                let mut unembedding = self.matrix(Some(name), [to.vocabulary, to.hidden], false)?;
                (from.vocabulary..to.vocabulary).for_each(|row| self.set(&mut unembedding, row, NEVER));
                Ok(unembedding)
            }
            _ => anyhow::bail!("{name}: neither EAGLE's layer nor heads have such a tensor"),
        }
    }

    /// The constant as EAGLE's bias writes it, which published layers may lack.
    fn write_constant(&mut self, epsilon: f64) {
        let size = self.element().len();
        let zeros = || Padded { dtype: self.dtype, shape: vec![self.to.hidden], bytes: vec![0; self.to.hidden * size] };
        let mut bias = self.written.remove(FUSION_BIAS).unwrap_or_else(zeros);
        self.set(&mut bias, 0, self.constant(epsilon));
        self.written.insert(FUSION_BIAS.to_owned(), bias);
    }

    fn layers(&mut self) -> Result<()> {
        for layer in 0..self.to.layers {
            for part in MATRICES {
                let name = format!("model.layers.{layer}.{part}.weight");
                let shape = self.to.of_matrix(part).context("no such matrix")?;
                let source = (layer < self.from.layers).then_some(name.as_str());
                let padded = self.matrix(source, shape, !WRITING.contains(&part))?;
                self.written.insert(name, padded);
            }
            for part in NORMS {
                let name = format!("model.layers.{layer}.{part}.weight");
                let source = (layer < self.from.layers).then_some(name.as_str());
                let norm = self.norm(source, 0.0)?;
                self.written.insert(name, norm);
            }
        }
        Ok(())
    }

    /// Embeddings, final norm and unembedding.
    fn vocabulary(&mut self, is_tied: bool, epsilon: f64) -> Result<()> {
        let shape = [self.to.vocabulary, self.to.hidden];
        let mut embeddings = self.matrix(Some(EMBEDDINGS), shape, false)?;
        let is_wider = self.is_wider();
        let source = if is_tied { EMBEDDINGS } else { UNEMBEDDING };
        if is_wider || !is_tied {
            let mut unembedding = self.matrix(Some(source), shape, false)?;
            for row in self.from.vocabulary..self.to.vocabulary {
                self.set(&mut unembedding, row, NEVER);
            }
            self.written.insert(UNEMBEDDING.to_owned(), unembedding);
        }
        if is_wider {
            let constant = self.constant(epsilon);
            (0..self.to.vocabulary).for_each(|row| self.set(&mut embeddings, row, constant));
        }
        self.written.insert(EMBEDDINGS.to_owned(), embeddings);
        let norm = self.norm(Some(FINAL_NORM), f32::from(u8::from(is_wider)))?;
        self.written.insert(FINAL_NORM.to_owned(), norm);
        Ok(())
    }

    fn is_wider(&self) -> bool {
        self.to.vocabulary > self.from.vocabulary
    }

    /// The value of the constant dimension, exact in every type; 0 without one.
    fn constant(&self, epsilon: f64) -> f32 {
        let most = (epsilon * self.from.hidden as f64 / 2.0).sqrt();
        if self.is_wider() { single(most.log2().floor().exp2()) } else { 0.0 }
    }

    /// Sets a row's value at the constant dimension, the first that is added.
    fn set(&self, matrix: &mut Padded, row: usize, value: f32) {
        let size = self.element().len();
        let at = (row * self.to.hidden + self.from.hidden) * size;
        matrix.bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[4 - size..]);
    }

    /// The bytes of a value in the model's type, of which bf16 are the upper ones.
    fn element(&self) -> std::ops::Range<usize> {
        if self.dtype == Dtype::BF16 { 2..4 } else { 0..4 }
    }

    /// `[outputs, inputs]` with the source in its corner; the rest random or zero.
    fn matrix(&mut self, source: Option<&str>, shape: [usize; 2], is_random: bool) -> Result<Padded> {
        self.blocks(source, shape, 1, is_random)
    }

    /// The same where source and result consist of so many matrices side by side.
    fn blocks(
        &mut self,
        source: Option<&str>,
        [outputs, inputs]: [usize; 2],
        blocks: usize,
        is_random: bool,
    ) -> Result<Padded> {
        let element = self.element();
        let size = element.len();
        let mut bytes = vec![0; outputs * inputs * size];
        if is_random {
            for value in bytes.chunks_exact_mut(size) {
                value.copy_from_slice(&self.rng.gen_range(-RANDOM..RANDOM).to_le_bytes()[element.clone()]);
            }
        }
        if let Some(name) = source {
            let tensor = self.weights.tensor(name).with_context(|| name.to_owned())?;
            let &[rows, columns] = tensor.shape() else { anyhow::bail!("{name} is no matrix") };
            ensure!(
                tensor.dtype() == self.dtype && rows <= outputs && columns <= inputs,
                "{name} is {rows} by {columns} in {:?}, which config.json does not say",
                tensor.dtype()
            );
            let (from, to) = (columns / blocks * size, inputs / blocks * size);
            for (block, source) in tensor.data().chunks_exact(from).enumerate() {
                bytes[block * to..][..from].copy_from_slice(source);
            }
        }
        Ok(Padded { dtype: self.dtype, shape: vec![outputs, inputs], bytes })
    }

    /// A norm's weights in f32, times √(d/D); `constant` at the constant dimension.
    fn norm(&self, source: Option<&str>, constant: f32) -> Result<Padded> {
        let scale = (self.from.hidden as f64 / self.to.hidden as f64).sqrt();
        let mut values = vec![1.0; self.to.hidden];
        if let Some(value) = values.get_mut(self.from.hidden) {
            *value = constant;
        }
        if let Some(name) = source {
            let tensor = self.weights.tensor(name).with_context(|| name.to_owned())?;
            let bits = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
            let shift = if tensor.dtype() == Dtype::BF16 { 16 } else { 0 };
            for (value, bytes) in values.iter_mut().zip(tensor.data().chunks_exact(if shift > 0 { 2 } else { 4 })) {
                *value = single(f64::from(f32::from_bits(bits(bytes) << shift)) * scale);
            }
        }
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(Padded { dtype: Dtype::F32, shape: vec![self.to.hidden], bytes })
    }

    /// Biases and norms of heads would be lost.
    fn ensure_all_read(&self) -> Result<()> {
        for name in self.weights.names() {
            ensure!(
                self.written.contains_key(name) || name == UNEMBEDDING,
                "{name}: only Llamas without biases can be padded"
            );
        }
        Ok(())
    }

    fn describe(&self, config: &mut Value, epsilon: f64) {
        let Shape { hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary } = self.to;
        let epsilon = (epsilon * self.from.hidden as f64 - f64::from(self.constant(epsilon)).powi(2)) / hidden as f64;
        let entries = [
            ("hidden_size", json!(hidden)),
            ("num_hidden_layers", json!(layers)),
            ("num_attention_heads", json!(heads)),
            ("num_key_value_heads", json!(kv_heads)),
            ("head_dim", json!(head_dim)),
            ("intermediate_size", json!(intermediate)),
            ("vocab_size", json!(vocabulary)),
            ("rms_norm_eps", json!(epsilon)),
            ("tie_word_embeddings", json!(!self.written.contains_key(UNEMBEDDING))),
        ];
        for (key, value) in entries {
            config[key] = value;
        }
    }

    fn write(&self, path: &Path) -> Result<usize> {
        let views = self
            .written
            .iter()
            .map(|(name, Padded { dtype, shape, bytes })| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)));
        let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        safetensors::serialize_to_file(views, None, path).with_context(|| path.display().to_string())?;
        let weights = self.written.iter().filter(|(name, _)| *name != DRAFT_TOKENS);
        Ok(weights.map(|(_, padded)| padded.shape.iter().product::<usize>()).sum())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "weights are single precision")]
fn single(value: f64) -> f32 {
    value as f32
}
