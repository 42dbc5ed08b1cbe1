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
//! once it is padded too: the features of a padded model are those of the small one and zeros. A whole draft model
//! needs no padding and is copied under the padded model's name, and an acceptance head under that of its draft model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_engine::ACCEPTANCE_HEAD;
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

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const HEADS: &str = "medusa_lm_head.safetensors";

/// EAGLE's projection of embedding and feature.
const FUSION: &str = "fc.weight";
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
        None => pad_model(args),
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
    let digest = ModelFiles::open(target)?.digest()?;
    if args.model.join(ACCEPTANCE_HEAD).exists() {
        config["laser_draft"]["draft"] = json!(digest);
        config["laser_draft"]["target"] = read_config(target)?["laser_draft"]["target"].clone();
        return copy(args, ACCEPTANCE_HEAD, &config);
    }
    if let Some(belongs) = config.get_mut("laser_draft") {
        belongs["target"] = json!(digest);
    }
    let of_target = Shape::of(&read_config(target)?)?;
    let (file, from, to) = match args.model.join(HEADS).exists() {
        true => (HEADS, of_target, of_target),
        false => (WEIGHTS, Shape::of(&config)?, Shape { layers: 1, ..of_target }),
    };
    let bytes = read(&args.model, file)?;
    let weights = SafeTensors::deserialize(&bytes).context(file)?;
    if file == WEIGHTS && weights.tensor(FUSION).is_err() {
        return copy(args, WEIGHTS, &config);
    }
    ensure!(
        config["vocab_size"] == json!(to.vocabulary),
        "--target {}: has {} tokens, --model {}; pad a layer for a model whose vocabulary is as large",
        target.display(),
        to.vocabulary,
        config["vocab_size"]
    );
    let mut padding = Padding::new(weights, (from, to))?;
    padding.draft().with_context(|| args.model.join(file).display().to_string())?;
    if let Some(epsilon) = config["rms_norm_eps"].as_f64() {
        padding.describe(&mut config, epsilon);
    }
    fs::create_dir_all(&args.output)?;
    let count = padding.write(&args.output.join(file))?;
    write_config(&args.output, &config)?;
    Ok(count)
}

/// A whole draft model is what it is, whatever the model that it drafts for, and so is its acceptance head.
fn copy(args: &PadArgs, file: &str, config: &Value) -> Result<usize> {
    ensure!(
        config.get("laser_draft").is_some(),
        "--model {}: no draft model of `laser train draft`, no EAGLE layer and no Medusa heads, which --target is for",
        args.model.display()
    );
    let bytes = read(&args.model, file)?;
    let weights = SafeTensors::deserialize(&bytes).context(file.to_owned())?;
    fs::create_dir_all(&args.output)?;
    copy_files(args, &[file, "tokenizer.json", "tokenizer_config.json"])?;
    write_config(&args.output, config)?;
    Ok(weights.tensors().iter().map(|(_, tensor)| tensor.shape().iter().product::<usize>()).sum())
}

fn copy_files(args: &PadArgs, names: &[&str]) -> Result<()> {
    for name in names.iter().filter(|name| args.model.join(name).exists()) {
        fs::copy(args.model.join(name), args.output.join(name))?;
    }
    Ok(())
}

fn pad_model(args: &PadArgs) -> Result<usize> {
    let mut config = read_config(&args.model)?;
    let from = Shape::of(&config)?;
    let to = target(args, &from)?;
    let bytes = read(&args.model, WEIGHTS)?;
    let weights = SafeTensors::deserialize(&bytes).context(WEIGHTS)?;
    let mut padding = Padding::new(weights, (from, to))?;
    let epsilon = config["rms_norm_eps"].as_f64().context("config.json: no rms_norm_eps")?;
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
        let first = weights.names().first().map(|name| weights.tensor(name)).context("no tensors")?;
        let dtype = first?.dtype();
        ensure!(matches!(dtype, Dtype::F32 | Dtype::BF16), "{dtype:?} weights; expected F32 or BF16");
        let rng = Xoshiro256PlusPlus::seed_from_u64(1);
        Ok(Self { weights, dtype, from, to, rng, written: BTreeMap::new() })
    }

    /// What drafts from features. It takes embeddings and features in, of which what is added is zero, and gives
    /// features out.
    fn draft(&mut self) -> Result<()> {
        let names: Vec<String> = self.weights.names().into_iter().map(str::to_owned).collect();
        for name in names {
            let part = name.strip_prefix("layers.0.").and_then(|name| name.strip_suffix(".weight"));
            let shape = part.and_then(|part| self.to.of_matrix(part));
            let padded = match (part, shape) {
                (Some(part), Some(shape)) => self.matrix(Some(&name), shape, !WRITING.contains(&part))?,
                (Some(_), None) => self.norm(Some(&name), 0.0)?,
                _ => self.of_features(&name)?,
            };
            self.written.insert(name, padded);
        }
        Ok(())
    }

    /// A bias, or a matrix over one or two features, side by side.
    fn of_features(&mut self, name: &str) -> Result<Padded> {
        let tensor = self.weights.tensor(name)?;
        let (hidden, shape) = (self.to.hidden, tensor.shape().to_vec());
        let outputs = |rows: usize| if rows == self.to.vocabulary { rows } else { hidden };
        match shape[..] {
            [_] => {
                let size = self.element().len();
                let mut bytes = tensor.data().to_vec();
                bytes.resize(hidden * size, 0);
                Ok(Padded { dtype: self.dtype, shape: vec![hidden], bytes })
            }
            [rows, _] if name == FUSION => self.blocks(Some(name), [outputs(rows), 2 * hidden], 2, false),
            [rows, _] => self.matrix(Some(name), [outputs(rows), hidden], false),
            _ => anyhow::bail!("{name}: neither EAGLE's layer nor Medusa's heads have such a tensor"),
        }
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
        let is_wider = self.to.vocabulary > self.from.vocabulary;
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

    /// The value of the constant dimension, exact in every type; 0 without one.
    fn constant(&self, epsilon: f64) -> f32 {
        let most = (epsilon * self.from.hidden as f64 / 2.0).sqrt();
        if self.to.vocabulary > self.from.vocabulary { single(most.log2().floor().exp2()) } else { 0.0 }
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
        Ok(self.written.values().map(|padded| padded.shape.iter().product::<usize>()).sum())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "weights are single precision")]
fn single(value: f64) -> f32 {
    value as f32
}
