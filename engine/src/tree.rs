//! The tree engine: the decoder, its caches and the protocol, put together.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device, quantized::GgmlDType};
use laser_cpu::{Allowed, Batch, CpuDecoder, CpuHeads, Format, MaskedRow, Matrix, ModelShape, Predictions, Tensors};
use laser_decode::Token;
use laser_model::{ModelError, heads_in, weights_in};
use laser_schema::DeviceOption;
use mistralrs_quant::IsqType;
use rayon::ThreadPool;

use crate::{
    awake::awake,
    blocks,
    config::{ModelConfig, read_config},
    decoder::Decoder,
    draft_tokens::WeightsOfTokens,
    eagle,
    engine::{Engine, EngineInfo},
    error::EngineError,
    gguf::GgufWeights,
    gpu,
    medusa::{self, KernelHeads, TensorHeads},
    options::{DTypeOption, EngineOptions},
    scores::Scores,
    segment::{MaskedNode, Segment, Slot},
    shared::SharedWeights,
    slots::{SlotState, SlotTable, check_features},
    tree_lm::{TreeLm, Weights},
    weight_files::WeightFiles,
};

/// Bytes of a megabyte as `[model] cache_mb` counts.
const MEGABYTE: usize = 1 << 20;

/// Loads a model directory or a GGUF file. Weights in f32, bf16, Q8_0, Q4_0, Q4_K, Q5_K and Q6_K on a CPU run on
/// kernels of our own, everything else on mistralrs' layers. Peak memory: the weights in the chosen precision plus one
/// layer.
///
/// # Errors
/// Every way a model can be missing, unsupported, damaged or asked for in a form that the
/// device does not have; see [`EngineError`].
pub fn load(options: &EngineOptions) -> Result<Box<dyn Engine>, EngineError> {
    let device = options.device()?;
    let Opened { config, precision, mut weights, format, tokens } = open(options, &device)?;
    if let Some(tokens) = tokens.clone() {
        weights = Box::new(WeightsOfTokens { weights, tokens, place: (options.dtype.dtype(), device.clone()) });
    }
    build(options, (config, precision), (weights.as_mut(), tokens), format, &device)
}

/// A model that is about to be loaded.
struct Opened {
    config: ModelConfig,
    precision: String,
    weights: Box<dyn Weights>,
    /// How our own kernels store it, if they can.
    format: Option<Format>,
    /// Of a draft model: the only tokens that it tells of.
    tokens: Option<Vec<Token>>,
}

/// The model, or what drafts from its features if the options name that.
fn open(options: &EngineOptions, device: &Device) -> Result<Opened, EngineError> {
    let model = open_model(options, device)?;
    let Some(folder) = &options.drafts else {
        return Ok(model);
    };
    let isq = options.isq_type(device)?;
    let (config, own, tokens) = open_drafts(folder, options, (isq, device), &model.config)?;
    let own_name = if config.shape.medusa.is_some() { medusa::own_name } else { eagle::own_name };
    let format = model.format.and(format(options.dtype, isq, &config.shape));
    let weights = Box::new(SharedWeights { own, target: model.weights, own_name });
    Ok(Opened { config, format, weights, tokens, ..model })
}

/// What drafts from the features of a target: the configuration that it makes of the target's, its weights, and the
/// tokens that it tells of if those are not all.
fn open_drafts(
    folder: &Path,
    options: &EngineOptions,
    (isq, device): (Option<IsqType>, &Device),
    target: &ModelConfig,
) -> Result<(ModelConfig, WeightFiles, Option<Vec<Token>>), EngineError> {
    let dtype = options.dtype.dtype();
    let (config, own) = match heads_in(folder) {
        Some(file) => {
            let heads = WeightFiles::open_file(&file, dtype, isq, device)?;
            (medusa::config(&file, &heads, target)?, heads)
        }
        None => {
            let layer = eagle::open(folder, dtype, isq, device)?;
            (eagle::config(folder, &layer, target)?, layer)
        }
    };
    let tokens = own.draft_tokens(config.shape.vocab_size)?;
    Ok((config, own, tokens))
}

