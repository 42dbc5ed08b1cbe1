//! [`TreeEngine`]: the decoder, its caches and the protocol, put together.

use std::path::Path;

use candle_core::{CpuStorage, Device, Storage, Tensor};

use super::{
    Engine, EngineError, EngineInfo, EngineOptions, Scores, Segment, Slot,
    cache::{CachePool, KvCache},
    config::{ModelConfig, read_config},
    gguf::GgufWeights,
    options::DTypeOption,
    safetensors::SafetensorsWeights,
    scores::push_top_k,
    slots::SlotTable,
    tree_lm::{Batch, Span, TreeLm, Weights},
};

/// A model whose weights are in memory. See [`Engine`] for its use.
#[derive(Debug)]
pub struct TreeEngine {
    info: EngineInfo,
    model: TreeLm,
    slots: SlotTable<KvCache>,
    caches: CachePool,
}

impl TreeEngine {
    /// Loads a model directory or a GGUF file. Peak memory: the weights in the chosen precision
    /// plus one tensor.
    ///
    /// # Errors
    /// Every way a model can be missing, unsupported, damaged or asked for in a form that the
    /// device does not have; see [`EngineError`].
    pub fn load(options: &EngineOptions) -> Result<Self, EngineError> {
        let device = options.device()?;
        let path = &options.path;
        if path.is_dir() {
            let config = read_model_config(path)?;
            let isq = options.isq_type(&device)?;
            let mut weights = SafetensorsWeights::open(path, options.dtype.dtype(), isq, &device)?;
            let isq = options
                .isq
                .as_ref()
                .map(|isq| format!("+{}", isq.to_lowercase()));
            let dtype = format!("{}{}", options.dtype, isq.unwrap_or_default());
            Self::build(config, &mut weights, dtype, options, &device)
        } else if is_gguf(path)? {
            check_gguf_options(options)?;
            let mut weights = GgufWeights::open(path, &device)?;
            let config = weights.config().clone();
            Self::build(config, &mut weights, "gguf".into(), options, &device)
        } else {
            Err(EngineError::UnknownFormat { path: path.clone() })
        }
    }

    fn build(
        config: ModelConfig,
        weights: &mut dyn Weights,
        dtype: String,
        options: &EngineOptions,
        device: &Device,
    ) -> Result<Self, EngineError> {
        let model = TreeLm::load(config, weights, device)?;
        let config = model.config();
        Ok(Self {
            info: EngineInfo {
                vocab_size: config.vocab_size,
                max_positions: config.max_positions,
                architecture: config.architecture_name.clone(),
                parameters: weights.parameters(),
                dtype,
                device: options.device.to_string(),
            },
            slots: SlotTable::new(config.vocab_size, config.max_positions),
            caches: CachePool::new(config, model.dtype(), device),
            model,
        })
    }

    /// The scores of every segment, from the logits of all scored rows in order.
    fn scores(
        segments: &[Segment<'_>],
        logits: Option<&Tensor>,
        top_k: usize,
    ) -> Result<Vec<Scores>, EngineError> {
        let Some(logits) = logits else {
            let unscored = |segment: &Segment<'_>| Scores::new(segment.tokens.len(), 0, Vec::new());
            return Ok(segments.iter().map(unscored).collect());
        };
        let (_, vocab_size) = logits.dims2()?;
        let width = top_k.min(vocab_size);
        with_rows(logits, |mut rows| {
            segments
                .iter()
                .map(|segment| {
                    let scored = segment.tokens.len() - segment.scored_from;
                    let mut candidates = Vec::with_capacity(scored * width);
                    let (own, rest) = rows.split_at(scored * vocab_size);
                    for row in own.chunks_exact(vocab_size) {
                        push_top_k(row, width, &mut candidates);
                    }
                    rows = rest;
                    Scores::new(segment.scored_from, width, candidates)
                })
                .collect()
        })
    }
}

impl Engine for TreeEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        if capacity == 0 {
            return Err(EngineError::InvalidCapacity { capacity });
        }
        let cache = self.caches.acquire(capacity)?;
        Ok(self.slots.open(capacity, 0, cache))
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        self.slots.check_fork(from, length, capacity)?;
        if length == 0 {
            return self.open(capacity);
        }
        let cache = self
            .caches
            .acquire_copy(&self.slots.get(from)?.data, length, capacity)?;
        Ok(self.slots.open(capacity, length, cache))
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        let depths = self.slots.check_step(segments)?;
        if segments.is_empty() {
            return Ok(Vec::new());
        }
        let batch = batch(&self.slots, segments, &depths)?;
        let logits = self.model.forward(&batch)?;
        let scores = Self::scores(segments, logits.as_ref(), top_k)?;
        self.slots.append(segments)?;
        Ok(scores)
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.slots.check_commit(slot, keep)?;
        let state = self.slots.get(slot)?;
        state.data.compact(state.cached(), keep)?;
        self.slots.commit(slot, keep.len())
    }

    fn close(&mut self, slot: Slot) {
        if let Some(cache) = self.slots.close(slot) {
            self.caches.release(cache);
        }
    }

    fn cached(&self, slot: Slot) -> usize {
        self.slots
            .get(slot)
            .map_or(0, super::slots::SlotState::cached)
    }
}

/// All segments as one batch of rows.
fn batch<'a>(
    slots: &'a SlotTable<KvCache>,
    segments: &[Segment<'a>],
    depths: &[Vec<usize>],
) -> Result<Batch<'a>, EngineError> {
    let mut batch = Batch {
        tokens: Vec::new(),
        positions: Vec::new(),
        scored: Vec::new(),
        spans: Vec::with_capacity(segments.len()),
    };
    for (segment, depths) in segments.iter().zip(depths) {
        let state = slots.get(segment.slot)?;
        let (cached, offset) = (state.cached(), batch.tokens.len());
        batch.tokens.extend_from_slice(segment.tokens);
        batch
            .positions
            .extend(depths.iter().map(|depth| cached + depth));
        let scored = offset + segment.scored_from..batch.tokens.len();
        batch
            .scored
            .extend(scored.filter_map(|row| u32::try_from(row).ok()));
        batch.spans.push(Span {
            cache: &state.data,
            cached,
            offset,
            parents: segment.parents,
        });
    }
    Ok(batch)
}

/// Lends the elements of a contiguous f32 matrix, without a copy when they are on the CPU.
fn with_rows<R>(matrix: &Tensor, read: impl FnOnce(&[f32]) -> R) -> Result<R, EngineError> {
    let (storage, layout) = matrix.storage_and_layout();
    if let (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) =
        (&*storage, layout.contiguous_offsets())
    {
        return Ok(read(&data[start..end]));
    }
    drop(storage);
    Ok(read(&matrix.flatten_all()?.to_vec1::<f32>()?))
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
    Ok(path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")))
}

/// A GGUF file brings its own precision.
fn check_gguf_options(options: &EngineOptions) -> Result<(), EngineError> {
    let (option, value) = match (&options.isq, options.dtype) {
        (Some(isq), _) => ("isq", isq.clone()),
        (None, DTypeOption::F32) => return Ok(()),
        (None, dtype) => ("dtype", dtype.to_string()),
    };
    let message = "a GGUF file has its own quantisation and runs with f32 activations".into();
    Err(EngineError::InvalidOption {
        option,
        value,
        message,
    })
}
