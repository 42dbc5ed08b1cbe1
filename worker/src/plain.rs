//! Plain decoding by mistralrs, for architectures that the tree engine does not own.
//!
//! A step is a single text: when sequences of equal length run at once, mistralrs 0.8.1 mixes up the caches, so one
//! continues with the text of another. Nothing is drafted, so every token is a forward of its own, and log
//! probabilities are unknown (0).

use std::collections::VecDeque;
use std::time::Instant;

use laser_model::Tokenizer;
use laser_schema::audit::Origin;
use tokio::runtime::Handle;

use crate::generate::{
    FAILURES_IN_A_ROW_MAX, Finished, GenerateError, GenerateOptions, Generated, Request, StopReason, TextError,
    TextGenerator, cut_at_stop, whole_characters,
};
use laser_engine::{Completion, EngineError, Finish, MistralEngine};

/// Generates texts with mistralrs itself. Lives on a thread that may block.
#[derive(Debug)]
pub struct PlainGenerator {
    engine: MistralEngine,
    runtime: Handle,
    tokenizer: Tokenizer,
    options: GenerateOptions,
    queue: VecDeque<Request>,
    failures_in_a_row: usize,
}

impl PlainGenerator {
    /// Creates a generator without requests, to be driven from outside `runtime`'s own threads.
    pub fn new(engine: MistralEngine, runtime: Handle, tokenizer: Tokenizer, options: GenerateOptions) -> Self {
        Self { engine, runtime, tokenizer, options, queue: VecDeque::new(), failures_in_a_row: 0 }
    }

    fn generated(&self, mut tokens: Vec<u32>, finish: Finish) -> Result<Generated, TextError> {
        let (mut stop, mut text) = (StopReason::Length, None);
        for length in 1..=tokens.len() {
            text = cut_at_stop(&tokens[..length], &self.options.stop, &self.tokenizer)?;
            if text.is_some() {
                tokens.truncate(length);
                stop = StopReason::Stop;
                break;
            }
        }
        let text = text.map_or_else(|| self.tokenizer.decode(&tokens).map(whole_characters), Ok)?;
        if finish == Finish::Stop && stop == StopReason::Length {
            stop = StopReason::End;
            tokens.extend(self.options.end_of_text.first());
        }
        let step_accepted = vec![0; tokens.len()];
        Ok(Generated {
            text,
            origins: vec![Origin::TARGET; tokens.len()],
            tokens,
            stop,
            step_accepted,
            ..Generated::default()
        })
    }

    fn finish(&mut self, text: Completion, engine_seconds: f64) -> Result<Generated, TextError> {
        self.failures_in_a_row = 0;
        let text = self.generated(text.tokens, text.finish)?;
        Ok(Generated { engine_seconds, ..text })
    }

    /// Returns the row's error, unless the engine has failed too often.
    fn fail(&mut self, error: EngineError) -> Result<TextError, GenerateError> {
        let engine = matches!(error, EngineError::Mistralrs { .. });
        self.failures_in_a_row += usize::from(engine);
        match self.failures_in_a_row {
            FAILURES_IN_A_ROW_MAX.. => Err(GenerateError::Engine(error)),
            _ => Ok((&error).into()),
        }
    }
}

impl TextGenerator for PlainGenerator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn device(&self) -> &str {
        self.engine.device()
    }

    fn batch(&self) -> usize {
        self.options.batch
    }

    fn load(&self) -> usize {
        self.queue.len()
    }

    fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    fn share_prefix(&mut self, _prompts: &[&[u32]]) -> Result<(), EngineError> {
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        let Some(request) = self.queue.pop_front() else {
            return Ok(Vec::new());
        };
        let start = Instant::now();
        let (max, stop) = (self.options.max_new_tokens, &self.options.end_of_text);
        let result = match self.runtime.block_on(self.engine.generate(request.prompt, max, stop)) {
            Ok(text) => self.finish(text, start.elapsed().as_secs_f64()),
            Err(error) => Err(self.fail(error)?),
        };
        Ok(vec![Finished { id: request.id, result }])
    }

    fn reset(&mut self) {
        self.queue.clear();
        self.failures_in_a_row = 0;
    }
}
