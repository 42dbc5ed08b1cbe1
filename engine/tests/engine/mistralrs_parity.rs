//! mistralrs is the oracle: the same weights, its own forward.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use candle_core::{Tensor, quantized::GgmlDType};
use laser_decode::Candidate;
use laser_engine::{EngineOptions, Finish, MistralEngine};
use mistralrs::{
    CustomLogitsProcessor, Model, ModelDType, NormalRequest, Request, RequestMessage, SamplingParams, TextModelBuilder,
    TokenSource,
};

use crate::{
    models::{Random, TinyModel, fixture},
    support::{TOLERANCE, extend, greedy, load},
};

/// Context and logits of every step that mistralrs samples.
type Record = (Vec<u32>, Vec<f32>);

struct Tap(Mutex<Vec<Record>>);

impl CustomLogitsProcessor for Tap {
    fn apply(&self, logits: &Tensor, context: &[u32]) -> candle_core::Result<Tensor> {
        self.0.lock().unwrap().push((context.to_vec(), logits.to_vec1()?));
        Ok(logits.clone())
    }
}

async fn mistralrs_model(directory: &Path) -> Model {
    TextModelBuilder::new(directory.display())
        .with_dtype(ModelDType::F32)
        .with_force_cpu()
        .with_token_source(TokenSource::None)
        .with_prefix_cache_n(None)
        .build()
        .await
        .unwrap()
}

async fn decode(model: &Model, prompt: Vec<u32>, count: usize) -> Vec<Record> {
    let tap = Arc::new(Tap(Mutex::new(Vec::new())));
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let mut sampling = SamplingParams::deterministic();
    sampling.max_len = Some(count);
    let message = RequestMessage::CompletionTokens(prompt);
    let id = model.inner().next_request_id();
    let mut request = NormalRequest::new_simple(message, sampling, sender, id, None, None);
    request.logits_processors = Some(vec![tap.clone()]);
    let requests = model.inner().get_sender(None).unwrap();
    requests.send(Request::Normal(Box::new(request))).await.unwrap();
    receiver.recv().await.unwrap().as_result().unwrap();
    std::mem::take(&mut tap.0.lock().unwrap())
}

/// Log-probabilities agree for our candidates, and the first choice unless the two best are closer than 1e-3.
fn assert_agrees(ours: &[Candidate], logits: &[f32], what: &str) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let normaliser = max + sum.ln() as f32;
    for candidate in ours {
        let theirs = logits[candidate.token as usize] - normaliser;
        let difference = (candidate.log_probability - theirs).abs();
        assert!(difference < TOLERANCE, "{what}: {candidate:?}, mistralrs {theirs}");
    }
    let best = ours[0].token as usize;
    assert!(max - logits[best] < 1e-3, "{what}: we choose {best}, mistralrs another");
}

async fn assert_parity(name: &str, directory: &Path, prompts: u64, count: usize) {
    let model = mistralrs_model(directory).await;
    let mut engine = load(directory);
    for seed in 0..prompts {
        let prompt = Random::new(seed).tokens(20 + 11 * seed as usize);
        let records = decode(&model, prompt.clone(), count).await;
        assert!(!records.is_empty(), "{name}");
        let slot = engine.open(prompt.len() + count).unwrap();
        let mut ours = extend(engine.as_mut(), slot, &prompt);
        for (step, (context, logits)) in records.iter().enumerate() {
            if step > 0 {
                ours = extend(engine.as_mut(), slot, &context[context.len() - 1..]);
            }
            assert_eq!(engine.cached(slot), context.len());
            assert_agrees(&ours, logits, &format!("{name}, prompt {seed}, step {step}"));
        }
        engine.close(slot);
    }
}

#[tokio::test]
async fn the_fixture_decodes_as_in_mistralrs() {
    assert_parity("profile-lm", &fixture(), 4, 48).await;
}

#[tokio::test]
async fn every_architecture_decodes_as_in_mistralrs() {
    for (name, model) in TinyModel::all() {
        let directory = tempfile::tempdir().unwrap();
        model.write_with_tokenizer(directory.path());
        assert_parity(name, directory.path(), 2, 24).await;
    }
}

#[tokio::test]
async fn mistral_engine_returns_exact_tokens() {
    let engine = MistralEngine::load(&EngineOptions::new(fixture()), 4).await.unwrap();
    assert_eq!(engine.max_positions(), 1024);
    let prompts: Vec<Vec<u32>> = (0..4).map(|seed| Random::new(seed).tokens(12 + 5 * seed as usize)).collect();
    let mut tree = load(&fixture());
    for prompt in prompts {
        let completion = engine.generate(prompt.clone(), 30, &[]).await.unwrap();
        let mut plain = greedy(tree.as_mut(), &prompt, 30);
        let end = plain.iter().position(|&token| token == 1);
        plain.truncate(end.unwrap_or(30));
        assert_eq!(completion.tokens, plain);
        let finish = if end.is_some() { Finish::Stop } else { Finish::Length };
        assert_eq!(completion.finish, finish);
    }
}

#[tokio::test]
async fn mistral_engine_runs_gguf_files() {
    for (name, model) in TinyModel::all() {
        if name == "mistral" || name == "llama 3 rope" {
            continue; // Called llama in GGUF.
        }
        let directory = tempfile::tempdir().unwrap();
        model.write_with_tokenizer(directory.path());
        let file = directory.path().join("model.gguf");
        model.write_gguf(&file, GgmlDType::F32);
        let engine = MistralEngine::load(&EngineOptions::new(&file), 1).await.unwrap();
        let prompt = Random::new(3).tokens(23);
        let completion = engine.generate(prompt.clone(), 24, &[]).await;
        let expected = greedy(load(&file).as_mut(), &prompt, 24);
        assert_eq!(completion.unwrap().tokens, expected, "{name}");
    }
}

#[tokio::test]
async fn mistral_engine_stops_at_stop_tokens_and_at_the_end_of_the_context() {
    let engine = MistralEngine::load(&EngineOptions::new(fixture()), 2).await.unwrap();
    let prompt = Random::new(1).tokens(17);
    let plain = engine.generate(prompt.clone(), 10, &[]).await.unwrap().tokens;
    let stop = plain[6];
    let first = plain.iter().position(|&token| token == stop).unwrap();
    let stopped = engine.generate(prompt.clone(), 10, &[stop]).await.unwrap();
    assert_eq!((stopped.tokens.as_slice(), stopped.finish), (&plain[..first], Finish::Stop));

    let nearly_full = Random::new(2).tokens(1020);
    assert!(engine.generate(nearly_full, 10, &[]).await.unwrap().tokens.len() <= 3);
    for (prompt, expected) in [(vec![], "\"0 tokens\""), (vec![5; 1024], "\"1024 tokens\"")] {
        let error = engine.generate(prompt, 10, &[]).await.unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("1024 positions"), "{error}");
    }
    assert_eq!(engine.generate(prompt, 10, &[]).await.unwrap().tokens, plain);
}
