//! From a configuration to what generates texts: the model, loaded and measured.

use anyhow::{Context, Result, ensure};
use laser_engine::{Engine, EngineOptions, SelfTest};
use laser_model::{ModelFiles, Tokenizer};
use laser_worker::budget::Budget;
use laser_worker::cost::StepCost;
use laser_worker::generate::{DraftModel, GenerateOptions, Generator, TextGenerator};
use laser_worker::lists::{ListDraft, ListDraftModel, ListGenerator};

use crate::config::{Config, DraftModelConfig, EngineKind, ModelConfig};
use crate::model::{DraftFiles, DraftOptions, grammar};

/// Loads the model that the configuration names, with its draft models, whose files are open, and for an adaptive
/// budget measures what its forwards cost.
///
/// # Errors
/// The options' and the engine's.
pub(crate) async fn load(
    config: &Config,
    model: &ModelFiles,
    drafts: Vec<DraftFiles>,
) -> Result<Box<dyn TextGenerator>> {
    let options = generate_options(config, model)?;
    let engine = engine_options(config, model);
    let tokenizer = model.tokenizer.clone();
    let grammar = grammar(config.generate.constraint()?.as_ref(), model)?;
    match config.model.engine {
        EngineKind::Tree => {
            tested(engine.clone()).await?;
            let adaptive = config.draft.is_adaptive();
            let drafts = draft_options(config, model, drafts).await?;
            let lists = config.lists.as_ref().map(|lists| lists.options(config));
            let load = move || -> Result<Box<dyn TextGenerator>> {
                let mut engine = laser_engine::load(&engine)?;
                let mut options = options;
                if let Some(mut lists) = lists {
                    let tokens = lists.largest_step(engine.info().max_positions);
                    if adaptive && (lists.draft != ListDraft::None || !drafts.is_empty()) {
                        lists.cost = Some(measured(engine.as_mut(), (lists.batch, tokens))?);
                    }
                    let cost = adaptive.then_some((lists.batch, tokens));
                    let model = drafts.first().map(|(draft, _)| load_list_draft_model(draft, cost)).transpose()?;
                    return Ok(Box::new(ListGenerator::new(engine, tokenizer, lists).with_draft_model(model)));
                }
                if adaptive {
                    options.budget = Some(Budget::new(measured(engine.as_mut(), largest(&options))?));
                }
                let models = drafts.iter().map(|draft| load_draft_model(draft, &options, &tokenizer));
                let models = models.map(|model| Ok(model?.into_source())).collect::<Result<_>>()?;
                let generator = Generator::new(engine, tokenizer, options).with_grammar(grammar);
                Ok(Box::new(generator.with_draft_sources(models)))
            };
            tokio::task::spawn_blocking(load).await?
        }
        EngineKind::Mistralrs => load_mistralrs(engine, tokenizer, options).await,
    }
}

/// Sequences and tokens of the largest step.
fn largest(options: &GenerateOptions) -> (usize, usize) {
    (options.batch, (options.batch * (options.nodes + 1)).min(options.step_tokens))
}

/// What forwards of up to so many sequences and tokens cost.
fn measured(engine: &mut dyn Engine, (batch, tokens): (usize, usize)) -> Result<StepCost> {
    let cost = StepCost::measure(engine, batch, tokens)?;
    tracing::info!(?cost, "measured the forward");
    Ok(cost)
}

/// What loads each of the configured draft models, and how it is configured.
async fn draft_options(
    config: &Config,
    model: &ModelFiles,
    files: Vec<DraftFiles>,
) -> Result<Vec<(DraftOptions, DraftModelConfig)>> {
    let mut all = Vec::new();
    for (draft, files) in config.draft.model.iter().zip(files) {
        let draft = draft.clone();
        let target = EngineOptions { dtype: draft.dtype, isq: draft.isq.clone(), ..engine_options(config, model) };
        let options = files.options(target);
        tested(options.engine.clone()).await.context("[draft.model]")?;
        all.push((options, draft));
    }
    Ok(all)
}

fn load_draft_model(
    (draft, config): &(DraftOptions, DraftModelConfig),
    options: &GenerateOptions,
    tokenizer: &Tokenizer,
) -> Result<DraftModel> {
    let measure = |engine: &mut dyn Engine| -> Result<Option<StepCost>> {
        let (size, tokens) = (engine.info().vocab_size, tokenizer.vocab_size());
        ensure!(
            size >= tokens,
            "its vocabulary has {size} tokens, the tokenizer {tokens}; give a model of the whole vocabulary"
        );
        options.budget.as_ref().map(|_| measured(engine, largest(options))).transpose()
    };
    let model = draft.load(config.forwards, measure).context("[draft.model] path")?;
    Ok(model.with_stop_threshold(config.stop_threshold))
}

