//! [`MistralEngine`]: mistralrs decoding by itself, one token a forward, without trees.
//!
//! It runs every architecture that mistralrs knows, it is the baseline of benchmarks, and the tests
//! hold the tree engine against it. The hub is never asked: a path that is not a complete local model is
//! refused before mistralrs sees it.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::Tensor;
use laser_schema::DeviceOption;
use mistralrs::{
    CustomLogitsProcessor, GgufModelBuilder, Model, ModelDType, NormalRequest, Request, RequestMessage, ResponseOk,
    SamplingParams, StopTokens, TextModelBuilder, TokenSource,
};
use tokio::sync::mpsc;

use crate::{
    error::EngineError,
    options::{DTypeOption, EngineOptions},
    weight_files::weight_files,
};

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// At a stop token, which is not part of the text.
    Stop,
    /// At the maximum length or the end of the context.
    Length,
}

/// One generated text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Its tokens, exactly as sampled, without the prompt and without the stop token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// A model run by mistralrs. Loading starts a thread of its own that ends when the engine is dropped.
pub struct MistralEngine {
    model: Model,
    max_positions: usize,
    device: String,
}

impl std::fmt::Debug for MistralEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MistralEngine").field("max_positions", &self.max_positions).finish()
    }
}

impl MistralEngine {
    /// Loads a model directory or a GGUF file; `batch` is how many sequences run at once.
    ///
    /// # Errors
    /// [`EngineError::MissingModel`], [`EngineError::MissingFile`] or [`EngineError::Weights`] if the model is not
    /// complete on disk, [`EngineError::Mistralrs`] if mistralrs refuses it.
    pub async fn load(options: &EngineOptions, batch: usize) -> Result<Self, EngineError> {
        let options = options.clone();
        // A task of its own: mistralrs blocks its thread while it loads, and takes wake-ups of what else is awaited
        // there for its own, so that a run waited for its plan's files for ever.
        let load = tokio::spawn(async move { Self::build(&options, batch).await });
        load.await.map_err(refused)?
    }

    async fn build(options: &EngineOptions, batch: usize) -> Result<Self, EngineError> {
        let path = &options.path;
        if !path.exists() {
            return Err(EngineError::MissingModel { path: path.clone() });
        }
        let model = match path.is_dir() {
            true => build_text(options, batch).await?,
            false => build_gguf(options, batch).await?,
        };
        let limit = model.max_sequence_length().map_err(refused)?;
        Ok(Self { model, max_positions: limit.unwrap_or(usize::MAX), device: options.device.to_string() })
    }

    /// Positions of the model, as mistralrs reads them.
    #[must_use]
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Where the tensors live, e.g. `cpu`, `cuda:0`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Continues a prompt greedily (ties to the lower token id) until a token of `stop_tokens`, a stop token of the
    /// model's own configuration, `max_new_tokens` or the end of the context. One prompt at a time: of sequences of
    /// equal length in flight together, mistralrs 0.8.1 continues one with another's text on CPUs.
    ///
    /// # Errors
    /// [`EngineError::InvalidOption`] if the prompt is empty or leaves no room for a token,
    /// [`EngineError::Mistralrs`] for mistralrs' own.
    pub async fn generate(
        &self,
        prompt: Vec<u32>,
        max_new_tokens: usize,
        stop_tokens: &[u32],
    ) -> Result<Completion, EngineError> {
        // mistralrs answers a sequence that runs into the limit with an error, so it stops one short of it.
        let room = self.max_positions.saturating_sub(prompt.len() + 1);
        let length = max_new_tokens.min(room);
        if prompt.is_empty() || length == 0 {
            return Err(EngineError::InvalidOption {
                option: "prompt",
                value: format!("{} tokens", prompt.len()),
                message: format!(
                    "a prompt needs at least 1 token and room for 1 of {max_new_tokens} new ones in {} positions",
                    self.max_positions
                ),
            });
        }
        let greedy = Arc::new(Greedy::default());
        let mut sampling = SamplingParams::deterministic();
        sampling.max_len = Some(length);
        sampling.stop_toks = Some(StopTokens::Ids(stop_tokens.to_vec()));
        let stopped = self.run(prompt, sampling, greedy.clone()).await?;
        let mut tokens = greedy.take();
        if stopped {
            tokens.pop();
        }
        Ok(Completion { tokens, finish: if stopped { Finish::Stop } else { Finish::Length } })
    }