fn open_model(options: &EngineOptions, device: &Device) -> Result<Opened, EngineError> {
    let path = &options.path;
    if path.is_dir() {
        let config = read_model_config(path)?;
        let isq = options.isq_type(device)?;
        let weights = WeightFiles::open(path, options.dtype.dtype(), isq, device)?;
        let tokens = weights.draft_tokens(config.shape.vocab_size)?;
        let name = options.isq.as_ref().map_or_else(String::new, |isq| format!("+{}", isq.to_lowercase()));
        let precision = format!("{}{name}", options.dtype);
        let format = format(options.dtype, isq, &config.shape);
        Ok(Opened { config, precision, weights: Box::new(weights), format, tokens })
    } else if is_gguf(path)? {
        check_gguf_options(options)?;
        let weights = GgufWeights::open(path, options.dtype.dtype(), device)?;
        let (config, format) = (weights.config().clone(), weights.format());
        let precision = match options.dtype {
            DTypeOption::F32 => "gguf".into(),
            dtype => format!("{dtype}+gguf"),
        };
        Ok(Opened { config, precision, weights: Box::new(weights), format, tokens: None })
    } else {
        Err(EngineError::UnknownFormat { path: path.clone() })
    }
}

/// The configuration of what the options name, without its weights.
pub(super) fn model_config(options: &EngineOptions) -> Result<ModelConfig, EngineError> {
    let path = &options.path;
    let config = if path.is_dir() {
        read_model_config(path)?
    } else if is_gguf(path)? {
        GgufWeights::open(path, DType::F32, &Device::Cpu)?.config().clone()
    } else {
        return Err(EngineError::UnknownFormat { path: path.clone() });
    };
    match &options.drafts {
        None => Ok(config),
        Some(folder) => Ok(open_drafts(folder, options, (None, &Device::Cpu), &config)?.0),
    }
}

/// The types of a GGUF file's matrices.
pub(super) fn gguf_types(path: &Path) -> Result<Vec<GgmlDType>, EngineError> {
    Ok(GgufWeights::open(path, DType::F32, &Device::Cpu)?.matrix_types().collect())
}

/// Refuses a draft model whose list of its tokens is damaged, and what is to draft from a model's features also if it
/// is of another width or vocabulary. Returns how many heads it is, if it is Medusa's. Reads configurations, the
/// headers of weight files, and that list.
///
/// # Errors
/// Naming the file, with both sizes or the tensor; otherwise those of [`load`] that are about configurations.
pub fn check_drafts(options: &EngineOptions) -> Result<Option<usize>, EngineError> {
    let shape = model_config(options)?.shape;
    if options.drafts.is_none() && options.path.is_dir() {
        let weights = WeightFiles::open(&options.path, options.dtype.dtype(), None, &Device::Cpu)?;
        weights.draft_tokens(shape.vocab_size)?;
    }
    Ok(shape.medusa.map(|medusa| medusa.heads))
}

/// What a draft layer shares with its target.
#[derive(Debug, Clone)]
pub struct TargetParts {
    /// The target's shape.
    pub shape: ModelShape,
    /// `[vocab_size, hidden_size]`.
    pub embedding: Vec<f32>,
    /// The projection to the vocabulary, of the same shape; none if it is the embedding.
    pub head: Option<Vec<f32>>,
}

/// Reads what a draft layer shares with the model that the options name.
///
/// # Errors
/// Those of [`load`].
pub fn target_parts(options: &EngineOptions) -> Result<TargetParts, EngineError> {
    let Opened { config, weights, .. } = open_model(options, &Device::Cpu)?;
    let shape = [config.shape.vocab_size, config.shape.hidden_size];
    let head = (!config.shape.tied_embeddings).then(|| weights.values("lm_head.weight", &shape)).transpose()?;
    Ok(TargetParts { embedding: weights.values("model.embed_tokens.weight", &shape)?, head, shape: config.shape })
}