/// A draft model of lists; its forwards are measured up to so many sequences and tokens if they have to pay.
fn load_list_draft_model(draft: &DraftOptions, cost: Option<(usize, usize)>) -> Result<ListDraftModel> {
    ensure!(
        draft.engine.drafts.is_none(),
        "[draft.model] path: lists are drafted by a whole model; train one with `laser train draft --for \
         recommendation`"
    );
    let mut engine = laser_engine::load(&draft.engine)?;
    let cost = cost.map(|largest| measured(engine.as_mut(), largest)).transpose()?;
    Ok(ListDraftModel::new(engine, cost))
}

/// What the self-test says of the configured device and precision.
///
/// # Errors
/// [`EngineError::SelfTest`](laser_engine::EngineError::SelfTest) if its results are wrong, and those of loading.
pub(crate) async fn selftest(config: &Config, model: &ModelFiles) -> Result<String> {
    ensure!(
        config.model.engine == EngineKind::Tree,
        "[model] engine = \"mistralrs\" has no self-test: it is about the kernels of engine = \"tree\""
    );
    let SelfTest { device, nodes, near_ties, largest, tolerance } = tested(engine_options(config, model)).await?;
    let precision = config.model.isq.clone().unwrap_or_else(|| config.model.dtype.to_string());
    Ok(format!(
        "{device}, {precision}: {nodes} nodes agree with the CPU in f32 within {largest:.1e} (tolerance {tolerance}), \
         {near_ties} near-ties"
    ))
}

/// Runs the self-test of a device and precision before something is loaded on it.
pub(crate) async fn tested(engine: EngineOptions) -> Result<SelfTest> {
    let found = tokio::task::spawn_blocking(move || laser_engine::selftest(&engine)).await??;
    tracing::debug!(?found, "the device passes the self-test");
    Ok(found)
}

#[cfg(feature = "mistralrs")]
async fn load_mistralrs(
    engine: EngineOptions,
    tokenizer: Tokenizer,
    options: GenerateOptions,
) -> Result<Box<dyn TextGenerator>> {
    ensure!(
        engine.threads.is_none(),
        "[model] threads: mistral.rs chooses its own; leave it out with engine = \"mistralrs\""
    );
    ensure!(
        engine.cache_mb.is_none(),
        "[model] cache_mb: mistral.rs bounds its own cache; leave it out with engine = \"mistralrs\""
    );
    let engine = laser_engine::MistralEngine::load(&engine, options.batch).await?;
    let runtime = tokio::runtime::Handle::current();
    Ok(Box::new(laser_worker::plain::PlainGenerator::new(engine, runtime, tokenizer, options)))
}

#[cfg(not(feature = "mistralrs"))]
async fn load_mistralrs(_: EngineOptions, _: Tokenizer, _: GenerateOptions) -> Result<Box<dyn TextGenerator>> {
    anyhow::bail!(
        "[model] engine = \"mistralrs\": this laser was built without it; build it with `cargo build --release \
         --features mistralrs`, or choose engine = \"tree\" for Llama, Mistral and Qwen models"
    )
}

fn generate_options(config: &Config, model: &ModelFiles) -> Result<GenerateOptions> {
    let generate = &config.generate;
    Ok(GenerateOptions {
        drafter: config.draft.drafter()?,
        alignment: config.draft.alignment,
        nodes: config.draft.nodes(),
        verification: config.verification.verification()?,
        sampling: config.generate.drawn()?,
        batch: generate.batch,
        step_tokens: generate.step_tokens(config.model.device),
        budget: None,
        max_new_tokens: generate.max_new_tokens,
        end_of_text: model.end_of_text.clone(),
        stop: generate.stop.clone(),
        shared_prefixes: true,
    })
}

pub(crate) fn engine_options(config: &Config, model: &ModelFiles) -> EngineOptions {
    let path = model.path().to_owned();
    let ModelConfig { dtype, ref isq, device, threads, cache_mb, .. } = config.model;
    EngineOptions { path, drafts: None, dtype, isq: isq.clone(), device, threads, cache_mb }
}