    /// Sends one request; whether it ended at a stop token.
    async fn run(&self, prompt: Vec<u32>, sampling: SamplingParams, greedy: Arc<Greedy>) -> Result<bool, EngineError> {
        let (sender, mut receiver) = mpsc::channel(1);
        let runner = self.model.inner();
        let message = RequestMessage::CompletionTokens(prompt);
        let id = runner.next_request_id();
        let mut request = NormalRequest::new_simple(message, sampling, sender, id, None, None);
        request.logits_processors = Some(vec![greedy]);
        let requests = runner.get_sender(None).map_err(refused)?;
        requests.send(Request::Normal(Box::new(request))).await.map_err(refused)?;
        let response = receiver.recv().await.ok_or_else(|| refused("the engine thread ended"))?;
        match response.as_result().map_err(refused)? {
            ResponseOk::CompletionDone(done) => {
                Ok(done.choices.first().is_some_and(|choice| choice.finish_reason == "stop"))
            }
            _ => Err(refused("unexpected kind of response")),
        }
    }
}

/// The sampler, in mistralrs' tap for logits: it decides the token, leaves no other choice and
/// writes it down. mistralrs itself reports text only, and text does not determine tokens.
#[derive(Default)]
struct Greedy(Mutex<Vec<u32>>);

impl Greedy {
    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl CustomLogitsProcessor for Greedy {
    fn apply(&self, logits: &Tensor, _context: &[u32]) -> candle_core::Result<Tensor> {
        let mut values: Vec<f32> = logits.to_vec1()?;
        let best = |best: usize, token: usize| {
            if values[token] > values[best] { token } else { best }
        };
        let token = (0..values.len()).fold(0, best);
        values.fill(f32::NEG_INFINITY);
        values[token] = 0.0;
        let token = u32::try_from(token).map_err(candle_core::Error::wrap)?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(token);
        Tensor::from_vec(values, logits.shape(), logits.device())
    }
}

async fn build_text(options: &EngineOptions, batch: usize) -> Result<Model, EngineError> {
    let directory = &options.path;
    for file in ["config.json", "tokenizer.json"] {
        require(directory, file)?;
    }
    weight_files(directory)?;
    let device = options.device()?;
    let dtype = match options.dtype {
        DTypeOption::F32 => ModelDType::F32,
        DTypeOption::F16 => ModelDType::F16,
        DTypeOption::Bf16 => ModelDType::BF16,
    };
    let mut builder = TextModelBuilder::new(directory.display())
        .with_dtype(dtype)
        .with_token_source(TokenSource::None)
        .with_prefix_cache_n(None)
        .with_max_num_seqs(batch);
    if let Some(isq) = options.isq_type(&device)? {
        builder = builder.with_isq(isq);
    }
    builder = match options.device {
        DeviceOption::Cpu => builder.with_force_cpu(),
        DeviceOption::Cuda(_) => builder.with_device(device),
    };
    builder.build().await.map_err(refused)
}

async fn build_gguf(options: &EngineOptions, batch: usize) -> Result<Model, EngineError> {
    let (Some(directory), Some(file)) = (options.path.parent(), options.path.file_name()) else {
        return Err(EngineError::UnknownFormat { path: options.path.clone() });
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let device = options.device()?;
    let mut builder = GgufModelBuilder::new(directory.display(), vec![file.to_string_lossy()])
        .with_token_source(TokenSource::None)
        .with_prefix_cache_n(None)
        .with_max_num_seqs(batch);
    if directory.join("tokenizer.json").is_file() {
        builder = builder.with_tok_model_id(directory.display());
    }
    builder = match options.device {
        DeviceOption::Cpu => builder.with_force_cpu(),
        DeviceOption::Cuda(_) => builder.with_device(device),
    };
    builder.build().await.map_err(refused)
}

fn require(directory: &Path, file: &str) -> Result<(), EngineError> {
    if directory.join(file).is_file() {
        return Ok(());
    }
    Err(EngineError::MissingFile {
        directory: directory.into(),
        file: file.into(),
        remedy: "mistralrs would look for it on the hub; fetch the whole model first".into(),
    })
}

fn refused(error: impl std::fmt::Display) -> EngineError {
    EngineError::Mistralrs { message: error.to_string() }
}