/// Whether a folder has weights that draft from the features of a target, an EAGLE layer or Medusa's heads, and not a
/// whole model.
///
/// # Errors
/// Weights that cannot be read.
pub fn reads_features(folder: &Path) -> Result<bool, EngineError> {
    if heads_in(folder).is_some() {
        return Ok(true);
    }
    if let Ok(laser_model::Weights::Gguf(_)) = weights_in(folder) {
        return Ok(false);
    }
    match eagle::open(folder, DTypeOption::F32.dtype(), None, &Device::Cpu) {
        Ok(weights) => Ok(eagle::is_layer(&weights)),
        Err(EngineError::Weights(ModelError::NoWeights { .. })) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The engine of these weights: on a CPU on kernels of our own if they have the format, else on mistralrs' layers.
pub(super) fn build(
    options: &EngineOptions,
    (config, precision): (ModelConfig, String),
    (weights, tokens): (&mut dyn Weights, Option<Vec<Token>>),
    format: Option<Format>,
    device: &Device,
) -> Result<Box<dyn Engine>, EngineError> {
    let threads = options.thread_pool()?;
    let shape = config.shape.clone();
    let format = format.filter(|_| device.is_cpu());
    if let Some(medusa) = shape.medusa {
        let hidden_size = shape.hidden_size;
        let limit = cache_limit(options, device)?;
        let engine: Box<dyn Engine> = match format {
            Some(format) => {
                let heads = packed(&threads, weights, format, |weights| CpuHeads::load(&shape, medusa, weights))?;
                let info = info(config, weights.parameters(), precision, options);
                Box::new(TreeEngine::new((KernelHeads { heads, hidden_size }, tokens), info, threads, limit))
            }
            None => {
                let heads = TensorHeads::load(&shape, medusa, weights, device)?;
                let info = info(config, weights.parameters(), precision, options);
                Box::new(TreeEngine::new((heads, tokens), info, threads, limit))
            }
        };
        return Ok(engine);
    }
    if let Some(format) = format {
        // An embedding that is multiplied with as well is read twice.
        let twice = if shape.tied_embeddings { shape.vocab_size * shape.hidden_size } else { 0 };
        let model = packed(&threads, weights, format, |weights| CpuDecoder::load(shape, weights))?;
        let parameters = weights.parameters().saturating_sub(twice as u64);
        let info = info(config, parameters, precision, options);
        return Ok(Box::new(TreeEngine::new((model, tokens), info, threads, cache_limit(options, device)?)));
    }
    let model = TreeLm::load(shape, weights, device)?;
    let info = info(config, weights.parameters(), precision, options);
    Ok(Box::new(TreeEngine::new((model, tokens), info, threads, cache_limit(options, device)?)))
}

/// Packs weights on the threads that are going to multiply with them: no others work, and the memory of a page is that
/// of the thread that first writes to it.
fn packed<M: Send>(
    threads: &ThreadPool,
    weights: &mut dyn Weights,
    format: Format,
    load: impl FnOnce(&Formatted<'_>) -> Result<M, EngineError> + Send,
) -> Result<M, EngineError> {
    // Moved, since the weights may go to another thread, but are not shared with it.
    threads.install(move || load(&Formatted { weights: &*weights, format }))
}

/// Bytes that keys and values may take beside the loaded weights: what is configured, or on a GPU four fifths of what
/// is free. The last fifth is for activations: the logits of 2,048 nodes of 128,000 tokens are 1 GB.
fn cache_limit(options: &EngineOptions, device: &Device) -> Result<Option<usize>, EngineError> {
    match options.cache_mb {
        Some(0) => Err(EngineError::InvalidOption {
            option: "cache_mb",
            value: "0".into(),
            message: "expected at least 1 MB".into(),
        }),
        Some(megabytes) => Ok(Some(megabytes.saturating_mul(MEGABYTE))),
        None => Ok(gpu::free_bytes(device)?.map(|free| free / 5 * 4)),
    }
}

/// Weights in the format of all that have none of their own.
struct Formatted<'a> {
    weights: &'a dyn Weights,
    format: Format,
}

impl Tensors for Formatted<'_> {
    type Error = EngineError;

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        self.weights.values(name, shape)
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Matrix, EngineError> {
        self.weights.matrix(name, shape, self.format)
    }
}

/// How our own kernels store such weights, if they can.
pub(super) fn format(dtype: DTypeOption, isq: Option<IsqType>, shape: &ModelShape) -> Option<Format> {
    let format = match (dtype, isq) {
        (_, Some(isq)) => blocks::format_of(isq.try_into().ok()?),
        (DTypeOption::F32, None) => Some(Format::F32),
        (DTypeOption::Bf16, None) => Some(Format::Bf16),
        _ => None,
    };
    format.filter(|format| blocks::fits(shape, *format))
}

fn info(config: ModelConfig, parameters: u64, dtype: String, options: &EngineOptions) -> EngineInfo {
    let shape = &config.shape;
    let looked_up = match shape.tied_embeddings {
        true => 0,
        false => (shape.vocab_size * shape.hidden_size) as u64,
    };
    EngineInfo {
        vocab_size: shape.vocab_size,
        max_positions: config.max_positions,
        architecture: config.architecture_name,
        parameters,
        forward_parameters: parameters.saturating_sub(looked_up),
        dtype,
        device: options.device.to_string(),
        hidden_size: shape.hidden_size,
        reads_features: shape.fused.is_some() || shape.medusa.is_some(),
        heads: shape.medusa.map(|medusa| medusa.heads),
    }
}

/// A decoder with its open sequences.
struct TreeEngine<D: Decoder> {
    info: EngineInfo,
    model: D,
    /// The tokens that the decoder's outputs stand for; none if each stands for the token of its number.
    tokens: Option<Vec<Token>>,
    threads: Arc<ThreadPool>,
    slots: SlotTable<D::Cache>,
    /// Bound on the bytes of all caches.
    cache_limit: Option<usize>,
    keeps_features: bool,
    keeps_logits: bool,
    /// Of each segment of the last step its slot, its first scored node, and that node's row and how many follow.
    scored: Vec<(Slot, usize, std::ops::Range<usize>)>,
}

impl<D: Decoder> TreeEngine<D> {
    fn new(
        (model, tokens): (D, Option<Vec<Token>>),
        info: EngineInfo,
        threads: Arc<ThreadPool>,
        cache_limit: Option<usize>,
    ) -> Self {
        Self {
            slots: SlotTable::new(info.vocab_size, info.max_positions),
            model,
            tokens,
            threads,
            info,
            cache_limit,
            keeps_features: false,
            keeps_logits: false,
            scored: Vec::new(),
        }
    }

    /// Refuses a cache that does not fit beside those of the open slots.
    fn check_cache(&self, capacity: usize) -> Result<(), EngineError> {
        let bytes = self.model.cache_bytes(capacity);
        let used: usize = self.slots.capacities().map(|capacity| self.model.cache_bytes(capacity)).sum();
        match self.cache_limit {
            Some(limit) if used + bytes > limit => Err(EngineError::CacheFull {
                capacity,
                megabytes: bytes.div_ceil(MEGABYTE),
                used: used / MEGABYTE,
                limit: limit / MEGABYTE,
            }),
            _ => Ok(()),
        }
    }

    /// Refuses questions about tokens to a model that tells of some only.
    fn check_tells_of_all(&self, slot: Slot) -> Result<(), EngineError> {
        match &self.tokens {
            Some(_) => Err(EngineError::Protocol { slot, message: "the draft model tells of some tokens only".into() }),
            None => Ok(()),
        }
    }

    /// The row of a scored node of the last step.
    fn row(&self, slot: Slot, node: usize) -> Result<usize, EngineError> {
        let of_slot = self.scored.iter().find(|(other, ..)| *other == slot);
        let row = of_slot.and_then(|(_, from, rows)| rows.clone().nth(node.checked_sub(*from)?));
        row.ok_or_else(|| EngineError::Protocol { slot, message: format!("node {node} was not scored") })
    }

    /// Runs the model with the caches of the segments' slots, which get them back whatever happens.
    fn forward(
        &mut self,
        segments: &[Segment<'_>],
        batch: &Batch<'_>,
        top_k: usize,
    ) -> Result<Predictions, EngineError> {
        let mut caches = Vec::with_capacity(segments.len());
        for segment in segments {
            caches.push(std::mem::take(&mut self.slots.get_mut(segment.slot)?.data));
        }
        let model = &mut self.model;
        let result = awake(&self.threads, || model.forward(batch, &mut caches, top_k));
        for (segment, cache) in segments.iter().zip(caches) {
            self.slots.get_mut(segment.slot)?.data = cache;
        }
        result
    }
}

impl<D: Decoder> Engine for TreeEngine<D> {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn threads(&self) -> Option<Arc<ThreadPool>> {
        Some(self.threads.clone())
    }

    fn keep_features(&mut self) {
        self.keeps_features = true;
    }

    fn keep_logits(&mut self) {
        self.keeps_logits = true;
    }

    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError> {
        let mut rows = Vec::with_capacity(nodes.len());
        for &MaskedNode { slot, node, mask, draw } in nodes {
            self.check_tells_of_all(slot)?;
            rows.push(MaskedRow { row: self.row(slot, node)?, mask, draw });
        }
        let model = &mut self.model;
        let found = awake(&self.threads, || model.masked(&rows, top_k))?;
        let told = |(node, found): (&MaskedNode<'_>, Option<Allowed>)| {
            let message = format!("no token may follow node {}", node.node);
            found.ok_or(EngineError::Protocol { slot: node.slot, message })
        };
        nodes.iter().zip(found).map(told).collect()
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        if capacity == 0 {
            return Err(EngineError::NoCapacity);
        }
        self.check_cache(capacity)?;
        let cache = self.model.open(capacity)?;
        Ok(self.slots.open(capacity, 0, cache))
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        self.slots.check_fork(from, length, capacity)?;
        if length == 0 {
            return self.open(capacity);
        }
        self.check_cache(capacity)?;
        let from = &mut self.slots.get_mut(from)?.data;
        let cache = self.model.fork(from, length, capacity)?;
        Ok(self.slots.open(capacity, length, cache))
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        self.slots.check_step(segments)?;
        if segments.is_empty() {
            return Ok(Vec::new());
        }
        let (wants_features, keeps_logits) = (self.keeps_features, self.keeps_logits);
        let mut batch = Batch { wants_features, keeps_logits, ..Batch::default() };
        let mut scored = Vec::with_capacity(segments.len());
        for segment in segments {
            check_features(segment, &self.info)?;
            if !segment.asked.tokens.is_empty() {
                self.check_tells_of_all(segment.slot)?;
            }
            let tree = self.slots.get(segment.slot)?.tree();
            let &Segment { tokens, parents, scored_from, draw, asked, .. } = segment;
            let first = batch.scored.len();
            batch.push((tokens, parents), scored_from, tree, (draw, asked));
            scored.push((segment.slot, scored_from, first..batch.scored.len()));
            batch.before.extend_from_slice(segment.before);
        }
        let width = top_k.min(self.tokens.as_ref().map_or(self.info.vocab_size, Vec::len));
        let Predictions { mut candidates, mut rows, features, asked } = self.forward(segments, &batch, width)?;
        if let Some(tokens) = &self.tokens {
            let choices = rows.iter_mut().map(|row| &mut row.choice);
            candidates.iter_mut().chain(choices).for_each(|told| told.token = tokens[told.token as usize]);
        }
        self.slots.append(segments)?;
        self.scored = scored;
        let (mut candidates, mut rows) = (candidates.into_iter(), rows.into_iter());
        let (mut features, mut asked) = (features.into_iter(), asked.into_iter());
        let (hidden, ahead) = (self.info.hidden_size, self.info.ahead());
        let scores = segments.iter().map(|segment| {
            let scored = (segment.tokens.len() - segment.scored_from) * ahead;
            let own = Predictions {
                candidates: candidates.by_ref().take(scored * width).collect(),
                rows: rows.by_ref().take(scored).collect(),
                features: features.by_ref().take(segment.tokens.len() * hidden).collect(),
                asked: asked.by_ref().take(segment.asked.tokens.len()).collect(),
            };
            Scores::new((segment.scored_from, ahead), width, own, hidden).with_ends(segment.asked.ends)
        });
        Ok(scores.collect())
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.slots.check_commit(slot, keep)?;
        let state = self.slots.get_mut(slot)?;
        let cached = state.cached();
        self.model.commit(&mut state.data, cached, keep)?;
        self.slots.commit(slot, keep.len())
    }

    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        let parents = self.slots.check_hold(slot, keep)?;
        let state = self.slots.get_mut(slot)?;
        let cached = state.cached();
        self.model.commit(&mut state.data, cached, keep)?;
        self.slots.hold(slot, parents)
    }

    fn close(&mut self, slot: Slot) {
        if let Some(cache) = self.slots.close(slot) {
            self.model.close(cache);
        }
    }

    fn cached(&self, slot: Slot) -> usize {
        self.slots.get(slot).map_or(0, SlotState::cached)
    }
}

/// config.json of a model directory.
fn read_model_config(directory: &Path) -> Result<ModelConfig, EngineError> {
    let file = directory.join("config.json");
    if !file.is_file() {
        return Err(EngineError::MissingFile {
            directory: directory.into(),
            file: "config.json".into(),
            remedy: "point at the directory of a Hugging Face model, or at a .gguf file".into(),
        });
    }
    read_config(&file)
}

fn is_gguf(path: &Path) -> Result<bool, EngineError> {
    if !path.exists() {
        return Err(EngineError::MissingModel { path: path.into() });
    }
    Ok(path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")))
}

/// A GGUF file brings its own precision.
fn check_gguf_options(options: &EngineOptions) -> Result<(), EngineError> {
    let (option, value, message) = match (&options.isq, options.dtype, options.device) {
        (Some(isq), _, _) => ("isq", isq.clone(), "a GGUF file has its own quantisation; leave it out"),
        (None, DTypeOption::F32, _) | (None, _, DeviceOption::Cuda(_)) => return Ok(()),
        (None, dtype, _) => ("dtype", dtype.to_string(), "on a CPU a GGUF file runs with f32 activations; choose f32"),
    };
    Err(EngineError::InvalidOption { option, value, message: message.into() })
}
